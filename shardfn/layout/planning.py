"""Decide, then do: what a policy means for one model on one mesh.

A plan for 4096 ranks is made on a laptop: nothing here touches a tensor's values or a process group. What is decided
stands in a `Plan`, see `plan.py`.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import prod
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardfn.layout.layout import Layout, Leaf
from shardfn.layout.mesh import MeshSpec, Roles, axes_of, roles
from shardfn.layout.model import BIAS_DIM, ModelInfo, ModuleInfo, ParamInfo, class_name, describe, registered
from shardfn.layout.plan import Bucket, Plan, Unit, first_matches, innermost
from shardfn.layout.policy import (
    BATCH_AXES,
    Policy,
    compile_pattern,
    first_match,
    is_batch_axis,
    is_in,
    matches,
    modules_above,
)
from shardfn.notation import (
    Block,
    Dim,
    Factor,
    ShardError,
    Sizes,
    Spec,
    did_you_mean,
    parse,
    raise_problems,
    repeated_axes,
    unknown_axes,
)

_Sized = tuple[Factor, int, int]  # a factor of a rule, and its size without and with padding
_Rule = tuple[Spec, str]  # of one parameter, expanded and with all axes in place; and where it comes from


def plan(model: nn.Module | Mapping[str, torch.Tensor], mesh: DeviceMesh | MeshSpec, policy: Policy) -> Plan:
    """What `policy` means for `model` on `mesh`; needs no process group, and the model may be on the meta device.

        >>> import shardfn as sf
        >>> from torch import nn
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
        >>> p = sf.plan(model, sf.MeshSpec(fsdp=16, tp=4), sf.Policy(rules={"0.weight": "ff@tp c@fsdp"}))
        >>> p.layouts["0.weight"].leaves[0].local_shape(p.axes, {"fsdp": 0, "tp": 0})
        (64, 4)

    Args:
        model: a module, or a mapping of names to tensors.
        mesh: a `DeviceMesh` with axis names, or a `MeshSpec`.
        policy: rules, units, precision.

    Returns:
        plain data; `print` shows it as a table.

    Raises:
        ShardError: listing every problem at once: unknown axes, rules that match nothing, dims that do not divide,
            sizes that clash, modules that cannot compute with split parameters.
        TypeError: `model`, `mesh` or `policy` is something else.
        ValueError: the mesh has no axis names.
    """
    if not isinstance(policy, Policy):
        raise TypeError(f"plan: expected a Policy, got {type(policy).__name__}")
    axes = axes_of(mesh)
    modules = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
    return decide(describe(model), axes, replace_units(policy, modules))


def replace_units(policy: Policy, modules: Mapping[str, nn.Module]) -> Policy:
    """Resolve a `callable(name, module)` in `Policy.units` to module names, and classes to their names."""
    units = (policy.units,) if isinstance(policy.units, type) else policy.units
    if isinstance(units, str):
        return policy
    if callable(units):
        answers = {name: answer for name, module in modules.items() if (answer := units(name, module))}
        units = {name: answer if isinstance(answer, Mapping) else {} for name, answer in answers.items()}
    if isinstance(units, Mapping):
        return replace(policy, units={_unit_pattern(unit): given for unit, given in units.items()})
    if not isinstance(units, Sequence | set | frozenset):
        raise TypeError(f"Policy(units={units!r}): 'auto', patterns, classes, or a callable(name, module)")
    return replace(policy, units=tuple(map(_unit_pattern, units)))


def _unit_pattern(unit: Any) -> Any:
    return f"class:{class_name(unit)}" if isinstance(unit, type) else unit


@dataclass(frozen=True)
class _Draft:
    """A plan in the making: what it is made of, and what is wrong with that so far."""

    info: ModelInfo
    axes: dict[str, int]
    role: Roles
    policy: Policy
    sizes: Sizes
    problems: list[str]

    def splitting(self, axes: Iterable[str]) -> list[str]:
        """Those that are compute axes of several ranks."""
        return [axis for axis in axes if axis in self.role.compute and self.axes[axis] > 1]

    def ways(self, factor: Factor) -> int:
        """How many parts a rule asks for."""
        return prod(self.axes.get(axis, 1) for axis in factor.axes)

    def padded(self, factor: Factor, size: int) -> int:
        """The size of a factor with the padding that the policy asks for."""
        multiple = self.policy.pad.get(factor.name, 1)
        return -(-size // multiple) * multiple

    def check_patterns(self, where: str, patterns: Iterable[str], kind: Literal["module", "parameter"]) -> None:
        """Note the patterns that match no module, or no parameter."""
        params = (name for param in self.info.params for name in param.names)
        names = list(params) if kind == "parameter" else [module.name for module in self.info.modules]
        known = [name for name in names if name]
        few = f" The model has {', '.join(known[:3])}{', ...' if len(known) > 3 else ''}." if known else ""
        for pattern in patterns:
            if not any(matches(pattern, name) for name in names):
                hint = did_you_mean(pattern, known) or "."
                self.problems.append(f"{where} {pattern!r} matches no {kind}{hint}{few}")


def decide(info: ModelInfo, axes: dict[str, int], policy: Policy) -> Plan:
    """`plan` on a model that is already described."""
    draft = _Draft(info, axes, roles(list(axes), policy.batch), policy, Sizes(policy.sizes), [])
    draft = replace(draft, info=_without_ignored(draft))
    info, role, problems = draft.info, draft.role, draft.problems
    rules = _rules(draft)
    # Module -> its parallel forward, that the policy has for it or else its class.
    forwards = {module.name: fn for module in info.modules if (fn := registered(module)) is not None}
    forwards |= {path: policy.compute[pattern] for path, pattern in first_matches(policy.compute, info).items()}
    for param in info.params:
        if param.name in rules:
            draft.sizes.add(param.name, rules[param.name][0], param.shape)
    for tensor, problem in draft.sizes.solve():
        rules.pop(tensor, None)  # its layout cannot be decided; the others are still checked
        problems.append(problem)
    members: dict[str, list[Layout]] = {name: [] for name in ("", *_unit_names(draft))}  # by unit
    kept = _kept_axes(draft, rules, forwards)
    layouts: dict[str, Layout] = {}
    for param in info.params:
        if param.name in rules:
            stays = kept.get(param.name, ())
            made = _layout(replace(draft, role=role.keeping(stays)), param, *rules[param.name])
            stays = tuple(axis for axis in stays if axis in made.axes)  # a `?` may have made it whole
            layouts[param.name] = made = replace(made, unit=_owner(param, members), kept=stays)
            members[made.unit].append(made)
    problems += _uncomputable(draft, layouts, forwards)
    local_sizes = _local_sizes(draft, rules)
    _check_settings(draft, kept)
    raise_problems("plan", problems)
    # The root unit first, then the others in the model's order, but none without parameters that casts nothing.
    modules = {module.name: module for module in info.modules}
    found = (_unit(draft, name, own, modules.get(name)) for name, own in members.items())
    units = tuple(unit for unit in found if unit.params or (unit.name and (unit.input_dtype or unit.output_dtype)))
    forwards = {path: fn for path, fn in forwards.items() if not _computes_whole(path, layouts, draft)}
    return Plan(axes, role, layouts, units, policy, info, local_sizes=local_sizes, forwards=forwards)


def _computes_whole(module: str, layouts: Mapping[str, Layout], draft: _Draft) -> bool:
    """Whether a module that the policy does not name has parameters, of which no compute axis splits any."""
    below = [layout for name, layout in layouts.items() if is_in(name, module)]
    whole = below and not any(axis in layout.axes for layout in below for axis in draft.role.compute)
    return bool(whole) and first_match(draft.policy.compute, [module]) is None


def _kept_axes(draft: _Draft, rules: Mapping[str, _Rule], forwards: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Parameter -> the data axes that split it in its computation too, as the parallel forward of its module asks."""
    found: dict[str, tuple[str, ...]] = {}
    role, problems = draft.role, draft.problems
    for module in draft.info.modules:
        asked = getattr(forwards.get(module.name), "keeps", ())
        for _, name in module.params:
            named = name in rules and not rules[name][1].startswith("default")
            factors = rules[name][0].factors if named else ()
            kept = tuple(axis for axis in role.data if axis in asked and any(axis in f.axes for f in factors))
            if found.setdefault(name, kept) != kept:
                problems.append(f"{name}: one tensor of several modules, of which only some compute with a part of it")
            problems += [
                f"{name}: its module computes with a part over '{axis}', which '{factor}' must be split over first"
                for factor in factors
                for axis in kept
                if axis in factor.axes and any(a in role.data for a in factor.axes[: factor.axes.index(axis)])
            ]
    return found


