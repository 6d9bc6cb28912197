"""hfai's class, one case a row: each argument, method and program of its documentation, and what its script does.

`compat.md` has no source but the documentation page of `hfai.distributed.fsdp` and `train_fsdp.py` of hfai's models,
which imports `haiscale.fsdp`. The oracle is one plain process, or hand-written arithmetic on its parts.
"""

import copy
import importlib
import inspect
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from drawing import untyped
from ranks import folder, zeroed
from rows import Table
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy as torchs_policy
from torch.distributed.tensor import DTensor

from shardfn import ShardError
from shardfn.comm.buckets import whole
from shardfn.compat import hfai, switch
from shardfn.compat.hfai import BackwardPrefetch, FullyShardedDataParallel
from shardfn.testing import assert_close, assert_trees_close, count_collectives, run

TABLE = Table()
row = TABLE.row
POLICY = partial(hfai.warp.size_based_auto_wrap_policy, min_num_params=40)
ARGUMENTS = {
    "module": inspect.Parameter.empty,
    "process_group": None,
    "auto_wrap_policy": None,
    "reshard_after_forward": True,
    "backward_prefetch": None,
    "forward_prefetch": False,
    "fsdp_group_size": None,
    "_is_root": True,
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.last = nn.Linear(7, 3)
        self.register_buffer("shift", torch.linspace(-1, 1, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x + self.get_buffer("shift"))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x)


def net() -> Net:
    return Net().double()


def wrapped(*args: Any, **given: Any) -> Any:
    given.setdefault("auto_wrap_policy", POLICY)
    return FullyShardedDataParallel(net(), *args, **given)


def batch(step: int = 0) -> Tensor:
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(step)).double()


