"""Sections 4.2 and 4.3. torch's state dict functions and distributed checkpoints, on our models as they are."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import folder, quiet, zeroed
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from fsdp2_rows.common import (
    DOORS,
    FP64,
    KINDS,
    OURS,
    TORCHS,
    Net,
    adamw,
    first_rank,
    loss_of,
    meshes,
    mine,
    net,
    refuses,
    row,
    sharded,
    tokens,
    trained,
    values,
    whole_tree,
)
from shardfn.testing import assert_close, assert_trees_close

FULL = StateDictOptions(full_state_dict=True)
RANK0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def _trained(kind: str, door: Any = OURS) -> tuple[Any, torch.optim.Optimizer]:
    model = sharded(kind, door)
    return model, trained(model, kind)


def _plain() -> tuple[Any, torch.optim.Optimizer]:
    model = net()
    return model, trained(model)


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Parameter -> what the optimizer keeps of it, whole."""
    return {name: whole_tree(dict(optimizer.state[p])) for name, p in model.named_parameters() if p in optimizer.state}


def _same(one: tuple[Any, Any], two: tuple[Any, Any], atol: float = 1e-9) -> None:
    """Require the same values and moments of two models and their optimizers."""
    assert_trees_close(values(one[0]), values(two[0]), rtol=0, atol=atol)
    assert _moments(*two)
    assert_trees_close(_moments(*one), _moments(*two), rtol=0, atol=atol)


def _goes_on(one: tuple[Any, Any], kind: str) -> None:
    """Require that a third step after loading is that of the plain model."""
    plain = _plain()
    for (model, optimizer), ids in ((one, mine(tokens(7), kind)), (plain, tokens(7))):
        optimizer.zero_grad()
        loss_of(model, ids).backward()
        optimizer.step()
    _same(one, plain)


def _another(kind: str, seed: int = 2) -> tuple[Any, torch.optim.Optimizer]:
    """An untrained model of other values, and its optimizer."""
    model = sharded(kind, model=net(seed=seed))
    return model, adamw(model)


def _keys(tree: Any, at: str = "") -> set[str]:
    if isinstance(tree, dict):
        return {key for name, value in tree.items() for key in _keys(value, f"{at}/{name}")}
    if isinstance(tree, list):
        return {key for i, value in enumerate(tree) for key in _keys(value, f"{at}/{i}")}
    return {at}


@row("4.2", "get_model_state_dict", ranks=4)
def gets_the_model() -> None:
    """Shards under the model's names, as torch's own model gives them, on every mesh."""
    for kind in KINDS:
        model, _ = _trained(kind)
        state = get_model_state_dict(model)
        assert list(state) == list(net().state_dict())
        assert all(isinstance(value, DTensor) == (name != "shift") for name, value in state.items())
        if kind != "tensor":
            theirs = get_model_state_dict(_trained(kind, TORCHS)[0])
            assert list(theirs) == list(state)
            assert all(
                getattr(value, "placements", None) == getattr(theirs[name], "placements", None)
                for name, value in state.items()
            )
        assert_trees_close(whole_tree(state), dict(_plain()[0].state_dict()), rtol=0, atol=1e-9)


@row("4.2", "set_model_state_dict, model_state_dict", ranks=4)
def sets_the_model() -> None:
    """What `get_model_state_dict` gave goes back, in place, and tells which keys did not fit."""
    for kind in KINDS:
        model, _ = _trained(kind)
        saved = copy.deepcopy(get_model_state_dict(model))
        zeroed(model)
        before = list(model.parameters())
        found = set_model_state_dict(model, saved)
        assert not found.missing_keys and not found.unexpected_keys
        assert all(one is two for one, two in zip(before, model.parameters(), strict=True))
        assert_trees_close(values(model), values(_plain()[0]), rtol=0, atol=1e-9)


@row("4.2", "set_model_state_dict: of a submodule", ranks=2)
def sets_a_submodule() -> None:
    """`{module: state}` loads one submodule, as torch does, with its FutureWarning."""
    for door in DOORS:
        model, want = sharded(door=door), {n: v + 1 for n, v in net().blocks[1].state_dict().items()}
        with pytest.warns(FutureWarning):
            set_model_state_dict(model, {model.blocks[1]: want}, options=StateDictOptions(True, strict=False))
        assert_trees_close(values(model.blocks[1]), want, rtol=0, atol=0)
        assert_close(values(model)["head.weight"], values(net())["head.weight"], rtol=0, atol=0)


