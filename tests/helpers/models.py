"""Small models that hold every case that has bitten somebody, for tests on ranks and in one process."""

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

import shardfn as sf

VOCAB = 24

RULES = {
    "layers.*.attn.wq.weight": "(heads@tp d) c@fsdp",
    "layers.*.attn.{wk,wv}.weight": "(kv@tp? d) c@fsdp",
    "layers.*.attn.wo.weight": "c@fsdp (heads@tp d)",
    "layers.*.{up,gate}.weight": "ff@tp c@fsdp",
    "layers.*.down.weight": "c@fsdp ff@tp",
    "emb.weight": "vocab@tp c@fsdp",
}


class Attention(nn.Module):
    """Grouped queries, biases, and a norm over the head dim, whose weight every head shares."""

    def __init__(self, c: int, heads: int, kv: int, d: int) -> None:
        super().__init__()
        self.d = d
        self.wq = nn.Linear(c, heads * d)
        self.wk = nn.Linear(c, kv * d)
        self.wv = nn.Linear(c, kv * d)
        self.wo = nn.Linear(heads * d, c)
        self.q_norm = nn.RMSNorm(d)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (rearrange(w(x), "b s (h d) -> b h s d", d=self.d) for w in (self.wq, self.wk, self.wv))
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        scores = self.q_norm(q) @ k.transpose(-1, -2) / self.d**0.5
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(mask, float("-inf")).softmax(-1) @ v
        return self.wo(rearrange(mixed, "b h s d -> b s (h d)"))


class Block(nn.Module):
    """Attention and a gated MLP, with a scalar parameter of its own."""

    def __init__(self, c: int, heads: int, kv: int, d: int, ff: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(c)
        self.attn = Attention(c, heads, kv, d)
        self.norm2 = nn.RMSNorm(c)
        self.up = nn.Linear(c, ff)
        self.gate = nn.Linear(c, ff)
        self.down = nn.Linear(ff, c)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        h = self.norm2(x)
        return x + self.scale * self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """A decoder with a tied head, a frozen layer, a buffer and awkward sizes (nothing divides 3 or 4 by itself)."""

    def __init__(self, c: int = 10, heads: int = 4, kv: int = 4, d: int = 3, ff: int = 12, layers: int = 2) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, c)
        self.layers = nn.ModuleList(Block(c, heads, kv, d, ff) for _ in range(layers))
        self.norm = nn.RMSNorm(c)
        self.adapter = nn.Linear(c, c, bias=False)
        self.adapter.weight.requires_grad_(False)
        self.head = nn.Linear(c, VOCAB, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("positions", torch.linspace(-1, 1, c))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        x = x + self.positions.to(x.dtype)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x + self.adapter(x)))


class MLP(nn.Module):
    """A block that `parallelize_module` can split: `up` by columns, `down` by rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class MLPs(nn.Module):
    """Tokens [b, s] through two blocks of `width` to logits [b, s, out]."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(MLP(width) for _ in range(2))
        self.head = nn.Linear(width, out)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Stack(nn.Module):
    """`emb`, then `layers`."""

    def __init__(self, emb: nn.Module, *layers: nn.Module) -> None:
        super().__init__()
        self.emb, self.layers = emb, nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x)
        for layer in self.layers:
            x = layer(x)
        return x


def decoder(kv: int = 4, dtype: torch.dtype = torch.float64, **sizes: int) -> Any:
    """The same decoder on every rank."""
    torch.manual_seed(11)
    return Decoder(kv=kv, **sizes).to(dtype)


def policy(**fields: Any) -> sf.Policy:
    """The decoder's policy."""
    return sf.Policy(rules=RULES, sizes={"d": 3}) | sf.Policy(**fields)


def tokens(step: int = 0, batch: int = 12, length: int = 5) -> tuple[Tensor, Tensor]:
    """(inputs, targets) of the whole batch, the same on every rank."""
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, VOCAB, (batch, length + 1), generator=generator)
    return ids[:, :-1].clone(), ids[:, 1:].clone()


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of one process."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
