"""`sf.optim`: optimizers over trees of shards. Layer 5."""

from shardfn.core.optim.base import Optimizer, ScheduleState, apply_updates, chain, masked, schedule, warmup_cosine
from shardfn.core.optim.elementwise import AdamState, LionState, SGDState, adamw, lion, sgd
from shardfn.core.optim.norms import clip, clip_by_global_norm, global_norm
from shardfn.core.optim.torch_classes import TorchState, from_torch

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
