"""Optimizers over trees of shards: `update` is pure, as in Optax, `step` is fused and donates. Layer 4.

    rule          one algorithm, leaf by leaf: AdamW, SGD, Lion
    transform     changes gradients on their way: `clip_by_global_norm`, `schedule`
    slot          one tensor of state per parameter (`mu`, `nu`, `momentum`), a tree like the parameters'
    group         parameters, by name pattern, with options of their own

Arithmetic is on local shards and communicates nothing; only `global_norm`, and what clips by it, is a collective.
Parameters that do not train (`requires_grad=False` in the model, integers) have no state, no update and no decay, and
whatever stands in their gradients is ignored.

[Note: where a derivative flows]
Meta-learning differentiates through `update`. A DTensor's local tensor is outside autograd, so where a leaf carries a
derivative the same arithmetic runs on the DTensors themselves, which is slower and communicates nothing either.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, optim
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw as torch_adamw
from torch.optim.sgd import sgd as torch_sgd

from shardfn._torch import foreach, in_transform, pytree, unwrap_local, with_local
from shardfn.core.collectives import sum_flat_
from shardfn.core.errors import ShardError, did_you_mean, raise_problems
from shardfn.core.pattern import first_match, matches
from shardfn.core.tree import Params

Tree: TypeAlias = Any  # Params, or a plain dict of tensors
Options: TypeAlias = Mapping[str, Any]
Rate: TypeAlias = float | Callable[[int], float]
Groups: TypeAlias = Mapping[str, Options]

_FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "mtia")
_CHUNK = 2**24  # elements that are widened at a time


class Optimizer(NamedTuple):
    """Three functions. Whatever an optimizer remembers is in its state, a pytree.

        >>> import torch, shardfn as sf
        >>> opt = sf.optim.sgd(0.5)
        >>> params, grads = {"w": torch.ones(2)}, {"w": torch.ones(2)}
        >>> updates, state = opt.update(grads, opt.init(params), params)
        >>> sf.optim.apply_updates(params, updates)
        {'w': tensor([0.5000, 0.5000])}
        >>> params, state = opt.step(params, grads, state)
        >>> params
        {'w': tensor([0.5000, 0.5000])}

    Args:
        init: `init(params) -> state`; allocates, communicates nothing.
        update: `update(grads, state, params) -> (updates, state)`, pure and differentiable. Updates are added to
            parameters, see `apply_updates`; they are in float32 or wider, and only for parameters that train.
        step: `step(params, grads, state) -> (params, state)`, the same in place: the parameters returned are the same
            objects, `nn.Parameter`s too, and the old state is used up. Outside autograd.
    """

    init: Callable[[Tree], Any]
    update: Callable[[Tree, Any, Tree], tuple[Tree, Any]]
    step: Callable[[Tree, Tree, Any], tuple[Tree, Any]]


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """`params + updates`, in the parameters' dtypes; parameters without an update are the same objects.

        >>> import torch, shardfn as sf
        >>> sf.optim.apply_updates({"a": torch.ones(2), "b": torch.ones(1)}, {"a": torch.ones(2)})
        {'a': tensor([2., 2.]), 'b': tensor([1.])}

    Args:
        params: the parameters; not changed.
        updates: what an optimizer's `update` returned.

    Returns:
        a new tree like `params`.

    Raises:
        ShardError: updates of other names or layouts.
    """
    names = list(_require_tree("apply_updates", "updates", updates))
    _require_match("apply_updates", "updates", params, names, updates)
    local, wrap = _views(params, updates, names=names)
    new = {
        name: wrap(params[name], (local(params[name]) + local(updates[name])).to(params[name].dtype)) for name in names
    }
    return _like(params, {**params, **new})


# ---------------------------------------------------------------------------------------------------------------------
# Trees: which leaves take part, and whether two trees go together


def _trainable(params: Tree) -> list[str]:
    """Names of the leaves that an optimizer updates."""
    known = params.plan.leaves if isinstance(params, Params) else {}
    return [
        name
        for name, leaf in params.items()
        if (leaf.is_floating_point() or leaf.is_complex()) and (name not in known or known[name][0].trainable)
    ]


def _model_names(params: Tree, name: str) -> tuple[str, ...]:
    """What the model calls a stored leaf: `wqkv.weight[q]` is part of `wqkv.weight`; tied names are all of them."""
    if isinstance(params, Params) and name in params.plan.leaves:
        layout = params.plan.leaves[name][0]
        return (layout.name, *layout.aliases)
    return (name,)


def _like(params: Tree, leaves: Mapping[str, Tensor]) -> Tree:
    """Other leaves in a tree of the same kind."""
    return params.like(leaves) if isinstance(params, Params) else dict(leaves)


def _slot_like(params: Tree, leaves: Mapping[str, Tensor]) -> Tree:
    """A tree of state: like the parameters', without the model's buffers."""
    return Params(leaves, params.plan, params.mesh) if isinstance(params, Params) else dict(leaves)


def _require_tree(verb: str, what: str, tree: object) -> Mapping[str, Tensor]:
    if not isinstance(tree, Mapping):
        raise TypeError(
            f"{verb}: {what} is a {type(tree).__name__}; expected what sf.shard makes, or a dict of tensors"
        )
    return tree


def _require_tensors(verb: str, params: Tree) -> None:
    for name, leaf in _require_tree(verb, "params", params).items():
        if not isinstance(leaf, Tensor):
            raise TypeError(f"{verb}: params[{name!r}] is a {type(leaf).__name__}; a tree is flat, name -> tensor")


def _require_some(verb: str, params: Tree) -> None:
    """An optimizer without anything to do is a mistake: most often a mapping of plain tensors was sharded."""
    if len(params) and not _trainable(params):
        raise ShardError(
            f"{verb}: none of {len(params)} parameters trains: integers, or requires_grad=False in the model. "
            f"sf.shard takes a mapping's word for it too: write nn.Parameter(tensor) there."
        )


def _require_match(verb: str, what: str, params: Tree, names: Sequence[str], other: Tree) -> None:
    """Check that `other` has a leaf of the parameter's layout for every name, and none that is no parameter."""
    _require_tree(verb, "params", params)
    have = _require_tree(verb, what, other)
    problems = [f"{what} has no leaf {name!r}{did_you_mean(name, have)}" for name in names if name not in have]
    unknown = [name for name in have if name not in params]
    problems += [f"{what} has {name!r}, which is no parameter{did_you_mean(name, params)}" for name in unknown]
    if not in_transform():  # where DTensors are wrapped, so that nothing of them can be read
        pairs = [(name, params[name], have[name]) for name in names if name in have and name in params]
        problems += [f"{what}[{name!r}] {why}" for name, param, leaf in pairs if (why := _mismatch(param, leaf))]
    shown = problems[:5] + [f"and {len(problems) - 5} more"] * (len(problems) > 5)
    raise_problems(verb, shown)


