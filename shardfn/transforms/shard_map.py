"""`shard_map`: a function of local tensors as a function of DTensors.

Every operation of the function is followed: over which axes do its operands differ between ranks? A value that is the
same on all ranks of an axis and meets one that is not gets a `pvary`, as in JAX, so that its gradient is whole. An
output that differs over an axis which its spec does not name is an error.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from math import prod
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from shardfn._torch import DTensorSpec, dtensor_spec, in_transform, kinds_of_transforms, pytree, spec_of
from shardfn.comm import Moved, RankIndex, of_rank, pvary, watched, watching
from shardfn.context import axes_of_losses, mapped_axes, several_losses
from shardfn.layout import axes_of, is_batch_axis, may_be_differentiated
from shardfn.notation import ShardError, Spec, did_you_mean, parse, raise_problems
from shardfn.params import Across


def shard_map(spec: str, mesh: DeviceMesh) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: a function of this rank's parts becomes one of `DTensor`s, like JAX's `shard_map`.

    `spec` is `"inputs -> outputs"` in the notation of rules, one for each tensor, with commas between them. Inside are
    plain local tensors and the collectives of `sf.collectives`. Gradients have the layouts of their tensors. Over which
    axes values differ is followed through operations on tensors and on `sf.collectives.axis_index`; not through
    `mesh.get_local_rank`, and not where Python takes the index for a number (`table[index]`, `range(index)`).

        >>> import torch, shardfn as sf
        >>> from torch.distributed.tensor import DTensor, Replicate, Shard
        >>> mesh = sf.make_mesh("cpu", fsdp=1, tp=1)
        >>> @sf.shard_map("b@fsdp ff@tp, c ff@tp -> b@fsdp c", mesh)
        ... def row_parallel(x, weight):
        ...     return sf.collectives.psum(x @ weight.T, mesh, "tp")
        >>> weight = DTensor.from_local(torch.ones(2, 3), mesh, [Replicate(), Shard(1)])
        >>> sf.typeof(row_parallel(torch.ones(4, 3), weight))
        'f32[4@fsdp 2]'

    Args:
        spec: names are sizes: the same name is the same size everywhere. A dim is split over the axes behind its name,
            outermost first, in equal parts.
        mesh: whose axes they are.

    Returns:
        the decorator. The function takes `DTensor`s in the layouts of `spec`, on this mesh or on that of a tree's
        leaves, or plain tensors, which are this rank's parts; it returns `DTensor`s on `mesh`, one or a tuple.

    Raises:
        ShardError: a spec that cannot be read, unknown axes, inputs in another layout or number, sizes that differ or
            do not divide, an output that is another one than its spec says.
        TypeError: `mesh` is no DeviceMesh.

    Communication: what the function does; in backward one all-reduce for each `pvary`.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"shard_map: expected a DeviceMesh, got {type(mesh).__name__}")
    region = _Region(mesh, *_sides(spec, axes_of(mesh)))

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(fn)
        def call(*args: Any) -> Any:
            return region.run(fn, args)

        return call

    return decorate


def _sides(spec: str, axes: Mapping[str, int]) -> tuple[list[Spec], list[Spec]]:
    halves = spec.split("->")
    if len(halves) != 2:
        raise ShardError(f"shard_map: {spec!r} needs one '->' between inputs and outputs")
    ins, outs = ([parse(part.strip()) for part in half.split(",")] for half in halves)
    problems: list[str] = []
    for side in (*ins, *outs):
        used = [axis for factor in side.factors for axis in factor.axes]
        unknown = [axis for axis in (*used, *side.partial) if axis not in axes]
        listed = ", ".join(axes)
        problems += [f"'{side}': the mesh has {listed}, no '{a}'{did_you_mean(a, axes)}" for a in unknown]
        if side.partial:
            problems.append(f"'{side}': a pending sum (+{side.partial[0]}) does not leave; psum it inside")
        if any(dim.ellipsis or len(dim.factors) > 1 for dim in side.dims):
            problems.append(f"'{side}': one name for each dim; split inside of the function")
        order = list(axes)
        for dim in side.dims:
            split = [order.index(axis) for factor in dim.factors for axis in factor.axes if axis in axes]
            if split != sorted(split):
                problems.append(f"'{side}': the axes of a dim go in the order of the mesh, {listed}")
    raise_problems("shard_map", problems)
    return ins, outs


def _split(spec: Spec) -> list[tuple[str, tuple[str, ...]]]:
    """(name, axes) of every dim."""
    return [(dim.factors[0].name, dim.factors[0].axes) for dim in spec.dims]


def _axes(*specs: Spec) -> set[str]:
    """The axes that split a dim of any of them."""
    return {axis for spec in specs for factor in spec.factors for axis in factor.axes}


class _Region(NamedTuple):
    """Where functions of this rank's parts run."""

    mesh: DeviceMesh
    ins: list[Spec]
    outs: list[Spec]

    def run(self, fn: Callable[..., Any], args: Sequence[Any]) -> Any:
        """What the function gives for such parts, as `DTensor`s."""
        sizes = self._checked(args)
        dtensors = [x for x in args if isinstance(x, DTensor)]
        if dtensors and in_transform():
            raise ShardError("shard_map: a DTensor inside a transform; leaves of trees are this rank's parts there")
        parts = iter(Across.apply(False, [*map(spec_of, dtensors)], *dtensors) if dtensors else ())
        several = {axis for axis, size in axes_of(self.mesh).items() if size > 1} - mapped_axes()
        batch = sorted(several & _axes(*self.outs) & axes_of_losses())
        if batch and "Grad" in kinds_of_transforms():
            # Parts of outputs make a loss on each data rank there, and shared weights one.
            raise several_losses("shard_map", batch[0], "the region adds up gradients of weights over all")
        pairs = zip(args, self.ins, strict=True)
        locals_ = [next(parts) if isinstance(x, DTensor) else of_rank(x, self._share(spec)) for x, spec in pairs]
        typed = _Typed(self.mesh, several)
        for x, spec in zip(locals_, self.ins, strict=True):
            typed.note(x, frozenset(_axes(spec) & several))
        with typed, watched(typed.note_collective, typed.note_index):
            result = fn(*locals_)
        outputs = list(result) if isinstance(result, tuple | list) else [result]
        self._require_outputs(outputs, typed)
        pairs = zip(outputs, self.outs, strict=True)
        outputs = [typed.varied(x, _axes(spec) & several) for x, spec in pairs]
        lifted = outputs if in_transform() else Across.apply(True, self._out_specs(outputs, sizes), *outputs)
        return tuple(lifted) if isinstance(result, tuple | list) else lifted[0]

    def _share(self, spec: Spec) -> float:
        """How a loss of this rank counts by a plain input: the region computes for the batch of all data ranks."""
        sizes = axes_of(self.mesh)
        return 1 if in_transform() else 1 / prod(sizes[axis] for axis in _axes(spec) if is_batch_axis(axis))

    def _checked(self, args: Sequence[Any]) -> dict[str, int]:
        """The size of every name."""
        if len(args) != len(self.ins):
            raise ShardError(f"shard_map: {len(self.ins)} inputs in the spec, {len(args)} given")
        axes, problems = axes_of(self.mesh), list[str]()
        sizes: dict[str, int] = {}
        for number, (x, spec) in enumerate(zip(args, self.ins, strict=True)):
            if not isinstance(x, Tensor) or x.dim() != len(spec.dims):
                what = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
                problems.append(f"input {number} is '{spec}', got {what}")
                continue
            wanted = [tuple(axis for axis in split if axes[axis] > 1) for _, split in _split(spec)]
            if isinstance(x, DTensor) and (layout := _layout(x)) != wanted:
                shown = " ".join("".join(["_", *(f"@{a}" for a in split)]) for split in layout)
                problems.append(f"input {number} is '{spec}', got a DTensor that is '{shown}'; redistribute it")
                continue
            for (name, split), length in zip(_split(spec), x.shape, strict=True):
                parts = prod(axes[axis] for axis in split)
                size = length if isinstance(x, DTensor) else length * parts
                if size % parts:
                    why = f"{size} % {parts} = {size % parts}"
                    problems.append(f"input {number}: {name}={size} over {'@'.join(split)}, {why}")
                if name != "_" and sizes.setdefault(name, size) != size:
                    problems.append(f"input {number}: {name}={size}, and {sizes[name]} before")
        raise_problems("shard_map", problems)
        return sizes

    def _require_outputs(self, outputs: Sequence[Any], typed: "_Typed") -> None:
        problems: list[str] = []
        if len(outputs) != len(self.outs):
            problems.append(f"{len(self.outs)} outputs in the spec, the function returns {len(outputs)}")
        for number, (x, spec) in enumerate(zip(outputs, self.outs, strict=False)):
            if not isinstance(x, Tensor) or x.dim() != len(spec.dims):
                what = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
                problems.append(f"output {number} is '{spec}', the function returns {what}")
                continue
            for axis in sorted(typed.axes_of(x) - _axes(spec)):
                problems.append(f"output {number} is '{spec}', but differs over '{axis}'; psum or gather it")
        raise_problems("shard_map", problems)

    def _out_specs(self, outputs: Sequence[Tensor], sizes: Mapping[str, int]) -> list[DTensorSpec]:
        axes, specs = axes_of(self.mesh), []
        for number, (x, spec) in enumerate(zip(outputs, self.outs, strict=True)):
            shape = list(x.shape)
            placements: list[Any] = [Replicate()] * len(axes)
            for dim, (name, split) in enumerate(_split(spec)):
                for axis in split:
                    shape[dim] *= axes[axis]
                    placements[list(axes).index(axis)] = Shard(dim)
                if sizes.get(name, shape[dim]) != shape[dim]:
                    raise ShardError(f"shard_map: output {number}: {name}={shape[dim]}, and {sizes[name]} before")
            specs.append(dtensor_spec(self.mesh, placements, shape, x.dtype))
        return specs


