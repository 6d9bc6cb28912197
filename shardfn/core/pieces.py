"""Tensors made of parts of other tensors: which part of what lies where, as integers. Layer 1.

A file may hold under one name what a model holds under several, or the other way round. A `Patchwork` goes through the
code that stacks, joins, cuts and transposes them and remembers where everything came from, without a value in it.

    file     experts.0.w1 [ff, c]   experts.0.w3 [ff, c]   experts.1.w1 [ff, c]   ...
    model    experts.gate_up_proj [experts, 2*ff, c]
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardfn.core.ownership import Box


@dataclass(frozen=True)
class Piece:
    """A part of a tensor that is a part of the tensor `source`.

    It lies from `at` on, `size` large, and there from `start` on. Dim d of it is dim `dims[d]` there, or, with None, a
    dim of one element which the source does not have; of the source's other dims it has one element.
    """

    source: str
    start: tuple[int, ...]
    at: tuple[int, ...]
    size: tuple[int, ...]
    dims: tuple[int | None, ...]

    @property
    def source_box(self) -> Box:
        """Where it is in the source."""
        lengths = dict(zip(self.dims, self.size, strict=True))
        return tuple((start, lengths.get(dim, 1)) for dim, start in enumerate(self.start))

    def inverse(self, name: str) -> "Piece":
        """The same part as one of the source, which comes from the tensor `name`."""
        box = self.source_box
        dims = tuple(self.dims.index(dim) if dim in self.dims else None for dim in range(len(box)))
        return Piece(name, self.at, tuple(start for start, _ in box), tuple(length for _, length in box), dims)

    def within(self, box: Box) -> "Piece | None":
        """What of it lies in a box."""
        at, size, start = list(self.at), list(self.size), list(self.start)
        for dim, (first, length) in enumerate(box):
            low = max(first, self.at[dim])
            high = min(first + length, self.at[dim] + self.size[dim])
            if high <= low:
                return None
            at[dim], size[dim] = low, high - low
            there = self.dims[dim]
            if there is not None:
                start[there] += low - self.at[dim]
        return replace(self, start=tuple(start), at=tuple(at), size=tuple(size))

    def as_in_source(self, part: Tensor) -> Tensor:
        """A view of this part, with the dims of the source."""
        for dim in reversed(range(len(self.dims))):
            if self.dims[dim] is None:
                part = part.squeeze(dim)
        there = [dim for dim in self.dims if dim is not None]
        part = part.permute([there.index(dim) for dim in sorted(there)])
        for dim in range(len(self.start)):
            if dim not in there:
                part = part.unsqueeze(dim)
        return part


@dataclass(frozen=True)
class Patchwork:
    """A tensor without values, made of pieces; takes the place of one in code that moves elements."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, name: str, shape: Sequence[int]) -> "Patchwork":
        """The tensor `name` itself."""
        zeros = (0,) * len(shape)
        return cls(tuple(shape), (Piece(name, zeros, zeros, tuple(shape), tuple(range(len(shape)))),))

    def size(self, dim: int) -> int:
        """As a tensor's."""
        return self.shape[dim]

    def contiguous(self) -> "Patchwork":
        """Itself."""
        return self

    def squeeze(self, dim: int) -> "Patchwork":
        """Without a dim of one element."""
        dim %= len(self.shape)
        if self.shape[dim] != 1:
            return self
        pieces = (replace(p, at=_out(p.at, dim), size=_out(p.size, dim), dims=_out(p.dims, dim)) for p in self.pieces)
        return Patchwork(_out(self.shape, dim), tuple(pieces))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in _FUNCTIONS:
            raise TypeError(f"parts are not followed through {func.__name__}")
        return _FUNCTIONS[func](*args, **(kwargs or {}))


def _out(values: tuple[Any, ...], dim: int) -> tuple[Any, ...]:
    return (*values[:dim], *values[dim + 1 :])


def _in(values: tuple[Any, ...], dim: int, new: Any) -> tuple[Any, ...]:
    return (*values[:dim], new, *values[dim:])


def _with(values: tuple[Any, ...], dim: int, new: Any) -> tuple[Any, ...]:
    return (*values[:dim], new, *values[dim + 1 :])


