"""Decide, then do: what a policy means for one model on one mesh.

A plan for 4096 ranks is made on a laptop: nothing here touches a tensor's values or a process group. What is decided
stands in a `Plan`, see `plan.py`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardfn.layout.layout import Layout, Leaf
from shardfn.layout.local_sizes import decide_local_sizes, padding_for
from shardfn.layout.mesh import MeshSpec, Roles, axes_of, roles
from shardfn.layout.model_info import BIAS_DIM, ModelInfo, ModuleInfo, ParamInfo, class_name, describe, registered
from shardfn.layout.plan import Bucket, Plan, Unit, first_matches
from shardfn.layout.plan_checks import Draft, ParamRule, Sized, axis_problems, check_policy, conflicts_of, uncomputable
from shardfn.layout.policy import Policy, compile_pattern, first_match, is_in, matches, modules_above
from shardfn.notation import Block, Dim, Factor, ShardError, Sizes, Spec, parse, raise_problems, repeated_axes, see


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
        why = f"plan: expected a Policy, got {type(policy).__name__}; write sf.Policy(rules={{...}})"
        raise see(TypeError(why), "arguments")
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
        return replace(policy, units={_unit_pattern(unit): settings for unit, settings in units.items()})
    if not isinstance(units, Sequence | set | frozenset):
        raise TypeError(f"Policy(units={units!r}): 'auto', patterns, classes, or a callable(name, module)")
    return replace(policy, units=tuple(map(_unit_pattern, units)))


WRAPPER = "_checkpoint_wrapped_module."  # of torch's, for activation checkpointing


def _unit_pattern(unit: Any) -> Any:
    return f"class:{class_name(unit)}" if isinstance(unit, type) else unit


def decide(info: ModelInfo, axes: dict[str, int], policy: Policy) -> Plan:
    """`plan` on a model that is already described."""
    draft = Draft(info, axes, roles(list(axes), policy.batch), policy, Sizes(policy.sizes), [])
    draft = replace(draft, info=_without_ignored(draft))
    info, role, problems = draft.info, draft.role, draft.problems
    rules = _rules(draft)
    # Module -> its parallel forward: the one in the policy, or else that of its class.
    forwards = {module.name: fn for module in info.modules if (fn := registered(module)) is not None}
    forwards |= {path: policy.compute[pattern] for path, pattern in first_matches(policy.compute, info).items()}
    for param in info.params:
        if param.name in rules:
            draft.sizes.add(param.name, rules[param.name][0], param.shape)
    for tensor, problem in draft.sizes.solve():
        rules.pop(tensor, None)  # its layout cannot be decided; the others are still checked
        problems.append(problem)
    members: dict[str, list[Layout]] = {name: [] for name in ("", *_unit_names(draft))}  # by unit
    modules = {module.name: module for module in info.modules}
    inside = {name.removeprefix(WRAPPER): name for name in members}
    kept = _kept_axes(draft, rules, forwards)
    layouts: dict[str, Layout] = {}
    for param in info.params:
        if param.name in rules:
            stays = kept.get(param.name, ())
            layout = _layout(replace(draft, role=role.keeping(stays)), param, *rules[param.name])
            stays = tuple(axis for axis in stays if axis in layout.axes)  # a `?` may have made it whole
            layouts[param.name] = layout = replace(layout, unit=_owner(param, inside), kept=stays)
            members[layout.unit].append(layout)
    problems += uncomputable(draft, layouts, forwards)
    local_sizes = decide_local_sizes(draft, rules)
    check_policy(draft, kept)
    raise_problems("plan", problems)
    # The root unit first, then the others in the model's order; of those without parameters only the ones that cast.
    all_units = (_unit(draft, name, layouts_of_unit, modules.get(name)) for name, layouts_of_unit in members.items())
    units = tuple(unit for unit in all_units if unit.params or (unit.name and (unit.input_dtype or unit.output_dtype)))
    forwards = {path: fn for path, fn in forwards.items() if not _computes_whole(path, layouts, draft)}
    return Plan(axes, role, layouts, units, policy, info, local_sizes=local_sizes, forwards=forwards)


def _computes_whole(module: str, layouts: Mapping[str, Layout], draft: Draft) -> bool:
    """Whether a module that the policy does not name has parameters, of which no compute axis splits any."""
    below = [layout for name, layout in layouts.items() if is_in(name, module)]
    whole = below and not any(axis in layout.axes for layout in below for axis in draft.role.compute)
    return bool(whole) and first_match(draft.policy.compute, [module]) is None


def _kept_axes(draft: Draft, rules: Mapping[str, ParamRule], forwards: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Parameter -> the data axes that split it in its computation too, as the parallel forward of its module asks."""
    kept_axes: dict[str, tuple[str, ...]] = {}
    role, problems = draft.role, draft.problems
    for module in draft.info.modules:
        asked = getattr(forwards.get(module.name), "keeps", ())
        for _, name in module.params:
            named = name in rules and not rules[name][1].startswith("default")
            factors = rules[name][0].factors if named else ()
            kept = tuple(axis for axis in role.data if axis in asked and any(axis in f.axes for f in factors))
            if kept_axes.setdefault(name, kept) != kept:
                problems.append(f"{name}: one tensor of several modules, of which only some compute with a part of it")
            problems += [
                f"{name}: its module computes with a part over '{axis}', which '{factor}' must be split over first"
                for factor in factors
                for axis in kept
                if axis in factor.axes and any(a in role.data for a in factor.axes[: factor.axes.index(axis)])
            ]
    return kept_axes


