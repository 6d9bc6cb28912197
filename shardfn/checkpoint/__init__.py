"""Checkpoints: `save`, `load`, `verify`, `latest`, `notes`; files of other libraries: `load_safetensors` and its pair.

Read `directories` (all ranks save and load together; `Trainer` only picks the directory), `leaves` (what a tree has, by
names), `slices` (which rank has, and writes, what part of it), `manifest` (what a checkpoint has), `commits` (how it
comes into being) and `hashed_files` (bytes, and their hashes). Then `safetensors` (weights of published models),
`stored_names` (what the tensors of a model are called in them) and `tensor_files`. `state_dicts` has trees as
state dicts. Not here: the states of torch's objects, see `stateful`.
"""

from shardfn.checkpoint import directories, state_dicts
from shardfn.checkpoint.directories import latest, load, notes, save, verify
from shardfn.checkpoint.leaves import OfFirst, PerRank
from shardfn.checkpoint.manifest import Damaged
from shardfn.checkpoint.safetensors import load_safetensors, save_safetensors

__all__ = ["Damaged", "OfFirst", "PerRank", "latest", "load", "load_safetensors", "notes", "save", "save_safetensors"]
__all__ += ["verify"]
