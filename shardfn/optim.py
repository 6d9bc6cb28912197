"""`sf.optim`: optimizers over trees of shards. Layer 5."""

from shardfn.core.optim.base import Optimizer, apply_updates, warmup_cosine
from shardfn.core.optim.elementwise import AdamState, LionState, SGDState, adamw, lion, sgd
from shardfn.core.optim.norms import clip, global_norm
from shardfn.core.optim.torch_classes import TorchState, from_torch
from shardfn.core.optim.transforms import ScheduleState, chain, clip_by_global_norm, masked, schedule

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
