"""What a `Trainer` saves, and how it goes on from it: its own state, that of other objects, random numbers.

Each rank has random states of its own, which go on where they were on as many ranks; so does another object whose state
is not the same on all ranks, as that of a loader may be.
"""

import os
import random
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.checkpoint import Damaged, LocalDirectory, OfFirst, PerRank, directories, is_checkpoint, saves
from shardfn.comm import agree_on, exchange_numbers, failing_together, random_states, set_random_states
from shardfn.layout import device_of, is_in
from shardfn.notation import ShardError
from shardfn.stateful.extra_state import OTHERS, digest_of, load_into, memory_for, of_each_rank, to_save

AnyPath = str | os.PathLike[str]
Keep = tuple[int | None, int | None]  # how many of the newest, and those of multiples of how many steps


def save(
    mesh: DeviceMesh, state: Mapping[str, Any], others: Mapping[str, Any], directory: AnyPath, keep: Keep, async_: bool
) -> Any:
    """Write a checkpoint of this step.

    Raises:
        ShardError: it would be taken away at once; a state that cannot be saved.
    """
    with failing_together(mesh, "Trainer.save"):
        for name, number in zip(("keep", "keep_every"), keep, strict=True):
            if number is not None and (not isinstance(number, int) or number < 1):
                raise ShardError(f"Trainer.save: {name}={number!r} keeps nothing, nor this one; write {name}=1 or more")
        if of_each := isinstance(directory, LocalDirectory):
            if keep != (None, None):
                raise ShardError("Trainer.save: keep= and keep_every= mean nothing to a LocalDirectory; leave them out")
        newest = directories.latest(directory) if saves.is_first() and not of_each else None
        if newest is not None and directories.step_of(newest) > state["steps"]:
            warnings.warn(f"Trainer.save: '{newest}' is of a later step, and is what resume= takes", stacklevel=3)
        saved = {name: to_save(x, name, state["params"]) for name, x in others.items()}
        digests = [digest_of(*x) for x in saved.values()]
        random_states = [PerRank(x) for x in _random_states(device_of(mesh.device_type))]
        place = directory if of_each else Path(directory) / directories.STEP.format(state["steps"])
        tidy = partial(directories.prune, Path(directory).absolute(), state["steps"], *keep)
    agree_on(mesh, "Trainer.save", [f"the states {[*saved]}"])
    rows = exchange_numbers(mesh, [0, *digests])
    for name, *of_ranks in zip(saved, *(row[1:] for row in rows), strict=True):
        if len(set(of_ranks)) > 1 and not saved[name][1]["trees"]:
            saved[name] = of_each_rank(*saved[name])
    tree = {**state, OTHERS: {name: tensors for name, (tensors, _) in saved.items()}, "random": random_states}
    tree["buffers"] = {name: OfFirst(x) for name, x in state["buffers"].items()}
    told = {name: notes for name, (_, notes) in saved.items()}
    return saves.save_and(tidy, place, tree, mesh, told, async_, overwrite=True)


def found_in(mesh: DeviceMesh, verb: str, directory: AnyPath) -> list[Path]:
    """The checkpoints that the first rank sees, the newest first; or the one that this is."""
    saves.settle(mesh)
    saves.require_one_path(mesh, verb, directory)
    with failing_together(mesh, verb):
        if Path(directory).is_file():
            raise ShardError(f"{verb}: '{directory}' is a file; give a checkpoint, or a directory of some")
        found = [Path(directory)] if is_checkpoint(directory) else directories.steps(directory)
    return saves.of_first(found)


def load(
    mesh: DeviceMesh, state: Mapping[str, Any], others: Mapping[str, Any], found: Sequence[Path]
) -> tuple[Path, dict[str, Any]]:
    """Read the first of some checkpoints that is not damaged: its path, and what it has for the trainer itself."""
    for path in found[:-1]:
        try:
            return path, _load(mesh, state, others, path)
        except Exception as error:
            damaged = exchange_numbers(mesh, [isinstance(error, Damaged)])
            if not all(is_damaged for (is_damaged,) in damaged):
                raise
            warnings.warn(f"Trainer.load: {error}. Going on with the checkpoint before it", stacklevel=3)
    return found[-1], _load(mesh, state, others, found[-1])


def _load(mesh: DeviceMesh, state: Mapping[str, Any], others: Mapping[str, Any], path: Path) -> dict[str, Any]:
    params, device, size = state["params"], device_of(mesh.device_type), mesh.size()
    with failing_together(mesh, "Trainer.load"):
        notes, sizes, ranks = directories.described(path)
        if missing := [name for name in others if name not in notes]:
            raise ShardError(f"Trainer.load: '{path}' was saved without {missing}: leave out; it has {sorted(notes)}")
        for name in others:
            if (each := ranks[f"{OTHERS}.{name}.each"]) not in (0, size):
                why = f"the state of '{name}' is that of each of {each} ranks, and {size} are here"
                raise ShardError(f"Trainer.load: {why}; load it without {name}=, and skip trainer.samples samples")
        like = {name: memory_for(notes[name], name, params, sizes) for name in others}
        random_states = [PerRank(x) for x in _random_states(device)]
    if left := [name for name in notes if name not in others and name.isidentifier()]:
        asked = f"load(..., {', '.join(f'{name}=...' for name in left)})"
        warnings.warn(f"Trainer.load: '{path}' also has {left}, which nobody asked for: {asked}", stacklevel=4)
    wanted = {**state, OTHERS: like | dict.fromkeys(left, ...)}
    if (each := ranks["random.0"]) == size:
        wanted["random"] = random_states
    elif each:
        why = f"'{path}' has random states of {each} ranks, and {size} are here, which keep their own"
        warnings.warn(f"Trainer.load: {why}", stacklevel=4)
    whole = [top for top in ("params", "optimizer") if any(is_in(name, top) for name in sizes)]
    read = directories.load(path, wanted, mesh, whole=whole, unexpected="ignore")
    with failing_together(mesh, "Trainer.load"):
        for name, other in others.items():
            load_into(other, name, notes[name], read[OTHERS][name], params)
    if "random" in read:
        _set_random_states(device, [x.tensor for x in read["random"]])
    return read


def _random_states(device: torch.device) -> list[Tensor]:
    """Where the generators of torch, of Python and of NumPy are."""
    _, numbers, spare = random.getstate()
    of_numpy: Any = numpy.random.get_state(legacy=False)
    if of_numpy["bit_generator"] != "MT19937":
        raise ShardError("Trainer: NumPy's global generator is none of its own kind, MT19937, whose state is saved")
    own = (
        [*numbers, spare is not None, spare or 0.0],
        [*of_numpy["state"]["key"], of_numpy["state"]["pos"], of_numpy["has_gauss"], of_numpy["gauss"]],
    )
    return [*random_states(device), *(torch.tensor(x, dtype=torch.float64, device="cpu") for x in own)]


def _set_random_states(device: torch.device, states: Sequence[Tensor]) -> None:
    *of_torch, of_python, of_numpy = states
    set_random_states(device, of_torch)
    *numbers, has_spare, spare = of_python.tolist()
    random.setstate((3, tuple(map(int, numbers)), spare if has_spare else None))
    *keys, at, has_spare, spare = of_numpy.tolist()
    numpy.random.set_state(("MT19937", numpy.array(keys, dtype=numpy.uint32), int(at), int(has_spare), spare))
