"""All ranks in one process: equal to real ones, and to one device, with every transform."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import derivatives
import pytest
import torch
import torch.distributed as dist
from models import decoder, policy, tokens
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import shardfn as sf
from shardfn._torch import part_of_rank, pytree
from shardfn.inspect.check import simulate
from shardfn.testing import assert_parity, assert_trees_close, on_meshes

sys.path.append(str(Path(__file__).parents[2] / "examples"))


def _at(tree: Any, rank: int) -> Any:
    return pytree.tree_map(lambda x: part_of_rank(x, rank), tree)


def _trained(mesh: DeviceMesh) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Three steps of the main example's model: losses, and what becomes of the weights."""
    lm, rules = importlib.import_module("lm.model"), importlib.import_module("train_lm").RULES
    torch.manual_seed(3)
    model = lm.Decoder(lm.ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, ff=48))
    params = sf.shard(model, mesh, sf.Policy(rules=rules, sizes={"d": model.head_dim}))
    optimizer = sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.adamw(sf.optim.warmup_cosine(1e-2, 2, 4)))
    state = optimizer.init(params)
    step = sf.value_and_grad(lambda p, x, y: sf.cross_entropy(sf.apply(model, p, x), y))
    losses = []
    for i in range(3):
        loss, grads = step(params, *sf.data.local_batch(tokens(i, batch=4, length=8), mesh))
        params, state = optimizer.step(params, grads, state)
        losses.append(loss)
    return losses, sf.gather(params)


@on_meshes({"fsdp": 2, "tp": 2})
def test_simulated_ranks_equal_real_ones(mesh: DeviceMesh) -> None:
    wanted = _trained(mesh)
    if dist.get_rank() == 0:
        with simulate(fsdp=2, tp=2) as simulated:
            found = _trained(simulated)
        for rank in range(4):
            assert_trees_close(_at(found, rank), wanted, rtol=0, atol=1e-6)
    # The process group of before is there again, with its names.
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 4
    assert torch.equal(sf.collectives.psum(torch.ones(1), mesh, "tp"), torch.tensor([2.0]))
    other = sf.make_mesh("cpu", tp=2, fsdp=2)
    assert torch.equal(sf.collectives.psum(torch.ones(1), other, "tp"), torch.tensor([2.0]))


class _Program(derivatives.Program):
    """Compares what two ranks have."""

    def same(self, found: Any, wanted: Any) -> None:
        if isinstance(found, sf.Params):
            full = sf.gather(found)
            found = {name: full[name] for name in wanted}
        for rank in (0, self.mesh.size() - 1):
            assert_parity(_at(found, rank), _at(wanted, rank), tol=1e-10)


SLOW = (
    "_anchored",
    "_inner_step",
    "_clipping_inside",
    "_gradient_penalty",
    "_gradient_of_a_vmap",
    "_directions",
    "_two_inner_steps",
)


# Forward mode of the backward of nll_loss, a script of torch that knows nothing of simulated ranks there.
NOT_BEFORE_2_13 = ("_hvp",) if torch.__version__ < "2.13" else ()


@pytest.mark.everyday(1)
@pytest.mark.parametrize("case", [c for c in derivatives.CASES if c.__name__ not in SLOW + NOT_BEFORE_2_13])
def test_transforms_equal_one_process(case: Any) -> None:
    with simulate(fsdp=2, tp=2) as mesh, sdpa_kernel(SDPBackend.MATH):
        case(_Program(mesh, layers=1))


def test_uneven_shards_and_batches_of_each_rank() -> None:
    model = nn.Linear(3, 5, dtype=torch.float64)
    x = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).square().mean())(
        {n: p.detach() for n, p in model.named_parameters()}
    )
    with simulate(fsdp=3) as mesh:
        params = sf.shard(model, mesh, sf.Policy(rules={"weight": "o@fsdp c", "bias": "o@fsdp"}))
        assert [part_of_rank(params["weight"].to_local(), rank).shape[0] for rank in range(3)] == [2, 2, 1]
        grads = sf.grad(lambda p, x: sf.apply(model, p, x).square().mean())(params, sf.data.local_batch(x, mesh))
        full = sf.gather(grads)
        assert_parity({name: part_of_rank(full[name], 2) for name in wanted}, wanted)


def test_ranks_that_differ_are_found() -> None:
    with simulate(fsdp=2, tp=2) as mesh:
        model = decoder(kv=2)
        params = sf.shard(model, mesh, policy())
        x = part_of_rank(sf.data.local_batch(torch.arange(8).view(4, 2), mesh), 0)
        wrong = torch.stack([x, x + 1, x, x])
        split = sf.data.local_batch(wrong.flatten(0, 1), mesh, sf.Policy(batch=["fsdp", "tp"]))
        with pytest.raises(sf.ShardError, match="inputs differ between ranks along 'tp'"):
            sf.apply(model, params, split)
        with pytest.raises(sf.ShardError, match="goes on already"), simulate(fsdp=2):
            pass
    with simulate(fsdp=2) as mesh:
        own = sf.data.local_batch(torch.randn(2, 3), mesh)
        with pytest.raises(sf.ShardError, match="simulated ranks have different values"):
            sf.shard({"w": own}, mesh, sf.Policy())