def mine(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def trained(model: Any, steps: int = 2, *, all_of_it: bool = False) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step_(model, optimizer, *range(steps), all_of_it=all_of_it)
    return optimizer


def step_(model: Any, optimizer: torch.optim.Optimizer, *steps: int, all_of_it: bool = False) -> None:
    for step in steps:
        optimizer.zero_grad()
        output = model(batch(step) if all_of_it else mine(batch(step)))
        output.square().mean().backward()
        optimizer.step()


def plain_trained(steps: int = 2) -> Net:
    plain = net()
    trained(plain, steps, all_of_it=True)
    return plain


def values(model: Any) -> dict[str, Tensor]:
    return {n: whole(p).detach() if isinstance(p, DTensor) else p.detach() for n, p in model.named_parameters()}


def trains(model: Any, steps: int = 2) -> None:
    trained(model, steps)
    assert_trees_close(values(model), values(plain_trained(steps)), rtol=0, atol=1e-9)


def rank() -> int:
    return dist.get_rank()


# -- the constructor ---------------------------------------------------------------------------------------------------


@row("2 arguments", "module")
def wraps_a_module() -> None:
    """Parameters become shards in place; attributes and `.module` are the model's."""
    plain = net()
    model = FullyShardedDataParallel(plain)
    assert model.module is plain and all(isinstance(p, DTensor) for p in plain.parameters())
    assert untyped(model).first is plain.first
    trains(model)


@row("2 arguments", "signature, by place")
def takes_arguments_by_place() -> None:
    """All arguments by place in the documented order, with the documented defaults."""
    found = inspect.signature(FullyShardedDataParallel.__init__).parameters
    assert {name: each.default for name, each in found.items() if name != "self"} == ARGUMENTS
    assert list(found)[1:] == list(ARGUMENTS)
    trains(FullyShardedDataParallel(net(), None, POLICY, False, BackwardPrefetch.BACKWARD_PRE, True, 2, True))


@row("2 arguments", "process_group", ranks=4)
def takes_a_group() -> None:
    """The group of all ranks that train together: part of the ranks, or all of them; anything else a TypeError."""
    half = untyped(dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0])
    model = wrapped(half)
    assert model.world_size == 2 and untyped(model.first.weight).to_local().shape[0] in (3, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        model(batch(step).chunk(2)[rank() % 2]).square().mean().backward()
        optimizer.step()
    assert_trees_close(values(model), values(plain_trained()), rtol=0, atol=1e-9)
    trains(wrapped(dist.group.WORLD))
    with pytest.raises(TypeError, match="process_group=4 is no process group"):
        wrapped(4)


@row("2 arguments", "process_group with fsdp_group_size", ranks=4)
def takes_a_group_of_groups() -> None:
    """Groups of one rank in a group of two: copies that train together."""
    half = untyped(dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0])
    model = wrapped(half, fsdp_group_size=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        model(batch(step).chunk(2)[rank() // 2]).square().mean().backward()
        optimizer.step()
    assert_trees_close(values(model), values(plain_trained()), rtol=0, atol=1e-9)


@row("2 arguments", "auto_wrap_policy")
def takes_policies() -> None:
    """A function of module, recurse and size: hfai's, torch's, or one's own, asked by keyword or by place."""

    def by_place(module: nn.Module, recurse: bool, size: int) -> bool:
        return recurse or isinstance(module, nn.Linear)

    def unwrapped_params(module: nn.Module, recurse: bool, unwrapped_params: int) -> bool:
        return recurse or isinstance(module, nn.Linear)

    units = []
    for policy in (POLICY, partial(torchs_policy, min_num_params=40), by_place, unwrapped_params, None):
        model = wrapped(auto_wrap_policy=policy)
        units.append(sum(isinstance(module, FullyShardedDataParallel) for module in untyped(model).modules()))
        trains(model, 1)
    assert units[0] == units[1] > 1 and units[2] == units[3] == 6 and units[4] == 1


@row("2 arguments", "reshard_after_forward")
def frees_or_keeps() -> None:
    """True gathers weights again for the backward (ZeRO-3), False does not (ZeRO-2); what is no bool a TypeError."""
    for reshard in (True, False):
        model = wrapped(reshard_after_forward=reshard)
        for step in range(2):
            model(mine(batch(step))).square().mean().backward()
        loss = model(mine(batch())).square().mean()
        with count_collectives() as counted:
            loss.backward()
        assert (counted.as_dict().get("all_gather", 0) > 0) == reshard
        model.zero_grad()
        trains(model)
    with pytest.raises(TypeError, match="reshard_after_forward=2 is no bool"):
        wrapped(reshard_after_forward=2)


@row("2 arguments", "backward_prefetch")
def takes_backward_prefetch() -> None:
    """Both members and None train alike; the enum is torch's."""
    assert BackwardPrefetch is torch_fsdp.BackwardPrefetch
    for prefetch in (BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None):
        trains(wrapped(backward_prefetch=prefetch))


@row("2 arguments", "forward_prefetch")
def takes_forward_prefetch() -> None:
    """Both train alike."""
    for prefetch in (False, True):
        trains(wrapped(forward_prefetch=prefetch))


@row("2 arguments", "fsdp_group_size", ranks=4)
def replicates_between_groups() -> None:
    """So many neighbouring ranks share a copy of the weights; groups train as one batch."""
    for size, part in ((None, 2), (4, 2), (2, 4), (1, 7)):
        model = wrapped(fsdp_group_size=size)
        assert untyped(model.first.weight).to_local().shape[0] <= part
        if size == 2:
            parts: list[Any] = [None] * 4
            dist.all_gather_object(parts, untyped(model.first.weight).to_local().tolist())
            assert parts[0] == parts[2] != parts[1] == parts[3]
        trains(model)


@row("2 arguments", "fsdp_group_size: errors", "refused", ranks=4)
def refuses_group_sizes() -> None:
    """A size that does not divide the ranks is an error that says so."""
    for size, words in ((3, "4 % 3 = 1"), (8, "4 % 8 = 4"), (0, "must divide the number of ranks, 4")):
        with pytest.raises(ShardError, match=f"fsdp_group_size={size} must divide.*") as found:
            wrapped(fsdp_group_size=size)
        assert words in str(found.value)


@row("2 arguments", "_is_root")
def takes_is_root() -> None:
    """Kept for its place; both train alike."""
    trains(wrapped(_is_root=True))
    trains(wrapped(_is_root=False))


# -- the programs of the documentation ---------------------------------------------------------------------------------


@row("2 programs", "training loop")
def trains_by_a_plain_optimizer() -> None:
    """A plain torch optimizer over `model.parameters()` trains as one process; gradients are those of the mean."""
    model, plain = wrapped(), net()
    model(mine(batch())).square().mean().backward()
    plain(batch()).square().mean().backward()
    for name, parameter in plain.named_parameters():
        assert_close(whole(untyped(model.get_parameter(name).grad)), untyped(parameter.grad), rtol=0, atol=1e-12)
    trains(wrapped(), 3)


@row("2 programs", "full save")
def saves_a_full_checkpoint() -> None:
    """In `summon_full_params` rank 0 alone asks for `state_dict()`: no communication, the plain model's keys."""
    with folder() as at:
        model = wrapped()
        trained(model)
        with model.summon_full_params():
            if rank() == 0:
                with count_collectives() as counted:
                    state = model.state_dict()
                assert counted.total == 0
                torch.save(state, at / "model.pt")
        dist.barrier()
        state, plain = torch.load(at / "model.pt", map_location="cpu"), plain_trained()
        assert list(state) == list(plain.state_dict())
        assert all(type(value) is Tensor for value in state.values())
        assert_trees_close(dict(state), dict(plain.state_dict()), rtol=0, atol=1e-9)


@row("2 programs", "full load")
def loads_a_full_checkpoint() -> None:
    """In `summon_full_params` all ranks load the plain model's file, which loads into the plain model as well."""
    with folder() as at:
        if rank() == 0:
            torch.save(plain_trained().state_dict(), at / "model.pt")
        dist.barrier()
        model = wrapped()
        state = torch.load(at / "model.pt", map_location="cpu")
        with model.summon_full_params():
            model.load_state_dict(state)
        assert_trees_close(values(model), values(plain_trained()), rtol=0, atol=1e-9)
        other = net()
        other.load_state_dict(state)
        assert_trees_close(values(other), values(model), rtol=0, atol=0)
        assert all(isinstance(p, DTensor) for p in model.parameters())


@row("2 programs", "local save and load", ranks=4)
def saves_each_part() -> None:
    """Outside of it `state_dict()` is this rank's part, without communication, which this rank loads again."""
    for size in (None, 2):
        with folder() as at:
            model = wrapped(fsdp_group_size=size)
            trained(model)
            with count_collectives() as counted:
                state = model.state_dict()
            assert counted.total == 0 and not any(isinstance(value, DTensor) for value in state.values())
            assert sum(v.numel() for v in state.values()) < sum(v.numel() for v in net().state_dict().values())
            torch.save(state, at / f"model{rank()}.pt")
            dist.barrier()
            other = wrapped(fsdp_group_size=size)
            other.load_state_dict(torch.load(at / f"model{rank()}.pt", map_location="cpu"))
            assert_trees_close(values(other), values(plain_trained()), rtol=0, atol=1e-9)
            assert_close(other.shift, net().get_buffer("shift"), rtol=0, atol=0)


@row("2 programs", "local load of another rank's file", "refused", ranks=2)
def refuses_the_part_of_another_rank() -> None:
    """An error on all ranks, which names full checkpoints; nothing has changed."""
    with folder() as at:
        model = wrapped()
        torch.save(model.state_dict(), at / f"model{rank()}.pt")
        dist.barrier()
        trained(model)
        words = "this is the part of rank 0 of 2" if rank() else "rank 1 .* failed, so no rank goes on: .* this is"
        with pytest.raises(ShardError, match=words):
            model.load_state_dict(torch.load(at / "model0.pt", map_location="cpu"))
        assert_trees_close(values(model), values(plain_trained()), rtol=0, atol=1e-9)


@row("2 programs", "local load of another group size", "refused", ranks=4)
def refuses_parts_of_another_size() -> None:
    """A file that was cut in another number of parts is an error that names full checkpoints."""
    state = wrapped().state_dict()
    other = wrapped(fsdp_group_size=2)
    with pytest.raises(ShardError, match=r"cut in 4, and here is rank \d of 4, cut in 2.*load a full one"):
        other.load_state_dict(state)


@row("2 programs", "full load outside of summon_full_params", "refused")
def refuses_whole_values_outside() -> None:
    """A full file loaded outside is an error of sizes, not a wrong model."""
    model = wrapped()
    with pytest.raises(RuntimeError, match=r"size mismatch for first\.weight"):
        model.load_state_dict(net().state_dict())
    trains(model)


# -- methods -----------------------------------------------------------------------------------------------------------


@row("2 methods", "summon_full_params")
def summons_whole_parameters() -> None:
    """On the instance, without arguments: whole plain parameters inside, shards outside; what is written stays."""
    model = wrapped()
    before = list(model.parameters())
    with model.summon_full_params():
        found = dict(model.module.named_parameters())
        assert [(n, tuple(p.shape)) for n, p in found.items()] == [(n, p.shape) for n, p in net().named_parameters()]
        assert not any(isinstance(p, DTensor) for p in found.values())
        with torch.no_grad():
            found["first.weight"].fill_(3.0)
    assert all(one is two for one, two in zip(before, model.parameters(), strict=True))
    assert bool((values(model)["first.weight"] == 3).all())
    assert_close(values(model)["last.weight"], values(net())["last.weight"], rtol=0, atol=0)


@row("2 methods", "state_dict")
def gives_parts_or_everything() -> None:
    """Parts outside of `summon_full_params`, the plain model's inside; buffers in both."""
    model = wrapped()
    outside = model.state_dict()
    assert list(outside) == list(net().state_dict())
    assert outside["first.weight"].shape[0] == 4 - rank() and outside["shift"].shape == (5,)
    with model.summon_full_params():
        inside = model.state_dict()
    assert_trees_close(dict(inside), dict(net().state_dict()), rtol=0, atol=0)


@row("2 methods", "load_state_dict")
def loads_parts_or_everything() -> None:
    """Tells what did not fit, strictly or not, in both places."""
    model = wrapped()
    state = model.state_dict()
    state.pop("first.weight")
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(state)
    found = model.load_state_dict(state, strict=False)
    assert found.missing_keys == ["first.weight"]
    with model.summon_full_params():
        assert str(model.load_state_dict(net().state_dict())) == "<All keys matched successfully>"


@row("2 methods", "module")
def has_a_module() -> None:
    """`.module` in `summon_full_params`: its `state_dict` and `load_state_dict` are the plain model's."""
    model, want = wrapped(), plain_trained()
    with model.summon_full_params():
        assert_trees_close(dict(model.module.state_dict()), dict(net().state_dict()), rtol=0, atol=0)
        model.module.load_state_dict(want.state_dict())
    assert_trees_close(values(model), values(want), rtol=0, atol=0)


# -- train_fsdp.py -----------------------------------------------------------------------------------------------------


@row("2 train_fsdp.py", "imports")
def has_the_doors() -> None:
    """`warp` and `wrap` have the policies; both packages are found under the import switch."""
    assert hfai.warp.size_based_auto_wrap_policy is hfai.wrap.size_based_auto_wrap_policy is torchs_policy
    switch.on()
    try:
        package, scripts = importlib.import_module("haiscale.fsdp"), importlib.import_module("hfai.distributed.fsdp")
        warp = importlib.import_module("hfai.distributed.fsdp.warp")
        assert package.FullyShardedDataParallel is scripts.FullyShardedDataParallel is FullyShardedDataParallel
        assert package.BackwardPrefetch is BackwardPrefetch
        assert warp.size_based_auto_wrap_policy is torchs_policy
        assert importlib.import_module("hfai.distributed").get_rank is dist.get_rank
    finally:
        switch.off()


@row("2 train_fsdp.py", "the model's file with more in it")
def saves_as_the_script_does() -> None:
    """`{"model": module.state_dict(), ...}` of rank 0 in `summon_full_params`, loaded by `module.load_state_dict`."""
    with folder() as at:
        model = wrapped(backward_prefetch=BackwardPrefetch.BACKWARD_POST)
        trained(model)
        with model.summon_full_params():
            if rank() == 0:
                torch.save({"model": model.module.state_dict(), "step": 2}, at / "ckpt.pt")
        dist.barrier()
        state = torch.load(at / "ckpt.pt", map_location="cpu")
        other = wrapped()
        with other.summon_full_params():
            other.module.load_state_dict(state["model"])
        assert state["step"] == 2
        assert_trees_close(values(other), values(plain_trained()), rtol=0, atol=1e-9)


@row("2 train_fsdp.py", "clip_grad_norm_")
def clips() -> None:
    """torch's own `clip_grad_norm_` on the sharded parameters has the norm of all ranks."""
    model, plain = wrapped(), net()
    model(mine(batch())).square().mean().backward()
    plain(batch()).square().mean().backward()
    norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.01) for each in (model, plain)]
    assert_close(whole(untyped(norms[0])), norms[1], rtol=0, atol=1e-12)
    grads = {n: whole(untyped(p.grad)) for n, p in model.named_parameters()}
    assert_trees_close(grads, {n: p.grad for n, p in plain.named_parameters()}, rtol=0, atol=1e-12)


@row("2 train_fsdp.py", "print")
def prints() -> None:
    """`print(model)` shows the wrapper and every layer."""
    text = str(wrapped())
    assert text.startswith("FullyShardedDataParallel(\n  (_fsdp_wrapped_module): Net(")
    assert "(first): " in text and "(0-2): 3 x " in text and "(last): Linear(in_features=7, out_features=3" in text


@row("2 train_fsdp.py", "evaluation")
def evaluates() -> None:
    """`eval()` under `no_grad` computes as the plain model, and training goes on."""
    model = wrapped()
    model.eval()
    with torch.no_grad():
        assert_close(model(mine(batch())), net()(mine(batch())).detach(), rtol=0, atol=1e-12)
    assert not model.training and not model.module.layers[0].training
    model.train()
    trains(model)


@row("2 train_fsdp.py", "optimizer.state_dict() of rank 0 loaded everywhere", "refused")
def refuses_the_optimizer_of_rank_0() -> None:
    """It is rank 0's parts: the next step is an error on every rank, which names what to use, and changes nothing."""
    with folder() as at:
        model = wrapped()
        optimizer = trained(model)
        if rank() == 0:
            torch.save({"optimizer": optimizer.state_dict()}, at / "ckpt.pt")
        dist.barrier()
        state = torch.load(at / "ckpt.pt", map_location="cpu", weights_only=False)
        fresh = torch.optim.AdamW(model.parameters(), lr=0.5)
        fresh.load_state_dict(state["optimizer"])
        model(mine(batch(2))).square().mean().backward()
        before = {name: parameter.to_local().clone() for name, parameter in model.named_parameters()}
        with pytest.raises(ShardError, match="save it on every rank and load each its own") as found:
            fresh.step()
        assert "FSDP.optim_state_dict" in str(found.value)
        assert ("is the part of rank 0" if rank() else "1 of 2 ranks have loaded") in str(found.value)
        assert_trees_close({n: p.to_local() for n, p in model.named_parameters()}, before, rtol=0, atol=0)


@row("2 train_fsdp.py", "optimizer.state_dict() of rank 0 in summon_full_params")
def loads_the_whole_optimizer_of_rank_0() -> None:
    """There it is whole, as the model's: every rank may load it, and goes on as if nothing had happened."""
    makers: list[Any] = [partial(torch.optim.AdamW, lr=0.01), partial(torch.optim.SGD, lr=0.1, momentum=0.9)]
    for make in makers:
        with folder() as at:
            model = wrapped()
            optimizer = make(model.parameters())
            step_(model, optimizer, 0, 1)
            with model.summon_full_params():
                if rank() == 0:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(state, at / "ckpt.pt")
            dist.barrier()
            state = torch.load(at / "ckpt.pt", map_location="cpu")
            shapes = [x.shape for each in state["optimizer"]["state"].values() for x in each.values() if x.dim()]
            assert set(shapes) == {p.shape for p in net().parameters()}
            other = wrapped()
            with other.summon_full_params():
                other.load_state_dict(state["model"])
            fresh = make(other.parameters())
            fresh.load_state_dict(state["optimizer"])
            for each, its in ((model, optimizer), (other, fresh)):
                step_(each, its, 2)
            ours, theirs = ({n: p.to_local() for n, p in each.named_parameters()} for each in (other, model))
            assert_trees_close(ours, theirs, rtol=0, atol=0)


@row("2 train_fsdp.py", "optimizer.state_dict() of each rank")
def loads_the_optimizer_of_each_rank() -> None:
    """Saved on every rank and loaded each its own, training goes on as if nothing had happened."""
    with folder() as at:
        model = wrapped()
        optimizer = trained(model)
        torch.save((model.state_dict(), optimizer.state_dict()), at / f"{rank()}.pt")
        other = wrapped()
        fresh = torch.optim.AdamW(other.parameters(), lr=0.5)
        own, moments = torch.load(at / f"{rank()}.pt", map_location="cpu", weights_only=False)
        other.load_state_dict(own)
        fresh.load_state_dict(moments)
        step_(other, fresh, 2)
        assert_trees_close(values(other), values(plain_trained(3)), rtol=0, atol=1e-9)


@row("2 train_fsdp.py", "optimizer.state_dict() of copies", ranks=2)
def loads_the_optimizer_of_a_copy() -> None:
    """Where every rank has all weights, rank 0's state is everybody's, and loads everywhere."""
    with folder() as at:
        model = wrapped(fsdp_group_size=1)
        optimizer = trained(model)
        if rank() == 0:
            torch.save(optimizer.state_dict(), at / "optimizer.pt")
        dist.barrier()
        fresh = torch.optim.AdamW(model.parameters(), lr=0.5)
        fresh.load_state_dict(torch.load(at / "optimizer.pt", map_location="cpu", weights_only=False))
        step_(model, fresh, 2)
        assert_trees_close(values(model), values(plain_trained(3)), rtol=0, atol=1e-9)


@row("2 train_fsdp.py", "an optimizer made before wrapping")
def takes_old_optimizers() -> None:
    """It is given the shards, and trains them as one made afterwards does."""
    found: list[Any] = []
    for early in (True, False):
        plain = net()
        optimizer = torch.optim.AdamW(plain.parameters())
        model: Any = FullyShardedDataParallel(plain)
        optimizer = optimizer if early else torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(mine(batch())).square().mean().backward()
            optimizer.step()
        found.append(values(model))
    assert_trees_close(*found, rtol=0, atol=0)
    assert any(not torch.equal(one, dict(net().named_parameters())[name]) for name, one in found[0].items())


@row("2 programs", "on one rank", ranks=1)
def runs_alone() -> None:
    """One rank trains, saves and loads without a warning."""
    model = wrapped()
    trained(model)
    state = copy.deepcopy(model.state_dict())
    zeroed(model)
    model.load_state_dict(state)
    assert_trees_close(values(model), values(plain_trained()), rtol=0, atol=1e-9)
    with model.summon_full_params():
        assert_trees_close(dict(model.state_dict()), dict(plain_trained().state_dict()), rtol=0, atol=1e-9)


@pytest.mark.everyday(7)
@pytest.mark.parametrize("key", list(TABLE.rows))
def test_row(key: str) -> None:
    run(TABLE.rows[key].case, ranks=TABLE.rows[key].ranks)


def test_every_argument_and_documented_name_has_a_row() -> None:
    arguments, methods = TABLE.names("2 arguments"), TABLE.names("2 methods")
    assert [name for name in ARGUMENTS if name not in arguments] == []
    documented = ("summon_full_params", "state_dict", "load_state_dict", "module")
    assert [name for name in documented if name not in methods.split()] == []


def test_no_row_is_missing(record_property: Any) -> None:
    record_property("rows", f"hfai: {TABLE.counts}")
    assert TABLE.counts_said_in("howto/from-hfai.md") == TABLE.counts
    assert not TABLE.missing
