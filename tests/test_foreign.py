"""Collectives of torch inside transforms are refused by name; ours are not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from shardfn.testing import on_meshes


@on_meshes({"fsdp": 2, "tp": 1})
def test_a_collective_of_torch_is_named(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    params, x = sf.shard(model, mesh, sf.Policy()), torch.ones(3, 4)
    group = mesh.get_group("fsdp")

    def loss(total: Callable[[Tensor], Any]) -> Callable[..., Tensor]:
        def of(p: sf.Params, x: Tensor) -> Tensor:
            value = sf.apply(model, p, x).square().mean()
            result = total(value)
            return value if result is None else result

        return of

    def transforms(fn: Callable[..., Tensor]) -> list[Callable[[], Any]]:
        return [
            lambda: sf.vmap(fn, in_dims=(None, 0))(params, x),
            lambda: sf.jvp(lambda p: fn(p, x), (params,), (params,)),
            lambda: sf.vjp(lambda p: fn(p, x), params),
            lambda: sf.hvp(fn, (params, x), params),
            lambda: sf.vmap(sf.grad(fn), in_dims=(None, 0))(params, x),
        ]

    raw, pure = "torch.distributed.all_reduce", "_functional_collectives.all_reduce"
    for total, name in ((dist.all_reduce, raw), (lambda v: functional.all_reduce(v, "sum", group), pure)):
        for transform in transforms(loss(total)):
            with pytest.raises(sf.ShardError, match=f"calls .*{name.rpartition('.')[0]}.*Use sf.collectives"):
                transform()
    for transform in transforms(loss(lambda v: sf.collectives.pmean(v, mesh, "fsdp"))):
        transform()
    with pytest.raises(sf.ShardError, match="all_reduce"):  # after the run of a function with the same code
        transforms(loss(dist.all_reduce))[1]()
    # Outside of transforms everything is allowed.
    value, _ = sf.value_and_grad(loss(lambda v: dist.all_reduce(v.detach())))(params, x)
    assert value.dim() == 0


def test_errors_of_the_function_itself_stay() -> None:
    def broken(x: Tensor) -> Tensor:
        return x @ x.new_zeros(7, 7)

    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        sf.vjp(broken, torch.ones(3, 4))
    assert not isinstance(caught.value, sf.ShardError)
