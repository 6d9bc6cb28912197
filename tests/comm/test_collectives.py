"""Movers and pairs on real ranks, against the same formula written on one stacked tensor without ranks."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.func import grad, hessian, jvp, vjp, vmap

import shardfn as sf
from shardfn.comm import collectives as sfc
from shardfn.comm import gloo_messages, raw_collectives
from shardfn.layout.mesh import MeshSpec
from shardfn.notation.errors import ShardError
from shardfn.testing import assert_trees_close, count_collectives, on_meshes, run

# torch's own forward mode scripts a few decompositions when it is first used.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)
OTHERS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.complex64)


def assert_same(got: Tensor, want: Tensor) -> None:
    """Equal to the bit, with equal dtype and shape."""
    assert got.dtype == want.dtype and got.shape == want.shape, (got.dtype, got.shape, want.dtype, want.shape)
    equal = torch.equal(*(x.contiguous().view(-1).view(torch.uint8) for x in (got, want)))
    assert equal, (got, want)


def assert_close(got: Tensor, want: Tensor) -> None:
    """Equal up to the rounding of float64."""
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


def draw(*shape: int, seed: int = 0) -> Tensor:
    """The same float64 values on every rank."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# Movers


def movers_on_a_rank(largest: int) -> None:
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    gloo_messages._LARGEST = largest
    for dtype in (*FLOATS, *INTS, *OTHERS):
        for n in (0, 1, 3):
            each = [torch.arange(n * size).add(7 * r).to(dtype) for r in range(size)]  # one [W*n] per rank
            assert_same(raw_collectives.gather_flat(each[rank], group), torch.cat(each))
            assert_same(
                raw_collectives.exchange_flat(each[rank], group), torch.cat([x.view(size, n)[rank] for x in each])
            )
            if dtype in OTHERS:
                continue
            total = torch.stack([x.double() for x in each]).sum(0).to(dtype)
            assert_same(raw_collectives.scatter_sum_flat(each[rank], group), total.view(size, n)[rank])
            mine = each[rank].clone()
            assert raw_collectives.sum_flat_(mine, group) is mine
            assert_same(mine, total)


@pytest.mark.parametrize("largest", [0, 2**21])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_movers_move_and_add_every_dtype(ranks: int, largest: int) -> None:
    run(movers_on_a_rank, largest, ranks=ranks)


