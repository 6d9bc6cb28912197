"""Checkpoints: `save`, `load`, `verify`, `latest`, `notes`; files of other libraries: `load_safetensors` and its pair.

Read `saves` and `directories` (all ranks save and load together; `Trainer` only picks the directory), `leaves` (what a
tree has, by names, and which rank has what part of it), `manifest` (what a checkpoint has), `commits` (how it comes
into being), `hashed_files` (tensors, and their hashes), `block_writer` (bytes, also by a process that does nothing
else), `storages` (where they are) and `background` (saves while the training goes on). Then `dcp` (torch's own
functions with ours), `safetensors` (weights of published models), `stored_names` (what tensors are called in them) and
`tensor_files`. Not here: the states of torch's objects, see `stateful`.
"""

from shardfn.checkpoint import directories, saves
from shardfn.checkpoint.background import Saving
from shardfn.checkpoint.dcp import StorageReader, StorageWriter
from shardfn.checkpoint.directories import latest, load, notes, verify
from shardfn.checkpoint.hashed_files import hash_of
from shardfn.checkpoint.leaves import OfFirst, PerRank, of_rank
from shardfn.checkpoint.manifest import Damaged, from_json, is_checkpoint, to_json
from shardfn.checkpoint.safetensors import load_safetensors, save_safetensors
from shardfn.checkpoint.saves import save
from shardfn.checkpoint.storages import LocalDirectory, Storage

__all__ = ["Damaged", "LocalDirectory", "OfFirst", "PerRank", "Saving", "Storage", "StorageReader", "StorageWriter"]
__all__ += ["latest", "load", "load_safetensors", "notes", "save", "save_safetensors", "verify"]
