"""Checkpoints: `save`, `load`, `latest`, `notes`. Layer 5. The code is in `shardfn/core/checkpoint.py`."""

from shardfn.core.checkpoint import latest as latest
from shardfn.core.checkpoint import load as load
from shardfn.core.checkpoint import notes as notes
from shardfn.core.checkpoint import save as save
