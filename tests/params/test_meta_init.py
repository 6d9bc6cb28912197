"""What `init` does with a module: what it fills is kept, and anything else is refused on every rank."""

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drawing import assert_all_raise
from torch import Tensor, nn

import shardfn as sf
from shardfn.testing import on_meshes, run

LOST = {  # what `reset_parameters` does beside filling its own tensors -> what is said of it
    "in place": "filled 'net.lin.weight', which is another module's",
    "its data": "filled 'net.lin.weight', which is another module's",
    "a new parameter": "filled 'net.lin.weight', which is another module's",
    "a new module": "filled 'net.lin', which is another module's",
    "a bias": "gave it 'bias', which it does not have",
    "a buffer": "gave it 'more', which it does not have",
    "frozen": "changed requires_grad of 'other'",
    "tied": "tied 'scale' and 'other'",
    "attribute": "set its attribute 'factor'",
    "an item": "set its attribute 'sizes'",
}


class Fills(nn.Module):
    """Whose own values are fine, and whose `reset_parameters` does more."""

    bias: Any
    more: Any

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how, self.factor, self.sizes = how, 1.0, [3, (1, 2)]
        self.lin = nn.Linear(6, 4)
        self.scale, self.other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        self.register_parameter("bias", None)
        self.register_buffer("more", None)
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("order", torch.arange(3))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        nn.init.zeros_(self.other)
        self.mask = torch.tensor([True, False, True])
        if self.how != "no order":
            self.get_buffer("order").zero_()
        # Which says what was said before, or is private.
        self.factor, self.sizes, self._done = 1.0, [3, (1, 2 + (self.how == "an item"))], True
        match self.how:
            case "in place":
                nn.init.zeros_(self.lin.weight)
            case "its data":
                self.lin.weight.data.zero_()
            case "a new parameter":
                self.lin.weight = nn.Parameter(torch.zeros(4, 6))
            case "a new module":
                self.lin = nn.Linear(6, 4)
            case "a bias":
                self.bias = nn.Parameter(torch.zeros(3))
            case "a buffer":
                self.more = torch.zeros(3)
            case "frozen":
                self.other.requires_grad_(False)
            case "tied":
                self.other = self.scale
            case "attribute":
                self.factor = 3.0
            case "on one rank" if dist.get_rank() == 1:
                raise FileNotFoundError("no values")
            case "of Python":
                nn.init.constant_(self.other, random.Random(dist.get_rank()).random())
            case _:
                pass


def on_meta(how: str) -> nn.ModuleDict:
    with torch.device("meta"):
        return nn.ModuleDict({"net": Fills(how)})


def filled(how: str) -> dict[str, Tensor]:
    model = on_meta(how)
    child = model["net"].get_submodule("lin")
    try:
        return sf.gather(sf.shard(model, sf.make_mesh("cpu", fsdp=2), sf.Policy(), init=lambda m: m.reset_parameters()))
    finally:
        assert model["net"].get_submodule("lin") is child and child.get_parameter("weight").is_meta


def test_what_would_be_lost_is_refused() -> None:
    table: list[Any] = [
        ((how,), sf.ShardError, rf"init of net, a Fills, {why}.*\n.*src=0") for how, why in LOST.items()
    ]
    table += [
        (("no order",), sf.ShardError, "init left 'net.order' unfilled"),
        (("of Python",), sf.ShardError, "ranks differ: .*'net.other'.* draw from torch's generator"),
    ]
    assert_all_raise(filled, table, ranks=2)


def test_an_error_of_one_rank_is_one_of_all() -> None:
    said = run(one_fails, ranks=2)
    assert "FileNotFoundError" in said[0] and "rank 1" in said[0] and "no values" in said[0]
    assert said[1].startswith("FileNotFoundError: no values")


def one_fails() -> str:
    with pytest.raises((sf.ShardError, FileNotFoundError)) as error:
        filled("on one rank")
    return f"{error.type.__name__}: {error.value}"


@on_meshes()
def test_what_it_fills_is_kept(mesh: Any) -> None:
    model, seen = on_meta(""), list[Any]()
    vars(model["net"].get_parameter("scale"))["first"] = True

    def init(module: Any) -> None:
        seen.extend(name for name, p in module.named_parameters() if getattr(p, "first", False))
        module.reset_parameters()

    params = sf.shard(model, mesh, sf.Policy(), init=init)
    assert seen == ["scale"]
    assert params.buffers["net.mask"].tolist() == [True, False, True]
    assert params.buffers["net.order"].tolist() == [0, 0, 0], "zeros that were written"
    assert sf.gather(params)["net.scale"].tolist() == [1, 1, 1]


class Only(nn.Module):
    """Which has no tensors, and fills those of others."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)

    def init_weights(self) -> None:
        nn.init.ones_(self.lin.weight)


@on_meshes({"fsdp": 1})
def test_modules_that_are_not_asked_are_told(mesh: Any) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Only())
    with pytest.warns(UserWarning, match=r"init is not called with 0, a Only.*init_weights\(\).*src=0"):
        sf.shard(model, mesh, sf.Policy(), init=lambda m: m.reset_parameters())


class OfItsOwn(nn.Module):
    """Which initialises its modules by a method that is given each of them, as models of transformers do."""

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
        self.scaled = scaled

    def init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        if self.scaled and isinstance(module, nn.Sequential):
            nn.init.normal_(module[1].get_parameter("weight"), std=0.01)


@on_meshes({"fsdp": 2})
def test_a_method_of_the_model_is_asked_about_all_modules(mesh: Any) -> None:
    with torch.device("meta"):
        model, scaled = OfItsOwn(False), OfItsOwn(True)
    std = sf.gather(sf.shard(model, mesh, sf.Policy(), init=model.init_weights))["blocks.0.1.weight"].std()
    assert 0.01 < std < 0.03
    with pytest.raises(sf.ShardError, match=r"init of blocks.0, a Sequential, filled 'blocks.0.1.weight'"):
        sf.shard(scaled, mesh, sf.Policy(), init=scaled.init_weights)
