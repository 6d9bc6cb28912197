"""Programs of every transform, alone and nested, each compared with `torch.func` on one process."""

from collections.abc import Callable
from typing import Any

import torch
from models import decoder, policy, tokens
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call

import shardfn as sf
from shardfn.testing import assert_parity
from shardfn.transforms.forward_mode import FORWARD_MODE_DIFFERENTIATED, ByFormulas

MESHES = tuple({"fsdp": f, "tp": t} for f, t in ((4, 1), (2, 2), (1, 4)))
Tree = dict[str, Tensor]


class Program:
    """A decoder with grouped queries and a direction for its weights, in shards and on one process."""

    def __init__(self, mesh: DeviceMesh, layers: int = 2, **fields: Any) -> None:
        kv = 1 if mesh.size(1) > 2 else 2
        self.mesh, self.model = mesh, decoder(kv=kv, layers=layers)
        self.params = sf.shard(self.model, mesh, policy(**fields))
        self.trains = [name for name, p in self.model.named_parameters() if p.requires_grad]
        named = dict(self.model.named_parameters())
        self.plain = {name: named[name].detach() for name in self.trains}
        self.frozen = {name: p.detach() for name, p in named.items() if name not in self.trains}
        direction = decoder(kv=kv, layers=layers)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in direction.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) if p.requires_grad else 0)
        self.direction = sf.shard(direction, mesh, self.params.plan)
        self.plain_direction = {n: p.detach() for n, p in direction.named_parameters() if n in self.trains}
        self.batch = tokens()
        self.local = sf.data.local_batch(self.batch, mesh)

    def loss(self, p: sf.Params, x: Tensor, y: Tensor) -> Tensor:
        """Of a batch, or of one sample."""
        x, y = (x, y) if x.dim() > 1 else (x[None], y[None])
        return sf.cross_entropy(sf.apply(self.model, p, x), y)

    def plain_loss(self, p: Tree, x: Tensor, y: Tensor) -> Tensor:
        """The same on one process."""
        x, y = (x, y) if x.dim() > 1 else (x[None], y[None])
        return sf.cross_entropy(functional_call(self.model, {**p, **self.frozen}, (x,)), y)

    def mean(self, value: Tensor) -> Tensor:
        """Over the data ranks."""
        return sf.collectives.pmean(value, self.mesh, "fsdp")

    def same(self, found: Any, wanted: Tree) -> None:
        if isinstance(found, sf.Params):
            full = sf.gather(found)
            found = {name: full[name] for name in wanted}
        assert_parity(found, wanted, tol=1e-10)


def _grad(at: Program) -> None:
    wanted = torch.func.grad(at.plain_loss)(at.plain, *at.batch)
    grads = sf.grad(at.loss)(at.params, *at.local)
    assert {n: g.placements for n, g in grads.items()} == {n: p.placements for n, p in at.params.items()}
    at.same(grads, wanted)
    at.same(torch.func.grad(at.loss)(at.params, *at.local), wanted)


def _vjp(at: Program) -> None:
    out, pull = sf.vjp(lambda p: at.loss(p, *at.local), at.params)
    wanted_out, wanted_pull, *_ = torch.func.vjp(lambda p: at.plain_loss(p, *at.batch), at.plain)
    at.same({"out": at.mean(out)}, {"out": wanted_out})
    (found,), (wanted,) = pull(torch.full_like(out, 3)), wanted_pull(torch.full_like(out, 3))
    at.same(found, wanted)


def _jvp(at: Program) -> None:
    out, slope = sf.jvp(lambda p: at.loss(p, *at.local), (at.params,), (at.direction,))
    wanted = torch.func.jvp(lambda p: at.plain_loss(p, *at.batch), (at.plain,), (at.plain_direction,))
    at.same({"out": at.mean(out), "slope": at.mean(slope)}, dict(zip(("out", "slope"), wanted, strict=True)))


def _plain_hvp(at: Program, fn: Callable[..., Tensor], *batch: Tensor) -> Tree:
    gradient = torch.func.grad(fn)
    with ByFormulas(FORWARD_MODE_DIFFERENTIATED):  # see test_formulas
        return torch.func.jvp(lambda p: gradient(p, *batch), (at.plain,), (at.plain_direction,))[1]


