"""`Trainer`, and the modules that both it and the compatible classes use: modules that hold their shards.

Read `trainer`, `settings` (what it is told), `step_losses` (scaled, over microbatches, not finite), `progress` (what a
run shows), `module_shards` (parameters that are leaves of a tree), `saved_state` (what a trainer saves), `extra_state`
(optimizers, schedules and scalers in checkpoints) and `torch_optimizers` (refuses steps that would go wrong). Not here:
numerics.
"""

from shardfn.stateful.module_shards import ModuleShards, adopt, bound, install, require_no_gradients, whole_in_place
from shardfn.stateful.progress import Progress
from shardfn.stateful.torch_optimizers import REPLACED, refuse_held_back, optimizers_of, take_shards
from shardfn.stateful.trainer import Trainer
