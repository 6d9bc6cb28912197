"""Section 4.1. What belongs to `fully_shard`: functions, what a sharded module does, and tools around it."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from drawing import untyped
from models import MLP
from ranks import quiet, zeroed
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fsdp2_rows.common import (
    DOORS,
    FP32,
    FP64,
    OURS,
    Net,
    adamw,
    both,
    copied,
    gradients,
    loss_of,
    mine,
    net,
    placements,
    refuses,
    row,
    same_error,
    sharded,
    tokens,
    trains,
    values,
)
from shardfn.compat.fsdp2 import FSDPModule, fully_shard, register_fsdp_forward_method, share_comm_ctx
from shardfn.testing import assert_close, assert_trees_close, count_collectives


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))

    def encode(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """Up only."""
        return self.up(x).tanh() * scale

    def decode(self, x: Tensor) -> Tensor:
        return self.down(x)


@row("4.1", "register_fsdp_forward_method")
def runs_other_methods_with_whole_weights() -> None:
    """A registered method trains as `forward` does, with arguments by keyword; its name and docstring stay."""
    plain, x = _Encoder().double(), torch.linspace(-1, 1, 8, dtype=FP64).view(2, 4)
    plain.encode(x, scale=2.0).square().mean().backward()
    for door in DOORS:
        model: Any = _Encoder().double()
        door.fully_shard(model)
        door.register_fsdp_forward_method(model, "encode")
        assert model.encode.__name__ == "encode" and model.encode.__doc__ == "Up only."
        model.encode(x, scale=2.0).square().mean().backward()
        found = {name: grad for name, grad in gradients(model).items() if name.startswith("up.")}
        assert_trees_close(found, gradients(plain), rtol=0, atol=1e-12)
        assert_close(model(x).detach(), plain(x).detach(), rtol=0, atol=1e-12)
        assert type(model).__name__ == "FSDP_Encoder" and isinstance(model, _Encoder)


@row("4.1", "register_fsdp_forward_method: of inner modules and several methods")
def registers_methods_of_inner_modules() -> None:
    """Methods of an inner group run under a forward of the root, and of one instance alone."""
    for door in DOORS:
        torch.manual_seed(0)
        model: Any = _Outer().double()
        for inner in (model.one, model.two):
            door.fully_shard(inner)
            for method in ("encode", "decode"):
                door.register_fsdp_forward_method(inner, method)
        door.fully_shard(model)
        torch.manual_seed(0)
        plain, x = _Outer().double(), torch.linspace(-1, 1, 8, dtype=FP64).view(2, 4)
        for each in (plain, model):
            each(x).square().mean().backward()
        assert_trees_close(gradients(model), gradients(plain), rtol=0, atol=1e-12)


class _Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = _Encoder(), _Encoder(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.two.decode(self.one.encode(x)) + self.one.decode(self.two.encode(x)))


@row("4.1", "register_fsdp_forward_method: errors")
def refuses_methods_that_are_not_there() -> None:
    """Nothing happens to a module that is not sharded; a method that is not there is torch's ValueError."""
    plain = _Encoder()
    before = type(plain)
    assert register_fsdp_forward_method(plain, "nothing") is None and type(plain) is before

    def missing(door: Any) -> None:
        door.register_fsdp_forward_method(door.fully_shard(_Encoder()), "nothing")

    words = "does not have a method nothing"
    for door in DOORS:
        refuses(lambda door=door: missing(door), ValueError, "FSDP_Encoder", words)