def _layout(x: DTensor) -> list[tuple[str, ...]]:
    """The axes of several ranks that split each dim, outermost first."""
    sizes = axes_of(x.device_mesh)
    pairs = [(name, p) for name, p in zip(sizes, x.placements, strict=True) if sizes[name] > 1]
    return [tuple(name for name, p in pairs if p.is_shard(dim)) for dim in range(x.dim())]


class _Typed(TorchFunctionMode):
    """Follows over which axes the values of a function differ, and varies those that meet values which do.

    As in JAX, the `pvary` stands where the two meet: what is made of the shared value elsewhere stays shared.
    """

    def __init__(self, mesh: DeviceMesh, axes: set[str]) -> None:
        super().__init__()
        self._mesh, self._axes = mesh, axes
        self._indexed = frozenset[str]()  # axes whose index the function has asked for
        self._parted = False  # whether it has made lists of parts
        self._known = WeakIdKeyDictionary()  # (over which axes, whether it had a derivative when that was noted)

    def note(self, x: Tensor, axes: frozenset[str]) -> None:
        """Say over which axes a tensor differs."""
        self._known[x] = axes, x.grad_fn is not None

    def note_index(self, axis: str) -> None:
        """The function asks where this rank is: from then on it may take another part of a list on each."""
        if axis in self._axes and self._parted:
            why = "shard_map: axis_index after chunk, split or unbind; call it before, so that a part which"
            raise ShardError(f"{why} is chosen by it can be followed, or use sf.collectives.shard_slice")
        self._indexed |= {axis} & self._axes

    def note_collective(self, moved: Moved, x: Tensor, out: Tensor) -> Tensor:
        """A collective made `out` of x."""
        if moved.axis in self._axes:
            known = self.axes_of(x)
            self.note(out, known | {moved.axis} if moved.varies else known - {moved.axis})
        return out

    def axes_of(self, x: Tensor) -> frozenset[str]:
        """Over which axes a tensor differs; constants do not."""
        axes, derived = self._known[x] if x in self._known else (frozenset[str](), False)
        if not derived and x.grad_fn is not None:  # also of what an autograd.Function made, in which there was none yet
            why = f"shard_map: nothing is known of a tensor of shape {tuple(x.shape)}, which an autograd.Function"
            raise ShardError(f"{why} or a closure brings in: pass it as an input, or compute outside of the region")
        return axes

    def varied(self, x: Tensor, axes: Iterable[str]) -> Tensor:
        """x, where values that differ over `axes` are wanted."""
        for axis in sorted(set(axes) - self.axes_of(x)):
            x = pvary(x, self._mesh, axis)
        return x

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not watching():  # inside a collective, which says itself what it made
            return func(*args, **(kwargs or {}))
        flat, structure = pytree.tree_flatten((args, kwargs or {}))
        tensors = [x for x in flat if isinstance(x, Tensor)]
        if not tensors or getattr(func, "__name__", "") in ("__get__", "__set__"):
            known = [self._known[x][0] for x in tensors if x in self._known]
            return self._noted(func(*args, **(kwargs or {})), [*known, _axes_of_indices(flat)])
        axes = _axes_of_indices(flat).union(*map(self.axes_of, tensors))
        name = str(getattr(func, "__name__", func))
        if name in _INTO_PARTS:
            self._parted = True
            axes |= self._indexed
        out = (kwargs or {}).get("out")
        target = out if isinstance(out, Tensor) else tensors[0]
        writes = out is not None or name == "__setitem__" or (name[-1] == "_" and name[-2:] != "__")
        if writes and axes - self.axes_of(target):
            why = f"{name} writes values that differ over {sorted(axes)} into a tensor that does not"
            raise ShardError(f"shard_map: {why}; make it with sf.collectives.pvary(x, mesh, axis) first")
        same = [self.varied(x, axes) if may_be_differentiated(x) else x for x in flat]
        args, kwargs = pytree.tree_unflatten(same, structure)
        return self._noted(func(*args, **kwargs), [axes])

    def _noted(self, out: Any, axes: list[frozenset[str]]) -> Any:
        union = frozenset[str]().union(*axes) & self._axes
        for x in pytree.tree_leaves(out):
            if isinstance(x, Tensor):
                self.note(x, union)
        return out


_INTO_PARTS = {"chunk", "split", "unbind", "tensor_split", "split_with_sizes", "hsplit", "vsplit", "dsplit", "__iter__"}


def _axes_of_indices(values: Iterable[Any]) -> frozenset[str]:
    """Over which axes numbers made of a rank's place differ, also inside of slices."""
    axes = frozenset[str]()
    for value in values:
        parts = (value.start, value.stop, value.step) if isinstance(value, slice) else (value,)
        axes = axes.union(*(part.axes for part in parts if isinstance(part, RankIndex)))
    return axes
