"""Moving data between ranks: collectives with declared transposes, flat buckets, small messages, agreement.

Read `collectives` (over one mesh axis, in every transform), then `buckets` (many leaves at once) and `packing` (how
they lie side by side on their way), `storage` (buffers used again), `point_to_point` (small messages on gloo) and
`agreement` (ranks say what they are about to do). Not here: what to move and when; plans say it, and `engine` does it.
"""

from shardfn.comm import buckets, collectives, storage
from shardfn.comm.agreement import VALUES, agree, check_batch, digest, exchange_numbers, failing_together
from shardfn.comm.agreement import random_numbers_of_first, require_same, wrong_inputs
from shardfn.comm.buckets import BucketOnGrid, GatherBucket, ReduceBucket, empty_shards, gather_leaves, in_front
from shardfn.comm.buckets import in_layout, leaf_spec, whole
from shardfn.comm.collectives import Explain, Flight, Gathers, Moved, RankIndex, Steps, all_gather, all_gather_invariant
from shardfn.comm.collectives import all_to_all, all_to_all_rows, axis_index, axis_size, backend_of, gather_flat
from shardfn.comm.collectives import into_losses, of_rank, pmean, pmean_of_losses, psum, psum_of_trees, psum_scatter
from shardfn.comm.collectives import pvary, shard_slice, sum_flat_, watched, watching, weighed
from shardfn.comm.packing import host_of
from shardfn.comm.storage import BufferPool, Buffers, FreshBuffers, map_runs, merged, portions
