"""What the tensors of a model are called in files, and what of them lies where.

A model of the transformers library may have other tensors than its files: one for all experts where a file has one for
each, say. Its own conversions say so. They are run here on `Patchwork`s, which go through the code that stacks, joins,
cuts and transposes tensors and remember where everything came from, without a value in them.

    file     experts.0.w1 [ff, c]   experts.0.w3 [ff, c]   experts.1.w1 [ff, c]   ...
    model    experts.gate_up_proj [experts, 2*ff, c]
"""

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shardfn._torch import init_of, names_left_out
from shardfn.layout import Box, as_runs, named_buffers, named_parameters, overlaps
from shardfn.notation import ShardError

Model = nn.Module | Mapping[str, Tensor]
Names = Callable[[str], str] | Mapping[str, str]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Piece:
    """A part of a tensor, its box `here`, that is a part of the tensor `source`, the box `there`.

    Dim d here is dim `dims[d]` there, or, with None, a dim of one element which the source does not have; of the
    source's other dims it has one element.
    """

    source: str
    there: Box
    here: Box
    dims: tuple[int | None, ...]

    def inverse(self, name: str) -> "Piece":
        """The same part as one of the source, which comes from the tensor `name`."""
        dims = tuple(self.dims.index(dim) if dim in self.dims else None for dim in range(len(self.there)))
        return Piece(name, self.here, self.there, dims)

    def within(self, box: Box) -> "Piece | None":
        """What of it lies in a box."""
        for here, inside, _ in overlaps(as_runs(self.here), as_runs(box)):
            there = list(self.there)
            for dim, (start, n) in zip(self.dims, inside, strict=True):
                if dim is not None:
                    there[dim] = there[dim][0] + start, n
            return replace(self, there=tuple(there), here=here)
        return None

    def moved(self, dim: int, by: int) -> "Piece":
        """The same part, further on along a dim."""
        start, length = self.here[dim]
        return replace(self, here=_with(self.here, dim, (start + by, length)))

    def as_in_source(self, part: Tensor) -> Tensor:
        """A view of this part, with the dims of the source."""
        there = [dim for dim in self.dims if dim is not None]
        part = part.squeeze([d for d, dim in enumerate(self.dims) if dim is None])
        part = part.permute([there.index(dim) for dim in sorted(there)])
        return part[tuple(slice(None) if dim in there else None for dim in range(len(self.there)))]


@dataclass(frozen=True)
class Patchwork:
    """A tensor without values, made of pieces; takes the place of one in code that moves elements."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, name: str, shape: Sequence[int]) -> "Patchwork":
        """The tensor `name` itself."""
        box = tuple((0, n) for n in shape)
        return cls(tuple(shape), (Piece(name, box, box, tuple(range(len(shape)))),))

    def size(self, dim: int) -> int:
        """As a tensor's."""
        return self.shape[dim]

    def contiguous(self) -> "Patchwork":
        """Itself."""
        return self

    def squeeze(self, dim: int) -> "Patchwork":
        """Without a dim of one element."""
        dim %= len(self.shape)
        return self if self.shape[dim] != 1 else self.rearranged([d for d in range(len(self.shape)) if d != dim])

    def rearranged(self, order: Sequence[int | None]) -> "Patchwork":
        """With dim `order[d]` of this one as dim d, or, for None, a new one of one element."""

        def taken(values: Sequence[Any], new: Any) -> tuple[Any, ...]:
            return tuple(new if dim is None else values[dim] for dim in order)

        pieces = (replace(p, here=taken(p.here, (0, 1)), dims=taken(p.dims, None)) for p in self.pieces)
        return Patchwork(taken(self.shape, 1), tuple(pieces))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in _FUNCTIONS:
            raise TypeError(f"parts are not followed through {func.__name__}")
        return _FUNCTIONS[func](*args, **(kwargs or {}))


def _with(values: tuple[Any, ...], dim: int, new: Any) -> tuple[Any, ...]:
    return (*values[:dim], new, *values[dim + 1 :])


def _stack(tensors: Sequence[Patchwork], dim: int = 0) -> Patchwork:
    order: list[int | None] = [*range(len(tensors[0].shape))]
    order.insert(dim % (len(order) + 1), None)
    return _cat([tensor.rearranged(order) for tensor in tensors], dim)


def _cat(tensors: Sequence[Patchwork], dim: int = 0) -> Patchwork:
    dim %= len(tensors[0].shape)
    pieces: list[Piece] = []
    end = 0
    for tensor in tensors:
        if _with(tensor.shape, dim, 0) != _with(tensors[0].shape, dim, 0):
            raise ValueError(f"tensors of shapes {tensors[0].shape} and {tensor.shape} do not join on dim {dim}")
        pieces += (piece.moved(dim, end) for piece in tensor.pieces)
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
        inside = (piece.within(box) for piece in tensor.pieces)
        pieces = (piece.moved(dim, -start) for piece in inside if piece is not None)
        parts.append(Patchwork(_with(tensor.shape, dim, length), tuple(pieces)))
        start += length
    return tuple(parts)