def _local_sizes(draft: _Draft, rules: Mapping[str, _Rule]) -> dict[str, dict[str, int]]:
    """Module -> attribute -> the size that one rank has; what the rules split has been checked with them."""
    found: dict[str, dict[str, int]] = {}
    given, compute = draft.policy.local_sizes, draft.role.compute
    factors = [factor for spec, _ in rules.values() for factor in spec.factors if not factor.optional]
    split = {(factor.name, tuple(axis for axis in factor.axes if axis in compute)) for factor in factors}
    draft.check_patterns("Policy.local_sizes:", given, "module")
    for pattern, attribute, text in ((p, name, text) for p, texts in given.items() for name, text in texts.items()):
        try:
            size = _local_size(draft, text, split)
        except ShardError as error:
            draft.problems.append(f"Policy.local_sizes[{pattern!r}][{attribute!r}]: {error}")
            continue
        for module in draft.info.modules:
            if size is not None and matches(pattern, module.name):
                found.setdefault(module.name, {}).setdefault(attribute, size)  # the first match wins
    return found


def _local_size(draft: _Draft, text: str, split: Collection[tuple[str, tuple[str, ...]]]) -> int | None:
    """A product or a ratio of two; None when it does not divide, which the rules that split it alike say too."""
    terms = _terms(text)
    for factor in (factor for spec in terms for factor in spec.factors):
        size = _padded_size(draft, factor)
        if size is not None and size % draft.ways(factor) and (factor.name, factor.axes) in split:
            return None
    local = [_local_product(draft, spec) for spec in terms]
    if len(local) == 1:
        return local[0]
    if pair := _paired(terms):
        _check_pair(draft, *pair)
    ratio, rest = divmod(local[0], local[1])
    if rest:
        raise ShardError(f"{' / '.join(map(str, local))} is no whole number")
    return ratio