def _without_ignored(draft: Draft) -> ModelInfo:
    """The model without the parameters that `Policy.ignore` names."""
    info, patterns = draft.info, draft.policy.ignore
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


def _rules(draft: Draft) -> dict[str, ParamRule]:
    """Parameter -> its rule."""
    rules: dict[str, ParamRule] = {}
    policy, problems = draft.policy, draft.problems
    lacking: dict[tuple[str, ...], list[str]] = {}  # axes that the mesh has not -> parameters with them in their rules
    for pattern in policy.rules:
        try:
            compile_pattern(pattern)
        except ShardError as error:
            problems.append(str(error))
    if problems:
        return rules
    for param in draft.info.params:
        problems += conflicts_of(param, policy)
        try:
            rule = _rule(draft, param)
        except ShardError as error:
            problems.append(f"{param.name} {param.shape}: {error}")
            continue
        wrong = axis_problems(draft, rule[0])
        unknown = tuple(sorted({axis for factor in rule[0].factors for axis in factor.axes} - draft.axes.keys()))
        lacking.setdefault(unknown, []).append(param.name)
        if not unknown or len(lacking[unknown]) == 1:
            problems += [f"{param.name}: {why}" for why in wrong]
        if not wrong:
            rules[param.name] = rule
    problems += [
        f"the rules of {len(names) - 1} more parameters name '{', '.join(unknown)}', too. "
        "from_transformers and from_parallelize_plan are told the names of axes by axis= and data_axis="
        for unknown, names in lacking.items()
        if unknown and len(names) > 1
    ]
    rules |= _bias_rules(draft, rules)
    draft.check_patterns("rule", policy.rules, "parameter")
    return rules


def _rule(draft: Draft, param: ParamInfo) -> ParamRule:
    """The rule of a parameter by the first pattern that matches one of its names, or by default."""
    pattern = first_match(draft.policy.rules, param.names)
    if pattern is None:
        spec, source = _default(draft, param)
    else:
        spec = _with_logical_axes(parse(draft.policy.rules[pattern]), draft.policy).expand(len(param.shape))
        source = f"rule {pattern!r}"
    return (spec, source) if param.placed is None else _where_placed(draft, param, spec, source)


def _where_placed(draft: Draft, param: ParamInfo, spec: Spec, source: str) -> ParamRule:
    """A rule with the splits that a DTensor has already, which are those over compute axes."""
    dims, role = list(spec.dims), draft.role
    if compute := [axis for factor in spec.factors for axis in factor.axes if axis in role.compute]:
        raise ShardError(f"the rule '{spec}' splits it over '{compute[0]}', but it is a DTensor split by itself")
    for axis, dim in reversed(param.placed or ()):
        if axis in role.data and dim is None:
            continue  # its modules compute with DTensors on the whole mesh
        if axis not in role.compute:
            why = "splits the batch" if axis in draft.axes else f"is no axis of the mesh {draft.axes}"
            what = f"it is a DTensor over '{axis}', which {why}. Leave out fully_shard, which this does, or give what"
            where = "with parallelize_module shard over the whole mesh, sf.make_mesh(fsdp=2, tp=2), giving it"
            raise ShardError(f"{what} sf.gather(params) returns; {where} mesh['tp']")
        if dim is not None:
            over = prod(draft.axes[a] for a, d in param.placed or () if d == dim)
            if param.shape[dim] % over:
                why = f"split unevenly, {param.shape[dim]} % {over} = {param.shape[dim] % over}"
                raise ShardError(f"it is a DTensor whose dim {dim} is {why}; let parallelize_module leave it whole")
            outer, *others = dims[dim].factors
            dims[dim] = Dim((Block((replace(outer, axes=(axis, *outer.axes)), *others)),))
    return parse(str(replace(spec, dims=tuple(dims)))), f"{source}, on a DTensor"


