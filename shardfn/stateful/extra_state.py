"""Other objects in a checkpoint of a `Trainer`: torch optimizers, schedules, scalers.

What a torch optimizer has for each parameter is a tree like the parameters, and saved as one: under the model's names
and in its shapes, so that it can be loaded on another mesh. The rest is tensors and JSON, since a checkpoint must not
need pickle to be read:

    {"step": tensor, "lr": 0.1}   ->   {"name.step": tensor}  and  {"dict": [["step", {"tensor": ...}], ["lr", 0.1]]}
"""

import base64
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardfn._torch import bytes_of, pytree
from shardfn.checkpoint import PerRank, from_json, hash_of, of_rank, to_json
from shardfn.comm import digest
from shardfn.notation import ShardError
from shardfn.params import Params

OTHERS = "others"  # where a checkpoint has their tensors


def to_save(other: Any, name: str, params: Params) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is saved of an object: a tree of tensors for a checkpoint, and notes, for JSON.

    Args:
        other: the object.
        name: that the caller has given it.
        params: the trainer's.

    Raises:
        ShardError: a tensor that is split as no parameter is, which could not be laid out again.
    """
    state, trees = other.state_dict(), {}
    if isinstance(other, torch.optim.Optimizer):
        state, trees = _apart(state, names_of(other, params), params)
    for path, value in pytree.tree_flatten_with_path(state)[0]:
        if isinstance(value, DTensor):
            what = f"{type(other).__name__} has a DTensor of shape {tuple(value.shape)} at {pytree.keystr(path)}"
            instead = "Save it by torch.distributed.checkpoint; averages of parameters are Trainer(ema=...)"
            raise ShardError(f"Trainer.save: {what}, which is no state of a parameter of that shape. {instead}")
    rest: dict[str, Tensor] = {}
    skeleton = to_json(state, name, rest)
    described = {key: {n: str(x.dtype).removeprefix("torch.") for n, x in tree.items()} for key, tree in trees.items()}
    return {"rest": rest, "trees": trees}, {"state": skeleton, "trees": described}


def digest_of(tensors: Mapping[str, Any], notes: Any) -> int:
    """A hash of what `to_save` gave but for trees."""
    return digest([json.dumps(notes["state"]), *(f"{path} {hash_of(x)}" for path, x in tensors["rest"].items())])


def of_each_rank(tensors: Mapping[str, Any], notes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `to_save` gave, as that of this rank alone: text, since other ranks may have other tensors."""
    rest = {path: base64.b64encode(bytes_of(x.cpu()).numpy().data).decode() for path, x in tensors["rest"].items()}
    text = json.dumps([notes["state"], rest]).encode()
    return {"each": PerRank(torch.frombuffer(bytearray(text), dtype=torch.uint8))}, {"each": True}


def _of_this_rank(text: Tensor, name: str) -> Any:
    """The state that `of_each_rank` was given."""
    skeleton, rest = json.loads(text.numpy().tobytes())

    def tensor(path: str, described: Mapping[str, Any]) -> Tensor:
        flat = torch.frombuffer(bytearray(base64.b64decode(rest[path]) or b"\0"), dtype=torch.uint8)
        x = torch.empty(described["tensor"], dtype=getattr(torch, described["dtype"]), device="cpu")
        x.view(-1).view(torch.uint8).copy_(flat[: x.nbytes])
        return x

    return from_json(skeleton, name, tensor)


def names_of(optimizer: torch.optim.Optimizer, params: Params) -> dict[int, str]:
    """Number of a parameter in an optimizer -> its name.

    Raises:
        ShardError: it is not one of the trainer's.
    """
    known = {id(leaf): name for name, leaf in params.items()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(id(parameter) not in known for parameter in parameters):
        why = f"{type(optimizer).__name__} has parameters that are not the trainer's"
        raise ShardError(f"Trainer: {why}; make it from trainer.parameters()")
    return {number: known[id(parameter)] for number, parameter in enumerate(parameters)}


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


def memory_for(notes: Any, name: str, params: Params, shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Memory for the tensors that `to_save` gave with these notes; `shapes` of all that is in the checkpoint."""
    if "each" in notes:
        shape = shapes.get(of_rank(f"{OTHERS}.{name}.each"), (0,))
        return {"each": PerRank(torch.empty(shape, dtype=torch.uint8, device="cpu"))}
    trees = {}
    for key, dtypes in notes["trees"].items():
        leaves = {leaf: params[leaf].detach() for leaf in dtypes}
        trees[key] = params.like((x, torch.zeros_like(leaves[x], dtype=getattr(torch, dtypes[x]))) for x in leaves)
    rest: dict[str, Tensor] = {}

    def make(path: str, described: Mapping[str, Any]) -> Tensor:
        rest[path] = torch.empty(described["tensor"], dtype=getattr(torch, described["dtype"]), device="cpu")
        return rest[path]

    from_json(notes["state"], name, make)
    return {"rest": rest, "trees": trees}


def load_into(other: Any, name: str, notes: Any, tensors: Mapping[str, Any], params: Params) -> None:
    """Give an object the state that was saved.

    Raises:
        ShardError: a group of an optimizer has other parameters.
    """
    if "each" in notes:
        return other.load_state_dict(_of_this_rank(tensors["each"].tensor, name))
    state = from_json(notes["state"], name, lambda path, _: tensors["rest"][path])
    if isinstance(other, torch.optim.Optimizer):
        numbers = {leaf: number for number, leaf in names_of(other, params).items()}
        for key, tree in tensors["trees"].items():
            for leaf, value in tree.items():
                state["state"][leaf][key] = value
        saved, now = state["param_groups"], [group["params"] for group in other.state_dict()["param_groups"]]
        if [{numbers.get(leaf) for leaf in group["params"]} for group in saved] != list(map(set, now)):
            held = [group["params"] for group in saved]
            raise ShardError(f"Trainer.load: '{name}' was saved with parameters in other groups, {held}")
        # parameters in the optimizer's order: torch goes by place
        groups = [{**group, "params": order} for group, order in zip(saved, now, strict=True)]
        state = {"state": {numbers[leaf]: values for leaf, values in state["state"].items()}, "param_groups": groups}
    other.load_state_dict(state)
