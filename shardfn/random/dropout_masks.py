"""Dropout whose masks belong to the samples: a function of a seed, a name and global positions.

    position   [n] of each dim        first * n + 0, 1, ..: `first` counts the parts before this rank's, or this lane's
    row        [n] of each dim        a hash of the positions, keyed by the module's path, the call and the dim
    mask       [.., n]                the sum of the rows, hashed again, keyed by the seed, below p * 2**32

No generator is asked for it, so that every mesh has the same masks, and so has a graph that was recorded once.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardfn import layout
from shardfn._torch import outside_modes, outside_transforms, part_of_rank, simulated, vmap_depth
from shardfn.context import Recording, having, holding, recording
from shardfn.layout import Grid, Plan, axes_of, class_of, first_match, grid_of, index_along, patched_forward, per_rank
from shardfn.notation import ShardError, Spec, parse, unknown_axes

Word = int | Tensor  # a tensor has no dims and whole numbers
_MASK = 2**32 - 1


def dropout(
    x: Tensor,
    p: float = 0.5,
    *,
    seed: Word | Sequence[Word],
    dims: str | None = None,
    mesh: DeviceMesh | None = None,
    training: bool = True,
) -> Tensor:
    """Dropout by a mask that depends on the seed and on where the elements are in the whole tensor, and nothing else.

    Ranks that hold the same elements drop the same ones, those that hold others drop others, and one process drops
    what any mesh does. For hand-written code; modules get it from `dropout_seed`.

        >>> import torch, shardfn as sf
        >>> x = torch.ones(2, 6)
        >>> whole = sf.data.dropout(x, 0.5, seed=1)
        >>> with sf.simulate(fsdp=2) as mesh:
        ...     part = sf.data.dropout(sf.data.local_batch(x, mesh), 0.5, seed=1, dims="b@fsdp c", mesh=mesh)
        ...     joined = sf.collectives.all_gather_invariant(part, mesh, "fsdp", 0).reconcile()
        >>> torch.equal(joined, whole)
        True

    Args:
        x: this rank's part, floating.
        p: how likely an element is to be zero; the others are divided by `1 - p`.
        seed: a whole number, a tensor of one, or several, such as `(run, step)`. A function under `sf.jit` gets a
            tensor, or it would be compiled for every number.
        dims: the layout of the whole tensor, `"b@fsdp s ff@tp"`; None when every rank has all of it. Ranks along an
            axis hold equal parts.
        mesh: with `dims`, the mesh of these axes.
        training: False returns x.

    Returns:
        a tensor like x.

    Raises:
        ShardError: `dims` without a mesh or that do not fit x, an axis that splits an inner factor, x under a `vmap`.
        ValueError: p is not from 0 to 1.

    Communication: none.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"dropout: p={p} is not from 0 to 1")
    if not training or p == 0:
        return x
    if vmap_depth():
        raise ShardError("dropout: inside a vmap elements have no places of their own; use dropout_seed and nn.Dropout")
    seeds = key_of("dropout", tuple(seed) if isinstance(seed, tuple | list) else (seed,))
    firsts: list[Word] = [0] * x.dim()  # how many parts of each dim come before this rank's
    if dims is not None:
        if mesh is None:
            raise ShardError(f"dropout: dims='{dims}' names axes of a mesh; pass mesh= too")
        mesh_grid = grid_of(mesh, list(axes_of(mesh)))
        firsts = [index_over(mesh_grid, axes) for axes in axes_of_dims(parse(dims), x.dim(), mesh_grid.sizes)]
    return _applied(x, p, dropped(x.shape, firsts, p, seeds, (), x.device))


def axes_of_dims(spec: Spec, ndim: int, sizes: dict[str, int]) -> list[tuple[str, ...]]:
    """The axes that split each dim, outermost first.

    Raises:
        ShardError: another number of dims, an axis that the mesh has not, or that splits an inner factor.
    """
    axes = []
    if unknown := unknown_axes(spec, sizes):
        raise ShardError(f"dropout: {unknown[0]}")
    for dim in spec.expand(ndim).dims:
        first, *inner = dim.factors
        if any(sizes[axis] > 1 for factor in inner for axis in factor.axes):
            why = f"dropout: '{dim}' is split over an inner factor: its parts lie apart; drop before the join"
            raise ShardError(why)
        axes.append(first.axes)
    return axes


def index_over(mesh_grid: Grid, axes: Sequence[str]) -> Word:
    """This rank's place along several axes as one number, outermost first; a tensor in a simulation."""
    if not simulated() or not axes:
        return index_along(axes, mesh_grid.sizes, mesh_grid.coords)
    with outside_transforms():
        return per_rank(mesh_grid, lambda at, _: [torch.tensor(index_along(axes, mesh_grid.sizes, at))], [])[0]


