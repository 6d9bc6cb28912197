"""The manner of torch's FSDP2 example: the meta device, prefetching by hand, a checkpointer with two interfaces.

torchrun --standalone --nproc-per-node 2 fsdp2_checkpointer.py result.pt     # rank r writes result.pt.r
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _init_optim_state,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

STEPS, WORDS, WIDTH = 4, 21, 10


class TransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.wqkv, self.wo = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.w1, self.w2 = nn.Linear(WIDTH, 17), nn.Linear(17, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.wqkv(self.attention_norm(x)).chunk(3, -1)
        x = x + self.wo(F.scaled_dot_product_attention(q, k, v))
        return x + self.w2(F.gelu(self.w1(self.ffn_norm(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings, self.pos_embeddings = nn.Embedding(WORDS, WIDTH), nn.Embedding(8, WIDTH)
        self.layers = nn.ModuleList(TransformerBlock() for _ in range(3))
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens) + self.pos_embeddings(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


class Checkpointer:
    """Whole weights and states in two files: by torch's state-dict functions, or DTensor by DTensor."""

    def __init__(self, folder: Path, dcp_api: bool) -> None:
        self.folder, self.dcp_api = folder / ("dcp_api" if dcp_api else "dtensor_api"), dcp_api

    @property
    def last(self) -> Path:
        """A folder of its own for each time that something is saved: files of the last are still mapped."""
        return max(self.folder.iterdir())

    def load_model(self, model: nn.Module) -> None:
        full = torch.load(self.last / "model.pt", mmap=True, weights_only=True, map_location="cpu")
        if self.dcp_api:
            set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
            return
        on_meta, sharded = model.state_dict(), {}
        for name, whole in full.items():
            like: Any = on_meta[name]
            sharded[name] = nn.Parameter(distribute_tensor(whole, like.device_mesh, like.placements))
        model.load_state_dict(sharded, strict=False, assign=True)  # nothing can be copied into a meta tensor

    def load_optim(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        full = torch.load(self.last / "optim.pt", mmap=True, weights_only=True, map_location="cpu")
        if self.dcp_api:
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_optimizer_state_dict(model, optimizer, full, options=options)
            return
        _init_optim_state(optimizer)
        own = optimizer.state_dict()
        for group, saved in zip(own["param_groups"], full["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
            for mine, theirs in zip(group["params"], saved["params"], strict=True):
                for key, whole in full["state"][theirs].items():
                    like = own["state"][mine][key]
                    sharded = isinstance(like, DTensor)
                    value = distribute_tensor(whole, like.device_mesh, like.placements) if sharded else whole
                    own["state"][mine][key] = value
        optimizer.load_state_dict(own)

    def _whole_states(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        if self.dcp_api:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            states = get_optimizer_state_dict(model, optimizer, options=options)
            return [get_model_state_dict(model, options=options), states]
        weights = {name: whole(value) for name, value in model.state_dict().items()}
        own = optimizer.state_dict()
        states = {key: {name: whole(x) for name, x in values.items()} for key, values in own["state"].items()}
        return [weights, {"state": states, "param_groups": own["param_groups"]}]

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        weights, states = self._whole_states(model, optimizer)
        if dist.get_rank() == 0:
            new = self.folder / str(len(list(self.folder.glob("*"))))
            new.mkdir(parents=True)
            torch.save(weights, new / "model.pt")
            torch.save(states, new / "optim.pt")
        dist.barrier()


def whole(value: Any) -> Any:
    return value.full_tensor().cpu() if isinstance(value, DTensor) else value


def set_prefetching(model: Any, count: int) -> None:
    layers = list(model.layers)
    for index, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 1 + count])
        layer.set_modules_to_backward_prefetch(layers[max(0, index - count) : index][::-1])


def build() -> Any:
    with torch.device("meta"):
        model = Transformer()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert isinstance(model, Transformer)
    assert isinstance(model, FSDPModule)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.placements == (Shard(0),)
        assert parameter.is_meta
    set_prefetching(model, 2)
    return model


def fill(model: nn.Module) -> None:
    """What `reset_parameters` would do, but the same on any number of ranks."""
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        value = 0.3 * torch.randn(parameter.shape, generator=generator)
        like: Any = parameter
        parameter.data.copy_(distribute_tensor(value, like.device_mesh, like.placements))


def main(out: str) -> None:
    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    found: dict[str, Any] = {"losses": [], "norms": [], "dtypes": [], "shapes": []}
    for dcp_api in (False, True):
        checkpointer = Checkpointer(Path(f"{out}.checkpoints"), dcp_api)
        for resumes in (False, True):
            model = build()
            if resumes:
                checkpointer.load_model(model)
            else:
                fill(model)
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-5)
            if resumes:
                checkpointer.load_optim(model, optimizer)
            for step in range(STEPS):
                model.unshard()
                torch.manual_seed(10 * (step + STEPS * resumes) + dist.get_rank())
                tokens = torch.randint(0, WORDS, (3, 8))
                loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
                found["losses"].append(loss.item())
                found["norms"].append(whole(norm).item())
            checkpointer.save(model, optimizer)
            model.unshard()
            found["shapes"].append([list(parameter.shape) for parameter in model.parameters(recurse=False)])
            model.reshard()
            files = [torch.load(checkpointer.last / name) for name in ("model.pt", "optim.pt")]
            found[f"saved {dcp_api} {resumes}"] = files
    torch.save(found, f"{out}.{dist.get_rank()}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
