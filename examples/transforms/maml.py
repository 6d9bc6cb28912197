"""Model-agnostic meta-learning: weights from which one step on a task's few samples goes far.

torchrun --standalone --nproc-per-node 4 examples/transforms/maml.py
"""

import torch
from problem import RULES, make_data, make_mesh, make_net
from torch import Tensor, nn

import shardfn as sf

INNER = sf.optim.sgd(0.05)


Pair = tuple[Tensor, Tensor]  # x, y


def meta_loss(model: nn.Module, params: sf.Params, support: Pair, query: Pair) -> Tensor:
    """The loss on the query after a step on the support, of tasks [t, ...] that this data rank has."""

    def loss_fn(p: sf.Params, x: Tensor, y: Tensor) -> Tensor:
        return (sf.apply(model, p, x) - y).square().mean()

    def of_a_task(p: sf.Params, support: Pair, query: Pair) -> Tensor:
        updates, _ = INNER.update(sf.grad(loss_fn)(p, *support), INNER.init(p), p)
        return loss_fn(sf.optim.apply_updates(p, updates), *query)

    return sf.vmap(of_a_task, in_dims=(None, 0, 0))(params, support, query).mean()


def make_tasks(count: int, samples: int, seed: int) -> Pair:
    """x [count, samples, 6], y [count, samples, 1]: task i is another function."""
    pairs = [make_data(samples, seed + i) for i in range(count)]
    return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])


def main(steps: int = 40) -> Tensor:
    """Meta-train; returns the last meta-loss."""
    mesh = make_mesh()
    model = make_net()
    params = sf.shard(model, mesh, sf.Policy(rules=RULES))
    x, y = sf.data.local_batch(make_tasks(8, 20, seed=0), mesh)
    support, query = (x[:, :10], y[:, :10]), (x[:, 10:], y[:, 10:])
    outer = sf.optim.adamw(1e-2)
    state, loss = outer.init(params), torch.zeros(())
    step_fn = sf.value_and_grad(lambda p: meta_loss(model, p, support, query))
    for step in range(steps):
        loss, grads = step_fn(params)
        params, state = outer.step(params, grads, state)
        if step % 20 == 19 and sf.data.rank(mesh)[0] == 0:
            print(f"step {step + 1}: meta-loss {loss:.4f}")
    return loss


if __name__ == "__main__":
    main()
