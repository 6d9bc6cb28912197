"""Meta tensors filled one module at a time: the values on every mesh, what is whole meanwhile, and what is refused."""

import gc
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drawing import FLOATS, INTS, Case, Turn, assert_all_raise, assert_same_bits, hold_in_turn, moves
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardfn as sf
from shardfn.testing import run, run_raises


class Rotary(nn.Module):
    """Only a buffer, under two paths of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def reset_parameters(self) -> None:
        self.table = torch.arange(4.0, device=self.table.device)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(16, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=i % 2 == 0) for i in range(4))
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.rotary = Rotary()
        self.again = self.rotary
        self.head = nn.Linear(4, 16, bias=False)
        self.head.weight = self.emb.weight
        self.last = nn.Linear(4, 4)  # after a module that holds a tied weight only


def reset(module: Any) -> None:
    module.reset_parameters()


def on_meta() -> Net:
    with torch.device("meta"):
        return Net()


def values_on_a_rank(seed: int, **axes: int) -> dict[str, Tensor]:
    model = on_meta()
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    rules = {"layers.*.weight": "o@tp c@fsdp", "emb.weight": "vocab@tp c"} if "tp" in axes else {}
    torch.manual_seed(seed + dist.get_rank())  # only that of the first rank counts
    before = torch.get_rng_state()
    params = sf.shard(model, mesh, sf.Policy(rules=rules), init=reset)
    assert torch.equal(torch.get_rng_state(), before), "the caller's generator is where it was"
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())), "the model is not touched"
    assert params.buffers["rotary.table"].tolist() == params.buffers["again.table"].tolist() == [0, 1, 2, 3]
    assert params.buffers["norm.running_var"].tolist() == [1] * 4
    return sf.gather(params)


def test_values_do_not_depend_on_the_mesh() -> None:
    want = run(values_on_a_rank, 5, fsdp=1, tp=1, ranks=1)[0]
    assert set(want) == set(dict(on_meta().named_parameters(remove_duplicate=False)))
    for axes in ({"fsdp": 2}, {"fsdp": 2, "tp": 2}, {"fsdp": 1, "tp": 4}):
        for got in run(values_on_a_rank, 5, ranks=4 if "tp" in axes else 2, **axes):
            for name, tensor in want.items():
                assert_same_bits(got[name], tensor, f"{name} on {axes}")
    assert not torch.equal(want["layers.0.weight"], want["layers.1.weight"]), "every module has a seed of its own"
    other = run(values_on_a_rank, 6, fsdp=1, tp=1, ranks=1)[0]
    assert not torch.equal(other["layers.0.weight"], want["layers.0.weight"]), "which comes from torch's"


class Parts(nn.Module):
    """The tensors of a case, in two modules of which the second has the first one's first weight, too."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.parts = nn.ModuleList(Part() for _ in range(2))
        for i, (shape, dtype) in enumerate(zip(case.shapes, case.dtypes, strict=True)):
            value = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            self.parts[i % 2].register_parameter(f"t{i}", nn.Parameter(value, requires_grad=dtype in FLOATS))
        if case.tied:
            self.parts[1].register_parameter("again", self.parts[0].get_parameter("t0"))

    def policy(self) -> sf.Policy:
        policy = self.case.layouts[0].policy()
        return replace(policy, rules={f"parts.{int(name[1:]) % 2}.{name}": x for name, x in policy.rules.items()})


class Part(nn.Module):
    def reset_parameters(self) -> None:
        for parameter in self.parameters(recurse=False):
            with torch.no_grad():
                parameter.copy_(torch.rand(parameter.shape) * 100)


def initial_values(turn: Turn) -> dict[str, Tensor]:
    model, mesh = Parts(turn.case), turn.case.layouts[0].mesh()
    torch.manual_seed(turn.case.seed + dist.get_rank())
    return sf.gather(sf.shard(model, mesh, model.policy(), init=reset))


def values_are_kept(folder: str, turn: Turn) -> None:
    full = initial_values(turn)
    if dist.get_rank() == 0:
        torch.save(full, f"{folder}/{turn.number}")


def values_are_the_same_on_another_mesh(folder: str, turn: Turn) -> None:
    want, full = torch.load(f"{folder}/{turn.number}"), initial_values(turn)
    assert full.keys() == want.keys()
    for name, value in full.items():
        assert_same_bits(value, want[name], name)


