"""A byte-level decoder with a mixture of experts in every layer, over a 2 x 2 (fsdp, ep) mesh.

    torchrun --standalone --nproc-per-node 4 examples/moe.py                # 4 ranks on CPU, half a minute at most
    torchrun --standalone --nproc-per-node 4 examples/moe.py --ep 4         # two experts a rank

Attention, routers and the rest are data-parallel over both axes. Weights of experts are split over `ep` by number and
over `fsdp` within; tokens go to the ranks that have their experts, and back. The text is that of `train_lm.py`.
"""

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lm.model import Attention, ModelConfig, rotary_angles
from lm.text import Batches, load_corpus
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf

EXPERTS, CHOSEN = 8, 2
SIZES = ModelConfig(dim=64, layers=2, heads=4, kv_heads=2, ff=128)
POLICY = sf.Policy(
    batch=("fsdp", "ep"),  # every rank has tokens of its own
    rules={
        "layers.*.mlp.experts.{gate,up}": "experts@ep ff c@fsdp",  # all the rest: over fsdp and ep, by default
        "layers.*.mlp.experts.down": "experts@ep c@fsdp ff",
    },
    compute={"layers.*.mlp.experts": sf.policies.Experts("ep")},
    regather=False,  # two layers of gathered weights are little: they stay for the backward
)


class Experts(nn.Module):
    """SwiGLU layers in three weights; written for one device."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c, ff = config.dim, config.ff
        self.gate, self.up = (nn.Parameter(torch.randn(EXPERTS, ff, c) * c**-0.5) for _ in range(2))
        self.down = nn.Parameter(torch.randn(EXPERTS, c, ff) * (ff * 2 * config.layers) ** -0.5)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Tokens `[n c]`, their experts `[n k]` and how much each counts `[n k]`, to `[n c]`."""
        out = torch.zeros_like(x)
        for expert, (gate, up, down) in enumerate(zip(self.gate, self.up, self.down, strict=True)):
            token, slot = torch.where(ids == expert)
            if len(token):
                h = x[token]
                made = F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)
                out = out.index_add(0, token, made * weights[token, slot, None])
        return out


class Mixture(nn.Module):
    """A router and its experts."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(config.dim, EXPERTS, bias=False), Experts(config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map `[b s c]` to `[b s c]`; with what the routers say `[b*s e]`, and each expert's share of tokens `[e]`."""
        flat = x.flatten(0, 1)
        scores = self.router(flat).softmax(-1)
        weights, ids = scores.topk(CHOSEN)
        load = torch.bincount(ids.flatten(), minlength=EXPERTS) / ids.numel()
        out = self.experts(flat, ids, weights / weights.sum(-1, keepdim=True))
        return out.view_as(x), scores, load


class Block(nn.Module):
    """One layer: attention, then the mixture."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm1, self.attn = nn.RMSNorm(config.dim), Attention(config)
        self.norm2, self.mlp = nn.RMSNorm(config.dim), Mixture(config)

    def forward(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map `[b s c]` to `[b s c]`, with the balance of this layer and its loads."""
        x = x + self.attn(self.norm1(x), angles)
        out, scores, load = self.mlp(self.norm2(x))
        return x + out, EXPERTS * (scores.mean(0) * load).sum(), load  # Switch Transformer, Fedus et al. 2021


class Decoder(nn.Module):
    """Bytes `[b s]` to logits `[b s vocab]`, the mean balance of the layers, and the last one's loads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.emb = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm, self.head = nn.RMSNorm(config.dim), nn.Linear(config.dim, config.vocab, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As the class says."""
        x, angles = self.emb(tokens), rotary_angles(tokens.shape[1], self.head_dim, tokens.device)
        balances, load = [], torch.zeros(EXPERTS)
        for layer in self.layers:
            x, balance, load = layer(x, angles)
            balances.append(balance)
        return self.head(self.norm(x)), torch.stack(balances).mean(), load


def train(ep: int = 2, steps: int = 40, balance: float = 0.1) -> list[float]:
    """Train on all ranks; returns the loss of every step."""
    mesh = sf.make_mesh("cpu", fsdp=-1, ep=ep)
    torch.manual_seed(0)
    model = Decoder(SIZES)
    params = sf.shard(model, mesh, POLICY)
    optimizer = sf.optim.adamw(3e-3)
    state = optimizer.init(params)
    batches = Batches(load_corpus().train, batch=16, length=64)

    def loss_fn(params: sf.Params, x: Tensor, y: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        logits, uneven, load = sf.apply(model, params, x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        return loss + balance * uneven, (loss.detach(), load)

    step_fn, losses = sf.value_and_grad(loss_fn, has_aux=True), []
    for step in range(steps):
        x, y = sf.data.local_batch(batches(step), mesh, POLICY)
        (_, (loss, load)), grads = step_fn(params, x, y)
        params, state = optimizer.step(params, grads, state)
        losses.append(loss)  # of this rank: asking all ranks in every step would make every step wait for them
        if (step + 1) % 10 == 0:
            now, *shares = over_ranks(torch.cat((loss[None], load)), mesh).tolist()
            if dist.get_rank() == 0:
                told = " ".join(f"{share:.0%}" for share in shares)
                print(f"step {step + 1}: {now:.3f} nats a byte; tokens of each expert: {told}", flush=True)
    return over_ranks(torch.stack(losses), mesh).tolist()


def over_ranks(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """The mean over all ranks, each of which has other tokens."""
    for axis in ("fsdp", "ep"):
        value = sf.collectives.pmean(value, mesh, axis)
    return value


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ep", type=int, default=2, help="over how many ranks experts are (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="how many steps (default: %(default)s)")
    options = parser.parse_args(argv)
    train(options.ep, options.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