def test_what_is_no_mesh() -> None:
    with pytest.raises(TypeError), simulate():
        pass
    with pytest.raises(ValueError, match="at least one rank"), simulate(fsdp=0):
        pass
    assert not dist.is_initialized() or dist.get_world_size() == 1


def test_generators_and_plain_tensors_are_the_same_on_all_ranks() -> None:
    with simulate(fsdp=2):
        drawn = torch.randn(3, generator=torch.Generator().manual_seed(1))
        filled = torch.empty(3).normal_(generator=torch.Generator().manual_seed(1))
    expected = torch.randn(3, generator=torch.Generator().manual_seed(1))
    for found in (drawn, filled):
        assert torch.equal(part_of_rank(found, 0), expected)
        assert torch.equal(part_of_rank(found, 1), expected)


def test_tensors_from_outside_meet_numbers_of_a_rank() -> None:
    x, y = torch.ones(4), torch.arange(4.0)
    with simulate(a=2) as mesh:
        place = mesh.get_local_rank("a")
        found = [x * place, x + place, y[place:][0], y < place, torch.full_like(x, place), torch.roll(y, place)]
        parts = torch.split(y * place, [2, 2])
        region = sf.shard_map("n@a -> n@a", mesh)(lambda x: x + sf.collectives.axis_index(mesh, "a"))(torch.zeros(4))
        with pytest.raises(RuntimeError, match="different values into one tensor"):
            x.add_(place)
    for rank in range(2):
        wanted = [x * rank, x + rank, y[rank], y < rank, torch.full_like(x, rank), torch.roll(y, rank)]
        assert all(torch.equal(part_of_rank(a, rank), b) for a, b in zip(found, wanted, strict=True))
        assert torch.equal(part_of_rank(parts[1], rank), y[2:] * rank)
        assert torch.equal(part_of_rank(region.to_local(), rank), torch.full((4,), float(rank)))
    assert torch.equal(x, torch.ones(4))


def test_a_checkpoint_draws_the_same_again_on_every_rank() -> None:
    """Each rank with numbers of its own, which torch's mode would forget."""
    drop = nn.Dropout(0.5)
    with simulate(fsdp=2) as mesh:
        torch.manual_seed(sf.data.rank(mesh)[0])
        x = torch.ones(64, requires_grad=True)
        torch.rand(3)
        y = checkpoint(lambda x: drop(x) * x, x, use_reentrant=False)
        torch.rand(3)
        (grad,) = torch.autograd.grad(y.sum(), x)
        for rank in range(2):
            assert torch.equal(part_of_rank(grad, rank), 2 * part_of_rank(y, rank)), "of x * x, where it stayed"
        assert not torch.equal(part_of_rank(y, 0), part_of_rank(y, 1))


def test_every_collective_is_that_of_each_rank() -> None:
    whole = torch.arange(8.0).view(4, 2)
    with simulate(tp=2) as mesh:
        own = sf.collectives.shard_slice(whole, mesh, "tp", 0)
        summed = sf.collectives.psum_scatter(whole * 1, mesh, "tp", 0)
        x = (own * 1).requires_grad_()
        joined = sf.collectives.all_gather(x, mesh, "tp", 0)
        (grad,) = torch.autograd.grad((joined * (own[0, 0] + 1)).sum(), x)
        for rank in range(2):
            assert torch.equal(part_of_rank(own, rank), whole[2 * rank : 2 * rank + 2])
            assert torch.equal(part_of_rank(summed, rank), 2 * whole[2 * rank : 2 * rank + 2])
            assert torch.equal(part_of_rank(grad, rank), torch.full((2, 2), 6.0)), "1 + 5, of both ranks"


class _Written(nn.Module):
    """What it makes of its input, and a buffer, are written in place."""

    mean: Tensor

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.make, self.up, self.down = make, nn.Linear(4, 6), nn.Linear(6, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        out = self.make(x)
        out += self.down(self.up(x).relu())
        self.mean.mul_(0.5).add_(out.detach().mean(0))
        return out + self.mean


@pytest.mark.everyday(1)
@pytest.mark.parametrize("make", [lambda x: x.new_zeros(x.shape), torch.zeros_like, torch.clone, lambda x: x * 1])
def test_what_is_made_of_an_input_is_each_ranks_own(make: Any) -> None:
    torch.manual_seed(0)
    model, x = _Written(make), torch.randn(4, 4)
    expected, mean = [model(x).detach() for _ in range(2)], model.mean.clone()
    model.mean.zero_()
    policy = sf.Policy(rules={"up.*": "f@tp ...", "down.weight": "c f@tp"})
    with simulate(fsdp=1, tp=2) as mesh:
        params = sf.shard(model, mesh, policy)
        for out in expected:
            assert_parity({"out": sf.apply(model, params, x)}, {"out": out}, tol=1e-6)
        assert_parity({"mean": params.buffers["mean"]}, {"mean": mean}, tol=1e-6)
    result = sf.check(model, sf.MeshSpec(fsdp=1, tp=2), policy, lambda p, x: sf.apply(model, p, x).square().mean(), x)
    assert result.ok, result
