"""Meshes: making one, describing one without processes, and the order in which shards are stored.

[Note: axis order]
A parameter split over tp and then over fsdp on one dim is, on a mesh whose axes are ordered compute axes first and
data axes last, `[Shard(d), Shard(d)]` in plain DTensor placements; undoing fsdp is one all-gather. On the usual
(fsdp, tp) order the same layout needs `_StridedShard`, whose `full_tensor()` and checkpoint loads are wrong in some
cases. So every leaf lives on a *storage mesh*: the user's process groups, with the axes in that order. The rank grid
is transposed with them, tp neighbours stay neighbours, and no communicator is added.
"""

import atexit
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardfn._torch import HashStore, default_store, has_no_memory, on_each_rank, outside_modes, simulated
from shardfn.layout.policy import is_batch_axis
from shardfn.notation import ShardError, see

_TIMEOUT = timedelta(minutes=10)
BATCH_ONLY = ("replicate", "dp_replicate", "*_replicate")


class MeshSpec:
    """A mesh without processes, for planning.

        >>> import shardfn as sf
        >>> sf.MeshSpec(fsdp=512, tp=8).size
        4096

    Args:
        axes: axis name -> size, outermost first.
    """

    def __init__(self, **axes: int) -> None:
        self.axes: dict[str, int] = _checked(axes, "MeshSpec")
        for name, size in self.axes.items():
            if size < 1:
                raise ValueError(f"MeshSpec({name}={size}): an axis has at least one rank")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(self.axes.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MeshSpec) and list(self.axes.items()) == list(other.axes.items())

    def __hash__(self) -> int:
        return hash(tuple(self.axes.items()))

    def __repr__(self) -> str:
        return f"MeshSpec({', '.join(f'{name}={size}' for name, size in self.axes.items())})"


@dataclass(frozen=True)
class Roles:
    """Which axes split the computation, which split the batch, and which of those may split weights.

    `storage` is the order in which shards nest: compute axes, then data axes.
    """

    compute: tuple[str, ...]
    batch: tuple[str, ...]  # the data axes, and those that have no part in a function under `vmap`
    shardable: tuple[str, ...]  # the data axes over which weights may be sharded
    absent: tuple[str, ...] = ()  # which those are

    @cached_property
    def data(self) -> tuple[str, ...]:
        """The axes that split the batch."""
        return tuple(axis for axis in self.batch if axis not in self.absent)

    @cached_property
    def storage(self) -> tuple[str, ...]:
        """Axis names of the storage mesh."""
        return self.compute + self.batch

    def without(self, axes: Sequence[str]) -> "Roles":
        """The same with data axes that have no part; the storage mesh stays."""
        return replace(self, absent=tuple(axis for axis in self.batch if axis in (*self.absent, *axes)))

    def keeping(self, axes: Sequence[str]) -> "Roles":
        """The roles for weights that computation keeps split over data axes."""
        return replace(self, compute=(*self.compute, *axes), batch=tuple(a for a in self.batch if a not in axes))


def roles(axes: Sequence[str], batch: Sequence[str]) -> Roles:
    """Sort mesh axes by the batch patterns of a policy; each keeps the mesh's order."""
    data = tuple(axis for axis in axes if is_batch_axis(axis, batch))
    compute = tuple(axis for axis in axes if axis not in data)
    return Roles(compute, data, tuple(axis for axis in data if not is_batch_axis(axis, BATCH_ONLY)))