def small_ones_on_a_rank() -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    largest = gloo_messages._LARGEST // 3 // 4  # numbers that a rank can send to the three others
    for numel, way in ((largest, "shardfn"), (largest + 1, "c10d")):
        x = torch.full((numel,), 1.0 + rank)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            with count_collectives() as counted:
                raw_collectives.sum_flat_(x, group)
                raw_collectives.gather_flat(x[: numel // 4 * 4], group)
        assert counted.as_dict() == {"all_reduce": 1, "all_gather": 1}
        assert counted.bytes_of == {"all_reduce": 4 * numel, "all_gather": numel // 4 * 4 * 4}
        assert x.unique().tolist() == [10.0]
        sums = {event.key for event in profile.key_averages() if "reduce_" in event.key}
        assert {key.partition("::")[0] for key in sums if "::" in key} == {way}, sums
    # A sum that depends on the order has the same bits everywhere.
    x = torch.tensor([1e8, 1.0, -1e8, 1.0])[rank].repeat(3)
    raw_collectives.sum_flat_(x, group)
    assert x.tolist() == [1.0] * 3  # ((1e8 + 1) - 1e8) + 1, where 1e8 + 1 is 1e8


def test_small_collectives_are_messages_and_count_as_what_they_are() -> None:
    run(small_ones_on_a_rank, ranks=4)


@pytest.mark.parametrize("largest", [0, 2**21])
def test_sums_are_wide_views_are_reached_and_errors_come_first(largest: int) -> None:
    run(wide_sums_on_a_rank, largest, ranks=4)


def wide_sums_on_a_rank(largest: int) -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    gloo_messages._LARGEST = largest
    # In bfloat16 256 + 1 is 256: only a float32 sum reaches 259, which then rounds to 260.
    x = torch.full((4,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    assert raw_collectives.scatter_sum_flat(x, group).item() == 260
    assert raw_collectives.sum_flat_(x, group).tolist() == [260] * 4
    # Integers wrap like torch's own.
    y = torch.full((4,), 2**62, dtype=torch.uint64)
    assert raw_collectives.scatter_sum_flat(y, group).item() == 0
    assert (
        raw_collectives.scatter_sum_flat(torch.full((4,), 30_000, dtype=torch.int16), group).item()
        == 120_000 - 2 * 65_536
    )
    # Strided inputs; the sum in place reaches the memory of a view.
    grid = torch.arange(24.0).view(4, 6)
    base = grid + rank
    assert_same(raw_collectives.gather_flat(base[:, 1], group), torch.cat([grid[:, 1] + r for r in range(4)]))
    raw_collectives.sum_flat_(base[:, ::2], group)
    assert_same(base[:, ::2], (4 * grid + 6)[:, ::2])
    assert_same(base[:, 1::2], (grid + rank)[:, 1::2])
    with pytest.raises(ShardError, match=r"cannot add torch.bool over ranks"):
        raw_collectives.sum_flat_(torch.ones(4, dtype=torch.bool), group)
    meta = torch.empty(8, device="meta")
    shapes = [f(meta, group).shape for f in (raw_collectives.gather_flat, raw_collectives.sum_flat_)]
    assert shapes == [(32,), (8,)]


# Pairs. A reference takes and gives the whole: `[W, *local]` for a varying value, `[*local]` for an invariant one.


@dataclass(frozen=True)
class Case:
    """One collective, its formula without ranks, and which of its ends are invariant."""

    op: Callable[..., Tensor]
    dims: tuple[int, ...]
    whole: Callable[[Tensor, int], Tensor]
    invariant_in: bool = False
    invariant_out: bool = False


def pullback(f: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor]]]:
    """`vjp` without an auxiliary output."""
    value, pull = vjp(f, x)[:2]
    return value, pull


def joined(x: Tensor, dim: int) -> Tensor:
    return torch.cat(x.unbind(0), dim)


def split(x: Tensor, size: int, dim: int) -> Tensor:
    return torch.stack(x.chunk(size, dim))


def exchanged(x: Tensor, size: int, split_dim: int, concat_dim: int) -> Tensor:
    return torch.stack([torch.cat([part.chunk(size, split_dim)[r] for part in x], concat_dim) for r in range(size)])


CASES = {
    "psum": Case(sfc.psum, (), lambda x, w: x.sum(0), invariant_out=True),
    "pmean": Case(sfc.pmean, (), lambda x, w: x.mean(0), invariant_out=True),
    "pvary": Case(sfc.pvary, (), lambda x, w: x.expand(w, *x.shape), invariant_in=True),
    "all_gather 0": Case(sfc.all_gather, (0,), lambda x, w: joined(x, 0).expand(w, -1, -1)),
    "all_gather -1": Case(sfc.all_gather, (-1,), lambda x, w: joined(x, -1).expand(w, -1, -1)),
    "all_gather_invariant 0": Case(sfc.all_gather_invariant, (0,), lambda x, w: joined(x, 0), invariant_out=True),
    "all_gather_invariant 1": Case(sfc.all_gather_invariant, (1,), lambda x, w: joined(x, 1), invariant_out=True),
    "psum_scatter 0": Case(sfc.psum_scatter, (0,), lambda x, w: split(x.sum(0), w, 0)),
    "psum_scatter 1": Case(sfc.psum_scatter, (1,), lambda x, w: split(x.sum(0), w, 1)),
    "shard_slice 0": Case(sfc.shard_slice, (0,), lambda x, w: split(x, w, 0), invariant_in=True),
    "shard_slice -1": Case(sfc.shard_slice, (-1,), lambda x, w: split(x, w, -1), invariant_in=True),
    "all_to_all 0 1": Case(sfc.all_to_all, (0, 1), lambda x, w: exchanged(x, w, 0, 1)),
    "all_to_all 1 0": Case(sfc.all_to_all, (1, 0), lambda x, w: exchanged(x, w, 1, 0)),
    "all_to_all 1 1": Case(sfc.all_to_all, (1, 1), lambda x, w: exchanged(x, w, 1, 1)),
}


class Setting:
    """One case on one axis: the local function and the whole one, on the same numbers."""

    def __init__(self, case: Case, mesh: DeviceMesh, axis: str) -> None:
        self.case, self.mesh, self.axis = case, mesh, axis
        self.size, self.index = sfc.axis_size(mesh, axis), sfc.axis_index(mesh, axis)
        self.local = (2 * self.size, self.size)  # divides in both dims
        self.x, self.v = self.draw_in(1), self.draw_in(2)
        self.weight = draw(*self.whole(self.x).shape, seed=3)

    def draw_in(self, seed: int) -> Tensor:
        return draw(*(() if self.case.invariant_in else (self.size,)), *self.local, seed=seed)

    def whole(self, x: Tensor) -> Tensor:
        return self.case.whole(x, self.size)

    def op(self, x: Tensor) -> Tensor:
        return self.case.op(x, self.mesh, self.axis, *self.case.dims)

    def mine_in(self, x: Tensor) -> Tensor:
        return x if self.case.invariant_in else x[self.index]

    def mine_out(self, y: Tensor) -> Tensor:
        return y if self.case.invariant_out else y[self.index]

    def total(self, value: Tensor, invariant: bool) -> Tensor:
        """A local inner product, summed over ranks where each rank has only its part."""
        return value if invariant else sfc.psum(value, self.mesh, self.axis)

    def loss(self, x: Tensor) -> Tensor:
        """Curved on both sides of the collective, so that second derivatives pass through it."""
        return self.total((self.op(x.sin()).cos() * self.mine_out(self.weight)).sum(), self.case.invariant_out)

    def whole_loss(self, x: Tensor) -> Tensor:
        return (self.whole(x.sin()).cos() * self.weight).sum()


def check_values_and_transpose(s: Setting) -> None:
    assert_close(s.op(s.mine_in(s.x)), s.mine_out(s.whole(s.x)))
    strided = s.mine_in(s.x).t().contiguous().t()
    assert_close(s.op(strided), s.mine_out(s.whole(s.x)))
    y = draw(*s.weight.shape, seed=4)
    out, pull = pullback(s.op, s.mine_in(s.x))
    left = s.total((out * s.mine_out(y)).sum(), s.case.invariant_out)
    right = s.total((s.mine_in(s.x) * pull(s.mine_out(y))[0]).sum(), s.case.invariant_in)
    assert_close(left, right)
    assert_close(pull(s.mine_out(y))[0], s.mine_in(pullback(s.whole, s.x)[1](y)[0]))


def check_first_order(s: Setting) -> None:
    want = grad(s.whole_loss)(s.x)
    leaf = s.mine_in(s.x).clone().requires_grad_()
    s.loss(leaf).backward()
    assert leaf.grad is not None
    assert_close(leaf.grad, s.mine_in(want))
    assert_close(grad(s.loss)(s.mine_in(s.x)), s.mine_in(want))
    value, pull = pullback(s.loss, s.mine_in(s.x))
    assert_close(value, s.whole_loss(s.x))
    assert_close(pull(torch.tensor(2.0, dtype=torch.float64))[0], 2 * s.mine_in(want))
    got = jvp(s.loss, (s.mine_in(s.x),), (s.mine_in(s.v),))
    for a, b in zip(got, jvp(s.whole_loss, (s.x,), (s.v,)), strict=True):
        assert_close(a, b)
    got = jvp(s.op, (s.mine_in(s.x),), (s.mine_in(s.v),))
    for a, b in zip(got, (s.whole(s.x), s.whole(s.v)), strict=True):
        assert_close(a, s.mine_out(b))
    constant = jvp(lambda x: s.op(x.detach()) * x.sum(), (s.mine_in(s.x),), (s.mine_in(s.v),))[1]
    assert_close(constant, s.mine_out(s.whole(s.x)) * s.mine_in(s.v).sum())


def check_second_order(s: Setting) -> None:
    def slope(x: Tensor) -> Tensor:
        return s.total((grad(s.loss)(x) * s.mine_in(s.v)).sum(), s.case.invariant_in)

    want = jvp(grad(s.whole_loss), (s.x,), (s.v,))[1]  # Hessian times v
    assert_close(grad(slope)(s.mine_in(s.x)), s.mine_in(want))
    assert_close(jvp(grad(s.loss), (s.mine_in(s.x),), (s.mine_in(s.v),))[1], s.mine_in(want))
    leaf = s.mine_in(s.x).clone().requires_grad_()
    (first,) = torch.autograd.grad(s.loss(leaf), leaf, create_graph=True)
    (second,) = torch.autograd.grad(s.total((first * s.mine_in(s.v)).sum(), s.case.invariant_in), leaf)
    assert_close(second, s.mine_in(want))


def check_hessian(s: Setting) -> None:
    # All ranks push basis vector i at the same time, so a varying input gets the sum over the other ranks' blocks.
    want = hessian(s.whole_loss)(s.x)
    if not s.case.invariant_in:
        want = want.sum(3)[s.index]
    assert_close(hessian(s.loss)(s.mine_in(s.x)), want)


def check_vmap(s: Setting) -> None:
    batch = torch.stack([s.x, s.v, s.x * s.v])
    mine = torch.stack([s.mine_in(x) for x in batch])  # [3, *local]
    outs = torch.stack([s.mine_out(s.whole(x)) for x in batch])
    for in_dim in (0, 1, 2, -1):
        moved = mine.movedim(0, in_dim)
        assert_close(vmap(s.op, in_dims=in_dim)(moved), outs)
        assert_close(vmap(s.op, in_dims=in_dim, out_dims=in_dim)(moved), outs.movedim(0, in_dim))
    scaled = vmap(lambda x, a: s.op(x) * a, in_dims=(None, 0))(mine[0], torch.arange(3.0))
    assert_close(scaled, torch.stack([outs[0] * a for a in range(3)]))
    nested = vmap(vmap(s.op, in_dims=1, out_dims=1), in_dims=0)(torch.stack([mine, mine + 1]).movedim(1, 2))
    assert_close(nested[0].movedim(1, 0), outs)
    want = torch.stack([s.mine_in(grad(s.whole_loss)(x)) for x in batch])
    assert_close(vmap(grad(s.loss), in_dims=1, out_dims=1)(mine.movedim(0, 1)), want.movedim(0, 1))
    assert_close(grad(lambda xs: vmap(s.loss)(xs).sum())(mine), want)
    pushed = vmap(lambda x, t: jvp(s.op, (x,), (t,))[1], in_dims=(0, 0))(mine, mine.flip(0))
    assert_close(pushed, outs.flip(0))
    lone = vmap(lambda t: jvp(s.op, (mine[0],), (t,))[1])(mine)
    assert_close(lone, outs)


EVERY = (check_values_and_transpose, check_first_order, check_second_order, check_hessian, check_vmap)


def pairs_on_a_rank(shape: tuple[int, ...], axis: str, checks: tuple[Callable[[Setting], None], ...]) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("fsdp", "tp"))
    for label, case in CASES.items():
        for check in checks:
            try:
                check(Setting(case, mesh, axis))
            except Exception as error:
                error.add_note(f"{label}, {check.__name__}, axis {axis} of {shape}")
                raise


@pytest.mark.slow
@pytest.mark.everyday(1)
@pytest.mark.parametrize(("shape", "axis"), [((3, 1), "fsdp"), ((1, 2), "tp")])
def test_pairs_compose_with_every_transform(shape: tuple[int, int], axis: str) -> None:
    run(pairs_on_a_rank, shape, axis, EVERY, ranks=math.prod(shape))


@pytest.mark.everyday(2)
@pytest.mark.parametrize(("shape", "axis"), [((4, 1), "fsdp"), ((2, 2), "fsdp"), ((2, 2), "tp"), ((1, 4), "tp")])
def test_pairs_on_every_mesh(shape: tuple[int, int], axis: str) -> None:
    run(pairs_on_a_rank, shape, axis, (check_values_and_transpose,), ranks=4)


def edges_on_a_rank() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "one"))
    index = sfc.axis_index(mesh, "tp")
    moves = [case for case in CASES.values() if case.op not in (sfc.psum, sfc.pmean, sfc.psum_scatter)]
    for dtype in (*FLOATS, *INTS, *OTHERS):
        for n in (0, 1, 3):
            each = [torch.arange(8 * n).add(5 * r).view(2 * n, 4).to(dtype) for r in range(2)]
            for case in moves:
                x = each[0] if case.invariant_in else torch.stack(each)
                want = case.whole(x, 2)
                got = case.op(x if case.invariant_in else each[index], mesh, "tp", *case.dims)
                assert_same(got, want if case.invariant_out else want[index])
            if dtype not in OTHERS:
                total = (each[0].double() + each[1].double()).to(dtype)
                assert_same(sfc.psum(each[index], mesh, "tp"), total)
                assert_same(sfc.psum_scatter(each[index], mesh, "tp", 1), total.chunk(2, 1)[index])
    # A scalar, an empty dim beside the one that is cut, and the memory that results may share.
    assert sfc.pmean(torch.tensor(float(index)), mesh, "tp").item() == 0.5
    assert sfc.all_gather(torch.empty(0, 3), mesh, "tp", 1).shape == (0, 6)
    for case in CASES.values():  # forward mode may write a zero tangent as a tensor without memory
        zero = torch.ops.aten._efficientzerotensor.default([2, 4])
        assert case.op(zero, mesh, "tp", *case.dims).count_nonzero() == 0
    x = torch.ones(2, 4)
    assert sfc.pvary(x, mesh, "tp").data_ptr() == x.data_ptr()
    assert torch.equal(sfc.psum(x, mesh, "tp"), 2 * x) and torch.equal(x, torch.ones(2, 4))
    for case in CASES.values():
        assert case.op(x, mesh, "one", *case.dims) is x
        if case.op is not sfc.pvary:
            assert case.op(x, mesh, "tp", *case.dims).data_ptr() != x.data_ptr()


