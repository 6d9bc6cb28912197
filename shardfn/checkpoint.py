"""Checkpoints: `save`, `load`, `latest`, `notes`; files of other libraries: `load_safetensors`, `save_safetensors`.

Layer 5. The code is in `shardfn/core/checkpoint.py` and `shardfn/core/weights.py`.
"""

from shardfn.core.checkpoint import latest, load, notes, save
from shardfn.core.weights import load_safetensors, save_safetensors

__all__ = ["latest", "load", "load_safetensors", "notes", "save", "save_safetensors"]
