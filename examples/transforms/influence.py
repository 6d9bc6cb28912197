"""Influence functions: which training samples raise or lower the loss on a test sample, to first order.

    torchrun --standalone --nproc-per-node 4 examples/transforms/influence.py

Conjugate gradients solve `(H + damping) v = gradient of the test loss` with Hessian-vector products alone; the
influence of a sample is the product of its own gradient with v.
"""

from problem import RULES, make_data, make_mesh, make_net
from torch import Tensor, nn

import shardfn as sf

DAMPING = 0.1


def solve(model: nn.Module, params: sf.Params, batch: tuple[Tensor, Tensor], goal: sf.Params, steps: int) -> sf.Params:
    """v with `(H + damping) v = goal`, by conjugate gradients; the damping must outweigh negative curvature."""

    def loss_fn(p: sf.Params, x: Tensor, y: Tensor) -> Tensor:
        return (sf.apply(model, p, x) - y).square().mean()

    v = sf.tree.zeros_like(goal)
    rest = way = goal
    size = sf.tree.dot(rest, rest)
    for _ in range(steps):
        bent = sf.tree.map(lambda h, w: h + DAMPING * w, sf.hvp(loss_fn, (params, *batch), way), way)
        length = size / sf.tree.dot(way, bent)
        v = sf.tree.map(lambda a, w, n=length: a + n * w, v, way)
        rest = sf.tree.map(lambda r, b, n=length: r - n * b, rest, bent)
        size, before = sf.tree.dot(rest, rest), size
        way = sf.tree.map(lambda r, w, n=size / before: r + n * w, rest, way)
    return v


def influences(model: nn.Module, params: sf.Params, x: Tensor, y: Tensor, v: sf.Params) -> Tensor:
    """[b]: of this data rank's samples, by one forward-mode derivative of all their losses in the direction v."""

    def losses(p: sf.Params) -> Tensor:
        return (sf.apply(model, p, x) - y).square().sum(1)

    return -sf.jvp(losses, (params,), (v,))[1]


def main(steps: int = 10) -> Tensor:
    """Train a little, then print the most helpful and the most harmful sample of each data rank."""
    mesh = make_mesh()
    model, (test_x, test_y) = make_net(), make_data(1, seed=7)
    params = sf.shard(model, mesh, sf.Policy(rules=RULES))
    x, y = sf.data.local_batch(make_data(64), mesh)
    optimizer = sf.optim.adamw(1e-2)
    state = optimizer.init(params)
    train = sf.value_and_grad(lambda p: (sf.apply(model, p, x) - y).square().mean())
    for _ in range(50):
        params, state = optimizer.step(params, train(params)[1], state)
    goal = sf.grad(lambda p: (sf.apply(model, p, test_x) - test_y).square().mean())(params)
    found = influences(model, params, x, y, solve(model, params, (x, y), goal, steps))
    if mesh.get_local_rank("tp") == 0:
        print(f"data rank {sf.data.rank(mesh)[0]}: helps most {int(found.argmin())}, harms most {int(found.argmax())}")
    return found


if __name__ == "__main__":
    main()