@row("4.1", "share_comm_ctx")
def shares_streams() -> None:
    """Taken for several models, which train by turns; what is no `FSDPModule` is torch's ValueError."""
    models = [sharded(), sharded()]
    assert share_comm_ctx(models) is None and share_comm_ctx([]) is None
    optimizers = [adamw(model) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        loss_of(model, mine(tokens())).backward()
        optimizer.step()
    assert_trees_close(values(models[0]), values(models[1]), rtol=0, atol=0)
    words = "Expects list of FSDPModules but got Linear("
    same_error(lambda d: d.share_comm_ctx([nn.Linear(2, 2)]), ValueError, words)


@row("4.1", "deepcopy")
def refuses_deepcopy() -> None:
    """Torch's AssertionError, of the root, of an inner module and of what holds them."""
    words = "FSDP does not support deepcopy. Please use state dict for serialization."
    same_error(lambda d: copy.deepcopy(sharded(door=d)), AssertionError, words)
    same_error(lambda d: copy.deepcopy(sharded(door=d).blocks[0]), AssertionError, words)
    same_error(lambda d: copy.deepcopy(sharded(door=d).blocks), AssertionError, words)


@row("4.1", "class name")
def names_the_class() -> None:
    """FSDP<Orig>, the same class for all instances; `repr` shows it, as torch's does."""
    torchs, ours = both()
    assert type(ours.blocks[0]) is type(ours.blocks[1]) and type(ours).__name__ == "FSDPNet"
    assert type(ours).__mro__[1] is FSDPModule and type(ours).__mro__[2] is Net
    assert repr(ours) == repr(torchs)
    assert isinstance(ours.blocks[0], MLP)


@row("4.1", "FSDPModule.__new__")
def makes_plain_modules_of_slices() -> None:
    """Slices of a sharded `nn.Sequential` are of its own class; indexing and adding modules work."""
    for door in DOORS:
        model: Any = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))
        door.fully_shard(model)
        assert type(model[:2]) is nn.Sequential and len(model[:2]) == 2 and model[:2][0] is model[0]
        assert type(model[0]) is nn.Linear and model[-1] is model[2]


@row("4.1", "names of the package")
def has_the_names() -> None:
    """All names of `torch.distributed.fsdp` that belong to FSDP2; policy classes are torch's own."""
    for name in ("CPUOffloadPolicy", "DataParallelMeshDims", "MixedPrecisionPolicy", "OffloadPolicy", "UnshardHandle"):
        assert getattr(OURS, name) is getattr(torch_fsdp, name)
    for name in ("FSDPModule", "fully_shard", "register_fsdp_forward_method", "share_comm_ctx"):
        assert getattr(OURS, name) is not getattr(torch_fsdp, name)


@row("4.1", "state_dict")
def gives_shards() -> None:
    """Shards under the model's names, without communication, with torch's layout; buffers as they are."""
    torchs, ours = both()
    with count_collectives() as counted:
        state = ours.state_dict()
    theirs = torchs.state_dict()
    assert counted.total == 0 and list(state) == list(theirs) == list(net().state_dict())
    assert [type(value) for value in state.values()] == [type(value) for value in theirs.values()]
    for name, value in state.items():
        if isinstance(value, DTensor):
            assert value.placements == theirs[name].placements and not value.requires_grad
            assert_close(value.to_local(), theirs[name].to_local(), rtol=0, atol=0)
            assert value.to_local().data_ptr() == ours.get_parameter(name).to_local().data_ptr()
    assert list(ours.blocks[1].state_dict(prefix="a.")) == ["a." + name for name in net().blocks[1].state_dict()]


@row("4.1", "load_state_dict")
def loads_shards() -> None:
    """Shards of a model of torch's or ours, strictly or not; whole tensors too; in place, and trains on."""
    torchs, ours = both()
    with torch.no_grad():
        for parameter in torchs.parameters():
            parameter.mul_(2)
    parameters = list(ours.parameters())
    assert str(ours.load_state_dict(torchs.state_dict())) == "<All keys matched successfully>"
    assert_trees_close(values(ours), values(torchs), rtol=0, atol=0)
    assert all(one is two for one, two in zip(parameters, ours.parameters(), strict=True))
    ours.load_state_dict(copied(net()))
    trains(ours)
    found = ours.load_state_dict({"head.bias": ours.head.bias, "more": torch.ones(1)}, strict=False)
    assert found.unexpected_keys == ["more"] and "emb.weight" in found.missing_keys
    same_error(
        lambda d: sharded(door=d).load_state_dict({}), RuntimeError, "Error(s) in loading state_dict for FSDPNet"
    )


@row("4.1", "load_state_dict: assign")
def loads_by_assigning() -> None:
    """`assign=True` puts the given shards in the place of the parameters, as a model on meta needs."""
    source = sharded()
    with torch.device("meta"):
        model: Any = Net().double()
    sharded(model=model)
    model.load_state_dict(source.state_dict(), assign=True)
    assert not any(p.is_meta for p in model.parameters())
    trains(model)