@row("4.2", "get_optimizer_state_dict", ranks=4)
def gets_the_optimizer() -> None:
    """Moments as shards under parameters' names, groups with names, as torch's own gives them."""
    for kind in KINDS:
        model, optimizer = _trained(kind)
        state: Any = get_optimizer_state_dict(model, optimizer)
        theirs: Any = get_optimizer_state_dict(*_trained(kind, TORCHS))
        assert _keys(state) == _keys(theirs)
        assert state["param_groups"][0]["params"] == [name for name, _ in net().named_parameters()]
        assert isinstance(state["state"]["head.weight"]["exp_avg"], DTensor)
        assert_trees_close(whole_tree(state["state"]), whole_tree(theirs["state"]), rtol=0, atol=1e-12)
        assert state["param_groups"] == theirs["param_groups"]


@row("4.2", "get_optimizer_state_dict: before the first step")
def gets_the_optimizer_before_a_step() -> None:
    """An optimizer that has not stepped gets states of zeros, and parameters stay as they are."""
    for door in DOORS:
        model = sharded(door=door)
        state: Any = get_optimizer_state_dict(model, adamw(model))
        assert set(state["state"]) == {name for name, _ in net().named_parameters()}
        assert all(bool((whole_tree(each)["exp_avg"] == 0).all()) for each in state["state"].values())
        assert_trees_close(values(model), values(net()), rtol=0, atol=0)
        assert all(p.grad is None for p in model.parameters())


@row("4.2", "set_optimizer_state_dict, optim_state_dict", ranks=4)
def sets_the_optimizer() -> None:
    """What `get_optimizer_state_dict` gave goes into a fresh optimizer, and training goes on."""
    for kind in KINDS:
        model, optimizer = _trained(kind)
        saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
        fresh = torch.optim.AdamW(model.parameters(), 0.5)
        set_optimizer_state_dict(model, fresh, saved)
        assert fresh.param_groups[0]["lr"] == 0.01
        _goes_on((model, fresh), kind)


@row("4.2", "optimizers: several")
def takes_several_optimizers() -> None:
    """Two optimizers of parts of the model go into one dict and come back apart."""
    found = []
    for door in DOORS:
        model = sharded(door=door)
        pair = [torch.optim.AdamW(model.blocks.parameters(), 0.01), torch.optim.SGD(model.head.parameters(), 0.1, 0.9)]
        loss_of(model, mine(tokens())).backward()
        for optimizer in pair:
            optimizer.step()
        state: Any = copy.deepcopy(get_optimizer_state_dict(model, pair))
        found.append(whole_tree(copy.deepcopy(state["state"])))
        for optimizer in pair:
            for each in optimizer.state.values():
                for value in each.values():
                    value.zero_()
        set_optimizer_state_dict(model, pair, state)
        now: Any = get_optimizer_state_dict(model, pair)
        assert_trees_close(whole_tree(now["state"]), found[-1], rtol=0, atol=0)
    assert_trees_close(found[1], found[0], rtol=0, atol=1e-12)


@row("4.2", "get_state_dict", ranks=4)
def gets_both() -> None:
    """The pair of what the two functions give."""
    for kind in KINDS:
        model, optimizer = _trained(kind)
        first, second = get_state_dict(model, optimizer)
        assert list(first) == list(get_model_state_dict(model))
        assert _keys(second) == _keys(get_optimizer_state_dict(model, optimizer))
        first, second = get_state_dict(model, optimizer, options=FULL)
        plain, other = _plain()
        want = get_state_dict(plain, other)
        assert_trees_close(first, want[0], rtol=0, atol=1e-9)
        assert_trees_close(second["state"], want[1]["state"], rtol=0, atol=1e-9)


@row("4.2", "set_state_dict", ranks=4)
def sets_both() -> None:
    """Shards, or whole dicts under `full_state_dict`, go into another model and optimizer."""
    for kind in KINDS:
        for options in (StateDictOptions(), FULL):
            saved = copy.deepcopy(get_state_dict(*_trained(kind), options=options))
            model, optimizer = _another(kind)
            found = set_state_dict(
                model, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1], options=options
            )
            assert not found.missing_keys and not found.unexpected_keys
            _goes_on((model, optimizer), kind)


