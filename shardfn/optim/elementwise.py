"""AdamW, SGD and Lion: a rule each, and what puts it on trees with groups, dtypes and checks."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.sgd import sgd as torch_sgd

from shardfn._torch import foreach, fused, has_no_memory, unwrap_local, unwrap_locals, with_local
from shardfn.comm import map_runs, merged, portions
from shardfn.layout import matches
from shardfn.notation import raise_problems
from shardfn.optim import base
from shardfn.optim.base import Groups, Optimizer, Options, Rate, Tree

_Members = list[tuple[Options, list[str]]]  # (options, names of leaves) of groups
_CHUNK = 2**24  # elements that are widened at a time
LeafUpdate: TypeAlias = Callable[..., tuple[Tensor, tuple[Tensor, ...]]]  # (grad, param, *slots) -> (update, new slots)
Tensors: TypeAlias = list[Tensor]
_dtype_of: Callable[[Tensor], torch.dtype] = attrgetter("dtype")
FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "mtia")  # on which torch has kernels for a whole update


@dataclass(frozen=True)
class UpdateRule:
    """One algorithm on the leaves of one group; trees, groups, dtypes and checks are `_Elementwise`'s.

    `update(step, **options)` returns the update of a leaf, where `step` counts from 1.
    `step(options, step, params, grads, slots)` works in place on lists of contiguous tensors of equal dtype and device,
    and `step` counts from 0; `least` is the dtype, by device type, that is wide enough for this.
    """

    name: str
    state: Any  # a NamedTuple class: the step counter, then one tree a slot
    update: Callable[..., LeafUpdate]
    step: Callable[[Options, Tensor, Tensors, Tensors, list[Tensors]], None]
    least: Mapping[str, torch.dtype] = field(default_factory=dict)

    def slots(self, options: Options) -> list[str]:
        """The trees of a state that are used: those whose option, if there is one of that name, is not 0."""
        return [slot for slot in self.state._fields[1:] if options.get(slot, True)]


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


def _adamw_update(step: Tensor, lr: Any, b1: float, b2: float, eps: float, weight_decay: float) -> LeafUpdate:
    size = lr / (1 - b1**step)
    root = (1 - b2**step).sqrt()

    def leaf(grad: Tensor, param: Tensor, mu: Tensor, nu: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        mu = mu + (1 - b1) * (grad - mu)
        nu = b2 * nu + (1 - b2) * grad * grad
        # The derivative of sqrt at 0 is infinite, and a second derivative through it would be nan.
        used = nu > 0
        norm = torch.where(used, nu, 1.0).sqrt() * used
        return -lr * weight_decay * param - size * mu / (norm / root + eps), (mu, nu)

    return leaf


def _adamw_step(options: Options, step: Tensor, params: Tensors, grads: Tensors, slots: list[Tensors]) -> None:
    mu, nu = slots
    device, lr, betas = params[0].device, options["lr"], {"beta1": options["b1"], "beta2": options["b2"]}
    common: dict[str, Any] = {"weight_decay": options["weight_decay"], "eps": options["eps"], "maximize": False}
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        lr = lr.to(device)
    steps = [(step + 1).to(device, torch.float32)] * len(params)
    fused("adamw")(params, grads, mu, nu, [], steps, amsgrad=False, lr=lr, **betas, **common)


def _sgd_update(step: Tensor, lr: Any, momentum: float, nesterov: bool, weight_decay: float) -> LeafUpdate:
    def leaf(grad: Tensor, param: Tensor, *slots: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        grad = grad + weight_decay * param if weight_decay else grad
        if not momentum:
            return -lr * grad, ()
        total = momentum * slots[0] + grad
        return -lr * (grad + momentum * total if nesterov else total), (total,)

    return leaf


def _sgd_step(options: Options, step: Tensor, params: Tensors, grads: Tensors, slots: list[Tensors]) -> None:
    buffers: list[Tensor | None] = [*slots[0]] if slots else [None] * len(params)
    torch_sgd(params, grads, buffers, fused=True, dampening=0.0, maximize=False, **options)


def _lion_update(step: Tensor, lr: Any, b1: float, b2: float, weight_decay: float) -> LeafUpdate:
    def leaf(grad: Tensor, param: Tensor, mu: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        direction = torch.sign(b1 * mu + (1 - b1) * grad)
        return -lr * (direction + weight_decay * param), (b2 * mu + (1 - b2) * grad,)

    return leaf


def _lion_step(options: Options, step: Tensor, params: Tensors, grads: Tensors, slots: list[Tensors]) -> None:
    lr, b1, b2, decay = (options[key] for key in ("lr", "b1", "b2", "weight_decay"))
    (mu,) = slots
    direction = foreach("mul")(mu, b1)
    foreach("add_")(direction, grads, alpha=1 - b1)
    foreach("sign_")(direction)
    foreach("mul_")(params, 1 - lr * decay)
    foreach("add_")(params, direction, alpha=-lr)
    foreach("mul_")(mu, b2)
    foreach("add_")(mu, grads, alpha=1 - b2)


ADAMW = UpdateRule("adamw", AdamState, _adamw_update, _adamw_step)
# torch's fused SGD does not update halves on CPU: https://github.com/pytorch/pytorch/issues/191763, still in 2.13.
SGD = UpdateRule("sgd", SGDState, _sgd_update, _sgd_step, least={"cpu": torch.float32})
# foreach would round halves between operations, and a sign turns rounding into a whole step.
LION = UpdateRule("lion", LionState, _lion_update, _lion_step, least=dict.fromkeys(FUSED_DEVICES, torch.float32))


@dataclass(frozen=True)
class _Elementwise:
    """A rule with its options, on trees."""

    rule: UpdateRule
    options: Options
    groups: Groups
    state_dtype: torch.dtype | None

    def init(self, params: Tree) -> Any:
        verb = f"{self.rule.name}.init"
        base.require_some(verb, params)
        names = [model_name for name in params for model_name in base.model_names(params, name)]
        known = f"There are {', '.join(names[:3])}{', ...' if len(names) > 3 else '.'}"
        dead = [f"groups: {problem} {known}" for problem in base.dead_patterns(self.groups, params)]
        raise_problems(verb, dead, entry="optimizers")
        for name in base.trainable(params):
            if params[name].is_complex():
                raise TypeError(f"{verb}: params[{name!r}] is complex, for which it has no rule; use from_torch")
        members = self._members(params)
        slots, zeros_like = list[Tree](), partial(torch.zeros_like, dtype=self.state_dtype)
        for slot in self.rule.state._fields[1:]:
            chosen = {name for options, some in members if slot in self.rule.slots(options) for name in some}
            names = [name for name in params if name in chosen]
            leaves = [params[name] for name in names]
            zeros = map_runs(lambda run: list(map(zeros_like, run)), unwrap_locals(leaves))  # `step` merges these too
            slots.append(base.slot_like(params, dict(zip(names, map(with_local, leaves, zeros), strict=True))))
        return self.rule.state(torch.zeros((), dtype=torch.int64), *slots)

    def _members(self, params: Tree) -> _Members:
        """(options, names of trainable leaves) of every group that has some."""
        if not self.groups:
            names = base.trainable(params)
            return [(self.options, names)] if names else []
        patterns = tuple(self.groups)
        members: dict[str | None, list[str]] = {}
        for name in base.trainable(params):
            members.setdefault(base.pattern_of(patterns, base.model_names(params, name)), []).append(name)
        return [({**self.options, **self.groups.get(pattern or "", {})}, names) for pattern, names in members.items()]

    def _checked(self, verb: str, params: Tree, grads: Tree, state: Any) -> _Members:
        """The members with this step's learning rates, once everything fits together."""
        if not isinstance(state, self.rule.state):
            raise base.other_state(verb, state, f"{self.rule.name}.init(params)")
        members = self._members(params)
        base.require_match(verb, "grads", params, [name for _, names in members for name in names], grads)
        for slot in state._fields[1:]:
            names = [name for options, names in members if slot in self.rule.slots(options) for name in names]
            base.require_match(verb, f"state.{slot}", params, names, getattr(state, slot))
        return [({**group, "lr": base.rate_at(verb, "lr", group["lr"], state.step)}, names) for group, names in members]

    def update(self, grads: Tree, state: Any, params: Tree, checked: _Members | None = None) -> tuple[Tree, Any]:
        """Leaf by leaf; `checked`: what `_checked` has returned already."""
        members = checked if checked is not None else self._checked(f"{self.rule.name}.update", params, grads, state)
        old = {slot: getattr(state, slot) for slot in state._fields[1:]}
        local, wrap = base.views(params, grads, *old.values(), names=[name for _, names in members for name in names])
        step = state.step + 1
        updates: dict[str, Tensor] = {}
        new = {slot: dict(tree) for slot, tree in old.items()}
        for options, names in members:
            rule = self.rule.update(step.double(), **options)
            slots = self.rule.slots(options)
            for name in names:
                param, values = local(params[name]), [local(old[slot][name]) for slot in slots]
                wide = reduce(torch.promote_types, map(_dtype_of, (param, *values)), torch.float32)
                result, states = rule(*(x.to(wide) for x in (local(grads[name]), param, *values)))
                updates[name] = wrap(params[name], result)
                for slot, before, value in zip(slots, values, states, strict=True):
                    new[slot][name] = wrap(params[name], value.to(before.dtype))
        ordered = {name: updates[name] for name in params if name in updates}
        after = (base.slot_like(params, tree) for tree in new.values())
        return base.slot_like(params, ordered), self.rule.state(step, *after)

    def step(self, params: Tree, grads: Tree, state: Any) -> tuple[Tree, Any]:
        members = self._checked(f"{self.rule.name}.step", params, grads, state)
        base.require_outside(f"{self.rule.name}.step", params, grads)
        with torch.no_grad():
            if has_no_memory():  # leaf by leaf, in operations that a compiler may fuse
                updates, after = self.update(grads, state, params, members)
                for name, update in updates.items():
                    unwrap_local(params[name]).add_(unwrap_local(update))
                for before, tree in zip(state[1:], after[1:], strict=True):
                    for name, slot in tree.items():
                        unwrap_local(before[name]).copy_(unwrap_local(slot))
            for options, names in members if not has_no_memory() else ():
                slots = [getattr(state, slot) for slot in self.rule.slots(options)]
                columns = [unwrap_locals(base.leaves_of(tree, names)) for tree in (params, grads, *slots)]
                for same in in_one_dtype(merged(columns), self.rule.least):
                    self.rule.step(options, state.step, same[0], same[1], same[2:])
                increment_version(chain.from_iterable((columns[0], *columns[2:])))
            state.step.add_(1)  # as what it counts: a state that is used again goes on
        return params, state


