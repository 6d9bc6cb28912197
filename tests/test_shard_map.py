"""Hand-written regions on DTensors: equal to one device, gradients included; specs that are wrong."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardfn as sf
from shardfn.core.shard_map import shard_map
from shardfn.testing import assert_parity, on_meshes

MESHES = tuple({"fsdp": f, "tp": t} for f, t in ((4, 1), (2, 2), (1, 4)))


def _tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (8, 6), (12, 6), (6, 12), (6,)
    x, up, down, scale = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return x, up, down, scale


@on_meshes(*MESHES)
def test_a_region_equals_one_device(mesh: DeviceMesh) -> None:
    @shard_map("b@fsdp c, ff@tp c, c ff@tp, c -> b@fsdp c, c", mesh)
    def mlp(x: Tensor, up: Tensor, down: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        # `scale` and x are shared by the ranks of tp and meet what is split over it; `scale` also stays whole.
        h = torch.tanh((x * scale) @ up.T)
        out = sf.collectives.psum(h @ down.T, mesh, "tp")
        return out + scale, sf.collectives.psum(out.sum(0), mesh, "fsdp")

    def whole(x: Tensor, up: Tensor, down: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.tanh((x * scale) @ up.T) @ down.T
        return out + scale, out.sum(0)

    tensors = [x.requires_grad_() for x in _tensors()]
    wanted, sums = whole(*tensors)
    expected = torch.autograd.grad(wanted.square().sum() + sums.sin().sum(), tensors)

    placed = ([Shard(0), Replicate()], [Replicate(), Shard(0)], [Replicate(), Shard(1)], [Replicate(), Replicate()])
    pairs = zip(tensors, placed, strict=True)
    given = [distribute_tensor(x.detach(), mesh, p).requires_grad_() for x, p in pairs]
    out, total = mlp(*given)
    assert isinstance(out, DTensor)
    assert out.placements == (Shard(0), Replicate())
    squares = out.square().sum()
    assert isinstance(squares, DTensor)
    loss = squares.redistribute(mesh, [Replicate()] * 2) + total.sin().sum()
    grads = torch.autograd.grad(loss.to_local(), given)
    assert_parity(
        {"out": out.full_tensor().detach(), "total": total.full_tensor().detach()},
        {"out": wanted.detach(), "total": sums.detach()},
    )
    assert_parity(
        {str(i): g.full_tensor() for i, g in enumerate(grads) if isinstance(g, DTensor)},
        {str(i): g for i, g in enumerate(expected)},
    )
    assert [g.placements for g in grads if isinstance(g, DTensor)] == [tuple(p) for p in placed]


@on_meshes({"fsdp": 2, "tp": 2})
def test_leaves_of_a_tree_and_parts_of_a_batch(mesh: DeviceMesh) -> None:
    model = torch.nn.Linear(6, 12, bias=False, dtype=torch.float64)
    torch.nn.init.constant_(model.weight, 0.5)
    params = sf.shard(model, mesh, sf.Policy(rules={"weight": "ff@tp c"}))
    columns = shard_map("b@fsdp c, ff@tp c -> b@fsdp ff@tp", mesh)(lambda x, w: x @ w.T)
    x = _tensors()[0]
    out = columns(sf.data.local_batch((x,), mesh)[0], params["weight"])
    assert sf.typeof(out) == "f64[8@fsdp 12@tp]"
    assert_parity({"out": out.full_tensor()}, {"out": x @ model.weight.detach().T})


@on_meshes({"fsdp": 2, "tp": 2})
def test_what_is_wrong_says_so(mesh: DeviceMesh) -> None:
    x, up, *_ = _tensors()

    def fails(spec: str, match: str, fn: Any = lambda x, w: x @ w.T, args: Any = None) -> None:
        with pytest.raises(sf.ShardError, match=match):
            shard_map(spec, mesh)(fn)(*(args or (x[:4], up[:6])))

    fails("b@fsdp c, ff@tp c", "needs one '->'")
    fails("b@fdsp c, ff@tp c -> b ff", "no 'fdsp'; did you mean 'fsdp'")
    fails("b@fsdp c, ff@tp c -> b@fsdp ff +tp", "psum it inside")
    fails("b@fsdp@tp c, ff@tp@fsdp c -> b ff", "order of the mesh")
    fails("b@fsdp c@fsdp, ff c -> b ff", "fsdp")
    fails("(b@fsdp a) c, ff c -> b ff", "one name for each dim")
    fails("b@fsdp c, ff@tp c -> b@fsdp ff@tp", "2 inputs in the spec, 1 given", args=(x,))
    fails("b@fsdp c d, ff@tp c -> b@fsdp ff@tp", r"input 0 is 'b@fsdp c d', got shape \(4, 6\)")
    fails("b@fsdp c, c@tp ff -> b@fsdp c", "c=12, and 6 before")
    fails("b@fsdp c, ff@tp c -> b@fsdp ff", "differs over 'tp'; psum or gather it")
    fails("b@fsdp c, ff@tp c -> b@fsdp ff@tp, b", "2 outputs in the spec, the function returns 1")
    fails("b@fsdp c, ff@tp c -> b", r"the function returns a tensor of shape \(4, 6\)")
    whole = distribute_tensor(up, mesh, [Replicate(), Replicate()])
    fails("b@fsdp c, ff@tp c -> b@fsdp ff@tp", "got a DTensor that is '_ _'", args=(x[:4], whole))
    with pytest.raises(TypeError, match="expected a DeviceMesh"):
        shard_map("a -> a", cast(Any, sf.MeshSpec(tp=2)))
