"""The model that all benchmarks train, and the ways to train it: shardfn and its peers.

A contender is a function `(job, mesh) -> Contender`; `CONTENDERS` lists them. All start from the same weights, take the
same batches and return the same loss, the mean over the data ranks. Peers are set up as fast as we know how:

    optimizer   `fused=True`: 14 ms against 85 (foreach), 72 (default) and 104 (a loop) for 75 DTensors of 29M elements
                in all on 2 ranks; it also takes the tensors of several meshes that `parallelize_module` leaves
    ddp         gradients are views of its buckets
    loss        in float32, as `sf.cross_entropy` is, whatever the model computes in
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import shardfn as sf
from shardfn.compat import fsdp1 as compat
from shardfn.compat import fsdp2 as compat2

# Weights that are split on their first dim only travel without copies, so that is asked for where whole heads allow it.
RULES = {
    "layers.*.{wq,wk,wv}.weight": "(heads@tp d) c@fsdp",
    "layers.*.wo.weight": "c@fsdp (heads@tp d)",
    "layers.*.{w1,w3}.weight": "ff@tp@fsdp c",
    "layers.*.w2.weight": "c@fsdp ff@tp",
}
WHOLE_HEADS = RULES | {"layers.*.{wq,wk,wv}.weight": "(heads@tp@fsdp d) c"}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained: sizes of the model and of a rank's batch, and how. The defaults are 29M parameters."""

    width: int = 512
    layers: int = 8
    vocab: int = 4096
    head: int = 64
    batch: int = 1
    tokens: int = 64
    optimizer: str = "adamw"
    meta: bool = False  # no rank ever has the whole model: made on the meta device, filled shard by shard
    bf16: bool = False
    compiled: bool = False  # torch.compile of every layer


