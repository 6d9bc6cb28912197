"""Fine-tunes a small Llama of transformers with LoRA: a frozen base, and adapters of low rank beside its linears.

    torchrun --standalone --nproc-per-node 4 examples/lora.py

The base is split by `from_transformers`. An adapter computes B (A x): beside a column-parallel linear B is split as its
outputs are, beside a row-parallel one A as its inputs are, and the other half is whole. Only adapters have gradients,
optimizer states and a file. At the end base and adapters become one model, for `from_pretrained`. The weights of the
base are random here; `--base` loads those of a directory.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from lm import text
from torch import Tensor, nn

import shardfn as sf

ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTERS = "**.{A,B}.weight"
ENDINGS = (".A.weight", ".B.weight", ".base.weight", ".base.bias")
# What is split is split as in the rules of the base (print them: `policy.rules`), `?` included; the rest is whole.
RULES = {
    "**.q_proj.B.weight": "(heads@tp d) _",
    "**.{k_proj,v_proj}.B.weight": "(kv@tp? d) _",
    "**.{gate_proj,up_proj}.B.weight": "ff@tp _",
    "**.o_proj.A.weight": "_ (heads@tp d)",
    "**.down_proj.A.weight": "_ ff@tp",
    ADAPTERS: "_ _",
}


class Adapted(nn.Module):
    """A linear, and beside it one of low rank that begins as zero."""

    def __init__(self, base: nn.Linear, rank: int, scale: float = 2.0) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.A, self.B = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """`x [.., in]` to `[.., out]`."""
        return self.base(x) + self.scale * self.B(self.A(x))


def add_adapters(model: nn.Module, rank: int) -> None:
    """Freeze a model and give its linears adapters, in place."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in ADAPTED and isinstance(child, nn.Linear):
                setattr(module, name, Adapted(child, rank))


def make_base(seed: int = 0) -> transformers.LlamaForCausalLM:
    """A Llama of two layers on bytes, the same on every process."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    )


def make_model(rank: int, base: Path | None = None) -> nn.Module:
    """The base with adapters."""
    model = make_base() if base is None else transformers.LlamaForCausalLM.from_pretrained(base)
    torch.manual_seed(1)
    add_adapters(model, rank)
    return model


def merge(model: nn.Module, full: dict[str, Tensor]) -> dict[str, Tensor]:
    """Base and adapters as one, under the names of the base: W + scale B A."""
    merged = {name.replace(".base.", "."): weight for name, weight in full.items() if ".base." in name}
    for path, module in model.named_modules():
        if isinstance(module, Adapted):
            up, down = full[f"{path}.B.weight"], full[f"{path}.A.weight"]
            merged[f"{path}.weight"] = merged[f"{path}.weight"] + module.scale * up @ down
    return merged | {name: weight for name, weight in full.items() if not name.endswith(ENDINGS)}


def policy_for(model: nn.Module) -> sf.Policy:
    """The base as transformers plans it, and the adapters beside it."""
    return sf.policies.from_transformers(model) | sf.Policy(rules=RULES)


def train(model: nn.Module, params: sf.Params, batches: text.Batches, steps: int, rate: float = 3e-3) -> sf.Params:
    """AdamW on the adapters; prints the loss as it goes."""
    optimizer = sf.optim.adamw(rate, weight_decay=0.0)
    state = optimizer.init(params)

    def loss_fn(p: sf.Params, inputs: Tensor, targets: Tensor) -> Tensor:
        return sf.cross_entropy(sf.apply(model, p, input_ids=inputs).logits, targets)

    for step in range(steps):
        local = sf.data.local_batch(batches(step), params.mesh)
        loss, grads = sf.value_and_grad(loss_fn)(params, *local)
        params, state = optimizer.step(params, grads, state)
        if dist.get_rank() == 0 and step in (0, steps // 2, steps - 1):
            print(f"step {step + 1:3}: loss {loss:.3f} nats per byte", flush=True)
    return params


def main(argv: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Train, save and return the adapters. Every rank calls this."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rank", type=int, default=4, help="of the adapters")
    parser.add_argument("--base", type=Path, help="a directory that save_pretrained has written")
    parser.add_argument("--out", type=Path, default=Path("runs/lora"), help="adapters, and the model with them")
    options = parser.parse_args(argv)
    ranks = sf.make_mesh("cpu", fsdp=-1).size()
    mesh = sf.make_mesh("cpu", fsdp=-1, tp=2 if ranks % 2 == 0 else 1)
    model = make_model(options.rank, options.base)
    params = sf.shard(model, mesh, policy_for(model))
    params = train(model, params, text.Batches(text.load_corpus().train, 16, 48), options.steps)
    adapters = params.select(ADAPTERS)
    options.out.mkdir(parents=True, exist_ok=True)
    sf.checkpoint.save_safetensors(options.out / "adapters.safetensors", model, adapters)
    full = sf.gather(params, to="rank0")
    if dist.get_rank() == 0:
        trained, whole = (sum(x.numel() for x in tree.values()) for tree in (adapters, params))
        print(f"{trained:,} of {whole:,} numbers were trained; {options.out} has them, and the whole model")
        alone = make_base() if options.base is None else transformers.LlamaForCausalLM.from_pretrained(options.base)
        alone.load_state_dict(merge(model, full))
        alone.save_pretrained(options.out)
    return sf.gather(adapters)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
