"""What a CUDA device does is what the CPU does: with NCCL alone, and on meshes of several ranks on one GPU."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import decoder, policy, tokens
from one_gpu import cuda_mesh
from ranks import folder
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import shardfn as sf
from shardfn.comm.raw_collectives import backend_of
from shardfn.testing import assert_parity, on_meshes, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ALONE = {"fsdp": 1, "tp": 1}
MESHES = (ALONE, {"fsdp": 4, "tp": 1}, {"fsdp": 2, "tp": 2}, {"fsdp": 3, "tp": 1}, {"replicate": 2, "fsdp": 2, "tp": 1})


def on_cuda(mesh: DeviceMesh) -> DeviceMesh:
    """The same axes on the GPU: NCCL for a rank alone."""
    axes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    return cuda_mesh("cpu:gloo,cuda:nccl" if mesh.size() == 1 else "byhost", **axes)


def part(mesh: DeviceMesh, *whole: Tensor) -> list[Tensor]:
    """This rank's part of a batch, on its device."""
    return [sf.data.local_batch(x, mesh).to(mesh.device_type) for x in whole]


def train(mesh: DeviceMesh, dtype: torch.dtype = torch.float64, jit: Any = "", **fields: Any) -> dict[str, Tensor]:
    """Losses and weights of four steps with clipping, on the CPU.

    AdamW makes a step of rounding errors where the gradient is zero (biases of keys), which shows in float32.
    """
    model = decoder(kv=2, c=12, dtype=dtype)
    params = sf.shard(model, mesh, policy(**fields))
    rule = sf.optim.adamw(1e-2) if dtype == torch.float64 else sf.optim.sgd(0.1)
    optimizer = sf.optim.chain(sf.optim.clip_by_global_norm(0.5), rule)
    state = optimizer.init(params)

    def step(p: sf.Params, state: Any, x: Tensor, y: Tensor) -> Any:
        loss, grads = sf.value_and_grad(lambda p: sf.cross_entropy(sf.apply(model, p, x), y))(p)
        return loss, *optimizer.step(p, grads, state)

    step = sf.jit(step, backend=jit) if jit else step
    losses = []
    for i in range(4):
        loss, params, state = step(params, state, *part(mesh, *tokens(i)))
        losses.append(loss)
    found = {f"loss {i}": loss for i, loss in enumerate(losses)} | sf.gather(params)
    return {name: value.detach().cpu().double() for name, value in found.items()}


def _start_alone() -> None:
    dist.destroy_process_group()
    mesh = sf.make_mesh(fsdp=-1, tp=1)
    assert mesh.device_type == "cuda"
    group = mesh.get_group("fsdp")
    assert (backend_of(group, torch.device("cuda")), backend_of(group, torch.device("cpu"))) == ("nccl", "gloo")
    params = sf.shard(nn.Linear(4, 2), mesh, sf.Policy())
    assert all(leaf.device == torch.device("cuda", 0) for leaf in params.values())
    dist.destroy_process_group()


def test_make_mesh_starts_nccl_and_gloo() -> None:
    run(_start_alone, ranks=1)


@on_meshes(*MESHES)
@pytest.mark.parametrize("regather", [True, False])
@pytest.mark.parametrize("offload", [None, "cpu"])
def test_training(mesh: DeviceMesh, regather: bool, offload: Any) -> None:
    found = train(on_cuda(mesh), regather=regather, offload=offload)
    assert_parity(found, train(mesh, regather=regather), tol=1e-9)


@on_meshes({"fsdp": 2, "tp": 1}, {"fsdp": 2, "tp": 2})
def test_gloo_moves_what_is_large(mesh: DeviceMesh) -> None:
    """It cannot send from the memory of a GPU, as it does from that of the host."""
    x, rules = torch.randn(8, 768), {"0.weight": "ff@tp c@fsdp", "2.weight": "c@fsdp ff@tp"}

    def gradients(mesh: DeviceMesh) -> dict[str, Tensor]:
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(768, 768), nn.Tanh(), nn.Linear(768, 768))
        params = sf.shard(model, mesh, sf.Policy(rules=rules))
        return sf.gather(sf.grad(lambda p: sf.apply(model, p, *part(mesh, x)).square().sum())(params), to="cpu")

    found = gradients(cuda_mesh("gloo", **dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))))
    assert_parity(found, gradients(mesh), tol=1e-4)


@on_meshes({"fsdp": 4, "tp": 1})
def test_a_second_gather_over_fewer_ranks(mesh: DeviceMesh) -> None:
    assert_parity(train(on_cuda(mesh), regather=2), train(mesh, regather=2), tol=1e-9)


@on_meshes(ALONE, {"fsdp": 2, "tp": 2})
@pytest.mark.parametrize("offload", [None, "cpu"])
def test_mixed_precision(mesh: DeviceMesh, offload: Any) -> None:
    bf16 = torch.bfloat16
    found = train(on_cuda(mesh), torch.float32, offload=offload, compute_dtype=bf16, reduce_dtype=torch.float32)
    assert_parity(found, train(mesh, torch.float32), tol=3e-2)


@pytest.mark.filterwarnings("ignore::UserWarning")  # what inductor recommends
@on_meshes(ALONE, {"fsdp": 2, "tp": 2})
@pytest.mark.parametrize("how", ["units", "aot_eager", "inductor"])
def test_compiled(mesh: DeviceMesh, how: str) -> None:
    fields: dict[str, Any] = {"compile": True} if how == "units" else {"jit": how}
    assert_parity(train(on_cuda(mesh), torch.float32, **fields), train(mesh, torch.float32), tol=1e-3)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Hidden() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 12), nn.Linear(12, 8), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(self.drop(torch.tanh(self.up(x)))))