def _stack(tensors: Sequence[Patchwork], dim: int = 0) -> Patchwork:
    dim %= len(tensors[0].shape) + 1
    return _cat([_unsqueezed(tensor, dim) for tensor in tensors], dim)


def _unsqueezed(tensor: Patchwork, dim: int) -> Patchwork:
    pieces = (
        replace(p, at=_in(p.at, dim, 0), size=_in(p.size, dim, 1), dims=_in(p.dims, dim, None)) for p in tensor.pieces
    )
    return Patchwork(_in(tensor.shape, dim, 1), tuple(pieces))


def _cat(tensors: Sequence[Patchwork], dim: int = 0) -> Patchwork:
    dim %= len(tensors[0].shape)
    pieces: list[Piece] = []
    end = 0
    for tensor in tensors:
        if _out(tensor.shape, dim) != _out(tensors[0].shape, dim):
            raise ValueError(f"tensors of shapes {tensors[0].shape} and {tensor.shape} do not join on dim {dim}")
        pieces += (replace(piece, at=_with(piece.at, dim, piece.at[dim] + end)) for piece in tensor.pieces)
        end += tensor.shape[dim]
    return Patchwork(_with(tensors[0].shape, dim, end), tuple(pieces))


def _split(tensor: Patchwork, sizes: int | Sequence[int], dim: int = 0) -> tuple[Patchwork, ...]:
    dim %= len(tensor.shape)
    whole = tensor.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, whole - start) for start in range(0, whole, sizes)]
    if sum(sizes) != whole:
        raise ValueError(f"a dim of {whole} elements is not split into {list(sizes)}")
    parts, start = [], 0
    for length in sizes:
        box = _with(tuple((0, n) for n in tensor.shape), dim, (start, length))
        found = (piece.within(box) for piece in tensor.pieces)
        pieces = (replace(p, at=_with(p.at, dim, p.at[dim] - start)) for p in found if p is not None)
        parts.append(Patchwork(_with(tensor.shape, dim, length), tuple(pieces)))
        start += length
    return tuple(parts)


def _chunk(tensor: Patchwork, chunks: int, dim: int = 0) -> tuple[Patchwork, ...]:
    return _split(tensor, max(1, -(-tensor.shape[dim] // chunks)), dim)


def _transpose(tensor: Patchwork, dim0: int, dim1: int) -> Patchwork:
    def swapped(values: tuple[Any, ...]) -> tuple[Any, ...]:
        out = list(values)
        out[dim0], out[dim1] = out[dim1], out[dim0]
        return tuple(out)

    pieces = (replace(p, at=swapped(p.at), size=swapped(p.size), dims=swapped(p.dims)) for p in tensor.pieces)
    return Patchwork(swapped(tensor.shape), tuple(pieces))


_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.stack: _stack,
    torch.cat: _cat,
    torch.split: _split,
    torch.chunk: _chunk,
    torch.transpose: _transpose,
}


def blocks(size: Sequence[int], limit: int, whole: Sequence[int] | None = None) -> Iterator[Box]:
    """Boxes that fill a tensor, in order, each at most `limit` elements from its first to its last.

    With `whole`, the tensor is a part of one of that shape, in whose memory the elements are counted.

        >>> from shardfn.core.pieces import blocks
        >>> list(blocks((3, 4), 8))
        [((0, 2), (0, 4)), ((2, 1), (0, 4))]
    """
    shape = tuple(size if whole is None else whole)
    if 0 in size:
        return
    dim = next((d for d, n in enumerate(size) if n > 1), None)
    if dim is None or prod(size[: dim + 1]) * prod(shape[dim + 1 :]) <= limit:
        yield tuple((0, n) for n in size)
        return
    step = max(1, limit // prod(shape[dim + 1 :]))
    for start in range(0, size[dim], step):
        part = _with(tuple(size), dim, min(step, size[dim] - start))
        inner = blocks(part, limit, shape) if step == 1 else iter([tuple((0, n) for n in part)])
        yield from (_with(box, dim, (start, box[dim][1])) for box in inner)