def _bias_rules(draft: Draft, rules: Mapping[str, ParamRule]) -> dict[str, ParamRule]:
    """The bias of a linear whose weight splits its outputs over a compute axis is split alike, if no rule says how."""
    derived: dict[str, ParamRule] = {}
    default, role = draft.policy.default, draft.role
    placed = {param.name for param in draft.info.params if param.placed is not None}
    for module in draft.info.modules if default != "error" else ():
        names = dict(module.params)
        fused = "in_proj_" if module.kind == "attention" else ""
        weight, bias = names.get(f"{fused}weight", ""), names.get(f"{fused}bias", "")
        at = 0 if fused else BIAS_DIM.get(module.kind)
        if at is None or weight not in rules or bias not in rules or weight in placed or bias in placed:
            continue
        dim = rules[weight][0].dims[at]
        splits = {axis for factor in dim.factors for axis in factor.axes}
        if not splits.intersection(role.compute) or not rules[bias][1].startswith("default"):
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


def _default(draft: Draft, param: ParamInfo) -> ParamRule:
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


def _layout(draft: Draft, param: ParamInfo, spec: Spec, source: str) -> Layout:
    """The layout of one parameter, from its rule and the solved sizes."""
    true = draft.sizes.of(param.name, spec)
    padded = [draft.padded(factor, size) for factor, size in zip(spec.factors, true, strict=True)]
    sizes = iter(padded)
    rule = spec.with_factors(lambda factor: _require_divisible(draft, param, spec, factor, next(sizes)))
    dims = rule.grouped(zip(rule.factors, true, padded, strict=True))
    fused = next((at for at, dim in enumerate(dims) if len(dim) > 1), 0)
    parts = rule.dims[fused].blocks if dims else ()
    names = [f"{param.name}[{part.label or i}]" for i, part in enumerate(parts)] if len(parts) > 1 else [param.name]
    blocks = ([dim[i if at == fused else 0] for at, dim in enumerate(dims)] for i in range(len(names)))
    leaves = tuple(_leaf(draft, name, rule, block) for name, block in zip(names, blocks, strict=True))
    shared = _shared(draft, spec, rule, true)
    return Layout(**vars(param), rule=rule, source=source, leaves=leaves, block_dim=fused, shared=shared)


def _shared(draft: Draft, spec: Spec, rule: Spec, sizes: Sequence[int]) -> tuple[tuple[str, int], ...]:
    """(axis, parts) of every compute axis that a `?` on the outermost factor of dim 0 was denied."""
    if not rule.dims or len(rule.dims[0].blocks) > 1 or rule.factors[0].optional or not spec.factors[0].optional:
        return ()
    return tuple((axis, sizes[0]) for axis in draft.splitting(spec.factors[0].axes))


def _require_divisible(draft: Draft, param: ParamInfo, spec: Spec, factor: Factor, size: int) -> Factor:
    """A factor of a rule with its `?` decided; what is split must divide."""
    compute = [axis for axis in factor.axes if axis in draft.role.compute]
    ways = prod(draft.axes[axis] for axis in (factor.axes if factor.optional else compute))
    if size % ways == 0:
        return factor
    if factor.optional:
        return replace(factor, axes=(), optional=False)
    over = " x ".join(f"{axis}={draft.axes[axis]}" for axis in compute)
    remedies = [] if _counted(factor, draft.policy) else [f"'{factor}?' to replicate it when it does not divide"]
    if factor.name != "_" and not factor.name.isdecimal():
        remedies.append(f"Policy(pad={padding_for(draft, factor, ways)})")
    cure = f"Write {', or '.join(remedies)}" if remedies else "Use a mesh whose axes divide it"
    at = next(at for at, dim in enumerate(spec.dims) if any(each is factor for each in dim.factors))
    draft.problems.append(
        f"{param.name!r} has shape {param.shape}; rule '{spec.source}' splits dim {at} ({factor.name}={size}) over "
        f"{over}, {size} % {ways} = {size % ways}.\n{spec.caret(factor.span)}\n    {cure}."
    )
    return replace(factor, axes=())


def _counted(factor: Factor, policy: Policy) -> bool:
    """Whether `Policy.local_sizes` has a module compute with the part of a factor."""
    texts = (text for by_attribute in policy.local_sizes.values() for text in by_attribute.values())
    return any(re.search(rf"\b{factor.name}\s*@[\s\w@]*+(?!\s*\?)", text) for text in texts)