@row("4.2", "full_state_dict", ranks=4)
def gathers_everything() -> None:
    """Whole plain tensors on every rank, of the model and of the optimizer; a plain model loads them."""
    for kind in KINDS:
        model, optimizer = _trained(kind)
        first, second = get_state_dict(model, optimizer, options=FULL)
        assert not any(isinstance(value, DTensor) for value in first.values())
        plain = net(seed=3)
        plain.load_state_dict(first)
        own = adamw(plain)
        set_optimizer_state_dict(plain, own, second)
        _same((plain, own), _plain())
        assert_trees_close(values(model), values(plain), rtol=0, atol=0)


@row("4.2", "full_state_dict: set from every rank", ranks=4)
def loads_whole_dicts() -> None:
    """A dict of the plain model that every rank has is cut into shards."""
    plain, own = _plain()
    first, second = get_state_dict(plain, own)
    for kind in KINDS:
        model, optimizer = _another(kind)
        set_model_state_dict(model, copy.deepcopy(first), options=FULL)
        set_optimizer_state_dict(model, optimizer, copy.deepcopy(second), options=FULL)
        _goes_on((model, optimizer), kind)


@row("4.2", "cpu_offload", ranks=2)
def copies_to_the_host() -> None:
    """Shards on the host, on every rank."""
    for door in DOORS:
        model, optimizer = _trained("plain", door)
        first, second = get_state_dict(model, optimizer, options=StateDictOptions(cpu_offload=True))
        found: Any = first["head.weight"]
        assert isinstance(found, DTensor) and found.device.type == "cpu"
        assert_trees_close(whole_tree(first), dict(_plain()[0].state_dict()), rtol=0, atol=1e-9)
        assert_trees_close(whole_tree(second["state"]), _moments(*_plain()), rtol=0, atol=1e-9)


@row("4.2", "full_state_dict with cpu_offload", ranks=4)
def gathers_to_one_rank() -> None:
    """Rank 0 alone gets everything, the others empty dicts."""
    plain = _plain()
    for kind in KINDS:
        model, optimizer = _trained(kind)
        first, second = get_state_dict(model, optimizer, options=RANK0)
        assert list(first) == list(get_model_state_dict(model, options=RANK0))
        if first_rank():
            assert_trees_close(first, dict(plain[0].state_dict()), rtol=0, atol=1e-9)
            assert_trees_close(second["state"], _moments(*plain), rtol=0, atol=1e-9)
        else:
            assert not first and not second


@row("4.2", "ignore_frozen_params", ranks=2)
def leaves_frozen_parameters_out() -> None:
    """Frozen parameters are not in what is given, and what is loaded may lack them."""
    for door in DOORS:
        model = net()
        model.emb.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
        sharded(door=door, model=model)
        optimizer = trained(model)
        options = StateDictOptions(ignore_frozen_params=True, strict=False)
        first, second = get_state_dict(model, optimizer, options=options)
        want = [n for n in net().state_dict() if not n.startswith(("emb.", "blocks.0."))]
        assert list(first) == want and set(second["state"]) == set(want) - {"shift"}
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, ignore_frozen_params=True))
        assert list(full) == want
        before = values(model)
        with torch.no_grad():
            model.head.weight.zero_()
        found = set_model_state_dict(model, full, options=StateDictOptions(True, strict=False))
        assert_trees_close(values(model), before, rtol=0, atol=0)
        assert not found.unexpected_keys


@row("4.2", "submodules, keep_submodule_prefixes", ranks=2)
def gets_submodules() -> None:
    """Parts of the model, with the prefix of each or without, as torch gives them, with its FutureWarning."""
    found: list[list[Any]] = []
    for door in DOORS:
        model, optimizer = _trained("plain", door)
        found.append([])
        for keep in (True, False):
            options = StateDictOptions(keep_submodule_prefixes=keep)
            with pytest.warns(FutureWarning, match="submodules only"):
                part = get_model_state_dict(model, submodules={model.blocks[1]}, options=options)
            found[-1].append(part)
        with pytest.warns(FutureWarning, match="submodules only"):
            first, second = get_state_dict(model, optimizer, submodules={model.blocks[0], model.head}, options=FULL)
        found[-1] += [first, second["state"]]
    assert [list(each) for each in found[1]] == [list(each) for each in found[0]]
    assert next(iter(found[1][0])) == "blocks.1.norm.weight" and next(iter(found[1][1])) == "norm.weight"
    assert_trees_close(whole_tree(found[1]), whole_tree(found[0]), rtol=0, atol=1e-12)


