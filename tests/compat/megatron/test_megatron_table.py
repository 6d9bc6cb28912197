"""Megatron-core's `TorchFullyShardedDataParallel`, one case a row: arguments, the constructor, members, callers.

What is expected was read from Megatron-LM d98e8a64dd: `torch_fully_sharded_data_parallel.py` and those that call it.
Megatron is not installed: objects of the same shape stand for its configs and its classes.
"""

import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drawing import untyped
from megatron_objects import WRAP, ColumnParallelLinear, Model, TransformerLayer
from ranks import folder
from rows import Table
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.tensor import DTensor, Shard

from shardfn import ShardError
from shardfn.comm.buckets import whole
from shardfn.compat import fsdp2, switch
from shardfn.compat.fsdp2 import FSDPModule
from shardfn.compat.megatron import TorchFullyShardedDataParallel
from shardfn.testing import assert_close, assert_trees_close, count_collectives, run

TABLE = Table()
row = TABLE.row
ARGUMENTS = ("config", "ddp_config", "module", "sub_modules_to_wrap", "disable_bucketing", "process_group")
ATTRIBUTES = ("config", "module", "process_group", "device_mesh", "ddp_config")
METHODS = (
    "forward",
    "no_sync",
    "start_grad_sync",
    "finish_grad_sync",
    "scale_gradients",
    "zero_grad_buffer",
    "broadcast_params",
    "state_dict",
    "state_dict_for_save_checkpoint",
    "load_state_dict",
)


def net() -> Model:
    return Model().double()


def config(**given: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"transformer_impl": "transformer_engine", "recompute_granularity": None} | given)


def wrapped(model: nn.Module | None = None, **given: Any) -> Any:
    arguments: dict[str, Any] = {
        "config": config(),
        "ddp_config": SimpleNamespace(),
        "module": net() if model is None else model,
        "sub_modules_to_wrap": WRAP,
    }
    return TorchFullyShardedDataParallel(**arguments | given)


def batch(step: int = 0) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).double()


def mine(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def values(model: nn.Module) -> dict[str, Tensor]:
    return {
        name.removeprefix("module."): whole(p).detach() if isinstance(p, DTensor) else p.detach()
        for name, p in model.named_parameters()
    }


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n.removeprefix("module."): whole(untyped(p.grad)) for n, p in model.named_parameters()}


def plain_gradients(*steps: int) -> dict[str, Tensor]:
    plain = net()
    for step in steps:
        plain(batch(step)).square().mean().backward()
    return {n: untyped(p.grad) for n, p in plain.named_parameters()}


def trained(model: nn.Module, *, all_of_it: bool = False) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        model(batch(step) if all_of_it else mine(batch(step))).square().mean().backward()
        optimizer.step()
    return optimizer


def trains(model: nn.Module) -> None:
    plain = net()
    trained(model)
    trained(plain, all_of_it=True)
    assert_trees_close(values(model), values(plain), rtol=0, atol=1e-9)


def units(model: nn.Module) -> list[str]:
    return sorted(type(module).__name__ for module in model.modules() if isinstance(module, FSDPModule))


def gathers(model: nn.Module) -> int:
    """How many gathers a backward takes."""
    for _ in range(2):
        model(mine(batch())).square().mean().backward()
    loss = model(mine(batch())).square().mean()
    with count_collectives() as counted:
        loss.backward()
    model.zero_grad()
    return counted.as_dict().get("all_gather", 0)


@contextmanager
def modules(**given: Any) -> Iterator[None]:
    """Within it these can be imported, as `megatron__core` for `megatron.core`."""
    made = {}
    for name, names in given.items():
        module = ModuleType(name.replace("__", "."))
        vars(module).update(names)
        made[module.__name__] = module
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


# -- arguments ---------------------------------------------------------------------------------------------------------


@row("3 arguments", "signature")
def has_the_signature() -> None:
    """The same arguments in the same order; by place they train too."""
    assert tuple(inspect.signature(TorchFullyShardedDataParallel.__init__).parameters)[1:] == ARGUMENTS
    model = TorchFullyShardedDataParallel(config(), SimpleNamespace(), net(), WRAP, True, dist.group.WORLD)
    trains(model)


