"""`sf.collectives`: collectives over one mesh axis, with a declared transpose. Layer 5."""

from shardfn.core.collectives import all_gather as all_gather
from shardfn.core.collectives import all_gather_invariant as all_gather_invariant
from shardfn.core.collectives import all_to_all as all_to_all
from shardfn.core.collectives import all_to_all_rows as all_to_all_rows
from shardfn.core.collectives import axis_index as axis_index
from shardfn.core.collectives import axis_size as axis_size
from shardfn.core.collectives import pmean as pmean
from shardfn.core.collectives import psum as psum
from shardfn.core.collectives import psum_scatter as psum_scatter
from shardfn.core.collectives import pvary as pvary
from shardfn.core.collectives import shard_slice as shard_slice

__all__ = ["all_gather", "all_gather_invariant", "all_to_all", "all_to_all_rows", "axis_index", "axis_size"]
__all__ += ["pmean", "psum", "psum_scatter", "pvary", "shard_slice"]