def _leaf(draft: Draft, name: str, rule: Spec, blocks: Sequence[Sequence[Sized]]) -> Leaf:
    """The stored leaf that is made of one block of each dim."""
    dims = [_flattened(draft, block) for block in blocks]
    stored = [sized for dim in dims for sized in dim]
    factors = (tuple(factor for factor, _, _ in block) for block in blocks)
    new_dims = tuple(replace(dim, blocks=(Block(each),)) for dim, each in zip(rule.dims, factors, strict=True))
    shape, extent = tuple(size for _, _, size in stored), tuple(true for _, true, _ in stored)
    splits, merges = tuple(factor.axes for factor, _, _ in stored), tuple(map(len, dims))
    return Leaf(name, shape, extent, splits, merges, replace(rule, dims=new_dims))


def _flattened(draft: Draft, block: Sequence[Sized]) -> Sequence[Sized]:
    """As one factor when a plain split of the whole dim cuts only between whole outermost factors."""
    (outer, true, padded), *inner = block
    if any(factor.axes or n != stored for factor, n, stored in inner) or (inner and padded % draft.ways(outer)):
        return block
    size = prod(n for _, n, _ in inner)
    return [(outer, true * size, padded * size)]


def _unit_names(draft: Draft) -> list[str]:
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


def _owner(param: ParamInfo, units: Mapping[str, str]) -> str:
    """The deepest unit that holds all names of a parameter, which leave out a wrapper around the model."""
    above = set.intersection(*(modules_above([name]) for name in param.names))
    return units[max(units.keys() & above, key=len, default="")]


def _unit(draft: Draft, name: str, layouts: Sequence[Layout], module: ModuleInfo | None) -> Unit:
    settings = _own_settings(draft.policy, module)
    policy = replace(draft.policy, **{"output_dtype": None} | settings)
    buckets = _buckets(name, layouts, draft.role, policy)
    # The model's inputs are cast already, so only a unit with a setting of its own casts again. Inputs stay as they are
    # where neither the unit nor the policy has a dtype to compute in.
    casts = policy.cast_inputs and ("cast_inputs" in settings or "compute_dtype" in settings)
    casts = casts and not (policy.compute_dtype is None and draft.policy.compute_dtype is None)
    dtypes = {bucket.dtype for bucket in buckets if bucket.dtype.is_floating_point}
    if not layouts and policy.compute_dtype is not None:
        dtypes = {policy.compute_dtype}
    input_dtype = dtypes.pop() if casts and len(dtypes) == 1 else None
    params = tuple(layout.name for layout in layouts)
    regather = policy.regather if name else settings.get("regather", False)
    return Unit(name, params, buckets, regather, input_dtype, policy.output_dtype if name else None)


def _own_settings(policy: Policy, unit: ModuleInfo | None) -> dict[str, Any]:
    """The settings that one unit has of its own; for the root unit those under the name ''."""
    if unit is None or not isinstance(policy.units, Mapping):
        return {}
    if not unit.name:
        return dict(policy.units.get("", {}))
    # Settings of a wrapper for activation checkpointing are those of what it holds, before what that has itself.
    around = replace(unit, name=unit.name.removesuffix(f".{WRAPPER[:-1]}"), classes=())
    given = (policy.units[pattern] for one in (around, unit) for pattern in policy.units if _is_unit(pattern, one))
    return {name: value for values in given for name, value in values.items()}


def _buckets(unit: str, layouts: Sequence[Layout], role: Roles, policy: Policy) -> tuple[Bucket, ...]:
    groups: dict[tuple[tuple[str, ...], tuple[str, ...], torch.dtype], list[Leaf]] = {}
    for layout in layouts:
        cast = policy.compute_dtype if layout.dtype.is_floating_point else None
        for leaf in layout.leaves:
            axes = tuple(axis for axis in role.data if axis in leaf.axes and axis not in layout.kept)
            groups.setdefault((axes, layout.kept, cast or layout.dtype), []).append(leaf)
    buckets = []
    for (axes, kept, dtype), leaves in groups.items():
        # What may travel straight into its place comes first, and large leaves before small ones.
        leaves.sort(key=lambda leaf: (not any(leaf.splits[:1]), -prod(leaf.shape)))
        buckets.append(Bucket(unit, tuple(leaf.name for leaf in leaves), axes, dtype, policy.reduce_dtype, kept))
    return tuple(buckets)
