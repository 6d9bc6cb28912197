"""`sf.optim`: optimizers over trees of shards: `update` is pure, as in Optax, `step` is fused and donates.

    rule          one algorithm, leaf by leaf: AdamW, SGD, Lion
    transform     changes gradients on their way: `clip_by_global_norm`, `schedule`
    slot          one tensor of state per parameter (`mu`, `nu`, `momentum`), a tree like the parameters'
    group         parameters, by name pattern, with options of their own

Read `base` (what an optimizer is, and transforms), `elementwise` (rules), `norms` and `torch_classes`. Arithmetic is on
local shards; only `norms` communicates. Not here: gradients. If parameters, gradients and state each lie side by side
in memory, `step` updates all of them in one call; slots are allocated so. Parameters that do not train
(`requires_grad=False` in the model, integers) have no state, no update and no decay, and whatever stands in their
gradients is ignored.

[Note: where a derivative flows]
Meta-learning differentiates through `update`. A DTensor's local tensor is outside autograd, so where a leaf carries a
derivative the same arithmetic runs on the DTensors themselves, which is slower and communicates nothing either.
"""

from shardfn.optim.base import Optimizer, ScheduleState, apply_updates, chain, masked, schedule, warmup_cosine
from shardfn.optim.elementwise import AdamState, LionState, SGDState, adamw, lion, sgd
from shardfn.optim.norms import clip, clip_by_global_norm, dot, global_norm
from shardfn.optim.torch_classes import TorchState, from_torch

__all__ = ["AdamState", "LionState", "Optimizer", "SGDState", "ScheduleState", "TorchState", "adamw", "apply_updates"]
__all__ += ["chain", "clip", "clip_by_global_norm", "from_torch", "global_norm", "lion", "masked", "schedule", "sgd"]
__all__ += ["warmup_cosine"]
