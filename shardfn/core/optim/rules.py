"""One algorithm each, leaf by leaf: AdamW, SGD, Lion, and the state that they keep. Layer 4.

Trees, groups, dtypes and checks are in `elementwise`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw
from torch.optim.sgd import sgd as torch_sgd

from shardfn._torch import foreach, fused
from shardfn.core.optim.base import Options
from shardfn.core.optim.trees import Tree

LeafUpdate: TypeAlias = Callable[..., tuple[Tensor, tuple[Tensor, ...]]]  # (grad, param, *slots) -> (update, new slots)
Tensors: TypeAlias = list[Tensor]
FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "mtia")


@dataclass(frozen=True)
class Rule:
    """One algorithm on the leaves of one group; trees, groups, dtypes and checks are `_Elementwise`'s.

    `update(options, step)` returns the update of a leaf, where `step` counts from 1.
    `step(options, step, params, grads, slots)` works in place on lists of equal dtype and device, `step` counts from 0;
    `least` is the dtype, by device type, that is wide enough for this.
    """

    name: str
    state: Any  # a NamedTuple class: the step counter, then one tree a slot
    slots: Callable[[Options], tuple[str, ...]]
    update: Callable[[Options, Tensor], LeafUpdate]
    step: Callable[[Options, Tensor, Tensors, Tensors, list[Tensors]], None]
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


def _adamw_update(options: Options, step: Tensor) -> LeafUpdate:
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


def _adamw_step(options: Options, step: Tensor, params: Tensors, grads: Tensors, slots: list[Tensors]) -> None:
    mu, nu = slots
    device, lr, betas = params[0].device, options["lr"], {"beta1": options["b1"], "beta2": options["b2"]}
    common: dict[str, Any] = {"weight_decay": options["weight_decay"], "eps": options["eps"], "maximize": False}
    if not _is_fusable(params, slots):
        steps = list(step.to("cpu", torch.float32).repeat(len(params)).unbind(0))  # torch counts for each parameter
        torch_adamw(params, grads, mu, nu, [], steps, foreach=True, amsgrad=False, lr=lr, **betas, **common)
        return
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        lr = lr.to(device)
    steps = [(step + 1).to(device, torch.float32)] * len(params)
    dense = [grad.contiguous() for grad in grads]
    fused("adamw")(params, dense, mu, nu, [], steps, amsgrad=False, lr=lr, **betas, **common)


def _is_fusable(params: Sequence[Tensor], slots: Sequence[Sequence[Tensor]]) -> bool:
    """Whether torch's fused kernels can run: on CPU they walk memory and take no notice of strides (torch 2.13)."""
    dense = all(all(map(Tensor.is_contiguous, tensors)) for tensors in (params, *slots))
    return dense and params[0].device.type in FUSED_DEVICES


def _sgd_update(options: Options, step: Tensor) -> LeafUpdate:
    lr, factor, decay, nesterov = (options[key] for key in ("lr", "momentum", "weight_decay", "nesterov"))

    def leaf(grad: Tensor, param: Tensor, *slots: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        grad = grad + decay * param if decay else grad
        if not factor:
            return -lr * grad, ()
        momentum = factor * slots[0] + grad
        return -lr * (grad + factor * momentum if nesterov else momentum), (momentum,)

    return leaf


def _sgd_step(options: Options, step: Tensor, params: Tensors, grads: Tensors, slots: list[Tensors]) -> None:
    fused = _is_fusable(params, slots)
    buffers: list[Tensor | None] = [*slots[0]] if slots else [None] * len(params)
    torch_sgd(
        params,
        [grad.contiguous() for grad in grads] if fused else grads,
        buffers,
        fused=fused,
        foreach=not fused,
        dampening=0.0,
        maximize=False,
        **options,
    )


def _lion_update(options: Options, step: Tensor) -> LeafUpdate:
    lr, b1, b2, decay = (options[key] for key in ("lr", "b1", "b2", "weight_decay"))

    def leaf(grad: Tensor, param: Tensor, mu: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        direction = torch.sign(b1 * mu + (1 - b1) * grad)
        return -lr * (direction + decay * param), (b2 * mu + (1 - b2) * grad,)

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


ADAMW = Rule("adamw", AdamState, lambda _: ("mu", "nu"), _adamw_update, _adamw_step)
SGD = Rule(
    "sgd",
    SGDState,
    lambda options: ("momentum",) * bool(options["momentum"]),
    _sgd_update,
    _sgd_step,
    # torch's fused SGD does not update halves on CPU: https://github.com/pytorch/pytorch/issues/191763, still in 2.13.
    least={"cpu": torch.float32},
)
# foreach would round halves between operations, and a sign turns rounding into a whole step.
LION = Rule(
    "lion", LionState, lambda _: ("mu",), _lion_update, _lion_step, least=dict.fromkeys(FUSED_DEVICES, torch.float32)
)
