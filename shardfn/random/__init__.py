"""Random numbers that do not depend on the mesh: dropout by the positions of samples.

All of it is in `dropout_masks`. Not here: torch's generators, which initialisation uses, see `params`.
"""

from shardfn.random.dropout_masks import Masks, Offsets, axes_of_dims, dropout, dropout_modules, dropout_seed, dropping
from shardfn.random.dropout_masks import lane, offsets_of_call, part_over, stream
