"""Fine-tunes a small Llama of transformers with LoRA: a frozen base, and adapters of low rank beside its linears.

torchrun --standalone --nproc-per-node 4 examples/lora.py           # random weights; --base loads a directory
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from lm import text
from torch import Tensor, nn

import shardfn as sf

ADAPTERS = "**.{A,B}.weight"
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
        return self.base(x) + self.scale * self.B(self.A(x))


def make_model(rank: int, base: Path | None = None) -> nn.Module:
    """The frozen base, its layers with adapters; the same on every process."""
    torch.manual_seed(1)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    llama = transformers.LlamaForCausalLM
    model = (llama.from_pretrained(base) if base else llama(config)).requires_grad_(False)
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and ".layers." in path:
            model.set_submodule(path, Adapted(module, rank))
    return model


def policy_for(model: nn.Module) -> sf.Policy:
    """The base as transformers plans it, and the adapters beside it."""
    return sf.policies.from_transformers(model) | sf.Policy(rules=RULES)


@torch.no_grad()
def merge(model: nn.Module) -> nn.Module:
    """Base and adapters as one, under the names of the base: W + scale B A."""
    for path, module in list(model.named_modules()):
        if isinstance(module, Adapted):
            module.base.weight += module.scale * module.B.weight @ module.A.weight
            model.set_submodule(path, module.base)
    return model


def main(argv: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Train, save and return the adapters. Every rank calls this."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--base", type=Path, help="a directory that save_pretrained has written")
    parser.add_argument("--out", type=Path, default=Path("runs/lora"), help="adapters, and the model with them")
    options = parser.parse_args(argv)
    ranks = sf.make_mesh("cpu", fsdp=-1).size()
    mesh = sf.make_mesh("cpu", fsdp=-1, tp=2 if ranks % 2 == 0 else 1)
    model = make_model(4, options.base)
    params = sf.shard(model, mesh, policy_for(model))
    optimizer = sf.optim.adamw(3e-3, weight_decay=0.0)
    state = optimizer.init(params)
    step = sf.value_and_grad(lambda p, x, y: sf.cross_entropy(sf.apply(model, p, input_ids=x).logits, y))
    batches = text.Batches(text.load_corpus().train, 16, 48)
    for number in range(options.steps):
        loss, grads = step(params, *sf.data.local_batch(batches(number), mesh))
        params, state = optimizer.step(params, grads, state)
        if mesh.get_rank() == 0 and number % 10 == 9:
            print(f"step {number + 1:3}: loss {loss:.3f} nats per byte", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    sf.checkpoint.save_safetensors(options.out / "adapters.safetensors", model, params.select(ADAPTERS))
    if full := sf.gather(params, to="rank0"):
        model.load_state_dict(full)
        merge(model).save_pretrained(options.out)
    return sf.gather(params, ADAPTERS)


if __name__ == "__main__":
    main()
