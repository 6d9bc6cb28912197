"""`sf.collectives`: collectives over one mesh axis, with a declared transpose."""

from shardfn.comm import all_gather as all_gather
from shardfn.comm import all_gather_invariant as all_gather_invariant
from shardfn.comm import all_to_all as all_to_all
from shardfn.comm import all_to_all_rows as all_to_all_rows
from shardfn.comm import axis_index as axis_index
from shardfn.comm import axis_size as axis_size
from shardfn.comm import pmean as pmean
from shardfn.comm import psum as psum
from shardfn.comm import psum_scatter as psum_scatter
from shardfn.comm import pvary as pvary
from shardfn.comm import shard_slice as shard_slice

__all__ = ["all_gather", "all_gather_invariant", "all_to_all", "all_to_all_rows", "axis_index", "axis_size"]
__all__ += ["pmean", "psum", "psum_scatter", "pvary", "shard_slice"]
