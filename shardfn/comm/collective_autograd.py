"""How a collective over one axis is differentiated, mapped and put into a graph: by its declared transpose."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn import _torch
from shardfn.comm.journal import JOURNALS, journal_of, raise_explained
from shardfn.comm.raw_collectives import exchange_flat, gather_flat, scatter_sum_flat, sum_flat_
from shardfn.context import active_transforms
from shardfn.layout import MeshSpec, axes_of, is_batch_axis, may_be_differentiated
from shardfn.notation import ShardError

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


_SENDS = {kind for kind in _PAIRS if kind not in ("pvary", "into_losses", "shard_slice")}


def _moved(kind: str, x: Tensor, mesh: DeviceMesh, axis: str, dims: tuple[Any, ...]) -> Tensor:
    """What one of `_PAIRS` does, with a note of it in the journal."""
    if torch.compiler.is_compiling() or kind not in _SENDS or x.is_meta or (kept := journal_of(mesh)) is None:
        return _PAIRS[kind].move(x, mesh, axis, *dims)
    kept.note(f"{kind} over '{axis}'", axis)
    try:
        return _PAIRS[kind].move(x, mesh, axis, *dims)
    except RuntimeError as error:
        raise_explained(mesh, error)


class _InGraph(torch.autograd.Function):
    """One of `_PAIRS`, by its name: what a traced graph uses."""

    @staticmethod
    def forward(x: Tensor, kind: str, mesh: DeviceMesh, axis: str, dims: tuple[Any, ...]) -> Tensor:
        return _moved(kind, x, mesh, axis, dims)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.where = inputs[1:]  # no tensor is saved

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        kind, mesh, axis, dims = ctx.where
        if not getattr(ctx, "meets", True):
            active_transforms.require_met(ctx, kind, axis)
        transpose = _PAIRS[kind].transpose
        if transpose == kind:
            *others, one, other = dims
            dims = *others, other, one
        return bind(transpose, grads[0], mesh, axis, *dims), None, None, None, None  # torch drops what is too many


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
        ctx.where, ctx.meets = (kind, mesh, axis, dims), _PAIRS[kind].varies or not ctx.needs_input_grad[0]
        ctx.meets = ctx.meets or not is_batch_axis(axis) or active_transforms.is_under_way()  # or by a pvary, later
        if JOURNALS:
            return _moved(kind, x, mesh, axis, dims)
        try:
            return _PAIRS[kind].move(x, mesh, axis, *dims)
        except RuntimeError as error:
            raise_explained(mesh, error)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        kind, mesh, axis, dims = ctx.where
        return bind(kind, tangents[0], mesh, axis, *dims)


def bind(kind: str, x: Tensor, mesh: Mesh, axis: str, *dims: Any) -> Tensor:
    """Apply the Function of the set that fits where we are, see [Note: three Functions]."""
    if not torch.compiler.is_compiling():
        if axis in active_transforms.mapped_axes():
            why = f"an sf.vmap goes on whose samples or members lie on {axis!r}, which has no part in the function"
            raise ShardError(f"{kind}: {why}: communicate outside, of what comes out")
        x = _torch.of_each_rank(x) if _torch.simulated() else x
        watcher, varies = WATCHING.get()[0], _PAIRS[kind].varies
        where: tuple[Any, ...] = kind, mesh, axis, dims
        apply, where = (InTransform.apply, (_Where(*where),)) if _torch.in_transform() else (Eager.apply, where)
        if watcher is None:
            out = apply(x, *where)
            if not varies and active_transforms.is_under_way():
                active_transforms.note_shared(out, axis, kind)
            elif kind in ("pvary", "into_losses") and is_batch_axis(axis):
                active_transforms.note_met(x, axis)
            return out
        with watched(None):  # what it is made of is not the function's
            out = apply(x, *where)
        return watcher(Moved(kind, varies, axis, dims), x, out)
    if not _torch.traces_first_order():
        why = "torch.compile cannot take vmap, jvp or a second derivative of a collective: it would be silently wrong"
        raise ShardError(f"{why}. Transform outside of it, or put @torch.compiler.disable on the part that transforms.")
    # Dynamo does not see that an argument of `func.grad` requires a gradient, and drops `backward`; of a view it does.
    return _InGraph.apply(x.view_as(x), kind, mesh, axis, dims)


class _Weighed(torch.autograd.Function):
    """x times `now`. Its cotangent is multiplied by `then`, the cotangent of that by `after`, then by `then` again, ...

    With `now` of 1 the identity for which losses count otherwise; see [Note: cotangents of trees] in buckets.py.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, now: float, then: float, after: float) -> Tensor:
        return x.view_as(x) if now == 1 else x * now

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.weights = inputs[1:]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _, then, after = ctx.weights
        return _Weighed.apply(grads[0], then, after, then), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _Weighed.forward(tangents[0], *ctx.weights)


def weighed(x: Tensor, factor: float) -> Tensor:
    """x itself, whose cotangent is multiplied by `factor`.

    >>> import torch
    >>> from shardfn.comm.collective_autograd import weighed
    >>> torch.func.grad(lambda x: weighed(x, 3.0) ** 2)(torch.tensor(2.0))
    tensor(12.)
    """
    return x if factor == 1 or not may_be_differentiated(x) else _Weighed.apply(x, 1, factor, 1)


def of_rank(x: Any, factor: float) -> Any:
    """This rank's part of what a loss of all ranks is made of: a loss of this rank of its gradient counts by `factor`.

    >>> import torch
    >>> from shardfn.comm.collective_autograd import of_rank
    >>> x = torch.tensor(2.0, requires_grad=True)
    >>> (slope,) = torch.autograd.grad(of_rank(x, 0.5) ** 3, x, create_graph=True)
    >>> slope.item(), torch.autograd.grad(slope, x)[0].item()
    (12.0, 6.0)
    """
    return _Weighed.apply(x, 1, 1, factor) if factor != 1 and isinstance(x, Tensor) and x.requires_grad else x


class Moved(NamedTuple):
    """A collective that was called: its name, whether its result varies, its axis and dims."""

    kind: str
    varies: bool
    axis: str
    dims: tuple[Any, ...]


Watcher = Callable[[Moved, Tensor, Tensor], Tensor]  # what went in, what came out -> what is given for it

Asked = Callable[[str], None]  # the axis whose index somebody asks for

WATCHING: ContextVar[tuple[Watcher | None, Asked | None]] = ContextVar("watching", default=(None, None))


def watching() -> bool:
    """Whether somebody hears of collectives, and none is under way."""
    return WATCHING.get()[0] is not None


def watched(watcher: Watcher | None, asked: Asked | None = None) -> AbstractContextManager[None]:
    """Within it `watcher` hears of collectives, to follow what varies, and `asked` of `axis_index`."""
    return active_transforms.holding(WATCHING, (watcher, asked))