def test_pairs_take_every_dtype_and_empty_tensors() -> None:
    run(edges_on_a_rank, ranks=2)


def counts_on_a_rank() -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "one"))
    counted = {}
    for label, case in CASES.items():
        s = Setting(case, mesh, "tp")
        x = s.mine_in(s.x).requires_grad_()
        with count_collectives() as forward:
            out = s.op(x)
            case.op(x, mesh, "one", *case.dims)
        with count_collectives() as backward:
            out.sum().backward()
        counted[label] = forward.as_dict(), backward.as_dict()
    return counted


def test_pairs_issue_one_collective_at_most() -> None:
    reduce, gather, exchange = {"all_reduce": 1}, {"all_gather": 1}, {"all_to_all": 1}
    want = {
        "psum": (reduce, {}),
        "pmean": (reduce, {}),
        "pvary": ({}, reduce),
        "all_gather": (gather, exchange),  # on gloo an all-to-all stands for the reduce-scatter
        "all_gather_invariant": (gather, {}),
        "psum_scatter": (exchange, gather),
        "shard_slice": ({}, gather),
        "all_to_all": (exchange, exchange),
    }
    for counted in run(counts_on_a_rank, ranks=2):
        assert counted == {label: want[label.split()[0]] for label in CASES}


# Graphs


