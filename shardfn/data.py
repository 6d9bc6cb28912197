"""`sf.data`: which part of a batch a rank works on, and dropout by sample."""

from shardfn.params import Mean, local_batch, rank
from shardfn.random import dropout, dropout_seed

__all__ = ["Mean", "dropout", "dropout_seed", "local_batch", "rank"]