@row("3 arguments", "config")
def reads_the_config() -> None:
    """Any object: `transformer_impl` and `recompute_granularity` count, where they are there."""
    given = object()
    assert wrapped(config=given).config is given
    trains(wrapped(config=given))


@row("3 arguments", "ddp_config")
def reads_the_ddp_config() -> None:
    """Any object: `reshard_after_forward` counts, True without it."""
    given = SimpleNamespace(reshard_after_forward=False)
    assert wrapped(ddp_config=given).ddp_config is given
    assert gathers(wrapped(ddp_config=given)) == 0
    assert gathers(wrapped(ddp_config=SimpleNamespace(reshard_after_forward=True))) >= 4
    assert gathers(wrapped(ddp_config=object())) >= 4


@row("3 arguments", "ddp_config: a number", ranks=4)
def keeps_a_part() -> None:
    """`reshard_after_forward` may be a number of ranks; one that does not divide them is `fully_shard`'s error."""
    trains(wrapped(ddp_config=SimpleNamespace(reshard_after_forward=2)))
    with pytest.raises(ValueError, match="it should be a factor of 4, not 3"):
        wrapped(ddp_config=SimpleNamespace(reshard_after_forward=3))


@row("3 arguments", "module")
def shards_the_module() -> None:
    """In place, with all its parameters; it may be one of the classes itself."""
    model = net()
    assert wrapped(model).module is model
    assert all(isinstance(p, DTensor) and p.placements == (Shard(0),) for p in model.parameters())
    layer = TransformerLayer()
    assert units(wrapped(layer)) == ["FSDPTransformerLayer"]


@row("3 arguments", "sub_modules_to_wrap")
def wraps_submodules() -> None:
    """A set, list or tuple of classes whose instances become units; none is one unit."""
    want = ["FSDPColumnParallelLinear", "FSDPModel", "FSDPSpecial", "FSDPTransformerLayer", "FSDPTransformerLayer"]
    for given in (WRAP, list(WRAP), tuple(WRAP)):
        assert units(wrapped(sub_modules_to_wrap=given)) == want
    model = wrapped(sub_modules_to_wrap=())
    assert units(model) == ["FSDPModel", "FSDPSpecial"]
    trains(model)


@row("3 arguments", "sub_modules_to_wrap: nested matches")
def wraps_nested_submodules() -> None:
    """A class whose instances hold others' becomes units on both levels."""
    model = wrapped(sub_modules_to_wrap={TransformerLayer, nn.Linear})
    assert units(model).count("FSDPLinear") == 4 and units(model).count("FSDPTransformerLayer") == 2
    trains(model)


@row("3 arguments", "sub_modules_to_wrap: default")
def wraps_megatrons_classes() -> None:
    """Without it, Megatron's own four classes, where they can be imported; else the root and what modules ask for."""
    assert units(wrapped_by_default()) == ["FSDPModel", "FSDPSpecial"]
    packages = {name: {"__path__": []} for name in ("megatron", "megatron__core", "megatron__core__transformer")}
    layer = {"megatron__core__transformer__transformer_layer": {"TransformerLayer": TransformerLayer}}
    column = {"megatron__core__tensor_parallel": {"ColumnParallelLinear": ColumnParallelLinear}}
    with modules(**packages, **layer, **column):
        model = wrapped_by_default()
    assert "FSDPTransformerLayer" in units(model) and "FSDPColumnParallelLinear" in units(model)
    trains(model)


def wrapped_by_default() -> Any:
    return TorchFullyShardedDataParallel(config(), SimpleNamespace(), net())


@row("3 arguments", "disable_bucketing")
def takes_disable_bucketing() -> None:
    """Accepted and unused, as in Megatron."""
    for given in (True, False):
        trains(wrapped(disable_bucketing=given))


@row("3 arguments", "process_group", ranks=4)
def takes_a_group() -> None:
    """The data ranks: part of them, or by default all."""
    half = untyped(dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0])
    model = wrapped(process_group=half)
    assert model.process_group is half and model.device_mesh.size() == 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        model(batch(step).chunk(2)[dist.get_rank() % 2]).square().mean().backward()
        optimizer.step()
    plain = net()
    trained(plain, all_of_it=True)
    assert_trees_close(values(model), values(plain), rtol=0, atol=1e-9)
    assert wrapped().process_group == dist.group.WORLD