def _hvp(at: Program) -> None:
    found = sf.hvp(at.loss, (at.params, *at.local), at.direction)
    wanted = _plain_hvp(at, at.plain_loss, *at.batch)
    at.same(found, wanted)
    _, nested = sf.jvp(lambda p: sf.grad(at.loss)(p, *at.local), (at.params,), (at.direction,))
    at.same(nested, wanted)


def _hvp_by_reverse_mode(at: Program) -> None:
    """The gradient of a directional derivative, which torch 2.13 has wrong for a layer norm."""

    def slope(p: sf.Params) -> Tensor:
        return sf.jvp(lambda q: at.loss(q, *at.local), (p,), (at.direction,))[1]

    at.same(sf.grad(slope)(at.params), _plain_hvp(at, at.plain_loss, *at.batch))


def _vmap(at: Program) -> None:
    found = sf.vmap(at.loss, in_dims=(None, 0, 0))(at.params, *at.local)
    wanted = torch.func.vmap(at.plain_loss, in_dims=(None, 0, 0))(at.plain, *at.batch)
    at.same({"out": sf.collectives.all_gather_invariant(found, at.mesh, "fsdp", 0)}, {"out": wanted})


def _per_sample_gradients(at: Program) -> None:
    found = sf.vmap(sf.grad(at.loss), in_dims=(None, 0, 0))(at.params, *at.local)
    assert sf.typeof(found, "layers.0.up.weight").endswith("[b@fsdp ff@tp c]")
    at.same(found, torch.func.vmap(torch.func.grad(at.plain_loss), in_dims=(None, 0, 0))(at.plain, *at.batch))


def _gradient_of_a_vmap(at: Program) -> None:
    def squares(p: Any, *batch: Tensor) -> Tensor:
        return sf.vmap(at.loss, in_dims=(None, 0, 0))(p, *batch).square().mean()

    def plain(p: Tree, *batch: Tensor) -> Tensor:
        return torch.func.vmap(at.plain_loss, in_dims=(None, 0, 0))(p, *batch).square().mean()

    at.same(sf.grad(squares)(at.params, *at.local), torch.func.grad(plain)(at.plain, *at.batch))
    at.same(sf.hvp(squares, (at.params, *at.local), at.direction), _plain_hvp(at, plain, *at.batch))


def _gradient_penalty(at: Program) -> None:
    def penalized(p: sf.Params) -> Tensor:
        loss, grads = sf.value_and_grad(at.loss)(p, *at.local)
        return loss.square() + sf.optim.global_norm(grads) * loss

    def plain(p: Tree) -> Tensor:
        grads, loss = torch.func.grad_and_value(at.plain_loss)(p, *at.batch)
        return loss.square() + torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt() * loss

    at.same(sf.grad(penalized)(at.params), torch.func.grad(plain)(at.plain))
    at.same(sf.hvp(penalized, (at.params,), at.direction), _plain_hvp(at, plain))


def _inner_step(at: Program) -> None:
    """MAML: an update inside, the gradient through it, alone, in a direction, and one for each task."""
    inner = sf.optim.sgd(0.1, momentum=0.5)

    def adapted(p: Any, *batch: Tensor) -> Tensor:
        updates, _ = inner.update(sf.grad(at.loss)(p, *batch), inner.init(p), p)
        return at.loss(sf.optim.apply_updates(p, updates), *batch)

    def plain(p: Tree, *batch: Tensor) -> Tensor:
        grads = torch.func.grad(at.plain_loss)(p, *batch)
        return at.plain_loss({name: p[name] - 0.1 * grads[name] for name in p}, *batch)

    at.same(sf.grad(adapted)(at.params, *at.local), torch.func.grad(plain)(at.plain, *at.batch))
    at.same(sf.hvp(adapted, (at.params, *at.local), at.direction), _plain_hvp(at, plain, *at.batch))
    tasks = sf.vmap(sf.grad(adapted), in_dims=(None, 0, 0))(at.params, *at.local)
    at.same(tasks, torch.func.vmap(torch.func.grad(plain), in_dims=(None, 0, 0))(at.plain, *at.batch))


