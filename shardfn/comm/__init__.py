"""Moving data between ranks: collectives with declared transposes, flat buckets, small messages, agreement.

Read `collectives` (over one mesh axis), `transposes` (how they are differentiated) and `transfers` (bytes), then
`buckets` (many leaves at once), `packing` (how they lie side by side on their way), `storage` (buffers used again),
`point_to_point` (small messages on gloo) and `agreement` (ranks say what they are about to do). Not here: what to move
and when; plans say it, and `engine` does it.
"""

from shardfn.comm import buckets, collectives, storage
from shardfn.comm.agreement import VALUES, agree, check_batch, digest, exchange_numbers, failing_together
from shardfn.comm.agreement import random_numbers_of_first, require_same, wrong_inputs
from shardfn.comm.buckets import BucketOnGrid, GatherBucket, ReduceBucket, empty_shards, gather_leaves, in_front
from shardfn.comm.buckets import in_layout, leaf_spec, whole
from shardfn.comm.collectives import Gathers, RankIndex, all_gather, all_gather_invariant, all_to_all, all_to_all_rows
from shardfn.comm.collectives import axis_index, axis_size, into_losses, pmean, pmean_of_losses, psum, psum_of_trees
from shardfn.comm.collectives import psum_scatter, pvary, shard_slice
from shardfn.comm.packing import host_of
from shardfn.comm.storage import BufferPool, Buffers, FreshBuffers, map_runs, merged, portions
from shardfn.comm.transfers import Explain, Flight, Steps, accumulation_dtype, backend_of, gather_flat, sum_flat_
from shardfn.comm.transposes import Moved, of_rank, watched, watching, weighed