def make_mesh(
    device_type: str | None = None, /, *unnamed: Any, timeout: float | timedelta | None = None, **axes: int
) -> DeviceMesh:
    """A `DeviceMesh` with named axes, over all ranks; starts the process group when none is running.

    The last axis lies on neighbouring ranks, so put `tp` last. The process group comes from torchrun's environment
    (nccl on CUDA, gloo on CPU); without a launcher it is a world of one rank. On CUDA the device of `LOCAL_RANK`
    becomes the current one. What it starts ends with the process. From then on a `ShardError` that ends several ranks
    alike is printed in whole by one.

        >>> import shardfn as sf
        >>> mesh = sf.make_mesh("cpu", fsdp=-1, tp=1)
        >>> mesh.mesh_dim_names
        ('fsdp', 'tp')

    Args:
        device_type: `"cpu"`, `"cuda"`...; default: the accelerator of this machine, else the CPU.
        timeout: seconds that a collective waits for other ranks, of a process group that this starts; default: 10
            minutes.
        axes: axis name -> number of ranks, outermost first; one may be -1: whatever is left.

    Returns:
        the mesh; its axes are used by name everywhere.

    Raises:
        ShardError: the sizes do not multiply to the number of ranks, or CUDA is asked for where torch sees no GPU.
        TypeError: a size is not a whole number, or has no name, or there is no axis.
    """
    if unnamed or not isinstance(device_type, str | None):
        why = f"make_mesh: {unnamed or device_type!r}: each size has a name, as in make_mesh(fsdp=2, tp=2)"
        raise see(TypeError(why), "meshes")
    if device_type not in (None, "cpu") and not torch.get_device_module(device_type).is_available():
        why = f"make_mesh({device_type!r}): torch sees none here; write make_mesh('cpu', ...)"
        raise see(ShardError(why), "meshes")
    sizes = _checked(axes, "make_mesh")
    device_type = device_type or default_device_type()
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    shape = _inferred(sizes, world)
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    if not dist.is_initialized():  # with torchrun's environment, or as a world of one
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"  # asynchronous checkpoints use the host
        launched = "RANK" in os.environ and "MASTER_ADDR" in os.environ
        alone: dict[str, Any] = {} if launched else {"store": HashStore(), "rank": 0, "world_size": 1}
        waits = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
        dist.init_process_group(backend, timeout=waits or _TIMEOUT, **alone)
        atexit.register(_end_group, os.getpid())
    if not isinstance(sys.excepthook, _PrintOnce):
        sys.excepthook = _PrintOnce(sys.excepthook)
    return init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))


def _end_group(process: int) -> None:
    """A process group that was begun here ends with the process: torch may abort where a script forgets to."""
    if dist.is_initialized() and os.getpid() == process:
        dist.destroy_process_group()


class _PrintOnce(NamedTuple):
    """Prints what ends this rank: in a line, where another rank has printed the same already."""

    otherwise: Callable[[type[BaseException], BaseException, Any], Any]

    def __call__(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        times = 1
        if dist.is_initialized() and "nccl" in dist.get_backend():
            atexit.unregister(_end_group)  # it would wait for ranks that do not come
        # Who watches puts a hook around this one, and the next mesh another one of this kind around that: one counts.
        counts = vars(error).setdefault("counted_by", self) is self
        if isinstance(error, ShardError) and dist.is_initialized() and counts:
            with suppress(RuntimeError):  # the rank that has the store may have ended
                times = default_store().add(f"printed: {error}", 1)
        if times > 1:
            print(f"[rank{dist.get_rank()}]: the same ShardError, {str(error).splitlines()[0]}", file=sys.stderr)
        else:
            self.otherwise(kind, error, trace)


def _checked(axes: Mapping[str, int], verb: str) -> dict[str, int]:
    if not axes:
        raise TypeError(f"{verb}: name at least one axis, for example {verb}(fsdp=4, tp=2)")
    for name, size in axes.items():
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"{verb}({name}={size!r}): an axis size is a whole number")
    return dict(axes)


