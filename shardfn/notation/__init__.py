"""The text of rules, and errors: what a user writes, and what a user reads when it is wrong.

Read `errors`, then `spec`: the grammar of rules, parsed into plain data and printed again; `names` prints those of like
layers as one. Not here: what a rule means for a weight on a mesh, see `layout`.
"""

from shardfn.notation.errors import ShardError, did_you_mean, of_like_layers, raise_problems, see
from shardfn.notation.names import in_one, without_numbers
from shardfn.notation.spec import Block, Dim, Factor, Sizes, Spec, parse, repeated_axes, unknown_axes
