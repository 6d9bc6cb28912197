"""What a `Trainer` is told: refused where it means nothing, or changed too late; joined where two say the same."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardfn import optim
from shardfn.layout import Plan, Policy
from shardfn.notation import ShardError, see
from shardfn.params import Params


def compiling(policy: Policy | Plan | None, compile: bool | Mapping[str, Any]) -> Policy | Plan:
    """The policy, with the wish to compile in it."""
    if not compile:
        return policy if policy is not None else Policy()
    if isinstance(policy, Plan):
        raise ValueError("Trainer(compile=...): the plan has decided that; make it with Policy(compile=...)")
    return (policy or Policy()) | Policy(compile=compile)


def check_settings(model: Any, optimizer: Any, accumulate: Any, clip: Any, ema: Any, scaler: Any) -> None:
    """Refuse settings that mean nothing.

    Raises:
        TypeError, ValueError: one is of another kind, or out of range.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"Trainer: expected an nn.Module, got {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, optim.Optimizer):
        kind = optimizer if isinstance(optimizer, type) else type(optimizer)
        write = f"from_torch({kind.__name__}, lr=1e-3)" if issubclass(kind, torch.optim.Optimizer) else "adamw(1e-3)"
        name = getattr(optimizer, "__name__", kind.__name__)
        why = f"Trainer(optimizer={name}): expected one of sf.optim, such as sf.optim.{write}"
        why = f"{why}; or leave it out and give trainer.parameters() to a torch optimizer"
        raise see(TypeError(why), "trainer")
    for name, value in (("clip", clip), ("ema", ema)):
        if value is not None and not isinstance(value, int | float):
            raise TypeError(f"Trainer({name}={value!r}): expected a number, or None")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"Trainer(scaler={scaler!r}): expected a torch.amp.GradScaler, or None")
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"Trainer(accumulate={accumulate!r}): how many microbatches a step has, at least 1")
    if clip is not None and not clip > 0:
        raise ValueError(f"Trainer(clip={clip!r}): the largest gradient norm, above 0, or None")
    if ema is not None and not 0 <= ema < 1:
        raise ValueError(f"Trainer(ema={ema!r}): the decay of the average, in [0, 1), or None")
    of_step = {"accumulate": accumulate > 1, "clip": clip is not None, "ema": ema is not None}
    if optimizer is None and any(of_step.values()):
        why = f"Trainer({next(filter(of_step.get, of_step))}=...): trainer.step does that, with Trainer(optimizer=...)"
        instead = "trainer.no_sync(), trainer.clip_grad_norm_ and sf.tree.ema(average, trainer.params, decay)"
        raise ValueError(f"{why}; beside a torch optimizer write {instead}")


def require_flags(params: Params) -> None:
    """Refuse to train what was frozen, or not what was thawed."""
    planned = [layout.trainable for layout, _ in params.plan.leaves.values()]
    if planned != (now := [leaf.requires_grad for leaf in params.values()]):
        name, flag = next((n, flag) for n, flag, other in zip(params, now, planned, strict=True) if flag != other)
        what = "no longer frozen" if flag else "frozen"
        why = f"Trainer.step: '{name}' is {what} since the model was sharded. Call requires_grad_ before Trainer(...),"
        raise ShardError(f"{why} or train by trainer(x), loss.backward() and a torch optimizer, which go by it")
