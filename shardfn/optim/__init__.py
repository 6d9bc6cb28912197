"""`sf.optim`: optimizers over trees of shards."""

from shardfn.optim.base import Optimizer, ScheduleState, apply_updates, chain, masked, schedule, warmup_cosine
from shardfn.optim.elementwise import AdamState, LionState, SGDState, adamw, lion, sgd
from shardfn.optim.norms import clip, clip_by_global_norm, dot, global_norm
from shardfn.optim.torch_classes import TorchState, from_torch

__all__ = [
    "AdamState",
    "LionState",
    "Optimizer",
    "SGDState",
    "ScheduleState",
    "TorchState",
    "adamw",
    "apply_updates",
    "chain",
    "clip",
    "clip_by_global_norm",
    "from_torch",
    "global_norm",
    "lion",
    "masked",
    "schedule",
    "sgd",
    "warmup_cosine",
]
