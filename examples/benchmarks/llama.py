"""A Llama of transformers over two axes: its host time and its step time, against torch's and transformers' own ways.

    python examples/benchmarks/llama.py                   # every case, about three minutes
    torchrun --standalone --nproc-per-node 4 examples/benchmarks/llama.py --worker --mesh fsdp=2,tp=2

    shardfn       `policies.from_transformers`
    sequence      the same with `sequence_parallel=True`
    torch         `parallelize_module` by the same plan, and `fully_shard` on every layer and the root
    transformers  `from_pretrained(..., distributed_config=DistributedConfig(tp_size, fsdp_size))`

Host time is what sharding adds, per layer, with torch's fake process group: 64 ranks in one process, see host_time.py.
A step is forward, backward and AdamW on real ranks, taken in turn; losses must agree.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from time import process_time
from typing import Any

import torch
import torch.distributed as dist
import transformers
from contenders import Contender
from fake import start_fake
from measure import Cases, finish, in_turn, launch, make_mesh, parse, report
from results import Row
from step_time import require_equal_losses
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers.distributed import DistributedConfig

import shardfn as sf

RANKS = 64
HOST: dict[str, Any] = {"width": 64, "layers": 16, "heads": 8, "vocab": 256, "tokens": 8, "mesh": "fsdp=16,tp=4"}
STEP: dict[str, Any] = {"width": 512, "layers": 4, "heads": 8, "vocab": 4096, "tokens": 64, "mesh": "fsdp=2,tp=2"}
TINY = {"width": 32, "layers": 2, "heads": 4, "vocab": 64, "rounds": 2, "warmup": 1}
HOST_BAR, STEP_BAR = 0.33, 0.60
PEERS = {"torch": "parallelize_module + fully_shard", "transformers": "transformers' own"}


def cases(quick: bool) -> Cases:
    """What to run, by name."""
    return {
        "host time of a Llama, 16 x 4": partial(run_host, quick),
        "step of a Llama, 2 x 2": partial(run_step, quick),
    }


def run_host(quick: bool) -> list[Row]:
    """Added time per layer, beside both peers."""
    options = HOST | {"rounds": 12} | (TINY if quick else {})
    seconds = launch(__file__, 0, options | {"contenders": "unsharded,shardfn,torch,transformers"})
    alone = seconds.pop("unsharded")
    added = {
        name: [1e3 * (mine - without) / options["layers"] for mine, without in zip(found, alone, strict=True)]
        for name, found in seconds.items()
    }
    return _rows("host time added per layer, Llama, 16 x 4", added, HOST_BAR)


def run_step(quick: bool) -> list[Row]:
    """A step on four ranks, beside both peers."""
    options = STEP | {"rounds": 10} | (TINY if quick else {})
    seconds = launch(__file__, 4, options | {"contenders": "shardfn,sequence,torch,transformers"})
    times = {name: [1e3 * second for second in found] for name, found in seconds.items()}
    what = f"step, Llama, 2 x 2, 1 x {options['tokens']} tokens"
    sequence = times.pop("sequence")
    return [
        *_rows(what, times, STEP_BAR),
        Row(what=f"{what}, sequence parallel", peer="without", unit="ms", ours=sequence, theirs=times["shardfn"]),
    ]


def _rows(what: str, times: dict[str, list[float]], bar: float) -> list[Row]:
    return [
        Row(what=what, peer=peer, unit="ms", ours=times["shardfn"], theirs=times[name], bar=bar)
        for name, peer in PEERS.items()
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Contenders


def make_model(args: argparse.Namespace, split: int = 1) -> nn.Module:
    """The same weights for every contender; of `split` ranks that share a layer, the part of one."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.width,
        intermediate_size=8 * args.width // 3 // 64 * 64 // split or 64 // split,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads // split,
        num_key_value_heads=args.heads // split,
        head_dim=args.width // args.heads,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def shardfn(args: argparse.Namespace, mesh: DeviceMesh, **options: Any) -> Contender:
    """This library, by one line."""
    model = make_model(args)
    params = sf.shard(model, mesh, sf.policies.from_transformers(model, **options))
    optimizer = sf.optim.adamw(1e-4)
    state, grads = optimizer.init(params), None
    loss_and_grads = sf.value_and_grad(lambda p, x: sf.apply(model, p, input_ids=x, labels=x).loss)

    def differentiate(x: Tensor) -> Tensor:
        nonlocal grads
        grads = None
        loss, grads = loss_and_grads(params, x)
        return loss

    def update() -> None:
        nonlocal params, state, grads
        assert grads is not None
        params, state = optimizer.step(params, grads, state)

    return Contender(differentiate, update)