def part_over(mesh_grid: Grid, axes: Sequence[str]) -> tuple[Word, int]:
    """That number, and how many ranks there are."""
    return index_over(mesh_grid, axes), prod(mesh_grid.sizes[axis] for axis in axes)


# -- masks ------------------------------------------------------------------------------------------------------------


def _mixed(x: Any) -> Any:
    """A number below 2**32, or a tensor of them, to another one, such that one bit changes half of the bits.

    Source: the constants that https://nullprogram.com/blog/2018/07/31/ found by search ("lowbias32").
    """
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def _folded(words: Sequence[Word], start: int) -> Any:
    key: Any = start
    for word in words:
        key = _mixed(key ^ _mixed((word & _MASK) ^ 0x9E3779B9))
        key = _mixed(key + _mixed(((word >> 32) & _MASK) ^ 0x85EBCA6B) & _MASK)
    return key


def dropped(
    shape: Sequence[int], firsts: Sequence[Word], p: float, seed: tuple[Word, Word], use: tuple[int, ...], device: Any
) -> Tensor:
    """`[*shape]`, bool: which elements a mask takes away.

    `firsts` counts the parts of each dim that come before this rank's, `seed` is of `_keys`, and `use` tells masks
    under one seed apart.
    """
    wanted = tuple(shape)
    one, two, *starts = (word.to(device) if isinstance(word, Tensor) else word for word in (*seed, *firsts))
    threshold = round(p * 2**32)
    if threshold >= 2**32:
        return torch.ones(wanted, dtype=torch.bool, device=device)
    sizes, starts = wanted or (1,), tuple(starts) or (0,)
    if all(isinstance(first, int) for first in starts):
        with outside_transforms(), outside_modes():
            rows = _kept_rows(sizes, starts, use, device)
    else:
        rows = _rows(sizes, starts, use, device)
    total: Any = _signed(one)
    for d, row in enumerate(rows):
        total = row.view(-1, *[1] * (len(sizes) - 1 - d)) + total
    # The same mixing in 32 bits, where `>>` repeats the sign. What it would do last changes low bits only.
    total = total.bitwise_xor((total >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D) + _signed(two)
    total = total.bitwise_xor_((total >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - 2**32)
    return (total < threshold - 2**31).view(wanted)


def _rows(sizes: Sequence[int], firsts: Sequence[Word], use: Sequence[int], device: Any) -> list[Tensor]:
    """A hash of every index of each dim."""
    parts = []
    for d, (size, first) in enumerate(zip(sizes, firsts, strict=True)):
        position = torch.arange(size, device=device) + first * size
        parts.append((position & _MASK) ^ _folded((*use, d), 0xA4093822))
    return list(_signed(_mixed(torch.cat(parts))).split(list(sizes)))


_kept_rows = lru_cache(maxsize=2**10)(_rows)  # the same in every step


def _signed(x: Any) -> Any:
    """The same 32 bits with a sign."""
    signed = (x ^ 2**31) - 2**31
    return signed.to(torch.int32) if isinstance(signed, Tensor) else signed


def _applied(x: Tensor, p: float, drop: Tensor, inplace: bool = False) -> Tensor:
    scale = 1 / (1 - p) if p < 1 else 1.0
    return x.masked_fill_(drop, 0).mul_(scale) if inplace else x.masked_fill(drop, 0) * scale


# -- modules ----------------------------------------------------------------------------------------------------------


@dataclass
class Stream:
    """What one `dropout_seed` has given out."""

    seed: tuple[Word, Word]
    recording: Recording | None
    calls: dict[str, int] = field(default_factory=dict)  # by module path


_STREAM: ContextVar[Stream | None] = ContextVar("stream", default=None)
stream: Callable[[], Stream | None] = _STREAM.get  # that of the innermost `dropout_seed`


@dataclass(frozen=True)
class _Lane:
    """Which one this is of what a vmap maps over: all ranks' members or samples, or a rank's part of the batch."""

    index: Word
    count: int
    of_part: bool


_LANES: ContextVar[tuple[_Lane, ...]] = ContextVar("lanes", default=())  # of each vmap around


@contextmanager
def dropout_seed(*seed: Word) -> Iterator[None]:
    """Within it the dropout modules of `apply` drop what depends on the seed and on global positions, on any mesh.

    A mask is a function of the seed, the module's path, how often the module was called before, and where an element is
    in the whole activation: its sample over all data ranks (dim 0), its feature or head over compute axes. So ranks of
    a compute axis drop alike where they hold the same, and differently where they hold parts; data ranks drop
    differently; and 1, 2 or 64 ranks train alike. Which dim of an activation a compute axis splits is found in a run
    without data, or said by `Policy(acts={"blocks.*.drop": "b h@tp s t"})`.

        >>> import torch, shardfn as sf
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5))
        >>> params = sf.shard(model, sf.make_mesh("cpu", fsdp=1), sf.Policy())
        >>> def dropped(step):
        ...     with sf.data.dropout_seed(step):
        ...         return sf.apply(model, params, torch.ones(2, 4)) == 0
        >>> torch.equal(dropped(0), dropped(0)), torch.equal(dropped(0), dropped(1))
        (True, False)

    Args:
        seed: whole numbers or tensors of one, together the seed, such as `run, step`. Inside `sf.jit` pass the step as
            a tensor, or every step is compiled anew. Open it in every step: only calls within one are told apart.

    Raises:
        TypeError: a seed that is no whole number, or none.

    It concerns `nn.Dropout`, its forms for channels, `nn.AlphaDropout`, and `nn.MultiheadAttention` without keys of its
    own (`add_bias_kv`, `add_zero_attn`); not functions (`F.dropout`, `dropout_p` of attention), which draw from torch's
    generator. Data ranks hold equal numbers of samples. A recomputation by
    `torch.utils.checkpoint` drops the same again, with `preserve_rng_state`, its default. `sf.vmap` counts samples as
    `apply` on the batch does; its `randomness="same"` gives all the same mask.
    """
    with holding(_STREAM, Stream(key_of("dropout_seed", seed), recording())):
        yield


_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def key_of(verb: str, words: Sequence[Any]) -> tuple[Word, Word]:
    """Two numbers below 2**32 that stand for a seed.

    Raises:
        TypeError: a seed that is no whole number, or none.
    """
    for word in words:
        whole = isinstance(word, Tensor) and word.dtype in _WHOLE and not word.dim()
        if not whole and (not isinstance(word, int) or isinstance(word, bool)):
            raise TypeError(f"{verb}: a seed is a whole number or a tensor of one without dims, not {word!r}")
    if not words:
        raise TypeError(f"{verb}: pass a seed, such as the number of the step")
    seed = [word.long() if isinstance(word, Tensor) else word for word in words]
    return _folded(seed, 0x243F6A88), _folded(seed, 0x13198A2E)


def lane(index: Word, count: int, of_part: bool) -> AbstractContextManager[None]:
    """Within it runs one of `count` samples, or members, that a `vmap` maps over: of all ranks, or of this rank's."""
    return holding(_LANES, (*_LANES.get(), _Lane(index, count, of_part)))


# Which part of an activation this rank has: (index, count) of each dim over compute axes, and the dim of the batch.
Offsets = tuple[Sequence[tuple[Word, int]], int]
# Of a call of a dropout module, by path and number: the axis that splits each dim, "" for none; None: nobody knows.
Split = tuple[str, int, Sequence[str] | None]

_ALPHA = -1.7580993408473766  # what SELU saturates at
_KINDS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_DROPOUT_FORWARDS = tuple(kind.forward for kind in _KINDS)


def _dims_of_mask(module: nn.Module, ndim: int) -> int:
    """How many dims a mask has: those of a channel, [batch, channel], are all dropped together."""
    if isinstance(module, nn.Dropout1d | nn.Dropout3d):  # these also take [channel, ..]
        return ndim - (1 if isinstance(module, nn.Dropout1d) else 3)
    return min(ndim, 2) if isinstance(module, nn.Dropout2d | nn.FeatureAlphaDropout) else ndim


def dropout_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Those whose forward is torch's own, by path."""
    known = ((path, module) for path, module in model.named_modules() if isinstance(module, _KINDS))
    return {path: x for path, x in known if patched_forward(x) is None and class_of(x).forward in _DROPOUT_FORWARDS}


def dropping(model: nn.Module) -> bool:
    """Whether any module of a model that a `dropout_seed` concerns drops something now."""
    attends = (module for module in model.modules() if isinstance(module, nn.MultiheadAttention) and module.dropout)
    return any(module.training for module in (*dropout_modules(model).values(), *attends))


def offsets_of_call(path: str, plan: Plan, mesh_grid: Grid, splits: Collection[Split], call: int, ndim: int) -> Offsets:
    """Which part this rank has of the input of a call of a dropout module; `splits` says how it is split.

    Raises:
        ShardError: the activation is split, and nobody knows where.
    """
    compute = [axis for axis in plan.roles.compute if plan.axes[axis] > 1]
    pattern = first_match(plan.policy.acts, [path])
    if pattern is not None:
        dims = axes_of_dims(parse(plan.policy.acts[pattern]), ndim, plan.axes)
        batch = next((d for d, axes in enumerate(dims) if set(axes) & set(plan.roles.data)), 0)
        return [part_over(mesh_grid, [axis for axis in axes if axis in compute]) for axes in dims], batch
    if not splits:
        return [part_over(mesh_grid, [])] * ndim, 0
    known = {(name, number): axes for name, number, axes in splits}
    if (path, call) not in known:
        why = f"dropout_seed: call {call + 1} of {path!r} was not made in the shape-only trace; say how its input"
        raise ShardError(f"{why} is split, if at all: Policy(acts={{{path!r}: 'b s c'}})")
    axis_of_dim = known[path, call]
    if axis_of_dim is None:
        why = f"dropout_seed: the input of {path!r} is split over {', '.join(compute)}, and no dim of it explains how"
        raise ShardError(f"{why}: Policy(acts={{{path!r}: 'b s c@{compute[0]}'}}); or drop before heads are joined")
    return [part_over(mesh_grid, [axis] if axis else []) for axis in axis_of_dim], 0


class Masks:
    """The masks of one `apply`.

    The numbers that they are made of (seed, lane) are `inputs`, since units that compute again inside transforms must
    be given all that they read. A call is told from one that is computed again by a draw from torch's generator, whose
    state is what a recomputation brings back.
    """

    def __init__(self, stream: Stream, batch_index: Word, batch_count: int) -> None:
        """This rank is number `batch_index` of the `batch_count` data ranks."""
        lanes = _LANES.get()
        if vmap_depth() != len(lanes):
            raise ShardError("dropout_seed: inside torch.func.vmap samples cannot be told apart; use sf.vmap")
        if stream.recording is not recording():
            why = "it is open around a step that sf.jit records, which would have the same masks at every call"
            raise ShardError(f"dropout_seed: {why}; open it inside of the step, with a seed that is a tensor")
        self._stream, self.over = stream, False
        order = sorted((*lanes, _Lane(batch_index, batch_count, False)), key=lambda x: x.of_part)
        self._values: list[Word] = [*stream.seed, *(x.index for x in order)]
        self._counts = [x.count for x in order]
        self._seen: dict[tuple[str, int], int] = {}
        self._before = dict(stream.calls)

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that masks are made of."""
        return [x for x in self._values if isinstance(x, Tensor)]

    def given(self, inputs: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Within it they are made of these."""
        rest = iter(inputs)
        return having(self, _values=[next(rest) if isinstance(x, Tensor) else x for x in self._values])

    def apply(self, path: str, module: Any, x: Tensor, offsets: "Callable[[int, int], Offsets]") -> Tensor:
        """What the module at `path` makes of x; `offsets(call, ndim)` says which part of it this rank has."""
        p = module.p
        if not module.training or p == 0:
            return type(module).forward(module, x)
        drop = self._drop(path, x, p, offsets, _dims_of_mask(module, x.dim()))
        if not isinstance(module, nn.AlphaDropout | nn.FeatureAlphaDropout):
            return _applied(x, p, drop, module.inplace)
        scale = ((1 - p) * (1 + p * _ALPHA**2)) ** -0.5
        return x.masked_fill(drop, _ALPHA) * scale - scale * p * _ALPHA

    def scores(self, path: str, x: Tensor, p: float, part: tuple[Word, int]) -> Tensor:
        """Scores [batch, heads, t, s] of the attention at `path`, some dropped; of heads, this rank has `part`."""
        return _applied(x, p, self._drop(path, x, p, lambda call, ndim: ([(0, 1), part, (0, 1), (0, 1)], 0), x.dim()))

    def _drop(self, path: str, x: Tensor, p: float, offsets: "Callable[[int, int], Offsets]", keeps: int) -> Tensor:
        """What goes of x, whose first `keeps` dims a mask has."""
        call = self._call(path)
        one, two, *places = self._values
        before = layout.nested_index(zip(places, self._counts, strict=True))  # parts of the batch before this one
        parts, batch = offsets(call - self._before.get(path, 0), x.dim())
        firsts = [(before * count if d == batch else 0) + index for d, (index, count) in enumerate(parts)]
        drop = dropped(x.shape[:keeps], firsts[:keeps], p, (one, two), (crc32(path.encode()), call), x.device)
        return drop.view(*drop.shape, *[1] * (x.dim() - keeps))

    def _call(self, path: str) -> int:
        with outside_transforms(), nullcontext() if simulated() else outside_modes():
            drawn = int(part_of_rank(torch.randint(2**62, ()), 0))
        if (path, drawn) not in self._seen:
            if self.over:
                why = f"{path!r} computes again with another state of torch's generator"
                raise ShardError(f"dropout_seed: {why}; torch.utils.checkpoint needs preserve_rng_state=True")
            self._seen[path, drawn] = before = self._stream.calls.get(path, 0)
            self._stream.calls[path] = before + 1
        return self._seen[path, drawn]
