"""A physics-informed net: it learns a solution of the heat equation from the equation alone, by second derivatives.

    torchrun --standalone --nproc-per-node 4 examples/transforms/pinn.py              # on 2 x 2, three minutes on CPU

The temperature u(x, t) of a rod obeys u_t = A u_xx, is sin(pi x) at the beginning, and 0 at both ends at all times. So
it is exp(-A pi^2 t) sin(pi x), with which the net is compared at the end; it never sees that.
"""

import argparse
import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from problem import make_mesh
from torch import Tensor, nn

import shardfn as sf

A = 0.1
RULES = {"0.weight": "h@tp _", "2.weight": "c@fsdp h@tp", "4.weight": "_ c@fsdp"}


def make_net(seed: int = 0) -> nn.Module:
    """From (x, t) to u; the same on every rank."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def slopes(net: nn.Module, params: sf.Params, z: Tensor) -> Tensor:
    """u_x and u_t, [b, 2]: a sum over points has the slope of each of them."""
    return sf.grad(lambda p, z: sf.apply(net, p, z).sum(), argnums=1)(params, z)


def residual(net: nn.Module, params: sf.Params, z: Tensor) -> Tensor:
    """What is left of u_t - A u_xx at each point, [b]."""
    u_xx = sf.grad(lambda p, z: slopes(net, p, z)[:, 0].sum(), argnums=1)(params, z)[:, 0]
    return slopes(net, params, z)[:, 1] - A * u_xx


def loss_of(net: nn.Module, params: sf.Params, inside: Tensor, begin: Tensor, ends: Tensor) -> Tensor:
    """How far the net is from the equation, from the beginning, and from zero at the ends."""
    wrong = sf.apply(net, params, begin) - torch.sin(math.pi * begin[:, :1])
    return sum(x.square().mean() for x in (residual(net, params, inside), wrong, sf.apply(net, params, ends)))


def draw_points(step: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Points inside, at t = 0, and at both ends, [count, 2] each; the same on every rank."""
    inside, begin, ends = torch.rand(3, count, 2, generator=torch.Generator().manual_seed(step))
    begin[:, 1] = 0
    ends[:, 0].round_()
    return inside, begin, ends


@torch.no_grad()
def draw(path: Path | None, net: nn.Module, size: int = 101) -> float:
    """A picture of the temperature as the net has it, and of its error; returns the largest error."""
    z = torch.cartesian_prod(torch.linspace(0, 1, size), torch.linspace(0, 1, size))
    found = net(z)[:, 0]
    error = found - torch.exp(-A * math.pi**2 * z[:, 1]) * torch.sin(math.pi * z[:, 0])
    if path is not None and find_spec("matplotlib"):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 3.4), layout="constrained")
        for axes, values, title in zip(figure.subplots(1, 2), (found, error), ("u", "error"), strict=True):
            image = axes.imshow(values.reshape(size, size).numpy(), extent=(0, 1, 0, 1), origin="lower", aspect="auto")
            axes.set(xlabel="t", ylabel="x", title=title)
            figure.colorbar(image)
        figure.savefig(path, dpi=110)
    return float(error.abs().max())


def main(argv: Sequence[str] | None = None) -> float:
    """Train; returns the largest error on a grid. Every rank calls this."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--out", type=Path, default=Path("heat.png"))
    options = parser.parse_args(argv)
    steps, mesh, net = options.steps, make_mesh(), make_net()
    params = sf.shard(net, mesh, sf.Policy(rules=RULES))
    optimizer = sf.optim.adamw(sf.optim.warmup_cosine(5e-3, steps // 10, steps), weight_decay=0.0)
    state = optimizer.init(params)
    step_of = sf.value_and_grad(lambda p, *points: loss_of(net, p, *points))
    for step in range(steps):
        loss, grads = step_of(params, *sf.data.local_batch(draw_points(step, 256), mesh))
        params, state = optimizer.step(params, grads, state)
        if mesh.get_rank() == 0 and (step + 1) % (steps // 5) == 0:
            print(f"step {step + 1}: loss {loss:.2e}", flush=True)
    net.load_state_dict(sf.gather(params))
    error = draw(options.out if mesh.get_rank() == 0 else None, net)
    if mesh.get_rank() == 0:
        print(f"largest error {error:.4f}; picture: {options.out}")
    return error


if __name__ == "__main__":
    main()