@row("4.2", "strict", ranks=2)
def is_strict_or_not() -> None:
    """Missing and unexpected keys are torch's RuntimeError, or told in what comes back."""
    for door in DOORS:
        model = sharded(door=door)
        state: dict[str, Any] = {"head.bias": get_model_state_dict(model)["head.bias"], "more": torch.ones(1)}
        words = ("Error(s) in loading state_dict for FSDPNet", "emb.weight", "more")
        refuses(lambda m=model, s=state: set_model_state_dict(m, dict(s)), RuntimeError, *words)
        found = set_model_state_dict(model, state, options=StateDictOptions(strict=False))
        assert found.unexpected_keys == ["more"] and "emb.weight" in found.missing_keys
        assert "head.bias" not in found.missing_keys
        words = ("model state_dict is empty",)
        refuses(lambda m=model: set_model_state_dict(m, {}), RuntimeError, *words)


@row("4.2", "broadcast_from_rank0", ranks=4)
def broadcasts() -> None:
    """Rank 0's whole dicts reach the shards of all ranks; others pass empty dicts; without full it is an error."""
    plain, own = _plain()
    first, second = get_state_dict(plain, own)
    for kind in KINDS:
        model, optimizer = _another(kind)
        set_model_state_dict(model, dict(first) if first_rank() else {}, options=BROADCAST)
        set_optimizer_state_dict(model, optimizer, copy.deepcopy(second) if first_rank() else {}, options=BROADCAST)
        _goes_on((model, optimizer), kind)
    words = "full_state_dict must be True when broadcast_from_rank0 is True."
    options = StateDictOptions(broadcast_from_rank0=True)
    refuses(lambda: set_model_state_dict(sharded(), dict(first), options=options), ValueError, words)


@row("4.2", "broadcast_from_rank0: a model on the meta device", ranks=4)
def broadcasts_to_meta() -> None:
    """Weights of rank 0 fill a model that was sharded on meta, as large models are loaded."""
    first = _plain()[0].state_dict()
    for kind in KINDS:
        with torch.device("meta"):
            model: Any = Net().double()
        model.shift = torch.linspace(-1, 1, 6, dtype=FP64)
        sharded(kind, model=model)
        set_model_state_dict(model, dict(first) if first_rank() else {}, options=BROADCAST)
        assert all(isinstance(p, DTensor) and not p.is_meta for p in model.parameters())
        assert_trees_close(values(model), values(_plain()[0]), rtol=0, atol=1e-9)
        loss_of(model, mine(tokens(), kind)).backward()


@row("4.2", "broadcast_from_rank0 with cpu_offload", ranks=2)
def broadcasts_and_offloads() -> None:
    """All three options together, of an offloaded model."""
    first = _plain()[0].state_dict()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
    model = sharded(model=net(seed=2), offload_policy=OURS.CPUOffloadPolicy(pin_memory=False))
    set_model_state_dict(model, dict(first) if first_rank() else {}, options=options)
    assert_trees_close(values(model), values(_plain()[0]), rtol=0, atol=1e-9)


@row("4.2", "broadcast_from_rank0, strict=False", ranks=2)
def broadcasts_a_part() -> None:
    """A part of the keys, from rank 0, leaves the other parameters as they are."""
    for door in DOORS:
        model = sharded(door=door, model=net(seed=2))
        part = {name: value for name, value in _plain()[0].state_dict().items() if name.startswith("head.")}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        set_model_state_dict(model, dict(part) if first_rank() else {}, options=options)
        want = values(net(seed=2)) | part
        assert_trees_close(values(model), want, rtol=0, atol=1e-9)