def _mismatch(param: Tensor, leaf: object) -> str | None:
    """Why a leaf cannot be combined with its parameter."""
    if not isinstance(leaf, Tensor):
        return f"is {leaf!r}, not a tensor; write zeros for a parameter that was not used"
    if leaf.shape != param.shape:
        return f"has shape {tuple(leaf.shape)}, the parameter {tuple(param.shape)}"
    if not isinstance(param, DTensor) or not isinstance(leaf, DTensor):
        if isinstance(param, DTensor) == isinstance(leaf, DTensor):
            return None
        return f"is {_kind(leaf)}, the parameter is {_kind(param)}; sf.reduce_grads(grads, like=params) makes DTensors"
    if leaf.placements == param.placements and (
        leaf.device_mesh is param.device_mesh or leaf.device_mesh == param.device_mesh
    ):
        return None
    if any(placement.is_partial() for placement in leaf.placements):
        return "is a sum that is still pending; call sf.reduce_grads first"
    return f"has the layout {leaf.placements}, the parameter {param.placements}; sf.reshard one of the trees"


def _kind(leaf: Tensor) -> str:
    return "a DTensor" if isinstance(leaf, DTensor) else "a plain tensor"


def _views(*trees: Tree, names: Sequence[str]) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]:
    """How to compute on leaves, and to wrap a result like a parameter; see [Note: where a derivative flows]."""
    leaves = [tree[name] for tree in trees for name in names if name in tree]
    sharded = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
    flows = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
    if flows or len(sharded) < len(leaves):
        return _itself, _second
    return unwrap_local, with_local


def _itself(leaf: Tensor) -> Tensor:
    return leaf


def _second(param: Tensor, result: Tensor) -> Tensor:
    return result


# ---------------------------------------------------------------------------------------------------------------------
# Norms


def global_norm(tree: Tree) -> Tensor:
    """The 2-norm of all floating tensors of a tree together, as if they were one vector.

        >>> import torch, shardfn as sf
        >>> sf.optim.global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])})
        tensor(5.)

    Args:
        tree: any pytree of `DTensor`s on one mesh, in any mix of layouts, or of plain tensors. A replicated leaf counts
            once. Integer leaves do not count.

    Returns:
        a plain scalar, the same on all ranks, in float32, or in float64 when a leaf is.

    Raises:
        ShardError: a leaf is a pending sum; leaves on several meshes; DTensors and plain tensors mixed.

    Communication: one all-reduce of a scalar when the mesh covers all ranks, else one an axis; none for plain tensors.
    """
    return _norm("global_norm", [leaf for leaf in pytree.tree_leaves(tree) if _is_floating(leaf)])


