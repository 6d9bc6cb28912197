"""Whether two checkouts compute the same losses and gradients, to the bit.

    python tests/slow/same_bits.py OLD [NEW]     # two checkouts; NEW is this one by default

Each trains every model on every mesh, by functions and in every class, for some steps on four ranks; what comes out is
compared. A row is one case: "same", or the largest difference, relative to the largest value.
"""

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

import shardfn as sf
from shardfn.compat import fsdp1, fsdp2, hfai, megatron

ROOT = Path(__file__).resolve().parents[2]
RANKS, STEPS = 4, 3
MESHES = ({"fsdp": 4}, {"fsdp": 2, "tp": 2}, {"fsdp": 1, "tp": 4}, {"replicate": 2, "fsdp": 2})
Found = Iterator[tuple[str, Tensor]]
sys.path.insert(0, str(ROOT / "examples" / "benchmarks"))
CONTENDERS: Any = importlib.import_module("contenders")


def decoder(width: int = 64) -> nn.Module:
    """The decoder of the benchmarks, small."""
    return CONTENDERS.make_model(CONTENDERS.Job(width=width, layers=2, vocab=128, head=16, tokens=8))


def llama() -> nn.Module:
    """A Llama of transformers, with grouped keys."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=128,
    )
    return LlamaForCausalLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "decoder": decoder,
    "uneven decoder": partial(decoder, 96),
    "llama": llama,
}


def batch(step: int, index: int) -> Tensor:
    """Token ids of a data rank."""
    return torch.randint(0, 128, (2, 8), generator=torch.Generator().manual_seed(10 * step + index))


def loss_of(out: Any, x: Tensor) -> Tensor:
    """Cross entropy of logits, or of an output that holds them."""
    return F.cross_entropy(getattr(out, "logits", out).flatten(0, 1).float(), x.flatten())


def policies(name: str, model: nn.Module, axes: dict[str, int]) -> Iterator[tuple[str, Any]]:
    """Policies for a model on a mesh, by what is told about them."""
    if "tp" not in axes:
        base = sf.Policy()
    elif name == "llama":
        base = sf.policies.from_transformers(model)
    else:
        base = sf.Policy(rules=CONTENDERS.RULES, sizes={"d": 16})
    yield "float32", base
    yield "bfloat16", base | sf.Policy(compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    yield "regather=False", base | sf.Policy(regather=False)


def by_functions(model: nn.Module, mesh: DeviceMesh, policy: Any) -> Found:
    """`value_and_grad` of `apply`, and AdamW."""
    params = sf.shard(model, mesh, policy)
    optimizer = sf.optim.adamw(1e-2)
    state, differentiate = optimizer.init(params), sf.value_and_grad(lambda p, x: loss_of(sf.apply(model, p, x), x))
    for step in range(STEPS):
        loss, grads = differentiate(params, batch(step, sf.data.rank(mesh)[0]))
        yield f"loss {step}", loss
        yield from ((f"gradient {step} {name}", grad) for name, grad in grads.items())
        params, state = optimizer.step(params, grads, state)
    yield from params.items()


def by_class(kind: str, model: nn.Module, mesh: DeviceMesh, policy: Any) -> Found:
    """A class, its backward and SGD."""
    layers = {type(m) for m in model.modules() if type(m).__name__ in ("Layer", "LlamaDecoderLayer")}
    wraps = {"auto_wrap_policy": ModuleWrapPolicy(layers)}
    if kind == "trainer":
        sharded: Any = sf.Trainer(model, mesh, policy)
    elif kind in ("fsdp1", "hfai"):
        sharded = (fsdp1 if kind == "fsdp1" else hfai).FullyShardedDataParallel(model, **wraps)
    elif kind == "fsdp2":
        for module in model.modules():
            if type(module) in layers:
                fsdp2.fully_shard(module, mesh=mesh)
        sharded = fsdp2.fully_shard(model, mesh=mesh)
    else:
        config = SimpleNamespace(transformer_impl="local", recompute_granularity=None)
        sharded = megatron.TorchFullyShardedDataParallel(config, SimpleNamespace(), model, layers)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = batch(step, sf.data.rank(mesh)[0])
        loss = loss_of(sharded(x), x)
        loss.backward()
        yield f"loss {step}", loss.detach()
        for name, p in model.named_parameters():
            yield f"gradient {step} {name}", torch.zeros(()) if p.grad is None else p.grad
        optimizer.step()


def cases() -> Iterator[tuple[str, Callable[[], Found]]]:
    """(what it is, what runs it)."""
    for axes in MESHES:
        mesh = sf.make_mesh("cpu", **axes)
        for name, make in MODELS.items():
            for told, policy in policies(name, make(), axes):
                what = f"{name}, {axes}, {told}"
                yield f"{what}, functions", partial(by_functions, make(), mesh, policy)
                yield f"{what}, trainer", partial(by_class, "trainer", make(), mesh, policy)
            for kind in ("fsdp1", "fsdp2", "hfai", "megatron") if list(axes) == ["fsdp"] else ():
                yield f"{name}, {axes}, {kind}", partial(by_class, kind, make(), mesh, None)


def work(directory: str) -> None:
    """One rank: what every case gives, in a file."""
    dist.init_process_group("gloo")
    found: dict[str, dict[str, Tensor] | str] = {}
    for what, run in cases():
        try:
            found[what] = {k: (x.to_local() if isinstance(x, DTensor) else x).clone() for k, x in run()}
        except Exception as error:
            found[what] = f"{type(error).__name__}: {error}"
    torch.save(found, f"{directory}/{dist.get_rank()}.pt")
    dist.destroy_process_group()


def results(checkout: Path, directory: str) -> list[dict[str, Any]]:
    """What the ranks of a checkout found."""
    env = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    subprocess.run([*torchrun, __file__, "--worker", directory], env=env, check=True)
    return [torch.load(f"{directory}/{rank}.pt") for rank in range(RANKS)]


def compared(old: Any, new: Any) -> str:
    """How two results of a case differ on a rank."""
    if isinstance(old, str) or isinstance(new, str):
        return "same error" if old == new else f"{old if isinstance(old, str) else 'runs'} -> {new}"[:200]
    if old.keys() != new.keys():
        return f"other results: {sorted(old.keys() ^ new.keys())[:3]}"
    worst, where = 0.0, ""
    for key, x in old.items():
        if not torch.equal(x, new[key]):
            ratio = float((x - new[key]).abs().max() / x.abs().max()) if x.shape == new[key].shape else float("inf")
            worst, where = max((worst, where), (ratio or 1e-45, key))
    return f"{worst:.1e} in {where}" if where else "same"


def main(old: str, new: str = str(ROOT)) -> int:
    """Compare two checkouts; 1 when a case differs."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        before, after = results(Path(old).resolve(), one), results(Path(new).resolve(), two)
    differ = 0
    for what in before[0]:
        told = sorted({compared(a[what], b[what]) for a, b in zip(before, after, strict=True)} - {"same"}) or ["same"]
        differ += not set(told) <= {"same", "same error"}
        print(f"{what:60} {'; '.join(told)}")
    print(f"{len(before[0])} cases, {differ} differ")
    return int(differ > 0)


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        work(sys.argv[2])
    else:
        sys.exit(main(*sys.argv[1:]))