@pytest.mark.law("P8")
def test_drawn_models_begin_alike_on_every_mesh(tmp_path: Path) -> None:
    each = (values_are_kept, values_are_the_same_on_another_mesh)
    hold_in_turn([partial(law, str(tmp_path)) for law in each], moves(dtypes=(*FLOATS, *INTS)))


def whole_tensors() -> list[Tensor]:
    """Those alive of the shapes of the net's weights."""
    gc.collect()
    alive = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter) and not x.is_meta]
    return [x for x in alive if tuple(x.shape) in ((4, 4), (16, 4))]


def live_on_a_rank() -> None:
    model = on_meta()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    earlier = {id(x): x for x in whole_tensors()}  # what the last test of this rank may have left
    calls = 0

    def fill(module: Any) -> None:
        nonlocal calls
        calls += 1
        mine = {id(p) for p in module.parameters(recurse=False)}
        others = [x for x in whole_tensors() if id(x) not in mine | earlier.keys()]
        assert not others, f"{len(others)} tensors of other modules are still whole"
        module.reset_parameters()

    sf.shard(model, mesh, sf.Policy(), init=fill)
    assert calls == 9


@pytest.mark.slow
def test_one_module_at_a_time_is_whole() -> None:
    run(live_on_a_rank, ranks=2)


def bad_init(what: str) -> None:
    model = on_meta()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))

    def init(module: Any) -> None:
        if what == "unfilled" and module.__class__ is nn.Linear:
            nn.init.ones_(module.weight)
            return
        module.reset_parameters()
        if module.__class__ is nn.Embedding and what == "shape":
            module.weight = nn.Parameter(torch.zeros(2, 2))
        if module.__class__ is nn.Embedding and what == "dtype":
            module.weight = nn.Parameter(module.weight.double())
        if module.__class__ is nn.Embedding and what == "raises":
            raise RuntimeError("no values")

    sf.shard(model, mesh, sf.Policy(), init=init)


def test_what_init_may_not_do() -> None:
    table = [
        (("unfilled",), sf.ShardError, r"init left 'layers.0.bias' unfilled"),
        (
            ("shape",),
            sf.ShardError,
            r"init replaced 'emb.weight', \(16, 4\) torch.float32, by a tensor \(2, 2\) torch.float32",
        ),
        (("dtype",), sf.ShardError, r"init replaced 'emb.weight', .* by a tensor \(16, 4\) torch.float64"),
        (("raises",), RuntimeError, r"no values"),
    ]
    assert_all_raise(bad_init, table, ranks=2)


def complex_left_unfilled() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2, dtype=torch.complex64)
    sf.shard(model, sf.make_mesh("cpu", fsdp=1), sf.Policy(), init=lambda module: nn.init.ones_(module.weight))


def test_complex_tensors_that_init_leaves_are_named() -> None:
    run_raises(sf.ShardError, complex_left_unfilled, match="init left 'bias' unfilled", ranks=1)


def half_meta_on_a_rank() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1] = nn.Linear(2, 2)
    model[1].bias = nn.Parameter(torch.full((2,), float("nan")))  # a NaN of the user's own
    calls: list[Any] = []

    def init(module: Any) -> None:
        calls.append(module)
        module.reset_parameters()

    params = sf.shard(model, sf.make_mesh("cpu", fsdp=1), sf.Policy(), init=init)
    full = sf.gather(params)
    assert len(calls) == 1 and calls[0] is not model[0], "only what is on meta, on a copy"
    assert_same_bits(full["1.weight"], model.get_parameter("1.weight"))
    assert full["1.bias"].isnan().all() and not full["0.weight"].isnan().any()


def test_only_meta_tensors_are_filled() -> None:
    run(half_meta_on_a_rank, ranks=1)


def test_frozen_and_integer_parameters() -> None:
    run(frozen_on_a_rank, ranks=1)


def frozen_on_a_rank() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.index = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)

        def reset_parameters(self) -> None:
            self.index.copy_(torch.arange(3))

    with torch.device("meta"):
        model = Table()
    assert sf.gather(sf.shard(model, sf.make_mesh("cpu", fsdp=1), sf.Policy(), init=reset))["index"].tolist() == [
        0,
        1,
        2,
    ]