@row("4.2", "flatten_optimizer_state_dict", ranks=4)
def flattens_the_optimizer() -> None:
    """One flat dict, `state.<name>.<key>` and `param_groups.<name>.<key>`, which loads again."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    for kind in KINDS:
        model, optimizer = _trained(kind)
        flat: Any = get_optimizer_state_dict(model, optimizer, options=options)
        theirs: Any = get_optimizer_state_dict(*_trained(kind, TORCHS), options=options)
        assert flat.keys() == theirs.keys() and "state.head.weight.exp_avg" in flat
        assert flat["param_groups.head.weight.lr"] == 0.01
        flat = copy.deepcopy(flat)
        model.zero_grad()  # else torch takes a fresh optimizer's state as it is, which is empty
        fresh = torch.optim.AdamW(model.parameters(), 0.5)
        set_optimizer_state_dict(model, fresh, flat, options=options)
        _goes_on((model, fresh), kind)


@row("4.2", "dsd_fqn_modifiers", ranks=2)
def asks_for_modified_names() -> None:
    """The name of a method that renames: a model without it is as ever, one with it is as in torch."""
    found = []
    for door in DOORS:
        model: Any = sharded(door=door)
        options = StateDictOptions(dsd_fqn_modifiers="_my_names")
        model._my_names = dict
        set_model_state_dict(model, {n: v.clone() for n, v in net(seed=3).state_dict().items()}, options=FULL)
        state = get_model_state_dict(model, options=options)
        set_model_state_dict(model, state, options=options)
        found.append(values(model))
    assert_trees_close(found[1], found[0], rtol=0, atol=0)
    assert_trees_close(found[1], values(net(seed=3)), rtol=0, atol=0)


@row("4.2", "tied parameters", ranks=2)
def saves_tied_parameters() -> None:
    """Both names of a tied parameter are in the model's dict; the optimizer's has one; both load again."""
    found = []
    for door in DOORS:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
        model[2].weight = model[0].weight
        door.fully_shard(model)
        optimizer = adamw(model)
        model(torch.linspace(-1, 1, 8, dtype=FP64).view(2, 4)).square().mean().backward()
        optimizer.step()
        first = get_model_state_dict(model, options=FULL)
        with torch.no_grad():
            model[0].weight.zero_()
        set_model_state_dict(model, dict(first), options=FULL)
        assert model[0].weight is model[2].weight
        found.append((list(first), values(model)))
    assert found[0][0] == found[1][0] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert_trees_close(found[1][1], found[0][1], rtol=0, atol=1e-12)


@row("4.2", "of an inner module", ranks=2)
def gets_an_inner_module() -> None:
    """The functions work on an inner sharded module by itself."""
    for door in DOORS:
        model, _ = _trained("plain", door)
        state = get_model_state_dict(model.blocks[0], options=FULL)
        assert_trees_close(state, dict(_plain()[0].blocks[0].state_dict()), rtol=0, atol=1e-9)
        zeroed(model.blocks[0])
        set_model_state_dict(model.blocks[0], dict(state), options=FULL)
        assert_trees_close(values(model.blocks[0]), values(_plain()[0].blocks[0]), rtol=0, atol=1e-9)


@row("4.2", "after unshard", ranks=2)
def gets_shards_while_whole() -> None:
    """While `unshard` has put whole weights in place, whole values are saved all the same."""
    for door in DOORS:
        model, _ = _trained("plain", door)
        model.unshard()
        state = get_model_state_dict(model, options=FULL)
        assert_trees_close(state, dict(_plain()[0].state_dict()), rtol=0, atol=1e-9)
        model.reshard()


@row("4.2", "between ours and torch's", ranks=4)
def exchanges_with_torchs() -> None:
    """Shards of torch's model load into ours and the other way round, on 1-D and 2-D meshes."""
    for kind in ("plain", "hybrid"):
        for one, two in ((TORCHS, OURS), (OURS, TORCHS)):
            source = _trained(kind, one)
            model = sharded(kind, two, net(seed=2))
            optimizer = adamw(model)
            first, second = copy.deepcopy(get_state_dict(*source))
            set_state_dict(model, optimizer, model_state_dict=first, optim_state_dict=second)
            _same((model, optimizer), source, atol=0)


def _save(at: Any, kind: str, door: Any = OURS) -> None:
    model, optimizer = _trained(kind, door)
    first, second = get_state_dict(model, optimizer)
    with quiet():
        state_dict_saver.save({"model": first, "optimizer": second}, checkpoint_id=at)