# -- what the constructor does -----------------------------------------------------------------------------------------


@row("3 constructor", "Megatron's data parallel group", ranks=4)
def asks_megatron_for_the_group() -> None:
    """Without a group it is `get_data_parallel_group(with_context_parallel=True)`; all ranks where that is not set."""
    half = untyped(dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0])
    asked: list[dict[str, Any]] = []

    def group(**given: Any) -> Any:
        asked.append(given)
        return half

    def unset(**given: Any) -> Any:
        raise AssertionError("data parallel group is not initialized")

    packages = {name: {"__path__": []} for name in ("megatron", "megatron__core")}
    with modules(**packages, megatron__core__parallel_state={"get_data_parallel_group": group}):
        model = wrapped()
    assert model.process_group is half and asked == [{"with_context_parallel": True}]
    with modules(**packages, megatron__core__parallel_state={"get_data_parallel_group": unset}):
        assert wrapped().process_group == dist.group.WORLD


@row("3 constructor", "device mesh")
def makes_a_mesh() -> None:
    """One axis over the group, on the device of its backend (Megatron's is always CUDA)."""
    mesh = wrapped().device_mesh
    assert (mesh.ndim, mesh.size(), mesh.device_type) == (1, 2, "cpu")


@row("3 constructor", "attributes of parameters")
def keeps_attributes() -> None:
    """Parameters' own attributes are on the shards, each with its own; `is_torch_fsdp2_param` is set."""
    model = net()
    vars(model.special.weight)["my_attr"] = 7
    vars(model.output_layer.weight)["tensor_model_parallel"] = True
    vars(model.output_layer.bias)["sequence_parallel"] = False
    wrapped(model)
    assert untyped(model.special.weight).my_attr == 7 and not hasattr(model.special.bias, "my_attr")
    assert untyped(model.output_layer.weight).tensor_model_parallel is True
    assert untyped(model.output_layer.bias).sequence_parallel is False
    assert all(untyped(p).is_torch_fsdp2_param is True and isinstance(p, DTensor) for p in model.parameters())


@row("3 constructor", "attributes of tied parameters")
def keeps_attributes_of_tied_parameters() -> None:
    """A tied parameter stays tied, with its attributes, where both are in one unit."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    vars(model[0].weight)["shared_embedding"] = True
    wrapped(model)
    assert model[2].weight is model[0].weight and model[2].weight.shared_embedding is True
    model(torch.ones(2, 4)).sum().backward()
    assert model[0].weight.grad is not None


@row("3 constructor", "transformer_impl")
def leaves_columns_out() -> None:
    """`transformer_impl="local"` leaves `ColumnParallelLinear` out, of the given classes too; others do not."""
    assert "FSDPColumnParallelLinear" not in units(wrapped(config=config(transformer_impl="local")))
    assert "FSDPColumnParallelLinear" in units(wrapped(config=config(transformer_impl="inference_optimized")))
    trains(wrapped(config=config(transformer_impl="local")))


@row("3 constructor", "_fsdp_modules")
def adds_classes() -> None:
    """Classes that modules list, in their class or in one instance, at any depth, become units too."""
    assert "FSDPSpecial" in units(wrapped())
    model: Any = net()
    model.layers[1]._fsdp_modules = [nn.Linear]
    found = wrapped(model, sub_modules_to_wrap=())
    assert units(found).count("FSDPLinear") == 4  # those of the other layer too
    trains(found)


@row("3 constructor", "_fsdp_modules: errors", "refused")
def refuses_what_are_no_classes() -> None:
    """Instances and names in it are an error that says where; nothing is sharded by then."""
    for wrong in ([nn.Linear(2, 2)], ["Linear"]):
        model: Any = net()
        model.layers[0]._fsdp_modules = wrong
        with pytest.raises(ShardError, match=r"_fsdp_modules of 'layers\.0' lists .* which is no class of modules"):
            wrapped(model)
        assert not any(isinstance(p, DTensor) for p in model.parameters())


@row("3 constructor", "a module that is sharded already", "refused")
def refuses_sharded_modules() -> None:
    """A model whose parts are sharded already is an error, not sharded twice."""
    model = net()
    fsdp2.fully_shard(model.layers[0])
    with pytest.raises((ShardError, AssertionError), match="already"):
        wrapped(model)


@row("3 constructor", "recompute_granularity")
def sets_backward_prefetch() -> None:
    """With it, each unit is told to prefetch the one before; results are the same."""
    for granularity in ("full", "selective", None):
        trains(wrapped(config=config(recompute_granularity=granularity)))


@row("3 constructor", "order of units")
def orders_units() -> None:
    """Each unit is told the one before it in the model's order, the first one none."""
    told: list[tuple[str, list[str]]] = []
    model = net()
    names = {id(module): name for name, module in model.named_modules()}
    before = FSDPModule.set_modules_to_backward_prefetch

    def note(self: Any, others: list[Any]) -> None:
        told.append((names[id(self)], [names[id(other)] for other in others]))

    untyped(FSDPModule).set_modules_to_backward_prefetch = note
    try:
        wrapped(model, config=config(recompute_granularity="full"))
    finally:
        untyped(FSDPModule).set_modules_to_backward_prefetch = before
    assert told == [
        ("layers.0", []),
        ("layers.1", ["layers.0"]),
        ("special", ["layers.1"]),
        ("output_layer", ["special"]),
    ]


