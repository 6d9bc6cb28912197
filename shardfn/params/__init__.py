"""The tree of shards and its verbs: `shard`, `gather`, `reduce_grads`, `reshard`; initialisation; batches.

Read `tree` (`Params`, the pytree), `sharding` and `reshard` (the verbs), `moving` (slices from rank to rank),
`initialize` (weights made shard by shard), `meta_init` (what `init` may do), `local_trees` (DTensors as plain tensors
inside of transforms), `state_dicts` (trees under the model's names and in its shapes) and `batches` (a rank's samples).
Not here: running a module, see `transforms`.
"""

from shardfn.params import initialize, moving, sharding, state_dicts
from shardfn.params.batches import Mean, local_batch, parts_of, rank
from shardfn.params.initialize import NewTree, Origin, agreed_plan
from shardfn.params.local_trees import Across, entered, left, lower, over_params
from shardfn.params.reshard import reshard
from shardfn.params.sharding import gather, plain_leaf, reduce_grads, require_reduced, shard
from shardfn.params.tree import DRAWS, Params, cast, data_axes_of, drawn_for_parts, ema, has_parts, is_sum, is_tree
from shardfn.params.tree import (
    leaves,
    lerp,
    map,
    map_local,
    path_name,
    paths,
    select,
    trees_in,
    watched_parts,
    zeros_like,
)
