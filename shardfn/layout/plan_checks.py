"""A plan while it is decided, and what a policy may not ask: settings, axes, names, weights that no module takes."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod
from typing import Literal

from shardfn.layout.layout import Layout
from shardfn.layout.mesh import Roles
from shardfn.layout.model_info import BIAS_DIM, ModelInfo, ModuleInfo, ParamInfo
from shardfn.layout.plan import innermost
from shardfn.layout.policy import BATCH_AXES, Policy, first_match, is_batch_axis, matches
from shardfn.notation import Factor, ShardError, Sizes, Spec, did_you_mean, parse, unknown_axes

Sized = tuple[Factor, int, int]  # a factor of a rule, and its size without and with padding
ParamRule = tuple[Spec, str]  # of one parameter, expanded and with all axes in place; and where it comes from


@dataclass(frozen=True)
class Draft:
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


def conflicts_of(param: ParamInfo, policy: Policy) -> list[str]:
    """A tied parameter whose names match rules that differ."""
    chosen = {name: policy.rules[p] for name in param.names if (p := first_match(policy.rules, [name])) is not None}
    if len(set(chosen.values())) < 2:
        return []
    said = ", ".join(f"{name!r} has {rule!r}" for name, rule in chosen.items())
    return [f"{param.name}: one tensor under several names needs one rule, but {said}"]


def axis_problems(draft: Draft, spec: Spec) -> list[str]:
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


_HOLDERS = {f"torch.nn.modules.container.Parameter{what}" for what in ("List", "Dict")}


def uncomputable(draft: Draft, layouts: Mapping[str, Layout], forwards: Collection[str]) -> list[str]:
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
            continue  # a forward of the user's: the shape-only trace tells whether it can work with parts
        for attribute, layout in ((attribute, layouts[name]) for attribute, name in names.items()):
            if split := draft.splitting(layout.axes):
                where = f"{module.classes[0].rpartition('.')[2]} {module.name or '(the model)'!r}"
                problems.append(
                    f"{layout.name}: rule '{layout.rule}' splits it over {', '.join(split)}, but {where} uses its "
                    f"'{attribute}' in a forward of its own.\n    Take '@{split[0]}' out of the rule, or give the "
                    f"module a parallel forward, Policy(compute={{{module.name!r}: fn}}), or @sf.register its class."
                )
    return problems


def _unlike_heads(draft: Draft, module: ModuleInfo, layouts: Mapping[str, Layout]) -> list[str]:
    """`nn.MultiheadAttention` whose weights before and after the heads are not split over the same compute axes."""
    after = draft.info.module(f"{module.name}.out_proj".removeprefix("."))
    names = dict(module.params) | {f"out_proj.{key}": name for key, name in (after.params if after else ())}
    of_module = {attribute: layouts[name] for attribute, name in names.items() if name in layouts}
    complete = len(of_module) == len(names) and "out_proj.weight" in of_module  # and no part of a model
    if not complete or any(layout.placed is not None for layout in of_module.values()):
        return []
    splits = {key: [draft.splitting(x.model_axes(dim)) for dim in range(len(x.shape))] for key, x in of_module.items()}
    wanted, heads = splits["out_proj.weight"][1], {key: _DIM_OF_HEADS.get(key, 0) for key in splits}
    alike = {key: [wanted if dim == heads[key] else [] for dim in range(len(x))] for key, x in splits.items()}
    if splits == alike:
        return []
    axis = next(axis for dims in splits.values() for split in dims for axis in split)
    rules = ", ".join(f"{attribute} '{layout.rule}'" for attribute, layout in of_module.items())
    return [
        f"{module.name or '(the model)'}: MultiheadAttention computes with whole heads when all of its weights are "
        f"split between them; here {rules}.\n    Write in_proj_weight '(3 heads@{axis} d) _', in_proj_bias "
        f"'(3 heads@{axis} d)' and out_proj.weight '_ (heads@{axis} d)'; of another kdim or vdim q_proj_weight, "
        f"k_proj_weight and v_proj_weight '(heads@{axis} d) _'."
    ]


# Of a weight of `nn.MultiheadAttention`, if not the first; its own keys and values are [1, 1, c], and have none.
_DIM_OF_HEADS = {"out_proj.weight": 1, "out_proj.bias": None, "bias_k": None, "bias_v": None}


def _check_names(draft: Draft) -> None:
    """Names in `sizes`, `pad` and `axes` that look like those of the rules misspelt; axes that the mesh does not have.

    Further names are fine: a policy may serve several models.
    """
    policy, axes, problems = draft.policy, draft.axes, draft.problems
    try:
        factors = {factor.name for rule in policy.rules.values() for factor in parse(rule).factors}
    except ShardError:
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


def check_policy(draft: Draft, kept: Mapping[str, Sequence[str]]) -> None:
    """Settings that do not fit the mesh or the model, of which parameters are `kept` split over axes."""
    _check_names(draft)
    axes, policy, problems = draft.axes, draft.policy, draft.problems
    axis = innermost(draft.role.data, axes)
    units = policy.units.values() if isinstance(policy.units, Mapping) else ()
    counts = dict.fromkeys([policy.regather, *(settings["regather"] for settings in units if "regather" in settings)])
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