@row("3 constructor", "class names")
def names_classes() -> None:
    """Sharded modules are FSDP<Orig>, instances of both; the wrapper is not sharded itself."""
    model = wrapped()
    assert type(model).__name__ == "TorchFullyShardedDataParallel" and not isinstance(model, FSDPModule)
    assert type(model.module).__name__ == "FSDPModel" and isinstance(model.module, Model)
    assert type(model.module.layers[0].up).__name__ == "Linear"


# -- members -----------------------------------------------------------------------------------------------------------


@row("3 members", "forward")
def runs_forward() -> None:
    """The model's, with arguments by keyword."""
    model = wrapped()
    assert_close(model(mine(batch()), scale=2.0).detach(), net()(mine(batch()), scale=2.0).detach(), rtol=0, atol=1e-12)
    model(mine(batch())).square().mean().backward()
    assert_trees_close(gradients(model), plain_gradients(0), rtol=0, atol=1e-12)


@row("3 members", "no_sync")
def reduces_in_no_sync() -> None:
    """Does nothing: gradients are reduced in it too, and add up."""
    model = wrapped()
    with model.no_sync(), count_collectives() as counted:
        model(mine(batch())).square().mean().backward()
    assert counted.as_dict().keys() & {"reduce_scatter", "all_to_all", "all_reduce"}
    assert_trees_close(gradients(model), plain_gradients(0), rtol=0, atol=1e-12)
    model(mine(batch(1))).square().mean().backward()
    assert_trees_close(gradients(model), plain_gradients(0, 1), rtol=0, atol=1e-12)


