"""Models that begin on the meta device: on any mesh the values of one process, and names of what nobody has filled."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import shardfn as sf
from shardfn.compat.fsdp1 import FullyShardedDataParallel
from shardfn.compat.fsdp2 import fully_shard
from shardfn.testing import run


class Model(nn.Module):
    """Sizes that four ranks cannot divide, a buffer, and a parameter that no `reset_parameters` knows of."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.norm = nn.Linear(6, 10), nn.Linear(10, 7), nn.LayerNorm(7)
        self.gain = nn.Parameter(torch.empty(7))
        self.register_buffer("shift", torch.empty(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.norm(self.outer(self.inner(x).relu())) + self.get_buffer("shift")[0]


def _fill(model: Any, buffer: float | None = 1.0) -> None:
    """What users write; every function of torch.nn.init draws from one of three operations."""
    for module in (model.inner, model.outer, model.norm):
        module.reset_parameters()
    nn.init.trunc_normal_(model.outer.weight, std=0.5)
    nn.init.xavier_uniform_(model.inner.weight)
    nn.init.normal_(model.gain)
    with torch.no_grad():
        model.outer.bias.bernoulli_(0.5)
    if buffer is not None:
        model.shift.fill_(buffer)


def _on_meta() -> Model:
    with torch.device("meta"):
        return Model()


def _of_one_process() -> dict[str, Tensor]:
    model = _on_meta().to_empty(device="cpu")
    torch.manual_seed(3)
    _fill(model)
    return {name: x.detach() for name, x in model.named_parameters()}


def _mesh(sizes: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "other")[: len(sizes)])


def _sharded(sizes: tuple[int, ...], tp: bool) -> tuple[nn.Module, DeviceMesh]:
    model, mesh = _on_meta(), _mesh(sizes)
    if tp:
        parallelize_module(model, mesh["other"], {"inner": ColwiseParallel()})
    data = mesh["dp"] if tp else mesh
    fully_shard(model.inner, mesh=data)
    return fully_shard(model, mesh=data), mesh


def _draws(sizes: tuple[int, ...], tp: bool) -> None:
    model, _ = _sharded(sizes, tp)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    _fill(model)
    expected = _of_one_process()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.full_tensor(), expected[name]), name
    if not tp:  # which leaves the output split
        model(torch.ones(4, 6)).sum().backward()
    everywhere = init_device_mesh("cpu", (dist.get_world_size(),))
    _draws_in_other_ways(everywhere)
    torch.manual_seed(4)
    alike = DTensor.from_local(torch.empty(3), everywhere, [Replicate()])
    alike.uniform_()
    torch.manual_seed(4)
    assert torch.equal(alike.to_local(), torch.empty(3).uniform_())
    with pytest.raises(RuntimeError, match="in-place operations"):  # torch's own way, and again
        DTensor.from_local(torch.empty(3), everywhere, [Partial()]).uniform_()
    with pytest.raises(RuntimeError, match="in-place operations"):
        DTensor.from_local(torch.empty(3), everywhere, [Partial()]).uniform_()


def _draws_in_other_ways(mesh: DeviceMesh) -> None:
    """As torch has them for one tensor, in place and like another one."""
    ways = (
        torch.randn_like,
        torch.rand_like,
        lambda x: torch.randint_like(x, 9),
        lambda x: torch.randint_like(x, 3, 9),
    )
    names = ("random_", "exponential_", "cauchy_", "log_normal_")
    ways += tuple(lambda x, name=name: getattr(x.clone(), name)() for name in names)
    ways += (lambda x: x.clone().geometric_(0.3), lambda x: x.clone().random_(5), lambda x: x.clone().random_(2, 9))
    whole = torch.arange(5.0)
    for way in ways:
        torch.manual_seed(5)
        expected = way(whole)
        torch.manual_seed(5)
        found = way(distribute_tensor(whole, mesh, [Shard(0)]))
        assert isinstance(found, DTensor)
        assert torch.equal(found.full_tensor(), expected)
        assert found.placements == (Shard(0),)


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("sizes", "tp"), [((2,), False), ((4,), False), ((2, 2), False), ((2, 2), True)])
def test_values_are_those_of_one_process_on_every_mesh(sizes: tuple[int, ...], tp: bool) -> None:
    run(_draws, sizes, tp, ranks=4 if len(sizes) == 2 else sizes[0])


def _left(kind: str) -> str:
    model, mesh = _sharded((2, 2) if kind == "seeds" else (2,), tp=False)
    model.to_empty(device="cpu")
    torch.manual_seed(3 + (dist.get_rank() if kind == "seeds" else 0))
    if kind != "all":
        _fill(model, None if kind == "buffer" else 1.0)
    x = torch.ones(4, 6)
    with pytest.raises(sf.ShardError) as refused:
        model(x)
    _fill(model)
    if kind == "seeds":
        return str(refused.value)
    _fill(model, float("nan"))  # which a buffer may hold, if somebody wants it to
    model(x).sum().backward()  # nothing is lost
    model.to_empty(device="cpu")
    with pytest.raises(sf.ShardError, match="nobody has filled"):  # again, of one that has run
        model(x)
    _fill(model)
    model(x)
    inner = model.get_submodule("inner")
    inner.to_empty(device="cpu")
    with pytest.raises(sf.ShardError, match=r"nobody has filled, the first is 'inner\.weight'"):  # of a part of it
        model(x)
    assert mesh.size() == 2
    return str(refused.value)


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("all", "8 tensors have memory of to_empty() that nobody has filled, the first is 'gain'"),
        ("buffer", "1 tensors have memory of to_empty() that nobody has filled, the first is 'shift'"),
        ("seeds", "torch.manual_seed(0) on every rank"),
    ],
)
def test_what_nobody_filled_is_named_on_every_rank(kind: str, what: str) -> None:
    ranks = 4 if kind == "seeds" else 2
    told = run(_left, kind, ranks=ranks)
    assert all(what in one for one in told), told


class Forgets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(6, 4)), nn.Parameter(torch.empty(4))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def _wrapped(loads: bool) -> str:
    with torch.device("meta"):
        model = Forgets()
    empty = {"param_init_fn": lambda module: module.to_empty(device="cpu", recurse=False)} if loads else {}
    fsdp: Any = FullyShardedDataParallel(model, use_orig_params=True, **empty)
    if loads:
        fsdp.load_state_dict({"weight": torch.ones(6, 4), "bias": torch.zeros(4)})
        return str(fsdp(torch.ones(2, 6)).sum().item())
    with pytest.raises(sf.ShardError) as refused:
        fsdp(torch.ones(2, 6))
    return str(refused.value)


def test_a_reset_that_forgets_something_is_named() -> None:
    assert all("1 tensors" in told and "'bias'" in told for told in run(_wrapped, False, ranks=2))
    assert run(_wrapped, True, ranks=2) == ["48.0", "48.0"]


def _placed_before() -> None:
    """Split by `parallelize_module` on the meta device, then wrapped."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 8))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    torch.manual_seed(3)
    strategy = ShardingStrategy.FULL_SHARD
    fsdp = FullyShardedDataParallel(model, device_mesh=mesh["dp"], sharding_strategy=strategy, use_orig_params=True)
    torch.manual_seed(3)
    expected = nn.Linear(6, 8)
    for found, one in zip(fsdp.parameters(), expected.parameters(), strict=True):
        assert isinstance(found, DTensor)
        assert torch.equal(found.full_tensor(), one)


def test_parts_of_one_that_is_split_already() -> None:
    run(_placed_before, ranks=4)