def of_torch(args: argparse.Namespace, mesh: DeviceMesh) -> Contender:
    """The plan of transformers' Llama in torch's styles, then FSDP2."""
    model: Any = make_model(args)
    rows, columns = RowwiseParallel(), ColwiseParallel()
    styles: dict[str, Any] = {f"self_attn.{name}_proj": columns for name in "qkv"} | {"self_attn.o_proj": rows}
    styles |= {"mlp.gate_proj": columns, "mlp.up_proj": columns, "mlp.down_proj": rows}
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], styles)
    whole = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh["tp"], whole | {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())})
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["fsdp"])
    fully_shard(model, mesh=mesh["fsdp"])
    return _train(model, mesh)


def of_transformers(args: argparse.Namespace, mesh: DeviceMesh) -> Contender:
    """What transformers does itself with a checkpoint."""
    config = DistributedConfig(tp_size=mesh["tp"].size(), fsdp_size=mesh["fsdp"].size())
    with tempfile.TemporaryDirectory() as folder:
        of_rank_0 = [folder]
        if dist.get_backend() != "fake":
            dist.broadcast_object_list(of_rank_0)
        make_model(args).save_pretrained(of_rank_0[0])  # which writes on rank 0 only
        dist.barrier()
        model = transformers.LlamaForCausalLM.from_pretrained(of_rank_0[0], distributed_config=config)
        dist.barrier()
    return _train(model, mesh)


def unsharded(args: argparse.Namespace, mesh: DeviceMesh) -> Contender:
    """Every rank alone, with as much to compute as in the sharded model."""
    return _train(make_model(args, split=mesh["tp"].size()), None)


CONTENDERS: dict[str, Callable[[argparse.Namespace, DeviceMesh], Contender]] = {
    "shardfn": shardfn,
    "sequence": partial(shardfn, sequence_parallel=True),
    "torch": of_torch,
    "transformers": of_transformers,
    "unsharded": unsharded,
}


def _train(model: Any, mesh: DeviceMesh | None) -> Contender:
    model.train()
    kinds = ([p for p in model.parameters() if isinstance(p, DTensor) is sharded] for sharded in (True, False))
    meshes: dict[Any, list[nn.Parameter]] = {}
    for param in (param for kind in kinds for param in kind):
        meshes.setdefault(getattr(param, "device_mesh", None), []).append(param)
    optimizer = torch.optim.AdamW([{"params": params} for params in meshes.values()], lr=1e-4, fused=True)

    def differentiate(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        loss = loss.detach()
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        if mesh is not None and mesh["fsdp"].size() > 1:
            dist.all_reduce(loss, group=mesh["fsdp"].get_group())
            loss /= mesh["fsdp"].size()
        return loss

    return Contender(differentiate, lambda: optimizer.step() and None)


# ---------------------------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, mesh: DeviceMesh) -> dict[str, list[float]]:
    """Seconds of every contender in every round: of steps on real ranks, of forward and backward on fake ones."""
    fake = dist.get_backend() == "fake"
    index, _ = sf.data.rank(mesh)
    losses: dict[str, list[float]] = {name: [] for name in args.contenders.split(",")}
    actions: dict[str, Callable[[int], object]] = {}
    for name in losses:
        contender = CONTENDERS[name](args, mesh)

        def act(round_: int, name: str = name, contender: Contender = contender) -> None:
            generator = torch.Generator().manual_seed(1000 * round_ + index)
            x = torch.randint(0, args.vocab, (1, args.tokens), generator=generator)
            losses[name].append(float(contender.differentiate(x) if fake else contender.step(x)))

        actions[name] = act
    seconds = in_turn(actions, args.rounds, args.warmup, *([process_time] if fake else []))
    if not fake:
        require_equal_losses(losses)
    return seconds


def main(argv: Sequence[str] | None = None) -> None:
    """Run every case, or be the worker of one."""
    args = parse(__doc__, argv, heads=8, contenders="shardfn,sequence,torch,transformers")
    if not args.worker:
        report(cases(args.quick))
        return
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if args.mesh == HOST["mesh"]:
        start_fake(RANKS)
    mesh = make_mesh(args.mesh)
    finish(args, measure(args, mesh))


if __name__ == "__main__":
    main()
