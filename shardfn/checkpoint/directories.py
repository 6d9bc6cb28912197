"""Trees to checkpoint directories and back, on any mesh.

torch.distributed.checkpoint writes the files and reshards on load; `from_state_dict` cuts what is fused or padded. A
save goes into a new directory beside the others and is renamed into place when every rank has written, so that a name
always stands for a whole checkpoint. What is written has the model's names and shapes, whatever the layout.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardfn import _torch, comm
from shardfn._torch import dtensor_spec, pytree, unwrap_local, unwrap_locals, with_local, with_locals, wrap_local
from shardfn.comm import buckets, flat_memory
from shardfn.layout import Layout, chunk, grid_of
from shardfn.notation import ShardError, did_you_mean, raise_problems
from shardfn.params import Params, initialize, is_tree, path_name, sharding

STEP = "step-{:08d}"
_NOTES = "notes.json"


def to_state_dict(params: Params) -> dict[str, Tensor]:
    """The tree under the model's names and in the model's shapes, still sharded; tied parameters under each name.

    A parameter stored in the model's shape is the leaf itself; one that is stored with one dim per factor, in blocks or
    padded is gathered and split evenly on its first dim.

    Args:
        params: a tree made by `shard`, or one with its layouts.
    """
    out: dict[str, Tensor] = {}
    for layout in sharding.selected_layouts(params, None):
        tensor = params[layout.name] if layout.plain else _model_shaped(params, layout)
        out |= dict.fromkeys(layout.names, tensor)
    return out


def from_state_dict(like: Params, state: Mapping[str, Tensor]) -> Params:
    """A tree laid out as `like`, from tensors under the model's names: full ones or `DTensor`s.

    It has the parameters that are in `state`.

    Raises:
        ShardError: a `DTensor` that was another rank's, or is on ranks outside of this mesh, as a pickled one may be.
    """
    grid = grid_of(like.mesh, like.plan.roles.storage)
    tree = initialize.NewTree(like.plan, like.mesh, grid, {}, like.buffers)
    for layout in sharding.selected_layouts(like, None):
        value = next((state[name] for name in layout.names if name in state), None)
        if value is None:
            continue
        spec = buckets.leaf_spec(like.plan, grid, layout.name, value.dtype) if layout.plain else None
        if isinstance(value, DTensor):
            comm.require_own_part(f"'{layout.name}'", value, grid.ranks)
            if spec is not None and value.device_mesh == spec.mesh and tuple(value.placements) == spec.placements:
                tree.shards[layout.name] = unwrap_local(value)
                continue
        tree.shards |= buckets.empty_shards(like.plan, grid, {leaf.name: value.dtype for leaf in layout.leaves})
        tree.cut(layout, buckets.whole(value) if isinstance(value, DTensor) else value)
    leaves = tree.wrapped()
    return like.like((name, leaves[name]) for name in like if name in leaves)


def _model_shaped(params: Params, layout: Layout) -> Tensor:
    """A DTensor of model shape, split on dim 0 over the last axis of the storage mesh; one without dims is plain."""
    full = sharding.gather(params, layout.name)[layout.name].detach()
    *others, last = params.plan.roles.storage
    grid = grid_of(params.mesh, (*others, last))
    local = full.narrow(0, *chunk(full.shape[0], grid.sizes[last], grid.coords[last])).clone()
    placements = [*(Replicate() for _ in others), Shard(0)]
    return wrap_local(local, dtensor_spec(grid.storage, placements, full.shape, full.dtype))


def save(
    path: str | os.PathLike[str], tree: Any, mesh: DeviceMesh | None = None, *, notes: Mapping[str, Any] | None = None
) -> Path:
    """Write a tree into a new checkpoint directory; it appears under its name when it is whole.

        >>> import tempfile, shardfn as sf
        >>> from torch import nn
        >>> params = sf.shard(nn.Linear(4, 2), sf.make_mesh("cpu", fsdp=1), sf.Policy())
        >>> path = sf.checkpoint.save(tempfile.mkdtemp() + "/step-1", {"params": params})
        >>> restored = sf.checkpoint.load(path, {"params": params})
        >>> sf.gather(restored["params"])["bias"].equal(sf.gather(params)["bias"])
        True

    Args:
        path: the directory to make; the same for every rank, on storage that all see. One that exists is replaced.
        tree: `Params`, and containers of them, of tensors and of numbers; of plain tensors the first rank's count.
        mesh: whose ranks save together; default: that of the first `Params` in the tree.
        notes: what JSON can hold, of the first rank; `notes(path)` reads it again.

    Returns:
        the path.

    Raises:
        TypeError: a leaf that is neither a tensor nor a number.
        ShardError: the mesh does not cover all ranks; something else than a checkpoint is at that path.

    Communication: that of torch.distributed.checkpoint, and two barriers.
    """
    state, first = _flat_state(tree), _is_first(tree, mesh)
    target = Path(path)
    temporary = target.parent / f".writing-{target.name}"
    problem = _in_the_way(target)
    require_one_path("checkpoint.save", problem or str(target))
    if problem:
        raise ShardError(f"checkpoint.save: {problem}")
    if first:
        shutil.rmtree(temporary, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
    mine = {name: value for name, value in state.items() if first or isinstance(value, DTensor)}
    state_dict_saver.save(mine, checkpoint_id=str(temporary))
    if first:
        (temporary / _NOTES).write_text(json.dumps(dict(notes or {})), encoding="utf-8")
        _rename(temporary, target)
    if dist.is_initialized():
        dist.barrier()
    return target


def load(path: str | os.PathLike[str], like: Any, mesh: DeviceMesh | None = None, *, whole: Sequence[str] = ()) -> Any:
    """Read a checkpoint into a new tree with the layouts of `like`, which may be on another mesh than it was saved on.

    Args:
        path: a directory made by `save`.
        like: a tree of the same structure, or of a part of it; its values are not used or changed.
        mesh: as in `save`.
        whole: names at the top of the tree of which everything in the checkpoint must be wanted.

    Returns:
        the tree.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ShardError: naming the leaves that are missing or have another shape or dtype, before anything is read.
    """
    _is_first(like, mesh)
    exists = (Path(path) / ".metadata").is_file()
    require_one_path("checkpoint.load", str(path) if exists else None)
    if not exists:
        raise FileNotFoundError(f"checkpoint.load: no checkpoint in '{path}' (no .metadata file)")
    reader = filesystem.FileSystemReader(str(path))
    state = _flat_state(pytree.tree_map(_emptied, like, is_leaf=is_tree))
    _require_same(str(path), reader.read_metadata(), state, whole)
    state_dict_loader.load(state, storage_reader=reader)
    return pytree.tree_map_with_path(lambda key, leaf: _restored(path_name(key), leaf, state), like, is_leaf=is_tree)


def notes(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a checkpoint was saved with besides its tree; nothing in older ones."""
    file = Path(path) / _NOTES
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The newest whole checkpoint `step-N` in a directory, or None."""
    steps = [p for p in Path(directory).glob("step-*") if (p / ".metadata").is_file() and p.name[5:].isdecimal()]
    return max(steps, key=lambda p: int(p.name[5:]), default=None)


def _flat_state(tree: Any) -> dict[str, Tensor]:
    """One flat dict of tensors: `params.layers.0.wq.weight`, `optimizer.mu.layers.0...`, `step`."""
    if _torch.has_no_memory():
        raise ShardError("checkpoint: in sf.jit no values are known: return what is to be saved, and save it outside")
    state: dict[str, Tensor] = {}
    for path, leaf in pytree.tree_flatten_with_path(tree, is_leaf=is_tree)[0]:
        name = path_name(path)
        if isinstance(leaf, Params):
            state |= {f"{name}.{key}".removeprefix("."): x.detach() for key, x in to_state_dict(leaf).items()}
        elif isinstance(leaf, Tensor):
            state[name] = leaf.detach()
        elif isinstance(leaf, int | float):
            state[name] = torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else torch.int64)
        elif leaf is not None:
            kind = type(leaf).__name__
            raise TypeError(f"checkpoint: '{name}' is a {kind}; write save(path, tree), of tensors and numbers")
    for name, value in state.items():
        if isinstance(value, DTensor):
            sharding.require_reduced("checkpoint", name, value)
    return state


def _emptied(leaf: Any) -> Any:
    """Memory for values like those of a leaf: side by side and pinned where they are."""
    if isinstance(leaf, Params):
        locals_ = flat_memory.map_runs(lambda flats: [_empty(flat) for flat in flats], unwrap_locals([*leaf.values()]))
        return leaf.like(zip(leaf, with_locals([*leaf.values()], locals_), strict=True))
    return with_local(leaf, _empty(unwrap_local(leaf))) if isinstance(leaf, Tensor) else leaf


def _empty(x: Tensor) -> Tensor:
    return torch.empty_like(x, pin_memory=torch.cuda.is_available() and x.is_pinned())


def _restored(name: str, leaf: Any, state: Mapping[str, Tensor]) -> Any:
    if isinstance(leaf, Params):
        prefix = f"{name}." if name else ""
        tensors = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        return from_state_dict(leaf, tensors)
    return type(leaf)(state[name].item()) if isinstance(leaf, int | float) else state.get(name)


def _require_same(path: str, metadata: Metadata, state: Mapping[str, Tensor], whole: Sequence[str]) -> None:
    """Every wanted tensor is there with its shape and dtype; more may be there, but not under the names in `whole`."""
    extra = (name for name in metadata.state_dict_metadata if name.split(".")[0] in whole and name not in state)
    problems = [f"'{name}' is in it and was not asked for" for name in extra]
    for name, tensor in state.items():
        have = metadata.state_dict_metadata.get(name)
        if not isinstance(have, TensorStorageMetadata):
            hint = did_you_mean(name, metadata.state_dict_metadata.keys() - state.keys()) if not problems else ""
            problems.append(f"'{name}' is not in it{hint}")
        elif tuple(have.size) != tuple(tensor.shape) or have.properties.dtype != tensor.dtype:
            found = f"{tuple(have.size)} {have.properties.dtype}"
            problems.append(f"'{name}' is {found}, wanted {tuple(tensor.shape)} {tensor.dtype}")
    raise_problems(f"checkpoint.load: '{path}' does not fit", problems)


def _is_first(tree: Any, mesh: DeviceMesh | None) -> bool:
    """Whether this is the rank that makes and renames directories; checks that all ranks take part."""
    if mesh is None:
        leaves = pytree.tree_leaves(tree, is_leaf=is_tree)
        mesh = next((leaf.mesh for leaf in leaves if isinstance(leaf, Params)), None)
    if mesh is not None and dist.is_initialized() and mesh.size() != dist.get_world_size():
        why = f"the mesh has {mesh.size()} of {dist.get_world_size()} ranks"
        raise ShardError(f"checkpoint: {why}; all ranks must save and load together")
    return not dist.is_initialized() or dist.get_rank() == 0


def _in_the_way(target: Path) -> str:
    """What keeps a checkpoint from being written to a path: a file, or files that would be lost."""
    above = next(path for path in target.absolute().parents if path.exists())
    if not above.is_dir():
        return f"'{above}' is a file; give a path below a directory"
    empty = not target.exists() or (target.is_dir() and not any(target.iterdir()))
    if empty or (target / ".metadata").is_file():
        return ""
    return f"'{target}' is no checkpoint, and would be replaced; give a new name, such as '{target / 'step-1'}'"


def require_one_path(verb: str, path: str | None) -> None:
    """Ranks that write to, or read from, different places would wait for each other, or mix checkpoints.

    Raises:
        ShardError: on every rank.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    paths: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(paths, path)
    if len(set(paths)) > 1:
        other = next(rank for rank, one in enumerate(paths) if one != paths[0])
        why = f"rank 0 has '{paths[0]}' and rank {other} '{paths[other]}' (None: no checkpoint there)"
        raise ShardError(f"{verb}: {why}; give all ranks one directory that all see, not tempfile.mkdtemp() of each")


def _rename(temporary: Path, target: Path) -> None:
    """Put the written directory in place; an older one of that name goes first aside, then away."""
    aside = target.parent / f".replaced-{target.name}"
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
    temporary.rename(target)
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    shutil.rmtree(aside, ignore_errors=True)