def program(x: Tensor, w: Tensor, mesh: DeviceMesh) -> Tensor:
    """Every pair once: x varying, w invariant, the result invariant."""
    h = sfc.all_gather(sfc.pvary(w, mesh, "tp") * x, mesh, "tp", 1).sin()
    h = sfc.all_to_all(sfc.psum_scatter(h, mesh, "tp", 0), mesh, "tp", 1, 0).cos()
    h = h + sfc.shard_slice(sfc.all_gather_invariant(h, mesh, "tp", -1).sin(), mesh, "tp", -1)
    h = h * sfc.all_to_all(h, mesh, "tp", -1, -1).sin()
    return sfc.pmean((h * h).sum(), mesh, "tp") + sfc.psum(h.sum(), mesh, "tp")


def graphs_on_a_rank() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    compiled = functools.partial(torch.compile, backend="aot_eager")
    x, w = draw(4, 6, seed=sfc.axis_index(mesh, "tp")).requires_grad_(), draw(6, seed=9).requires_grad_()
    want = program(x, w, mesh)
    got = compiled(program, fullgraph=True)(x, w, mesh)
    assert_close(got, want)
    wants = torch.autograd.grad(want, (x, w))
    for a, b in zip(torch.autograd.grad(got, (x, w)), wants, strict=True):
        assert_close(a, b)
    x, w = x.detach(), w.detach()
    gradient = functools.partial(grad(program, argnums=(0, 1)), mesh=mesh)
    for a, b in zip(compiled(lambda x, w: gradient(x, w), fullgraph=True)(x, w), wants, strict=True):
        assert_close(a, b)

    for pair in (sfc.psum, functools.partial(sfc.all_gather, dim=0), functools.partial(sfc.psum_scatter, dim=0)):
        dynamic = compiled(functools.partial(of_any_size, pair, mesh), fullgraph=True, dynamic=True)
        for rows in (2, 4, 6):
            assert_close(dynamic(x[:1].expand(rows, 6)), of_any_size(pair, mesh, x[:1].expand(rows, 6)))

    for f in (per_sample, pushed, curved):
        with pytest.raises(Unsupported, match="cannot take vmap, jvp or a second derivative"):
            torch.compile(f, backend="eager", fullgraph=True)(x, mesh)
    apart: Any = torch.compiler.disable(curved)
    assert_close(torch.compile(lambda x: apart(x, mesh) * 2, backend="eager")(x), 2 * curved(x, mesh))


