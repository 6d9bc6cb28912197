"""Parallel forwards of modules of the transformers library that need more than their rules. Layer 4."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardfn.core.collectives import axis_size, psum, shard_slice
from shardfn.core.model import class_of
from shardfn.core.parts import SUM, Part
from shardfn.core.registered import declares
from shardfn.core.tensor_parallel import Layouts


def identity_expert(
    own: nn.Module, local: Mapping[str, Tensor], layouts: Layouts, x: Tensor, *args: Any, axis: str
) -> Tensor:
    """An expert that returns its input: a rank's share of it, since the outputs of experts are added up over ranks."""
    return x / axis_size(layouts.mesh, axis)


@declares(calls_own=True)
def bloom_attention(
    own: Any, local: Mapping[str, Tensor], layouts: Layouts, *args: Any, axis: str, **kwargs: Any
) -> Any:
    """BLOOM's attention with the position biases [b * heads, 1, s] of this rank's heads."""
    given = inspect.signature(class_of(own).forward).bind(own, *args, **kwargs)
    alibi, batch = given.arguments["alibi"], given.arguments["hidden_states"].shape[0]
    with layouts.hidden():
        alibi = alibi.view(batch, -1, *alibi.shape[1:])
        padding = own.num_heads * axis_size(layouts.mesh, axis) - alibi.shape[1]
        heads = shard_slice(F.pad(alibi, (0, 0, 0, 0, 0, padding)), layouts.mesh, axis, 1)
        own_alibi, part = heads.flatten(0, 1), Part("split", 0, ((batch, heads.shape[1]),))
    given.arguments["alibi"] = layouts.note_part(own_alibi, axis, part, given.arguments["alibi"])
    return class_of(own).forward(*given.args, **given.kwargs)


def _picked_pools(own: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Which keys GLM-5's indexer picks, without data: indices [b, s, keys]."""
    tail = own.index_kpool - 1 if own.index_kpool_always_select_tail else 0
    return hidden_states.new_empty(*hidden_states.shape[:2], own.index_topk + tail, dtype=torch.int32)


def _picked_blocks(
    own: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Which keys Qwen4's indexer picks, without data: a mask [b, 1, s, keys]."""
    return torch.empty_like(attention_mask, dtype=torch.bool)


@declares(without_data=_picked_pools)
def pooled_indexer(own: nn.Module, local: Mapping[str, Tensor], layouts: Layouts, *args: Any, **kwargs: Any) -> Any:
    """An indexer that drops pools of keys by values that it has computed."""
    return _or_without_data(_picked_pools, own, *args, **kwargs)


@declares(without_data=_picked_blocks)
def block_indexer(own: nn.Module, local: Mapping[str, Tensor], layouts: Layouts, *args: Any, **kwargs: Any) -> Any:
    """An indexer that goes through the queries one by one."""
    return _or_without_data(_picked_blocks, own, *args, **kwargs)


def _or_without_data(shaped: Callable[..., Any], own: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The module's own forward, or what stands for it in a run without data."""
    without = any(isinstance(x, Tensor) and x.is_meta for x in (*args, *kwargs.values()))
    return (shaped if without else class_of(own).forward)(own, *args, **kwargs)


# By the name of a class: a forward of a module with whole weights whose own needs values that depend on them.
MODULES: dict[str, Callable[..., Any]] = {
    "Glm5NextTextIndexer": pooled_indexer,
    "Qwen4ExpTextQSAIndexer": block_indexer,
}
# By the name of a class: a forward of its attention that works with a part of the heads.
ATTENTIONS: dict[str, Callable[..., Any]] = {"BloomAttention": bloom_attention}


def _probed(own: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """What experts return, without data: that of two tokens and the first expert, for all of them.

    Which experts are used depends on values; what one of them does with its part of the weights does not. Experts that
    are given no indices compute all of it.
    """
    rows = args[0].shape[0]
    if all(x.is_floating_point() for x in (*args, *kwargs.values()) if isinstance(x, Tensor)):
        return class_of(own).forward(own, *args, **kwargs)
    out = inspect.unwrap(class_of(own).forward)(own, *map(_of_two, args), **{k: _of_two(v) for k, v in kwargs.items()})
    return out[:1].expand(rows, *out.shape[1:]).contiguous()


def _of_two(value: Any) -> Any:
    """The first rows; indices are zeros, whose values are known in a run without data."""
    if not isinstance(value, Tensor):
        return value
    few = value[:2]
    return few if few.is_floating_point() else torch.zeros(few.shape, dtype=few.dtype, device=few.device)


@declares(calls_own=True, without_data=_probed)
def tensor_parallel_experts(
    own: nn.Module, local: Mapping[str, Tensor], layouts: Layouts, *args: Any, **kwargs: Any
) -> Any:
    """The forward of experts of which each rank has a part within: `forward(hidden [tokens, c], ids, weights)`.

    Communication: one all-reduce of the output, and in the backward one of each floating input's gradient.
    """
    for axis in layouts.axes:
        args = tuple(
            layouts.entered(x, axis, at) if isinstance(x, Tensor) and x.is_floating_point() else x
            for at, x in enumerate(args)
        )
    out = _or_without_data(_probed, own, *args, **kwargs)
    for axis in layouts.axes:
        layouts.require(out, axis, SUM)
        out = psum(out, layouts.mesh, axis)
    return out
