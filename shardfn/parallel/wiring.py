"""Which forward each module of a plan gets, and what stands around it: slices, gathers, casts.

Activations between modules may be split along another dim than features, as `Policy.acts` asks:

    acts={"layers.*": "b s@tp c"}                                                     what each rank has
        layers.0            its first input is sliced                                 [b, s/W, c]
          norm, residual    on this rank's positions
          attention         has column-parallel children: its inputs are gathered     [b, s, c]
            q, k, v, o      as ever, with this rank's heads; the sum after o is       [b, s/W, c]
                            scattered
        norm                                                                          [b, s/W, c]
        head                column-parallel: its input is gathered                    [b, s, vocab/W]

[Note: steps]
Where a value has to be sliced or gathered depends on which values arrive split, so the shape-only trace finds it
(`traced_axes.py`), and leaves a list of steps by module. A gathered input is invariant at first (backward: a slice,
after the all-reduce of `pvary`), and the output of a module with gathered inputs is sliced at its end. Where that is
enough, a second run tries less: the gathered input varies (backward: a reduce-scatter), and a sum that is all of the
output is scattered where it is made.
"""

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from shardfn._torch import Compiler, pytree
from shardfn.binding import Around, Forward, Wiring, goes_around
from shardfn.layout import Part, Plan, describe, is_in, kind_of, may_be_differentiated, modules_above, submodule
from shardfn.notation import ShardError, parse
from shardfn.parallel.amended_calls import amending
from shardfn.parallel.compute_axes import Adjustments, ComputeAxes, Step
from shardfn.parallel.layers import parallel_forwards
from shardfn.parallel.linears import others_forwards, splits

Decision = Callable[[list[Any]], Sequence[Step]]  # which steps the leaves of inputs or outputs need
Names = Mapping[str, Mapping[str, str]]  # module path -> attribute -> canonical parameter


def wire(plan: Plan, names: Names, axes: ComputeAxes, adjust: Adjustments, around: Mapping[str, Around]) -> Wiring:
    """The wiring of a model's modules.

    Args:
        plan: the layouts.
        names: from `owned_names`.
        axes: the collectives over compute axes.
        adjust: what the shape-only trace added.
        around: module path -> what goes around its forward.
    """

    axes.adjust = adjust
    varying = {name: axes_ for name in plan.layouts if (axes_ := adjust.axes_of(f"parameter {name}"))}

    def vary(name: str, value: Tensor) -> Tensor:
        for axis in varying.get(name, ()):
            value = axes.vary(value, axis)
        return value

    entered = {source: adjust.axes_of(source) for source, _ in adjust.vary if source.startswith("input ")}
    # Modules that asked to have their output split over more ranks than it has parts, see `shared_parts`.
    linears = [module for module in plan.info.modules if module.kind == "linear"] if axes.follows else []
    shares = {f"module {linear.name}" for linear in linears if plan.weight_of(linear).shared}
    readers = _with_parts(plan, names) if axes.follows else sorted({source.partition(" of ")[2] for source in entered})
    moves = [*around.items(), *stepped(axes, adjust).items()]
    for path, leaf, axis in sorted(adjust.sums):
        moves.append((path, _changing(None, partial(_added_up, axes=axes, path=path, at=leaf, axis=axis))))
    for source, axis in sorted(adjust.vary):
        if source.startswith("module "):
            path = source.removeprefix("module ")
            change = partial(axes.varied_once, axis=axis, reader=source)  # each rank uses all for its own part
            if parts := shared_parts(plan, path, axis):
                change = partial(_own_part, axes=axes, axis=axis, parts=parts)
            moves.append((path, _changing(None, change)))
    calls = {path: [one for one in adjust.amended if one.path == path] for path in {one.path for one in adjust.amended}}
    wrapped = {path: amending(amendments, axes.amended) for path, amendments in calls.items()}
    wrapped |= {path: chained(_entering(axes, path, entered, shares), wrapped.get(path)) for path in readers}
    for path, outer in moves:
        wrapped[path] = chained(outer, wrapped.get(path))
    forwards, compilers = parallel_forwards(plan, axes), _compilers(plan)
    return Wiring(forwards, wrapped, compilers, vary if varying else None, plan.local_sizes, tuple(around), set(calls))


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
        raise ShardError(f"apply: the tree was made for another model: {odd[0]!r} is in one of them; shard this model")
    for module in modules:
        if splits(plan, module) and kind_of(submodule(model, module.name)) != module.kind:
            why = f"apply: {module.name!r} splits its weights and has another forward than when its plan was made"
            raise ShardError(f"{why}; give it a parallel forward: Policy(compute={{{module.name!r}: fn}})")
    return {m.name: {attribute: plan.canonical[name] for attribute, name in m.params} for m in modules}