def of_any_size(pair: Callable[..., Tensor], mesh: DeviceMesh, x: Tensor) -> Tensor:
    return pair(x.contiguous(), mesh, "tp") * 2


def per_sample(xs: Tensor, mesh: DeviceMesh) -> Tensor:
    return vmap(lambda x: sfc.psum(x, mesh, "tp"))(xs)


def pushed(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return jvp(lambda x: sfc.all_gather(x, mesh, "tp", 0), (x,), (x,))[1]


def curved(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return grad(lambda x: grad(lambda x: sfc.psum(x, mesh, "tp").sin().sum())(x).square().sum())(x)


# Dynamo makes an instance of `autograd.Function` for its own use.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_pairs_compile() -> None:
    run(graphs_on_a_rank, ranks=2)


# Without ranks


def test_meta_tensors_need_no_ranks() -> None:
    mesh = MeshSpec(fsdp=2, tp=4)
    x = torch.empty(8, 12, device="meta", dtype=torch.bfloat16, requires_grad=True)
    shapes = {}
    for label, case in CASES.items():
        y = case.op(x, mesh, "tp", *case.dims)
        assert y.is_meta and y.dtype == x.dtype
        y.sum().backward()
        shapes[label] = tuple(y.shape)
    assert x.grad is not None and x.grad.is_meta
    assert shapes == {
        "psum": (8, 12),
        "pmean": (8, 12),
        "pvary": (8, 12),
        "all_gather 0": (32, 12),
        "all_gather -1": (8, 48),
        "all_gather_invariant 0": (32, 12),
        "all_gather_invariant 1": (8, 48),
        "psum_scatter 0": (2, 12),
        "psum_scatter 1": (8, 3),
        "shard_slice 0": (2, 12),
        "shard_slice -1": (8, 3),
        "all_to_all 0 1": (2, 48),
        "all_to_all 1 0": (32, 3),
        "all_to_all 1 1": (8, 12),
    }


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, m: sfc.psum(x, m, "tpp"), r"psum: axis='tpp' is not .* \(fsdp=2, tp=4\); did you mean 'tp'\?"),
        (lambda x, m: sfc.axis_size(m, "pp"), r"axis_size: axis='pp' is not an axis of the mesh"),
        (lambda x, m: sfc.all_gather(x, m, "tp", 2), r"all_gather: dim=2 .* \(6, 8\)\. Dims are -2 to 1\."),
        (lambda x, m: sfc.all_to_all(x, m, "tp", 1, -3), r"all_to_all: concat_dim=-3 does not fit"),
        (lambda x, m: sfc.shard_slice(x[0, 0], m, "tp", 0), r"shard_slice: dim=0 .* no dim; x.unsqueeze\(0\) gives"),
        (lambda x, m: sfc.psum_scatter(x, m, "tp", 0), r"psum_scatter: .* over tp=4, 6 % 4 = 2\. Pad dim 0 to 8, or"),
        (lambda x, m: sfc.shard_slice(x, m, "tp", -2), r"shard_slice: shape \(6, 8\) splits dim 0 over tp=4"),
        (lambda x, m: sfc.all_to_all(x, m, "tp", 0, 1), r"all_to_all: .* 6 % 4 = 2"),
        (lambda x, m: sfc.psum(x.bool(), m, "tp"), r"psum: cannot add torch.bool over ranks\. Convert it"),
        (lambda x, m: sfc.pvary(torch.ones(2), m, "tp"), r"pvary: MeshSpec\(.*\) has no processes.* DeviceMesh"),
        (lambda x, m: sfc.pmean(x.int(), m, "tp"), r"pmean: torch.int32 has no mean"),
    ],
)
def test_errors_name_the_arithmetic_and_the_remedy(call: Callable[[Tensor, MeshSpec], object], message: str) -> None:
    with pytest.raises(ShardError, match=message):
        call(torch.empty(6, 8, device="meta"), MeshSpec(fsdp=2, tp=4))


