"""Buffers that are used again and again: page faults of fresh memory cost more than a copy into it. Layer 1."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn._torch import address_of, storage_uses
from shardfn.core.storage import apart

_TURNS_KEPT = 16  # a buffer that nobody took for so many turns is given back


class View(NamedTuple):
    """A strided view of a flat tensor: elements from `offset` up to `end`."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    end: int


def view_of(tensor: Tensor) -> View:
    """How a tensor lies in its storage."""
    offset = int(tensor.storage_offset())
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return View(tuple(tensor.shape), tensor.stride(), offset, offset + last + 1 if tensor.numel() else offset)


class Buffer:
    """Uninitialised memory of `numel` elements, with views of it that are made once.

    It is free for others when it is `held` no more, and no tensor but its own views refers to the storage.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, pinned: bool = False) -> None:
        self.flat = apart(numel, dtype, device, pinned)  # [numel]
        self.storage = self.flat.untyped_storage()
        self.address = address_of(self.storage)
        self.held, self.turn = True, 0  # until `held` is False, it is its taker's
        self._views: dict[int, tuple[Sequence[View], list[Tensor]]] = {}
        self.own_uses = 2  # the handle and `flat`

    def views(self, views: Sequence[View]) -> list[Tensor]:
        """Tensors for views; the same tensors for the same sequence object."""
        if id(views) not in self._views:
            made = [self.flat.as_strided(*view[:3]) for view in views]
            self._views[id(views)] = views, made  # keeps the sequence, so that its id is not given to another one
            self.own_uses += len(made)
        return self._views[id(views)][1]

    def tensor(self) -> Tensor:
        """All of it as a new tensor, which keeps the buffer from being used again."""
        blank: Any = self.flat.new_empty(0)  # no view, so that it has a version of its own
        return blank.set_(self.storage, 0, self.flat.shape)

    @property
    def free(self) -> bool:
        """Whether nobody would notice other contents."""
        return not self.held and storage_uses(self.address) == self.own_uses


class BufferPool:
    """Buffers on one device, handed out again when nobody refers to them any more.

    Whoever keeps a view of a gathered weight therefore keeps its values, and the pool makes another buffer.

        >>> import torch
        >>> from shardfn.core.pool import BufferPool
        >>> pool = BufferPool(torch.device("cpu"))
        >>> first = pool.tensor(1000, torch.float32)
        >>> where = first.data_ptr()
        >>> view, first = first[:10], None
        >>> pool.tensor(1000, torch.float32).data_ptr() == where
        False
        >>> view = None
        >>> where in [pool.tensor(1000, torch.float32).data_ptr() for _ in range(2)]
        True
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[tuple[int, torch.dtype], list[Buffer]] = {}  # the one taken last at the end
        self._turn = 0

    def take(self, numel: int, dtype: torch.dtype) -> Buffer:
        """A buffer that is the caller's until it is `held` no more."""
        same = self._buffers.setdefault((numel, dtype), [])
        for index, buffer in enumerate(same):
            if not buffer.held and storage_uses(buffer.address) == buffer.own_uses:
                same.append(same.pop(index))
                break
        else:
            same.append(Buffer(numel, dtype, self.device))
        same[-1].held, same[-1].turn = True, self._turn
        return same[-1]

    def tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor [numel]; its buffer is free again when no tensor uses its storage."""
        buffer = self.take(numel, dtype)
        out = buffer.tensor()
        buffer.held = False
        return out

    def turn(self) -> None:
        """A call begins: give back what was not taken for some turns, so that one large step does not stay."""
        self._turn += 1
        oldest = self._turn - _TURNS_KEPT
        for key, same in list(self._buffers.items()):
            if any(buffer.turn < oldest for buffer in same):
                self._buffers[key] = [buffer for buffer in same if buffer.turn >= oldest]

    def shrink(self) -> None:
        """Give back what is free."""
        for key, same in list(self._buffers.items()):
            self._buffers[key] = [buffer for buffer in same if not buffer.free]

    def buffers(self) -> list[Buffer]:
        """All of them, in use or not."""
        return [buffer for same in self._buffers.values() for buffer in same]


class FreshBuffers:
    """The same interface without memory of its own: every buffer is new, and belongs to whoever took it."""

    def __init__(self, device: torch.device, pinned: bool = False) -> None:
        """`pinned`: host memory that a device reads and writes by itself."""
        self.device, self.pinned = device, pinned

    def take(self, numel: int, dtype: torch.dtype) -> Buffer:
        """A new buffer."""
        return Buffer(numel, dtype, self.device, self.pinned)

    def tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor [numel]."""
        return apart(numel, dtype, self.device, self.pinned)


class NoBuffers(FreshBuffers):
    """The same where tensors have no memory of their own, see `Grid.pure`: an ordinary new tensor each time."""

    def tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor [numel]."""
        return torch.empty(numel, dtype=dtype, device=self.device)

    def buffers(self) -> list[Buffer]:
        """None is kept."""
        return []

    def turn(self) -> None:
        """Nothing is kept from call to call."""

    def shrink(self) -> None:
        """Nor within one."""


Buffers = BufferPool | FreshBuffers
