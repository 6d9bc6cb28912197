"""Memory: tensors side by side in it, found again and worked on as one; buffers that are used again.

Local tensors only. Buffers are used again and again because page faults of fresh memory cost more than a copy into it.

    run       tensors of one dtype that fill a stretch of memory: each begins where the one before it ends
    flat      a 1-D tensor: the memory of a run

[Note: parts of one memory]
Tensors made here lie in one piece of memory, which each keeps alive, but as if each owned its part. Each has a storage
that ends where it ends: saving one saves no other, and torch 2.13 cannot pickle a DTensor whose part begins inside a
storage. Each has a version counter: autograd does not take a change of one for a change of another. So a write through
a flat tensor is not counted for its run; `torch.autograd.graph.increment_version(run)` does that.

Flat tensors over a run do not own the memory, which may be several pieces that happen to touch: the run must live as
long as they are used.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress, count, pairwise, repeat
from math import prod
from operator import add, attrgetter, is_not, lt, mul, ne, not_
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from shardfn._torch import address_of, set_storage, storage_uses, tensor_over

Item = TypeVar("Item")

_GAP = 64  # bytes
_TURNS_KEPT = 16  # a buffer that nobody took for so many turns is given back
_dtype_of = attrgetter("dtype")
_PLAIN = {Tensor, nn.Parameter}  # other classes may keep their values elsewhere


def empty_flat(shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Uninitialised contiguous tensors, side by side in one new storage; see [Note: parts of one memory].

    >>> import torch
    >>> from shardfn.comm.flat_memory import empty_flat
    >>> a, b = empty_flat([(2, 3), (4,)], torch.float32, torch.device("cpu"))
    >>> b.data_ptr() - a.data_ptr()
    24
    """
    return split_flat(apart(sum(map(prod, shapes)), dtype, device), shapes)


def apart(numel: int, dtype: torch.dtype, device: torch.device, pinned: bool = False) -> Tensor:
    """An uninitialised flat tensor whose memory touches no other such tensor's.

    Which tensors are a run, and so how sums over them are rounded, then depends on the program, not on the allocator.
    """
    nbytes = numel * dtype.itemsize + _GAP
    if pinned:
        storage = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).untyped_storage()
    else:
        storage = torch.UntypedStorage(nbytes, device=device)
    return set_storage(torch.empty(0, dtype=dtype, device=device), storage, 0, (numel,))


