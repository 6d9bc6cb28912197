"""State dicts and checkpoints of FSDP1's class: through torch's own tools, and to and from torch's own class."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Stack
from options import NONE, combinations, named
from ranks import folder, quiet, zeroed
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardfn.compat.fsdp1 import FullyShardedDataParallel as FSDP
from shardfn.compat.fsdp1.instance import Instance
from shardfn.testing import assert_trees_close, run

FLAVOURS = list(StateDictType)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 5)
        self.norm = nn.LayerNorm(5)
        self.down = nn.Linear(5, 3)
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.norm(self.up(x)))) * self.scale


def _net(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return Stack(nn.Linear(3, 3, bias=False), Block(), Block())


def _pair(model: Any) -> tuple[Any, torch.optim.Optimizer]:
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)


def _wrap(model: nn.Module, cls: Any = FSDP, **given: Any) -> Any:
    if cls is TorchFSDP:
        given["device_id"] = torch.device("cpu")
    return cls(model, auto_wrap_policy=ModuleWrapPolicy({Block}), **given)


def _train(model: Any, optimizer: torch.optim.Optimizer, whole: bool = False) -> None:
    x = torch.randn(4 * dist.get_world_size(), 3, generator=torch.Generator().manual_seed(0))
    part = x if whole else x.chunk(dist.get_world_size())[dist.get_rank()]
    for _ in range(2):
        optimizer.zero_grad()
        model(part).square().mean().backward()
        optimizer.step()


def _in_flavour(cls: Any, model: nn.Module, kind: StateDictType) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return _Quietly(cls.state_dict_type(model, kind))


class _Quietly:
    """A context whose deprecation warnings are of no interest here."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __enter__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._context.__enter__()

    def __exit__(self, *args: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._context.__exit__(*args)


def _full(cls: Any, model: nn.Module) -> dict[str, Tensor]:
    with _in_flavour(cls, model, StateDictType.FULL_STATE_DICT):
        return {name: value.clone() for name, value in model.state_dict().items()}


def _assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], tol: float = 1e-6) -> None:
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=tol, atol=tol, msg=lambda m, n=name: f"{n}: {m}")


# ---------------------------------------------------------------------------------------------------------------------
# torch's own class


def _from_torch(use_orig_params: bool, flavour: StateDictType) -> None:
    theirs, their_optimizer = _pair(_wrap(_net(), TorchFSDP, use_orig_params=use_orig_params))
    _train(theirs, their_optimizer)
    wanted = _full(TorchFSDP, theirs)
    ours, optimizer = _pair(_wrap(_net(1), use_orig_params=use_orig_params))
    with _in_flavour(TorchFSDP, theirs, flavour), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = theirs.state_dict()
    with _in_flavour(FSDP, ours, flavour):
        ours.load_state_dict(state)
    _assert_same(_full(FSDP, ours), wanted)
    if flavour == StateDictType.LOCAL_STATE_DICT or use_orig_params:
        return  # torch 2.13 on the CPU: with use_orig_params, exp_avg of the whole state holds other numbers
    with _in_flavour(TorchFSDP, theirs, flavour), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = TorchFSDP.optim_state_dict(theirs, their_optimizer)
    with _in_flavour(FSDP, ours, flavour):
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(ours, optimizer, saved))
    _train(ours, optimizer)
    _train(theirs, their_optimizer)
    _assert_same(_full(FSDP, ours), _full(TorchFSDP, theirs))


@pytest.mark.parametrize("flavour", FLAVOURS, ids=[kind.name for kind in FLAVOURS])
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
def test_what_torchs_class_holds_loads_here(use_orig_params: bool, flavour: StateDictType) -> None:
    run(_from_torch, use_orig_params, flavour, ranks=2)


def _keep_names(*_: Any) -> None:
    """A hook of a user's module, after which alone it is known what a state dict has for whom."""


