"""Collectives are counted, by kind, group size and bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardfn._torch import TorchDispatchMode, pytree


@dataclasses.dataclass
class Collectives:
    """How many collectives this process issued, by kind.

    `other` holds barriers, reduces, gathers and scatters. `bytes` is the size of this rank's own input tensors, all
    kinds together, and `bytes_of` the same by kind: what a rank offers, not what the algorithm then sends; of `receive`
    it is what arrives. `total` is the number of calls.

        >>> from shardfn.testing import Collectives
        >>> Collectives(all_gather=2, other=1).total
        3
    """

    all_gather: int = 0
    reduce_scatter: int = 0
    all_reduce: int = 0
    all_to_all: int = 0
    broadcast: int = 0
    send: int = 0
    receive: int = 0
    other: int = 0
    bytes_of: dict[str, int] = dataclasses.field(default_factory=dict[str, int])

    @property
    def total(self) -> int:
        return sum(self.as_dict().values())

    @property
    def bytes(self) -> int:
        return sum(self.bytes_of.values())

    def as_dict(self) -> dict[str, int]:
        """The kinds that occurred, as in `{"all_gather": 2}`."""
        return {kind: getattr(self, kind) for kind in _KINDS if getattr(self, kind)}

    def add(self, kind: str, size: int) -> None:
        """Count one collective of `size` bytes."""
        setattr(self, kind, getattr(self, kind) + 1)
        self.bytes_of[kind] = self.bytes_of.get(kind, 0) + size


@contextlib.contextmanager
def count_collectives() -> Iterator[Collectives]:
    """Count the collectives that this process issues inside the `with` block.

    Forward and backward count, and what DTensor issues does too; a coalesced collective counts once.

        >>> from shardfn.testing import count_collectives
        >>> with count_collectives() as counts:
        ...     pass
        >>> counts.total, counts.bytes
        (0, 0)

    Returns:
        A context manager whose value fills up as collectives are issued.
    """
    with _CollectiveMode() as mode:
        yield mode.counts


_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send", "receive", "other")
_OTHER = re.compile("barrier|gather|p2p|recv|reduce|scatter|send")  # their namespaces hold waits and wrappers too


class _CollectiveMode(TorchDispatchMode):
    """Sees every operator of this thread, and of autograd's threads while they work for it."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.counts = Collectives()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor goes first, so that the collectives it issues are seen here
        kwargs = kwargs or {}
        namespace, _, name = func.name().partition(".")[0].partition("::")
        kind = _kind(namespace, name)
        if kind is not None:
            self.counts.add(kind, _input_bytes(namespace, name, kind, [*args, *kwargs.values()]))
        return func(*args, **kwargs)


def _kind(namespace: str, name: str) -> str | None:
    """The kind of collective that an operator is, if it is one."""
    if namespace == "_dtensor" and name == "shard_dim_alltoall":
        return "all_to_all"
    if namespace not in ("c10d", "_c10d_functional", "shardfn"):
        return None
    plain = name.replace("_", "").replace("recv", "receive")  # both "allgather_" and "all_gather_into_tensor" occur
    named = next((kind for kind in _KINDS if plain.startswith(kind.replace("_", ""))), None)
    return named or ("other" if _OTHER.search(name) else None)


def _input_bytes(namespace: str, name: str, kind: str, values: Sequence[Any]) -> int:
    if "barrier" in name:
        return 0  # its tensor only names the device
    paired = kind in ("all_gather", "reduce_scatter", "all_to_all") or name in ("gather_", "scatter_")
    outputs_first = namespace in ("c10d", "shardfn") and paired
    trees = map(pytree.tree_leaves, values[1:2] if outputs_first else values)
    sizes = (sum(x.nbytes for x in leaves if isinstance(x, torch.Tensor)) for leaves in trees)
    return next(filter(None, sizes), 0)
