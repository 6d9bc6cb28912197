"""`apply`: run a module with the weights of a tree. Layer 4.

    inputs checked -> (first call: run without data) -> copies bound to a session -> forward -> outputs cast
"""

import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardfn._torch import pytree
from shardfn.core.agreement import check_batch, wrong_inputs
from shardfn.core.engine.binding import Bound, Forward, Wiring, no_escape
from shardfn.core.engine.session import Session
from shardfn.core.engine.variance import Findings, Tag, Variance, check_outputs, to_meta
from shardfn.core.errors import ShardError, did_you_mean
from shardfn.core.layout import compute_view
from shardfn.core.mesh import Grid, grid
from shardfn.core.model import describe
from shardfn.core.pattern import first_match
from shardfn.core.plan import Plan
from shardfn.core.tensor_parallel import Adjustments, ComputeAxes, parallel_forwards
from shardfn.core.tree import Params

_CHECKED_CALLS = 2  # how many calls of a model compare their batch over the compute axes
_TRIALS = 8


def apply(model: nn.Module, params: Params, *args: Any, method: str | None = None, **kwargs: Any) -> Any:
    """Run `model` with the weights of `params`, like `torch.func.functional_call`.

    Inside, modules see ordinary local tensors: whole over the data axes, split over the compute axes. `nn.Linear` and
    `nn.Embedding` compute with split weights by their rules; sizes between them must come from the tensors, since only
    this rank's heads are there. The model itself is not changed, except for attributes that its forward assigns.

        >>> import torch, shardfn as sf
        >>> from torch import nn
        >>> model = nn.Linear(4, 2)
        >>> params = sf.shard(model, sf.make_mesh("cpu", fsdp=1), sf.Policy())
        >>> x = torch.ones(3, 4)
        >>> torch.equal(sf.apply(model, params, x), model(x))
        True

    Args:
        model: the module, or one of the same structure; its own tensors are not used and may be on the meta device.
        params: the tree that `shard` made for it.
        args, kwargs: this data rank's inputs, plain tensors on the mesh's device, the same on all ranks of a compute axis.
        method: name of a method to call instead of `forward`.

    Returns:
        what the method returns; floating tensors in `output_dtype`.

    Raises:
        ShardError: the tree is not this model's; inputs on another device; on the first two calls, inputs that differ
            between ranks of a compute axis; on the first call, sizes that do not fit the local parts, with the module.
        TypeError: not a module, or not a tree made by `shard`.

    Communication: one all-gather a bucket and data axis when its unit begins, and again in its backward
    (`regather=True`); one reduce-scatter a bucket in the backward; one all-reduce a row-parallel output and, in the
    backward, a tensor read by column-parallel linears. The first two calls exchange 16 bytes over each axis.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"apply: expected an nn.Module, got {type(model).__name__}")
    if not isinstance(params, Params):
        raise TypeError(f"apply: expected the tree that shard() makes, got {type(params).__name__}")
    call = _Call(model, params, method or "__call__")
    call.check_inputs((args, kwargs))
    adjust = call.adjustments(args, kwargs)
    args, kwargs = _cast_inputs(params.plan, (args, kwargs))
    with no_escape(model) if call.record.calls == 1 else nullcontext():
        output = call.run(adjust, args, kwargs)
    return _cast_floats(output, params.plan.policy.output_dtype)


@dataclass
class _Record:
    """What is remembered about a model and a plan between calls."""

    plan: Plan
    names: Mapping[str, Mapping[str, str]]  # module path -> attribute -> canonical parameter
    calls: int = 0
    adjustments: dict[Any, Adjustments] = field(default_factory=dict)


# Keyed by the model object, then by plan: two models of one class, or one model with two policies, never share.
_RECORDS: "weakref.WeakKeyDictionary[nn.Module, list[_Record]]" = weakref.WeakKeyDictionary()


class _Call:
    """One `apply`, from its checks to its result."""

    def __init__(self, model: nn.Module, params: Params, method: str) -> None:
        if not hasattr(model, method):
            raise ShardError(f"apply: {type(model).__name__} has no method '{method}'{did_you_mean(method, dir(model))}")
        self.model, self.params, self.method = model, params, method
        self.plan = params.plan
        self.grid = grid(params.mesh, self.plan.roles.storage)
        self.record = _record(model, self.plan)
        self.compute = [axis for axis in self.plan.roles.compute if self.plan.axes[axis] > 1]

    def check_inputs(self, batch: Any) -> None:
        """Raise when the inputs cannot be used; on the first calls all ranks do when one must."""
        self.record.calls += 1
        problem = wrong_inputs(batch, self.grid.device)
        if self.record.calls <= _CHECKED_CALLS and len(self.grid.ranks()) > 1:
            check_batch(self.grid, self.compute, batch, problem)
        elif problem is not None:
            raise ShardError(problem)

    def adjustments(self, args: Any, kwargs: Any) -> Adjustments:
        """What a run without data adds to the derivation; found once a model, plan, method and kind of inputs."""
        if not any(axis in layout.axes for axis in self.compute for layout in self.plan.layouts.values()):
            return Adjustments()
        key = (self.method, self.model.training, str(pytree.tree_structure((args, kwargs))))
        if key not in self.record.adjustments:
            self.record.adjustments[key] = self._find_adjustments(args, kwargs)
        return self.record.adjustments[key]

    def run(self, adjust: Adjustments, args: Any, kwargs: Any) -> Any:
        """The forward on this rank."""
        session = Session(self.plan, self.grid, self.params)
        axes = ComputeAxes(self.grid)
        around = {unit.name: _in_unit(session, unit.name) for unit in self.plan.units if unit.name}
        wiring = self._wiring(session.weight, axes, adjust, around, self.params.buffers)
        bound = Bound(self.model, wiring)
        try:
            with session.hooks():
                return getattr(bound.root, self.method)(*args, **kwargs)
        finally:
            session.close()
            bound.write_back(self.params.buffers)

    def _wiring(
        self,
        weight: Callable[[str], Tensor],
        axes: ComputeAxes,
        adjust: Adjustments,
        around: dict[str, Callable[[Forward], Forward]],
        buffers: Mapping[str, Tensor],
    ) -> Wiring:
        def fetch(name: str) -> Tensor:
            value = weight(name)
            for axis in adjust.axes_of(f"parameter {name}"):
                value = axes.vary(value, axis)
            return value

        for source in {source for source, _ in adjust.vary if source.startswith("module ")}:
            path = source.removeprefix("module ")
            around[path] = _chained(_varying(axes, adjust.axes_of(source)), around.get(path))
        forwards = parallel_forwards(self.plan, axes, fetch, adjust)
        return Wiring(self.record.names, buffers, fetch, self._guard, forwards, around)

    def _guard(self, path: str, attribute: str, name: str) -> None:
        """A weight split over a compute axis is used by its derived forward, not read as an attribute."""
        split = [axis for axis in self.plan.layouts[name].axes if axis in self.compute]
        if split and first_match(self.plan.policy.compute, [path]) is None:
            raise ShardError(
                f"apply: '{name}' is split over {', '.join(split)} by '{self.plan.layouts[name].rule}', but a forward reads "
                f"'{attribute}' of {path!r} itself; call the module, or take '@{split[0]}' out of the rule, or give its owner a "
                f"forward in Policy(compute=...)"
            )

    def _find_adjustments(self, args: Any, kwargs: Any) -> Adjustments:
        adjust, found = Adjustments(), Findings()
        for _ in range(_TRIALS):
            found = self._trial(adjust, args, kwargs)
            if new := found.gather - adjust.gather:
                adjust = replace(adjust, gather=adjust.gather | new)
            elif new_vary := found.vary - adjust.vary:
                adjust = replace(adjust, vary=adjust.vary | new_vary)
            elif found.mixed:
                raise ShardError(_mixed_message(found))
            else:
                return adjust
        raise ShardError(_mixed_message(found))

    def _trial(self, adjust: Adjustments, args: Any, kwargs: Any) -> Findings:
        """One forward on meta tensors of local shape."""
        variance = Variance()
        axes = ComputeAxes(self.grid, variance)
        weight = _MetaWeights(self.plan, self.grid, variance)
        around = {path: _noting(variance, axes, path, bool(names)) for path, names in self.record.names.items()}
        args, kwargs = to_meta(_cast_inputs(self.plan, (args, kwargs)))
        bound = Bound(self.model, self._wiring(weight, axes, adjust, around, to_meta(dict(self.params.buffers))))
        try:
            with variance, torch.enable_grad():
                output = getattr(bound.root, self.method)(*args, **kwargs)
        except ShardError:
            raise
        except Exception as error:
            where = variance.failed_at or type(self.model).__name__
            raise ShardError(_trial_message(where, error, self.plan, self.compute)) from error
        check_outputs(variance, output)
        return variance.findings


class _MetaWeights:
    """Weights without data, in the shapes that modules compute with, tagged by the axes that split them."""

    def __init__(self, plan: Plan, places: Grid, variance: Variance) -> None:
        self._plan, self._places, self._variance = plan, places, variance
        self._made: dict[str, Tensor] = {}

    def __call__(self, name: str) -> Tensor:
        if name not in self._made:
            layout, roles, places = self._plan.layouts[name], self._plan.roles, self._places
            cast = self._plan.policy.compute_dtype if layout.dtype.is_floating_point else None
            parts = [
                torch.empty(leaf.local_shape(places.sizes, places.coords, roles.compute), dtype=cast or layout.dtype, device="meta")
                for leaf in layout.leaves
            ]
            made = compute_view(layout, parts, roles.data).detach()
            made.requires_grad_(layout.trainable and made.is_floating_point())
            axes = frozenset(axis for axis in layout.axes if axis in roles.compute and self._plan.axes[axis] > 1)
            self._variance.mark(made, Tag(axes, None if axes else f"parameter {name}"))
            self._made[name] = made
        return self._made[name]


def _record(model: nn.Module, plan: Plan) -> _Record:
    records = _RECORDS.setdefault(model, [])
    for record in records:
        if record.plan == plan:
            return record
    records.append(_Record(plan, _owned_names(model, plan)))
    return records[-1]


def _owned_names(model: nn.Module, plan: Plan) -> dict[str, dict[str, str]]:
    """Module path -> attribute -> parameter, after a check that the plan is for this model."""
    modules = plan.info.modules or describe(model).modules
    have = {name for name, _ in model.named_modules(remove_duplicate=False)}
    missing = [module.name for module in modules if module.name not in have]
    unknown = [name for module in modules for _, name in module.params if name not in plan.canonical]
    extra = [] if missing else sorted(have - {m.name for m in modules} - {n for n, _ in _shared_modules(model)})
    if missing or unknown or extra:
        odd = (missing or unknown or extra)[0]
        raise ShardError(f"apply: the tree was made for another model: {odd!r} is in one of them only; shard this model")
    return {m.name: {attribute: plan.canonical[name] for attribute, name in m.params} for m in modules}


def _shared_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Further paths of modules that stand in several places."""
    first = dict(model.named_modules())
    return [(name, module) for name, module in model.named_modules(remove_duplicate=False) if name not in first]


