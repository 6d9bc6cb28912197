"""Ready-made policies: the usual forms of data parallelism, and what other libraries' plans mean here.

Every preset returns an ordinary `Policy`: merge it with `|`, or pass the fields that differ.

    preset                      weights          gradients        gathers per step
    ddp()                       whole            all-reduced      none
    zero2()                     over fsdp        reduce-scattered once
    fsdp(), hsdp()              over fsdp        reduce-scattered twice (again in backward)
    gathered(policy)            whole            all-reduced      none: for inference
"""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import parallel
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from shardfn._torch import function_of_custom, wrapped_by
from shardfn.layout import Policy, batch_with, is_batch_axis
from shardfn.notation import ShardError, Spec, parse, raise_problems

# Styles of torch that split weights, and those that say how inputs and outputs lie.
_OF_LAYERS = parallel.ColwiseParallel | parallel.RowwiseParallel
_OF_BOUNDARIES = parallel.PrepareModuleInput | parallel.PrepareModuleOutput | parallel.PrepareModuleInputOutput


def fsdp(**overrides: Any) -> Policy:
    """Fully sharded (ZeRO-3): every parameter over the mesh's `fsdp` axis, gathered for use and freed again.

    This is what a bare `Policy()` means; `dp`, `data`, `batch`, `shard` and `dp_shard` are other names for the axis.

        >>> import shardfn as sf
        >>> from shardfn.policies import fsdp
        >>> sf.plan(nn.Linear(8, 6), sf.MeshSpec(fsdp=2), fsdp(compute_dtype=torch.bfloat16)).bytes_per_rank
        108

    Args:
        overrides: fields of `Policy`.

    Returns:
        the policy.

    Raises:
        TypeError: `Policy` has no such field.
    """
    return Policy(**overrides)


def hsdp(**overrides: Any) -> Policy:
    """Fully sharded inside a group, replicated between groups: for a mesh such as `make_mesh(replicate=2, fsdp=8)`.

    The same policy as `fsdp()`, because the roles come from the names of the axes: `replicate`, `dp_replicate` and
    `*_replicate` split the batch only, and gradients are summed over them after their reduce-scatter.

        >>> import shardfn as sf
        >>> from shardfn.policies import hsdp
        >>> p = sf.plan(nn.Linear(8, 6), sf.MeshSpec(replicate=2, fsdp=2), hsdp())
        >>> print(p.explain("weight"))
        weight (6, 8) float32: 6@fsdp 8, by default 'auto'
          local (3, 8), 96 bytes per rank
          forward: all_gather over fsdp; backward: reduce_scatter over fsdp, all_reduce over replicate

    Args:
        overrides: fields of `Policy`.

    Returns:
        the policy.
    """
    return fsdp(**overrides)


def ddp(**overrides: Any) -> Policy:
    """Replicated: every rank holds all parameters, and gradients are averaged over the data axes.

        >>> import shardfn as sf
        >>> from shardfn.policies import ddp
        >>> p = sf.plan(nn.Linear(8, 6), sf.MeshSpec(dp=2), ddp())
        >>> p.bytes_per_rank, str(p.layouts["weight"].rule)
        (216, '6 8')

    Args:
        overrides: fields of `Policy`; rules still split what they name.

    Returns:
        the policy.
    """
    return Policy(default="replicate") | Policy(**overrides)


def zero2(**overrides: Any) -> Policy:
    """Sharded between steps: weights are gathered once a step and kept until backward is done with them.

    One all-gather less a bucket than `fsdp()`, for the memory of the gathered weights.

        >>> from shardfn.policies import zero2
        >>> zero2().regather, zero2(reduce_dtype=torch.float32).reduce_dtype
        (False, torch.float32)

    Args:
        overrides: fields of `Policy`.

    Returns:
        the policy.
    """
    return Policy(regather=False) | Policy(**overrides)


