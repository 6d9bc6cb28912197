"""Checkpoints: `save`, `load`, `latest`, `notes`; files of other libraries: `load_safetensors`, `save_safetensors`.

Read `directories` (saves and loads trees, also on another mesh: torch's reader cuts anew what is stored; `Trainer` only
picks the directory), then `safetensors` (weights of published models), `stored_names` (what the tensors of a model are
called in them) and `tensor_files` (bytes). Not here: the states of torch's objects, see `stateful`.
"""

from shardfn.checkpoint import directories
from shardfn.checkpoint.directories import latest, load, notes, save
from shardfn.checkpoint.safetensors import load_safetensors, save_safetensors

__all__ = ["latest", "load", "load_safetensors", "notes", "save", "save_safetensors"]
