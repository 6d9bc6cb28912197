"""Collectives on plain local tensors over one named mesh axis, which every transform understands: `psum`, `pvary`, ...

Each has a declared transpose ([Note: varying and invariant] in `collective_autograd.py`). None communicates on a meta
tensor (a dry run sees the right shapes) or over a single rank.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardfn import _torch
from shardfn.comm.collective_autograd import WATCHING, Mesh, bind, watching
from shardfn.comm.raw_collectives import check_addable
from shardfn.context import active_transforms
from shardfn.layout import MeshSpec, axes_of
from shardfn.notation import ShardError, did_you_mean

Values = TypeVar("Values")  # a tensor, or a dict, list or tuple of tensors
Gathers = Sequence[tuple[str, int, Tensor, Tensor]]  # axis, dim, what was gathered, the whole


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
    if torch.compiler.is_compiling() or (asked := WATCHING.get()[1]) is None or _torch.simulated():
        return index
    asked(axis)
    return RankIndex(index, axis)


class RankIndex(int):
    """A rank's place, and what is computed from it, where it is followed over which axes values differ."""

    axes: frozenset[str]

    def __new__(cls, value: int, *axes: str) -> "RankIndex":
        """A number that differs over `axes`."""
        index = super().__new__(cls, value)
        index.axes = frozenset(axes)
        return index

    __hash__ = int.__hash__


def _follows(name: str) -> Callable[..., Any]:
    def operation(self: RankIndex, *others: Any) -> Any:
        result = getattr(int, name)(self, *others)
        axes = self.axes.union(*(other.axes for other in others if isinstance(other, RankIndex)))
        return RankIndex(result, *axes) if type(result) is int else result

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


def psum(x: Values, mesh: Mesh, axis: str) -> Values:
    """The sum over the ranks of an axis: varying in, invariant out.

    Transpose: `pvary`, so that a loss that every rank computes alike from the sum has the right gradient. One
    all-reduce of x, about 2 * x.nbytes sent by each rank; none in backward. In a loss of `value_and_grad`, which each
    data rank has for itself, a sum over a data axis is used behind a `pvary`.

        >>> import shardfn as sf
        >>> import torch
        >>> sf.collectives.psum(torch.ones(2), sf.make_mesh("cpu", tp=1), "tp")
        tensor([1., 1.])

    Args:
        x: `[...]`, floating or integer; the same shape and dtype on every rank. Or a dict, list or tuple of such, as
            metrics are: a collective for each.
        mesh: a mesh with axis names; a `MeshSpec` when x is on the meta device.
        axis: the name of one axis. Over an axis of size 1 this is x itself.

    Returns:
        like x, the same on every rank of the axis.

    Raises:
        ShardError: the mesh has no such axis, or the dtype is none that adds (bool, float8); in a loss, of a scalar
            that the ranks of the axis share.
        TypeError: something that is no tensor.
    """
    if not isinstance(x, Tensor):
        return _each("psum", psum, x, mesh, axis)
    if not x.is_complex():
        check_addable("psum", x)
    if _size("psum", mesh, axis, x) == 1:
        return x
    _require_no_loss("psum", x, axis)
    return bind("psum", x, mesh, axis)


def _each(name: str, collective: Callable[..., Any], x: Any, mesh: Mesh, axis: str) -> Any:
    """A collective of every tensor in a container, in an order that is the same on all ranks."""
    if type(x) is dict:
        done = {key: collective(x[key], mesh, axis) for key in sorted(x)}
        return {key: done[key] for key in x}
    if isinstance(x, list | tuple):
        items = [collective(item, mesh, axis) for item in x]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    raise TypeError(f"{name}: a {type(x).__name__}; takes a tensor, or a dict, list or tuple of them")