def _load(at: Any, kind: str, door: Any = OURS) -> tuple[Any, torch.optim.Optimizer]:
    model = sharded(kind, door, net(seed=2))
    optimizer = adamw(model)
    first, second = get_state_dict(model, optimizer)
    state = {"model": first, "optimizer": second}
    with quiet():
        state_dict_loader.load(state, checkpoint_id=at)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return model, optimizer


def _round_trip(kind: str) -> None:
    with folder() as at:
        _save(at, kind)
        for other in KINDS:
            _goes_on(_load(at, other), other)


@row("4.3", "dcp.save, dcp.load: from 1-D", ranks=4)
def goes_round_from_one_axis() -> None:
    """Saved on 1-D, loaded on 1-D, HSDP and beside tensor parallelism; training goes on."""
    _round_trip("plain")


@row("4.3", "dcp.save, dcp.load: from HSDP", ranks=4)
def goes_round_from_two_axes() -> None:
    """Saved on HSDP, loaded on every mesh; training goes on."""
    _round_trip("hybrid")


@row("4.3", "dcp.save, dcp.load: from 2-D with tensor parallelism", ranks=4)
def goes_round_from_tensor_parallelism() -> None:
    """Saved beside tensor parallelism, loaded on every mesh; training goes on."""
    _round_trip("tensor")


@row("4.3", "dcp.save, dcp.load: between ours and torch's", ranks=4)
def goes_round_with_torchs() -> None:
    """A checkpoint of torch's model loads into ours, and ours into torch's, on other meshes too."""
    for one, two, to in ((TORCHS, OURS, "tensor"), (OURS, TORCHS, "hybrid"), (TORCHS, OURS, "plain")):
        with folder() as at:
            _save(at, "plain", one)
            _same(_load(at, to, two), _plain())


@row("4.3", "dcp_to_torch_save", ranks=2)
def becomes_one_file() -> None:
    """A checkpoint becomes one file that a plain model loads."""
    with folder() as at:
        _save(at, "plain")
        if first_rank():
            with quiet():
                dcp_to_torch_save(at, at / "one.pt")
            state = torch.load(at / "one.pt")
            assert_trees_close(dict(state["model"]), dict(_plain()[0].state_dict()), rtol=0, atol=1e-9)
        dist.barrier()


class _App:
    """Model and optimizer as one `Stateful`, as torch's recipe has it."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        first, second = state_dict["model"], state_dict["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=first, optim_state_dict=second)


@row("4.3", "Stateful", ranks=4)
def goes_round_as_a_stateful() -> None:
    """torch's recipe: an object with `state_dict` and `load_state_dict` is saved, and loaded on another mesh."""
    with folder() as at, quiet():
        state_dict_saver.save({"app": _App(*_trained("hybrid"))}, checkpoint_id=at)
        model, optimizer = _another("plain")
        state_dict_loader.load({"app": _App(model, optimizer)}, checkpoint_id=at)
        _goes_on((model, optimizer), "plain")


@row("4.3", "model.state_dict() in dcp", ranks=2)
def saves_the_models_own_state_dict() -> None:
    """`model.state_dict()` itself goes through `dcp.save` and `dcp.load`, which loads in place."""
    with folder() as at, quiet():
        model, _ = _trained("plain")
        want = values(model)
        state_dict_saver.save(model.state_dict(), checkpoint_id=at)
        zeroed(model)
        state = model.state_dict()
        state_dict_loader.load(state, checkpoint_id=at)
        model.load_state_dict(state)
        assert_trees_close(values(model), want, rtol=0, atol=0)


@row("4.3", "async_save", ranks=2)
def saves_in_the_background() -> None:
    """`dcp.async_save` keeps the values of the moment, whatever is trained meanwhile."""
    with folder() as at, quiet():
        model, optimizer = _trained("plain")
        want = values(model)
        future: Any = state_dict_saver.async_save({"model": get_model_state_dict(model)}, checkpoint_id=at)
        zeroed(model)
        future.result()
        dist.barrier()
        state = get_model_state_dict(model)
        state_dict_loader.load({"model": state}, checkpoint_id=at)
        assert_trees_close({n: v for n, v in whole_tree(state).items() if n in want}, want, rtol=0, atol=0)
        assert optimizer.state and meshes("plain")[0].size() == 2
