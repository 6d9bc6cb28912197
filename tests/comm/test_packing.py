"""`Policy(offload="cpu")`. Without a CUDA device the CPU stands in for one: the same copies, without streams."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from models import decoder, policy, tokens
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from shardfn.comm import buckets, packing
from shardfn.comm.raw_collectives import Steps
from shardfn.engine import runtime
from shardfn.testing import assert_parity, on_meshes


class CountingHost(packing.Host):
    """Counts what goes to the device and what comes back."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.sent = self.fetched = self.settled = 0

    @contextmanager
    def beside(self) -> Iterator[None]:
        self.sent += 1
        yield

    def fetch(self, flat: Tensor) -> Steps:
        self.fetched += 1
        return super().fetch(flat)

    def settle(self) -> None:
        self.settled += 1


@contextmanager
def a_device_of_its_own() -> Iterator[CountingHost]:
    """Offloaded trees treat the CPU as a device that has other memory than the host."""
    host = CountingHost()

    def host_of(policy: sf.Policy, device: torch.device) -> packing.Host | None:
        return host if policy.offload == "cpu" else None

    with pytest.MonkeyPatch.context() as patch:
        for module in (packing, buckets, runtime):
            patch.setattr(module, "host_of", host_of)
        yield host


def train(mesh: DeviceMesh, **fields: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    model = decoder(kv=2, c=12)
    params = sf.shard(model, mesh, policy(**fields))
    optimizer = sf.optim.chain(sf.optim.clip_by_global_norm(0.5), sf.optim.adamw(1e-2))
    state = optimizer.init(params)
    step = sf.value_and_grad(lambda p, x, y: sf.cross_entropy(sf.apply(model, p, x), y))
    losses = []
    for i in range(4):
        loss, grads = step(params, *sf.data.local_batch(tokens(i), mesh))
        params, state = optimizer.step(params, grads, state)
        losses.append(loss)
    return losses, sf.gather(params)


@pytest.mark.everyday(3)
@on_meshes({"fsdp": 1, "tp": 1}, {"fsdp": 3, "tp": 1}, {"fsdp": 2, "tp": 2}, {"replicate": 2, "fsdp": 2, "tp": 1})
@pytest.mark.parametrize("regather", [True, False])
def test_training_is_that_without_offload(mesh: DeviceMesh, regather: bool) -> None:
    losses, params = train(mesh, regather=regather)
    with a_device_of_its_own() as host:
        offloaded, found = train(mesh, regather=regather, offload="cpu")
    assert_parity(dict(enumerate(offloaded)), dict(enumerate(losses)), tol=1e-12)
    assert_parity(found, params, tol=1e-12)
    assert host.fetched >= 4 * 3  # two units and the root, four times
    assert host.sent > host.fetched
    assert host.settled >= 4


@on_meshes({"fsdp": 1, "tp": 1}, {"fsdp": 2, "tp": 1})
def test_lower_precision(mesh: DeviceMesh) -> None:
    """Shards are copied as they are and cast on the device; gradients are cast there too."""
    fields = {"compute_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    losses, params = train(mesh, **fields)
    with a_device_of_its_own():
        offloaded, found = train(mesh, offload="cpu", **fields)
    assert_parity(dict(enumerate(offloaded)), dict(enumerate(losses)), tol=1e-6)
    assert_parity(found, params, tol=1e-4)


@on_meshes({"fsdp": 2})
def test_the_other_functions(mesh: DeviceMesh) -> None:
    """Gather, reshard and pending gradients between host and device."""
    model = decoder()
    plain = sf.shard(model, mesh, sf.Policy())
    with a_device_of_its_own() as host:
        params = sf.shard(model, mesh, sf.Policy(offload="cpu"))
        assert_parity(sf.gather(params), sf.gather(plain))
        assert_parity(sf.gather(sf.reshard(params, sf.Policy(default="replicate"))), sf.gather(plain))
        assert_parity(sf.gather(sf.reshard(plain, params.plan)), sf.gather(plain))
        before = host.fetched
        x, y = sf.data.local_batch(tokens(), mesh)

        def loss(p: sf.Params) -> Tensor:
            return sf.cross_entropy(sf.apply(model, p, x), y)

        pending = sf.grad(loss, reduce=None)(params)
        assert host.fetched == before
        assert_parity(sf.gather(sf.reduce_grads(pending)), sf.gather(sf.grad(loss)(plain)), tol=1e-12)
        assert host.fetched > before


@on_meshes({"fsdp": 2})
def test_a_mesh_of_cpus_has_one_memory(mesh: DeviceMesh) -> None:
    params = sf.shard(decoder(), mesh, sf.Policy(offload="cpu"))
    assert packing.host_of(params.plan.policy, torch.device("cpu")) is None