def psum_of_trees(x: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """`psum` of what is made of a rank's part of trees, which comes into losses by `into_losses`."""
    return x if _size("psum", mesh, axis, x) == 1 else bind("psum", x, mesh, axis)


def _require_no_loss(name: str, x: Tensor, axis: str) -> None:
    """Outside of transforms `Differentiation.require_varying` looks whether a `pvary` follows; there nobody can."""
    if torch.compiler.is_compiling():
        return
    if not x.dim() and not watching() and active_transforms.is_shared(x, axis):
        whole = f"the loss is whole over {axis!r} already, the same on each of its ranks, as what sf.apply returns is"
        raise ShardError(f"{name}: {whole}. Leave out the {name} over {axis!r}: nothing is to be written for that axis")
    if axis not in active_transforms.axes_of_losses() or watching():
        return
    if "Grad" in _torch.kinds_of_transforms() and _torch.differentiated_in_transform(x):
        raise active_transforms.several_losses(name, axis, "nobody can tell whether a pvary follows")


def pmean(x: Values, mesh: Mesh, axis: str) -> Values:
    """The mean over the ranks of an axis, `psum(x) / W`: varying in, invariant out.

    Transpose: `pvary` divided by W. One all-reduce of x, about 2 * x.nbytes sent by each rank; none in backward.

        >>> import shardfn as sf
        >>> import torch
        >>> sf.collectives.pmean(torch.ones(2), sf.make_mesh("cpu", tp=1), "tp")
        tensor([1., 1.])

    Args:
        x: `[...]`, floating; the same shape and dtype on every rank. Or a dict, list or tuple of such, as metrics are.
        mesh: a mesh with axis names; a `MeshSpec` when x is on the meta device.
        axis: the name of one axis. Over an axis of size 1 this is x itself.

    Returns:
        like x, the same on every rank of the axis.

    Raises:
        ShardError: the mesh has no such axis, or the dtype has no mean (integers, bool, float8).
        TypeError: something that is no tensor.
    """
    if not isinstance(x, Tensor):
        return _each("pmean", pmean, x, mesh, axis)
    if not x.is_complex():
        if not x.is_floating_point():
            raise ShardError(f"pmean: {x.dtype} has no mean. Convert x with x.float(), or use psum.")
        check_addable("pmean", x)
    if _size("pmean", mesh, axis, x) > 1:
        _require_no_loss("pmean", x, axis)
    return pmean_of_losses(x, mesh, axis)


def pmean_of_losses(x: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """`pmean` of what every rank has a loss, or a count, of."""
    size = _size("pmean", mesh, axis, x)
    return x if size == 1 else bind("psum", x, mesh, axis) / size


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
    return x if _size("pvary", mesh, axis, x) == 1 else bind("pvary", x, mesh, axis)


def into_losses(x: Tensor, mesh: Mesh, axes: Sequence[str]) -> Tensor:
    """A value of whole trees, such as a norm, for use in the loss of each data rank; see [Note: cotangents of trees].

    Identity. Its cotangent is the mean of what the losses say: one all-reduce an axis in backward.

        >>> import shardfn as sf
        >>> import torch
        >>> from shardfn.comm.collectives import into_losses
        >>> into_losses(torch.ones(2), sf.make_mesh("cpu", fsdp=1), ["fsdp"])
        tensor([1., 1.])
    """
    for axis in axes:
        x = x if _size("into_losses", mesh, axis, x) == 1 else bind("into_losses", x, mesh, axis)
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
    return x if size == 1 else bind("all_gather", x, mesh, axis, dim)


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
    return x if size == 1 else bind("all_gather_invariant", x, mesh, axis, dim)


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
    check_addable("psum_scatter", x)
    size, dim = _split("psum_scatter", x, mesh, axis, dim)
    return x if size == 1 else bind("psum_scatter", x, mesh, axis, dim)


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
    return x if size == 1 else bind("shard_slice", x, mesh, axis, dim)


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
    return x if size == 1 else bind("all_to_all", x, mesh, axis, split_dim, concat_dim)


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
    size, both = _size("all_to_all_rows", mesh, axis, x), (tuple(map(int, send)), tuple(map(int, receive)))
    if not x.dim():
        raise ShardError("all_to_all_rows: x is a scalar, which has no rows")
    for name, counts in zip(("send", "receive"), both, strict=True):
        if len(counts) != size or min(counts) < 0:
            raise ShardError(f"all_to_all_rows: {name}={list(counts)} has to be {axis}={size} counts, one a rank")
    if sum(both[0]) != len(x):
        raise ShardError(f"all_to_all_rows: x has {len(x)} rows, and send={list(both[0])} adds up to {sum(both[0])}")
    if size > 1 and not x.is_meta and (torch.compiler.is_compiling() or _torch.has_no_memory() or _torch.simulated()):
        why = "all_to_all_rows: how many rows come depends on values, which a graph and sf.simulate cannot follow"
        raise ShardError(f"{why}. Leave it out of them, or use all_to_all with the same number for all ranks")
    return x if size == 1 else bind("all_to_all_rows", x, mesh, axis, 0, *both)


def _exchanged_by_gather(x: Tensor, mesh: Mesh, axis: str, size: int, split_dim: int, concat_dim: int) -> Tensor:
    """`all_to_all` that receives W times as much."""
    parts = bind("all_gather", x.unsqueeze(0), mesh, axis, 0)  # [W, ..]
    length = x.shape[split_dim] // size
    index = 0 if isinstance(mesh, MeshSpec) else mesh.get_local_rank(axis)
    part = parts.narrow(split_dim + 1, index * length, length)
    return part.movedim(0, concat_dim).flatten(concat_dim, concat_dim + 1)


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
        why = f"{name}: shape {tuple(x.shape)} splits dim {dim} over {axis}={size}, {length} % {size} = {length % size}"
        raise ShardError(f"{why}. Pad dim {dim} to {-(-length // size) * size}, or choose a dim that {size} divides.")
    return size, dim