def gathered(policy: Policy) -> Policy:
    """The same layout with whole weights over the data axes, for inference: `apply` then gathers nothing.

    `sf.reshard(params, gathered(params.plan.policy))` gathers once, before a model generates many tokens. Splits over
    compute axes stay.

        >>> import shardfn as sf
        >>> from shardfn.policies import gathered
        >>> gathered(sf.Policy(rules={"up.weight": "ff@tp@fsdp c", "o.weight": "c@fsdp (heads@tp d)"})).rules
        {'up.weight': 'ff@tp c', 'o.weight': 'c (heads@tp d)'}

    Args:
        policy: any policy; its `batch` says which axes are data axes.

    Returns:
        the policy.
    """

    def whole(spec: Spec) -> Spec:
        return spec.without([a for factor in spec.factors for a in factor.axes if is_batch_axis(a, policy.batch)])

    rules = {pattern: str(whole(parse(rule))) for pattern, rule in policy.rules.items()}
    axes = {name: (names,) if isinstance(names, str) else names for name, names in policy.axes.items()}
    kept = {name: tuple(x for x in names if not is_batch_axis(x, policy.batch)) for name, names in axes.items()}
    changes = {"rules": rules, "axes": {name: names for name, names in kept.items() if names}, "default": "replicate"}
    return Policy(**{name: getattr(policy, name) for name in policy.given} | changes)


# ---------------------------------------------------------------------------------------------------------------------
# FSDP1's wrap policies


def from_wrap_policy(fn: Any) -> Policy:
    """The units that an FSDP1 `auto_wrap_policy` would wrap.

    A function is asked as FSDP1 asks it: from the model down, `fn(module=..., recurse=True, nonwrapped_numel=...)`
    whether to look inside, and on the way up with `recurse=False` whether to wrap, where `nonwrapped_numel` leaves out
    what was wrapped inside. The model itself is the root unit and is never asked the second question.

        >>> from functools import partial
        >>> import shardfn as sf
        >>> from shardfn.policies import from_wrap_policy
        >>> from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
        >>> policy = from_wrap_policy(partial(size_based_auto_wrap_policy, min_num_params=100))
        >>> model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 2), nn.Linear(2, 16), nn.Linear(16, 16))
        >>> [unit.name for unit in sf.plan(model, sf.MeshSpec(fsdp=2), policy).units]
        ['', '0', '3']

    Args:
        fn: `size_based_auto_wrap_policy`, `transformer_auto_wrap_policy`, `lambda_auto_wrap_policy` (each in a
            `functools.partial` with its arguments), a `ModuleWrapPolicy`, a `CustomPolicy`, or a function of your own.

    Returns:
        a policy with `units` set; merge it with others by `|`.

    Raises:
        TypeError: `fn` is none of these.
        ShardError: when a plan is made: a `CustomPolicy` returns settings for one module.
    """
    if isinstance(fn, CustomPolicy):
        return Policy(units=_units_of(lambda root: _chosen(root, function_of_custom(fn))))
    if not callable(fn):
        raise TypeError(f"from_wrap_policy: expected an auto_wrap_policy of FSDP1, got {type(fn).__name__}")
    return Policy(units=_units_of(lambda root: wrapped_by(fn, root)))


def _units_of(choose: Callable[[nn.Module], list[nn.Module]]) -> Callable[[str, nn.Module], bool]:
    """`Policy.units` for a choice that needs the whole model: made when the root comes, which is first, by its name."""
    chosen = set[int]()

    def is_unit(name: str, module: nn.Module) -> bool:
        if not name:
            chosen.clear()
            chosen.update(id(wrapped) for wrapped in choose(module) if wrapped is not module)
        return id(module) in chosen

    return is_unit


def _chosen(root: nn.Module, fn: Callable[[Any], Any]) -> list[nn.Module]:
    """The modules for which a `CustomPolicy`'s function says True."""
    chosen = []
    for name, module in root.named_modules():
        answer = fn(module)
        if not isinstance(answer, bool | dict):
            raise TypeError(f"from_wrap_policy: CustomPolicy returned {answer!r} for {name!r}; True, False or a dict")
        if isinstance(answer, dict) and answer:
            why = f"CustomPolicy returned settings {sorted(answer)} for {name or '(the model)'!r}"
            raise ShardError(f"from_wrap_policy: {why}. Return True, and set them for all units in Policy.")
        if answer:
            chosen.append(module)
    return chosen


# ---------------------------------------------------------------------------------------------------------------------
# JAX's lists of rules