def in_one_dtype(columns: list[list[Tensor]], least: Mapping[str, torch.dtype]) -> Iterator[list[list[Tensor]]]:
    """Rows (param, grad, *slots) for in-place work, as columns of one dtype and device at a time.

    What has to be widened for that, or is not contiguous (torch's kernels on CPU walk memory and take no notice of
    strides, 2.13), is copied, a bounded number of elements at a time, and written back afterwards.
    """
    groups: dict[tuple[Any, ...], list[Sequence[Tensor]]] = {}
    for row in zip(*columns, strict=True):
        if row[0].numel():
            dense = all(map(Tensor.is_contiguous, (row[0], *row[2:])))
            groups.setdefault((dense, row[0].device, *map(_dtype_of, row)), []).append(row)
    for (dense, device, of_param, _, *of_slots), rows in groups.items():
        wide = reduce(torch.promote_types, (of_param, *of_slots), least.get(device.type, of_param))
        if dense and {of_param, *of_slots} == {wide}:
            params, grads, *slots = _transposed(rows)
            yield [params, [grad.to(wide).contiguous() for grad in grads], *slots]
            continue
        for some in portions(chain.from_iterable(map(_pieces, rows)), lambda row: row[0].numel(), _CHUNK):
            widened = [[x.to(wide).contiguous() for x in row] for row in some]
            yield _transposed(widened)
            for before, after in zip(some, widened, strict=True):
                for target, result in zip((before[0], *before[2:]), (after[0], *after[2:]), strict=True):
                    target.copy_(result)


