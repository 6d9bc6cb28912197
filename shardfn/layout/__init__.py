"""A policy becomes a plan here: layouts of parameters, units, buckets. Plain data, without collectives.

Read `policy` (what a user decides), `mesh` (axes and their order; `make_mesh`, which starts the process group),
`layout` (how one parameter is split), `slices` (which slices go from whom to whom for another layout), `partition` (a
rank's slice of a dim, and that slice after a reshape),
`model_info` (names, kinds and ties of a model), `plan` (the decisions), then `planning`, which makes them with
`local_sizes` and `plan_checks`. Which rule a parameter gets is decided in `planning._rule`; `leaf_spec`
in `comm/buckets.py` writes it as DTensor placements. A size (heads, channels) that does not divide over its axes is
found in `planning._require_divisible`. Not here: collectives, see `comm`.
"""

from shardfn.layout import mesh, planning
from shardfn.layout.layout import Axes, Box, Layout, Leaf, blocks, clear_padding_, compute_view, compute_view_shape
from shardfn.layout.layout import from_compute_view, local_boxes, local_slice, narrowed, own_parts, runs
from shardfn.layout.layout import part_for, to_leaves
from shardfn.layout.mesh import Grid, MeshSpec, Ranks, Roles, axes_of, chunk, default_device_type, device_of, grid_of
from shardfn.layout.mesh import index_along, make_mesh, nested_chunk, nested_index, part_of, per_rank, require_member
from shardfn.layout.mesh import roles, use_part
from shardfn.layout.model_info import BIAS_DIM, CLASS, OUT_DIM, OWN, REPLACED, WRAPPED, ModuleInfo, StandIn
from shardfn.layout.model_info import by_all_names, calls_own, class_name, class_of, declares, describe, has_derivatives
from shardfn.layout.model_info import kind_of, may_be_differentiated, named_buffers, named_parameters, note_shard
from shardfn.layout.model_info import patched_forward, register, shallow_copy, shards_in, submodule, unwrapped
from shardfn.layout.partition import BY_ACTS, SAME, SUM, Cure, Kind, NotRankByRank, Part, Problem, Runs, Shape
from shardfn.layout.partition import FailedOperation, Tag
from shardfn.layout.partition import after_collective, even, in_two_dims, reshaped, sliced
from shardfn.layout.plan import Bucket, Plan, Reduction, Unit
from shardfn.layout.planning import decide, plan, replace_units
from shardfn.layout.policy import BATCH_AXES, MAPPINGS, Policy, batch_with, exactly, first_match, is_batch_axis, is_in
from shardfn.layout.policy import matches, modules_above, starred
from shardfn.layout.slices import Held, Slice, as_runs, in_turn, overlaps, received, sent