def _inferred(sizes: dict[str, int], world: int) -> dict[str, int]:
    """Replace the one -1; check that the product is the world."""
    call = f"make_mesh({', '.join(f'{name}={size}' for name, size in sizes.items())})"
    unknown = [name for name, size in sizes.items() if size == -1]
    if len(unknown) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise ShardError(f"{call}: sizes are at least 1, and at most one may be -1")
    fixed = prod(size for size in sizes.values() if size != -1)
    if fixed == world or (unknown and world % fixed == 0):
        return {name: world // fixed if size == -1 else size for name, size in sizes.items()}
    why = " x ".join(map(str, sizes.values())) + (f" = {fixed}" if len(sizes) > 1 else "")
    if unknown:
        why = f"{world} % {fixed} = {world % fixed}"
    fix = "set nproc-per-node" if fixed > world or unknown else "write -1 for one axis, or make an axis larger"
    raise ShardError(f"{call}: {why}, but there are {world} ranks (WORLD_SIZE). Start {fixed} ranks ({fix}).")


def default_device_type() -> str:
    """The accelerator of this machine, else the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator is not None else "cpu"


def device_of(kind: str) -> torch.device:
    """Where this rank computes on devices of a kind."""
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def axes_of(mesh: DeviceMesh | MeshSpec) -> dict[str, int]:
    """Axis name -> size of a mesh, outermost first.

    Raises:
        ValueError: the mesh has no axis names.
        TypeError: it is not a mesh.
    """
    if isinstance(mesh, MeshSpec):
        return dict(mesh.axes)
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"expected a DeviceMesh or a MeshSpec, got {type(mesh).__name__}")
    names = mesh.mesh_dim_names
    if names is None:
        example = "init_device_mesh('cpu', (2, 2), mesh_dim_names=('fsdp', 'tp'))"
        raise ValueError(f"the DeviceMesh has no axis names; make it with mesh_dim_names, for example {example}")
    return {name: mesh.size(i) for i, name in enumerate(names)}


@dataclass(frozen=True, eq=False, kw_only=True)
class Ranks:
    """Ranks in a grid of axes of some sizes."""

    sizes: dict[str, int]
    ranks: tuple[int, ...] = field(repr=False)  # their global numbers, in the order of the axes

    @cached_property
    def coords_of(self) -> dict[int, dict[str, int]]:
        """Where each global rank is."""
        pairs = zip(self.ranks, product(*map(range, self.sizes.values())), strict=True)
        return {rank: dict(zip(self.sizes, place, strict=True)) for rank, place in pairs}


@dataclass(frozen=True, eq=False, kw_only=True)
class Grid(Ranks):
    """A user's mesh as shards see it: the storage mesh, one process group and one coordinate an axis.

    On a `pure` one tensors have no memory of their own, since they are recorded (`sf.jit`) or those of all ranks at
    once (`sf.simulate`): work on them is done by functions of their values.
    """

    mesh: DeviceMesh
    storage: DeviceMesh
    coords: dict[str, int]
    groups: dict[str, ProcessGroup] = field(repr=False)
    pure: bool = False

    @cached_property
    def device(self) -> torch.device:
        """Where shards and gathered tensors live on this rank."""
        return device_of(self.mesh.device_type)

    @property
    def exchanges(self) -> bool:
        """Whether there are other processes to compare notes with, now."""
        return len(self.ranks) > 1 and not self.pure


def per_rank(places: Grid, fn: Callable[..., Sequence[Tensor]], values: Sequence[Any]) -> list[Tensor]:
    """`fn(coordinates, values)` on this rank, or in a simulation on each; outside autograd there.

    For whatever depends on the place of a rank in a way that the shapes of tensors do too.
    """
    if not simulated():
        return list(fn(places.coords, list(values)))
    return on_each_rank(lambda rank, inputs: fn(places.coords_of[rank], inputs), values)


class _Grids(dict[tuple[Any, ...], Any]):
    """The grids of one mesh, and parts for `use_part`, kept on it so that they die with it; copies start without any.

    In a pickle stands an `OrderedDict`, which `torch.load` takes for safe: checkpoints must not need this class.
    """

    def __reduce__(self) -> tuple[type[OrderedDict[Any, Any]], tuple[()]]:
        return OrderedDict, ()


def _grids_of(mesh: DeviceMesh) -> _Grids:
    attributes: dict[str, Any] = vars(mesh)
    if not isinstance(attributes.get("shardfn_grids"), _Grids):
        attributes["shardfn_grids"] = _Grids()
    return attributes["shardfn_grids"]


def use_part(mesh: DeviceMesh, axes: tuple[str, ...], part: DeviceMesh) -> None:
    """Have `part` be the mesh along some axes of `mesh`: torch takes equal meshes that were made apart for others."""
    _grids_of(mesh)[axes] = part


def part_of(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """The mesh along some axes of `mesh`, this rank among them."""
    part = _grids_of(mesh).get(axes)
    return part if part is not None else mesh[axes] if len(axes_of(mesh)) > len(axes) else mesh


def grid_of(mesh: DeviceMesh, order: Sequence[str]) -> Grid:
    """The `Grid` of a mesh whose storage order is `order`; see [Note: axis order].

    Raises:
        ShardError: this process is not part of the mesh.
    """
    cache, pure = _grids_of(mesh), has_no_memory()
    key = (*order, pure)
    if key not in cache:
        if pure:
            with outside_modes():
                cache[key] = replace(grid_of(mesh, order), pure=True)
        else:
            cache[key] = _make_grid(mesh, tuple(order))
    return cache[key]


def _make_grid(mesh: DeviceMesh, order: tuple[str, ...]) -> Grid:
    sizes = axes_of(mesh)
    require_member(mesh)
    for dim, axis in enumerate(sizes):
        rows = mesh.mesh.movedim(dim, -1).reshape(-1, sizes[axis])
        if bool((rows.diff() < 0).any()):
            why = f"the mesh has ranks in descending order along '{axis}': {rows.tolist()}; torch orders a process"
            raise ShardError(f"{why} group by rank, so that shards would be mixed up. Sort the ranks along each axis.")
    groups = {axis: mesh.get_group(axis) for axis in sizes}
    coords = {axis: mesh.get_local_rank(axis) if size > 1 else 0 for axis, size in sizes.items()}
    storage = mesh
    if tuple(sizes) != order:
        ranks = mesh.mesh.permute([list(sizes).index(axis) for axis in order]).contiguous()
        ordered = [groups[axis] for axis in order]
        storage = DeviceMesh.from_group(ordered, mesh.device_type, mesh=ranks, mesh_dim_names=order)
    numbers = tuple(mesh.mesh.flatten().tolist())
    return Grid(mesh=mesh, sizes=sizes, ranks=numbers, storage=storage, coords=coords, groups=groups, pure=simulated())


def require_member(mesh: DeviceMesh) -> None:
    """Check that this process, or in a simulation its ranks, can work on a mesh.

    Raises:
        ShardError: it is a mesh of other ranks, or one of processes within a simulation.
    """
    if simulated() and dist.get_backend(mesh.get_group(0)) != "fake":
        why = "the mesh is one of processes, and this runs in a simulation (sf.simulate, sf.check), which has a"
        raise ShardError(f"{why} mesh of its own: take that, such as params.mesh, instead of one from outside")
    if mesh.get_coordinate() is not None:
        return
    sizes = ", ".join(f"{axis}={size}" for axis, size in axes_of(mesh).items())
    raise ShardError(f"rank {dist.get_rank()} is not part of the mesh ({sizes}) over ranks {mesh.mesh.tolist()}")


def index_along(axes: Iterable[str], sizes: Mapping[str, int], coords: Mapping[str, int]) -> int:
    """The place of a rank along several axes as one number, outermost first."""
    return nested_index([(coords[axis], sizes[axis]) for axis in axes])


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """(start, length) of part `index` when `size` is split like `torch.chunk`: equal parts, the last ones shorter."""
    if size % parts == 0:
        return size // parts * index, size // parts
    assert isinstance(index, int), "an uneven part depends on the rank: see per_rank"
    step = -(-size // parts)
    start = min(size, step * index)
    return start, min(size, start + step) - start


def nested_index(places: Iterable[tuple[Any, int]]) -> Any:
    """The number of a part of a part...: of `(index, count)` pairs, outermost first. Indices may be tensors."""
    number: Any = 0
    for index, count in places:
        number = number * count + index
    return number


def nested_chunk(size: int, splits: Iterator[tuple[int, int]] | Sequence[tuple[int, int]]) -> tuple[int, int]:
    """(start, length) after several splits `(parts, index)`, outermost first."""
    start = 0
    for parts, index in splits:
        offset, size = chunk(size, parts, index)
        start += offset
    return start, size
