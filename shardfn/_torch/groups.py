"""Process groups: their collectives under one name in every torch, also as operations of a graph."""

import pickle
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor

# torch 2.13 renamed these two; the old names warn on every call, the new ones are absent before.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_to_all_single: Callable[..., Any] = dist.all_to_all_single

# A store for a world of one; exported by torch.distributed, but not declared.
HashStore: Callable[[], Any] = dist.__dict__["HashStore"]

# Whether a compiled all-to-all has a gradient; in torch 2.11 that is zero, without an error.
COMPILES_EXCHANGES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)

_OF_PEERS = re.compile(
    r"connection (was )?(reset|closed|refused|aborted)|pair closure|broken pipe|socket (is )?closed|not connected"
    r"|timed out",
    re.I,
)


def is_of_peers(error: BaseException | None) -> bool:
    """Whether an error of a collective says, in words of gloo or NCCL, that other ranks have ended or do not come."""
    return isinstance(error, RuntimeError) and _OF_PEERS.search(str(error)) is not None


# Collectives as operations of a graph: what is started here is there after `waited`.


def gathering(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[n] -> [W*n]`: an all-gather."""
    return torch.ops._c10d_functional.all_gather_into_tensor(x, group.size(), group.group_name)


def scattering_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[W*n] -> [n]`: a reduce-scatter."""
    return torch.ops._c10d_functional.reduce_scatter_tensor(x, "sum", group.size(), group.group_name)


def summing(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """An all-reduce."""
    return torch.ops._c10d_functional.all_reduce(x, "sum", group.group_name)


def exchanging(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[W*n] -> [W*n]`: an all-to-all of equal parts."""
    parts = [x.numel() // group.size()] * group.size()
    return torch.ops._c10d_functional.all_to_all_single(x, parts, parts, group.group_name)


waited: Callable[[Tensor], Tensor] = torch.ops._c10d_functional.wait_tensor  # the result of a collective


def group_of(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A new process group that only its members make, all of them at the same point.

    Torch names such a group after how many the process is in, which is not the same on all members: a name of which one
    waits in vain for the other. Ours counts those of these ranks, which each member has made.
    """
    count = _groups_made[tuple(ranks)] = _groups_made.get(tuple(ranks), 0) + 1
    name = f"shardfn:{'_'.join(map(str, ranks))}:{count}"
    with patch.object(dist.distributed_c10d, "_process_group_name", lambda *args, **kwargs: name):
        group: Any = dist.new_group(list(ranks), use_local_synchronization=True)
    return group


# The process group with a `group_name`.
group_named: Callable[[str], dist.ProcessGroup] = dist.distributed_c10d.__dict__["_resolve_process_group"]
_groups_made: dict[tuple[int, ...], int] = {}  # ranks -> how often this process has made a group of them


_UNEVEN = ("scatter", "all_to_all", "alltoall")  # calls whose sizes may differ from rank to rank


def numbers_of_calls() -> dict[tuple[str, tuple[int, ...]], int]:
    """How many collectives this process has begun, by the name and the ranks of each process group.

    Gloo counts the messages of a group too, which `last_calls` tells apart.
    """
    registry, counts = dist.distributed_c10d.__dict__["_world"], dict[tuple[str, tuple[int, ...]], int]()
    for group, ranks in list(registry.pg_group_ranks.items()):
        with suppress(RuntimeError, AttributeError):  # the backend does not count; another process's group is no group
            backends = {id(one): one for one in map(group._get_backend, group._device_types)}.values()
            counts[group.group_name, tuple(ranks)] = sum(one._get_sequence_number_for_group() for one in backends)
    return counts


def last_calls() -> tuple[dict[tuple[str, int], str], dict[str, int]]:
    """What this process called last in each process group, by its name and the number of the collective.

    And how many of the numbers of a gloo group were messages: torch records collectives only. Reading all that is
    recorded takes tens of milliseconds.
    """
    dump = getattr(dist.distributed_c10d.__dict__["torch"]._C._distributed_c10d, "_dump_fr_trace", None)
    entries = pickle.loads(dump(True, False, False)).get("entries", []) if dump is not None else []
    numbers = {name: number for (name, _), number in numbers_of_calls().items()}
    newest = {x["process_group"][0]: x for x in entries if not x.get("is_p2p") and x["process_group"][0] in numbers}
    last = {name: entry["collective_seq_id"] for name, entry in newest.items()}
    if newest and entries[0]["record_id"] == 0:  # nothing was forgotten: the others have had no collectives
        last = dict.fromkeys(numbers, 0) | last
    messages = {name: numbers[name] - last[name] for name in _groups_on_gloo() & last.keys()}
    return {(name, last[name]): _called(entry) for name, entry in newest.items()}, messages


def _groups_on_gloo() -> set[str]:
    """Process groups that use gloo for every device."""
    configs = {x.group_name: dist.get_backend_config(x) for x in list(dist.distributed_c10d.__dict__["_world"].pg_map)}
    return {name for name, config in configs.items() if config.count(":gloo") == config.count(":")}


def _called(entry: dict[str, Any]) -> str:
    name: str = entry["profiling_name"]
    return name if any(word in name for word in _UNEVEN) else f"{name} of {entry['input_sizes']}"


def close_all_connections() -> None:
    """Make every call of every group fail on all its ranks, those that wait in one included."""
    for group in list(dist.distributed_c10d.__dict__["_world"].pg_map):
        for device in group._device_types:
            with suppress(RuntimeError):
                close_connections(group, group.rank(), device)


def other_client(store: Any) -> Any:
    """The same store through a connection of its own, since a thread that waits keeps others from using one."""
    return store.clone() if hasattr(store, "clone") else store


def has_store() -> bool:
    """Whether there are other processes, which the store reaches."""
    return dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake"


def longest_timeout() -> timedelta:
    """For how long a collective waits for other ranks, in the process group that waits longest."""
    timeouts = [timedelta()]
    for group in list(dist.distributed_c10d.__dict__["_world"].pg_map):
        with suppress(RuntimeError, AttributeError):  # some backends have none
            timeouts.append(group._get_backend(group._device_types[0]).options._timeout)
    return max(timeouts) or timedelta.max


# The key-value store through which the ranks of the default process group met.
default_store: Callable[[], Any] = dist.distributed_c10d._get_default_store


def close_connections(group: dist.ProcessGroup, rank: int, device: torch.device) -> None:
    """Make every call of the group fail on all its ranks, those that wait in one included.

    gloo has no `abort` that reaches its peers, but closes a connection on which a wait ran out of time.
    """
    if device.type != "cpu":
        group.abort()
        return
    for peer in range(group.size()):
        if peer != rank:
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, 2**31 - 1).wait(timedelta(milliseconds=1))


def share_device_of_gloo() -> None:
    """Every gloo group that this process makes from now on has the same device."""
    gloo: Any = dist.__dict__["ProcessGroupGloo"]
    makes, device = gloo.__init__, gloo.create_default_device()

    def init(self: Any, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options = gloo._Options()
        options._timeout, options._devices = timeout, [device]
        makes(self, store, rank, size, options)

    gloo.__init__ = init


def apart_from(world: dist.ProcessGroup, name: str) -> Any:
    """A gloo group of the same ranks, under a name that they share, which `destroy_process_group` leaves alone.

    Torch's registry does not know it, so that only its own methods work. For threads beside the training.
    """
    known: Any = world
    timeout = known._get_backend(known._device_types[0]).options._timeout
    gloo, under = (dist.__dict__[name] for name in ("ProcessGroupGloo", "PrefixStore"))
    return gloo(under(name, default_store()), world.rank(), world.size(), timeout)


def gather_bytes(group: Any, data: bytes, for_all: bool = False, device: str = "cpu") -> list[bytes]:
    """Bytes of all ranks of a group: for the first one, or for all if one of them wants that."""
    size, numbers = group.size(), torch.tensor([len(data), for_all], device=device)
    rows = torch.empty(2 * size, dtype=torch.int64, device=device)
    group._allgather_base(rows, numbers).wait()
    sizes, wishes = rows.cpu().view(size, 2).T.tolist()
    own = torch.frombuffer(bytearray(data.ljust(max(sizes), b"\0")), dtype=torch.uint8).to(device)
    here = any(wishes) or group.rank() == 0
    everyone = [torch.empty_like(own) for _ in range(size if here else 0)]
    if any(wishes):
        group.allgather([everyone], [own]).wait()
    else:
        group.gather([everyone] if here else [], [own]).wait()  # to the first rank
    return [x.cpu().numpy().tobytes()[:n] for x, n in zip(everyone, sizes, strict=False)]