def split_flat(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Contiguous tensors over consecutive parts of a contiguous tensor's memory; see [Note: parts of one memory]."""
    storage, item, start = flat.untyped_storage(), flat.element_size(), int(flat.storage_offset())
    blank = flat.data.new_empty
    parts = []
    for shape in shapes:
        end = start + prod(shape)
        parts.append(set_storage(blank(0), storage[start * item : end * item], 0, torch.Size(shape)))
        start = end
    return parts


def merged(columns: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """The same elements in fewer rows: where some rows are a run in every column, one row of flat tensors.

    A row is the i-th tensor of every column: a parameter, its gradient, its state. Rows are joined when they are
    contiguous and equally long in all columns; a column may have a dtype of its own. The others stay as they are, but
    rows without elements are left out, and a run stands where the first of its rows stood, wherever the memory is.
    Elementwise work on the result is the same work on the columns, in fewer operations; see [Note: parts of one memory]
    for writing.

        >>> import torch
        >>> from shardfn.comm.flat_memory import empty_flat, merged
        >>> weights = empty_flat([(2, 3), (4,)], torch.float32, torch.device("cpu"))
        >>> grads = [torch.ones(2, 3), torch.ones(4)]
        >>> [tuple(x.shape) for x in merged([weights])[0]], [tuple(x.shape) for x in merged([weights, grads])[0]]
        ([(10,)], [(2, 3), (4,)])
    """
    runs = _runs_in(columns)
    return [_flats(column, runs) for column in columns]


def map_runs(fn: Callable[[list[Tensor]], Sequence[Tensor]], tensors: Sequence[Tensor]) -> list[Tensor]:
    """`fn` on the flat tensors of runs; its results cut up, so that they are runs where `tensors` are.

    `fn` works elementwise on a list of tensors and returns new ones of the same shapes.

        >>> import torch
        >>> from shardfn.comm.flat_memory import empty_flat, map_runs
        >>> weights = empty_flat([(2, 3), (4,)], torch.float32, torch.device("cpu"))
        >>> a, b = map_runs(lambda flats: [torch.zeros_like(flat) for flat in flats], weights)
        >>> a.shape, b.data_ptr() - a.data_ptr()
        (torch.Size([2, 3]), 24)
    """
    runs = _runs_in([tensors]) + [([i], 0) for i, tensor in enumerate(tensors) if not tensor.numel()]
    results = fn(_flats(tensors, runs)) if runs else []
    placed: dict[int, Tensor] = {}
    for (rows, _), result in zip(runs, results, strict=True):
        shapes = [tensors[i].shape for i in rows]
        placed |= zip(rows, split_flat(result, shapes) if len(rows) > 1 else [result], strict=True)
    return [placed[i] for i in range(len(tensors))]


def portions(items: Iterable[Item], size: Callable[[Item], int], limit: int) -> Iterator[list[Item]]:
    """The items in order, in lists whose sizes add up to at most `limit`; one that is larger is alone.

    >>> from shardfn.comm.flat_memory import portions
    >>> list(portions([3, 4, 9, 1], int, limit=8))
    [[3, 4], [9], [1]]
    """
    portion: list[Item] = []
    total = 0
    for item in items:
        if portion and total + size(item) > limit:
            yield portion
            portion, total = [], 0
        portion.append(item)
        total += size(item)
    if portion:
        yield portion


_Run = tuple[list[int], int]  # rows as they lie in memory, and how many elements they have


def _runs_in(columns: Sequence[Sequence[Tensor]]) -> list[_Run]:
    """All rows that have elements; a run stands where the first of its rows stood."""
    numels = list(map(Tensor.numel, columns[0]))
    order = rows = list(compress(count(), numels))
    begins = _addresses([*map(columns[0].__getitem__, rows)])
    if begins is not None and not all(map(lt, begins, begins[1:])):
        order = [row for _, row in sorted(zip(begins, rows, strict=True))]
    if order is not rows or len(rows) < len(numels):
        columns, numels = [[*map(x.__getitem__, order)] for x in columns], [*map(numels.__getitem__, order)]
    runs = [(order[start:stop], sum(numels[start:stop])) for start, stop in pairwise(_starts(columns, numels))]
    return runs if order is rows else sorted(runs, key=lambda run: min(run[0]))


def _starts(columns: Sequence[Sequence[Tensor]], numels: list[int]) -> Sequence[int]:
    """Where runs of rows start, and the last one stops; rows that belong to none are alone.

    `numels` are those of the first column. This is most of what an optimizer step costs over its arithmetic: every pass
    over the rows is a `map` in C.
    """
    rows = len(numels)
    if rows < 2:
        return range(rows + 1)
    starts, loose = {0, rows}, set[int]()  # those that belong to no run, wherever they lie
    for column in columns:
        begins, dtypes = _addresses(column), list(map(_dtype_of, column))
        kinds = set(dtypes)
        if begins is None or any(dtype.is_complex for dtype in kinds):  # conjugates: memory does not show them
            return range(rows + 1)
        if len(kinds) > 1:
            starts.update(compress(count(1), map(is_not, dtypes[1:], dtypes)))
            sizes = map(mul, numels, [dtype.itemsize for dtype in dtypes])
        else:
            sizes = map(mul, numels, repeat(dtypes[0].itemsize))
        ends = list(map(add, begins, sizes))
        if begins[1:] != ends[:-1]:
            starts.update(compress(count(1), map(ne, begins[1:], ends)))
        if len(starts) > rows:
            return range(rows + 1)
        lengths = numels if column is columns[0] else list(map(Tensor.numel, column))
        if lengths != numels:
            loose.update(compress(count(), map(ne, lengths, numels)))
        if not all(map(Tensor.is_contiguous, column)):
            loose.update(compress(count(), map(not_, map(Tensor.is_contiguous, column))))
    return sorted(starts.union(loose, (i + 1 for i in loose)))


def _addresses(column: Sequence[Tensor]) -> list[int] | None:
    if not _PLAIN.issuperset(map(type, column)):
        return None
    try:
        return list(map(Tensor.data_ptr, column))
    except RuntimeError:  # a sparse tensor, or one inside a transform
        return None


def _flats(column: Sequence[Tensor], runs: Sequence[_Run]) -> list[Tensor]:
    """One tensor a run: its flat tensor, or the only member."""
    firsts = [(column[rows[0]], len(rows) == 1, numel) for rows, numel in runs]
    return [first if alone else tensor_over(first.data_ptr(), numel, first.data) for first, alone, numel in firsts]


class FlatView(NamedTuple):
    """A strided view of a flat tensor: elements from `offset` up to `end`."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    end: int


def view_of(tensor: Tensor) -> FlatView:
    """How a tensor lies in its storage."""
    offset = int(tensor.storage_offset())
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return FlatView(tuple(tensor.shape), tensor.stride(), offset, offset + last + 1 if tensor.numel() else offset)


class Buffer:
    """Uninitialised memory of `numel` elements, with views of it that are made once.

    It is free for others when it is `held` no more, and no tensor but its own views refers to the storage.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, pinned: bool = False) -> None:
        self.flat = apart(numel, dtype, device, pinned)  # [numel]
        self.storage = self.flat.untyped_storage()
        self.address = address_of(self.storage)
        self.held, self.turn = True, 0  # until `held` is False, it is its taker's
        self._views: dict[int, tuple[Sequence[FlatView], list[Tensor]]] = {}
        self.own_uses = 2  # the handle and `flat`

    def views(self, views: Sequence[FlatView]) -> list[Tensor]:
        """Tensors for views; the same tensors for the same sequence object."""
        if id(views) not in self._views:
            tensors = [self.flat.as_strided(*view[:3]) for view in views]
            self._views[id(views)] = views, tensors  # keeps the sequence, so that its id is not given to another one
            self.own_uses += len(tensors)
        return self._views[id(views)][1]

    def tensor(self) -> Tensor:
        """All of it as a new tensor, which keeps the buffer from being used again."""
        # No view, so that it has a version of its own.
        return set_storage(self.flat.new_empty(0), self.storage, 0, self.flat.shape)

    @property
    def free(self) -> bool:
        """Whether nobody would notice other contents."""
        return not self.held and storage_uses(self.address) == self.own_uses


class BufferPool:
    """Buffers on one device, handed out again when nobody refers to them any more.

    Whoever keeps a view of a gathered weight therefore keeps its values, and the pool makes another buffer.

        >>> import torch
        >>> from shardfn.comm.flat_memory import BufferPool
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
        self._buffers = {key: [x for x in same if x.turn >= oldest] for key, same in self._buffers.items()}

    def shrink(self) -> None:
        """Give back what is free."""
        self._buffers = {key: [x for x in same if not x.free] for key, same in self._buffers.items()}

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


Buffers = BufferPool | FreshBuffers