def _does_nothing(method: str, *calls: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    model = wrapped()
    model(mine(batch())).square().mean().backward()
    want, grads = values(model), gradients(model)
    with count_collectives() as counted:
        assert [getattr(model, method)(*args, **kwargs) for args, kwargs in calls] == [None] * len(calls)
    assert counted.total == 0
    assert_trees_close(values(model), want, rtol=0, atol=0)
    assert_trees_close(gradients(model), grads, rtol=0, atol=0)


@row("3 members", "start_grad_sync")
def starts_nothing() -> None:
    """Does nothing, whatever it is given."""
    _does_nothing("start_grad_sync", ((), {}), ((1, None), {}))


@row("3 members", "finish_grad_sync")
def finishes_nothing() -> None:
    """Does nothing, with or without `force_all_reduce`."""
    _does_nothing("finish_grad_sync", ((), {}), ((True,), {}), ((), {"force_all_reduce": False}))


@row("3 members", "scale_gradients")
def scales_nothing() -> None:
    """Does nothing, as in Megatron."""
    _does_nothing("scale_gradients", ((2.0,), {}), ((), {"scaling_factor": 0.5}))


@row("3 members", "zero_grad_buffer")
def zeroes_nothing() -> None:
    """Does nothing: there is no buffer."""
    _does_nothing("zero_grad_buffer", ((), {}))


@row("3 members", "broadcast_params")
def broadcasts_nothing() -> None:
    """Does nothing: each rank has its own part."""
    _does_nothing("broadcast_params", ((), {}))


@row("3 members", "state_dict")
def gives_the_models_state_dict() -> None:
    """The model's names without `module.`, DTensors, extra state; prefix, keep_vars and destination as ever."""
    model, plain = wrapped(), net()
    state = model.state_dict()
    assert list(state) == list(plain.state_dict()) and "output_layer._extra_state" in state
    assert isinstance(state["special.weight"], DTensor) and not state["special.weight"].requires_grad
    assert list(model.state_dict(prefix="a.")) == list(plain.state_dict(prefix="a."))
    assert model.state_dict(keep_vars=True)["special.weight"] is model.module.special.weight
    given: dict[str, Any] = {}
    assert model.state_dict(destination=given) is given and list(given) == list(state)
    shards = {n: whole(v) for n, v in state.items() if isinstance(v, DTensor)}
    assert_trees_close(shards, values(plain), rtol=0, atol=0)


@row("3 members", "state_dict: by place")
def takes_the_arguments_of_state_dict_by_place() -> None:
    """Prefix first, then keep_vars, then destination, as Megatron's method has them."""
    model = wrapped()
    assert list(model.state_dict("a.")) == list(net().state_dict(prefix="a."))
    assert model.state_dict("", True)["special.weight"] is model.module.special.weight


class _Saves(Model):
    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        return {f"{prefix}mine": keep_vars}


@row("3 members", "state_dict_for_save_checkpoint")
def gives_what_the_model_saves() -> None:
    """The model's own method of this name with its arguments, or its state dict."""
    model = wrapped(_Saves())
    assert model.state_dict_for_save_checkpoint() == {"mine": False}
    assert model.state_dict_for_save_checkpoint("a.", True) == {"a.mine": True}
    model = wrapped()
    assert list(model.state_dict_for_save_checkpoint(prefix="a.")) == list(net().state_dict(prefix="a."))


@row("3 members", "load_state_dict")
def loads_nothing() -> None:
    """Does nothing and returns None, whatever it is given, strictly or not."""
    model = wrapped()
    want = values(model)
    assert model.load_state_dict({}) is None and model.load_state_dict({"x": 1}, strict=True) is None
    assert model.load_state_dict({name: value + 1 for name, value in want.items()}, False) is None
    assert_trees_close(values(model), want, rtol=0, atol=0)


@row("3 members", "config module process_group device_mesh ddp_config")
def has_attributes() -> None:
    """All five, as they were given or made."""
    own, theirs, model = config(), SimpleNamespace(), net()
    made = wrapped(model, config=own, ddp_config=theirs)
    assert (made.config, made.ddp_config, made.module) == (own, theirs, model)
    assert isinstance(made.process_group, dist.ProcessGroup) and made.device_mesh.size() == 2


# -- callers -----------------------------------------------------------------------------------------------------------


@row("3 callers", "get_model")
def is_made_as_get_model_makes_it() -> None:
    """One wrapper a model chunk, by keyword, `disable_bucketing` from the second on; chunks train together."""
    chunks = [
        TorchFullyShardedDataParallel(
            config=config(),
            ddp_config=SimpleNamespace(reshard_after_forward=True, overlap_grad_reduce=True),
            module=chunk,
            disable_bucketing=(i > 0),
            sub_modules_to_wrap=WRAP,
        )
        for i, chunk in enumerate([net(), net()])
    ]
    for chunk in chunks:
        chunk.broadcast_params()
    x = mine(batch())
    chunks[1](torch.cat([chunks[0](x), x[:, :2]], 1)).square().mean().backward()
    one, two = net(), net()
    two(torch.cat([one(batch()), batch()[:, :2]], 1)).square().mean().backward()
    for chunk, plain in zip(chunks, (one, two), strict=True):
        want = {n: untyped(p.grad) for n, p in plain.named_parameters()}
        assert_trees_close(gradients(chunk), want, rtol=0, atol=1e-12)


@row("3 callers", "unwrap_model")
def is_unwrapped() -> None:
    """`.module` again and again, while the class is a wrapper's, ends at the model."""
    model = found = wrapped()
    while isinstance(found, TorchFullyShardedDataParallel):
        found = found.module
    assert found is model.module and isinstance(found, Model)
    assert next(name for name, _ in model.named_parameters()) == "module.layers.0.up.weight"


@row("3 callers", "is_torch_fsdp2_param")
def tells_its_parameters() -> None:
    """Checkpoint code asks for the attribute and for DTensors, of `state_dict(keep_vars=True)` as well."""
    state = wrapped().state_dict(keep_vars=True)
    found = {n: v for n, v in state.items() if getattr(v, "is_torch_fsdp2_param", False) and isinstance(v, DTensor)}
    assert list(found) == [name for name, _ in net().named_parameters()]
    assert all(value.to_local().shape[0] == value.shape[0] // 2 for value in found.values())


@row("3 callers", "_load_base_checkpoint")
def is_loaded_in_place() -> None:
    """Tensors of `state_dict()` are the model's own: `dcp.load` fills them, and then `load_state_dict` is called."""
    with folder() as at:
        model = wrapped()
        optimizer = trained(model)
        want = values(model)
        state_dict_saver.save({n: v for n, v in model.state_dict().items() if isinstance(v, DTensor)}, checkpoint_id=at)
        other = wrapped()
        state = {n: v for n, v in other.state_dict().items() if isinstance(v, DTensor)}
        state_dict_loader.load(state, checkpoint_id=at)
        other.load_state_dict(state)
        assert_trees_close(values(other), want, rtol=0, atol=0)
        assert optimizer.state


@row("3 callers", "optimizer and clipping")
def trains_with_clipping() -> None:
    """A torch optimizer over `model.parameters()` and `clip_grad_norm_` train as one process."""
    model, plain = wrapped(), net()
    for each, x in ((model, mine(batch())), (plain, batch())):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.01)
        each(x).square().mean().backward()
        nn.utils.clip_grad_norm_(each.parameters(), 0.01)
        optimizer.step()
    assert_trees_close(values(model), values(plain), rtol=0, atol=1e-9)


@row("3 callers", "train and eval")
def evaluates() -> None:
    """`eval()` and `train()` reach the model; without gradients it computes as the plain one."""
    model = wrapped()
    model.eval()
    assert not model.module.training
    with torch.no_grad():
        assert_close(model(mine(batch())), net()(mine(batch())).detach(), rtol=0, atol=1e-12)
    model.train()
    trains(model)


@row("3 callers", "import")
def is_imported_under_the_switch() -> None:
    """Under the import switch Megatron's module and package have this class, where Megatron is not installed."""
    switch.on()
    try:
        package = importlib.import_module("megatron.core.distributed")
        module = importlib.import_module("megatron.core.distributed.torch_fully_sharded_data_parallel")
        assert package.TorchFullyShardedDataParallel is TorchFullyShardedDataParallel
        assert module.TorchFullyShardedDataParallel is TorchFullyShardedDataParallel
    finally:
        switch.off()


@row("3 callers", "ranks", ranks=4)
def trains_on_more_ranks() -> None:
    """Four ranks train as one process too, with sizes that they do not divide."""
    trains(wrapped())


@pytest.mark.everyday(8)
@pytest.mark.parametrize("key", list(TABLE.rows))
def test_row(key: str) -> None:
    run(TABLE.rows[key].case, ranks=TABLE.rows[key].ranks)


def test_every_argument_and_member_has_a_row() -> None:
    arguments, members = TABLE.names("3 arguments"), TABLE.names("3 members").split()
    assert [name for name in ARGUMENTS if name not in arguments] == []
    assert [name for name in (*METHODS, *ATTRIBUTES) if name not in members] == []


def test_no_row_is_missing(record_property: Any) -> None:
    record_property("rows", f"Megatron: {TABLE.counts}")
    assert TABLE.counts_said_in("howto/from-megatron.md") == TABLE.counts
    assert not TABLE.missing
