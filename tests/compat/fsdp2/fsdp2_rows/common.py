"""The model that rows shard, the meshes, how it trains, and what they ask of it."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from models import MLPs
from rows import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardfn.comm import buckets
from shardfn.compat import fsdp2
from shardfn.testing import assert_trees_close

TABLE = Table()
row = TABLE.row
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
OURS, TORCHS = fsdp2, torch_fsdp  # two doors to the same names
DOORS: tuple[Any, ...] = (TORCHS, OURS)
KINDS = ("plain", "hybrid", "tensor")  # of meshes, on four ranks


class Net(MLPs):
    def __init__(self, seed: int = 1) -> None:
        torch.manual_seed(seed)
        super().__init__(6, 15)
        self.register_buffer("shift", torch.linspace(-1, 1, 6))
        self.said = "hello"

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids) + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(0, 1))  # 2-D: the output of a linear of 3-D ones is a view, of which torch warns

    def score(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        return self(ids).mean() * scale


def net(dtype: torch.dtype = FP64, seed: int = 1) -> Net:
    return Net(seed).to(dtype)


def meshes(kind: str) -> tuple[DeviceMesh, DeviceMesh]:
    """The data mesh, and the whole one."""
    ranks = dist.get_world_size()
    if kind == "hybrid":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
        return mesh, mesh
    if kind == "tensor":
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
        return mesh["dp"], mesh
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    return mesh, mesh


def split(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the blocks over `tp`, as a script does before it shards."""
    for block in model.get_submodule("blocks").children():
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def sharded(kind: str = "plain", door: Any = OURS, model: Any = None, **given: Any) -> Any:
    """`Net`, or what is given, with a group for each block."""
    model = net() if model is None else model
    data, mesh = meshes(kind)
    given.setdefault("mesh", data)
    if kind == "tensor":
        split(model, mesh)
    for block in model.blocks:
        door.fully_shard(block, **given)
    assert door.fully_shard(model, **given) is model
    return model


def tokens(step: int = 0) -> Tensor:
    """The ids of a whole batch."""
    return torch.randint(0, 16, (8, 4), generator=torch.Generator().manual_seed(100 + step))


def mine(ids: Tensor, kind: str = "plain") -> Tensor:
    """This data rank's part of a batch."""
    ranks, own = dist.get_world_size(), dist.get_rank()
    return ids.chunk(ranks // 2)[own // 2] if kind == "tensor" else ids.chunk(ranks)[own]


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    out = model(ids)
    return (out.float() if out.dtype == BF16 else out).square().mean()


def values(model: nn.Module) -> dict[str, Tensor]:
    """Name -> whole value of the parameters."""
    return {name: whole(parameter).detach().clone() for name, parameter in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Name -> whole value of the gradients that there are."""
    return {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def whole(value: Any) -> Any:
    return buckets.whole(value) if isinstance(value, DTensor) else value


def whole_tree(tree: Any) -> Any:
    """The same nested dicts and lists, with whole tensors."""
    if isinstance(tree, dict):
        return {key: whole_tree(value) for key, value in tree.items()}
    return [whole_tree(value) for value in tree] if isinstance(tree, list | tuple) else whole(tree)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01)


def trained(
    model: Any, kind: str = "plain", steps: int = 2, loss: Callable[[nn.Module, Tensor], Tensor] = loss_of
) -> torch.optim.Optimizer:
    """Train with AdamW on this rank's part of each batch, or on all of it where there are no shards."""
    optimizer = adamw(model)
    everything = not any(isinstance(p, DTensor) for p in model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, tokens(step) if everything else mine(tokens(step), kind)).backward()
        optimizer.step()
    return optimizer


def trains(model: Any, kind: str = "plain", plain: Any = None, **kwargs: Any) -> None:
    """Require that a sharded model trains as the plain one does in one process."""
    plain = net() if plain is None else plain
    trained(model, kind, **kwargs)
    trained(plain, **kwargs)
    assert_trees_close(values(model), values(plain), rtol=0, atol=1e-9)


def both(kind: str = "plain", dtype: torch.dtype = FP64, **given: Any) -> tuple[Any, Any]:
    """torch's sharded model, and ours."""
    torchs, ours = (sharded(kind, door, net(dtype), **given) for door in DOORS)
    return torchs, ours


def said_by(call: Callable[[], object]) -> tuple[str, str]:
    """The class and the text of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def same_error(call: Callable[[Any], object], kind: type[Exception], words: str) -> None:
    """Require the same class and opening words of torch's error and of ours."""
    for door in DOORS:
        name, text = said_by(lambda door=door: call(door))
        assert (name, text[: len(words)]) == (kind.__name__, words), f"{door.__name__}: {name}: {text}"


def refuses(call: Callable[[], object], kind: type[Exception], *words: str) -> None:
    """Require an error of this class that has these words."""
    name, text = said_by(call)
    assert name == kind.__name__ and all(each in text for each in words), f"{name}: {text}"


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in copy.deepcopy(model).state_dict().items()}


def placements(model: nn.Module) -> dict[str, Any]:
    return {name: p.placements for name, p in model.named_parameters() if isinstance(p, DTensor)}


def first_rank() -> bool:
    return dist.get_rank() == 0
