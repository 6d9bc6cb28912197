"""Collectives on plain local tensors: raw movers of bytes, and pairs that every transform understands.

Here: four movers over a `ProcessGroup` without autograd (`gather_flat`, `scatter_sum_flat`, `sum_flat_`,
`exchange_flat`), and collectives over one named mesh axis with a declared transpose (`psum`, `pvary`, ...).
Not here: DTensor, buckets, anything that decides which collective to use.

No function communicates on a meta tensor (a dry run sees the right shapes) or over a single rank.
"""

import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardfn import _torch
from shardfn.comm import point_to_point
from shardfn.comm.storage import Buffers, FreshBuffers
from shardfn.context import transform_state
from shardfn.layout import MeshSpec, axes_of, may_be_differentiated
from shardfn.notation import ShardError, did_you_mean

# Movers: flat tensors in, flat tensors out. W is the size of the group, n the length of one part.
# Data moves as bytes, so that a backend which lacks a dtype (gloo: float8, int16) moves it all the same.

_HALVES = (torch.float16, torch.bfloat16)
# Integers that gloo and NCCL cannot add, and the dtype they travel in. Narrowing back keeps the sum modulo 2**bits.
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}
_ADDABLE = {*_HALVES, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64, *_WIDER}


def gather_flat(shard: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[n] -> [W*n]`: every rank's shard, in rank order, outside autograd. Any dtype.

    One all-gather: each rank sends its n elements to W - 1 others. W = 1 returns the shard itself.

        >>> import shardfn as sf
        >>> import torch
        >>> from shardfn.core.collectives import gather_flat
        >>> mesh = sf.make_mesh("cpu", tp=1)
        >>> gather_flat(torch.arange(3), mesh.get_group("tp"))
        tensor([0, 1, 2])
    """
    shard = shard.detach().contiguous()  # [n]
    if group.size() == 1:
        return shard
    if shard.is_meta:
        return shard.new_empty(shard.numel() * group.size())
    if _torch.has_no_memory():
        return _torch.waited(_torch.gathering(shard, group))
    full = shard.new_empty(shard.numel() * group.size())  # [W*n]
    into, own = full.view(torch.uint8), shard.view(torch.uint8)
    if point_to_point.serves(own, group):
        point_to_point.gather(into.view(group.size(), -1), own.view(-1), group.group_name)
    else:
        _torch.all_gather_single(into, own, group=group)
    return full


def exchange_flat(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[W*n] -> [W*n]`: part i goes to rank i, part i of the result came from rank i, outside autograd. Any dtype.

    One all-to-all: each rank sends n elements to each of W - 1 others. W = 1 returns x itself.

        >>> import shardfn as sf
        >>> import torch
        >>> from shardfn.core.collectives import exchange_flat
        >>> mesh = sf.make_mesh("cpu", tp=1)
        >>> exchange_flat(torch.arange(3), mesh.get_group("tp"))
        tensor([0, 1, 2])

    Raises:
        ShardError: W does not divide the length.
    """
    size = group.size()
    _check_parts("exchange_flat", x, size)
    x = x.detach().contiguous()  # [W*n]
    if size == 1:
        return x
    if x.is_meta:
        return torch.empty_like(x)
    if _torch.has_no_memory():
        return _torch.waited(_torch.exchanging(x, group))
    received = torch.empty_like(x)
    into, parts = received.view(torch.uint8), x.view(torch.uint8)
    if point_to_point.serves(parts, group, size):
        point_to_point.exchange(into.view(size, -1), parts.view(size, -1), group.group_name)
    else:
        _torch.all_to_all_single(into, parts, group=group)
    return received


def scatter_sum_flat(full: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[W*n] -> [n]`: the sum over ranks, of which each rank gets its part, outside autograd. Floats and integers.

    On NCCL one reduce-scatter. On gloo, which emulates that with an all-reduce, one all-to-all and a local sum in rank
    order, in float32 for 16-bit floats: measured 2 to 4 times faster, more precise, and the same in every run.
    Either way each rank sends n elements to each of W - 1 others. W = 1 returns `full` itself.

        >>> import shardfn as sf
        >>> import torch
        >>> from shardfn.core.collectives import scatter_sum_flat
        >>> mesh = sf.make_mesh("cpu", tp=1)
        >>> scatter_sum_flat(torch.arange(3), mesh.get_group("tp"))
        tensor([0, 1, 2])

    Raises:
        ShardError: W does not divide the length, or the dtype is none that adds (bool, float8).
    """
    size = group.size()
    _check_parts("scatter_sum_flat", full, size)
    _check_addable("scatter_sum_flat", full)
    full = full.detach().contiguous()  # [W*n]
    if size == 1:
        return full
    if full.is_meta:
        return full.new_empty(full.numel() // size)
    if torch.compiler.is_compiling():  # a graph has no works to wait for
        part = full.new_empty(full.numel() // size)  # [n]
        _torch.reduce_scatter_single(part, full, group=group)
        return part
    rows, fresh = full.view(size, -1), FreshBuffers(full.device)
    if _torch.has_no_memory() or _torch.simulated():
        return Flight(pure_scatter_steps(rows, group)).finish()[0].to(full.dtype)
    if point_to_point.serves(full, group, size):
        return _sum_of_rows(exchange_flat(full, group).view(size, -1), fresh).to(full.dtype)
    return Flight(scatter_sum_steps(rows, group, fresh, fresh)).finish()[0].to(full.dtype)


Works = list[Any]  # communications in flight, each with `wait()`
Steps = Generator[Works, None, list[Tensor]]


Explain = Callable[[RuntimeError], Exception]  # what an error of a communication comes from
Gathers = Sequence[tuple[str, int, Tensor, Tensor]]  # axis, dim, what was gathered, the whole


class Flight:
    """A communication in the air: started when made, over when it is asked for its result."""

    def __init__(self, steps: Steps, explain: Explain | None = None) -> None:
        """`explain` may know why a wait failed."""
        self._steps, self._explain = steps, explain
        self._works: Works = []
        self._result: list[Tensor] | None = None
        self.advance()

    def advance(self) -> None:
        """Wait for the collective under way and start the next one, if there is one."""
        if self._result is not None:
            return
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            self._steps.close()
            if self._explain is None:
                raise
            raise self._explain(error) from error
        self._works = []
        try:
            self._works = next(self._steps)
        except StopIteration as end:
            self._result = end.value

    def finish(self) -> list[Tensor]:
        """Wait for all that is left."""
        while self._result is None:
            self.advance()
        return self._result


def scatter_sum_steps(parts: Tensor, group: dist.ProcessGroup, buffers: Buffers, results: Buffers) -> Steps:
    """`[W, n] -> [n]` in steps: row i goes to rank i, and the result is one tensor of `results`.

    What `scatter_sum_flat` does, for callers with something to do meanwhile. What is added up here, and not by the
    backend, comes in `accumulation_dtype`.
    """
    if backend_of(group, parts.device) != "gloo":
        wide = parts.to(_WIDER.get(parts.dtype, parts.dtype))
        total = results.tensor(wide.shape[1], wide.dtype)  # [n]
        yield [_torch.reduce_scatter_single(total, wide.view(-1), group=group, async_op=True)]
        return [total]
    received = buffers.tensor(parts.numel(), parts.dtype)  # [W*n]
    into, sent = received.view(torch.uint8), parts.view(-1).view(torch.uint8)
    yield [_torch.all_to_all_single(into, sent, group=group, async_op=True)]
    return [_sum_of_rows(received.view_as(parts), results)]


def _sum_of_rows(rows: Tensor, results: Buffers) -> Tensor:
    """`[W, n] -> [n]`, added up in order in `accumulation_dtype`."""
    total = results.tensor(rows.shape[1], accumulation_dtype(rows.dtype))
    total.copy_(rows[0])
    for row in rows[1:]:
        total.add_(row if row.dtype not in _WIDER else row.to(total.dtype))
    return total


def pure_scatter_steps(parts: Tensor, group: dist.ProcessGroup) -> Steps:
    """`scatter_sum_steps` of tensors that have no memory of their own, see `Grid.pure`: nothing is written in place.

    A graph may have something else between the start of a collective and the wait for it.
    """
    if backend_of(group, parts.device) != "gloo":
        total = _torch.scattering_sum(parts.to(_WIDER.get(parts.dtype, parts.dtype)).view(-1), group)  # [n]
        yield []
        return [_torch.waited(total)]
    received = _torch.exchanging(parts.view(-1), group)  # [W*n]
    yield []
    first, *others = _torch.waited(received).view_as(parts).to(accumulation_dtype(parts.dtype)).unbind(0)
    return [sum(others, start=first)]


def sum_steps(x: Tensor, group: dist.ProcessGroup) -> Steps:
    """`sum_flat_` in steps, of a tensor whose dtype the backend adds well."""
    if _torch.has_no_memory():
        total = _torch.summing(x, group)
        yield []
        return [_torch.waited(total)]
    yield [dist.all_reduce(x, group=group, async_op=True)]
    return [x]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are added up by ourselves: float32 for 16-bit floats."""
    return torch.float32 if dtype in _HALVES else _WIDER.get(dtype, dtype)


def sum_flat_(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Overwrites x, of any shape, with its sum over ranks, and returns it; outside autograd. Any numbers.

    One all-reduce, on gloo in float32 for 16-bit floats; see [Note: small collectives] in point_to_point.py.

        >>> import shardfn as sf
        >>> import torch
        >>> from shardfn.core.collectives import sum_flat_
        >>> mesh = sf.make_mesh("cpu", tp=1)
        >>> sum_flat_(torch.arange(3), mesh.get_group("tp"))
        tensor([0, 1, 2])

    Raises:
        ShardError: the dtype is none that adds (bool, float8).
    """
    if x.is_complex():
        if group.size() > 1 and not x.is_meta:
            x.copy_(torch.view_as_complex(sum_flat_(torch.view_as_real(x.detach().resolve_conj().clone()), group)))
        return x
    _check_addable("sum_flat_", x)
    if group.size() == 1 or x.is_meta:
        return x
    target = x.detach()
    directly = point_to_point.serves(target, group)
    half_on_gloo = x.dtype in _HALVES and not directly and backend_of(group, x.device) == "gloo"
    wide = target.to(torch.float32 if half_on_gloo else _WIDER.get(x.dtype, x.dtype)).contiguous()
    if directly:
        point_to_point.sum_(wide, group.group_name)
    elif _torch.has_no_memory():
        wide = _torch.waited(_torch.summing(wide, group))
    else:
        dist.all_reduce(wide, group=group)
    if wide is not target:
        target.copy_(wide)
    return x


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """What moves the data of a device in a group: `"gloo"`, `"nccl"`, ..."""
    config = dist.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
    return config.partition(f"{device.type}:")[2].partition(",")[0]


def _check_parts(name: str, x: Tensor, size: int) -> None:
    if x.numel() % size:
        raise ShardError(
            f"{name}: the flat tensor has {x.numel()} elements, the group {size} ranks, "
            f"{x.numel()} % {size} = {x.numel() % size}. Pad it to a multiple of {size}."
        )


def _check_addable(name: str, x: Tensor) -> None:
    if x.dtype not in _ADDABLE:
        raise ShardError(f"{name}: cannot add {x.dtype} over ranks. Convert it, for example with x.to(torch.float32).")


# Pairs: one tensor over one named axis. Each has a linear forward, so that forward mode applies it to the tangent and
# reverse mode applies its declared transpose to the cotangent. W is the size of the axis.
#
# [Note: varying and invariant]
# As in JAX's `shard_map`, a value is *invariant* over an axis when it is the same on all its ranks, and so is its
# cotangent; otherwise it is *varying*. `psum` makes varying invariant and transposes to `pvary`, the identity that
# makes invariant varying, whose transpose is `psum`. An all-reduce that transposed to an all-reduce, as torch's does,
# would give a loss that every rank computes alike a gradient W times too large.
#
# [Note: three Functions]
# torch.compile refuses a Function that defines `jvp`. `_InGraph` has none and is what a traced graph uses; the others
# have `jvp`, and `vmap`, for eager code. Drop the split when Dynamo takes a custom `jvp` (torch 2.13 does not).
# A graph holds first derivatives only: `vmap`, `jvp` and a `grad` inside a `grad` are refused, since Dynamo would
# compute them wrongly in silence. Not detected: `autograd.grad(create_graph=True)` traced with `trace_autograd_ops`.

Mesh = DeviceMesh | MeshSpec  # a MeshSpec serves meta tensors only


class _Pair(NamedTuple):
    """A collective and its transpose, each the other's backward.

    | forward                | in                             | out                                             |
    |------------------------|--------------------------------|-------------------------------------------------|
    | `psum`                 | `[...]` varying                | `[...]` invariant, an all-reduce                |
    | `pvary`                | `[...]` invariant              | `[...]` varying, the same memory                |
    | `pmean`                | `[...]` varying                | `[...]` invariant, an all-reduce                |
    | `into_losses`          | `[...]` invariant              | `[...]` varying, the same memory                |
    | `all_gather`           | `[.., n, ..]` varying          | `[.., W*n, ..]` varying, an all-gather          |
    | `psum_scatter`         | `[.., W*n, ..]` varying        | `[.., n, ..]` varying, a reduce-scatter         |
    | `all_gather_invariant` | `[.., n, ..]` varying          | `[.., W*n, ..]` invariant, an all-gather        |
    | `shard_slice`          | `[.., W*n, ..]` invariant      | `[.., n, ..]` varying, a local slice            |
    | `all_to_all`           | `[.., W*n, .., m, ..]` varying | `[.., n, .., W*m, ..]` varying, an all-to-all   |
    | `all_to_all_rows`      | `[.., sum(send), ..]` varying  | `[.., sum(receive), ..]` varying, an all-to-all |

    Of the first eight, each line and the next are transposes. The last two are their own, with the last two of their
    dims (`split_dim` and `concat_dim`), or counts, changed over.
    """

    move: Callable[..., Tensor]  # (x, mesh, axis, *dims), dims from the front, or counts -> the result
    transpose: str
    varies: bool = True  # whether the result differs between ranks


def _psum(x: Tensor, mesh: DeviceMesh, axis: str) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    return x if x.is_meta else sum_flat_(x, mesh.get_group(axis))


def _same_memory(x: Tensor, mesh: DeviceMesh, axis: str) -> Tensor:
    return x.view_as(x)


def _gather_dim(x: Tensor, mesh: DeviceMesh, axis: str, dim: int) -> Tensor:
    size = axes_of(mesh)[axis]
    if x.is_meta:
        return x.new_empty((*x.shape[:dim], size * x.shape[dim], *x.shape[dim + 1 :]))
    flat = gather_flat(_torch.materialized(x).reshape(-1), mesh.get_group(axis))
    return flat.view(size, *x.shape).movedim(0, dim).flatten(dim, dim + 1)


def _psum_scatter(x: Tensor, mesh: DeviceMesh, axis: str, dim: int) -> Tensor:
    parts = x.unflatten(dim, (axes_of(mesh)[axis], -1)).movedim(dim, 0)  # [W, .., n, ..]
    if x.is_meta:
        return x.new_empty(parts.shape[1:])
    part = scatter_sum_flat(_torch.materialized(parts).reshape(-1), mesh.get_group(axis))
    return part.view(parts.shape[1:])  # [.., n, ..]


def _shard_slice(x: Tensor, mesh: DeviceMesh, axis: str, dim: int) -> Tensor:
    n = x.shape[dim] // axes_of(mesh)[axis]
    index = 0 if x.is_meta else mesh.get_local_rank(axis)
    # A copy, so that what is computed from a slice does not keep the whole alive.
    return x.narrow(dim, index * n, n).clone(memory_format=torch.contiguous_format)


def _all_to_all(x: Tensor, mesh: DeviceMesh, axis: str, split_dim: int, concat_dim: int) -> Tensor:
    parts = x.unflatten(split_dim, (axes_of(mesh)[axis], -1)).movedim(split_dim, 0)  # [W, .., n, .., m, ..]
    if not x.is_meta:
        flat = exchange_flat(_torch.materialized(parts).reshape(-1), mesh.get_group(axis))
        parts = flat.view(parts.shape)  # part i is now from rank i
    return parts.movedim(0, concat_dim).flatten(concat_dim, concat_dim + 1).contiguous()


def _all_to_all_rows(
    x: Tensor, mesh: DeviceMesh, axis: str, dim: int, send: tuple[int, ...], receive: tuple[int, ...]
) -> Tensor:
    rows = x.movedim(dim, 0)  # [sum(send), ..]
    received = torch.empty((sum(receive), *rows.shape[1:]), dtype=x.dtype, device=x.device)
    if not x.is_meta:
        width = prod(rows.shape[1:])
        flat = _torch.materialized(rows).reshape(len(rows), width).contiguous()
        if flat.stride() != (width, 1):  # of one row or none, which torch takes for contiguous
            flat = flat.clone(memory_format=torch.contiguous_format)
        into = received.view(len(received), width).view(torch.uint8)
        _torch.all_to_all_single(into, flat.view(torch.uint8), list(receive), list(send), group=mesh.get_group(axis))
    return received.movedim(0, dim)


_PAIRS = {
    "psum": _Pair(_psum, "pvary", varies=False),
    "pvary": _Pair(_same_memory, "psum"),
    "pmean": _Pair(lambda x, mesh, axis: _psum(x, mesh, axis) / axes_of(mesh)[axis], "into_losses", varies=False),
    "into_losses": _Pair(_same_memory, "pmean"),
    "all_gather": _Pair(_gather_dim, "psum_scatter"),
    "psum_scatter": _Pair(_psum_scatter, "all_gather"),
    "all_gather_invariant": _Pair(_gather_dim, "shard_slice", varies=False),
    "shard_slice": _Pair(_shard_slice, "all_gather_invariant"),
    "all_to_all": _Pair(_all_to_all, "all_to_all"),
    "all_to_all_rows": _Pair(_all_to_all_rows, "all_to_all_rows"),
}


class _InGraph(torch.autograd.Function):
    """One of `_PAIRS`, by its name: what a traced graph uses."""

    @staticmethod
    def forward(x: Tensor, kind: str, mesh: DeviceMesh, axis: str, dims: tuple[Any, ...]) -> Tensor:
        return _PAIRS[kind].move(x, mesh, axis, *dims)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.where = inputs[1:]  # no tensor is saved

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        kind, mesh, axis, dims = ctx.where
        transpose = _PAIRS[kind].transpose
        if transpose == kind:
            *others, one, other = dims
            dims = *others, other, one
        return _bind(transpose, grads[0], mesh, axis, *dims), None, None, None, None  # torch drops what is too many


class _Where:
    """What follows the tensor in the arguments of a Function, as one of them: transforms look at each, in 10 us."""

    def __init__(self, *where: Any) -> None:
        self.all = where


class InTransform(torch.autograd.Function):
    """The same with forward mode and batching, see [Note: three Functions]."""

    backward = _InGraph.backward

    @staticmethod
    def forward(x: Tensor, where: _Where) -> Tensor:
        return _InGraph.forward(x, *where.all)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.where = inputs[1].all

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return InTransform.apply(tangents[0], _Where(*ctx.where))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        x, where = args
        kind, mesh, axis, dims = where.all
        moved = tuple(dim + 1 if isinstance(dim, int) else dim for dim in dims)  # counts stay
        return InTransform.apply(x.movedim(in_dims[0], 0), _Where(kind, mesh, axis, moved)), 0


# `apply` asks for the signature each time; kept here, a call takes 10 us instead of 16.
InTransform.forward.__dict__["__signature__"] = inspect.signature(InTransform.forward)


class Eager(torch.autograd.Function):
    """The same for outside transforms: `apply` of one without `setup_context` takes 5 us instead of 10."""

    backward = _InGraph.backward

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str, mesh: DeviceMesh, axis: str, dims: tuple[Any, ...]) -> Tensor:
        ctx.where = kind, mesh, axis, dims
        return _PAIRS[kind].move(x, mesh, axis, *dims)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        kind, mesh, axis, dims = ctx.where
        return _bind(kind, tangents[0], mesh, axis, *dims)


def _bind(kind: str, x: Tensor, mesh: Mesh, axis: str, *dims: Any) -> Tensor:
    """Apply the Function of the set that fits where we are, see [Note: three Functions]."""
    if not torch.compiler.is_compiling():
        if axis in transform_state.mapped_axes():
            raise ShardError(
                f"{kind}: an sf.vmap goes on whose samples or members lie on {axis!r}, which has no part in "
                "the function: communicate outside, of what comes out"
            )
        x = _torch.of_each_rank(x) if _torch.simulated() else x
        watcher, varies = _WATCHING.get()[0], _PAIRS[kind].varies
        where: tuple[Any, ...] = kind, mesh, axis, dims
        apply, where = (InTransform.apply, (_Where(*where),)) if _torch.in_transform() else (Eager.apply, where)
        if watcher is None:
            out = apply(x, *where)
            if not varies and transform_state.is_under_way():
                transform_state.note_shared(out, axis, kind)
            return out
        with watched(None):  # what it is made of is not the function's
            out = apply(x, *where)
        return watcher(Moved(kind, varies, axis, dims), x, out)
    if not _torch.traces_first_order():
        raise ShardError(
            "torch.compile cannot take vmap, jvp or a second derivative of a collective: it would be silently wrong. "
            "Transform outside the compiled function, or put @torch.compiler.disable on the part that transforms."
        )
    # Dynamo does not see that an argument of `func.grad` requires a gradient, and drops `backward`; of a view it does.
    return _InGraph.apply(x.view_as(x), kind, mesh, axis, dims)


class _Weighed(torch.autograd.Function):
    """x times `now`. Its cotangent is multiplied by `then`, the cotangent of that by `now` again, and so on.

    With `now` of 1 the identity for which losses count otherwise; see [Note: cotangents of trees] in buckets.py.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, now: float, then: float) -> Tensor:
        return x.view_as(x) if now == 1 else x * now

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.now, ctx.then = inputs[1:]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Weighed.apply(grads[0], ctx.then, ctx.now), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _Weighed.forward(tangents[0], ctx.now, ctx.then)


def weighed(x: Tensor, factor: float) -> Tensor:
    """x itself, whose cotangent is multiplied by `factor`.

    >>> import torch
    >>> from shardfn.core.collectives import weighed
    >>> torch.func.grad(lambda x: weighed(x, 3.0) ** 2)(torch.tensor(2.0))
    tensor(12.)
    """
    return x if factor == 1 or not may_be_differentiated(x) else _Weighed.apply(x, 1, factor)


class _OfRank(_Weighed):
    """The identity; what is made of its cotangent, which is this rank's, has a cotangent that counts by a number."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Weighed.apply(grads[0], 1, ctx.then), None, None


def of_rank(x: Any, factor: float) -> Any:
    """This rank's part of what a loss of all ranks is made of: a loss of this rank of its gradient counts by `factor`.

    >>> import torch
    >>> from shardfn.core.collectives import of_rank
    >>> x = torch.tensor(2.0, requires_grad=True)
    >>> (slope,) = torch.autograd.grad(of_rank(x, 0.5) ** 3, x, create_graph=True)
    >>> slope.item(), torch.autograd.grad(slope, x)[0].item()
    (12.0, 6.0)
    """
    return _OfRank.apply(x, 1, factor) if factor != 1 and isinstance(x, Tensor) and x.requires_grad else x


class Moved(NamedTuple):
    """A collective that was called: its name, whether its result varies, its axis and dims."""

    kind: str
    varies: bool
    axis: str
    dims: tuple[Any, ...]


Watcher = Callable[[Moved, Tensor, Tensor], Tensor]  # what went in, what came out -> what is given for it

Asked = Callable[[str], None]  # the axis whose index somebody asks for

_WATCHING: ContextVar[tuple[Watcher | None, Asked | None]] = ContextVar("watching", default=(None, None))


def watching() -> bool:
    """Whether somebody hears of collectives, and none is under way."""
    return _WATCHING.get()[0] is not None


def watched(watcher: Watcher | None, asked: Asked | None = None) -> AbstractContextManager[None]:
    """Within it `watcher` hears of collectives, to follow what varies, and `asked` of `axis_index`."""
    return transform_state.holding(_WATCHING, (watcher, asked))


def axis_size(mesh: Mesh, axis: str) -> int:
    """Number of ranks along an axis.

        >>> import shardfn as sf
        >>> sf.collectives.axis_size(sf.MeshSpec(fsdp=4, tp=2), "tp")
        2

    Raises:
        ShardError: the mesh has no such axis.
    """
    return _size("axis_size", mesh, axis)


def axis_index(mesh: DeviceMesh, axis: str) -> int:
    """This rank's place along an axis, from 0 to `axis_size(mesh, axis) - 1`.

        >>> import shardfn as sf
        >>> sf.collectives.axis_index(sf.make_mesh("cpu", tp=1), "tp")
        0

    Raises:
        ShardError: the mesh has no such axis.
    """
    _size("axis_index", mesh, axis)
    index = mesh.get_local_rank(axis)
    if torch.compiler.is_compiling() or (asked := _WATCHING.get()[1]) is None or _torch.simulated():
        return index
    asked(axis)
    return RankIndex(index, axis)


class RankIndex(int):
    """A rank's place, and what is computed from it, where it is followed over which axes values differ."""

    axes: frozenset[str]

    def __new__(cls, value: int, *axes: str) -> "RankIndex":
        """A number that differs over `axes`."""
        made = super().__new__(cls, value)
        made.axes = frozenset(axes)
        return made

    __hash__ = int.__hash__


def _follows(name: str) -> Callable[..., Any]:
    def operation(self: RankIndex, *others: Any) -> Any:
        found = getattr(int, name)(self, *others)
        axes = self.axes.union(*(other.axes for other in others if isinstance(other, RankIndex)))
        return RankIndex(found, *axes) if type(found) is int else found

    return operation


def _refuses(why: str) -> Callable[..., Any]:
    def operation(self: RankIndex, *others: object) -> Any:
        raise ShardError(f"axis_index: {why}")

    return operation


_compares = _refuses(
    "a comparison of it gives another answer on each rank, which cannot be followed; compare tensors: "
    "torch.where(torch.tensor(index) == 0, a, b)"
)
_divides = _refuses("a fraction of it cannot be followed over ranks; compute with a tensor, torch.tensor(index) / 2")
for _name in "add radd sub rsub mul rmul floordiv rfloordiv mod rmod neg pos and rand or ror xor rxor".split():
    setattr(RankIndex, f"__{_name}__", _follows(f"__{_name}__"))
for _name in "bool eq ne lt le gt ge".split():
    setattr(RankIndex, f"__{_name}__", _compares)
for _name in "truediv rtruediv pow rpow float divmod rdivmod lshift rlshift rshift rrshift abs invert round".split():
    setattr(RankIndex, f"__{_name}__", _divides)


def psum(x: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """The sum over the ranks of an axis: varying in, invariant out.

    Transpose: `pvary`, so that a loss that every rank computes alike from the sum has the right gradient. One
    all-reduce of x, about 2 * x.nbytes sent by each rank; none in backward. In a loss of `value_and_grad`, which each
    data rank has for itself, a sum over a data axis is used behind a `pvary`.

        >>> import shardfn as sf
        >>> import torch
        >>> sf.collectives.psum(torch.ones(2), sf.make_mesh("cpu", tp=1), "tp")
        tensor([1., 1.])

    Args:
        x: `[...]`, floating or integer; the same shape and dtype on every rank.
        mesh: a mesh with axis names; a `MeshSpec` when x is on the meta device.
        axis: the name of one axis. Over an axis of size 1 this is x itself.

    Returns:
        `[...]`, the same on every rank of the axis.

    Raises:
        ShardError: the mesh has no such axis, or the dtype is none that adds (bool, float8).
    """
    if not x.is_complex():
        _check_addable("psum", x)
    if _size("psum", mesh, axis, x) == 1:
        return x
    _require_no_loss("psum", x, axis)
    return _bind("psum", x, mesh, axis)


def psum_of_trees(x: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """`psum` of what is made of a rank's part of trees, which comes into losses by `into_losses`."""
    return x if _size("psum", mesh, axis, x) == 1 else _bind("psum", x, mesh, axis)


def _require_no_loss(name: str, x: Tensor, axis: str) -> None:
    """Outside of transforms `Differentiation.require_varying` looks whether a `pvary` follows; there nobody can."""
    if torch.compiler.is_compiling() or axis not in transform_state.axes_of_losses() or watching():
        return
    if "Grad" in _torch.kinds_of_transforms() and _torch.differentiated_in_transform(x):
        raise transform_state.several_losses(name, axis, "nobody can tell whether a pvary follows")


def pmean(x: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """The mean over the ranks of an axis, `psum(x) / W`: varying in, invariant out.

    Transpose: `pvary` divided by W. One all-reduce of x, about 2 * x.nbytes sent by each rank; none in backward.

        >>> import shardfn as sf
        >>> import torch
        >>> sf.collectives.pmean(torch.ones(2), sf.make_mesh("cpu", tp=1), "tp")
        tensor([1., 1.])

    Args:
        x: `[...]`, floating; the same shape and dtype on every rank.
        mesh: a mesh with axis names; a `MeshSpec` when x is on the meta device.
        axis: the name of one axis. Over an axis of size 1 this is x itself.

    Returns:
        `[...]`, the same on every rank of the axis.

    Raises:
        ShardError: the mesh has no such axis, or the dtype has no mean (integers, bool, float8).
    """
    if not x.is_complex():
        if not x.is_floating_point():
            raise ShardError(f"pmean: {x.dtype} has no mean. Convert x with x.float(), or use psum.")
        _check_addable("pmean", x)
    if _size("pmean", mesh, axis, x) > 1:
        _require_no_loss("pmean", x, axis)
    return pmean_of_losses(x, mesh, axis)


def pmean_of_losses(x: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """`pmean` of what every rank has a loss, or a count, of."""
    size = _size("pmean", mesh, axis, x)
    return x if size == 1 else _bind("psum", x, mesh, axis) / size


def pvary(x: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """The identity that marks where a value the ranks share enters computation in which they differ.

    Invariant in, varying out. Transpose: `psum`, which adds what each rank contributes to the gradient. Applied once
    to a tensor that several layers read, it costs one all-reduce in backward; nothing in forward.

        >>> import shardfn as sf
        >>> import torch
        >>> sf.collectives.pvary(torch.ones(2), sf.make_mesh("cpu", tp=1), "tp")
        tensor([1., 1.])

    Args:
        x: `[...]`, any dtype, the same on every rank of the axis.
        mesh: a mesh with axis names; a `MeshSpec` when x is on the meta device.
        axis: the name of one axis. Over an axis of size 1 this is x itself.

    Returns:
        `[...]`, a view of x. Not to be written in place, which torch refuses.

    Raises:
        ShardError: the mesh has no such axis.
    """
    return x if _size("pvary", mesh, axis, x) == 1 else _bind("pvary", x, mesh, axis)


def into_losses(x: Tensor, mesh: Mesh, axes: Sequence[str]) -> Tensor:
    """A value of whole trees, such as a norm, for use in the loss of each data rank; see [Note: cotangents of trees].

    Identity. Its cotangent is the mean of what the losses say: one all-reduce an axis in backward.

        >>> import shardfn as sf
        >>> import torch
        >>> from shardfn.core.collectives import into_losses
        >>> into_losses(torch.ones(2), sf.make_mesh("cpu", fsdp=1), ["fsdp"])
        tensor([1., 1.])
    """
    for axis in axes:
        x = x if _size("into_losses", mesh, axis, x) == 1 else _bind("into_losses", x, mesh, axis)
    return x


def all_gather(x: Tensor, mesh: Mesh, axis: str, dim: int) -> Tensor:
    """Concatenates the ranks' tensors in rank order, for use in which the ranks differ: varying in, varying out.

    Transpose: `psum_scatter`. One all-gather, x.nbytes to each other rank; one reduce-scatter in backward.

        >>> import shardfn as sf
        >>> import torch
        >>> x = torch.empty(2, 3, device="meta")
        >>> sf.collectives.all_gather(x, sf.MeshSpec(tp=4), "tp", 1).shape
        torch.Size([2, 12])

    Args:
        x: `[.., n, ..]`, any dtype; the same shape and dtype on every rank.
        mesh: a mesh with axis names; a `MeshSpec` when x is on the meta device.
        axis: the name of one axis, of size W. Over an axis of size 1 this is x itself.
        dim: where n is; negative counts from the end.

    Returns:
        `[.., W*n, ..]`.

    Raises:
        ShardError: the mesh has no such axis, or x no such dim.
    """
    size, dim = _size("all_gather", mesh, axis, x), _dim("all_gather", x, "dim", dim)
    return x if size == 1 else _bind("all_gather", x, mesh, axis, dim)


def all_gather_invariant(x: Tensor, mesh: Mesh, axis: str, dim: int) -> Tensor:
    """Concatenates the ranks' tensors in rank order, for use that is the same on every rank: varying in, invariant out.

    Transpose: `shard_slice`. One all-gather, x.nbytes to each other rank; nothing in backward. Where the ranks go on
    to compute different things with the result, `all_gather` is the right one: this one would lose their gradients.

        >>> import shardfn as sf
        >>> import torch
        >>> x = torch.empty(2, 3, device="meta")
        >>> sf.collectives.all_gather_invariant(x, sf.MeshSpec(tp=4), "tp", 1).shape
        torch.Size([2, 12])

    Args:
        x: `[.., n, ..]`, any dtype; the same shape and dtype on every rank.
        mesh: a mesh with axis names; a `MeshSpec` when x is on the meta device.
        axis: the name of one axis, of size W. Over an axis of size 1 this is x itself.
        dim: where n is; negative counts from the end.

    Returns:
        `[.., W*n, ..]`, the same on every rank of the axis.

    Raises:
        ShardError: the mesh has no such axis, or x no such dim.
    """
    size, dim = _size("all_gather_invariant", mesh, axis, x), _dim("all_gather_invariant", x, "dim", dim)
    return x if size == 1 else _bind("all_gather_invariant", x, mesh, axis, dim)


def psum_scatter(x: Tensor, mesh: Mesh, axis: str, dim: int) -> Tensor:
    """The sum over ranks, of which each rank keeps its part: varying in, varying out.

    Transpose: `all_gather`. One reduce-scatter (on gloo an all-to-all), x.nbytes / W to each other rank; one
    all-gather in backward.

        >>> import shardfn as sf
        >>> import torch
        >>> x = torch.empty(2, 12, device="meta")
        >>> sf.collectives.psum_scatter(x, sf.MeshSpec(tp=4), "tp", 1).shape
        torch.Size([2, 3])

    Args:
        x: `[.., W*n, ..]`, floating or integer; the same shape and dtype on every rank.
        mesh: a mesh with axis names; a `MeshSpec` when x is on the meta device.
        axis: the name of one axis, of size W. Over an axis of size 1 this is x itself.
        dim: where W*n is; negative counts from the end.

    Returns:
        `[.., n, ..]`.

    Raises:
        ShardError: the mesh has no such axis, x no such dim, W does not divide it, or the dtype is none that adds.
    """
    _check_addable("psum_scatter", x)
    size, dim = _split("psum_scatter", x, mesh, axis, dim)
    return x if size == 1 else _bind("psum_scatter", x, mesh, axis, dim)


def shard_slice(x: Tensor, mesh: Mesh, axis: str, dim: int) -> Tensor:
    """This rank's part of a value that every rank has: invariant in, varying out.

    Transpose: `all_gather_invariant`. Nothing in forward; one all-gather in backward, x.nbytes / W to each other rank.

        >>> import shardfn as sf
        >>> import torch
        >>> x = torch.empty(2, 12, device="meta")
        >>> sf.collectives.shard_slice(x, sf.MeshSpec(tp=4), "tp", 1).shape
        torch.Size([2, 3])

    Args:
        x: `[.., W*n, ..]`, any dtype, the same on every rank of the axis.
        mesh: a mesh with axis names; a `MeshSpec` when x is on the meta device.
        axis: the name of one axis, of size W. Over an axis of size 1 this is x itself.
        dim: where W*n is; negative counts from the end.

    Returns:
        `[.., n, ..]`, a copy.

    Raises:
        ShardError: the mesh has no such axis, x no such dim, or W does not divide it.
    """
    size, dim = _split("shard_slice", x, mesh, axis, dim)
    return x if size == 1 else _bind("shard_slice", x, mesh, axis, dim)


def all_to_all(x: Tensor, mesh: Mesh, axis: str, split_dim: int, concat_dim: int) -> Tensor:
    """Moves the sharding from one dim to another: part i along `split_dim` goes to rank i, which concatenates.

    Varying in, varying out. Transpose: `all_to_all` with the dims swapped. One all-to-all, x.nbytes / W to each other
    rank; the same in backward.

        >>> import shardfn as sf
        >>> import torch
        >>> x = torch.empty(2, 12, device="meta")
        >>> sf.collectives.all_to_all(x, sf.MeshSpec(tp=4), "tp", split_dim=1, concat_dim=0).shape
        torch.Size([8, 3])

    Args:
        x: `[.., W*n, .., m, ..]`, any dtype; the same shape and dtype on every rank.
        mesh: a mesh with axis names; a `MeshSpec` when x is on the meta device.
        axis: the name of one axis, of size W. Over an axis of size 1 this is x itself.
        split_dim: where W*n is; negative counts from the end.
        concat_dim: where m is; negative counts from the end. May equal `split_dim`.

    Returns:
        `[.., n, .., W*m, ..]`.

    Raises:
        ShardError: the mesh has no such axis, x no such dim, or W does not divide `split_dim`.
    """
    size, split_dim = _split("all_to_all", x, mesh, axis, split_dim, "split_dim")
    concat_dim = _dim("all_to_all", x, "concat_dim", concat_dim)
    if size > 1 and torch.compiler.is_compiling() and not _torch.COMPILES_EXCHANGES:
        return _exchanged_by_gather(x, mesh, axis, size, split_dim, concat_dim)
    return x if size == 1 else _bind("all_to_all", x, mesh, axis, split_dim, concat_dim)


def all_to_all_rows(x: Tensor, mesh: Mesh, axis: str, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """Sends as many rows to each rank as it shall have: the first `send[0]` go to rank 0, the next to rank 1.

    Varying in, varying out. Transpose: `all_to_all_rows` with the counts swapped. One all-to-all, each row to its rank;
    the same in backward. A rank may send or receive nothing, and takes part all the same.

    What a rank receives, the others decide: `all_to_all(torch.tensor(send), mesh, axis, 0, 0)` tells each rank.

        >>> import shardfn as sf
        >>> import torch
        >>> mesh = sf.make_mesh("cpu", ep=1)
        >>> send = torch.tensor([2])  # rows to each rank
        >>> receive = sf.collectives.all_to_all(send, mesh, "ep", 0, 0)
        >>> sf.collectives.all_to_all_rows(torch.ones(2, 3), mesh, "ep", send.tolist(), receive.tolist()).shape
        torch.Size([2, 3])

    Args:
        x: `[sum(send), ...]`, any dtype; the same dtype and dims after the first on every rank.
        mesh: a mesh with axis names; a `MeshSpec` when x is on the meta device.
        axis: the name of one axis, of size W. Over an axis of size 1 this is x itself.
        send: W numbers of rows, one for each rank.
        receive: W numbers of rows, one from each rank; what the others send here.

    Returns:
        `[sum(receive), ...]`, in the order of the ranks.

    Raises:
        ShardError: the mesh has no such axis, the counts are not W or do not add up to the rows of x; under
            `torch.compile`, `sf.jit` and `sf.simulate`, where sizes cannot depend on values.
    """
    size, given = _size("all_to_all_rows", mesh, axis, x), (tuple(map(int, send)), tuple(map(int, receive)))
    if not x.dim():
        raise ShardError("all_to_all_rows: x is a scalar, which has no rows")
    for name, counts in zip(("send", "receive"), given, strict=True):
        if len(counts) != size or min(counts) < 0:
            raise ShardError(f"all_to_all_rows: {name}={list(counts)} has to be {axis}={size} counts, one a rank")
    if sum(given[0]) != len(x):
        raise ShardError(f"all_to_all_rows: x has {len(x)} rows, and send={list(given[0])} adds up to {sum(given[0])}")
    if size > 1 and not x.is_meta and (torch.compiler.is_compiling() or _torch.has_no_memory() or _torch.simulated()):
        raise ShardError(
            "all_to_all_rows: how many rows a rank receives depends on values, which torch.compile, sf.jit and "
            "sf.simulate cannot follow. Leave it out of the graph, or use all_to_all with the same number for all ranks"
        )
    return x if size == 1 else _bind("all_to_all_rows", x, mesh, axis, 0, *given)


def _exchanged_by_gather(x: Tensor, mesh: Mesh, axis: str, size: int, split_dim: int, concat_dim: int) -> Tensor:
    """`all_to_all` that receives W times as much."""
    parts = _bind("all_gather", x.unsqueeze(0), mesh, axis, 0)  # [W, ..]
    length = x.shape[split_dim] // size
    index = 0 if isinstance(mesh, MeshSpec) else mesh.get_local_rank(axis)
    own = parts.narrow(split_dim + 1, index * length, length)
    return own.movedim(0, concat_dim).flatten(concat_dim, concat_dim + 1)


def _size(name: str, mesh: Mesh, axis: str, x: Tensor | None = None) -> int:
    """The size of the axis, after a look at all three arguments."""
    if isinstance(x, DTensor):
        raise ShardError(f"{name}: takes this rank's plain tensor, got a DTensor. Pass x.to_local().")
    sizes = axes_of(mesh)
    if axis not in sizes:
        listed = ", ".join(f"{known}={size}" for known, size in sizes.items())
        raise ShardError(f"{name}: axis={axis!r} is not an axis of the mesh ({listed}){did_you_mean(str(axis), sizes)}")
    if sizes[axis] > 1 and isinstance(mesh, MeshSpec) and x is not None and not x.is_meta:
        raise ShardError(f"{name}: {mesh} has no processes, so it serves meta tensors only. Pass a DeviceMesh.")
    return sizes[axis]


def _dim(name: str, x: Tensor, parameter: str, dim: int) -> int:
    """The dim counted from the front."""
    if not -x.ndim <= dim < x.ndim:
        fix = f"Dims are {-x.ndim} to {x.ndim - 1}." if x.ndim else "It has no dim; x.unsqueeze(0) gives it one."
        raise ShardError(f"{name}: {parameter}={dim} does not fit a tensor of shape {tuple(x.shape)}. {fix}")
    return dim % x.ndim


def _split(name: str, x: Tensor, mesh: Mesh, axis: str, dim: int, parameter: str = "dim") -> tuple[int, int]:
    """The size of the axis, which must divide the dim, and the dim counted from the front."""
    dim = _dim(name, x, parameter, dim)
    size, length = _size(name, mesh, axis, x), x.shape[dim]
    if length % size:
        raise ShardError(
            f"{name}: shape {tuple(x.shape)} splits dim {dim} over {axis}={size}, {length} % {size} = {length % size}. "
            f"Pad dim {dim} to {-(-length // size) * size}, or choose a dim that {size} divides."
        )
    return size, dim
