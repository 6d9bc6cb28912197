"""`sf.optim`: optimizers over trees of shards. Layer 5."""

from shardfn.core.optim import AdamState as AdamState
from shardfn.core.optim import LionState as LionState
from shardfn.core.optim import Optimizer as Optimizer
from shardfn.core.optim import ScheduleState as ScheduleState
from shardfn.core.optim import SGDState as SGDState
from shardfn.core.optim import TorchState as TorchState
from shardfn.core.optim import adamw as adamw
from shardfn.core.optim import apply_updates as apply_updates
from shardfn.core.optim import chain as chain
from shardfn.core.optim import clip as clip
from shardfn.core.optim import clip_by_global_norm as clip_by_global_norm
from shardfn.core.optim import from_torch as from_torch
from shardfn.core.optim import global_norm as global_norm
from shardfn.core.optim import lion as lion
from shardfn.core.optim import masked as masked
from shardfn.core.optim import schedule as schedule
from shardfn.core.optim import sgd as sgd
from shardfn.core.optim import warmup_cosine as warmup_cosine

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
