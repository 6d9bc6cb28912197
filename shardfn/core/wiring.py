"""What goes into the module copies of one call: weights, parallel forwards, a guard against direct reads. Layer 4."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from shardfn._torch import Compiler, pytree
from shardfn.core.compute_axes import Adjustments, ComputeAxes
from shardfn.core.engine.binding import Forward, Wiring
from shardfn.core.errors import ShardError
from shardfn.core.model import ModuleInfo, describe, kind_of
from shardfn.core.parallel_layers import parallel_forwards
from shardfn.core.parts import Part
from shardfn.core.pattern import is_in, modules_above
from shardfn.core.plan import Plan, Unit
from shardfn.core.sequence import stepped
from shardfn.core.shadow import submodule
from shardfn.core.tensor_parallel import others_forwards, splits
from shardfn.core.underway import may_be_differentiated

Around = Callable[[Forward], Forward]


def wire(
    plan: Plan,
    names: Mapping[str, Mapping[str, str]],
    weight: Callable[[str], Tensor],
    axes: ComputeAxes,
    adjust: Adjustments,
    around: Mapping[str, Around],
    dropouts: Mapping[str, Forward] = MappingProxyType({}),
    compiles: bool = True,
) -> Wiring:
    """The wiring of a model's copies.

    Args:
        plan: the layouts.
        names: from `owned_names`.
        weight: gives a gathered parameter by its canonical name.
        axes: the collectives over compute axes.
        adjust: what the run without data added.
        around: module path -> what goes around its forward.
        dropouts: module path -> forward of a dropout module, under a `dropout_seed`.
        compiles: whether forwards are compiled when the policy or `module.compile()` says so.
    """

    varying = {name: axes_ for name in plan.layouts if (axes_ := adjust.axes_of(f"parameter {name}"))}

    def vary(name: str) -> Tensor:
        value = weight(name)
        for axis in varying.get(name, ()):
            value = axes.vary(value, axis)
        return value

    fetch = vary if varying else weight

    wrapped = dict(around)
    entered = {source: adjust.axes_of(source) for source, _ in adjust.vary if source.startswith("input ")}
    shares = (
        {f"module {module.name}" for module in plan.info.modules if _in_shares(plan, module)} if axes.follows else ()
    )
    readers = _with_parts(plan, names) if axes.follows else sorted({source.partition(" of ")[2] for source in entered})
    for path in readers:
        wrapped[path] = chained(wrapped.get(path, _as_it_is), _entering(axes, path, entered, adjust.ready, shares))
    for path, moves in stepped(axes, adjust).items():
        wrapped[path] = chained(moves, wrapped.get(path))
    for path, leaf, axis in sorted(adjust.sums):
        dim = adjust.scatters(path, axis)
        added = partial(_added_up, axes=axes, path=path, at=leaf, axis=axis, dim=dim)
        wrapped[path] = chained(_on_output(added), wrapped.get(path))
    for source, axis in sorted(adjust.vary):
        if source.startswith("module "):
            path = source.removeprefix("module ")
            parts = shared_parts(plan, path, axis)
            if parts:
                change = partial(_own_part, axes=axes, axis=axis, parts=parts)
            else:  # an output of which each rank uses all for its own part of something else
                change = partial(axes.varied_once, axis=axis, reader=source, ready=(source, axis) in adjust.ready)
            wrapped[path] = chained(_on_output(change), wrapped.get(path))
    forwards = {**parallel_forwards(plan, axes, fetch, adjust), **dropouts}
    ignored = frozenset(plan.info.ignored)
    compilers = _compilers(plan) if compiles else None
    return Wiring(names, fetch, forwards, wrapped, compilers, ignored, sizes=plan.local_sizes, units=tuple(around))


def _compilers(plan: Plan) -> dict[str, Compiler]:
    """Unit -> what compiles its forward, as the policy asks for: every unit that has no other one in it."""
    if plan.policy.compile is False:
        return {}
    options = {} if plan.policy.compile is True else plan.policy.compile
    names = [unit.name for unit in plan.units]
    inner = [name for name in names if not any(is_in(other, name) for other in names)]
    return dict.fromkeys(inner, partial(torch.compile, **options))


def owned_names(model: nn.Module, plan: Plan) -> dict[str, dict[str, str]]:
    """Module path -> attribute -> canonical parameter name, after a check that the plan is for this model.

    Raises:
        ShardError: a module or parameter is in one of them only.
    """
    modules = plan.info.modules or describe(model).modules
    first = {name for name, _ in model.named_modules()}
    have = {name for name, _ in model.named_modules(remove_duplicate=False)}
    planned = {module.name for module in modules}
    missing = [name for name in planned if name not in have]
    unknown = [name for module in modules for _, name in module.params if name not in plan.canonical]
    odd = sorted(missing) or unknown or sorted(first - planned)
    if odd:
        raise ShardError(
            f"apply: the tree was made for another model: {odd[0]!r} is in one of them only; shard this model"
        )
    for module in modules:
        if splits(plan, module) and kind_of(submodule(model, module.name)) != module.kind:
            raise ShardError(
                f"apply: {module.name!r} splits its weights and has another forward than when its plan was made (a "
                f"patched one, or another class); give it a parallel forward: Policy(compute={{{module.name!r}: fn}})"
            )
    return {m.name: {attribute: plan.canonical[name] for attribute, name in m.params} for m in modules}


def _in_shares(plan: Plan, module: ModuleInfo) -> bool:
    """Whether a module asked to have its output split over ranks of which there are more than parts."""
    return module.kind == "linear" and bool(plan.layouts[plan.canonical[dict(module.params)["weight"]]].shared)


def shared_parts(plan: Plan, path: str, axis: str) -> int:
    """How many parts the output of a linear has that asked to be split over `axis` (`kv@tp?`) and does not divide.

    Returns:
        the number, 0 when nobody asked for that.

    Raises:
        ShardError: ranks of the axis would need parts of a part.
    """
    module = next((m for m in plan.info.modules if m.name == path), None)
    if module is None or module.kind != "linear":
        return 0
    layout, ranks = plan.layouts[dict(module.params)["weight"]], plan.axes[axis]
    parts = dict(layout.shared).get(axis, 0)
    if parts and ranks % parts:
        raise ShardError(
            f"apply: {path!r} has {parts} parts by '{layout.rule}', {axis}={ranks} ranks need one each or share one in "
            f"equal groups, {ranks} % {parts} = {ranks % parts} and {parts} % {ranks} = {parts % ranks}. "
            f"Choose another size of '{axis}'."
        )
    return parts


def shared_alone(path: str, axis: str) -> str:
    """Why an output that all ranks share, and nobody asked to split, may not fit to values that are split."""
    return (
        f"apply: the output of {path!r} is the same on all ranks of '{axis}' and meets values that are split over it. "
        f"Split it too, for keys and values of grouped queries with a rule such as '(kv@{axis}? d) c', where '?' lets "
        f"the ranks of one group share a head; or, when it belongs to every part, write "
        f"sf.collectives.pvary(x, mesh, '{axis}')."
    )


def _with_parts(plan: Plan, names: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The modules whose own forwards are given, or may reach, parts of parameters."""
    split = {name for name, layout in plan.layouts.items() if plan.compute_axes(layout)}
    owners = {path for path, owned in names.items() if split & set(owned.values())}
    within = (owners | modules_above(owners)) - others_forwards(plan)
    return [path for path in names if path in within]