def _is_floating(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _norm(verb: str, leaves: Sequence[Tensor]) -> Tensor:
    wide = torch.float64 if any(leaf.dtype in (torch.float64, torch.complex128) for leaf in leaves) else torch.float32
    sharded = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
    if not sharded or any(leaf.grad_fn is not None for leaf in sharded):
        return _square_sum(leaves, wide, None).sqrt()
    if len(sharded) < len(leaves):
        raise ShardError(
            f"{verb}: the tree mixes DTensors and plain tensors; is a plain one a part or the whole? Shard all"
        )
    mesh = sharded[0].device_mesh
    if any(leaf.device_mesh is not mesh and leaf.device_mesh != mesh for leaf in sharded):
        raise ShardError(f"{verb}: the leaves live on several meshes; sf.reshard them to one")
    at = mesh.get_coordinate()
    if at is None:
        raise ShardError(f"{verb}: rank {dist.get_rank()} is not part of the leaves' mesh")
    with torch.no_grad():
        mine = [unwrap_local(leaf) for leaf in sharded if _counts_here(verb, leaf, at)]
        total = _square_sum(mine, wide, unwrap_local(sharded[0]).device)
        for group in _groups_of(sharded[0]):
            sum_flat_(total, group)
    return total.sqrt()


def _counts_here(verb: str, leaf: DTensor, at: Sequence[int]) -> bool:
    """Whether this rank adds a leaf to the sum: of the ranks that hold the same part, only the first."""
    if any(placement.is_partial() for placement in leaf.placements):
        raise ShardError(
            f"{verb}: a leaf of shape {tuple(leaf.shape)} is a sum that is still pending; call sf.reduce_grads first"
        )
    return all(index == 0 or not placement.is_replicate() for index, placement in zip(at, leaf.placements, strict=True))


def _groups_of(leaf: DTensor) -> list[dist.ProcessGroup]:
    """Process groups over which a sum reaches every rank of the leaf's mesh."""
    mesh = leaf.device_mesh
    axes = [dim for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    world = dist.group.WORLD
    if len(axes) > 1 and world is not None and mesh.size() == world.size():
        return [world]
    return [mesh.get_group(dim) for dim in axes]


def _square_sum(tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device | None) -> Tensor:
    real = [torch.view_as_real(x) if x.is_complex() else x for x in tensors if x.numel()]
    if not real:
        return torch.zeros((), dtype=dtype, device=device)
    if in_transform():  # foreach has no batching rules
        norms = [torch.linalg.vector_norm(x, dtype=dtype) for x in real]
    else:
        norms = list(foreach("norm")(real, 2, dtype=dtype))
    return torch.stack(norms).square().sum()


def clip(grads: Tree, max_norm: float) -> tuple[Tree, Tensor]:
    """Gradients scaled down so that their global norm is at most `max_norm`, and the norm that they had.

        >>> import torch, shardfn as sf
        >>> grads, norm = sf.optim.clip({"a": torch.tensor([3.0, 4.0])}, max_norm=1.0)
        >>> norm, grads["a"]
        (tensor(5.), tensor([0.6000, 0.8000]))

    As in `torch.nn.utils.clip_grad_norm_`, the factor is `min(1, max_norm / (norm + 1e-6))`: with an infinite gradient
    it is 0 (and the infinite elements become nan), with a nan all gradients become nan. Test the norm to skip a step.

    Args:
        grads: gradients; not changed. Leaves of parameters that do not train neither count nor change.
        max_norm: the largest norm; `math.inf` only measures.

    Returns:
        gradients in their own dtypes, and the norm before clipping as a plain scalar.

    Raises:
        ValueError: `max_norm` is not positive.
        ShardError: what `global_norm` raises.

    Communication: that of one `global_norm`.
    """
    _require_positive("clip", max_norm)
    leaves, structure = pytree.tree_flatten(grads)
    names = set(_trainable(grads)) if isinstance(grads, Params) else None
    keys = list(grads) if names is not None else range(len(leaves))
    chosen = [i for i, key in enumerate(keys) if (_is_floating(leaves[i]) if names is None else key in names)]
    norm = _norm("clip", [leaves[i] for i in chosen])
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for i, leaf in zip(chosen, _scaled([leaves[i] for i in chosen], factor), strict=True):
        leaves[i] = leaf
    return pytree.tree_unflatten(leaves, structure), norm


def _require_positive(verb: str, max_norm: float) -> None:
    if not isinstance(max_norm, int | float) or not max_norm > 0:
        raise ValueError(f"{verb}: max_norm={max_norm!r} is not a positive number; math.inf only measures")


def _scaled(leaves: Sequence[Tensor], factor: Tensor) -> list[Tensor]:
    if not leaves or in_transform() or any(leaf.grad_fn is not None for leaf in leaves):
        return [leaf * factor.to(leaf.dtype) for leaf in leaves]
    scaled = foreach("mul")([unwrap_local(leaf) for leaf in leaves], factor)
    return [with_local(leaf, local) for leaf, local in zip(leaves, scaled, strict=True)]


# ---------------------------------------------------------------------------------------------------------------------
# Rules


@dataclass(frozen=True)
class _Rule:
    """One algorithm on the leaves of one group; trees, groups, dtypes and checks are `_Elementwise`'s.

    `update(options, step)` returns `leaf(grad, param, *slots) -> (update, new slots)`, where `step` counts from 1.
    `step(options, step, params, grads, slots)` works in place on lists of equal dtype and device, `step` counts from 0;
    `least` is the dtype, by device type, that is wide enough for this.
    """

    name: str
    state: Any  # a NamedTuple class: the step counter, then one tree a slot
    slots: Callable[[Options], tuple[str, ...]]
    update: Callable[[Options, Tensor], Callable[..., tuple[Tensor, tuple[Tensor, ...]]]]
    step: Callable[[Options, Tensor, list[Tensor], list[Tensor], list[list[Tensor]]], None]
    least: Mapping[str, torch.dtype] = field(default_factory=dict)


class AdamState(NamedTuple):
    """State of `adamw`: the number of updates, and running means of gradients (`mu`) and of their squares (`nu`)."""

    step: Tensor
    mu: Tree
    nu: Tree


class SGDState(NamedTuple):
    """State of `sgd`: the number of updates, and for leaves with momentum their running sum of gradients."""

    step: Tensor
    momentum: Tree


class LionState(NamedTuple):
    """State of `lion`: the number of updates, and running means of gradients."""

    step: Tensor
    mu: Tree


def _adamw_update(options: Options, step: Tensor) -> Callable[..., tuple[Tensor, tuple[Tensor, ...]]]:
    lr, b1, b2, eps, decay = (options[key] for key in ("lr", "b1", "b2", "eps", "weight_decay"))
    size = lr / (1 - b1**step)
    root = (1 - b2**step).sqrt()

    def leaf(grad: Tensor, param: Tensor, mu: Tensor, nu: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        mu = mu + (1 - b1) * (grad - mu)
        nu = b2 * nu + (1 - b2) * grad * grad
        # The derivative of sqrt at 0 is infinite, and a second derivative through it would be nan.
        used = nu > 0
        norm = torch.where(used, nu, 1.0).sqrt() * used
        return -lr * decay * param - size * mu / (norm / root + eps), (mu, nu)

    return leaf


def _adamw_step(
    options: Options, step: Tensor, params: list[Tensor], grads: list[Tensor], slots: list[list[Tensor]]
) -> None:
    device = params[0].device
    fused = _is_fusable(params, slots)
    mu, nu = slots
    # torch counts in a tensor per parameter, for its fused kernels on the parameters' device.
    steps = step.to(device if fused else "cpu", torch.float32).repeat(len(params)).unbind(0)
    torch_adamw(
        params,
        [grad.contiguous() for grad in grads] if fused else grads,
        mu,
        nu,
        [],
        list(steps),
        fused=fused,
        foreach=not fused,
        amsgrad=False,
        beta1=options["b1"],
        beta2=options["b2"],
        lr=options["lr"],
        weight_decay=options["weight_decay"],
        eps=options["eps"],
        maximize=False,
    )


def _is_fusable(params: Sequence[Tensor], slots: Sequence[Sequence[Tensor]]) -> bool:
    """Whether torch's fused kernels can run: on CPU they walk memory and take no notice of strides (torch 2.13)."""
    dense = all(x.is_contiguous() for tensors in (params, *slots) for x in tensors)
    return dense and params[0].device.type in _FUSED_DEVICES


def _sgd_update(options: Options, step: Tensor) -> Callable[..., tuple[Tensor, tuple[Tensor, ...]]]:
    lr, factor, decay, nesterov = (options[key] for key in ("lr", "momentum", "weight_decay", "nesterov"))

    def leaf(grad: Tensor, param: Tensor, *slots: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        grad = grad + decay * param if decay else grad
        if not factor:
            return -lr * grad, ()
        momentum = factor * slots[0] + grad
        return -lr * (grad + factor * momentum if nesterov else momentum), (momentum,)

    return leaf


def _sgd_step(
    options: Options, step: Tensor, params: list[Tensor], grads: list[Tensor], slots: list[list[Tensor]]
) -> None:
    fused = _is_fusable(params, slots)
    buffers: list[Tensor | None] = [*slots[0]] if slots else [None] * len(params)
    torch_sgd(
        params,
        [grad.contiguous() for grad in grads] if fused else grads,
        buffers,
        fused=fused,
        foreach=not fused,
        lr=options["lr"],
        momentum=options["momentum"],
        nesterov=options["nesterov"],
        weight_decay=options["weight_decay"],
        dampening=0.0,
        maximize=False,
    )


def _lion_update(options: Options, step: Tensor) -> Callable[..., tuple[Tensor, tuple[Tensor, ...]]]:
    lr, b1, b2, decay = (options[key] for key in ("lr", "b1", "b2", "weight_decay"))

    def leaf(grad: Tensor, param: Tensor, mu: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        direction = torch.sign(b1 * mu + (1 - b1) * grad)
        return -lr * (direction + decay * param), (b2 * mu + (1 - b2) * grad,)

    return leaf


def _lion_step(
    options: Options, step: Tensor, params: list[Tensor], grads: list[Tensor], slots: list[list[Tensor]]
) -> None:
    lr, b1, b2, decay = (options[key] for key in ("lr", "b1", "b2", "weight_decay"))
    (mu,) = slots
    direction = foreach("mul")(mu, b1)
    foreach("add_")(direction, grads, alpha=1 - b1)
    foreach("sign_")(direction)
    foreach("mul_")(params, 1 - lr * decay)
    foreach("add_")(params, direction, alpha=-lr)
    foreach("mul_")(mu, b2)
    foreach("add_")(mu, grads, alpha=1 - b2)


_ADAMW = _Rule("adamw", AdamState, lambda _: ("mu", "nu"), _adamw_update, _adamw_step)
_SGD = _Rule(
    "sgd",
    SGDState,
    lambda options: ("momentum",) * bool(options["momentum"]),
    _sgd_update,
    _sgd_step,
    # torch's fused SGD does not update halves on CPU: https://github.com/pytorch/pytorch/issues/191763, still in 2.13.
    least={"cpu": torch.float32},
)
# foreach would round halves between operations, and a sign turns rounding into a whole step.
_LION = _Rule(
    "lion", LionState, lambda _: ("mu",), _lion_update, _lion_step, least=dict.fromkeys(_FUSED_DEVICES, torch.float32)
)


# ---------------------------------------------------------------------------------------------------------------------
# Rules on trees


@dataclass(frozen=True)
class _Elementwise:
    """A rule with its options, on trees."""

    rule: _Rule
    options: Options
    groups: Groups
    state_dtype: torch.dtype | None

    def optimizer(self) -> Optimizer:
        return Optimizer(self.init, self.update, self.step)

    def init(self, params: Tree) -> Any:
        verb = f"{self.rule.name}.init"
        _require_tensors(verb, params)
        _require_some(verb, params)
        self._require_live_groups(verb, params)
        for name in _trainable(params):
            if params[name].is_complex():
                raise TypeError(
                    f"{verb}: params[{name!r}] is complex, which {self.rule.name} has no rule for; use from_torch"
                )
        slots: dict[str, dict[str, Tensor]] = {slot: {} for slot in self.rule.state._fields[1:]}
        for options, names in self._members(params):
            for slot in self.rule.slots(options):
                slots[slot] |= {name: self._zeros(params[name]) for name in names}
        order = {slot: {name: leaves[name] for name in params if name in leaves} for slot, leaves in slots.items()}
        return self.rule.state(
            torch.zeros((), dtype=torch.int64), *(_slot_like(params, leaves) for leaves in order.values())
        )

    def _zeros(self, param: Tensor) -> Tensor:
        return with_local(param, torch.zeros_like(unwrap_local(param), dtype=self.state_dtype))

    def _require_live_groups(self, verb: str, params: Tree) -> None:
        names = [model_name for name in params for model_name in _model_names(params, name)]
        problems = [
            f"groups: {pattern!r} matches no parameter{did_you_mean(pattern, names) or '.'} "
            f"There are {', '.join(names[:3])}{', ...' if len(names) > 3 else '.'}"
            for pattern in self.groups
            if not any(matches(pattern, name) for name in names)
        ]
        raise_problems(verb, problems)

    def _members(self, params: Tree) -> list[tuple[Options, list[str]]]:
        """(options, names of trainable leaves) of every group that has some."""
        if not self.groups:
            names = _trainable(params)
            return [(self.options, names)] if names else []
        patterns = tuple(self.groups)
        found: dict[str | None, list[str]] = {}
        for name in _trainable(params):
            found.setdefault(_pattern_of(patterns, _model_names(params, name)), []).append(name)
        return [({**self.options, **self.groups.get(pattern or "", {})}, names) for pattern, names in found.items()]

    def _checked(self, verb: str, params: Tree, grads: Tree, state: Any) -> list[tuple[Options, list[str]]]:
        """The members with this step's learning rates, once everything fits together."""
        members = self._members(params)
        _require_match(verb, "grads", params, [name for _, names in members for name in names], grads)
        if not isinstance(state, self.rule.state):
            raise TypeError(
                f"{verb}: the state is a {type(state).__name__}, not what {self.rule.name}.init(params) returns"
            )
        for slot in state._fields[1:]:
            names = [name for options, names in members if slot in self.rule.slots(options) for name in names]
            _require_match(verb, f"state.{slot}", params, names, getattr(state, slot))
        return [(_at_step(verb, options, state.step), names) for options, names in members]

    def update(self, grads: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        members = self._checked(f"{self.rule.name}.update", params, grads, state)
        trees = {slot: getattr(state, slot) for slot in state._fields[1:]}
        everyone = [name for _, names in members for name in names]
        local, wrap = _views(params, grads, *trees.values(), names=everyone)
        step = state.step + 1
        updates: dict[str, Tensor] = {}
        new = {slot: dict(tree) for slot, tree in trees.items()}
        for options, names in members:
            rule = self.rule.update(options, step.double())
            slots = self.rule.slots(options)
            for name in names:
                param, own = local(params[name]), [local(trees[slot][name]) for slot in slots]
                wide = _promoted([param, *own], torch.float32)
                result, states = rule(*(x.to(wide) for x in (local(grads[name]), param, *own)))
                updates[name] = wrap(params[name], result)
                for slot, before, after in zip(slots, own, states, strict=True):
                    new[slot][name] = wrap(params[name], after.to(before.dtype))
        ordered = {name: updates[name] for name in params if name in updates}
        return _slot_like(params, ordered), self.rule.state(step, *(_slot_like(params, tree) for tree in new.values()))

    def step(self, params: Tree, grads: Tree, state: Any) -> tuple[Tree, Any]:
        members = self._checked(f"{self.rule.name}.step", params, grads, state)
        with torch.no_grad():
            for options, names in members:
                slots = [getattr(state, slot) for slot in self.rule.slots(options)]
                columns = [[unwrap_local(tree[name]) for name in names] for tree in (params, grads, *slots)]
                for same in _in_one_dtype(columns, self.rule.least):
                    self.rule.step(options, state.step, same[0], same[1], same[2:])
        return params, state._replace(step=state.step + 1)


@lru_cache(maxsize=2**16)
def _pattern_of(patterns: tuple[str, ...], names: tuple[str, ...]) -> str | None:
    return first_match(patterns, names)


def _promoted(tensors: Sequence[Tensor], least: torch.dtype | None) -> torch.dtype:
    """The dtype to compute in: no tensor's values are rounded, and none is narrower than `least`."""
    wide = least or tensors[0].dtype
    for tensor in tensors:
        wide = torch.promote_types(wide, tensor.dtype)
    return wide


def _in_one_dtype(columns: list[list[Tensor]], least: Mapping[str, torch.dtype]) -> Iterator[list[list[Tensor]]]:
    """Rows (param, grad, *slots) for in-place work, as columns of one dtype and device at a time.

    What has to be widened for that is copied, a bounded number of elements at a time, and written back afterwards.
    """
    ready: dict[tuple[torch.device, torch.dtype], list[list[Tensor]]] = {}
    waiting: dict[tuple[torch.device, torch.dtype], list[list[Tensor]]] = {}
    known: dict[tuple[torch.dtype, ...], torch.dtype] = {}
    for param, grad, *slots in zip(*columns, strict=True):
        if not param.numel():
            continue
        dtypes = (param.dtype, *(slot.dtype for slot in slots))
        wide = known.get(dtypes) or known.setdefault(dtypes, _promoted([param, *slots], least.get(param.device.type)))
        row = [param, grad if grad.dtype == wide else grad.to(wide), *slots]
        same = all(dtype == wide for dtype in dtypes)
        (ready if same else waiting).setdefault((param.device, wide), []).append(row)
    for rows in ready.values():
        yield _transposed(rows)
    for (_, wide), rows in waiting.items():
        for some in _chunks(rows):
            widened = [[x.to(wide) for x in row] for row in some]
            yield _transposed(widened)
            for before, after in zip(some, widened, strict=True):
                for target, result in zip((before[0], *before[2:]), (after[0], *after[2:]), strict=True):
                    target.copy_(result)


def _transposed(rows: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    return [list(column) for column in zip(*rows, strict=True)]


def _chunks(rows: Sequence[list[Tensor]]) -> Iterator[list[list[Tensor]]]:
    run: list[list[Tensor]] = []
    size = 0
    for row in rows:
        if run and size + row[0].numel() > _CHUNK:
            yield run
            run, size = [], 0
        run.append(row)
        size += row[0].numel()
    if run:
        yield run


# ---------------------------------------------------------------------------------------------------------------------
# Options


def _at_step(verb: str, options: Options, step: Tensor) -> Options:
    """Options with the learning rate of this step, which counts from 0."""
    lr = options["lr"]
    return options if not callable(lr) else {**options, "lr": _rate(verb, "lr", lr, step)}


def _rate(verb: str, what: str, fn: Callable[..., Any], step: Tensor) -> Any:
    value = fn(int(step))
    if not isinstance(value, Tensor) and not value >= 0:
        raise ValueError(f"{verb}: {what}({int(step)}) is {value!r}, which is not a number from 0 up")
    return value


_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "lr": (lambda x: 0 <= x < math.inf, "a finite number from 0 up, or a callable step -> float"),
    "weight_decay": (lambda x: 0 <= x < math.inf, "a finite number from 0 up"),
    "eps": (lambda x: 0 <= x < math.inf, "a finite number from 0 up"),
    "momentum": (lambda x: 0 <= x < math.inf, "a finite number from 0 up"),
    "b1": (lambda x: 0 <= x < 1, "from 0 up to, but not including, 1"),
    "b2": (lambda x: 0 <= x < 1, "from 0 up to, but not including, 1"),
}


def _elementwise(rule: _Rule, options: Options, groups: Groups | None, state_dtype: torch.dtype | None) -> Optimizer:
    """The optimizer of a rule, once its options make sense."""
    if state_dtype is not None and not (isinstance(state_dtype, torch.dtype) and state_dtype.is_floating_point):
        raise TypeError(
            f"{rule.name}(state_dtype={state_dtype!r}): a floating torch.dtype, or None for the parameters'"
        )
    if groups is not None and not isinstance(groups, Mapping):
        raise TypeError(f"{rule.name}(groups=...) takes a mapping of pattern -> options, not {type(groups).__name__}")
    _require_options(rule.name, options, options)
    for pattern, own in (groups or {}).items():
        where = f"{rule.name}: groups[{pattern!r}]"
        if not isinstance(own, Mapping):
            raise TypeError(f"{where} is {own!r}; write the options that differ, for example {{'weight_decay': 0.0}}")
        matches(pattern, "")  # a pattern that cannot be read is an error here
        _require_options(where, own, options)
    return _Elementwise(rule, options, dict(groups or {}), state_dtype).optimizer()


def _require_options(where: str, given: Options, defaults: Options) -> None:
    for name, value in given.items():
        if name not in defaults:
            known = ", ".join(defaults)
            raise ValueError(f"{where} has no option {name!r}{did_you_mean(name, defaults) or '.'} There are {known}.")
        if name not in _RANGES:
            if not isinstance(value, bool):
                raise TypeError(f"{where}: {name}={value!r} is not True or False")
        elif isinstance(value, bool) or not (isinstance(value, int | float) or (name == "lr" and callable(value))):
            raise TypeError(f"{where}: {name}={value!r} must be {_RANGES[name][1]}")
        elif not callable(value) and not _RANGES[name][0](value):
            raise ValueError(f"{where}: {name}={value!r} must be {_RANGES[name][1]}")
    merged = {**defaults, **given}
    if merged.get("nesterov") and not merged["momentum"]:
        raise ValueError(f"{where}: nesterov=True needs a momentum, for example momentum=0.9")


# ---------------------------------------------------------------------------------------------------------------------
# Public optimizers


def adamw(
    lr: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    *,
    groups: Groups | None = None,
    state_dtype: torch.dtype | None = None,
) -> Optimizer:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101), with the numerics of `torch.optim.AdamW`.

        >>> import torch, shardfn as sf
        >>> opt = sf.optim.adamw(1e-3, groups={"**.bias": {"weight_decay": 0.0}})
        >>> params = {"up.weight": torch.ones(2, 2), "up.bias": torch.ones(2)}
        >>> state = opt.init(params)
        >>> params, state = opt.step(params, {name: torch.ones_like(p) for name, p in params.items()}, state)
        >>> params["up.bias"], int(state.step), list(state.mu)
        (tensor([0.9990, 0.9990]), 1, ['up.weight', 'up.bias'])

    Args:
        lr: learning rate, or a callable that returns it; it is given the number of updates so far: 0, 1, ...
        b1: decay of the running mean of gradients.
        b2: decay of the running mean of squared gradients.
        eps: added to the root of that mean.
        weight_decay: decoupled decay, times the learning rate.
        groups: pattern of parameter names -> options of its own (`lr`, `b1`, `b2`, `eps`, `weight_decay`); the first
            match wins. Names are the model's, also of a parameter that is stored in parts.
        state_dtype: dtype of the running means; default the parameter's. The arithmetic is in the wider of both.

    Returns:
        an optimizer with state `AdamState(step, mu, nu)`: trees with the parameters' layouts, which reshard, gather and
        save like parameters.

    Raises:
        ValueError: an option out of range or unknown.
        TypeError: an option of the wrong type.
        ShardError: in `init`, a group that matches nothing; in `update` and `step`, trees that do not go together.

    Communication: none.
    """
    options = {"lr": lr, "b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay}
    return _elementwise(_ADAMW, options, groups, state_dtype)


def sgd(
    lr: Rate,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    *,
    groups: Groups | None = None,
    state_dtype: torch.dtype | None = None,
) -> Optimizer:
    """Gradient descent with momentum, with the numerics of `torch.optim.SGD`.

        >>> import torch, shardfn as sf
        >>> opt = sf.optim.sgd(0.1, momentum=0.9)
        >>> params = {"w": torch.ones(2)}
        >>> params, state = opt.step(params, {"w": torch.ones(2)}, opt.init(params))
        >>> params["w"], state.momentum["w"]
        (tensor([0.9000, 0.9000]), tensor([1., 1.]))

    Args:
        lr: learning rate, or a callable of the number of updates so far.
        momentum: decay of the running sum of gradients; 0 keeps no state.
        nesterov: look ahead along the momentum.
        weight_decay: times the parameter, added to its gradient.
        groups: see `adamw`; options `lr`, `momentum`, `nesterov`, `weight_decay`.
        state_dtype: see `adamw`.

    Returns:
        an optimizer with state `SGDState(step, momentum)`.

    Raises:
        ValueError: an option out of range or unknown, or nesterov without momentum.
        TypeError: an option of the wrong type.
        ShardError: see `adamw`.

    Communication: none.
    """
    options = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    return _elementwise(_SGD, options, groups, state_dtype)


def lion(
    lr: Rate,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 0.01,
    *,
    groups: Groups | None = None,
    state_dtype: torch.dtype | None = None,
) -> Optimizer:
    """Lion (Chen et al., arXiv:2302.06675): steps of one size, along the sign of a momentum.

        >>> import torch, shardfn as sf
        >>> opt = sf.optim.lion(0.25, weight_decay=0.0)
        >>> params = {"w": torch.ones(2)}
        >>> params, state = opt.step(params, {"w": torch.tensor([3.0, -0.1])}, opt.init(params))
        >>> params["w"]
        tensor([0.7500, 1.2500])

    Args:
        lr: learning rate, or a callable of the number of updates so far; usually 3 to 10 times less than for AdamW.
        b1: weight of the running mean in the direction of this step.
        b2: decay of the running mean.
        weight_decay: decoupled decay, times the learning rate.
        groups: see `adamw`; options `lr`, `b1`, `b2`, `weight_decay`.
        state_dtype: see `adamw`.

    Returns:
        an optimizer with state `LionState(step, mu)`.

    Raises:
        ValueError: an option out of range or unknown.
        TypeError: an option of the wrong type.
        ShardError: see `adamw`.

    Communication: none.
    """
    return _elementwise(_LION, {"lr": lr, "b1": b1, "b2": b2, "weight_decay": weight_decay}, groups, state_dtype)


def warmup_cosine(peak: float, warmup: int, total: int, floor: float = 0.0) -> Callable[[int], float]:
    """A learning rate that rises linearly over `warmup` steps and falls on a cosine to `floor` at step `total`.

        >>> import shardfn as sf
        >>> rate = sf.optim.warmup_cosine(1.0, warmup=4, total=12)
        >>> [round(rate(step), 3) for step in (0, 1, 3, 4, 8, 12, 99)]
        [0.25, 0.5, 1.0, 1.0, 0.5, 0.0, 0.0]

    Args:
        peak: the largest rate, reached at step `warmup - 1`; the first one is `peak / warmup`.
        warmup: steps that rise; 0 starts at the peak.
        total: the step from which on the rate is `floor`.
        floor: the last rate, not a fraction of the peak.

    Returns:
        a function of the number of updates so far, for `lr=` or `schedule`.

    Raises:
        ValueError: rates below 0, a floor above the peak, or a warm-up that is longer than the whole.
    """
    if not 0 <= floor <= peak < math.inf:
        raise ValueError(f"warmup_cosine: floor={floor!r} and peak={peak!r} must be 0 <= floor <= peak")
    if not 0 <= warmup <= total or total < 1:
        raise ValueError(
            f"warmup_cosine: warmup={warmup!r} and total={total!r} must be 0 <= warmup <= total, total >= 1"
        )

    def rate(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / warmup
        done = min((step - warmup) / max(total - warmup, 1), 1.0) if step < total else 1.0
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * done))

    return rate


# ---------------------------------------------------------------------------------------------------------------------
# Transforms and combinations


def _transform(init: Callable[[Tree], Any], update: Callable[[Tree, Any, Tree], tuple[Tree, Any]]) -> Optimizer:
    """An optimizer whose `step` adds what its `update` returns."""

    def step(params: Tree, grads: Tree, state: Any) -> tuple[Tree, Any]:
        with torch.no_grad():
            updates, state = update(grads, state, params)
            if updates:
                weights = [unwrap_local(params[name]) for name in updates]
                foreach("add_")(weights, [unwrap_local(update) for update in updates.values()])
        return params, state

    return Optimizer(init, update, step)


def _of_trainable(verb: str, params: Tree, grads: Tree) -> Tree:
    """The gradients of parameters that train, once they fit their parameters."""
    names = _trainable(params)
    _require_match(verb, "grads", params, names, grads)
    return _slot_like(params, {name: grads[name] for name in names})


def clip_by_global_norm(max_norm: float) -> Optimizer:
    """Scale gradients down so that their global norm is at most `max_norm`; goes before the optimizer in a `chain`.

        >>> import torch, shardfn as sf
        >>> opt = sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.sgd(1.0))
        >>> params = {"w": torch.zeros(2)}
        >>> params, state = opt.step(params, {"w": torch.tensor([3.0, 4.0])}, opt.init(params))
        >>> params["w"]
        tensor([-0.6000, -0.8000])

    The same as `clip`, which also returns the norm.

    Args:
        max_norm: the largest norm.

    Returns:
        a transform without state.

    Raises:
        ValueError: `max_norm` is not positive.

    Communication: that of one `global_norm` an update.
    """
    _require_positive("clip_by_global_norm", max_norm)

    def init(params: Tree) -> tuple[()]:
        _require_tensors("clip_by_global_norm.init", params)
        return ()

    def update(grads: Tree, state: tuple[()], params: Tree) -> tuple[Tree, tuple[()]]:
        return clip(_of_trainable("clip_by_global_norm", params, grads), max_norm)[0], state

    return _transform(init, update)


class ScheduleState(NamedTuple):
    """State of `schedule`: the number of updates."""

    step: Tensor


def schedule(fn: Callable[[int], float]) -> Optimizer:
    """Multiply updates by `fn(step)`; goes after the optimizer in a `chain`.

    To change only the learning rate, `adamw(lr=fn)` does the same and keeps the fused step.

        >>> import torch, shardfn as sf
        >>> opt = sf.optim.chain(sf.optim.sgd(1.0), sf.optim.schedule(lambda step: 0.5**step))
        >>> params, grads = {"w": torch.zeros(1)}, {"w": torch.ones(1)}
        >>> state = opt.init(params)
        >>> for _ in range(2):
        ...     params, state = opt.step(params, grads, state)
        >>> params["w"]
        tensor([-1.5000])

    Args:
        fn: the factor, given the number of updates so far: 0, 1, ...

    Returns:
        a transform with state `ScheduleState(step)`.

    Raises:
        TypeError: `fn` is not callable.
        ValueError: in `update`, the factor is negative or nan.

    Communication: none.
    """
    if not callable(fn):
        raise TypeError(f"schedule: expected a callable step -> float, got {fn!r}")

    def init(params: Tree) -> ScheduleState:
        _require_tensors("schedule.init", params)
        return ScheduleState(torch.zeros((), dtype=torch.int64))

    def update(grads: Tree, state: ScheduleState, params: Tree) -> tuple[Tree, ScheduleState]:
        given = _of_trainable("schedule", params, grads)
        factor = _rate("schedule", "fn", fn, state.step)
        local, wrap = _views(given, params, names=list(given))
        scaled = {name: wrap(params[name], factor * local(leaf)) for name, leaf in given.items()}
        return _slot_like(params, scaled), ScheduleState(state.step + 1)

    return _transform(init, update)


def chain(*optimizers: Optimizer) -> Optimizer:
    """One after another: each takes the updates of the one before it for gradients.

    `step` uses the fused step of the last one. A member that leaves a leaf out (`masked`) passes it on unchanged, but
    the last one decides what is updated.

        >>> import torch, shardfn as sf
        >>> opt = sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.adamw(1e-3))
        >>> len(opt.init({"w": torch.ones(2)}))
        2

    Args:
        optimizers: transforms and, usually last, an optimizer.

    Returns:
        an optimizer whose state is the tuple of its members' states.

    Raises:
        ValueError: there is no member.
        TypeError: a member is no optimizer; a state of another chain.

    Communication: that of its members.
    """
    if not optimizers:
        raise ValueError("chain: name at least one optimizer")
    for member in optimizers:
        if not isinstance(member, Optimizer):
            raise TypeError(f"chain: {member!r} is not an Optimizer; wrap a torch class in from_torch(cls, ...)")

    def prepared(grads: Tree, state: Any, params: Tree) -> tuple[Tree, list[Any]]:
        """What the last member gets, and the states of those before it."""
        if not isinstance(state, tuple) or len(state) != len(optimizers):
            raise TypeError(
                f"chain: expected a tuple of {len(optimizers)} states, the one that chain(...).init returns"
            )
        states: list[Any] = []
        for member, own in zip(optimizers[:-1], state[:-1], strict=True):
            updates, after = member.update(grads, own, params)
            grads = updates if len(updates) == len(grads) else _like(grads, {**grads, **updates})
            states.append(after)
        return grads, states

    def init(params: Tree) -> tuple[Any, ...]:
        return tuple(member.init(params) for member in optimizers)

    def update(grads: Tree, state: Any, params: Tree) -> tuple[Tree, tuple[Any, ...]]:
        grads, states = prepared(grads, state, params)
        updates, last = optimizers[-1].update(grads, state[-1], params)
        return updates, (*states, last)

    def step(params: Tree, grads: Tree, state: Any) -> tuple[Tree, tuple[Any, ...]]:
        with torch.no_grad():
            grads, states = prepared(grads, state, params)
        params, last = optimizers[-1].step(params, grads, state[-1])
        return params, (*states, last)

    return Optimizer(init, update, step)


def masked(optimizer: Optimizer, mask: str | Sequence[str] | Mapping[str, bool]) -> Optimizer:
    """An optimizer for some of the parameters; it leaves the others alone.

    Two optimizers for two sets of parameters are two `masked` ones, whose steps are called one after the other with the
    same gradients.

        >>> import torch, shardfn as sf
        >>> opt = sf.optim.masked(sf.optim.sgd(1.0), "**.bias")
        >>> params = {"up.weight": torch.ones(1), "up.bias": torch.ones(1)}
        >>> params, state = opt.step(params, {name: torch.ones(1) for name in params}, opt.init(params))
        >>> params
        {'up.weight': tensor([1.]), 'up.bias': tensor([0.])}

    Args:
        optimizer: what updates the chosen parameters.
        mask: a pattern of parameter names or several, or a mapping of every parameter's name to whether it is chosen.

    Returns:
        an optimizer with the state of `optimizer`.

    Raises:
        TypeError: a mask of another kind.
        ShardError: in `init`, a pattern that matches nothing, or a mapping with other names than the parameters'.

    Communication: that of `optimizer`.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"masked: {optimizer!r} is not an Optimizer")
    if not isinstance(mask, str | Mapping | Sequence):
        raise TypeError(f"masked: the mask is a {type(mask).__name__}; expected patterns, or a mapping of name -> bool")
    chosen = mask if isinstance(mask, Mapping) else ((mask,) if isinstance(mask, str) else tuple(mask))

    def part(params: Tree, tree: Tree) -> Tree:
        picked = [name for name in params if _is_chosen(chosen, _model_names(params, name))]
        return _like(tree, {name: tree[name] for name in picked if name in tree})

    def init(params: Tree) -> Any:
        _require_tensors("masked.init", params)
        _require_live_mask(chosen, params)
        return optimizer.init(part(params, params))

    def update(grads: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        return optimizer.update(part(params, _require_tree("masked", "grads", grads)), state, part(params, params))

    def step(params: Tree, grads: Tree, state: Any) -> tuple[Tree, Any]:
        _, after = optimizer.step(part(params, params), part(params, _require_tree("masked", "grads", grads)), state)
        return params, after

    return Optimizer(init, update, step)


def _is_chosen(chosen: Mapping[str, bool] | tuple[str, ...], names: tuple[str, ...]) -> bool:
    if isinstance(chosen, Mapping):
        return any(chosen.get(name, False) for name in names)
    return _pattern_of(chosen, names) is not None


def _require_live_mask(chosen: Mapping[str, bool] | tuple[str, ...], params: Tree) -> None:
    groups = [_model_names(params, name) for name in params]
    names = [name for group in groups for name in group]
    if isinstance(chosen, Mapping):
        problems = [f"the mask has no entry for {g[0]!r}" for g in groups if not any(name in chosen for name in g)]
        problems += [
            f"the mask has {n!r}, which is no parameter{did_you_mean(n, names)}" for n in chosen if n not in names
        ]
    else:
        dead = [pattern for pattern in chosen if not any(matches(pattern, name) for name in names)]
        problems = [f"{pattern!r} matches no parameter{did_you_mean(pattern, names)}" for pattern in dead]
    raise_problems("masked", problems)


# ---------------------------------------------------------------------------------------------------------------------
# torch's own optimizers

# What they do to an element does not depend on other elements, so that a shard can be updated alone.
_TORCH_ELEMENTWISE = (
    optim.Adam,
    optim.AdamW,
    optim.SGD,
    optim.RMSprop,
    optim.Adagrad,
    optim.Adadelta,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.ASGD,
    optim.Rprop,
)
_TORCH_REFUSED = {
    optim.LBFGS: "it needs a closure and one vector of all parameters; use sf.value_and_grad and a solver of your own",
    optim.SparseAdam: "it takes sparse gradients only, and gradients of shards are dense; use torch.optim.Adam",
}


class TorchState(NamedTuple):
    """State of `from_torch`: the number of updates, torch's tensors per parameter by their torch names (`exp_avg`), and
    its numbers that are the same for all parameters (`step`)."""

    step: Tensor
    slots: dict[str, Tree]
    scalars: dict[str, Tensor]


def from_torch(cls: type[optim.Optimizer], **kwargs: Any) -> Optimizer:
    """An optimizer class of torch as an `Optimizer`.

    torch's elementwise classes (Adam, AdamW, SGD, RMSprop, Adagrad, Adadelta, NAdam, RAdam, Adamax, ASGD, Rprop) run on
    local shards. Others see whole `DTensor`s, and work as far as torch supports that; `init` tries.

        >>> import torch, shardfn as sf
        >>> opt = sf.optim.from_torch(torch.optim.Adam, lr=0.5)
        >>> params = {"w": torch.ones(2)}
        >>> params, state = opt.step(params, {"w": torch.ones(2)}, opt.init(params))
        >>> params["w"], sorted(state.slots), state.scalars
        (tensor([0.5000, 0.5000]), ['exp_avg', 'exp_avg_sq'], {'step': tensor(1.)})

    Args:
        cls: a class like those in `torch.optim`.
        kwargs: its options; `lr` may be a callable of the number of updates so far.

    Returns:
        an optimizer with state `TorchState(step, slots, scalars)`. Its `update` is pure, but not differentiable.

    Raises:
        TypeError: not an optimizer class, or an option it does not have.
        ValueError: an option out of range.
        ShardError: a class that cannot work on shards, with the reason; in `init`, parameters that torch cannot update.

    Communication: none for elementwise classes; what DTensor needs for others.
    """
    if not (isinstance(cls, type) and issubclass(cls, optim.Optimizer)):
        raise TypeError(f"from_torch: expected a class of torch.optim, for example torch.optim.Adam, got {cls!r}")
    for refused, why in _TORCH_REFUSED.items():
        if issubclass(cls, refused):
            raise ShardError(f"from_torch: {cls.__name__} cannot run on shards: {why}")
    known = [name for name in inspect.signature(cls).parameters if name != "params"]
    for name in kwargs:
        if name not in known:
            raise TypeError(
                f"from_torch: {cls.__name__} has no option {name!r}{did_you_mean(name, known) or '.'} "
                f"There are {', '.join(known)}."
            )
    if kwargs.get("differentiable"):
        raise ValueError(
            "from_torch: differentiable=True is not available; sf.optim.adamw and sgd have a differentiable update"
        )
    made = _FromTorch(cls, dict(kwargs))
    made.make([torch.zeros(1, 1)], torch.zeros((), dtype=torch.int64))  # torch checks its options
    return Optimizer(made.init, made.update, made.step)


@dataclass(frozen=True)
class _FromTorch:
    """Runs a torch optimizer that lives for one call: everything it remembers is in `TorchState`.

    Before the first update torch makes its own state, so the one of `init` only shows what there will be.
    """

    cls: type[optim.Optimizer]
    kwargs: dict[str, Any]
    templates: dict[Any, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def elementwise(self) -> bool:
        return self.cls in _TORCH_ELEMENTWISE

    def make(self, weights: Sequence[Tensor], step: Tensor) -> optim.Optimizer:
        kwargs: dict[str, Any] = dict(self.kwargs)
        if callable(kwargs.get("lr")):
            kwargs["lr"] = _rate(f"from_torch({self.cls.__name__})", "lr", kwargs["lr"], step)
        return self.cls(weights, **kwargs)

    def init(self, params: Tree) -> TorchState:
        _require_tensors("from_torch.init", params)
        _require_some("from_torch.init", params)
        step = torch.zeros((), dtype=torch.int64)
        found: dict[str, dict[str, Tensor]] = {}
        scalars: dict[str, Tensor] = {}
        for name in _trainable(params):
            for key, value in self._template(params, name).items():
                if self.elementwise and not value.ndim:
                    scalars[key] = torch.zeros_like(value)
                else:
                    leaf = params[name] if self.elementwise else value
                    zeros = with_local(leaf, torch.zeros_like(unwrap_local(leaf), dtype=value.dtype))
                    found.setdefault(key, {})[name] = zeros
        return TorchState(step, {key: self._slot(params, leaves) for key, leaves in found.items()}, scalars)

    def _slot(self, params: Tree, leaves: dict[str, Tensor]) -> Tree:
        return _slot_like(params, leaves) if self.elementwise else leaves

    def _template(self, params: Tree, name: str) -> dict[str, Tensor]:
        """What torch remembers about a leaf, from one update of zeros: small ones where the shape does not matter."""
        local = unwrap_local(params[name])
        if self.elementwise:
            key = (local.dtype, local.device)
            if key not in self.templates:
                self.templates[key] = self._tried(torch.zeros(2, 3, dtype=local.dtype, device=local.device))
            return self.templates[key]
        layout = params.plan.leaves[name][0] if isinstance(params, Params) and name in params.plan.leaves else None
        if layout is not None and not layout.plain:
            raise ShardError(
                f"from_torch: {self.cls.__name__} looks at whole matrices; '{layout.name}' is stored in parts by "
                f"its rule '{layout.rule}'. Leave it to another optimizer by masked(...), or write a plain rule."
            )
        try:
            return self._tried(torch.zeros_like(params[name]).detach())
        except (RuntimeError, ValueError, NotImplementedError) as error:
            raise ShardError(
                f"from_torch: torch's {self.cls.__name__} cannot update '{name}', {_kind(params[name])} of shape "
                f"{tuple(params[name].shape)}: {str(error).partition(chr(10))[0]} Choose what it can with masked(...)."
            ) from error

    def _tried(self, weight: Tensor) -> dict[str, Tensor]:
        optimizer = self.make([weight], torch.zeros((), dtype=torch.int64))
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        return {key: value for key, value in optimizer.state[weight].items() if isinstance(value, Tensor)}

    def update(self, grads: Tree, state: TorchState, params: Tree) -> tuple[Tree, TorchState]:
        names = self._checked("from_torch.update", params, grads, state)
        if torch.is_grad_enabled() and any(grads[name].requires_grad for name in names):
            raise ShardError(
                "from_torch.update is not differentiable; detach the gradients, or use sf.optim.adamw or sgd"
            )
        with torch.no_grad():
            weights = {name: self._view(params[name]).clone() for name in names}
            after = self._advance(params, grads, state, weights, pure=True)
            new = {name: weights[name] - self._view(params[name]) for name in names}
            updates = {name: with_local(params[name], unwrap_local(leaf)) for name, leaf in new.items()}
        return _slot_like(params, updates), after

    def step(self, params: Tree, grads: Tree, state: TorchState) -> tuple[Tree, TorchState]:
        names = self._checked("from_torch.step", params, grads, state)
        with torch.no_grad():
            weights = {name: self._view(params[name]) for name in names}
            return params, self._advance(params, grads, state, weights, pure=False)

    def _view(self, leaf: Tensor) -> Tensor:
        """The same memory without autograd: torch writes into it, and hangs a gradient on it."""
        return (unwrap_local(leaf) if self.elementwise else leaf).detach()

    def _checked(self, verb: str, params: Tree, grads: Tree, state: Any) -> list[str]:
        names = _trainable(params)
        _require_match(verb, "grads", params, names, grads)
        if not isinstance(state, TorchState):
            raise TypeError(
                f"{verb}: the state is a {type(state).__name__}, not what from_torch(...).init(params) returns"
            )
        for key, tree in state.slots.items() if self.elementwise else ():
            _require_match(verb, f"state.slots[{key!r}]", params, names, tree)
        return names

    def _advance(
        self, params: Tree, grads: Tree, state: TorchState, weights: dict[str, Tensor], *, pure: bool
    ) -> TorchState:
        """One step of torch's optimizer on `weights`, in place; `pure` copies the state first."""
        if not weights:
            return state._replace(step=state.step + 1)
        optimizer = self.make(list(weights.values()), state.step)
        started = int(state.step) > 0
        for name, weight in weights.items():
            weight.grad = self._view(grads[name]).to(weight.dtype).contiguous()
            if started:
                slots = {key: self._view(tree[name]) for key, tree in state.slots.items() if name in tree}
                own = {key: value.clone() for key, value in slots.items()} if pure else slots
                optimizer.state[weight] = {**own, **{key: value.clone() for key, value in state.scalars.items()}}
        optimizer.step()
        found: dict[str, dict[str, Tensor]] = {key: {} for key in state.slots}
        scalars = dict(state.scalars)
        for name, weight in weights.items():
            for key, value in optimizer.state[weight].items():
                if key in scalars:
                    scalars[key] = value
                elif isinstance(value, Tensor):
                    found[key][name] = with_local(params[name], value) if self.elementwise else value
            weight.grad = None
        return TorchState(state.step + 1, {key: self._slot(params, leaves) for key, leaves in found.items()}, scalars)
