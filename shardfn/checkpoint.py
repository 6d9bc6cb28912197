"""Checkpoints: `save`, `load`, `latest`, `notes`; files of other libraries: `load_safetensors`, `save_safetensors`.

Layer 5. The code is in `shardfn/core/checkpoint.py` and `shardfn/core/weights.py`.
"""

from shardfn.core.checkpoint import latest as latest
from shardfn.core.checkpoint import load as load
from shardfn.core.checkpoint import notes as notes
from shardfn.core.checkpoint import save as save
from shardfn.core.weights import load_safetensors as load_safetensors
from shardfn.core.weights import save_safetensors as save_safetensors

__all__ = [
    "latest",
    "load",
    "load_safetensors",
    "notes",
    "save",
    "save_safetensors",
]
