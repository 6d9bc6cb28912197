"""The manner of Lightning's FSDP strategy: a model that wraps its own parts, checkpoints of both kinds, states rekeyed.

torchrun --standalone --nproc-per-node 2 lightning_strategy.py result.pt     # rank r writes result.pt.r
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, enable_wrap, wrap

STEPS, CLASSES, WIDTH = 4, 5, 10


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 17), nn.Linear(17, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class LitModel(nn.Module):
    """A module with the hooks that a trainer calls."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone: Any = None
        self.logged: list[float] = []

    def configure_model(self) -> None:
        if self.backbone is not None:
            return  # the hook may be called again
        self.stem = nn.Linear(6, WIDTH)
        self.backbone = nn.Sequential(*(wrap(Layer(WIDTH)) for _ in range(2)), wrap(nn.BatchNorm1d(WIDTH)))
        self.head = wrap(nn.Linear(WIDTH, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(self.stem(x)))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.logged.append(loss.item())
        return loss


class ForwardOf(nn.Module):
    """What the root instance wraps, so that a step of the model goes through its forward."""

    def __init__(self, lit: LitModel) -> None:
        super().__init__()
        self.lit = lit

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.lit.training_step(batch)


class FSDPStrategy:
    def __init__(self, use_orig_params: bool) -> None:
        precision = MixedPrecision(torch.float32, torch.float32, torch.float32)
        self.kwargs: dict[str, Any] = {"use_orig_params": use_orig_params, "mixed_precision": precision}
        self.kwargs |= {"device_id": torch.device("cpu"), "auto_wrap_policy": ModuleWrapPolicy({nn.BatchNorm1d})}

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        with enable_wrap(wrapper_cls=FSDP, **self.kwargs):
            yield

    def setup(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.lit = LitModel()
        with self.model_sharded_context():
            self.lit.configure_model()
            self.lit.configure_model()
        if any(isinstance(module, FSDP) for module in self.lit.modules()):
            self.kwargs.pop("auto_wrap_policy", None)  # a model that wraps its parts leaves nothing to a policy
        self.model: Any = FSDP(ForwardOf(self.lit), **self.kwargs)
        self.optimizer = self.configure_optimizers()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        named = dict(self.model.named_parameters())
        if not self.kwargs["use_orig_params"]:  # flat ones have no names to go by
            return torch.optim.AdamW(named.values(), lr=1e-2, eps=1e-4)
        decay = [p for name, p in named.items() if name.endswith("weight")]
        rest = [p for name, p in named.items() if not name.endswith("weight")]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)

    def fit(self, first: int, found: dict[str, Any]) -> None:
        self.model.train()
        for step in range(first, first + STEPS):
            torch.manual_seed(10 * step + dist.get_rank())
            parts = [(torch.randn(4, 6), torch.randint(0, CLASSES, (4,))) for _ in range(2)]
            for index, part in enumerate(parts):
                with nullcontext() if index == len(parts) - 1 else self.model.no_sync():
                    (self.model(part) / len(parts)).backward()
            found["norms"].append(self.model.clip_grad_norm_(max_norm=0.4, norm_type=2).item())
            self.optimizer.step()
            self.optimizer.zero_grad()
        found["losses"].append(self.lit.logged)

    def sharded_context(self) -> Any:
        kinds = ShardedStateDictConfig(offload_to_cpu=True), ShardedOptimStateDictConfig(offload_to_cpu=True)
        return FSDP.state_dict_type(self.model, StateDictType.SHARDED_STATE_DICT, *kinds)

    def full_context(self, rank0_only: bool = True) -> Any:
        kinds = FullStateDictConfig(rank0_only=rank0_only), FullOptimStateDictConfig(rank0_only=rank0_only)
        return FSDP.state_dict_type(self.model, StateDictType.FULL_STATE_DICT, *kinds)

    def save_sharded(self, folder: Path) -> None:
        with self.sharded_context():
            state = {"model": self.model.state_dict()}
            state["optimizer_0"] = FSDP.optim_state_dict(self.model, self.optimizer)
        dcp.save(state, storage_writer=FileSystemWriter(folder, single_file_per_rank=True))
        if dist.get_rank() == 0:
            torch.save({"epoch": 1, "lit": type(self.lit).__name__}, folder / "meta.pt")

    def load_sharded(self, folder: Path) -> None:
        with self.sharded_context():
            state = {"model": self.model.state_dict()}
            reader = FileSystemReader(folder)
            dcp.load(state, storage_reader=reader)
            self.model.load_state_dict(state["model"], strict=True)
            states = load_sharded_optimizer_state_dict(state["model"], "optimizer_0", reader)
            flattened = FSDP.optim_state_dict_to_load(self.model, self.optimizer, states["optimizer_0"])
            self.optimizer.load_state_dict(flattened)

    def save_full(self, path: Path) -> None:
        """The optimizer's states by the numbers of parameters, as a plain model would have them."""
        with self.full_context():
            weights, states = self.model.state_dict(), FSDP.optim_state_dict(self.model, self.optimizer)
        if dist.get_rank() == 0:
            states = FSDP.rekey_optim_state_dict(states, OptimStateKeyType.PARAM_ID, plain())
            torch.save({"state_dict": weights, "optimizer_states": [states]}, path)

    def load_full(self, path: Path) -> None:
        checkpoint = torch.load(path, mmap=True)
        with self.full_context(rank0_only=False):
            self.model.load_state_dict(checkpoint["state_dict"], strict=True)
            states = checkpoint["optimizer_states"][0]
            if isinstance(next(iter(states["state"])), int):
                states = FSDP.rekey_optim_state_dict(states, OptimStateKeyType.PARAM_NAME, plain())
            flattened = FSDP.optim_state_dict_to_load(self.model, self.optimizer, states)
            self.optimizer.load_state_dict(flattened)

    def whole_weights(self) -> dict[str, Tensor]:
        with FSDP.summon_full_params(self.model, writeback=False, recurse=True):
            return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def halve(self) -> None:
        with FSDP.summon_full_params(self.model, writeback=True), torch.no_grad():
            self.lit.head.weight.mul_(0.5)
            self.lit.stem.bias.zero_()


def plain() -> ForwardOf:
    lit = LitModel()
    lit.configure_model()  # outside of `enable_wrap`, nothing is wrapped
    return ForwardOf(lit)


def without_prefix(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("_fsdp_wrapped_module.", ""): value for name, value in weights.items()}


def main(out: str) -> None:
    dist.init_process_group("gloo")
    found: dict[str, Any] = {"losses": [], "norms": [], "weights": [], "saved": [], "sharded": []}
    for use_orig_params in (False, True):
        folder, path = Path(f"{out}.sharded.{use_orig_params}"), Path(f"{out}.{use_orig_params}.ckpt")
        strategy = FSDPStrategy(use_orig_params)
        strategy.setup(0)
        strategy.fit(0, found)
        strategy.halve()
        strategy.fit(STEPS, found)
        strategy.save_sharded(folder)
        if not use_orig_params:  # of flat parameters, no names are left but in state dicts
            strategy.save_full(path)
        else:
            found["weights"].append(without_prefix(strategy.whole_weights()))
        dist.barrier()
        strategy.setup(1)
        strategy.load_sharded(folder)
        strategy.fit(2 * STEPS, found)
        if not use_orig_params:
            strategy.setup(2)
            strategy.load_full(path)
            strategy.fit(2 * STEPS, found)
            found["saved"].append(torch.load(path))
        if dist.get_rank() == 0:
            dcp_to_torch_save(folder, f"{out}.whole")
            found["sharded"].append(torch.load(f"{out}.whole", weights_only=False))
    torch.save(found, f"{out}.{dist.get_rank()}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
