"""What the compatible classes share: `run` in `sharded_module`, which goes by `stateful.ModuleShards.run` to `apply`.

Read `sharded_module` (what a sharded module knows, its run, its loads), then `meshes` (a mesh made of process groups
or of device meshes). Not here: any name that a script imports; those are in the room of their class.
"""

from shardfn.compat.common import meshes, sharded_module
from shardfn.compat.common.meshes import HYBRID, OWN_AXES
from shardfn.compat.common.sharded_module import RECORD, CopiesIntoShards, FillsBlanks, Sharded, Tree, compile_units
from shardfn.compat.common.sharded_module import current_shards, laid_out, note_blanks, own_modules, put_shards, run
from shardfn.compat.common.sharded_module import spread_inside, whole_of