def from_regex(rules: Sequence[tuple[str, str | Sequence[str | Sequence[str] | None]]]) -> Policy:
    """Rules from a list of (regular expression, spec), as JAX code has them.

    An expression matches a parameter when it is found anywhere in its name; the first match wins. A spec is what
    `PartitionSpec` takes, one entry a dim: the axis that splits it, several of them, or None; dims without an entry are
    whole. It may also be a rule.

        >>> from shardfn.policies import from_regex
        >>> from_regex([("w[qkv].weight", ("tp", "fsdp")), ("norm", ()), (".*", "...")]).rules
        {'re:.*(?:w[qkv].weight).*': '_@tp _@fsdp ...', 're:.*(?:norm).*': '...', 're:.*(?:.*).*': '...'}

    Args:
        rules: the list, in order.

    Returns:
        a policy with `rules` only.

    Raises:
        ShardError: when a plan is made: an expression that cannot be read, one that matches no parameter.
        TypeError: an entry is no pair of an expression and a spec.
    """
    by_pattern: dict[str, str] = {}
    for entry in rules:
        if not isinstance(entry, tuple | list) or len(entry) != 2 or not isinstance(entry[0], str):
            raise TypeError(f"from_regex: expected (regular expression, spec), got {entry!r}")
        by_pattern.setdefault(f"re:.*(?:{entry[0]}).*", _rule_of_spec(entry[1]))
    return Policy(rules=by_pattern)


def _rule_of_spec(spec: Any) -> str:
    """`("tp", None)` as `"_@tp _ ..."`."""
    if isinstance(spec, str):
        return spec
    if not isinstance(spec, tuple | list):
        raise TypeError(f"from_regex: expected a rule or one entry a dim, got {spec!r}")
    words = []
    for axes in spec:
        several = (axes,) if isinstance(axes, str) else axes if axes is not None else ()
        if not isinstance(several, tuple | list) or not all(isinstance(axis, str) for axis in several):
            raise TypeError(f"from_regex: {axes!r} in {spec!r} is no axis, no axes and not None")
        words.append("@".join(["_", *several]))
    return " ".join([*words, "..."])


# ---------------------------------------------------------------------------------------------------------------------
# Tensor-parallel plans of torch


def from_parallelize_plan(
    plan: ParallelStyle | Mapping[str, ParallelStyle], *, axis: str = "tp", data_axis: str | None = "fsdp"
) -> Policy:
    """Rules for what torch's `parallelize_module(model, mesh, plan)` would split.

    A column-parallel linear splits its outputs over `axis`, a row-parallel one its inputs, and the other dim is sharded
    over `data_axis`; the collectives between them follow from the rules, and biases from their weights. Modules compute
    with local tensors here, so `use_local_output` makes no difference. A column-parallel output is gathered where it
    leaves the model, whatever its `output_layouts`; to keep logits split, add `Policy(acts={"head": "... vocab@tp"})`.
    A `RowwiseParallel` with replicated input is taken for an embedding's, any other style for a linear's.

    Outputs that a plan splits along the sequence (`SequenceParallel`, `Shard(1)`) become `acts`. Where such values are
    gathered again follows from the modules that read them.

        >>> import shardfn as sf
        >>> from shardfn.policies import from_parallelize_plan
        >>> from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
        >>> policy = from_parallelize_plan({"*.up": ColwiseParallel(), "*.down": RowwiseParallel()})
        >>> policy.rules
        {'*.up.weight': '_@tp _@fsdp', '*.down.weight': '_@fsdp _@tp'}

    Args:
        plan: module path (`*`, `?` and `[..]` within a segment) -> style, or one style for the whole model.
        axis: the mesh axis of tensor parallelism.
        data_axis: the axis that shards the other dim; None replicates it. One of another name than the usual ones
            (`fsdp`, `dp`, `data`) splits the batch, too: `Policy.batch`.

    Returns:
        a policy with `rules`, `acts` for sequence parallelism, and `batch` for a data axis of another name.

    Raises:
        ShardError: listing every style that is not served: other layouts, inputs that only here begin to be split,
            styles of others.
        TypeError: `plan` is something else.
    """
    styles = {"": plan} if isinstance(plan, ParallelStyle) else plan
    if not isinstance(styles, Mapping):
        raise TypeError(f"from_parallelize_plan: expected module path -> style, got {type(plan).__name__}")
    if not styles:
        warnings.warn(f"from_parallelize_plan: the plan is empty: nothing is split over '{axis}'", stacklevel=2)
    problems: list[str] = []
    rules: dict[str, str] = {}
    acts: dict[str, str] = {}
    for path, style in styles.items():
        pattern = _pattern(path)
        if (split := _split_output(style)) is not None:
            acts[pattern] = " ".join([*["_"] * split, f"_@{axis}", "..."])
        problems += [f"{path!r}: {why}" for why in dict.fromkeys(_unserved(style))]
        if isinstance(style, _OF_LAYERS):
            rules[_pattern(f"{path}.weight" if path else "weight")] = _rule(style, axis, data_axis)
    raise_problems("from_parallelize_plan", problems)
    return Policy(rules=rules, acts=acts, **batch_with([data_axis] if data_axis is not None else []))


