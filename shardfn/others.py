"""Other objects in a checkpoint of a `Trainer`: torch optimizers, schedules, scalers. Layer 5.

What a torch optimizer has for each parameter is a tree like the parameters, and saved as one: under the model's names
and in its shapes, so that it can be loaded on another mesh. The rest is tensors and JSON, see `core/states.py`.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardfn._torch import pytree
from shardfn.core.errors import ShardError
from shardfn.core.states import joined, memory_of, split
from shardfn.core.tree import Params, map_local

OTHERS = "others"  # where a checkpoint has their tensors


class Saved:
    """What is saved of an object: `tensors`, a tree for a checkpoint, and `notes`, for JSON."""

    def __init__(self, other: Any, name: str, params: Params) -> None:
        """`params` are those of the trainer."""
        state, trees = other.state_dict(), {}
        if isinstance(other, torch.optim.Optimizer):
            state, trees = _apart(state, names_of(other, params), params)
        _refuse_parts(other, state)
        rest: dict[str, Tensor] = {}
        skeleton = split(state, name, rest)
        self.tensors: dict[str, Any] = {"rest": rest, "trees": trees}
        dtypes = {key: str(next(iter(tree.values())).dtype).removeprefix("torch.") for key, tree in trees.items()}
        self.notes = {"state": skeleton, "trees": {key: [dtypes[key], list(tree)] for key, tree in trees.items()}}


def _refuse_parts(other: object, state: Any) -> None:
    """What is split as no parameter is could not be laid out again.

    Raises:
        ShardError: there is such a tensor.
    """
    for path, value in pytree.tree_flatten_with_path(state)[0]:
        if isinstance(value, DTensor):
            raise ShardError(
                f"Trainer.save: {type(other).__name__} has a DTensor of shape {tuple(value.shape)} at "
                f"{pytree.keystr(path)}, which is no state of a parameter of that shape. Save it by "
                "torch.distributed.checkpoint; averages of parameters are Trainer(ema=...)"
            )


def names_of(optimizer: torch.optim.Optimizer, params: Params) -> dict[int, str]:
    """Number of a parameter in an optimizer -> its name.

    Raises:
        ShardError: it is not one of the trainer's.
    """
    known = {id(leaf): name for name, leaf in params.items()}
    found = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(id(parameter) not in known for parameter in found):
        raise ShardError(
            f"Trainer: {type(optimizer).__name__} has parameters that are not the trainer's; make it from "
            "trainer.parameters()"
        )
    return {number: known[id(parameter)] for number, parameter in enumerate(found)}


def _apart(state: Any, names: Mapping[int, str], params: Params) -> tuple[Any, dict[str, Params]]:
    """A state dict by names without what is laid out as the parameters, and that as trees by key."""
    trees: dict[str, dict[str, Tensor]] = defaultdict(dict)
    rest: dict[str, dict[str, Any]] = {}
    for number, values in state["state"].items():
        name = names[number]
        alike = {k: v for k, v in values.items() if isinstance(v, DTensor) and v.shape == params[name].shape}
        rest[name] = {key: value for key, value in values.items() if key not in alike}
        for key, value in alike.items():
            trees[key][name] = value
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]]
    return {"state": rest, "param_groups": groups}, {key: params.like(leaves) for key, leaves in trees.items()}


def memory_for(notes: Any, name: str, params: Params) -> dict[str, Any]:
    """Memory for the `tensors` of a `Saved`."""
    trees = {}
    for key, (dtype, leaves) in notes["trees"].items():
        own = params.like((leaf, params[leaf].detach()) for leaf in leaves)
        trees[key] = map_local(lambda x, dtype=dtype: torch.zeros_like(x, dtype=getattr(torch, dtype)), own)
    return {"rest": memory_of(notes["state"], name), "trees": trees}


def load_into(other: Any, name: str, notes: Any, tensors: Mapping[str, Any], params: Params) -> None:
    """Give an object the state that was saved."""
    state = joined(notes["state"], name, tensors["rest"])
    if isinstance(other, torch.optim.Optimizer):
        numbers = {own: number for number, own in names_of(other, params).items()}
        for key, tree in tensors["trees"].items():
            for leaf, value in tree.items():
                state["state"][leaf][key] = value
        groups = _in_the_order_of(other, name, numbers, state["param_groups"])
        state = {"state": {numbers[leaf]: values for leaf, values in state["state"].items()}, "param_groups": groups}
    other.load_state_dict(state)


def _in_the_order_of(
    optimizer: torch.optim.Optimizer, name: str, numbers: Mapping[str, int], saved: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Saved groups with their parameters in the optimizer's order: torch goes by place.

    Raises:
        ShardError: a group has other parameters.
    """
    now = [group["params"] for group in optimizer.state_dict()["param_groups"]]
    if [{numbers.get(leaf) for leaf in group["params"]} for group in saved] != list(map(set, now)):
        raise ShardError(
            f"Trainer.load: '{name}' was saved with parameters in other groups, {[group['params'] for group in saved]}"
        )
    return [{**group, "params": own} for group, own in zip(saved, now, strict=True)]