class Layer(nn.Module):
    """Pre-norm attention and SwiGLU; of `split` ranks that share a layer, the part of one."""

    def __init__(self, job: Job, split: int) -> None:
        super().__init__()
        width, inner, hidden = job.width, job.width // split, 8 * job.width // 3 // 64 * 64 // split
        self.head = job.head
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.wq, self.wk, self.wv = (nn.Linear(width, inner, bias=False) for _ in range(3))
        self.wo = nn.Linear(inner, width, bias=False)
        self.w1, self.w3 = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (w(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        x = x + self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Decoder(nn.Module):
    """A decoder without positions: `[b, s]` token ids -> `[b, s, vocab]` logits."""

    def __init__(self, job: Job, split: int = 1) -> None:
        super().__init__()
        self.emb = nn.Embedding(job.vocab, job.width)
        self.layers = nn.ModuleList(Layer(job, split) for _ in range(job.layers))
        self.norm = nn.RMSNorm(job.width)
        self.head = nn.Linear(job.width, job.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make_model(job: Job, split: int = 1) -> Decoder:
    """The same weights for every contender on every rank; none yet when they are `meta`."""
    torch.manual_seed(0)
    with torch.device("meta" if job.meta else "cpu"):
        model = Decoder(job, split)
    for layer in model.layers if job.compiled else ():
        layer.compile()
    return model


@torch.no_grad()
def fill_(module: nn.Module) -> None:
    """Write initial values into the parameters that `module` itself owns, or into this rank's part of them."""
    for param in module.parameters(recurse=False):
        local = param.to_local() if isinstance(param, DTensor) else param
        _ = local.normal_(std=0.02) if local.ndim > 1 else local.fill_(1.0)


def make_batch(job: Job, round_: int, mesh: DeviceMesh) -> Tensor:
    """This data rank's token ids, `[batch, tokens]`; the same for all contenders."""
    index, _ = sf.data.rank(mesh)
    generator = torch.Generator().manual_seed(1000 * round_ + index)
    return torch.randint(0, job.vocab, (job.batch, job.tokens), generator=generator).to(mesh.device_type)


# ---------------------------------------------------------------------------------------------------------------------
# Contenders


class Contender(NamedTuple):
    """One way to train the model, in two halves that can be measured apart."""

    differentiate: Callable[[Tensor], Tensor]  # forward and backward: token ids -> loss
    update: Callable[[], None]  # the optimizer, on the gradients of the last `differentiate`

    def step(self, x: Tensor) -> Tensor:
        """A whole step: token ids -> loss."""
        loss = self.differentiate(x)
        self.update()
        return loss


# name -> (shardfn's optimizer, torch's)
OPTIMIZERS: dict[str, tuple[sf.optim.Optimizer, Callable[[Iterable[Any]], torch.optim.Optimizer]]] = {
    "adamw": (sf.optim.adamw(1e-4), partial(torch.optim.AdamW, lr=1e-4, fused=True)),
    "sgd": (sf.optim.sgd(1e-2), partial(torch.optim.SGD, lr=1e-2)),
}


def shardfn(job: Job, mesh: DeviceMesh) -> Contender:
    """This library's functions, with the policy that is nearest to FSDP2's defaults."""
    model, optimizer = make_model(job), OPTIMIZERS[job.optimizer][0]
    rules = WHOLE_HEADS if job.width // job.head % mesh.size() == 0 else RULES
    rules = rules if mesh["tp"].size() > 1 else {}
    policy = sf.Policy(rules=rules, sizes={"d": job.head}, compute_dtype=torch.bfloat16 if job.bf16 else None)
    params = sf.shard(model, mesh, policy, init=fill_ if job.meta else None)
    model = make_model(replace(job, meta=True))  # only its structure is needed from here on
    state, grads = optimizer.init(params), None
    loss_and_grads = sf.value_and_grad(lambda p, x: sf.cross_entropy(sf.apply(model, p, x), x))

    def differentiate(x: Tensor) -> Tensor:
        nonlocal grads
        grads = None  # as `zero_grad` does
        loss, grads = loss_and_grads(params, x)
        return loss

    def update() -> None:
        nonlocal params, state, grads
        assert grads is not None
        params, state = optimizer.step(params, grads, state)
        grads = None

    return Contender(differentiate, update)


def fsdp2(job: Job, mesh: DeviceMesh) -> Contender:
    """`fully_shard` on every layer and the root, over `parallelize_module` where there is a tp axis."""
    return _fully_sharded(job, mesh, fully_shard)


def shardfn_fsdp2(job: Job, mesh: DeviceMesh) -> Contender:
    """This library's `fully_shard`, used as torch's."""
    return _fully_sharded(job, mesh, compat2.fully_shard)


def _fully_sharded(job: Job, mesh: DeviceMesh, fully_shard: Callable[..., Any]) -> Contender:
    model = make_model(job)
    if mesh["tp"].size() > 1:
        _split_over_tp(model, mesh)
    options: dict[str, Any] = {"mesh": mesh["fsdp"]}
    if job.bf16:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return _train_module(job, model, mesh)


def fsdp1(job: Job, mesh: DeviceMesh) -> Contender:
    """`FullyShardedDataParallel` around every layer and the root."""
    wrapped = FullyShardedDataParallel(
        make_model(job),
        process_group=mesh["fsdp"].get_group(),
        auto_wrap_policy=ModuleWrapPolicy({Layer}),
        device_id=torch.device(mesh.device_type),
        use_orig_params=True,
    )
    return _train_module(job, wrapped, mesh)


def shardfn_fsdp1(job: Job, mesh: DeviceMesh) -> Contender:
    """This library's FSDP1 class, used as torch's."""
    group = mesh["fsdp"].get_group()
    policy = ModuleWrapPolicy({Layer})
    return _train_module(job, compat.FullyShardedDataParallel(make_model(job), group, auto_wrap_policy=policy), mesh)


def ddp(job: Job, mesh: DeviceMesh) -> Contender:
    """`DistributedDataParallel`: whole weights on every rank."""
    wrapped = DistributedDataParallel(
        make_model(job), process_group=mesh["fsdp"].get_group(), gradient_as_bucket_view=True
    )
    return _train_module(job, wrapped, mesh)


def tp(job: Job, mesh: DeviceMesh) -> Contender:
    """`parallelize_module` alone, on a mesh with one data rank."""
    model = make_model(job)
    _split_over_tp(model, mesh)
    return _train_module(job, model, mesh)


def unsharded(job: Job, mesh: DeviceMesh) -> Contender:
    """Every rank alone, without communication, with as much to compute as in the sharded model."""
    return _train_module(job, make_model(job, split=mesh["tp"].size()), None)


CONTENDERS: dict[str, Callable[[Job, DeviceMesh], Contender]] = {
    "shardfn": shardfn,
    "shardfn_fsdp1": shardfn_fsdp1,
    "shardfn_fsdp2": shardfn_fsdp2,
    "fsdp2": fsdp2,
    "fsdp1": fsdp1,
    "ddp": ddp,
    "tp": tp,
    "unsharded": unsharded,
}


def _split_over_tp(model: Decoder, mesh: DeviceMesh) -> None:
    columns, rows = ColwiseParallel(), RowwiseParallel()
    styles: dict[str, Any] = dict.fromkeys(("wq", "wk", "wv", "w1", "w3"), columns) | {"wo": rows, "w2": rows}
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], styles)


def _train_module(job: Job, model: nn.Module, mesh: DeviceMesh | None) -> Contender:
    """Train a module in place; the loss is averaged over the data ranks of `mesh`."""
    if job.meta:
        model.to_empty(device=mesh.device_type if mesh is not None else "cpu")
        for module in model.modules():
            fill_(module)
    kinds = ([p for p in model.parameters() if isinstance(p, DTensor) is sharded] for sharded in (True, False))
    optimizer = OPTIMIZERS[job.optimizer][1]([{"params": kind} for kind in kinds if kind])  # kernels refuse a mix

    def differentiate(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1).float(), x.flatten())
        loss.backward()
        loss = loss.detach()
        if mesh is not None and mesh["fsdp"].size() > 1:
            dist.all_reduce(loss, group=mesh["fsdp"].get_group())
            loss /= mesh["fsdp"].size()
        return loss

    def update() -> None:
        optimizer.step()

    return Contender(differentiate, update)