@row("4.1", "to, double and to_empty")
def changes_dtype_in_place() -> None:
    """`.to(dtype)` and the like work on shards, before the optimizer is made; weights that were whole are shards."""
    for door in DOORS:
        model = sharded(door=door, model=net(FP32))
        if door is OURS:  # torch's own fails after that
            model.unshard()
        assert model.double() is model
        assert all(isinstance(p, DTensor) and p.dtype == FP64 for p in model.parameters())
        assert model.shift.dtype == FP64
        found = model(mine(tokens()))
        assert_close(found.detach(), net(FP32).double()(mine(tokens())).detach(), rtol=0, atol=1e-12)


@row("4.1", "clip_grad_norm_")
def clips() -> None:
    """torch's own function clips by the norm of all ranks, for every norm; `full_tensor()` gives it."""
    for norm_type in (1.0, 2.0, float("inf")):
        plain = net()
        loss_of(plain, tokens()).backward()
        want = nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type)
        model = sharded()
        loss_of(model, mine(tokens())).backward()
        norm = untyped(nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type))
        assert isinstance(norm, DTensor)
        assert_close(norm.full_tensor(), want, rtol=0, atol=1e-12)
        assert_trees_close(gradients(model), gradients(plain), rtol=0, atol=1e-12)


@row("4.1", "optimizers")
def steps_with_every_option() -> None:
    """SGD, Adam and AdamW, one by one and foreach, give what torch's shards give."""
    for make in (
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, 0.01, foreach=True),
        lambda p: torch.optim.AdamW(p, 0.01, foreach=False),
    ):
        found = []
        for model in both():
            optimizer = make(model.parameters())
            for step in range(2):
                loss_of(model, mine(tokens(step))).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(values(model))
        assert_trees_close(found[1], found[0], rtol=0, atol=1e-12)


@row("4.1", "gradients")
def gives_gradients_as_shards() -> None:
    """`.grad` is a DTensor laid out as its parameter, the mean over ranks; `zero_grad` drops it."""
    for model in both():
        loss_of(model, mine(tokens())).backward()
        assert all(isinstance(p.grad, DTensor) and p.grad.placements == p.placements for p in model.parameters())
        model.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    plain = net()
    loss_of(plain, tokens()).backward()
    ours = sharded()
    loss_of(ours, mine(tokens())).backward()
    assert_trees_close(gradients(ours), gradients(plain), rtol=0, atol=1e-12)


@row("4.1", "activation checkpointing")
def checkpoints_activations() -> None:
    """`apply_activation_checkpointing` before sharding, and `torch.utils.checkpoint` inside, train the same."""
    for door in DOORS:
        model: Any = net()
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, MLP))
        sharded(door=door, model=model)
        plain = net()
        loss_of(model, mine(tokens())).backward()
        loss_of(plain, tokens()).backward()
        found = {name.replace("_checkpoint_wrapped_module.", ""): g for name, g in gradients(model).items()}
        assert_trees_close(found, gradients(plain), rtol=0, atol=1e-12)
    model = _Recomputing().double()
    fully_shard(model)
    plain, x = _Recomputing().double(), torch.linspace(-1, 1, 8, dtype=FP64).view(2, 4)
    for each in (model, plain):
        each(x).square().mean().backward()
    assert_trees_close(gradients(model), gradients(plain), rtol=0, atol=1e-12)


class _Recomputing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        return self.two(untyped(checkpoint(self.one, x, use_reentrant=False)).tanh())


@row("4.1", "buffers")
def keeps_buffers() -> None:
    """Buffers stay plain, and what a forward writes to them stays, as BatchNorm's statistics do."""
    found = []
    for door in DOORS:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        door.fully_shard(model)
        x = torch.linspace(-1, 1, 16).view(4, 4)
        for _ in range(2):
            model(x).square().mean().backward()
        found.append({name: buffer.clone() for name, buffer in model.named_buffers()})
    assert_trees_close(found[1], found[0], rtol=0, atol=1e-6)
    assert int(found[1]["1.num_batches_tracked"]) == 2


