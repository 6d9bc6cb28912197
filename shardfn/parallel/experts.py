"""Mixtures of experts: over an axis of their own, or of which each rank has a part within.

Over an axis of their own, tokens go to the ranks that have their experts, and back.

Weights of experts are [experts@ep, ..]: rank r of `ep` has the experts r * n to r * n + n - 1.

    tokens differ over ep   rows to the ranks of their experts -> experts -> rows back -> sum at home
    (ep splits the batch)   two all-to-alls of rows, one of routing weights; the same in backward
    the same on all ranks   each takes those of its own experts -> experts -> psum
    (ep is a compute axis)  one all-reduce; in backward one of tokens and one of routing weights

A row is one token for one rank: it travels once to a rank, however many of its experts are there, and what comes back
is their weighted sum.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardfn._torch import has_no_memory, parameters_of, simulated, vmap_depth
from shardfn.comm import collectives
from shardfn.context import mapped_axes
from shardfn.layout import SUM, MeshSpec, class_of, declares
from shardfn.notation import ShardError
from shardfn.parallel.linears import Layouts

Grouped = Callable[[Mapping[str, Tensor], Tensor, Sequence[int]], Tensor]


class _Routed(NamedTuple):
    """Tokens [n, c], the experts of each [n, k], and their weights [n, k]."""

    tokens: Tensor
    ids: Tensor
    weights: Tensor


@dataclass(frozen=True)
class _Here:
    """The experts of this rank, which have numbers from 0 on, among those of all ranks of an axis.

    `local` has their weights, and their `module` is called with `others` besides what is routed.
    """

    module: Any
    local: Mapping[str, Tensor]
    grouped: Grouped | None
    others: tuple[Any, ...]
    mesh: DeviceMesh
    axis: str
    experts: int  # of all ranks; 0 where each has all of them

    @property
    def count(self) -> int:
        """How many experts there are here."""
        return next(iter(self.local.values())).shape[0]

    def wrong(self, ids: Tensor) -> bool:
        """Whether there are numbers of no expert."""
        return bool(((ids < 0) | (ids >= self.experts)).any())

    def refuse(self, wrong: bool) -> None:
        """An error, when numbers are wrong."""
        if wrong:
            raise ShardError(f"Experts: tokens are routed to experts that are not among 0 to {self.experts - 1}")

    def chosen(self, routed: _Routed) -> Tensor:
        """The weighted sum of what experts make of the tokens that chose them: [n, c]."""
        if self.grouped is None:
            return class_of(self.module).forward(self.module, *routed, *self.others)
        tokens, ids, weights = routed
        pairs = ids.reshape(-1)  # [n * k]
        order = pairs.argsort(stable=True)
        counts = torch.bincount(pairs, minlength=self.count).tolist()
        token = order // ids.shape[1]
        results = self.grouped(self.local, tokens.index_select(0, token), counts) * weights.reshape(-1)[order][:, None]
        return torch.zeros_like(tokens, requires_grad=False).index_add(0, token, results.to(tokens.dtype))

    def of_tokens(self, routed: _Routed) -> Tensor:
        """The weighted sum [n, c] of what this rank's experts make of tokens; zeros where a token has none here."""
        tokens, ids, weights = routed
        first = collectives.axis_index(self.mesh, self.axis) * self.count
        token, slot = ((ids >= first) & (ids < first + self.count)).nonzero(as_tuple=True)
        local_ids, weight = (ids[token, slot] - first)[:, None], weights[token, slot][:, None]
        chosen = _Routed(tokens.index_select(0, token), local_ids, weight)
        if not len(token):
            # One token of zeros for the first expert, whose result is cut off. All ranks walk the same way back, on
            # which they gather weights again and send gradients; an expert that nobody chose has zeros.
            chosen = _Routed(*(F.pad(x, (0, 0, 0, 1)) for x in chosen))
        results = self.chosen(chosen)[: len(token)].to(tokens.dtype)
        return torch.zeros_like(tokens, requires_grad=False).index_add(0, token, results)

    def dispatched(self, routed: _Routed) -> Tensor:
        """Tokens [n, c], other ones on each rank, through their experts."""
        tokens, ids, _ = routed
        mesh, axis = self.mesh, self.axis
        ranks = torch.arange(collectives.axis_size(mesh, axis), device=ids.device)
        there = (ids.div(self.count, rounding_mode="floor")[:, :, None] == ranks).any(1)  # [n, ranks]
        token = there.t().nonzero(as_tuple=True)[1]  # of each row, by rank
        send = there.sum(0)
        if self.wrong(ids):
            send = torch.full_like(send, -1)  # tells all ranks, which would wait otherwise
        counts = torch.stack([send, collectives.all_to_all(send, mesh, axis, 0, 0)]).tolist()
        self.refuse(min(map(min, counts)) < 0)
        send, receive = counts
        leaving = (x.index_select(0, token) for x in routed)
        rows = _Routed(*(collectives.all_to_all_rows(x, mesh, axis, send, receive) for x in leaving))
        back = collectives.all_to_all_rows(self.of_tokens(rows), mesh, axis, receive, send)
        return torch.zeros_like(tokens, requires_grad=False).index_add(0, token, back)

    def without_sizes(self, routed: _Routed, shared: bool) -> Tensor:
        """The same where no size may depend on values: every expert of this rank computes all tokens.

        Tokens that differ between ranks are gathered for it.
        """
        mesh, axis = self.mesh, self.axis
        if not shared:
            routed = _Routed(*(collectives.all_gather(x, mesh, axis, 0) for x in routed))
        numbers = torch.arange(self.experts, device=routed.ids.device)
        out = self.each_of_all(routed, collectives.shard_slice(numbers, mesh, axis, 0))  # [experts@ep]
        return out if shared else collectives.psum_scatter(out, mesh, axis, 0)

    def each_of_all(self, routed: _Routed, numbers: Tensor) -> Tensor:
        """What the experts with these `numbers` make of all tokens; tokens that chose others have weight zero.

        They run one by one on all tokens: no size depends on values.
        """
        tokens, ids, weights = routed
        out = torch.zeros_like(tokens, requires_grad=False)
        for index in range(self.count):
            weight = torch.where(ids == numbers[index], weights, 0).sum(-1, keepdim=True)
            if self.grouped is None:
                result = self.chosen(_Routed(tokens, torch.full(weight.shape, index, device=weight.device), weight))
            else:
                counts = [len(tokens) if other == index else 0 for other in range(self.count)]
                result = self.grouped(self.local, tokens, counts) * weight
            out = out + result.to(out.dtype)
        return out