def shared_parts(plan: Plan, path: str, axis: str) -> int:
    """How many parts the output of a linear has that asked to be split over `axis` (`kv@tp?`) and does not divide.

    Returns:
        the number, 0 when nobody asked for that.

    Raises:
        ShardError: ranks of the axis would need parts of a part.
    """
    module = plan.info.module(path)
    if module is None or module.kind != "linear":
        return 0
    layout, ranks = plan.weight_of(module), plan.axes[axis]
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
        f"The output of {path!r} is the same on all ranks of '{axis}' and meets values that are split over it. "
        f"Split it too, for keys and values of grouped queries with a rule such as '(kv@{axis}? d) c', where '?' lets "
        f"the ranks of one group share a head; or, when it belongs to every part, write "
        f"sf.collectives.pvary(x, mesh, '{axis}')."
    )


def _with_parts(plan: Plan, names: Names) -> list[str]:
    """The modules whose own forwards are given, or may reach, parts of parameters."""
    split = {name for name, layout in plan.layouts.items() if plan.compute_axes(layout)}
    owners = {path for path, owned in names.items() if split & set(owned.values())}
    within = (owners | modules_above(owners)) - others_forwards(plan)
    return [path for path in names if path in within]


def _entering(axes: ComputeAxes, path: str, entered: Mapping[str, Sequence[str]], shares: Collection[str]) -> Around:
    """The inputs of a module that may use them in shares.

    `entered`: the axes over which it does, by source; `shares`: sources of which ranks take a part, where they are.
    """

    def forward(inner: Forward, /, *args: Any, **kwargs: Any) -> Any:
        inputs = {**dict(enumerate(args)), **kwargs}
        sources = {key: f"input {key} of {path}" for key in inputs}
        for key, source in sources.items():
            for axis in entered.get(source, ()) if may_be_differentiated(inputs[key]) else ():
                inputs[key] = axes.varied_once(inputs[key], axis, source)
        with axes.seen_from({source: inputs[key] for key, source in sources.items()}, shares):
            return inner(*[inputs.pop(at) for at in range(len(args))], **inputs)

    return goes_around(forward)


def _changing(inputs: Callable[[Any], Any] | None, output: Callable[[Any], Any]) -> Around:
    """What a module is given, (args, kwargs), and what it returns, changed."""

    def forward(inner: Forward, /, *args: Any, **kwargs: Any) -> Any:
        if inputs is not None:
            args, kwargs = inputs((args, kwargs))
        return output(inner(*args, **kwargs))

    return goes_around(forward)


