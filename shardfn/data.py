"""`sf.data`: which part of a batch a rank works on. Layer 5."""

from shardfn.core.data import Mean as Mean
from shardfn.core.data import local_batch as local_batch
from shardfn.core.data import rank as rank