def _terms(text: str) -> list[Spec]:
    """Both sides of a ratio, or one product."""
    cut = f"{text}/".index("/")
    return [parse(text, span) for span in [(0, cut), (cut + 1, len(text))][: 1 + text.count("/")]]


def _paired(terms: Sequence[Spec]) -> tuple[Factor, Factor] | None:
    """The factors of a ratio such as `heads@tp / kv@tp?`: so many of the first belong to each of the second."""
    if [len(spec.factors) for spec in terms] != [1, 1]:
        return None
    (over,), (under,) = (spec.factors for spec in terms)
    return (over, under) if under.literal is None or under.axes else None  # a number divides every rank's size alike


def _check_pair(draft: _Draft, over: Factor, under: Factor) -> None:
    """Padding comes last, so that only equal ratios leave each group on the rank of what it belongs to.

    Raises:
        ShardError: on some rank groups would meet what belongs to others.
    """
    many, few = (draft.sizes.get(factor.name) or 0 for factor in (over, under))
    stored = [_padded_size(draft, factor) or 0 for factor in (over, under)]
    ways = draft.ways(under)
    if stored[1] % ways == 0:
        fits = stored[0] * few == many * stored[1] or stored == [many, few]
    else:  # ranks share one, which is stored without padding
        fits = few == 1 or (stored[0] == many and ways % few == 0)
    if not fits:
        said = [
            f"{factor.name}={size}" + (f" padded to {padded}" if padded != size else "")
            for factor, size, padded in zip((over, under), (many, few), stored, strict=True)
        ]
        why = f"over {ways} ranks: on some rank {over.name} would meet {under.name} of others"
        raise ShardError(f"{said[0]} and {said[1]} {why}. Write Policy(pad={_padding(draft, under, ways)}).")