def _over_other_ranks(hooked: bool) -> None:
    """Split as here, but over two ranks: each pair of ranks has everything."""
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    wanted, net = _net().state_dict(), _net(1)
    if hooked:
        net.register_load_state_dict_pre_hook(_keep_names)
    ours = _wrap(net)
    states = [
        wanted | {name: distribute_tensor(p.detach(), mesh, [Shard(0)]) for name, p in _net().named_parameters()}
        for mesh in (pairs["shard"], pairs["replicate"])
    ]
    theirs = _wrap(_net(), TorchFSDP, process_group=pairs.get_group("shard"))
    with _in_flavour(TorchFSDP, theirs, StateDictType.SHARDED_STATE_DICT), quiet():
        states.append(theirs.state_dict())
    assert isinstance(states[-1]["emb.weight"], ShardedTensor)
    for state in states:
        zeroed(ours)
        with _in_flavour(FSDP, ours, StateDictType.SHARDED_STATE_DICT), quiet(FutureWarning):
            ours.load_state_dict(state)
        _assert_same(_full(FSDP, ours), wanted)


@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "hooked"])
def test_states_over_other_ranks_load(hooked: bool) -> None:
    run(_over_other_ranks, hooked, ranks=4)


def _to_torch() -> None:
    ours, optimizer = _pair(_wrap(_net()))
    _train(ours, optimizer)
    theirs, their_optimizer = _pair(_wrap(_net(1), TorchFSDP))
    theirs.load_state_dict(_full(FSDP, ours))
    saved = FSDP.optim_state_dict(ours, optimizer)
    their_optimizer.load_state_dict(TorchFSDP.optim_state_dict_to_load(theirs, their_optimizer, saved))
    _train(ours, optimizer)
    _train(theirs, their_optimizer)
    _assert_same(_full(TorchFSDP, theirs), _full(FSDP, ours))


def test_what_this_class_holds_loads_in_torchs() -> None:
    run(_to_torch, ranks=2)


def _through_directories() -> None:
    theirs, ours = _wrap(_net(), TorchFSDP), _wrap(_net(1))
    with folder() as at:
        for name, cls, model in (("theirs", TorchFSDP, theirs), ("ours", FSDP, ours)):
            with _in_flavour(cls, model, StateDictType.SHARDED_STATE_DICT), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                state_dict_saver.save(model.state_dict(), checkpoint_id=f"{at}/{name}")
        wanted = {"theirs": _full(TorchFSDP, theirs), "ours": _full(FSDP, ours)}
        for name, cls, model in (("theirs", FSDP, ours), ("ours", TorchFSDP, theirs)):
            with _in_flavour(cls, model, StateDictType.SHARDED_STATE_DICT), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                state = model.state_dict()
                state_dict_loader.load(state, checkpoint_id=f"{at}/{name}")
                model.load_state_dict(state)
            _assert_same(_full(cls, model), wanted[name])


def test_checkpoint_directories_go_both_ways() -> None:
    run(_through_directories, ranks=2)


# ---------------------------------------------------------------------------------------------------------------------
# torch's own tools


def _round_trip(flags: dict[str, bool], strategy: ShardingStrategy) -> None:
    given: dict[str, Any] = {"sharding_strategy": strategy}
    if strategy == ShardingStrategy.HYBRID_SHARD:
        given["device_mesh"] = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        models = [_net(seed) for seed in (0, 1, 0)]
        for model in models:
            model.layers[1].requires_grad_(False)
        (saved, saver), (loaded, loader) = (_pair(_wrap(model, **given)) for model in models[:2])
    reference, plain = _pair(models[2])
    _train(saved, saver)
    _train(reference, plain, whole=True)
    settings: dict[str, Any] = {**flags, "strict": not flags["ignore_frozen_params"]}
    options = StateDictOptions(**settings)
    state = copy.deepcopy(get_model_state_dict(saved, options=options))
    optimizer_state = copy.deepcopy(get_optimizer_state_dict(saved, saver, options=options))
    first_only = flags["full_state_dict"] and flags["cpu_offload"] and dist.get_rank() > 0
    assert bool(state) is not first_only
    if state and not flags["full_state_dict"]:
        assert isinstance(state["emb.weight"], DTensor)
    if flags["full_state_dict"] and flags["cpu_offload"] and not flags["broadcast_from_rank0"]:
        return  # only the first rank has something to load: that is for files
    set_model_state_dict(loaded, state, options=options)
    set_optimizer_state_dict(loaded, loader, optimizer_state, options=options)
    if flags["ignore_frozen_params"]:
        set_model_state_dict(loaded, get_model_state_dict(saved))
    for model, optimizer, whole in ((loaded, loader, False), (reference, plain, True)):
        _train(model, optimizer, whole)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _assert_same(_full(FSDP, loaded), reference.state_dict(), 1e-5)