def dropping(mesh: DeviceMesh, regather: bool) -> tuple[Any, sf.Params, Tensor, sf.Params]:
    torch.manual_seed(3)
    model = Dropping().double()
    rules = {"layers.*.up.weight": "ff@tp c@fsdp", "layers.*.down.weight": "c@fsdp ff@tp"}
    params = sf.shard(model, mesh, sf.Policy(rules=rules, regather=regather))
    x = torch.randn(8, 3, 8, dtype=torch.float64)
    return model, params, part(mesh, x)[0], sf.tree.map(torch.ones_like, params)


def derivatives(mesh: DeviceMesh, regather: bool) -> dict[str, Tensor]:
    """Gradients, those of each sample, and a Hessian times a vector, with dropout, on the CPU."""
    model, params, x, direction = dropping(mesh, regather)

    def loss(p: sf.Params, x: Tensor) -> Tensor:
        return sf.apply(model, p, x).square().mean()

    with sf.data.dropout_seed(5):
        found = {"grad": sf.grad(loss)(params, x)}
    with sf.data.dropout_seed(5):
        each = sf.vmap(sf.grad(loss, reduce=None), in_dims=(None, 0))(params, x[:, None])
        norms = sum(g.to_local().square().sum().cpu() for g in each.values())
    with sf.data.dropout_seed(5):
        found["hvp"] = sf.hvp(lambda p: loss(p, x), (params,), direction)
    flat = {f"{kind}.{name}": leaf.cpu() for kind, tree in found.items() for name, leaf in sf.gather(tree).items()}
    return flat | {"norms": torch.as_tensor(norms)}


@on_meshes(ALONE, {"fsdp": 2, "tp": 2})
@pytest.mark.parametrize("regather", [True, False])
def test_transforms_and_dropout(mesh: DeviceMesh, regather: bool) -> None:
    assert_parity(derivatives(on_cuda(mesh), regather), derivatives(mesh, regather), tol=1e-9)


@on_meshes(ALONE)
def test_numbers_that_a_unit_draws_are_drawn_again(mesh: DeviceMesh) -> None:
    """Torch's own dropout, on the generator of the device, in a unit that is computed again."""
    model, params, x, _ = dropping(on_cuda(mesh), True)

    def loss(p: sf.Params) -> tuple[Tensor, Tensor]:
        out = sf.apply(model, p, x)
        return out.square().sum(), out

    def both(p: sf.Params) -> Any:
        torch.manual_seed(1)
        return sf.value_and_grad(loss, has_aux=True)(p)

    (_, out), grads = both(params)
    whole = {name: leaf.detach().requires_grad_() for name, leaf in sf.gather(params).items()}
    torch.manual_seed(1)
    plain = torch.func.functional_call(model, whole, x)
    assert_parity(out, plain, tol=1e-12)
    expected = torch.autograd.grad(plain.square().sum(), list(whole.values()))
    assert_parity(sf.gather(grads), dict(zip(whole, expected, strict=True)), tol=1e-12)


@on_meshes(ALONE, {"fsdp": 2, "tp": 2})
@pytest.mark.parametrize("offload", [None, "cpu"])
def test_checkpoints(mesh: DeviceMesh, offload: Any) -> None:
    """Between a GPU, the host of one, and CPUs; what is loaded lies where the shards do."""
    here = sf.shard(decoder(kv=2), on_cuda(mesh), policy(offload=offload))
    there = sf.tree.map(torch.zeros_like, sf.shard(decoder(kv=2), mesh, policy()))
    with folder() as at:
        path = sf.checkpoint.save(at / "step-1", {"params": here})
        assert_parity(sf.gather(sf.checkpoint.load(path, {"params": there})["params"]), sf.gather(here, to="cpu"))
        loaded = sf.checkpoint.load(path, {"params": here})["params"]
    assert_parity(sf.gather(loaded), sf.gather(here))
    for leaf in loaded.values():
        assert leaf.to_local().is_cuda is (offload is None)
        assert offload is None or leaf.to_local().is_pinned()


@on_meshes(ALONE)
def test_weights_are_freed_and_taken_again(mesh: DeviceMesh) -> None:
    """At the peak of a step, less than half of the weights are whole besides the shards and their gradients."""
    width, layers = 512, 24
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    params = sf.shard(model, on_cuda(mesh), sf.Policy())
    x = torch.randn(4, width, device="cuda")
    step = sf.value_and_grad(lambda p: sf.apply(model, p, x).square().mean())
    step(params)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(params)
    weights = layers * width**2 * 4
    assert torch.cuda.max_memory_allocated() - before < 1.5 * weights


@on_meshes(ALONE, {"fsdp": 2, "tp": 1})
@pytest.mark.parametrize("offload", [None, "cpu"])
def test_trainer(mesh: DeviceMesh, offload: Any) -> None:
    def trained(mesh: DeviceMesh, **fields: Any) -> dict[str, Tensor]:
        model = decoder(kv=2)

        def loss_fn(p: sf.Params, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(sf.apply(model, p, x).flatten(0, 1), y.flatten())

        settings = {"accumulate": 2, "clip": 0.5, "ema": 0.9}
        trainer = sf.Trainer(model, mesh, policy(**fields), optimizer=sf.optim.adamw(1e-2), loss_fn=loss_fn, **settings)
        losses = [trainer.step(*part(mesh, *tokens(i)))["loss"] for i in range(3)]
        assert trainer.ema is not None
        values = dict(enumerate(losses)) | sf.gather(trainer.params) | {"ema": sf.gather(trainer.ema)["emb.weight"]}
        return {str(name): torch.as_tensor(value).detach().cpu() for name, value in values.items()}

    assert_parity(trained(on_cuda(mesh), offload=offload), trained(mesh), tol=1e-9)
