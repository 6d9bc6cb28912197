"""Differentially private SGD: every sample's gradient is clipped by itself, noise is added to their sum.

torchrun --standalone --nproc-per-node 4 examples/transforms/dp_sgd.py
"""

import torch
from problem import RULES, make_data, make_mesh, make_net
from torch import Tensor, nn

import shardfn as sf

CLIP, NOISE, RATE = 0.5, 0.1, 0.2


def private_gradient(model: nn.Module, params: sf.Params, x: Tensor, y: Tensor) -> sf.Params:
    """The sum of clipped gradients over the samples of all data ranks, which each give theirs: x [b, 6], y [b, 1]."""

    def loss_fn(p: sf.Params, x: Tensor, y: Tensor) -> Tensor:
        return (sf.apply(model, p, x) - y).square().sum()

    def clipped(p: sf.Params, x: Tensor, y: Tensor) -> sf.Params:
        return sf.optim.clip(sf.grad(loss_fn)(p, x, y), CLIP)[0]

    each = sf.vmap(clipped, in_dims=(None, 0, 0))(params, x, y)  # b@fsdp ...: every rank has those of its samples
    return sf.reduce_grads(sf.tree.map(lambda g: g.sum(0), each), op="sum", like=params)


def noise_like(params: sf.Params, seed: int) -> sf.Params:
    """The same noise on any mesh: drawn whole, from one seed, and sharded like the parameters."""
    generator = torch.Generator().manual_seed(seed)
    whole = {name: torch.randn(p.shape, dtype=p.dtype, generator=generator) for name, p in params.items()}
    return sf.shard(whole, params.mesh, sf.Policy(rules={n: str(x.rule) for n, x in params.plan.layouts.items()}))


def main(steps: int = 60) -> Tensor:
    """Train; returns the last loss over all samples."""
    mesh = make_mesh()
    model, data = make_net(), make_data(64)
    params = sf.shard(model, mesh, sf.Policy(rules=RULES))
    x, y = sf.data.local_batch(data, mesh)
    loss = torch.zeros(())
    for step in range(steps):
        total, noise = private_gradient(model, params, x, y), noise_like(params, step)
        scale = RATE / len(data[0])
        params = params.like(
            (name, p - scale * (total[name] + NOISE * CLIP * noise[name])) for name, p in params.items()
        )
        if step % 20 == 19:
            loss, _ = sf.value_and_grad(lambda p: (sf.apply(model, p, x) - y).square().mean())(params)
            if sf.data.rank(mesh)[0] == 0:
                print(f"step {step + 1}: loss {loss:.4f}")
    return loss


if __name__ == "__main__":
    main()
