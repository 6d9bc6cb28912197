"""Which part of a batch a rank works on, and means over unequal parts.

Batches are split over the data axes only: ranks along a compute axis (`tp`) work on the same samples. Nothing here
communicates.
"""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardfn._torch import pytree
from shardfn.layout import BATCH_AXES, Policy, axes_of, index_along, require_member, roles
from shardfn.notation import raise_problems


# In a class body, a field named `count` clashes with `tuple.count` for type checkers.
class Mean(NamedTuple("_Mean", [("total", Tensor), ("count", Tensor | float)])):
    """A loss that is a mean over tokens (or samples) of which ranks hold unequal numbers.

    A `loss_fn` returns it in place of a scalar. The loss is then `sum(total) / sum(count)` over all data ranks, and the
    gradients are those of that quotient; a mean of the ranks' means would weigh tokens by the rank they are on.

        >>> import torch, shardfn as sf
        >>> losses, mask = torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False])
        >>> sf.data.Mean((losses * mask).sum(), mask.sum())
        Mean(total=tensor(4.), count=tensor(2))

    Attributes:
        total: a scalar with its derivative: the sum over this rank's tokens.
        count: how many they are, a number or a scalar tensor, whose derivative counts if it has one (a mean weighted by
            learnt gates); 0 is fine as long as another rank has some.
    """

    __slots__ = ()


def rank(mesh: DeviceMesh, policy: Policy | None = None) -> tuple[int, int]:
    """Which part of the data this process loads, and how many parts there are.

    Ranks along compute axes get the same answer, and must load the same samples.

        >>> import shardfn as sf
        >>> sf.data.rank(sf.make_mesh("cpu", fsdp=1, tp=1))
        (0, 1)

    Args:
        mesh: a `DeviceMesh` with named axes.
        policy: tells the data axes by its `batch`; default: those of `Policy()`.

    Returns:
        (index, count), as for `DistributedSampler(rank=index, num_replicas=count)`; `(0, 1)` without data axes.

    Raises:
        TypeError: `mesh` or `policy` is something else.
        ValueError: the mesh has no axis names.
        ShardError: this process is not part of the mesh.

    Communication: none.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"data.rank: expected a DeviceMesh, got {type(mesh).__name__}")
    if policy is not None and not isinstance(policy, Policy):
        raise TypeError(f"data.rank: expected a Policy, got {type(policy).__name__}")
    sizes = axes_of(mesh)
    require_member(mesh)
    data = roles(list(sizes), policy.batch if policy is not None else BATCH_AXES).data
    index = index_along(data, sizes, {axis: mesh.get_local_rank(axis) for axis in data})
    return index, prod(sizes[axis] for axis in data)


def local_batch(batch: Any, mesh: DeviceMesh, policy: Policy | None = None) -> Any:
    """This rank's part of a batch that every rank has: an equal slice of dim 0 of every tensor.

        >>> import torch, shardfn as sf
        >>> mesh = sf.make_mesh("cpu", fsdp=1)
        >>> sf.data.local_batch({"x": torch.zeros(8, 3), "name": "train"}, mesh)["x"].shape
        torch.Size([8, 3])

    Args:
        batch: any pytree of tensors; what is no tensor is passed on.
        mesh: see `rank`.
        policy: see `rank`.

    Returns:
        the same structure with views of the tensors.

    Raises:
        ShardError: a dim 0 that the number of data ranks does not divide, that is longer in one tensor than in another,
            or is not there.
        TypeError: an array that is no tensor, a DTensor, and what `rank` raises.

    Communication: none.
    """
    index, count = rank(mesh, policy)
    for name, leaf in [(pytree.keystr(path), leaf) for path, leaf in pytree.tree_flatten_with_path(batch)[0]]:
        if isinstance(leaf, DTensor) or (hasattr(leaf, "__array__") and not isinstance(leaf, Tensor)):
            wanted = "expected plain tensors, the same on every rank"
            raise TypeError(f"local_batch: batch{name} is a {type(leaf).__name__}; {wanted}")
    return parts_of("local_batch", batch, count, f"split over {count} data ranks")(index)


def parts_of(verb: str, batch: Any, count: int, how: str) -> Callable[[int], Any]:
    """The parts of a batch that is cut on dim 0 into equal ones; `how`: what is done to that dim.

    Raises:
        ShardError: a dim 0 that does not divide, tensors of other lengths, or without dims; all at once.
    """
    leaves, _ = pytree.tree_flatten_with_path(batch)
    named = [(f"batch{pytree.keystr(path)}", leaf) for path, leaf in leaves if isinstance(leaf, Tensor)]
    problems = [why for name, leaf in named if (why := _indivisible(name, leaf, count, how))]
    if not problems and len({len(leaf) for _, leaf in named} - {0}) > 1:
        lengths = ", ".join(f"{name}: {len(leaf)}" for name, leaf in named)
        problems = [f"dim 0 is {how}, and has other lengths ({lengths}); pass what is not of samples outside the batch"]
    raise_problems(verb, problems, entry="batches")
    return lambda at: pytree.tree_map(lambda leaf: _part(leaf, at, count), batch)


def _part(leaf: Any, index: int, count: int) -> Any:
    return leaf.unflatten(0, (count, -1)).select(0, index) if isinstance(leaf, Tensor) and len(leaf) else leaf


def _indivisible(name: str, leaf: Tensor, count: int, how: str) -> str | None:
    if not leaf.ndim:
        return f"{name} has no dims, so there is no dim 0 to split; pass it outside the batch, or as a number"
    size = leaf.shape[0]
    if size % count == 0:
        return None
    whole, why = size - size % count, f"dim 0 is {how}, {size} % {count} = {size % count}"
    return f"{name} has shape {tuple(leaf.shape)}; {why}. Use {whole or count} or {whole + count} samples."