def _two_inner_steps(at: Program) -> None:
    inner = sf.optim.sgd(0.1, momentum=0.5)

    def adapted(p: Any, *batch: Tensor) -> Tensor:
        q, state = p, inner.init(p)
        for _ in range(2):
            updates, state = inner.update(sf.grad(at.loss)(q, *batch), state, q)
            q = sf.optim.apply_updates(q, updates)
        return at.loss(q, *batch)

    def plain(p: Tree, *batch: Tensor) -> Tensor:
        q, speed = p, {name: torch.zeros_like(x) for name, x in p.items()}
        for _ in range(2):
            grads = torch.func.grad(at.plain_loss)(q, *batch)
            speed = {name: 0.5 * speed[name] + grads[name] for name in p}
            q = {name: q[name] - 0.1 * speed[name] for name in p}
        return at.plain_loss(q, *batch)

    at.same(sf.grad(adapted)(at.params, *at.local), torch.func.grad(plain)(at.plain, *at.batch))


def _clipping_inside(at: Program) -> None:
    def clipped(p: Any, *batch: Tensor) -> Tensor:
        grads, norm = sf.optim.clip(sf.grad(at.loss)(p, *batch), 0.5)
        return sf.optim.global_norm(sf.tree.map(lambda x, g: x - g, p, grads)) + norm

    def plain(p: Tree, *batch: Tensor) -> Tensor:
        grads = torch.func.grad(at.plain_loss)(p, *batch)
        norm = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
        factor = (0.5 / (norm + 1e-6)).clamp(max=1)
        rest = {name: p[name] - factor * grads[name] for name in p}
        whole = [*rest.values(), *at.frozen.values()]
        return torch.stack([x.square().sum() for x in whole]).sum().sqrt() + norm

    at.same(sf.grad(clipped)(at.params, *at.local), torch.func.grad(plain)(at.plain, *at.batch))
    at.same(sf.hvp(clipped, (at.params, *at.local), at.direction), _plain_hvp(at, plain, *at.batch))


def _anchored(at: Program) -> None:
    """A loss that pulls towards a tree from outside, and takes a part from there."""

    def pulled(p: Any, *batch: Tensor) -> Tensor:
        away = sf.tree.map(torch.sub, p, at.direction)
        return at.loss(p | at.params.select("layers.1.**"), *batch) + sf.tree.dot(away, away)

    def plain(p: Tree, *batch: Tensor) -> Tensor:
        away = [(p[name] - at.plain_direction[name]).square().sum() for name in p]
        outer = {name: x for name, x in at.plain.items() if name.startswith("layers.1.")}
        whole = [x.square().sum() for x in at.frozen.values()]  # whose direction is zero
        return at.plain_loss({**p, **outer}, *batch) + torch.stack(away + whole).sum()

    at.same(sf.hvp(pulled, (at.params, *at.local), at.direction), _plain_hvp(at, plain, *at.batch))
    at.same(sf.grad(pulled)(at.params, *at.local), torch.func.grad(plain)(at.plain, *at.batch))


def _directions(at: Program) -> None:
    """Several Hessian-vector products at once: the directions are the same on all data ranks."""
    stack = sf.tree.map(lambda a, b: torch.stack([a, b]), at.direction, at.params)
    found = sf.vmap(lambda p, v: sf.hvp(at.loss, (p, *at.local), v), in_dims=(None, 0))(at.params, stack)
    wanted = _plain_hvp(at, at.plain_loss, *at.batch)
    full = sf.gather(found)
    assert_parity({name: full[name][0] for name in wanted}, wanted, tol=1e-10)


def _jacobians(at: Program) -> None:
    """Of a small function: rows by reverse mode, columns by forward mode, with respect to the batch-wise scale."""
    part = at.params.select("layers.0.scale")

    def logits(p: Any) -> Tensor:
        return sf.apply(at.model, at.params | p, at.local[0])[0, 0, :3]

    def plain(p: Tree) -> Tensor:
        x = at.local[0]
        return functional_call(at.model, {**at.plain, **at.frozen, **p}, (x,))[0, 0, :3]

    rows = torch.func.jacrev(logits)(part)
    wanted = torch.func.jacrev(plain)({"layers.0.scale": at.plain["layers.0.scale"]})
    mean = at.mean(wanted["layers.0.scale"])
    torch.testing.assert_close(rows["layers.0.scale"].full_tensor(), mean, rtol=1e-10, atol=1e-10)


CASES = [
    _grad,
    _vjp,
    _jvp,
    _hvp,
    _hvp_by_reverse_mode,
    _vmap,
    _per_sample_gradients,
    _gradient_of_a_vmap,
    _gradient_penalty,
    _inner_step,
    _two_inner_steps,
    _clipping_inside,
    _anchored,
    _directions,
    _jacobians,
]
