"""Moving data between ranks: collectives, buckets of parameters, small messages, checks that ranks agree.

Read `collectives` (over one mesh axis), `collective_autograd` (how they are differentiated) and `raw_collectives`
(bytes over a process group). `buckets` gathers and reduces many parameters at once, `packing` copies them into one flat
tensor, `flat_memory` has buffers that are used again. `slice_messages` sends slices of tensors from rank to rank.
`gloo_messages` adds up small tensors fast, `agreement` compares what ranks are about to do, and
`journal` has what they did, for who watches them. How gradients are reduced
over data axes is here (`BucketOnGrid.reduce_steps`: a mean, a sum or a function of the user's, in
`Policy.reduce_dtype`); `engine` decides when. Over compute axes that is the transpose of a `pvary`, in
`collective_autograd`. Not here: who calls which collective.
"""

from shardfn.comm import buckets, collectives, flat_memory
from shardfn.comm.agreement import SAME_SAMPLES, VALUES, agree, agree_on, called_by_all, check_batch
from shardfn.comm.agreement import compare_gradients, digest, exchange_numbers, exchange_objects, failing_together
from shardfn.comm.agreement import gather_objects, note_batch, note_draws
from shardfn.comm.agreement import outcome_of, raise_failure, random_numbers_of_first, random_states, require_same
from shardfn.comm.agreement import require_same_draws, set_random_states, wrong_inputs
from shardfn.comm.buckets import BucketOnGrid, GatherBucket, ReduceBucket, empty_shards, in_layout
from shardfn.comm.buckets import leaf_spec, rank_of_part, require_own_part, whole
from shardfn.comm.collective_autograd import Moved, of_rank, watched, watching, weighed
from shardfn.comm.collectives import Gathers, RankIndex, all_gather, all_gather_invariant, all_to_all, all_to_all_rows
from shardfn.comm.collectives import axis_index, axis_size, into_losses, pmean, pmean_of_losses, psum, psum_of_trees
from shardfn.comm.collectives import psum_scatter, pvary, shard_slice
from shardfn.comm.flat_memory import BufferPool, Buffers, FreshBuffers, map_runs, merged, portions
from shardfn.comm.gloo_messages import CALLS
from shardfn.comm.journal import (
    JOURNALS,
    Entry,
    Journal,
    Line,
    explained,
    journal_of,
    keep_journal,
    note,
    note_of_ranks,
)
from shardfn.comm.packing import host_of
from shardfn.comm.raw_collectives import Explain, AsyncCollective, Steps, accumulation_dtype, backend_of, gather_flat
from shardfn.comm.raw_collectives import sum_flat_
from shardfn.comm.slice_messages import Shipment, exchange_slices