def _own_part(out: Tensor, axes: ComputeAxes, axis: str, parts: int) -> Tensor:
    """The part of a module's output, [.., parts * n] -> [.., n], that this rank's share of the axis belongs to.

    With 2 key heads on 4 ranks, ranks 0 and 1 take head 0: the queries on them are those of its group.
    """
    out = axes.vary(out, axis)
    length = out.shape[-1] // parts
    with axes.hidden():
        piece = out.narrow(-1, axes.coords[axis] * parts // axes.sizes[axis] * length, length)
    part = Part("split", piece.dim() - 1, ((1, length),), axes.sizes[axis] // parts)
    return axes.note_part(piece, axis, part, out)


def _added_up(out: Any, axes: ComputeAxes, path: str, at: int, axis: str) -> Any:
    """With a leaf that is on each rank a summand as the sum, or as this rank's part of that."""
    leaves, structure = pytree.tree_flatten(out)
    leaves[at] = axes.leaf_total(leaves, at, axis, path)
    return axes.note_source(pytree.tree_unflatten(leaves, structure), f"module {path}")


def chained(outer: Around, inner: Around | None) -> Around:
    """Both, one around the other."""
    return outer if inner is None else lambda forward: outer(inner(forward))


def cast_inputs(plan_: Plan, batch: Any) -> Any:
    """Inputs with floating tensors in the plan's compute dtype."""
    return cast_floats(batch, plan_.policy.compute_dtype) if plan_.policy.cast_inputs else batch


def unit_casts(plan_: Plan) -> dict[str, Around]:
    """What goes around the forwards of units whose inputs or outputs are cast."""
    to = {unit.name: (unit.input_dtype, unit.output_dtype) for unit in plan_.units}
    return {name: _changing(*(partial(cast_floats, dtype=x) for x in both)) for name, both in to.items() if any(both)}


def cast_floats(tree: Any, dtype: torch.dtype | None) -> Any:
    """A tree with floating tensors in `dtype`; None leaves them."""
    if dtype is None:
        return tree
    return pytree.tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, tree)


AROUND = (
    "Derivatives and vmap are served around a forward, not inside of it: torch.func.grad(lambda y: sf.apply(model, "
    "params, y).sum())(x), where vmap, jvp or torch.autograd.grad may stand, too."
)


def advice_on(plan_: Plan, buffers: Mapping[str, Tensor], error: Exception) -> str:
    """What to write when a forward fails with words of torch that name another cause; empty if it is none of those."""
    if "saved tensor hooks" in str(error):
        return AROUND
    if "is not an nn.Parameter" in str(error):
        return "In a forward weights are tensors: write self.up.weight for self.get_parameter('up.weight')."
    low = plan_.policy.compute_dtype
    names = [name for name, x in buffers.items() if x.is_floating_point() and x.dtype != low]
    if low is None or "dtype" not in str(error) or not names:
        return ""
    where = f"params.buffers[{names[0]!r}]"
    what = f"Buffers keep their dtype, and {names[0]!r} is {buffers[names[0]].dtype}"
    return f"{what}: write .to(x.dtype) where the forward uses it, or {where} = {where}.to({low})"


# -- activations split by `Policy.acts` --------------------------------------------------------------------------------


def stepping(axes: ComputeAxes, inputs: Decision, outputs: Decision) -> Around:
    """What slices or gathers the inputs and outputs of a module."""

    def moved(tree: Any, decide: Decision) -> tuple[Any, list[tuple[str, int, Tensor, Tensor]]]:
        leaves, structure = pytree.tree_flatten(tree)
        gathered, steps = [], decide(leaves)
        for step in steps:
            before, leaves[step.at] = leaves[step.at], axes.step(leaves[step.at], step)
            if step.how in ("gather", "join"):
                gathered.append((step.axis, step.dim, before, leaves[step.at]))
        return pytree.tree_unflatten(leaves, structure) if steps else tree, gathered

    def forward(inner: Forward, /, *args: Any, **kwargs: Any) -> Any:
        (args, kwargs), gathered = moved((args, kwargs), inputs)
        with axes.gathers_again(gathered):
            out = inner(*args, **kwargs)
        return moved(out, outputs)[0]

    return goes_around(forward)


def stepped(axes: ComputeAxes, adjust: Adjustments) -> dict[str, Around]:
    """Module path -> what takes the steps that a shape-only trace found."""

    def at(path: str, steps: Set[Step]) -> Decision:
        chosen = sorted(step for step in steps if step.path == path)
        return lambda leaves: chosen

    paths = {step.path for step in adjust.inputs | adjust.outputs}
    return {path: stepping(axes, at(path, adjust.inputs), at(path, adjust.outputs)) for path in paths}


def boundaries(plan: Plan) -> dict[str, str]:
    """Module path -> the entry of `Policy.acts` that splits its output along another dim than the last.

    Raises:
        ShardError: an entry splits the last dim too.
    """
    entries = {}
    for module in plan.info.modules:
        if (pattern := plan.acts.get(module.name)) is None or any(".dropout." in cls for cls in module.classes):
            continue
        rule = plan.policy.acts[pattern]
        split = [[axis for f in dim.factors for axis in f.axes if is_split(plan, axis)] for dim in parse(rule).dims]
        if any(split[:-1]) and split[-1]:
            raise ShardError(f"apply: Policy.acts[{pattern!r}]: '{rule}' splits features and another dim; choose one")
        if any(split[:-1]):
            entries[module.name] = rule
    return entries


def made_whole(plan: Plan) -> set[str]:
    """The modules of a user's own whose outputs an entry of `Policy.acts` wants whole."""
    rules = {m.name: parse(plan.policy.acts[plan.acts[m.name]]) for m in plan.info.modules if m.name in plan.acts}
    kinds = {m.name: m.kind for m in plan.info.modules}
    return {name for name, rule in rules.items() if kinds[name] == "other" and not any(f.axes for f in rule.factors)}


def ranks_of_acts(plan: Plan) -> int:
    """Between how many ranks activations are split at most."""
    rules = map(parse, boundaries(plan).values())
    return prod(plan.axes[axis] for axis in {axis for rule in rules for f in rule.factors for axis in f.axes})


def is_split(plan: Plan, axis: str) -> bool:
    """Whether a compute axis has several ranks."""
    return axis in plan.roles.compute and plan.axes[axis] > 1