def _chunk(tensor: Patchwork, chunks: int, dim: int = 0) -> tuple[Patchwork, ...]:
    return _split(tensor, max(1, -(-tensor.shape[dim] // chunks)), dim)


def _transpose(tensor: Patchwork, dim0: int, dim1: int) -> Patchwork:
    order = [*range(len(tensor.shape))]
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return tensor.rearranged(order)


_FUNCTIONS: dict[Any, Any] = {getattr(torch, f.__name__[1:]): f for f in (_stack, _cat, _split, _chunk, _transpose)}


def persistent_names(model: Model) -> list[str]:
    """The names of parameters and of buffers that a state dict has, tied ones under each name."""
    if not isinstance(model, nn.Module):
        return list(model)
    tensors = named_parameters(model) | named_buffers(model)
    return [name for name in model.state_dict() if name in tensors]


def wanted_from(model: object, stored: Shapes, names: Names | None) -> tuple[dict[str, Patchwork], list[str]]:
    """(name in the model -> what it is made of, names in the files that nothing is made of).

    Raises:
        ShardError: files of transformers whose conversion is none of stacking, joining, cutting and transposing.
    """
    known = persistent_names(model) if isinstance(model, nn.Module | Mapping) else []
    if names is None and _is_of_transformers(model):
        patchworks, left = _converted(model, known, stored)
    else:
        called = {name: _called(names, name) for name in known}
        patchworks = {name: Patchwork.of(file, stored[file]) for name, file in called.items() if file in stored}
        left = [name for name in stored if name not in set(called.values())]
    return patchworks, [name for name in left if not is_ignored(model, "unexpected", name)]


def _called(names: Names | None, name: str) -> str:
    return name if names is None else names.get(name, name) if isinstance(names, Mapping) else names(name)


def is_ignored(model: object, why: Literal["missing", "unexpected"], name: str) -> bool:
    """Whether a model of transformers makes do without a tensor of its own in files, or with a further one in them."""
    patterns: Iterable[str] = names_left_out(model, f"load_{why}")
    if why == "unexpected" and _is_of_transformers(model):
        patterns = (*patterns, r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")  # buffers that older files have
    return any(re.search(pattern, name) for pattern in patterns)


def _is_of_transformers(model: object) -> bool:
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def own_init(model: object) -> Callable[[Any], Any] | None:
    """How a model of transformers fills what its files do not have."""
    return init_of(model) if _is_of_transformers(model) else None


def _converted(model: Any, known: list[str], stored: Shapes) -> tuple[dict[str, Patchwork], list[str]]:
    """(name in the model -> what `from_pretrained` makes it of, names in the files that it does not use)."""
    from transformers import conversion_mapping
    from transformers import core_model_loading as loading

    transforms = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [x for x in transforms if isinstance(x, loading.WeightRenaming)]
    converters = [x for x in transforms if isinstance(x, loading.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    have: dict[Any, Any] = dict.fromkeys(known, True)
    patchworks: dict[str, Patchwork] = {}
    groups: dict[str, Any] = {}
    left = []
    for name in sorted(stored, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(name, renamings, converters, model.base_model_prefix, have)
        if target not in have and name in have:
            target, pattern = name, None
        if target not in have:
            left.append(name)
        elif pattern is None:
            patchworks[target] = Patchwork.of(name, stored[name])
        else:
            if target not in groups:
                groups[target] = deepcopy(by_pattern[pattern])
            groups[target].add_tensor(target, name, pattern, Patchwork.of(name, stored[name]))
    for target, converter in groups.items():
        try:
            converted = converter.convert(target, model=model, config=model.config)
        except Exception as error:
            what = f"'{target}' from {converter.source_patterns} by {converter.operations}"
            raise _not_followed(what, error) from error
        patchworks |= {name: x[0] if isinstance(x, list) else x for name, x in converted.items()}
    return patchworks, left


def _not_followed(what: str, error: Exception) -> ShardError:
    why = f"safetensors: transformers makes {what}, which cannot be done part by part ({error}). Load the model"
    return ShardError(f"{why} by from_pretrained on one rank and pass src= to shard; save it by save_pretrained.")


def files_of(model: Any, tensors: Mapping[str, Patchwork], names: Names | None) -> dict[str, Patchwork]:
    """(name in a file -> what it is made of), in the order of a file; `tensors` are the model's, by name.

    Raises:
        ShardError: as in `wanted_from`; two tensors with one name.
    """
    if names is None and _is_of_transformers(model):
        from transformers.core_model_loading import revert_weight_conversion

        revert: Any = revert_weight_conversion
        ignored = names_left_out(model, "save")
        kept: Any = {name: x for name, x in tensors.items() if name not in ignored}
        try:
            return revert(model, kept)
        except Exception as error:
            raise _not_followed(f"the tensors of files of a {type(model).__name__}", error) from error
    files: dict[str, Patchwork] = {}
    for name, patchwork in tensors.items():
        file = _called(names, name)
        if file in files:
            raise ShardError(f"save_safetensors: names gives '{file}' to two tensors, the second is '{name}'")
        files[file] = patchwork
    return files


def kept_name(model: object, names: tuple[str, ...]) -> str:
    """Under which of its names a tied tensor is written."""
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    return next((name for name in names if name not in tied), names[0])