def _entering(
    axes: ComputeAxes,
    path: str,
    entered: Mapping[str, Sequence[str]],
    ready: Collection[tuple[str, str]],
    shares: Collection[str],
) -> Around:
    """The inputs of a module that may use them in shares.

    `entered`: the axes over which it does, by source; `ready`: sources that varied before; `shares`: those of which
    ranks take a part, where they are.
    """

    def around(inner: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            given = {**dict(enumerate(args)), **kwargs}
            sources = {key: f"input {key} of {path}" for key in given}
            for key, source in sources.items():
                for axis in entered.get(source, ()) if may_be_differentiated(given[key]) else ():
                    given[key] = axes.varied_once(given[key], axis, source, (source, axis) in ready)
            with axes.seen_from({source: given[key] for key, source in sources.items()}, shares):
                return inner(*[given.pop(at) for at in range(len(args))], **given)

        return forward

    return around


def _as_it_is(forward: Forward) -> Forward:
    return forward


def _on_output(change: Callable[[Any], Any]) -> Around:
    """What a module returns, changed."""

    def around(inner: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return change(inner(*args, **kwargs))

        return forward

    return around


def _own_part(out: Tensor, axes: ComputeAxes, axis: str, parts: int) -> Tensor:
    """The part of a module's output, [.., parts * n] -> [.., n], that this rank's share of the axis belongs to.

    With 2 key heads on 4 ranks, ranks 0 and 1 take head 0: the queries on them are those of its group.
    """
    out = axes.vary(out, axis)
    length = out.shape[-1] // parts
    with axes.hidden():
        own = out.narrow(-1, axes.coords[axis] * parts // axes.sizes[axis] * length, length)
    part = Part("split", own.dim() - 1, ((1, length),), axes.sizes[axis] // parts)
    return axes.note_part(own, axis, part, out)


def _added_up(out: Any, axes: ComputeAxes, path: str, at: int, axis: str, dim: int | None) -> Any:
    """With a leaf that is on each rank a summand as the sum; or, with `dim`, as this rank's part of that."""
    leaves, structure = pytree.tree_flatten(out)
    leaves[at] = axes.leaf_total(leaves, at, axis, path, dim)
    return axes.note_source(pytree.tree_unflatten(leaves, structure), f"module {path}")


def chained(outer: Around, inner: Around | None) -> Around:
    """Both, one around the other."""
    return outer if inner is None else lambda forward: outer(inner(forward))


def cast_inputs(plan_: Plan, batch: Any) -> Any:
    """Inputs with floating tensors in the plan's compute dtype."""
    return cast_floats(batch, plan_.policy.compute_dtype) if plan_.policy.cast_inputs else batch


def unit_casts(plan_: Plan) -> dict[str, Around]:
    """What goes around the forwards of units whose inputs or outputs are cast."""
    return {unit.name: _casting(unit) for unit in plan_.units if unit.input_dtype or unit.output_dtype}


def _casting(unit: Unit) -> Around:
    def around(inner: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = cast_floats((args, kwargs), unit.input_dtype)
            return cast_floats(inner(*args, **kwargs), unit.output_dtype)

        return forward

    return around


def cast_floats(tree: Any, dtype: torch.dtype | None) -> Any:
    """A tree with floating tensors in `dtype`; None leaves them."""
    if dtype is None:
        return tree
    return pytree.tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, tree)