@dataclass(frozen=True)
class Experts:
    """The parallel forward of a module of experts whose weights a rule splits by number: `"experts@ep ff c@fsdp"`.

    The module is called with tokens `[.., c]`, the experts of each token `[.., k]` and their weights `[.., k]`, and
    returns the weighted sum of what the experts make of each token. It runs here on the tokens of this rank's experts,
    with numbers from 0 on, and one expert a token. An attribute that holds the number of experts is given in
    `Policy.local_sizes`. All parameters of the module itself have the experts as their first dim.

    When `axis` splits the batch, weights of experts stay split over it, and tokens travel: the usual arrangement, in
    which the rest of the model is data-parallel over `axis`. When it does not (a compute axis), all its ranks have the
    same tokens, and each computes its own experts. Every token is computed, however many choose one expert.

        >>> import torch, shardfn as sf
        >>> from torch import nn
        >>> class Moe(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.up = nn.Parameter(torch.randn(4, 16, 8))
        ...         self.down = nn.Parameter(torch.randn(4, 8, 16))
        ...     def forward(self, x, ids, weights):
        ...         out = torch.zeros_like(x)
        ...         for expert, (up, down) in enumerate(zip(self.up, self.down)):
        ...             token, slot = torch.where(ids == expert)
        ...             made = (x[token] @ up.t()).relu() @ down.t()
        ...             out = out.index_add(0, token, made * weights[token, slot, None])
        ...         return out
        >>> policy = sf.Policy(
        ...     batch=("fsdp", "ep"),
        ...     rules={"experts.up": "experts@ep ff c@fsdp", "experts.down": "experts@ep c@fsdp ff"},
        ...     compute={"experts": sf.policies.Experts("ep")},
        ... )
        >>> sf.plan(nn.ModuleDict({"experts": Moe()}), sf.MeshSpec(fsdp=2, ep=2), policy).local_shape("experts.up")
        (2, 16, 4)

    Args:
        axis: the mesh axis of experts.
        grouped: in place of the module's own forward: `grouped(weights, tokens, counts)`, with this rank's part of the
            module's parameters by attribute, its tokens `[n, c]` sorted by expert, and how many each expert has, makes
            `[n, c]`, to which routing weights are applied here.

    Raises:
        ShardError: in `plan`: experts that do not divide. In `apply`: a parameter of the module that is not split by
            number of experts, inputs of other shapes, numbers that are no expert's.

    Communication: where `axis` splits the batch, an all-to-all of a few counts, three of tokens, their experts and
    their weights, and one of results; in backward one of each but the counts and the experts. On a compute axis an
    all-reduce of results, and in backward one of tokens and one of weights. `Plan.comm_bytes` of a plan with an
    `example` counts as many tokens as may travel: each to `k` other ranks, or to all of them if they are fewer. That is
    an upper bound of what ranks receive on average; one whose experts are chosen more often receives more.
    """

    axis: str
    grouped: Grouped | None = None

    @property
    def keeps(self) -> tuple[str, ...]:
        """The axes over which weights stay split in the computation, whatever part they have in a mesh."""
        return (self.axis,)

    def without_data(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Tensor:
        """What stands for the module in a shape-only trace: which experts are used depends on values."""
        routed, _ = _given(module, args, kwargs)
        return torch.empty_like(routed.tokens)

    def __call__(
        self, module: nn.Module, local: Mapping[str, Tensor], layouts: Layouts, /, *args: Any, **kwargs: Any
    ) -> Tensor:
        """See the class."""
        routed, others = _given(module, args, kwargs)
        experts = _experts_of(module, self.axis, local, layouts)
        for axis in layouts.axes:
            tokens = layouts.entered(routed.tokens, axis, 0)
            routed = routed._replace(tokens=tokens, weights=layouts.entered(routed.weights, axis, 2))
        mesh, shared = layouts.mesh, self.axis in layouts.axes
        if routed.tokens.is_meta:
            out = torch.empty_like(routed.tokens)
            if experts and not shared:
                layouts.received(_most_bytes(routed, collectives.axis_size(mesh, self.axis)))
        else:
            assert not isinstance(mesh, MeshSpec)
            here = _Here(module, local, self.grouped, others, mesh, self.axis, experts)
            flat = _Routed(*(x.reshape(-1, x.shape[-1]) for x in routed))
            out = self._computed(flat, here, shared).view(routed.tokens.shape)
        for axis in layouts.axes:
            out, ranks = collectives.psum(out, layouts.mesh, axis), collectives.axis_size(layouts.mesh, axis)
            layouts.received(2 * (ranks - 1) * out.numel() * out.element_size() // ranks)
        return out

    def _computed(self, routed: _Routed, here: _Here, shared: bool) -> Tensor:
        """Tokens [n, c] through their experts; over a compute axis this rank's summand."""
        fixed = has_no_memory() or simulated() or vmap_depth() > 0  # no size may depend on values
        if not here.experts:
            if self.axis in mapped_axes() and self.grouped is None:
                raise ShardError(
                    f"vmap: samples lie on '{self.axis}', and weights of experts are whole for each: the module's own "
                    f"forward may know the number of experts of one rank only. Give Experts(grouped=...), or keep "
                    f"'{self.axis}' out of Policy.batch"
                )
            if fixed and self.grouped is not None:
                return here.each_of_all(routed, torch.arange(here.count, device=routed.ids.device))
            return here.chosen(routed)
        if fixed:
            return here.without_sizes(routed, shared)
        if not shared:
            return here.dispatched(routed)
        here.refuse(here.wrong(routed.ids))
        return here.of_tokens(routed)


def _given(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[_Routed, tuple[Any, ...]]:
    """Tokens, experts and weights among the arguments of a call; what else there is.

    Raises:
        ShardError: the first three are no tensors, or of shapes that do not fit.
    """
    bound = inspect.signature(class_of(module).forward).bind(module, *args, **kwargs)
    bound.apply_defaults()
    routed, others = bound.args[1:4], bound.args[4:]
    name = class_of(module).__name__
    if len(routed) < 3 or not all(isinstance(x, Tensor) for x in routed) or bound.kwargs:
        why = f"Experts: {name} has to be called with tensors by position, tokens [.., c], experts [.., k] and weights"
        raise ShardError(f"{why} [.., k]; give it a parallel forward of its own otherwise")
    tokens, ids, weights = routed
    if ids.shape != weights.shape or ids.shape[:-1] != tokens.shape[:-1] or ids.is_floating_point() or not ids.dim():
        why = f"Experts: {name} got tokens {tuple(tokens.shape)}, experts {tuple(ids.shape)} of {ids.dtype} and"
        raise ShardError(f"{why} weights {tuple(weights.shape)}; expected [.., c], whole numbers [.., k] and [.., k]")
    return _Routed(tokens, ids, weights), others


def _most_bytes(routed: _Routed, ranks: int) -> int:
    """What a rank receives, on average, if no token stays: in a forward and, where it is differentiated, a backward."""
    n, k = routed.ids.numel() // max(routed.ids.shape[-1], 1), routed.ids.shape[-1]
    token, ids, weights = (x.shape[-1] * x.element_size() for x in routed)
    backward = any(x.requires_grad for x in routed)
    rows = n * min(k, ranks - 1)
    received = 8 * (ranks - 1) + rows * (token + ids + weights) + rows * token
    return received + backward * rows * (2 * token + weights)


def _experts_of(module: nn.Module, axis: str, local: Mapping[str, Tensor], layouts: Layouts) -> int:
    """How many experts there are over all ranks of the axis; 0 when each rank has all of them.

    Raises:
        ShardError: not all parameters are split by number of experts, or only some within them.
    """
    shared = axis in layouts.axes
    split = [layout for layout in layouts.values() if axis in (layout.axes if shared else layout.kept)]
    for other in layouts.axes:
        whole = [layout for layout in layouts.values() if other not in layout.axes]
        if whole and other != axis:
            why = f"Experts: '{whole[0].name}' is whole over '{other}', and others of its module are split"
            raise ShardError(f"{why}; what it adds would count once a rank. Split all of them over '{other}' or none")
    if not split or (size := collectives.axis_size(layouts.mesh, axis)) == 1:
        return 0
    experts = split[0].shape[0]
    for attribute, layout in layouts.items():
        if axis not in layout.model_axes(0) or not len(local[attribute]) * size == layout.shape[0] == experts:
            raise ShardError(
                f"Experts: '{layout.name}' {layout.shape} has the rule '{layout.rule}'; all parameters of the module "
                f"need the experts as their first dim, split over '{axis}' alone: 'experts@{axis} ...'"
            )
    inside = [name for name, child in module.named_modules() if name and parameters_of(child)] if shared else []
    if inside:
        why = f"Experts: {class_of(module).__name__} has parameters in '{inside[0]}', which all ranks of '{axis}' use"
        raise ShardError(f"{why}: their gradients would be parts of a sum. Put '{axis}' into Policy.batch")
    return experts


# -- experts of which each rank has a part within ----------------------------------------------------------------------


def identity_expert(
    module: nn.Module, local: Mapping[str, Tensor], layouts: Layouts, x: Tensor, *args: Any, axis: str
) -> Tensor:
    """An expert that returns its input: a rank's share of it, since the outputs of experts are added up over ranks."""
    return x / collectives.axis_size(layouts.mesh, axis)


def or_without_data(shaped: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """The module's own forward, or what stands for it in a shape-only trace."""
    without = any(isinstance(x, Tensor) and x.is_meta for x in (*args, *kwargs.values()))
    return (shaped if without else class_of(module).forward)(module, *args, **kwargs)


def _probed(module: nn.Module, /, *args: Any, **kwargs: Any) -> Tensor:
    """What experts return, without data: that of two tokens and the first expert, for all of them.

    Which experts are used depends on values; what one of them does with its part of the weights does not. Experts that
    are given no indices compute all of it.
    """
    rows = args[0].shape[0]
    if all(x.is_floating_point() for x in (*args, *kwargs.values()) if isinstance(x, Tensor)):
        return class_of(module).forward(module, *args, **kwargs)
    few, named = map(_of_two, args), {key: _of_two(value) for key, value in kwargs.items()}
    out = inspect.unwrap(class_of(module).forward)(module, *few, **named)
    return out[:1].expand(rows, *out.shape[1:]).contiguous()


def _of_two(value: Any) -> Any:
    """The first rows; indices are zeros, whose values are known in a shape-only trace."""
    if not isinstance(value, Tensor):
        return value
    few = value[:2]
    return few if few.is_floating_point() else torch.zeros(few.shape, dtype=few.dtype, device=few.device)


@declares(calls_own=True, without_data=_probed)
def tensor_parallel_experts(
    module: nn.Module, local: Mapping[str, Tensor], layouts: Layouts, /, *args: Any, **kwargs: Any
) -> Any:
    """The forward of experts of which each rank has a part within: `forward(hidden [tokens, c], ids, weights)`.

    Communication: one all-reduce of the output, and in the backward one of each floating input's gradient.
    """
    for axis in layouts.axes:
        args = tuple(
            layouts.entered(x, axis, at) if isinstance(x, Tensor) and x.is_floating_point() else x
            for at, x in enumerate(args)
        )
    out = or_without_data(_probed, module, *args, **kwargs)
    for axis in layouts.axes:
        layouts.require(out, axis, SUM)
        out = collectives.psum(out, layouts.mesh, axis)
    return out