@row("4.1", "outputs")
def passes_inputs_and_outputs_through() -> None:
    """Nested tuples, dicts, None and keyword arguments go in and come out as they are."""
    for door in DOORS:
        torch.manual_seed(0)
        model: Any = _Nested().double()
        door.fully_shard(model.one)
        door.fully_shard(model)
        x = torch.ones(2, 4, dtype=FP64)
        out, (more, nothing) = model({"x": x}, also=(x, None))
        assert nothing is None and list(out) == ["loss", "said"] and out["said"] == "hello"
        (out["loss"] + more.sum()).backward()
        torch.manual_seed(0)
        plain: Any = _Nested().double()
        want, (other, _) = plain({"x": x}, also=(x, None))
        (want["loss"] + other.sum()).backward()
        assert_trees_close(gradients(model), gradients(plain), rtol=0, atol=1e-12)


class _Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, given: dict[str, Tensor], *, also: tuple[Tensor, None]) -> Any:
        return {"loss": self.one(given["x"]).square().mean(), "said": "hello"}, (self.two(also[0]), also[1])


@row("4.1", "hooks of the root")
def runs_hooks() -> None:
    """Forward hooks of the root, before and after sharding, run once each, with inputs and outputs."""
    for door in DOORS:
        seen: list[str] = []
        model = net()

        def before(module: Any, args: Any, seen: Any = seen) -> None:
            seen.append("before")

        def after(module: Any, args: Any, out: Any, seen: Any = seen) -> None:
            seen.append(f"after {tuple(out.shape)}")

        model.register_forward_pre_hook(before)
        sharded(door=door, model=model)
        model.register_forward_hook(after)
        loss_of(model, mine(tokens())).backward()
        assert seen == ["before", "after (16, 15)"], door.__name__


@row("4.1", "compile() of groups")
def compiles() -> None:
    """Blocks that are compiled before they are sharded train the same."""
    found = []
    for door in DOORS:
        model = net()
        for block in model.blocks:
            block.compile(backend="eager")
        with quiet():
            loss_of(sharded(door=door, model=model), mine(tokens())).backward()
        found.append(gradients(model))
        torch._dynamo.reset()
    assert_trees_close(found[1], found[0], rtol=0, atol=1e-12)


@row("4.1", "compile() of what holds groups, torch.compile")
def compiles_the_root() -> None:
    """Groups that hold no other become graphs: gathers stay outside of them."""
    for way in ("compile", "torch.compile"):
        model: Any = sharded()
        if way == "compile":
            model.compile(backend="eager")
        call: Any = torch.compile(model, backend="eager") if way == "torch.compile" else model
        with quiet():
            loss_of(call, mine(tokens())).backward()
        assert [block._compiled_call_impl is not None for block in model.blocks] == [True, True]
        found = gradients(model)
        torch._dynamo.reset()
        model.zero_grad()
        eager = sharded()
        loss_of(eager, mine(tokens())).backward()
        assert_trees_close(found, gradients(eager), rtol=0, atol=1e-12)


@row("4.1", "pickling state")
def saves_state_of_each_rank() -> None:
    """`state_dict` of model and optimizer pickles and loads on the same rank."""
    model = sharded()
    optimizer = adamw(model)
    loss_of(model, mine(tokens())).backward()
    optimizer.step()
    saved = pickle.dumps((model.state_dict(), optimizer.state_dict()))
    want = values(model)
    zeroed(model)
    state, moments = pickle.loads(saved)
    model.load_state_dict(state)
    optimizer.load_state_dict(moments)
    assert_trees_close(values(model), want, rtol=0, atol=0)
    loss_of(model, mine(tokens(1))).backward()
    optimizer.step()


@row("4.1", "norms by hand")
def sums_by_hand() -> None:
    """A norm summed over ranks by hand is that of one process; arguments by place are a TypeError."""
    model = sharded()
    loss_of(model, mine(tokens())).backward()
    total = torch.stack([p.grad.to_local().square().sum() for p in model.parameters()]).sum()
    dist.all_reduce(total)
    plain = net()
    loss_of(plain, tokens()).backward()
    want = torch.stack([g.square().sum() for g in gradients(plain).values()]).sum()
    assert_close(total, want, rtol=0, atol=1e-12)
    assert placements(model).keys() == dict(plain.named_parameters()).keys()
    with pytest.raises(TypeError):
        untyped(fully_shard)(net(), None)
