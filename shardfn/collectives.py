"""`sf.collectives`: collectives over one mesh axis, with a declared transpose."""

from shardfn.comm import all_gather, all_gather_invariant, all_to_all, all_to_all_rows, axis_index, axis_size
from shardfn.comm import pmean, psum, psum_scatter, pvary, shard_slice

from shardfn.watch import asked_to_stop, watch

__all__ = ["all_gather", "all_gather_invariant", "all_to_all", "all_to_all_rows", "asked_to_stop", "axis_index"]
__all__ += ["axis_size"]
__all__ += ["pmean", "psum", "psum_scatter", "pvary", "shard_slice", "watch"]
