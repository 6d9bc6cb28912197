"""A flat minimum: the loss plus the norm of its own gradient, and how steep it still is in one direction.

torchrun --standalone --nproc-per-node 4 examples/transforms/gradient_penalty.py
"""

import torch
from problem import RULES, make_data, make_mesh, make_net
from torch import Tensor, nn

import shardfn as sf


def penalized(model: nn.Module, params: sf.Params, x: Tensor, y: Tensor, weight: float) -> Tensor:
    """Mean squared error plus `weight` times the norm of its gradient."""
    loss, grads = sf.value_and_grad(lambda p: (sf.apply(model, p, x) - y).square().mean())(params)
    return loss + weight * sf.optim.global_norm(grads)


def curvature(model: nn.Module, params: sf.Params, x: Tensor, y: Tensor) -> Tensor:
    """The second derivative of the loss along its own gradient, per unit of length: a scalar, the same on all ranks."""

    def loss_fn(p: sf.Params, x: Tensor, y: Tensor) -> Tensor:
        return (sf.apply(model, p, x) - y).square().mean()

    way = sf.grad(loss_fn)(params, x, y)
    bent = sf.hvp(loss_fn, (params, x, y), way)
    return sf.tree.dot(way, bent) / sf.tree.dot(way, way)


def main(steps: int = 60) -> Tensor:
    """Train; returns the last penalized loss."""
    mesh = make_mesh()
    model = make_net()
    params = sf.shard(model, mesh, sf.Policy(rules=RULES))
    x, y = sf.data.local_batch(make_data(64), mesh)
    optimizer = sf.optim.adamw(1e-2)
    state, loss = optimizer.init(params), torch.zeros(())
    step_fn = sf.value_and_grad(lambda p: penalized(model, p, x, y, 0.1))
    for step in range(steps):
        loss, grads = step_fn(params)
        params, state = optimizer.step(params, grads, state)
        if step % 20 == 19:
            bend = curvature(model, params, x, y)
            if sf.data.rank(mesh)[0] == 0:
                print(f"step {step + 1}: penalized loss {loss:.4f}, curvature {bend:.4f}")
    return loss


if __name__ == "__main__":
    main()
