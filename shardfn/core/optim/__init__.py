"""Optimizers over trees of shards: `update` is pure, as in Optax, `step` is fused and donates. Layer 4.

    rule          one algorithm, leaf by leaf: AdamW, SGD, Lion
    transform     changes gradients on their way: `clip_by_global_norm`, `schedule`
    slot          one tensor of state per parameter (`mu`, `nu`, `momentum`), a tree like the parameters'
    group         parameters, by name pattern, with options of their own

Arithmetic is on local shards and communicates nothing; only `global_norm`, and what clips by it, is a collective.
Where parameters lie side by side in memory, with their gradients and state likewise, `step` updates all of them in one
call (`core/storage.py`); slots are allocated so.
Parameters that do not train (`requires_grad=False` in the model, integers) have no state, no update and no decay, and
whatever stands in their gradients is ignored.

[Note: where a derivative flows]
Meta-learning differentiates through `update`. A DTensor's local tensor is outside autograd, so where a leaf carries a
derivative the same arithmetic runs on the DTensors themselves, which is slower and communicates nothing either.
"""

from shardfn.core.optim.base import Optimizer as Optimizer
from shardfn.core.optim.base import apply_updates as apply_updates
from shardfn.core.optim.elementwise import adamw as adamw
from shardfn.core.optim.elementwise import lion as lion
from shardfn.core.optim.elementwise import sgd as sgd
from shardfn.core.optim.norms import clip as clip
from shardfn.core.optim.norms import global_norm as global_norm
from shardfn.core.optim.rates import warmup_cosine as warmup_cosine
from shardfn.core.optim.rules import AdamState as AdamState
from shardfn.core.optim.rules import LionState as LionState
from shardfn.core.optim.rules import SGDState as SGDState
from shardfn.core.optim.torch_classes import TorchState as TorchState
from shardfn.core.optim.torch_classes import from_torch as from_torch
from shardfn.core.optim.transforms import ScheduleState as ScheduleState
from shardfn.core.optim.transforms import chain as chain
from shardfn.core.optim.transforms import clip_by_global_norm as clip_by_global_norm
from shardfn.core.optim.transforms import masked as masked
from shardfn.core.optim.transforms import schedule as schedule