def _in_unit(session: Session, unit: str) -> Callable[[Forward], Forward]:
    def around(inner: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            session.enter(unit)
            try:
                return inner(*args, **kwargs)
            finally:
                session.leave(unit)

        return forward

    return around


def _varying(axes: ComputeAxes, names: list[str]) -> Callable[[Forward], Forward]:
    """`pvary` the output of a module, see [Note: varying and invariant]."""

    def around(inner: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            out = inner(*args, **kwargs)
            for axis in names:
                out = axes.vary(out, axis)
            return out

        return forward

    return around


def _chained(outer: Callable[[Forward], Forward], inner: Callable[[Forward], Forward] | None) -> Callable[[Forward], Forward]:
    return outer if inner is None else lambda forward: outer(inner(forward))


def _noting(variance: Variance, axes: ComputeAxes, path: str, owns: bool) -> Callable[[Forward], Forward]:
    """Name the module in errors, and as the source of its output when it owns parameters."""

    def around(inner: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            with variance.inside(path):
                out = inner(*args, **kwargs)
            return axes.note_source(out, f"module {path}") if owns else out

        return forward

    return around


def _mixed_message(found: Findings) -> str:
    listed = "\n".join(f"  {problem}" for problem in dict.fromkeys(found.mixed))
    return (
        f"apply: gradients would be partial sums\n{listed}\n"
        f"Split both sides alike in the rules, or write sf.collectives.pvary(x, mesh, axis) on the shared value."
    )


def _trial_message(path: str, error: Exception, plan: Plan, compute: list[str]) -> str:
    over = ", ".join(f"{axis}={plan.axes[axis]}" for axis in compute)
    return (
        f"apply: a run of the forward without data, with the sizes that one rank has over {over}, failed in {path!r}: {error}\n"
        f"Take sizes from tensors (x.shape[-1], or rearrange with the known head size) instead of the configuration: only this "
        f"rank's part of each split dim is there. Tensors that are neither parameters nor buffers must follow x.device."
    )


def _cast_inputs(plan: Plan, batch: Any) -> Any:
    policy = plan.policy
    return _cast_floats(batch, policy.compute_dtype) if policy.cast_inputs else batch


def _cast_floats(tree: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return tree
    return pytree.tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, tree)
