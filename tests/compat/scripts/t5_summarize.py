"""The manner of torch's T5 example: tied embeddings, a transformer policy, activation checkpoints, full state dicts.

torchrun --standalone --nproc-per-node 2 t5_summarize.py result.pt     # rank r writes result.pt.r
"""

import functools
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.optim.lr_scheduler import StepLR

EPOCHS, BATCHES, WORDS, WIDTH = 2, 2, 19, 9


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.v, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, memory: Tensor, causal: bool = False) -> Tensor:
        return self.o(F.scaled_dot_product_attention(self.q(x), self.k(memory), self.v(memory), is_causal=causal))


class T5Block(nn.Module):
    def __init__(self, is_decoder: bool) -> None:
        super().__init__()
        self.is_decoder = is_decoder
        self.attention, self.norm = Attention(), nn.RMSNorm(WIDTH)
        if is_decoder:
            self.cross, self.cross_norm = Attention(), nn.RMSNorm(WIDTH)
        self.wi, self.wo, self.ff_norm = nn.Linear(WIDTH, 14, bias=False), nn.Linear(14, WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, self.is_decoder)
        if memory is not None:
            x = x + self.cross(self.cross_norm(x), memory)
        return x + self.wo(F.relu(self.wi(self.ff_norm(x))))


class Stack(nn.Module):
    def __init__(self, embed_tokens: nn.Embedding, is_decoder: bool) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.block = nn.ModuleList(T5Block(is_decoder) for _ in range(2))

    def forward(self, tokens: Tensor, memory: Tensor | None = None) -> Tensor:
        x = self.embed_tokens(tokens)
        for block in self.block:
            x = block(x, memory)
        return x


class T5(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(WORDS, WIDTH)
        self.encoder, self.decoder = Stack(self.shared, False), Stack(self.shared, True)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.shared.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.lm_head(self.decoder(target, self.encoder(source)) * WIDTH**-0.5)


def batch_loss(model: Any, seed: int) -> Tensor:
    torch.manual_seed(seed)
    source, target = torch.randint(0, WORDS, (4, 6)), torch.randint(0, WORDS, (4, 5))
    logits = model(source, target[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())


def train(model: Any, optimizer: Any, epoch: int) -> float:
    model.train()
    fsdp_loss = torch.zeros(2)
    for index in range(BATCHES):
        optimizer.zero_grad()
        loss = batch_loss(model, 1000 * epoch + 10 * index + dist.get_rank())
        loss.backward()
        optimizer.step()
        fsdp_loss += torch.stack([loss.detach(), torch.ones(())])
    dist.all_reduce(fsdp_loss, op=dist.ReduceOp.SUM)
    return (fsdp_loss[0] / fsdp_loss[1]).item()


def validate(model: Any) -> float:
    model.eval()
    with torch.no_grad():
        loss = batch_loss(model, 77 + dist.get_rank())
    dist.all_reduce(loss)
    return loss.item()


def wrap(model: T5) -> Any:
    wrapped = FSDP(
        model,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block}),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        device_id=torch.device("cpu"),
        limit_all_gathers=False,
    )
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    apply_activation_checkpointing(
        wrapped, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: isinstance(module, T5Block)
    )
    return wrapped


def save(model: Any, optimizer: Any) -> dict[str, Any]:
    whole = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *whole):
        return {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}


def main(out: str) -> None:
    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    found: dict[str, Any] = {"losses": [], "validation": [], "saved": [], "rates": []}
    checkpoint = f"{out}.checkpoint"
    for run in range(2):  # the second goes on where the first ends
        torch.manual_seed(run)
        plain = T5()
        if run:
            plain.load_state_dict(torch.load(checkpoint)["model"])
        model = wrap(plain)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, eps=1e-5)
        if run:
            states = torch.load(checkpoint)["optim"]
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, states))
        scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
        for epoch in range(EPOCHS):
            found["losses"].append(train(model, optimizer, EPOCHS * run + epoch))
            found["validation"].append(validate(model))
            scheduler.step()
            found["rates"].append(scheduler.get_last_lr())
        found["saved"].append(save(model, optimizer))
        if dist.get_rank() == 0:
            torch.save(found["saved"][-1], checkpoint)
        dist.barrier()
    torch.save(found, f"{out}.{dist.get_rank()}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
