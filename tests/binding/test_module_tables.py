"""The user's own modules run in the classes: what a forward reaches beside `self` is what the user made."""

import copy
import inspect
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import shardfn as sf
from shardfn.comm import buckets
from shardfn.compat.fsdp1 import FullyShardedDataParallel as FSDP
from shardfn.compat.fsdp2 import fully_shard, register_fsdp_forward_method
from shardfn.compat.hfai import FullyShardedDataParallel as HFAI
from shardfn.compat.megatron import TorchFullyShardedDataParallel
from shardfn.notation.errors import ShardError
from shardfn.testing import assert_close, assert_parity, on_meshes, run

KINDS = ["trainer", "fsdp1", "fsdp2", "hfai", "megatron"]
every_kind = pytest.mark.parametrize("kind", KINDS)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + torch.tanh(self.fc(x))

    def twice(self, x: Tensor) -> Tensor:
        return self(self(x))


class Net(nn.Module):
    """Two units between two weights of the root."""

    blocks: Any
    first: Any

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.seen: list[Any] = []
        self.set_up()

    def set_up(self) -> None:
        """What a kind of net keeps of its modules."""

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self)
        return self.last(self.middle(self.first(x)))


class Closures(Net):
    def set_up(self) -> None:
        self.steps = [lambda x, block=block: block(x) + block.fc.weight.sum() for block in self.blocks]

    def middle(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


class ByModule(Net):
    def set_up(self) -> None:
        self.scales = {block: at + 2.0 for at, block in enumerate(self.blocks)}
        self.special = {self.blocks[1]}

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * self.scales[block] + (block in self.special)
        return x


class Lists(Net):
    def set_up(self) -> None:
        self.order = (self.blocks[1], [self.blocks[0], {"again": self.blocks[1]}])

    def middle(self, x: Tensor) -> Tensor:
        last, (first, more) = self.order
        return more["again"](last(first(x)))


REGISTRY: dict[str, nn.Module] = {}


class Registered(Net):
    def set_up(self) -> None:
        REGISTRY["block"] = self.blocks[0]

    def middle(self, x: Tensor) -> Tensor:
        weight: Any = REGISTRY["block"]
        return REGISTRY["block"](x) @ weight.fc.weight


class Parent(Net):
    class Child(Block):
        root: list[Any]

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.root[0].first.bias.sum()

    def set_up(self) -> None:
        self.blocks[0] = self.Child()
        self.blocks[0].__dict__["root"] = [self]


class Methods(Net):
    def set_up(self) -> None:
        block: Any = self.blocks[0]
        self.run, self.more, self.plain = block.twice, partial(Block.twice, block), block.fc.forward

    def middle(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.plain(self.more(self.run(x))))


class Hooks(Net):
    def set_up(self) -> None:
        first, second = self.blocks

        def after(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            assert module is first
            return out + second.fc.bias

        first.register_forward_hook(after)
        second.register_forward_pre_hook(lambda _, args: (args[0] * first.fc.weight.mean(),))
        second.register_full_backward_hook(lambda _, given, grads: (given[0] * 2,))


class Patched(Net):
    def set_up(self) -> None:
        def forward(own: Any, x: Tensor) -> Tensor:
            return own.fc(x) * 3

        block: Any = self.blocks[0]
        block.forward = MethodType(forward, block)
        inner = self.blocks[1].forward
        self.blocks[1].forward = lambda x: inner(x) + block.fc.bias


class Static(Net):
    """A unit whose forward is no method."""

    Child: Any = type("Child", (Block,), {"forward": staticmethod(lambda x: torch.tanh(x))})

    def set_up(self) -> None:
        self.blocks[0] = self.Child()


class Recurrent(Net):
    def set_up(self) -> None:
        self.rnn = nn.LSTM(6, 6, num_layers=2, batch_first=True)

    def middle(self, x: Tensor) -> Tensor:
        return super().middle(self.rnn(x[:, None])[0][:, 0])


class Checkpoints(Net):
    """Blocks, closures and methods that compute again in the backward, in torch's two ways."""

    reentrant = False

    def middle(self, x: Tensor) -> Tensor:
        again = partial(checkpoint, use_reentrant=self.reentrant)
        first, second = self.blocks
        x = again(first, x)
        x = again(lambda y: second(y) * first.fc.weight.sum(), x)
        x = again(lambda y: super(Checkpoints, self).middle(y) + self.first.bias, x)
        return again(second.twice, x) + again(second.fc.forward, x)


class ReentrantCheckpoints(Checkpoints):
    reentrant = True


class SelectiveCheckpoint(Net):
    """Products are kept, the rest computes again."""

    def middle(self, x: Tensor) -> Tensor:
        products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
        contexts = partial(create_selective_checkpoint_contexts, products)
        return checkpoint(super().middle, x, use_reentrant=False, context_fn=contexts)


class OwnFunction(Net):
    """A backward that reads a weight."""

    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, block: Any) -> Tensor:
            ctx.block = block
            return x @ block.fc.weight

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return grads[0] @ ctx.block.fc.weight.T, None

    def middle(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.Times.apply(x, self.blocks[0]))


class Calls(Net):
    """`functional_call` of a unit, which puts tensors in the places of weights, once around itself."""

    def middle(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        doubled = {name: 2 * p for name, p in first.named_parameters()}
        x = torch.func.functional_call(first, doubled, (x,)) + first(x)
        return torch.func.functional_call(self, {"last.bias": self.last.bias * 3}, (x[:, :4],)).sum() + second(x)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self)
        inner = len(self.seen) % 2 == 0
        return self.last(self.first(x) if inner else self.middle(self.first(x)))


class Transforms(Net):
    def middle(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        both: Any = torch.func.jvp(lambda z: first(z) @ self.first.weight, (x,), (torch.ones_like(x),))
        return torch.func.vmap(second)(x) + (both[0] + both[1]).sum()


class Threads(Net):
    """Units in another thread; other modules there have shards, which is an error."""

    def middle(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(super().middle, x).result()


class Opaque(Net):
    """An output that is no container, and a checkpoint of everything, which leaves nothing else in the graph."""

    class Output(SimpleNamespace):
        def square(self) -> Tensor:
            return self.value.square()

    def forward(self, x: Tensor) -> Any:
        self.seen.append(self)
        x = x.clone().requires_grad_()
        run = super().forward
        return self.Output(value=checkpoint(lambda y: (run(y), self.seen.pop())[0], x, use_reentrant=True))


class HiddenOutput(Net):
    """A loss that only an attribute holds, of checkpoints."""

    reentrant = False

    def forward(self, x: Tensor) -> Any:
        self.seen.append(self)
        x = x.clone().requires_grad_()
        run = super().forward
        again = partial(checkpoint, use_reentrant=self.reentrant)
        self.loss = again(lambda y: (run(y), self.seen.pop())[0], x)
        return self

    def square(self) -> Tensor:
        return self.loss.square()


class HiddenReentrantOutput(HiddenOutput):
    reentrant = True


class Distribution(Net):
    def forward(self, x: Tensor) -> Any:
        run, x = super().forward, x.clone().requires_grad_()
        mean = checkpoint(lambda y: (run(y), self.seen.pop())[0], x, use_reentrant=True)
        return Nested(torch.distributions.Independent(torch.distributions.Normal(mean, 1.0), 1))


class Nested:
    """An object without a dict."""

    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def square(self) -> Tensor:
        return self.inner.mean.square()


class Copied(Net):
    """Units that are copied, with attributes of their own."""

    class Child(Block):
        scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    def set_up(self) -> None:
        self.blocks[0] = self.Child()

    def middle(self, x: Tensor) -> Tensor:
        block: Any = self.blocks[0]
        twin = copy.copy(getattr(block, "module", block))
        twin.scale = 2.0
        return self.blocks[1](twin(x) + block(x))


class Asks(Net):
    """What weights are, and weights by their names."""

    def middle(self, x: Tensor) -> Tensor:
        x = super().middle(x) if isinstance(self.first.weight, nn.Parameter) else x
        block: Any = self.blocks[0]
        inner = getattr(block, "module", block)
        return x * self.get_parameter("first.bias").sum() + inner.get_parameter("fc.weight").sum()


class Norms(Net):
    def set_up(self) -> None:
        self.norm = nn.BatchNorm1d(6, track_running_stats=True)
        self.register_buffer("count", torch.zeros(()))

    def middle(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        self.register_buffer("last_mean", x.detach().mean() * 0, persistent=False)
        return super().middle(self.norm(torch.cat([x, x * 0 + 1]))[: len(x)] * 0 + x * self.count)


class Tied(Net):
    def set_up(self) -> None:
        self.twin = nn.Linear(4, 6)
        self.twin.weight = self.first.weight

    def middle(self, x: Tensor) -> Tensor:
        return super().middle(x) + self.twin(x[:, :4]) + sum(p.square().sum() for p in self.parameters()) * 1e-2


class Recursive(Net):
    depth = 0

    def middle(self, x: Tensor) -> Tensor:
        if self.depth:
            return super().middle(x)
        self.depth = 1
        try:
            return super().middle(x) + self(x[:, :4]).sum()
        finally:
            del self.depth


NETS: list[type[Net]] = [
    Closures,
    ByModule,
    Lists,
    Registered,
    Parent,
    Methods,
    Hooks,
    Patched,
    Static,
    Recurrent,
    Checkpoints,
    ReentrantCheckpoints,
    SelectiveCheckpoint,
    OwnFunction,
    Calls,
    Transforms,
    Threads,
    Opaque,
    HiddenOutput,
    HiddenReentrantOutput,
    Distribution,
    Copied,
    Asks,
    Norms,
    Tied,
    Recursive,
]


def _sharded(kind: str, model: nn.Module, mesh: DeviceMesh, **given: Any) -> Any:
    """A model in a class, its blocks as units."""
    if kind == "trainer":
        return sf.Trainer(model, mesh, sf.Policy(units=["blocks.*"]))
    if kind in ("fsdp1", "hfai"):
        return {"fsdp1": FSDP, "hfai": HFAI}[kind](model, auto_wrap_policy=ModuleWrapPolicy({Block}), **given)
    if kind == "fsdp2":
        for block in (m for m in model.modules() if isinstance(m, Block)):
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    config = SimpleNamespace(transformer_impl="local", recompute_granularity=None)
    return TorchFullyShardedDataParallel(config, SimpleNamespace(), model, {Block})


def _pair(kind: str, net: Callable[[], nn.Module], mesh: DeviceMesh) -> tuple[Any, Any, Any]:
    """The class, the model that it was given, and the same model in one process."""
    torch.manual_seed(0)
    plain = net().double()
    torch.manual_seed(0)
    model = net().double()
    return _sharded(kind, model, mesh), model, plain


def _own_rows(step: int = 0) -> tuple[Tensor, Tensor]:
    """This rank's part of a batch, and all of it."""
    x = torch.randn(dist.get_world_size(), 3, 4, generator=torch.Generator().manual_seed(step)).double()
    return x[dist.get_rank()], x.flatten(0, 1)


def _require_grads(model: nn.Module, plain: nn.Module) -> None:
    want = {name: p.grad for name, p in plain.named_parameters()}
    for name, p in model.named_parameters():
        expected = want[name]
        if expected is None:
            assert p.grad is None, name
        else:
            assert isinstance(p.grad, DTensor), name
            assert_close(buckets.whole(p.grad), expected)


@pytest.mark.everyday(8)
@pytest.mark.sample(70)
@pytest.mark.parametrize("net", NETS, ids=lambda net: net.__name__)
@every_kind
@on_meshes({"fsdp": 2})
def test_what_a_forward_reaches_is_what_the_user_made(mesh: DeviceMesh, kind: str, net: type[Net]) -> None:
    sharded, model, plain = _pair(kind, net, mesh)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (sharded, plain)]
    for step in range(3):
        own, rows = _own_rows(step)
        own = rows if net in (Norms, Recursive, Calls, Transforms) else own  # means over rows
        for each, x, optimizer in ((sharded, own, optimizers[0]), (plain, rows, optimizers[1])):
            if net is Registered:
                REGISTRY["block"] = (model if each is sharded else plain).blocks[0]
            optimizer.zero_grad()
            each(x).square().mean().backward()
            optimizer.step()
        _require_grads(model, plain)
    assert len(model.seen) == len(plain.seen)
    assert all(each is model for each in model.seen)
    calls = [[getattr(b, "calls", 0) for b in each.modules()] for each in (model, plain)]
    assert calls[0] == calls[1]
    for name, buffer in plain.named_buffers():
        assert_close(dict(model.named_buffers())[name], buffer)


@pytest.mark.everyday(7)
@pytest.mark.parametrize("net", NETS, ids=lambda net: net.__name__)
@on_meshes({"fsdp": 2})
def test_what_a_step_of_a_trainer_reaches_is_what_the_user_made(mesh: DeviceMesh, net: type[Net]) -> None:
    torch.manual_seed(0)
    plain = net().double()
    torch.manual_seed(0)
    model = net().double()
    trainer = sf.Trainer(
        model,
        mesh,
        sf.Policy(units=["blocks.*"]),
        optimizer=sf.optim.sgd(0.01),
        loss_fn=lambda p, x: sf.apply(model, p, x).square().mean(),
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    for step in range(3):
        own, rows = _own_rows(step)
        own = rows if net in (Norms, Recursive, Calls, Transforms) else own  # means over rows
        REGISTRY["block"] = model.blocks[0]
        if net in (ReentrantCheckpoints, Opaque, HiddenReentrantOutput, Distribution):
            # torch has gradients of these in .backward() only
            with pytest.raises((RuntimeError, ShardError), match="use_reentrant=False"):
                trainer.step(own)
            return
        loss = trainer.step(own)["loss"]
        REGISTRY["block"] = plain.blocks[0]
        optimizer.zero_grad()
        want = plain(rows).square().mean()
        want.backward()
        optimizer.step()
        assert_close(loss, want.detach())
        if step == 1:
            REGISTRY["block"] = model.blocks[0]
            got = trainer.evaluate(own)["loss"]
            REGISTRY["block"] = plain.blocks[0]
            assert_close(got, plain.eval()(rows).square().mean().detach())
            plain.train()
    whole = sf.gather(trainer.params)
    for name, p in plain.named_parameters():
        assert_close(whole[name].detach(), p.detach())
    for name, buffer in plain.named_buffers():
        assert_close(dict(model.named_buffers())[name], buffer)
    assert len(model.seen) == len(plain.seen)
    assert all(each is model for each in model.seen)


@on_meshes({"fsdp": 2})
def test_buffers_of_a_loss_that_computes_in_place_and_by_copies(mesh: DeviceMesh) -> None:
    """Under a `dropout_seed` copies compute, whose buffers go on from those of the modules, and back."""

    class Counts(Net):
        def set_up(self) -> None:
            self.register_buffer("count", torch.zeros(()))
            self.drop = nn.Dropout(0.5)

        def middle(self, x: Tensor) -> Tensor:
            self.count = self.count + 1
            return super().middle(self.drop(x) * 0 + x) * self.count

    def loss(p: sf.Params, x: Tensor) -> Tensor:
        total = sf.apply(model, p, x).sum()
        with sf.data.dropout_seed(1):
            total = total + sf.apply(model, p, x).sum()
        return total + sf.apply(model, p, x).sum()

    model = Counts().double()
    trainer = sf.Trainer(model, mesh, optimizer=sf.optim.sgd(0.01), loss_fn=loss, accumulate=3)
    for calls in (9, 18):
        trainer.step(_own_rows()[0])
        assert model.count == calls
    trainer(_own_rows()[0])
    assert model.count == 19
    assert trainer.params.buffers["count"] == 19


@every_kind
@on_meshes({"fsdp": 2})
def test_parameters_are_shards_for_everybody_else(mesh: DeviceMesh, kind: str) -> None:
    def kinds_now(module: Any) -> set[bool]:
        found = [module.weight, module._parameters["bias"], *module.parameters(), *dict(module._parameters).values()]
        return {isinstance(x, DTensor) for x in found}

    class Asks(Net):
        def middle(self, x: Tensor) -> Tensor:
            found.append(("inside", kinds_now(self.first)))
            thread = threading.Thread(target=lambda: found.append(("elsewhere", kinds_now(self.first))))
            thread.start()
            thread.join()
            return super().middle(x)

    found: list[tuple[str, set[bool]]] = []
    sharded, model, _ = _pair(kind, Asks, mesh)
    model.first.weight.register_post_accumulate_grad_hook(lambda _: found.append(("hook", kinds_now(model.first))))
    out = sharded(_own_rows()[0])
    found.append(("after", kinds_now(model.first)))
    out.sum().backward()
    found.append(("at last", kinds_now(model.first)))
    assert found == [
        ("inside", {False}),
        ("elsewhere", {True}),
        ("after", {True}),
        ("hook", {True}),
        ("at last", {True}),
    ]


@every_kind
@on_meshes({"fsdp": 2})
def test_an_error_leaves_shards(mesh: DeviceMesh, kind: str) -> None:
    class Fails(Net):
        def middle(self, x: Tensor) -> Tensor:
            if len(self.seen) == 1:
                raise KeyError("no")
            return super().middle(x)

    sharded, model, plain = _pair(kind, Fails, mesh)
    own, rows = _own_rows()
    for each in (sharded, plain):
        with pytest.raises(KeyError):
            each(own)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    sharded(own).mean().backward()
    plain(rows).mean().backward()
    _require_grads(model, plain)


class Assigns(Net):
    def middle(self, x: Tensor) -> Tensor:
        self.blocks[0].fc.weight = nn.Parameter(torch.ones(6, 6).double())
        return x


class Deletes(Net):
    def middle(self, x: Tensor) -> Tensor:
        del self.blocks[0].fc.weight
        return x


class Yields(Net):
    def forward(self, x: Tensor) -> Any:
        return (block(self.first(x)) for block in self.blocks)


class YieldsInside(Net):
    def forward(self, x: Tensor) -> Any:
        return {"of": map(self.first, [x])}


class Keeps(Net):
    def middle(self, x: Tensor) -> Tensor:
        self.kept = self.first.weight
        return super().middle(x)


class Grows(Net):
    def middle(self, x: Tensor) -> Tensor:
        self.extra = nn.Linear(6, 6).double()
        return self.extra(super().middle(x))


class Races(Net):
    """A thread is in the first unit, when the call's own goes through the second one."""

    def set_up(self) -> None:
        self.begun, self.done = threading.Event(), threading.Event()
        block: Any = self.blocks[0]
        block.fc.register_forward_hook(lambda *_: self.begun.set() or (self.done.wait(60) and None))

    def second(self, pool: ThreadPoolExecutor, x: Tensor) -> Tensor:
        return self.blocks[1](x)

    def middle(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(self.blocks[0], x)
            self.begun.wait(60)
            try:
                return self.second(pool, x) + first.result()
            finally:
                self.done.set()


class TwoRace(Races):
    """Another thread goes through the second one."""

    def second(self, pool: ThreadPoolExecutor, x: Tensor) -> Tensor:
        return pool.submit(self.blocks[1], x).result()


class Writes(Net):
    def middle(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.blocks[0].fc.weight.mul_(2)
        return super().middle(x)


@pytest.mark.everyday(1000)
@pytest.mark.parametrize(
    ("net", "error", "words"),
    [
        (Assigns, ShardError, "a forward assigns the parameter 'weight'"),
        (Deletes, ShardError, "a forward deletes the parameter 'weight'"),
        (Yields, ShardError, "the forward returns a generator"),
        (YieldsInside, ShardError, "the forward returns a map"),
        (Keeps, ValueError, "Cannot assign non-leaf Tensor to parameter 'kept'"),
        (Grows, ShardError, "'extra.weight' was added by a forward"),
        (Races, ShardError, "two threads compute"),
        (TwoRace, ShardError, "two threads compute"),
        (Writes, RuntimeError, "'blocks.0.fc.weight' was changed in place by the forward"),
    ],
)
@every_kind
@on_meshes({"fsdp": 2})
def test_refused(mesh: DeviceMesh, kind: str, net: type[Net], error: type[Exception], words: str) -> None:
    sharded, model, _ = _pair(kind, net, mesh)
    with pytest.raises(error, match=words):
        sharded(_own_rows()[0]).sum().backward()
    assert all(isinstance(p, DTensor) for name, p in model.named_parameters() if "extra" not in name)


@every_kind
@on_meshes({"fsdp": 2})
def test_parameters_that_are_replaced_afterwards(mesh: DeviceMesh, kind: str) -> None:
    sharded, model, _ = _pair(kind, Net, mesh)
    own, _ = _own_rows()
    sharded(own)
    del model.last.weight
    model.last.weight_g, model.last.weight_v = (nn.Parameter(torch.ones(2, n).double()) for n in (1, 6))
    with pytest.raises(ShardError, match=r"was added to a module|no shard but|was taken away"):
        sharded(own)


@every_kind
@on_meshes({"fsdp": 2})
def test_a_forward_given_afterwards(mesh: DeviceMesh, kind: str) -> None:
    sharded, model, plain = _pair(kind, Net, mesh)
    own, rows = _own_rows()
    for each in (sharded, plain):
        each(own)
    for each in (model, plain):  # the library's own is called by the first one, and forgotten by the second one
        block, inner = each.blocks[0], each.blocks[0].forward
        block.forward = lambda x, inner=inner, block=block: inner(x) * 2 + block.fc.bias
        each.blocks[1].forward = lambda x, block=block: block.fc(x)
    for _ in range(2):
        for each, x in ((sharded, own), (plain, rows)):
            each.zero_grad()
            each(x).mean().backward()
        _require_grads(model, plain)
    for each in (model, plain):
        del each.blocks[0].forward, each.blocks[1].forward
    for each, x in ((sharded, own), (plain, rows)):
        each.zero_grad()
        each(x).mean().backward()
    _require_grads(model, plain)


@pytest.mark.everyday(4)
@pytest.mark.parametrize("latest_first", [True, False])
@pytest.mark.parametrize("net", [Checkpoints, ReentrantCheckpoints])
@every_kind
@on_meshes({"fsdp": 2})
def test_two_calls_and_then_their_backwards(mesh: DeviceMesh, kind: str, net: type[Net], latest_first: bool) -> None:
    sharded, model, plain = _pair(kind, net, mesh)
    for each, at in ((sharded, 0), (plain, 1)):
        losses = [each(_own_rows(step)[at]).square().mean() for step in (0, 1)]
        for loss in reversed(losses) if latest_first else losses:
            loss.backward()
    _require_grads(model, plain)


def _in_two_precisions(net: type[Net]) -> Any:
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    model = FSDP(net(), auto_wrap_policy=ModuleWrapPolicy({Block}), mixed_precision=precision)
    for own in FSDP.fsdp_modules(model):
        own.__dict__["_shardfn_record"].full_precision_in_eval = True
    return model


@pytest.mark.parametrize("net", [Checkpoints, ReentrantCheckpoints])
@on_meshes({"fsdp": 2})
def test_a_checkpoint_computes_again_in_the_precision_of_its_call(mesh: DeviceMesh, net: type[Net]) -> None:
    dtypes: list[torch.dtype] = []
    model = _in_two_precisions(net)
    model.blocks[0].module.fc.register_forward_pre_hook(lambda module, _: dtypes.append(module.weight.dtype))
    x = torch.ones(3, 4)
    low, full = model.train()(x).sum(), model.eval()(x).sum()
    for loss, dtype in ((low, torch.bfloat16), (full, torch.float32), (low, torch.bfloat16)):
        dtypes.clear()
        loss.backward(retain_graph=True)
        assert dtypes
        assert set(dtypes) == {dtype}


@on_meshes({"fsdp": 2})
def test_a_backward_that_has_saved_nothing_reads_the_weights_of_its_call(mesh: DeviceMesh) -> None:
    dtypes: list[torch.dtype] = []

    class OnlyFunction(OwnFunction):
        def forward(self, x: Tensor) -> Any:
            return self.Times.apply(x.clone().requires_grad_(), self.Late(self.first))

        class Late:
            """Reads the weight when it is asked."""

            def __init__(self, layer: Any) -> None:
                self.layer = layer

            @property
            def fc(self) -> Any:
                dtypes.append(self.layer.weight.dtype)
                return SimpleNamespace(weight=self.layer.weight.T)

    model = _in_two_precisions(OnlyFunction)
    x = torch.ones(3, 4)
    low = model.train()(x).sum()
    full = model.eval()(x).sum()
    low.backward()
    full.backward()
    model.train()(x).sum().backward()
    assert dtypes == [torch.bfloat16, torch.float32] * 2 + [torch.bfloat16] * 2


@every_kind
@on_meshes({"fsdp": 2})
def test_a_backward_that_runs_twice_reads_what_weights_are_now(mesh: DeviceMesh, kind: str) -> None:
    class Shadowed(Net):
        """A backward that reads the weight of a unit which gets no gradient."""

        def middle(self, x: Tensor) -> Tensor:
            return OwnFunction.Times.apply(x, self.blocks[0])

    sharded, model, plain = _pair(kind, Shadowed, mesh)
    own, rows = _own_rows()
    losses = [(model, sharded(own).mean()), (plain, plain(rows).mean())]
    for factor in (2, 3):
        for each, loss in losses:
            loss.backward(retain_graph=True)
            block = each.blocks[0]
            with torch.no_grad():
                getattr(block, "module", block).fc.weight.mul_(factor)
        _require_grads(model, plain)


@on_meshes({"fsdp": 2})
def test_inputs_of_a_unit_are_cast_however_it_is_called(mesh: DeviceMesh) -> None:
    class Casts(Closures):
        def set_up(self) -> None:
            super().set_up()
            self.dtypes: list[torch.dtype] = []
            self.blocks[0].fc.register_forward_hook(lambda *given: self.dtypes.append(given[2].dtype))

        def middle(self, x: Tensor) -> Tensor:
            return super().middle(x.float())

    model, low = Casts(), torch.bfloat16
    precision = MixedPrecision(param_dtype=low, cast_forward_inputs=True)
    sharded = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), mixed_precision=precision)
    sharded(torch.ones(3, 4)).sum().backward()
    inner = model.blocks[0].module  # a forward that is given afterwards is one of a unit, too
    inner.forward = lambda x: inner.fc(x) * 2
    sharded(torch.ones(3, 4)).sum().backward()
    assert model.dtypes == [low, low]


@on_meshes({"fsdp": 2})
def test_a_sharded_model_calls_another(mesh: DeviceMesh) -> None:
    class Student(Net):
        def set_up(self) -> None:
            self.teacher: list[Any] = []

        def middle(self, x: Tensor) -> Tensor:
            teacher = self.teacher[0]
            return super().middle(x) + teacher(x[:, :4]).sum() + checkpoint(teacher, x[:, 2:], use_reentrant=True).sum()

    for kinds in (("fsdp2", "fsdp1"), ("trainer", "trainer"), ("fsdp1", "trainer")):
        (teacher, _, other), (sharded, model, plain) = _pair(kinds[0], Closures, mesh), _pair(kinds[1], Student, mesh)
        model.teacher, plain.teacher = [teacher], [other]
        _, rows = _own_rows()
        for each in (sharded, plain):
            each(rows).mean().backward()
        _require_grads(model, plain)
        _require_grads(teacher.module if kinds[0] == "trainer" else teacher, other)


@on_meshes({"fsdp": 2})
def test_copies_of_modules_are_plain(mesh: DeviceMesh) -> None:
    """What is copied or pickled between steps belongs to nobody."""
    sharded, model, _ = _pair("trainer", Recurrent, mesh)
    x, _ = _own_rows()
    before = sharded(x)
    assert all(type(module._parameters) is dict for module in copy.deepcopy(model).modules())
    other = sf.Trainer(copy.deepcopy(Recurrent().double()), mesh)
    other.load_state_dict(sharded.state_dict())
    assert_close(other(x), before)
    made = copy.deepcopy(model.blocks[0])
    with pytest.raises(RuntimeError, match="DTensor"):
        made(x @ torch.ones(4, 6).double())  # a shard is no weight, and the copy is in no call
    own = FSDP(ByModule().double(), auto_wrap_policy=ModuleWrapPolicy({Block}))
    own(x)
    twin = copy.deepcopy(own)
    for p in own.parameters():
        p.data.zero_()
    assert not twin(x).eq(0).all()
    twin = copy.deepcopy(FSDP(Closures().double(), auto_wrap_policy=ModuleWrapPolicy({Block})))
    with pytest.raises(ShardError, match="a shard meets a tensor"):  # the copy has the closures of the first one
        twin(x)


@on_meshes({"fsdp": 2})
def test_other_methods_reach_units(mesh: DeviceMesh) -> None:
    class Encodes(Closures):
        def encode(self, x: Tensor) -> Tensor:
            return self.middle(self.first(x))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.encode(x))

    _, model, plain = _pair("fsdp2", Encodes, mesh)
    register_fsdp_forward_method(model, "encode")
    own, rows = _own_rows()
    for each, x in ((model, own), (plain, rows)):
        (each.encode(x).mean() + each(x).mean()).backward()
    _require_grads(model, plain)


@on_meshes({"fsdp": 2})
def test_a_selective_checkpoint_of_functions(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = SelectiveCheckpoint().double()
    params = sf.shard(model, mesh, sf.Policy(units=["blocks.*"]))
    own, rows = _own_rows()
    grads = sf.grad(lambda p: sf.apply(model, p, own).mean())(params)
    model(rows).mean().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert_close(buckets.whole(grads[name]), p.grad)


@on_meshes({"fsdp": 2})
def test_fsdp1_applies_a_function_in_a_forward(mesh: DeviceMesh) -> None:
    class Applies(Net):
        def middle(self, x: Tensor) -> Tensor:
            norms: list[Tensor] = []
            self.apply(lambda module: norms.append(module.fc.weight.norm()) if isinstance(module, Block) else None)
            return super().middle(x) * torch.stack(norms).sum()

    sharded, model, plain = _pair("fsdp1", Applies, mesh)
    own, rows = _own_rows()
    sharded(own).mean().backward()
    plain(rows).mean().backward()
    _require_grads(model, plain)


@on_meshes({"fsdp": 2})
def test_unshard_in_a_forward_changes_nothing(mesh: DeviceMesh) -> None:
    class Fetches(Net):
        def middle(self, x: Tensor) -> Tensor:
            block: Any = self.blocks[1]
            if (fetch := getattr(block, "unshard", None)) is not None:
                handle = fetch(async_op=True)
                handle.wait()
            x = super().middle(x)
            if fetch is not None:
                block.reshard()
            return x

    sharded, model, plain = _pair("fsdp2", Fetches, mesh)
    own, rows = _own_rows()
    sharded(own).mean().backward()
    plain(rows).mean().backward()
    _require_grads(model, plain)


@every_kind
@on_meshes({"fsdp": 2})
def test_the_signature_of_a_forward_stays(mesh: DeviceMesh, kind: str) -> None:
    sharded, model, _ = _pair(kind, Net, mesh)
    sharded(_own_rows()[0])
    block = getattr(model.blocks[0], "module", model.blocks[0])
    assert str(inspect.signature(block.forward)) == "(x: torch.Tensor) -> torch.Tensor"
    assert block.forward.__self__ is block


@every_kind
@on_meshes({"fsdp": 2})
def test_a_parameter_that_is_added_between_calls_is_an_error(mesh: DeviceMesh, kind: str) -> None:
    sharded, model, _ = _pair(kind, Net, mesh)
    sharded(_own_rows()[0])
    model.first.register_parameter("scale", nn.Parameter(torch.ones(6).double()))
    with pytest.raises(ShardError, match="added"):
        sharded(_own_rows()[0])


@on_meshes({"fsdp": 2})
def test_a_copy_computes_with_its_own_weights(mesh: DeviceMesh) -> None:
    sharded, model, _ = _pair("trainer", Patched, mesh)
    x, _ = _own_rows()
    with sharded.summon_full_params():
        twin, before = copy.deepcopy(model.blocks[0]), model.blocks[0](x @ torch.ones(4, 6).double())
        with torch.no_grad():
            twin.fc.weight.zero_()
            twin.fc.bias.zero_()
        assert twin(x @ torch.ones(4, 6).double()).eq(0).all() and not before.eq(0).all()


# -- `apply`, and weights that compute axes split ----------------------------------------------------------------------

REFUSED_BY_TORCH = (ReentrantCheckpoints, Opaque, HiddenReentrantOutput, Distribution)  # gradients of chosen leaves
SPLIT = [
    ByModule,
    Lists,
    Parent,
    Patched,
    Static,
    Recurrent,
    SelectiveCheckpoint,
    HiddenOutput,
    Copied,
    Norms,
    Recursive,
]
ROWS = sf.Policy(units=["blocks.*"], rules={"blocks.*.fc.weight": "c@fsdp f@tp"})


def _require_like_one_process(
    model: Any, plain: Any, gradients: Callable[[Tensor], Any], batch: Callable[[int], tuple[Tensor, Tensor]]
) -> None:
    """That three steps of a model give the gradients of one process, and run the user's own modules as often."""
    for step in range(3):
        own, rows = batch(step)
        plain.zero_grad()
        plain(rows).square().mean().backward()
        found = gradients(own)
        for name, p in plain.named_parameters():
            want = torch.zeros_like(p) if p.grad is None else p.grad
            assert_close(buckets.whole(found[name]) if found[name] is not None else torch.zeros_like(p), want)
    assert [each is model for each in model.seen] == [True] * len(plain.seen)
    assert [getattr(b, "calls", 0) for b in model.modules()] == [getattr(b, "calls", 0) for b in plain.modules()]


def _two(net: type[nn.Module]) -> tuple[Any, Any]:
    """A model, and the same in one process."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(net().double())
    return made[0], made[1]


def _functional(model: nn.Module, mesh: DeviceMesh, policy: sf.Policy) -> Callable[[Tensor], Any]:
    params = sf.shard(model, mesh, policy)
    return lambda x: sf.value_and_grad(lambda p: sf.apply(model, p, x).square().mean())(params)[1]


def _trained(model: nn.Module, mesh: DeviceMesh, policy: sf.Policy) -> Callable[[Tensor], Any]:
    trainer = sf.Trainer(model, mesh, policy)

    def gradients(x: Tensor) -> Any:
        trainer.zero_grad()
        trainer(x).square().mean().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    return gradients


@pytest.mark.everyday(7)
@pytest.mark.parametrize("net", [net for net in NETS if net not in REFUSED_BY_TORCH], ids=lambda net: net.__name__)
@on_meshes({"fsdp": 2})
def test_apply_runs_what_the_user_made(mesh: DeviceMesh, net: type[Net]) -> None:
    if net in (Registered, Asks):
        return  # of one model at a time; weights of a tree are plain tensors
    model, plain = _two(net)
    gradients = _functional(model, mesh, sf.Policy(units=["blocks.*"]))
    whole = net in (Norms, Recursive, Calls, Transforms)  # means over rows
    _require_like_one_process(model, plain, gradients, lambda step: (_own_rows(step)[whole], _own_rows(step)[1]))


@pytest.mark.everyday(5)
@pytest.mark.parametrize("net", SPLIT, ids=lambda net: net.__name__)
@on_meshes({"fsdp": 1, "tp": 2})
def test_modules_with_split_weights_are_what_the_user_made(mesh: DeviceMesh, net: type[Net]) -> None:
    for way in (_functional, _trained):
        model, plain = _two(net)
        _require_like_one_process(
            model, plain, way(model, mesh, ROWS), lambda step: (_own_rows(step)[1], _own_rows(step)[1])
        )


@on_meshes({"fsdp": 1, "tp": 2})
def test_split_weights_are_not_replaced_by_a_forward(mesh: DeviceMesh) -> None:
    model, _ = _two(Calls)
    with pytest.raises(ShardError, match="a forward assigns the parameter 'weight'"):
        _functional(model, mesh, ROWS)(_own_rows()[1])


@pytest.mark.parametrize("axes", [{"fsdp": 2}, {"fsdp": 1, "tp": 2}])
def test_a_checkpoint_computes_again_with_the_tree_of_its_call(axes: dict[str, int]) -> None:
    run(_two_trees, axes, ranks=2)


def _two_trees(axes: dict[str, int]) -> None:
    mesh = sf.make_mesh("cpu", **axes)

    class Whole(Net):
        """All of it is computed again, so that nothing else tells the calls apart."""

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    model, plain = _two(Whole)
    params = sf.shard(model, mesh, ROWS if "tp" in axes else sf.Policy(units=["blocks.*"]))
    x = _own_rows()[1]

    def loss(p: sf.Params, q: sf.Params) -> Tensor:
        first, second = sf.apply(model, p, x), sf.apply(model, q, x)
        return (first.square() * second).sum() + sf.apply(model, p, first.repeat(1, 2)).sum()

    found = sf.grad(loss, argnums=(0, 1))(params, sf.tree.map(lambda w: w * 2, params))
    doubled = copy.deepcopy(plain)
    with torch.no_grad():
        for p in doubled.parameters():
            p *= 2
    first, second = plain(x), doubled(x)
    ((first.square() * second).sum() + plain(first.repeat(1, 2)).sum()).backward()
    for tree, each in zip(found, (plain, doubled), strict=True):
        for name, p in each.named_parameters():
            assert_close(buckets.whole(tree[name]), p.grad)


@on_meshes({"fsdp": 2})
def test_a_checkpoint_in_a_call_within_another_one_has_the_inner_tree(mesh: DeviceMesh) -> None:
    class Again(Block):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.inner = Again(), lambda x: self.block(x)

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x) * self.inner(x)

    model, plain = _two(Outer)
    own = sf.shard(model, mesh, sf.Policy())
    other = sf.tree.map(lambda w: w * 2, sf.shard(model.block, mesh, sf.Policy()))
    doubled = copy.deepcopy(plain.block)
    with torch.no_grad():
        for p in doubled.parameters():
            p *= 2
    x = torch.ones(3, 6).double()
    model.inner = lambda x: sf.apply(model.block, other, x)
    plain.inner = doubled
    found = sf.grad(lambda p: sf.apply(model, p, (x * p["block.fc.bias"].full_tensor().sum())).sum())(own)
    plain(x * plain.block.fc.bias.sum()).sum().backward()
    for name, p in plain.block.named_parameters():
        assert_close(buckets.whole(found[f"block.{name}"]), p.grad)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # the inner one's, the first time
@on_meshes({"fsdp": 2})
def test_a_checkpoint_in_a_checkpoint_is_told_when_its_tree_is_unknown(mesh: DeviceMesh) -> None:
    class Twice(Net):
        def forward(self, x: Tensor) -> Tensor:
            again = partial(checkpoint, use_reentrant=True)
            inner = super().forward
            return again(lambda x: again(inner, x.sin()), x.clone().requires_grad_())

    model, plain = _two(Twice)
    trees = [sf.tree.map(lambda w: w.detach().requires_grad_(), sf.shard(model, mesh, sf.Policy())) for _ in "12"]
    own, rows = _own_rows()
    first, second = (sf.apply(model, tree, own).mean() for tree in trees)
    with pytest.raises(ShardError, match="outputs of several calls wait for their backward"):
        first.backward()
    del second
    sf.apply(model, trees[0], own).mean().backward()
    plain(rows).mean().backward()
    for name, p in plain.named_parameters():
        assert_close(buckets.whole(trees[0][name].grad), p.grad)


@pytest.mark.parametrize("net", [Net, Norms])
@on_meshes({"fsdp": 2})
def test_a_model_that_was_applied_is_still_its_users(mesh: DeviceMesh, net: type[Net]) -> None:
    model, plain = _two(net)
    before = {name: {**vars(module)} for name, module in model.named_modules()}
    tables = {name: [dict(m._parameters), dict(m._buffers)] for name, m in model.named_modules()}
    params = sf.shard(model, mesh, sf.Policy(units=["blocks.*"]))
    doubled = sf.tree.map(lambda w: w * 2, params)
    x = _own_rows()[1]
    for tree in (params, doubled):
        sf.value_and_grad(lambda p: sf.apply(model, p, x).sum())(tree)
    for name, module in model.named_modules():
        ours = {"_parameters", "_buffers", "forward", "calls"}  # the last one is assigned by the forward
        assert {k: v for k, v in vars(module).items() if k not in ours and v is not before[name][k]} == {}
        for own, was in zip((module._parameters, module._buffers), tables[name], strict=True):
            assert all(own[k] is v for k, v in was.items())  # a buffer that a forward registers is new in both
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert net is Norms or torch.equal(each(x), plain(x))  # which counts its calls
        assert all(type(p) is nn.Parameter for p in each.parameters())
    for module in copy.deepcopy(model).modules():
        assert type(module._parameters) is dict
        assert "forward" not in vars(module)
    assert net is Norms or torch.equal(torch.compile(model, backend="eager")(x), plain(x))


@on_meshes({"fsdp": 2}, {"fsdp": 1, "tp": 2})
def test_a_weight_of_several_shards_is_one_in_a_forward(mesh: DeviceMesh) -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.more = nn.Linear(4, 12), nn.Linear(6, 4), nn.Parameter(torch.randn(12, 4))
            self.names: list[str] = []

        def forward(self, x: Tensor) -> Tensor:
            self.names = [name for name, _ in self.named_parameters()]
            gate, up = (x @ self.more.T + self.up(x)).chunk(2, -1)
            return self.down(gate.sigmoid() * up)

    model, plain = _two(Fused)
    names = [name for name, _ in plain.named_parameters()]
    split = "f@tp" if "tp" in (mesh.mesh_dim_names or ()) else "f"
    fused = f"(gate: {split} + up: {split}) c@fsdp"
    rules = {"up.weight": fused, "more": fused, "down.weight": f"c@fsdp {split}"}
    policy = sf.Policy(rules=rules, sizes={"f": 6})
    trainer = sf.Trainer(model, mesh, policy)
    assert {"more[gate]", "up.weight[up]"} <= {name for name, _ in model.named_parameters()}
    rows = _own_rows()[1]
    trainer(rows).square().mean().backward()
    plain(rows).square().mean().backward()
    assert model.names == names
    own = {name: buckets.whole(p.grad) for name, p in model.named_parameters()}
    for name, p in plain.named_parameters():
        parts = [own[f"{name}[{part}]"] for part in ("gate", "up")] if f"{name}[up]" in own else [own[name]]
        assert_close(torch.cat(parts), p.grad)


@on_meshes({"fsdp": 2})
def test_a_parameter_that_a_tree_lacks_is_told_of(mesh: DeviceMesh) -> None:
    model, _ = _two(Net)
    params = sf.shard(model, mesh, sf.Policy())
    sf.apply(model, params, _own_rows()[0])
    model.blocks[0].more = nn.Parameter(torch.ones(6).double())
    with pytest.raises(ShardError, match=r"'blocks\.0\.more' was added to the model after sf\.shard made the tree"):
        sf.apply(model, params, _own_rows()[0])


class Sized(nn.Module):
    """A size in an attribute, read before any weight."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.q, self.o, self.heads, self.way = nn.Linear(4, 8), nn.Linear(8, 4), 4, way

    def attend(self, x: Tensor) -> Tensor:
        heads = self.heads
        return self.o(self.q(x).view(len(x), heads, 2).square().flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.attend, x, use_reentrant=False) if self.way == "function" else self.attend(x)


class OfSized(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner, self.way = Sized(way), way

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.way == "module" else self.inner(x)


@on_meshes({"fsdp": 1, "tp": 2})
def test_a_checkpoint_finds_sizes_of_a_rank(mesh: DeviceMesh) -> None:
    rules = {"inner.q.weight": "(heads@tp d) c", "inner.o.weight": "c (heads@tp d)"}
    policy = sf.Policy(rules=rules, sizes={"d": 2}, local_sizes={"inner": {"heads": "heads@tp"}})
    x, found = _own_rows()[1], []
    for way in ("", "module", "function"):
        torch.manual_seed(0)
        model = OfSized(way).double()
        params = sf.shard(model, mesh, policy)
        gradient = sf.grad(lambda p, model=model: sf.apply(model, p, x).square().sum())
        gradient(params)
        found.append(sf.gather(gradient(params)))  # of a second backward, since each gives modules their sizes again
        assert model.inner.heads == 4
    for name, g in found[0].items():
        assert_close(found[1][name], g)
        assert_close(found[2][name], g)


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(checkpoint(lambda h: h * self.scale, h, use_reentrant=False))


@on_meshes({"fsdp": 1, "tp": 2})
def test_a_function_that_computes_again_has_weights_whose_gradient_is_added_up(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model, x = Scales().double(), torch.randn(3, 4, dtype=torch.float64)
    params = sf.shard(model, mesh, sf.Policy(rules={"up.weight": "f@tp c", "down.weight": "c f@tp"}))
    model(x).square().sum().backward()
    found = sf.gather(sf.grad(lambda p: sf.apply(model, p, x).square().sum())(params))
    assert_parity(found, {name: p.grad for name, p in model.named_parameters()})
