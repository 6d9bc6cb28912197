"""A model as plain data: names, ties, kinds of modules, lists of like modules."""

import pickle

import pytest
import torch
from drawing import untyped
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardfn as sf
from shardfn.layout.model_info import ParamInfo, class_name, describe, kind_of
from shardfn.testing import on_meshes


class Own(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input


class Same(nn.Linear):
    pass


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.mixed = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        self.quiet = nn.ModuleList([nn.ReLU(), nn.ReLU()])
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.emb.weight
        self.scale = nn.Parameter(torch.tensor(1.0), requires_grad=False)
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))


def test_parameters_with_their_ties() -> None:
    info = describe(Net())
    by_name = {param.name: param for param in info.params}
    assert by_name["emb.weight"] == ParamInfo("emb.weight", (5, 3), torch.float32, True, ("head.weight",))
    assert by_name["emb.weight"].names == ("emb.weight", "head.weight") and "head.weight" not in by_name
    assert by_name["scale"] == ParamInfo("scale", (), torch.float32, False)
    modules = {module.name: module for module in info.modules}
    assert modules["head"].params == (("weight", "emb.weight"),), "by its first name"
    assert modules[""].params == (("scale", "scale"),)
    assert modules["head"].classes[0] == class_name(nn.Linear) and class_name(nn.Module) in modules["head"].classes
    assert pickle.loads(pickle.dumps(info)) == info


def test_lists_of_like_modules() -> None:
    lists = {module.name: module.list_of for module in describe(Net()).modules}
    assert lists["layers"] == class_name(nn.Linear)
    assert lists["mixed"] is None, "members of several classes"
    assert lists["quiet"] is None, "members without parameters"


def test_kinds_of_modules() -> None:
    assert kind_of(nn.Linear(1, 1)) == kind_of(Same(1, 1)) == "linear" and kind_of(nn.Embedding(1, 1)) == "embedding"
    assert kind_of(Own(1, 1)) == kind_of(nn.LayerNorm(1)) == "other", "a forward of its own"
    assert kind_of(nn.MultiheadAttention(2, 1).out_proj) == "other", "its weight is read without a call"


def test_mappings() -> None:
    shared = torch.ones(2)
    info = describe({"a": shared, "b": torch.ones(3, dtype=torch.int8), "c": shared})
    assert [(param.names, param.dtype) for param in info.params] == [(("a", "c"), torch.float32), (("b",), torch.int8)]
    assert info.modules == ()
    assert [param.trainable for param in info.params] == [True, False], "a plain tensor is trainable when it can be"
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    assert not describe({"a": frozen}).params[0].trainable, "a parameter says so itself"
    with pytest.raises(TypeError, match=r"expected an nn\.Module or a mapping of names to tensors, got Tensor"):
        describe(untyped(shared))
    with pytest.raises(TypeError, match="a mapping must hold tensors under names; 'a' holds int"):
        describe(untyped({"a": 1}))
    with pytest.raises(TypeError, match="3 holds Tensor"):
        describe(untyped({3: shared}))


def test_lazy_parameters_have_no_shape() -> None:
    lazy = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    with pytest.raises(sf.ShardError, match=r"'1.weight' is a lazy parameter.*Run the model once"):
        sf.plan(lazy, sf.MeshSpec(fsdp=2), sf.Policy())
    lazy(torch.ones(1, 2))
    assert "1.weight" in sf.plan(lazy, sf.MeshSpec(fsdp=2), sf.Policy()).layouts


@on_meshes({"fsdp": 2})
def test_a_model_that_torch_has_sharded_names_the_other_class(mesh: DeviceMesh) -> None:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(sf.ShardError, match=r"that torch's own fully_shard has sharded.*shardfn\.compat\.fsdp2"):
        sf.shard(model, mesh, sf.Policy())