def _pattern(path: str) -> str:
    """A path of torch (shell patterns, segment by segment) as one of ours."""
    if not re.search(r"[?\[\]{}]", path):
        return path
    escaped = re.sub(r"\\\[(!?)(.*?)\\\]", lambda m: f"[{'^' if m[1] else ''}{m[2]}]", re.escape(path))
    return "re:" + escaped.replace(r"\*", "[^.]*").replace(r"\?", "[^.]").replace(r"\-", "-")


def _rule(style: Any, axis: str, data_axis: str | None) -> str:
    """A linear's weight is [out, in], and column-parallel splits what comes out; an embedding's is [vocab, c]."""
    split, other = f"_@{axis}", f"_@{data_axis}" if data_axis else "_"
    first = isinstance(style, parallel.ColwiseParallel) or style.input_layouts == (Replicate(),)
    return f"{split} {other}" if first else f"{other} {split}"


def _unserved(style: Any) -> Iterator[str]:
    """Why a style cannot be honoured."""
    name = type(style).__name__
    if isinstance(style, _OF_LAYERS):
        by_columns = isinstance(style, parallel.ColwiseParallel)
        inputs = [Replicate(), Shard(1)] if by_columns else [Replicate(), Shard(-1)]
        outputs = [Replicate(), Shard(-1)] if by_columns else [Replicate(), Shard(1)]
        yield from _other_layouts(name, "input_layouts", style.input_layouts, inputs)
        yield from _other_layouts(name, "output_layouts", style.output_layouts, outputs)
    elif isinstance(style, _OF_BOUNDARIES):
        yield from _unserved_boundary(style, name)
    elif not isinstance(style, parallel.SequenceParallel):
        yield f"{name} is not a style that is known here; write a rule for its parameters"


def _unserved_boundary(style: Any, name: str) -> Iterator[str]:
    """Inputs and outputs are the same on all ranks of the axis, or split along the sequence."""
    for field in ("input_layouts", "input_kwarg_layouts", "output_layouts"):
        for key in (field, f"desired_{field}"):
            layouts = list(_layouts(style, key))
            yield from _other_layouts(name, key, layouts, [Replicate(), Shard(1)])
            begins = key != field and field != "output_layouts"
            pairs = zip(_layouts(style, field), layouts, strict=False) if begins else ()
            if any(isinstance(wanted, Shard) and not isinstance(have, Shard) for have, wanted in pairs):
                yield f"{name}({key}=Shard(1)) splits an input that was whole; split the output of the module before it"


def _layouts(style: Any, field: str) -> Iterator[Placement | None]:
    both = isinstance(style, parallel.PrepareModuleInputOutput)
    for part in (style.prepare_module_input, style.prepare_module_output) if both else (style,):
        value = getattr(part, field, None) or ()
        yield from value.values() if isinstance(value, Mapping) else (value,) if isinstance(value, Placement) else value


def _split_output(style: Any) -> int | None:
    """The dim along which a style splits what a module gives, other than its features."""
    fields = {parallel.SequenceParallel: "sequence_sharding", parallel.RowwiseParallel: "output_layouts"}
    field = next((name for cls, name in fields.items() if isinstance(style, cls)), "desired_output_layouts")
    return next((x.dim for x in _layouts(style, field) if isinstance(x, Shard) and x.dim >= 0), None)


def _other_layouts(name: str, field: str, layouts: Any, served: Sequence[Placement]) -> Iterator[str]:
    for layout in layouts:
        if layout is not None and layout not in served:
            good = " or ".join(_shown(one) for one in served)
            yield f"{name}({field}={_shown(layout)}) is not available; what is served is {good}"


def _shown(layout: Placement) -> str:
    return f"Shard({layout.dim})" if isinstance(layout, Shard) else f"{type(layout).__name__}()"