def refusals_on_a_rank() -> None:
    nameless = init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match="mesh_dim_names"):
        sfc.psum(torch.ones(2), nameless, "tp")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with pytest.raises(ShardError, match=r"psum: takes this rank's plain tensor, got a DTensor\. Pass x.to_local\(\)"):
        sfc.psum(distribute_tensor(torch.ones(2), mesh), mesh, "tp")
    with pytest.raises(RuntimeError, match="view"):
        sfc.pvary(torch.ones(2, requires_grad=True), mesh, "tp").add_(1)


def test_meshes_without_names_dtensors_and_writes_are_refused() -> None:
    run(refusals_on_a_rank, ranks=2)


class Metrics(NamedTuple):
    loss: Tensor
    counts: list[Tensor]


@on_meshes({"fsdp": 2})
def test_sums_of_metrics(mesh: DeviceMesh) -> None:
    mine = float(dist.get_rank())
    names = ["loss", "norm"] if mine else ["norm", "loss"]  # as a set, or what came first, may have put them
    metrics = {name: torch.tensor(mine + len(name) * (name == "loss")) for name in names}
    found = sf.collectives.pmean(metrics, mesh, "fsdp")
    assert list(found) == names and {name: float(x) for name, x in found.items()} == {"loss": 4.5, "norm": 0.5}
    more = sf.collectives.psum(Metrics(torch.ones(2), [torch.tensor(1), torch.tensor(2)]), mesh, "fsdp")
    assert type(more) is Metrics and more.loss.tolist() == [2, 2] and more.counts == [2, 4]
    for wrong in (3.0, {"loss": 3.0}, sf.shard(nn.Linear(2, 2), mesh, sf.Policy(), src=0)):
        with pytest.raises((TypeError, ShardError), match=r"pmean: .*(takes a tensor|Pass x.to_local)"):
            sf.collectives.pmean(wrong, mesh, "fsdp")


