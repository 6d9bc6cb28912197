"""The loss of a step: scaled, a mean over microbatches, finite or not."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.comm import exchange_numbers, sum_flat_
from shardfn.notation import ShardError
from shardfn.params import Mean, Params, map_local


def scaling(loss_fn: Callable[..., Any], scaler: torch.amp.GradScaler | None, of_rank: list[Any]) -> Callable[..., Any]:
    """The loss function, times the scale; what it gives goes into `of_rank`."""
    scale = None if scaler is None else scaler.get_scale()

    def scaled(params: Params, *batch: Any) -> Any:
        loss = loss_fn(params, *batch)
        total = loss.total if isinstance(loss, Mean) else loss
        of_rank.append(total)
        if scale is None:
            return loss
        wide = total.to(torch.promote_types(total.dtype, torch.float32)) * scale
        return Mean(wide, loss.count) if isinstance(loss, Mean) else wide

    return scaled


def weight(count: Tensor | None) -> Tensor:
    """Of a microbatch, in the mean over all.

    Raises:
        ShardError: the count has a derivative, so that the gradient of the quotient is no mean of gradients.
    """
    if count is not None and count.requires_grad:
        why = "Trainer.step: loss_fn returns sf.data.Mean(total, count) with a count that depends on the parameters"
        raise ShardError(f"{why}. Use accumulate=1, or count.detach() to leave its derivative out")
    return torch.ones((), dtype=torch.float64) if count is None else count


def advance(scaler: torch.amp.GradScaler, norm: Tensor) -> bool:
    """Whether the gradients of a step are finite on all ranks, as their global norm says; choose the next scale."""
    finite, state = bool(norm.isfinite()), scaler.state_dict()
    good = state["_growth_tracker"] + 1 if finite else 0
    grows = good == state["growth_interval"]
    factor = state["growth_factor"] if grows else 1.0 if finite else state["backoff_factor"]
    scaler.load_state_dict(state | {"scale": state["scale"] * factor, "_growth_tracker": 0 if grows else good})
    return finite


def scaled(loss: Tensor, grads: Params, factor: Tensor) -> tuple[Tensor, Params]:
    return loss * factor.to(loss.dtype), map_local(lambda g: g * factor.to(g.dtype), grads)


def is_finite(loss: Tensor, norm: Tensor, params: Params) -> bool:
    """Whether the loss and the gradients of a step are, on all ranks.

    Communication: one all-reduce of a number over each compute axis; over data axes both are reduced already.
    """
    bad = (~(loss.detach().isfinite() & norm.isfinite())).to(torch.float32)
    for axis in params.plan.roles.compute:
        sum_flat_(bad, params.mesh.get_group(axis))
    return not bad


def not_finite(mesh: DeviceMesh, step: int, losses: Sequence[Any]) -> ShardError:
    """The error of a step whose loss or gradients are not finite.

    Communication: one small all-gather over the mesh.
    """
    bad = not all(bool(x.detach().isfinite().all()) for x in losses if isinstance(x, Tensor))
    flags = [flag for (flag,) in exchange_numbers(mesh, [bad])]
    ranks = [rank for rank, flag in zip(mesh.mesh.flatten().tolist(), flags, strict=True) if flag]
    what = f"the loss is not finite on ranks {ranks}" if ranks else "gradients are not finite, though the loss is"
    return ShardError(
        f"Trainer.step: in step {step} {what}. Nothing was updated. Trainer(nonfinite='skip') leaves such a step out "
        "on all ranks, nonfinite=None goes on with what it makes"
    )
