"""Step time against PyTorch's own FSDP2 on the same model, weights and data, in one interleaved run.

    torchrun --standalone --nproc-per-node 2 examples/benchmarks/step_time.py --tokens 64

Every contender makes one step in turn (A B C A B C ...), so that a busy machine slows all alike; what counts is the
ratio within a round, and its median over rounds. Losses must agree, or the run fails. Rank 0 prints a markdown table.
With `--mesh fsdp=2,tp=2` the peer is FSDP2 with `parallelize_module`.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardfn as sf

RULES = {
    "layers.*.{wq,wk,wv}.weight": "(heads@tp d) c@fsdp",
    "layers.*.wo.weight": "c@fsdp (heads@tp d)",
    "layers.*.{w1,w3}.weight": "ff@tp c@fsdp",
    "layers.*.w2.weight": "c@fsdp ff@tp",
}


class Layer(nn.Module):
    """Pre-norm attention and SwiGLU."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        hidden = 8 * width // 3 // 64 * 64
        self.w1, self.w3 = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (rearrange(w(h), "b s (h d) -> b h s d", d=self.head) for w in (self.wq, self.wk, self.wv))
        x = x + self.wo(rearrange(F.scaled_dot_product_attention(q, k, v, is_causal=True), "b h s d -> b s (h d)"))
        h = self.norm2(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Decoder(nn.Module):
    """The model of the comparison: about 30M parameters by default."""

    def __init__(self, width: int, layers: int, vocab: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Layer(width, 64) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make_model(args: argparse.Namespace) -> Decoder:
    """The same weights for every contender, on every rank."""
    torch.manual_seed(0)
    return Decoder(args.width, args.layers, args.vocab)


def shardfn_step(args: argparse.Namespace, mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    """Forward, backward and AdamW with the functions of this library."""
    model, optimizer = make_model(args), sf.optim.adamw(1e-4)
    params = sf.shard(model, mesh, sf.Policy(rules=RULES if mesh["tp"].size() > 1 else {}, sizes={"d": 64}))
    state = optimizer.init(params)
    differentiate = sf.value_and_grad(lambda p, x: sf.cross_entropy(sf.apply(model, p, x), x))

    def step(x: Tensor) -> Tensor:
        nonlocal params, state
        loss, grads = differentiate(params, x)
        params, state = optimizer.step(params, grads, state)
        return loss

    return step


def fsdp2_step(args: argparse.Namespace, mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    """The same with `fully_shard` on every layer and the root, over `parallelize_module` where there is a tp axis."""
    model = make_model(args)
    if mesh["tp"].size() > 1:
        columns, rows = ColwiseParallel(), RowwiseParallel()
        styles: dict[str, Any] = dict.fromkeys(("wq", "wk", "wv", "w1", "w3"), columns) | {"wo": rows, "w2": rows}
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], styles)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["fsdp"])
    fully_shard(model, mesh=mesh["fsdp"])
    return _module_step(model, args, mesh)


def unsharded_step(args: argparse.Namespace, mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    """Every rank computes alone: what the step costs without any sharding."""
    return _module_step(make_model(args), args, mesh)


def _module_step(model: nn.Module, args: argparse.Namespace, mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, foreach=mesh["tp"].size() == 1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
        loss.backward()
        optimizer.step()
        return sf.collectives.pmean(loss.detach(), mesh, "fsdp")

    return step


CONTENDERS = {"shardfn": shardfn_step, "fsdp2": fsdp2_step, "unsharded": unsharded_step}


def measure(args: argparse.Namespace, mesh: DeviceMesh) -> dict[str, list[float]]:
    """Seconds of every contender in every round, after checks that the losses agree."""
    steps = {name: CONTENDERS[name](args, mesh) for name in args.contenders}
    index, _ = sf.data.rank(mesh)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(args.warmup + args.rounds):
        generator = torch.Generator().manual_seed(1000 * round_ + index)
        x = torch.randint(0, args.vocab, (args.batch, args.tokens), generator=generator)
        losses: dict[str, float] = {}
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            losses[name] = float(step(x))
            dist.barrier()
            if round_ >= args.warmup:
                seconds[name].append(time.perf_counter() - start)
        sharded = [loss for name, loss in losses.items() if name != "unsharded"]
        if max(sharded) - min(sharded) > 1e-3 * max(sharded):
            raise SystemExit(f"the losses of round {round_} differ: {losses}")
    return seconds


def report(args: argparse.Namespace, seconds: dict[str, list[float]]) -> str:
    """A markdown table: milliseconds, and shardfn's ratio to each peer with its quartiles."""
    rows = [f"{args.mesh}, {args.batch} x {args.tokens} tokens a rank, {args.rounds} rounds", ""]
    rows += ["| contender | median ms | shardfn / it | quartiles |", "|---|---|---|---|"]
    for name, times in seconds.items():
        ratios = sorted(mine / theirs for mine, theirs in zip(seconds["shardfn"], times, strict=True))
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append(f"| {name} | {1000 * statistics.median(times):.0f} | {middle:.2f} | {low:.2f} to {high:.2f} |")
    return "\n".join(rows)


def main(argv: list[str] | None = None) -> None:
    """Run the comparison that the options describe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="", help="axis sizes such as fsdp=2,tp=2; default fsdp=<all ranks>,tp=1")
    parser.add_argument("--batch", type=int, default=1, help="sequences a data rank")
    parser.add_argument("--tokens", type=int, default=64, help="tokens a sequence")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=12, help="rounds that count")
    parser.add_argument("--warmup", type=int, default=3, help="rounds that do not")
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--json", type=Path, help="also write the seconds of every round here")
    args = parser.parse_args(argv)
    axes = dict(part.split("=") for part in args.mesh.split(",")) if args.mesh else {"fsdp": "-1", "tp": "1"}
    mesh = sf.make_mesh("cpu", **{axis: int(size) for axis, size in axes.items()})
    args.mesh = ", ".join(f"{axis}={mesh[axis].size()}" for axis in axes)
    seconds = measure(args, mesh)
    if dist.get_rank() == 0:
        print(report(args, seconds))
        if args.json:
            args.json.write_text(json.dumps({"mesh": args.mesh, "tokens": args.tokens, "seconds": seconds}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