@pytest.mark.everyday(3)
@pytest.mark.parametrize("flags", combinations(), ids=named)
def test_every_combination_of_options(flags: dict[str, bool]) -> None:
    run(_round_trip, flags, ShardingStrategy.FULL_SHARD, ranks=2)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("strategy", [ShardingStrategy.HYBRID_SHARD, ShardingStrategy.NO_SHARD])
def test_options_of_other_strategies(strategy: ShardingStrategy) -> None:
    for full in (False, True):
        run(_round_trip, NONE | {"full_state_dict": full}, strategy, ranks=4)


def _asynchronously() -> None:
    model, optimizer = _pair(_wrap(_net()))
    _train(model, optimizer)
    wanted = _full(FSDP, model)
    with folder() as at, _in_flavour(FSDP, model, StateDictType.SHARDED_STATE_DICT):
        group: Any = dist.new_group(backend="gloo")  # of its own, for the thread that writes
        future: Any = state_dict_saver.async_save(model.state_dict(), checkpoint_id=at, process_group=group)
        _train(model, optimizer)
        future.result()
        state = model.state_dict()
        state_dict_loader.load(state, checkpoint_id=at)
        model.load_state_dict(state)
    _assert_same(_full(FSDP, model), wanted)


def test_an_asynchronous_save_holds_what_was_there_when_it_began() -> None:
    run(_asynchronously, ranks=2)


def _off_the_host() -> None:
    model = _wrap(_net())
    for _, _, record in Instance.all_in(model):
        record.device = torch.device("meta")
    found = []
    for host in (False, True):
        config = FullStateDictConfig(offload_to_cpu=host)
        with quiet(FutureWarning), FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
            state = model.state_dict()
        found.append({state[name].device.type for name, _ in model.named_parameters()})
    assert found == [{"meta"}, {"cpu"}]


def test_whole_values_are_where_an_instance_computes_or_on_the_host() -> None:
    """The meta device stands for one that is not the host."""
    run(_off_the_host, ranks=2)


def _onto(directory: str, saves: bool) -> Any:
    """On some ranks: save, or load; what there is then, and whether it goes on."""
    model, optimizer = _pair(_wrap(_net(0 if saves else 1)))
    if saves:
        _train(model, optimizer)
    states = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    if saves:
        state_dict_saver.save(states, checkpoint_id=directory)
    else:
        state_dict_loader.load(states, checkpoint_id=directory)
        set_model_state_dict(model, states["model"])
        set_optimizer_state_dict(model, optimizer, states["optimizer"])
    full = StateDictOptions(full_state_dict=True)
    found = _full(FSDP, model), get_optimizer_state_dict(model, optimizer, options=full)["state"]
    _train(model, optimizer)
    return found


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3)])
def test_a_checkpoint_of_other_ranks(before: int, after: int, tmp_path: Any) -> None:
    wanted = run(_onto, str(tmp_path), True, ranks=before)[0]
    found = run(_onto, str(tmp_path), False, ranks=after)[0]
    assert_trees_close(found, wanted, rtol=0, atol=0)


def _of_another_model() -> None:
    model = FSDP(nn.Linear(4, 4), device_id="cpu", use_orig_params=True)
    optimizer = torch.optim.SGD([*model.parameters(), *nn.Linear(2, 2).parameters()], lr=0.1)
    with pytest.raises(Exception, match=r"2 of the optimizer's parameters are not the model's, the first is number 2"):
        FSDP.optim_state_dict(model, optimizer)


def test_an_optimizer_that_has_more_than_the_model() -> None:
    run(_of_another_model, ranks=2)
