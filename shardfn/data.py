"""`sf.data`: which part of a batch a rank works on, and dropout by sample. Layer 5."""

from shardfn.core.data import Mean as Mean
from shardfn.core.data import local_batch as local_batch
from shardfn.core.data import rank as rank
from shardfn.core.dropout import dropout as dropout
from shardfn.core.dropout import dropout_seed as dropout_seed

__all__ = [
    "Mean",
    "dropout",
    "dropout_seed",
    "local_batch",
    "rank",
]
