"""A byte-level MLP trained with FSDP as in torch 1.11: positional arguments, `default_auto_wrap_policy`, `wrap`.

torchrun --standalone --nproc-per-node 4 fsdp_torch_1_11.py result.pt
python fsdp_torch_1_11.py --reference 4 result.pt    # one process, no FSDP, the whole batch
"""

import argparse
import contextlib
import functools
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # pattern 1
from torch.distributed.fsdp.fully_sharded_data_parallel import BackwardPrefetch, CPUOffload
from torch.distributed.fsdp.wrap import default_auto_wrap_policy, enable_wrap, wrap

CONTEXT, BATCH, STEPS = 6, 16, 4


class ByteMLP(nn.Module):
    """Predicts the next byte from the last `CONTEXT` ones."""

    def __init__(self, dim: int = 8, hidden: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, dim)
        # `wrap` does nothing outside of `enable_wrap`
        self.up = wrap(nn.Linear(CONTEXT * dim, hidden))
        self.body = wrap(nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, hidden)))
        self.head = nn.Linear(hidden, 256, bias=False)

    def forward(self, context: Tensor) -> Tensor:
        x = F.gelu(self.up(self.embed(context).flatten(1)))
        return self.head(x + self.body(x))


def get_batch(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """This rank's rows of a batch of windows of a text."""
    text = torch.tensor(list(b"the quick brown fox jumps over the lazy dog; pack my box with jugs. " * 4))
    generator = torch.Generator().manual_seed(1000 + step)
    starts = torch.randint(0, len(text) - CONTEXT, (BATCH,), generator=generator)
    windows = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()])
    windows = windows.chunk(world_size)[rank]
    return windows[:, :-1], windows[:, -1]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, world_size: int) -> list[float]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    device = next(model.parameters()).device
    losses = []
    model.train()
    for step in steps:
        inputs, targets = get_batch(step, rank, world_size)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(mean)
        losses.append(mean.item() / world_size)
        if rank == 0:
            print(f"step {step} loss {losses[-1]:.6f}")
    return losses


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description="FSDP as in torch 1.11")
    parser.add_argument("out")
    parser.add_argument("--reference", type=int, metavar="RANKS", help="one process, without FSDP")
    args = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    sharded = not args.reference
    if sharded:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank() if sharded else 0
    world_size = dist.get_world_size() if sharded else 1
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    model_file, optimizer_file = f"{args.out}.model", f"{args.out}.optimizer.{rank}"

    # from scratch, units chosen by size
    torch.manual_seed(0)
    model = ByteMLP().to(device)
    my_auto_wrap_policy = functools.partial(default_auto_wrap_policy, min_num_params=500)
    if sharded:
        model = FSDP(model, None, None, my_auto_wrap_policy, BackwardPrefetch.BACKWARD_PRE)
        assert isinstance(model.body[0], FSDP)
    optimizer = make_optimizer(model)
    losses = train(model, optimizer, range(STEPS), world_size)
    with model.summon_full_params() if sharded else contextlib.nullcontext():  # pattern 9, on the instance
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        with torch.no_grad():
            model.head.weight.mul_(0.5)
    if sharded:
        dist.barrier()
    states = model.state_dict()
    if rank == 0:
        torch.save(states, model_file)
    torch.save(optimizer.state_dict(), optimizer_file)  # every rank its own part
    if sharded:
        dist.barrier()

    # on, with the weights in host memory
    torch.manual_seed(1)
    model = ByteMLP()
    if sharded:
        model = FSDP(
            model,
            None,
            CPUOffload(offload_params=True),  # pattern 17
            my_auto_wrap_policy,
            BackwardPrefetch.BACKWARD_POST,
        )
    model.load_state_dict(torch.load(model_file))
    optimizer = make_optimizer(model)
    optimizer.load_state_dict(torch.load(optimizer_file))
    losses += train(model, optimizer, range(STEPS, 2 * STEPS), world_size)
    states = model.state_dict()

    # on, with units chosen by hand and a new optimizer
    torch.manual_seed(2)
    fsdp_params = {"cpu_offload": CPUOffload(offload_params=False), "backward_prefetch": None}
    with enable_wrap(wrapper_cls=FSDP, **fsdp_params) if sharded else contextlib.nullcontext():
        model = wrap(ByteMLP())
    assert isinstance(model, FSDP) == sharded
    assert isinstance(model.body, FSDP) == sharded
    model.load_state_dict(states)
    losses += train(model, make_optimizer(model), range(2 * STEPS, 3 * STEPS), world_size)

    # the same policy under the keyword of then
    torch.manual_seed(3)
    states, model = model.state_dict(), ByteMLP()
    if sharded:
        model = FSDP(model, fsdp_auto_wrap_policy=my_auto_wrap_policy)
    model.load_state_dict(states)
    losses += train(model, make_optimizer(model), range(3 * STEPS, 4 * STEPS), world_size)
    states = model.state_dict()
    assert {name: tuple(value.shape) for name, value in states.items()} == shapes
    if rank == 0:
        torch.save({"losses": losses, "params": {name: value.cpu() for name, value in states.items()}}, args.out)
    if sharded:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