@on_meshes({"fsdp": 2, "tp": 2}, {"fsdp": 1, "tp": 4})
def test_a_loss_that_ranks_share_is_not_added_over_them(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6)).double()
    rules = {"0.weight": "f@tp c@fsdp", "2.weight": "c@fsdp f@tp"}
    params, x = sf.shard(model, mesh, sf.Policy(rules=rules)), torch.randn(2, 6, dtype=torch.float64)

    def loss(p: sf.Params) -> Tensor:
        return (sf.apply(model, p, x) - x).square().mean()

    def penalty(p: sf.Params) -> Tensor:
        return loss(p) + sf.collectives.psum(p["0.weight"].to_local().square().sum(), mesh, "tp")

    def parts(p: sf.Params) -> Tensor:  # each rank has the squares of some features
        out = sf.collectives.pvary(sf.apply(model, p, x) - x, mesh, "tp")
        part = out.tensor_split(mesh["tp"].size(), -1)[mesh.get_local_rank("tp")]
        return sf.collectives.psum(part.square().sum(), mesh, "tp") / x.numel()

    for collective in (sf.collectives.psum, sf.collectives.pmean):
        with pytest.raises(sf.ShardError, match=r"the loss is whole over 'tp' already.* Leave out the p"):
            sf.grad(lambda p, collective=collective: collective(loss(p), mesh, "tp"))(params)
        collective(loss(params), mesh, "tp")  # where nobody differentiates
    sf.grad(penalty)(params)
    assert_trees_close(sf.gather(sf.grad(parts)(params)), sf.gather(sf.grad(loss)(params)))


@on_meshes({"fsdp": 2})
def test_a_sum_over_data_ranks_of_no_model_is_differentiated_as_it_says(mesh: DeviceMesh) -> None:
    """Its transpose is `pvary`; only in the backward of a model, whose gradients are averaged, is it an error."""
    x = torch.ones(3, requires_grad=True)
    (sfc.psum(x, mesh, "fsdp") * 2).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2, 2, 2]