def _padding(draft: _Draft, factor: Factor, ways: int) -> dict[str, int]:
    """What to pad so that a factor divides; a ratio in `Policy.local_sizes` pads what belongs together alike."""
    for text in (text for given in draft.policy.local_sizes.values() for text in given.values()):
        try:
            pair = _paired(_terms(text))
        except ShardError:
            continue  # reported with its entry
        if pair is None or factor.name not in (pair[0].name, pair[1].name):
            continue
        over, under = pair
        many, few = (draft.sizes.get(each.name) or 0 for each in pair)
        if few == 1 and under.optional:
            return {over.name: ways}  # all ranks share it
        if few and many % few == 0:
            return {over.name: many // few * ways, under.name: ways}
    return {factor.name: ways}


def _padded_size(draft: _Draft, factor: Factor) -> int | None:
    """The size of a named or numbered factor as it is stored, unpadded on one rank; None when no rule has the name."""
    size = draft.sizes.get(factor.name)
    return size if size is None or draft.ways(factor) == 1 else draft.padded(factor, size)


def _local_product(draft: _Draft, spec: Spec) -> int:
    """The product of factors, each divided by the axes that split it; those with `?` have one element at least."""
    total = 1
    for factor in spec.factors:
        size = _padded_size(draft, factor)
        if size is None:
            raise ShardError(f"no rule has a dim named '{factor.name}'\n{spec.caret(factor.span)}")
        if unknown := unknown_axes(spec, draft.axes):
            raise ShardError(unknown[0])
        ways = draft.ways(factor)
        if size % ways and not factor.optional:
            why = f"{factor.name}={size} does not divide, {size} % {ways} = {size % ways}"
            raise ShardError(f"{why}\n{spec.caret(factor.span)}")
        total *= max(1, size // ways) if factor.optional else size // ways
    return total


def _without_ignored(draft: _Draft) -> ModelInfo:
    """The model without the parameters that `Policy.ignore` names."""
    info, patterns = draft.info, draft.policy.ignore
    if not patterns:
        return info
    draft.check_patterns("Policy.ignore:", patterns, "parameter")
    out = [p for p in info.params if any(matches(pattern, n) for pattern in patterns for n in p.names)]
    ignored = {param.name for param in out}

    def kept(module: ModuleInfo) -> ModuleInfo:
        params = tuple((attribute, name) for attribute, name in module.params if name not in ignored)
        gone = dict(module.params).get("weight") in ignored  # what has no weight here computes as it is
        return replace(module, params=params, kind="other" if gone else module.kind)

    modules = tuple(map(kept, info.modules))
    params = tuple(param for param in info.params if param.name not in ignored)
    return replace(info, params=params, modules=modules, ignored=tuple(name for param in out for name in param.names))


def _rules(draft: _Draft) -> dict[str, _Rule]:
    """Parameter -> its rule."""
    found: dict[str, _Rule] = {}
    policy, problems = draft.policy, draft.problems
    lacking: dict[tuple[str, ...], list[str]] = {}  # axes that the mesh has not -> parameters with them in their rules
    for pattern in policy.rules:
        try:
            compile_pattern(pattern)
        except ShardError as error:
            problems.append(str(error))
    if problems:
        return found
    for param in draft.info.params:
        problems += _conflicts(param, policy)
        try:
            rule = _rule(draft, param)
        except ShardError as error:
            problems.append(f"{param.name} {param.shape}: {error}")
            continue
        wrong = _axis_problems(draft, rule[0])
        unknown = tuple(sorted({axis for factor in rule[0].factors for axis in factor.axes} - draft.axes.keys()))
        lacking.setdefault(unknown, []).append(param.name)
        if not unknown or len(lacking[unknown]) == 1:
            problems += [f"{param.name}: {why}" for why in wrong]
        if not wrong:
            found[param.name] = rule
    problems += [
        f"the rules of {len(names) - 1} more parameters name '{', '.join(unknown)}', too. "
        "from_transformers and from_parallelize_plan are told the names of axes by axis= and data_axis="
        for unknown, names in lacking.items()
        if unknown and len(names) > 1
    ]
    found |= _bias_rules(draft, found)
    draft.check_patterns("rule", policy.rules, "parameter")
    return found


def _rule(draft: _Draft, param: ParamInfo) -> _Rule:
    """The rule of a parameter by the first pattern that matches one of its names, or by default."""
    pattern = first_match(draft.policy.rules, param.names)
    if pattern is None:
        spec, source = _default(draft, param)
    else:
        spec = _with_logical_axes(parse(draft.policy.rules[pattern]), draft.policy).expand(len(param.shape))
        source = f"rule {pattern!r}"
    return (spec, source) if param.placed is None else _where_placed(draft, param, spec, source)


def _where_placed(draft: _Draft, param: ParamInfo, spec: Spec, source: str) -> _Rule:
    """A rule with the splits that a DTensor has already, which are those over compute axes."""
    dims, role = list(spec.dims), draft.role
    if compute := [axis for factor in spec.factors for axis in factor.axes if axis in role.compute]:
        raise ShardError(f"the rule '{spec}' splits it over '{compute[0]}', but it is a DTensor split by itself")
    for axis, dim in reversed(param.placed or ()):
        if axis in role.data and dim is None:
            continue  # its modules compute with DTensors on the whole mesh
        if axis not in role.compute:
            why = "splits the batch" if axis in draft.axes else f"is no axis of the mesh {draft.axes}"
            raise ShardError(
                f"it is a DTensor over '{axis}', which {why}. Shard over the whole mesh, with that axis by its name, "
                "such as sf.make_mesh(fsdp=2, tp=2) whose mesh['tp'] parallelize_module was given"
            )
        if dim is not None:
            over = prod(draft.axes[a] for a, d in param.placed or () if d == dim)
            if param.shape[dim] % over:
                why = f"split unevenly, {param.shape[dim]} % {over} = {param.shape[dim] % over}"
                raise ShardError(f"it is a DTensor whose dim {dim} is {why}; let parallelize_module leave it whole")
            outer, *others = dims[dim].factors
            split = replace(outer, axes=(axis, *outer.axes))
            dims[dim] = Dim((Block((split, *others)),))
    return parse(str(replace(spec, dims=tuple(dims)))), f"{source}, on a DTensor"


def _conflicts(param: ParamInfo, policy: Policy) -> list[str]:
    """A tied parameter whose names match rules that differ."""
    chosen = {name: policy.rules[p] for name in param.names if (p := first_match(policy.rules, [name])) is not None}
    if len(set(chosen.values())) < 2:
        return []
    said = ", ".join(f"{name!r} has {rule!r}" for name, rule in chosen.items())
    return [f"{param.name}: one tensor under several names needs one rule, but {said}"]


def _bias_rules(draft: _Draft, found: Mapping[str, _Rule]) -> dict[str, _Rule]:
    """The bias of a linear whose weight splits its outputs over a compute axis is split alike, if no rule says how."""
    derived: dict[str, _Rule] = {}
    default, role = draft.policy.default, draft.role
    placed = {param.name for param in draft.info.params if param.placed is not None}
    for module in draft.info.modules if default != "error" else ():
        names = dict(module.params)
        fused = "in_proj_" if module.kind == "attention" else ""
        weight, bias = names.get(f"{fused}weight", ""), names.get(f"{fused}bias", "")
        at = 0 if fused else BIAS_DIM.get(module.kind)
        if at is None or weight not in found or bias not in found or weight in placed or bias in placed:
            continue
        dim = found[weight][0].dims[at]
        splits = {axis for factor in dim.factors for axis in factor.axes}
        if not splits.intersection(role.compute) or not found[bias][1].startswith("default"):
            continue
        (factor, *others), words = dim.factors, str(dim)
        # A `?` would then ask about more axes than the weight's does.
        if default == "auto" and not others and not factor.optional and not splits.intersection(role.data):
            words = str(replace(factor, axes=(*factor.axes, *role.shardable)))
        derived[bias] = (parse(words), f"the rule of '{weight}'")
    return derived


def _with_logical_axes(spec: Spec, policy: Policy) -> Spec:
    """Put the axes of `Policy.axes` on the factors that have none of their own."""

    def split(factor: Factor) -> Factor:
        axes = policy.axes.get(factor.name, ())
        return factor if factor.axes else replace(factor, axes=(axes,) if isinstance(axes, str) else tuple(axes))

    out = spec.with_factors(split)
    for problem in repeated_axes(out):
        raise ShardError(problem)
    return out


def _default(draft: _Draft, param: ParamInfo) -> _Rule:
    """The rule of a parameter that no pattern matches; sizes stand as numbers."""
    policy, split = draft.policy, draft.role.shardable
    if policy.default == "error":
        raise ShardError("no rule matches it, and Policy(default='error') asks for one; add a rule, '...' replicates")
    words = [str(size) for size in param.shape]
    if policy.default == "auto" and param.shape and prod(param.shape) >= max(policy.min_size, 1):
        ways = prod(draft.axes[axis] for axis in split)
        rests = [size % ways for size in param.shape]
        # The first dim if it divides, else the largest that does, else the largest.
        dim = min(range(len(words)), key=lambda d: (rests[d] > 0, d > 0 and not rests[d], -param.shape[d]))
        words[dim] = "@".join((words[dim], *split))
    return parse(" ".join(words)), f"default {policy.default!r}"


def _axis_problems(draft: _Draft, spec: Spec) -> list[str]:
    """Axes that the mesh lacks, that may not split weights, or that nest the wrong way round."""
    role, problems = draft.role, unknown_axes(spec, draft.axes)
    if spec.partial:
        sums = ",".join(spec.partial)
        problems.append(f"a parameter cannot be a pending sum (+{sums})\n{spec.caret(spec.partial_span)}")
    for factor in spec.factors:
        marked = spec.caret(factor.span)
        problems += [
            f"weights never shard over '{axis}', which only splits the batch; leave '@{axis}' out\n{marked}"
            for axis in factor.axes
            if axis in role.data and axis not in role.shardable
        ]
        ordered = sorted((axis for axis in factor.axes if axis in draft.axes), key=role.storage.index)
        if len(ordered) == len(factor.axes) and ordered != list(factor.axes):
            right = "@".join((factor.name, *ordered))
            why = f"axes nest compute axes first, then data axes, each in the mesh's order; write '{right}'"
            problems.append(f"{why}\n{marked}")
    return problems


def _layout(draft: _Draft, param: ParamInfo, spec: Spec, source: str) -> Layout:
    """The layout of one parameter, from its rule and the solved sizes."""
    true = draft.sizes.of(param.name, spec)
    padded = [draft.padded(factor, size) for factor, size in zip(spec.factors, true, strict=True)]
    sizes = iter(padded)
    rule = spec.with_factors(lambda factor: _resolve(draft, param, spec, factor, next(sizes)))
    dims = rule.grouped(zip(rule.factors, true, padded, strict=True))
    fused = next((at for at, dim in enumerate(dims) if len(dim) > 1), 0)
    parts = rule.dims[fused].blocks if dims else ()
    names = [f"{param.name}[{part.label or i}]" for i, part in enumerate(parts)] if len(parts) > 1 else [param.name]
    blocks = ([dim[i if at == fused else 0] for at, dim in enumerate(dims)] for i in range(len(names)))
    leaves = tuple(_leaf(draft, name, rule, own) for name, own in zip(names, blocks, strict=True))
    shared = _shared(draft, spec, rule, true)
    return Layout(**vars(param), rule=rule, source=source, leaves=leaves, block_dim=fused, shared=shared)


def _shared(draft: _Draft, spec: Spec, rule: Spec, sizes: Sequence[int]) -> tuple[tuple[str, int], ...]:
    """(axis, parts) of every compute axis that a `?` on the outermost factor of dim 0 was denied."""
    if not rule.dims or len(rule.dims[0].blocks) > 1:
        return ()
    asked, given = spec.factors[0], rule.factors[0]
    denied = set(asked.axes) - set(given.axes) if asked.optional else ()
    return tuple((axis, sizes[0]) for axis in draft.splitting(asked.axes) if axis in denied)


def _resolve(draft: _Draft, param: ParamInfo, spec: Spec, factor: Factor, size: int) -> Factor:
    """A factor of a rule with its `?` decided; what is split must divide."""
    compute = [axis for axis in factor.axes if axis in draft.role.compute]
    ways = prod(draft.axes[axis] for axis in (factor.axes if factor.optional else compute))
    if size % ways == 0:
        return factor
    if factor.optional:
        return replace(factor, axes=(), optional=False)
    over = " x ".join(f"{axis}={draft.axes[axis]}" for axis in compute)
    remedies = [] if _counted(factor, draft.policy) else [f"'{factor}?' to replicate it when it does not divide"]
    if factor.literal is None and factor.name != "_":
        remedies.append(f"Policy(pad={_padding(draft, factor, ways)})")
    cure = f"Write {', or '.join(remedies)}" if remedies else "Use a mesh whose axes divide it"
    at = next(at for at, dim in enumerate(spec.dims) if any(each is factor for each in dim.factors))
    draft.problems.append(
        f"{param.name!r} has shape {param.shape}; rule '{spec.source}' splits dim {at} ({factor.name}={size}) over "
        f"{over}, {size} % {ways} = {size % ways}.\n{spec.caret(factor.span)}\n    {cure}."
    )
    return replace(factor, axes=())


def _counted(factor: Factor, policy: Policy) -> bool:
    """Whether `Policy.local_sizes` has a module compute with the part of a factor."""
    texts = (text for given in policy.local_sizes.values() for text in given.values())
    return any(re.search(rf"\b{factor.name}\s*@[\s\w@]*+(?!\s*\?)", text) for text in texts)


def _leaf(draft: _Draft, name: str, rule: Spec, blocks: Sequence[Sequence[_Sized]]) -> Leaf:
    """The stored leaf that is made of one block of each dim."""
    dims = [_flattened(draft, block) for block in blocks]
    stored = [sized for dim in dims for sized in dim]
    factors = (tuple(factor for factor, _, _ in block) for block in blocks)
    own = tuple(replace(dim, blocks=(Block(each),)) for dim, each in zip(rule.dims, factors, strict=True))
    shape, extent = tuple(size for _, _, size in stored), tuple(true for _, true, _ in stored)
    splits, merges = tuple(factor.axes for factor, _, _ in stored), tuple(map(len, dims))
    return Leaf(name, shape, extent, splits, merges, replace(rule, dims=own))


def _flattened(draft: _Draft, block: Sequence[_Sized]) -> Sequence[_Sized]:
    """As one factor when a plain split of the whole dim cuts only between whole outermost factors."""
    (outer, true, padded), *inner = block
    if any(factor.axes or n != stored for factor, n, stored in inner) or (inner and padded % draft.ways(outer)):
        return block
    size = prod(n for _, n, _ in inner)
    return [(outer, true * size, padded * size)]


def _unit_names(draft: _Draft) -> list[str]:
    """Names of the modules that `Policy.units` asks for, in the model's order."""
    modules, units = draft.info.modules, draft.policy.units
    if not modules:
        return []
    if units == "auto":
        return _auto_units(modules)
    wanted = (units,) if isinstance(units, str) else tuple(units)
    unknown = (pattern for pattern in wanted if not any(_is_unit(pattern, module) for module in modules))
    draft.check_patterns("Policy.units:", unknown, "module")
    return [m.name for m in modules if m.name and any(_is_unit(pattern, m) for pattern in wanted)]


def _is_unit(pattern: str, module: ModuleInfo) -> bool:
    if pattern.startswith("class:"):
        return pattern.removeprefix("class:") in module.classes
    return matches(pattern, module.name)


def _auto_units(modules: Sequence[ModuleInfo]) -> list[str]:
    """Members of the outermost lists of like modules.

    Lists inside a unit (experts, branches) do not make units of their own: a rank that skips one of them would leave
    the others waiting in its all-gather.
    """
    units: list[str] = []
    lists = {m.name for m in modules if m.list_of}
    for name in (module.name for module in modules if module.name):
        parent, _, leaf = name.rpartition(".")
        if parent in lists and leaf.isdecimal() and modules_above([name]).isdisjoint(units):
            units.append(name)
    return units


def _owner(param: ParamInfo, units: Mapping[str, object]) -> str:
    """The deepest unit that holds all names of a parameter."""
    return max(units.keys() & set.intersection(*(modules_above([name]) for name in param.names)), key=len, default="")


def _unit(draft: _Draft, name: str, own: Sequence[Layout], module: ModuleInfo | None) -> Unit:
    settings = _own_settings(draft.policy, module)
    there = replace(draft.policy, **{"output_dtype": None} | settings)
    buckets = _buckets(name, own, draft.role, there)
    # The inputs of the whole model are cast already: only a unit that differs does it again. Without a dtype to compute
    # in, of the policy or its own, inputs stay as they are.
    casts = there.cast_inputs and ("cast_inputs" in settings or "compute_dtype" in settings)
    casts = casts and not (there.compute_dtype is None and draft.policy.compute_dtype is None)
    dtypes = {bucket.dtype for bucket in buckets if bucket.dtype.is_floating_point}
    if not own and there.compute_dtype is not None:
        dtypes = {there.compute_dtype}
    given = dtypes.pop() if casts and len(dtypes) == 1 else None
    params = tuple(layout.name for layout in own)
    regather = there.regather if name else settings.get("regather", False)
    return Unit(name, params, buckets, regather, given, there.output_dtype if name else None)


def _own_settings(policy: Policy, unit: ModuleInfo | None) -> dict[str, Any]:
    """The settings that one unit has of its own; for the root unit those under the name ''."""
    if unit is None or not isinstance(policy.units, Mapping):
        return {}
    own = (given for name, given in policy.units.items() if (_is_unit(name, unit) if unit.name else name == ""))
    return {name: value for given in own for name, value in given.items()}


def _buckets(unit: str, layouts: Sequence[Layout], role: Roles, policy: Policy) -> tuple[Bucket, ...]:
    groups: dict[tuple[tuple[str, ...], tuple[str, ...], torch.dtype], list[Leaf]] = {}
    for layout in layouts:
        cast = policy.compute_dtype if layout.dtype.is_floating_point else None
        for leaf in layout.leaves:
            axes = tuple(axis for axis in role.data if axis in leaf.axes and axis not in layout.kept)
            groups.setdefault((axes, layout.kept, cast or layout.dtype), []).append(leaf)
    found = []
    for (axes, kept, dtype), leaves in groups.items():
        # What may travel straight into its place comes first, and large leaves before small ones.
        leaves.sort(key=lambda leaf: (not any(leaf.splits[:1]), -prod(leaf.shape)))
        found.append(Bucket(unit, tuple(leaf.name for leaf in leaves), axes, dtype, policy.reduce_dtype, kept))
    return tuple(found)


_HOLDERS = {f"torch.nn.modules.container.Parameter{what}" for what in ("List", "Dict")}


def _uncomputable(draft: _Draft, layouts: Mapping[str, Layout], forwards: Collection[str]) -> list[str]:
    """Modules that own a parameter split over a compute axis without a forward that can work with its part."""
    problems, read_by = [], set[str]()  # modules whose weights are read by the one that they are in
    for module in draft.info.modules:
        names = {attr: name for attr, name in module.params if name in layouts and layouts[name].placed is None}
        own_forward = module.name in forwards
        if module.kind == "attention" and not own_forward:
            read_by.add(f"{module.name}.out_proj".removeprefix("."))
            problems += _unlike_heads(draft, module, layouts)
        bias, weight = (layouts.get(names.get(attribute, "")) for attribute in ("bias", "weight"))
        if module.kind in BIAS_DIM and bias is not None and weight is not None:
            dims = ((bias, 0), (weight, BIAS_DIM[module.kind]))
            have, want = (draft.splitting(layout.model_axes(dim)) for layout, dim in dims)
            if have != want:
                outputs = f"the outputs of '{weight.name}' ('{weight.rule}'): {', '.join(want) or 'none'}"
                problems.append(f"{bias.name}: rule '{bias.rule}' must split it over the compute axes of {outputs}")
        if module.kind != "other" or own_forward or module.name in read_by or module.classes[0] in _HOLDERS:
            continue  # a holder has no forward
        if not module.classes[0].startswith("torch.nn."):
            continue  # a forward of the user's: the run without data tells whether it can work with parts
        for attribute, layout in ((attribute, layouts[name]) for attribute, name in names.items()):
            if split := draft.splitting(layout.axes):
                where = f"{module.classes[0].rpartition('.')[2]} {module.name or '(the model)'!r}"
                problems.append(
                    f"{layout.name}: rule '{layout.rule}' splits it over {', '.join(split)}, but {where} uses its "
                    f"'{attribute}' in a forward of its own.\n    Take '@{split[0]}' out of the rule, use nn.Linear or "
                    "nn.Embedding there, or give the module a parallel forward: "
                    f"Policy(compute={{{module.name!r}: fn}}), or @sf.register for its class."
                )
    return problems


def _unlike_heads(draft: _Draft, module: ModuleInfo, layouts: Mapping[str, Layout]) -> list[str]:
    """`nn.MultiheadAttention` whose weights before and after the heads are not split over the same compute axes."""
    after = draft.info.module(f"{module.name}.out_proj".removeprefix("."))
    names = dict(module.params) | {f"out_proj.{key}": name for key, name in (after.params if after else ())}
    found = {attribute: layouts[name] for attribute, name in names.items() if name in layouts}
    complete = len(found) == len(names) and "out_proj.weight" in found  # and no part of a model
    if not complete or any(layout.placed is not None for layout in found.values()):
        return []
    splits = {key: [draft.splitting(x.model_axes(dim)) for dim in range(len(x.shape))] for key, x in found.items()}
    wanted, heads = splits["out_proj.weight"][1], {key: _DIM_OF_HEADS.get(key, 0) for key in splits}
    alike = {key: [wanted if dim == heads[key] else [] for dim in range(len(x))] for key, x in splits.items()}
    if splits == alike:
        return []
    axis = next(axis for dims in splits.values() for split in dims for axis in split)
    rules = ", ".join(f"{attribute} '{layout.rule}'" for attribute, layout in found.items())
    return [
        f"{module.name or '(the model)'}: MultiheadAttention computes with whole heads when all of its weights are "
        f"split between them; here {rules}.\n    Write in_proj_weight '(3 heads@{axis} d) _', in_proj_bias "
        f"'(3 heads@{axis} d)' and out_proj.weight '_ (heads@{axis} d)'; of another kdim or vdim q_proj_weight, "
        f"k_proj_weight and v_proj_weight '(heads@{axis} d) _'."
    ]


# Of a weight of `nn.MultiheadAttention`, if not the first; its own keys and values are [1, 1, c], and have none.
_DIM_OF_HEADS = {"out_proj.weight": 1, "out_proj.bias": None, "bias_k": None, "bias_v": None}


def _check_names(draft: _Draft) -> None:
    """Names in `sizes`, `pad` and `axes` that look like those of the rules misspelt; axes that the mesh does not have.

    Further names are fine: a policy may serve several models.
    """
    policy, axes, problems = draft.policy, draft.axes, draft.problems
    factors: set[str] = set()
    for rule in policy.rules.values():
        try:
            factors |= {factor.name for factor in parse(rule).factors}
        except (ShardError, TypeError):
            return  # reported with its rule
    for field_name in ("sizes", "pad", "axes"):
        for name in getattr(policy, field_name):
            typo = next(iter(get_close_matches(name, sorted(factors - {name}), 1, 0.8)), None)
            if name not in factors and typo and re.sub(r"\d", "", typo) != re.sub(r"\d", "", name):
                problems.append(f"Policy.{field_name}: no rule has a dim named '{name}'; did you mean '{typo}'?")
    for name, split in policy.axes.items():
        for axis in (split,) if isinstance(split, str) else split:
            if axis not in axes:
                problems.append(f"Policy.axes[{name!r}]: unknown mesh axis '{axis}'{did_you_mean(axis, axes) or '.'}")
    usual = BATCH_AXES if set(BATCH_AXES) <= set(policy.batch) else ()  # of which a mesh has some
    for pattern in (pattern for pattern in policy.batch if pattern not in usual):
        if not any(is_batch_axis(axis, [pattern]) for axis in axes):
            hint = did_you_mean(pattern, axes) or "."
            problems.append(f"Policy.batch: the mesh {axes} has no axis '{pattern}'{hint}")


def _check_settings(draft: _Draft, kept: Mapping[str, Sequence[str]]) -> None:
    """Settings that do not fit the mesh or the model, of which parameters are `kept` split over axes."""
    _check_names(draft)
    axes, policy, problems = draft.axes, draft.policy, draft.problems
    axis = innermost(draft.role.data, axes)
    own = policy.units.values() if isinstance(policy.units, Mapping) else ()
    counts = dict.fromkeys([policy.regather, *(settings["regather"] for settings in own if "regather" in settings)])
    if any(type(count) is int for count in counts) and any(axes[axis] > 1 for over in kept.values() for axis in over):
        why = "weights of experts differ between neighbouring ranks, which keep parts for each other"
        problems.append(f"Policy(regather=n): {why}; use True or False")
    for count in counts:
        if count and not isinstance(count, bool) and axis is not None and axes[axis] % count:
            size = f"{axis}={axes[axis]}, {axes[axis]} % {count} = {axes[axis] % count}"
            problems.append(f"Policy(regather={count}): a part over {count} ranks is kept, which must divide {size}")
    for kind in ("acts", "compute") if draft.info.modules else ():
        draft.check_patterns(f"Policy.{kind}:", getattr(policy, kind), "module")
    for pattern, rule in policy.acts.items():
        try:
            unknown = unknown_axes(parse(rule), axes)
        except ShardError as error:
            unknown = [str(error)]
        problems += [f"Policy.acts[{pattern!r}]: {problem}" for problem in unknown]