def _transposed(rows: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    return [list(column) for column in zip(*rows, strict=True)]


def _pieces(row: Sequence[Tensor]) -> Iterable[Sequence[Tensor]]:
    """Rows of at most `_CHUNK` elements over the same memory, where it lies in one piece."""
    return _transposed([x.view(-1).split(_CHUNK) for x in row]) if all(x.is_contiguous() for x in row) else [row]


def _elementwise(rule: UpdateRule, groups: Groups | None, state_dtype: torch.dtype | None, **options: Any) -> Optimizer:
    """The optimizer of a rule, after its options are checked."""
    if state_dtype is not None and not (isinstance(state_dtype, torch.dtype) and state_dtype.is_floating_point):
        raise TypeError(f"{rule.name}(state_dtype={state_dtype!r}): a floating torch.dtype, or None")
    if groups is not None and not isinstance(groups, Mapping):
        raise TypeError(f"{rule.name}(groups=...) takes a mapping of pattern -> options, not {type(groups).__name__}")
    base.require_options(rule.name, options, options)
    for pattern, group in (groups or {}).items():
        where = f"{rule.name}: groups[{pattern!r}]"
        if not isinstance(group, Mapping):
            raise TypeError(f"{where} is {group!r}; write the options that differ, for example {{'weight_decay': 0.0}}")
        matches(pattern, "")  # a pattern that cannot be read is an error here
        base.require_options(where, group, options)
    functions = _Elementwise(rule, options, dict(groups or {}), state_dtype)
    rate = partial(base.rate_at, rule.name, "lr", options["lr"])
    return Optimizer(functions.init, functions.update, functions.step, lambda state: rate(state.step))


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
        an optimizer with state `AdamState(step, mu, nu)`, trees with the parameters' layouts, which reshard, gather and
        save like parameters.

    Raises:
        ValueError: an option out of range or unknown.
        TypeError: an option of the wrong type.
        ShardError: in `init`, a group that matches nothing; in `update` and `step`, trees that do not go together.

    Communication: none.
    """
    return _elementwise(ADAMW, groups, state_dtype, lr=lr, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)


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
    return _elementwise(SGD, groups, state_dtype, **options)


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
    return _elementwise(LION, groups, state_dtype, lr=lr, b1=b1, b2=b2, weight_decay=weight_decay)
