"""`reshard` on one tensor: every pair of layouts against slices of the whole, the collectives, the derivatives."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from drawing import assert_all_raise, assert_same_bits
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import shardfn as sf
from shardfn.notation.spec import parse
from shardfn.params.reshard import steps
from shardfn.testing import count_collectives, run

LAYOUTS = (
    "b s",
    "b@tp s",
    "b s@tp",
    "b@fsdp s",
    "b@fsdp s@tp",
    "b@tp s@fsdp",
    "b@tp@fsdp s",
    "b@fsdp@tp s",
    "b s@tp@fsdp",
)
SUMS = ("b s +tp", "b@fsdp s +tp", "b s +fsdp,tp", "b s +tp,fsdp", "b s@fsdp +tp")


def make_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))


def part_of(full: Tensor, rule: str, mesh: DeviceMesh) -> Tensor:
    """This rank's part of `full`, by narrowing; a pending sum is spread so that the ranks add up to it."""
    spec = parse(rule)
    for dim, factors in enumerate(spec.dims):
        for axis in factors.factors[0].axes:
            step = -(-full.shape[dim] // mesh[axis].size())  # torch.chunk leaves empty ones out
            full = full.narrow(dim, *_within(full.shape[dim], step * mesh.get_local_rank(axis), step))
    for axis in spec.partial:
        full = full * (3 if mesh.get_local_rank(axis) == 0 else -2)
    return full.contiguous()


def _within(size: int, start: int, length: int) -> tuple[int, int]:
    start = min(start, size)
    return start, min(length, size - start)


def every_pair_on_a_rank() -> None:
    mesh = make_mesh()
    for shape in ((8, 12), (5, 3), (1, 2), (7, 0)):
        full = torch.arange(float(shape[0] * shape[1])).view(shape).double()
        for left, right in product((*LAYOUTS, *SUMS), LAYOUTS):
            x = part_of(full, left, mesh)
            before = x.clone()
            got = sf.reshard(x, f"{left} -> {right}", mesh)
            assert_same_bits(got, part_of(full, right, mesh), f"{left} -> {right} of {shape}")
            assert_same_bits(x, before, "the input is not touched")


def test_every_pair_of_layouts() -> None:
    run(every_pair_on_a_rank)


@pytest.mark.parametrize(
    ("rule", "want"),
    [
        ("b s@tp -> b s", ["all_gather_invariant(tp)"]),
        ("b s -> b s@tp", ["shard_slice(tp)"]),
        ("b s@tp -> b@tp s", ["all_to_all(tp)"]),
        ("b s +tp -> b s", ["psum(tp)"]),
        ("b s +tp -> b s@tp", ["psum_scatter(tp)"]),
        ("b@fsdp s@tp -> b@fsdp s@tp", []),
        ("b@tp@fsdp s -> b@tp s", ["all_gather(fsdp)"]),
        ("b@tp@fsdp s -> b s", ["all_gather(fsdp)", "all_gather_invariant(tp)"]),
        ("b@tp@fsdp s -> b@tp s@fsdp", ["all_to_all(fsdp)"]),
        ("b@tp@fsdp s -> b@fsdp s", ["all_gather(fsdp)", "all_gather_invariant(tp)", "shard_slice(fsdp)"]),
        ("b s +tp,fsdp -> b@fsdp s@tp", ["psum_scatter(tp)", "psum_scatter(fsdp)"]),
        ("b s@fsdp +tp -> b s@tp", ["psum(tp)", "all_gather(fsdp)", "shard_slice(tp)"]),
        ("b@tp@fsdp s -> b s@fsdp", ["all_to_all(fsdp)", "all_gather_invariant(tp)"]),
        ("b s +tp -> b s +tp", []),
    ],
)
def test_the_steps_between_two_layouts(rule: str, want: list[str]) -> None:
    left, right = rule.split("->")
    assert [f"{collective.__name__}({axis})" for collective, axis, *_ in steps(parse(left), parse(right))] == want


def count_on_a_rank() -> None:
    mesh, x = make_mesh(), torch.ones(4, 4)
    for rule, want in (
        ("b s@tp -> b@tp s", {"all_to_all": 1, "all_gather": 1}),
        ("b s@tp -> b s", {"all_gather": 2}),  # of the lengths, and of what they are of
        ("b s -> b@tp s", {}),
    ):
        with count_collectives() as counts:
            sf.reshard(x, rule, mesh)
        assert counts.as_dict() == want, (rule, counts)


def test_one_collective_a_step() -> None:
    run(count_on_a_rank)


def derivatives_on_a_rank() -> None:
    mesh = make_mesh()
    pairs = (("b s@tp", "b s"), ("b s", "b s@tp"), ("b s@tp", "b@tp s"))
    for shape, (left, right) in product(((4, 4), (5, 3), (1, 7), (3, 0)), pairs):
        full, weight = torch.randn(2, *shape, dtype=torch.float64)
        x = part_of(full, left, mesh).requires_grad_()
        y = sf.reshard(x, f"{left} -> {right}", mesh)
        loss = (y * part_of(weight, right, mesh)).sum()
        # A loss that is whole on every rank of a compute axis counts once, one that is split is the sum of its parts.
        grad = torch.autograd.grad(loss, x)[0]
        assert_same_bits(grad, part_of(weight, left, mesh), f"{left} -> {right}")


def test_derivatives_over_a_compute_axis() -> None:
    run(derivatives_on_a_rank)


def data_axis_on_a_rank() -> None:
    mesh = make_mesh()
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    y = sf.reshard(x, "b@fsdp s -> b s", mesh)
    loss = (mesh.get_local_rank("fsdp") + 1.0) * y.sum()
    assert torch.autograd.grad(loss, x)[0].unique().tolist() == [3], "the losses of all data ranks count"


def test_derivatives_over_a_data_axis() -> None:
    run(data_axis_on_a_rank)


def reshard_wrongly(rule: str, kind: str = "plain") -> None:
    mesh = make_mesh()
    x: object = torch.ones(4, 4)
    if kind == "dtensor":
        x = distribute_tensor(torch.ones(4, 4), mesh)
        assert isinstance(x, DTensor)
    elif kind == "list":
        x = [1]
    elif kind == "other":
        x = torch.ones(2, 4 if mesh.get_local_rank("tp") else 1)
    sf.reshard(x, rule, None if kind == "no mesh" else mesh)


def test_what_cannot_be_resharded() -> None:
    table = [
        (("b s", "plain"), sf.ShardError, r"'b s' needs one '->' between the two layouts"),
        (("b s -> b s -> b s", "plain"), sf.ShardError, r"needs one '->'"),
        (("b s -> s b", "plain"), sf.ShardError, r"changes names; both sides name the same dims"),
        (("b s c -> b s c", "plain"), sf.ShardError, r"the rule has 3 dims, the tensor has 2"),
        (
            ("b s@fsdq -> b s", "plain"),
            sf.ShardError,
            r"unknown mesh axis 'fsdq'; the mesh has fsdp=2, tp=2; did you mean 'fsdp'",
        ),
        (
            ("b s -> b s +tp", "plain"),
            sf.ShardError,
            r"a value cannot become a pending sum \(\+tp\)\n    b s -> b s \+tp\n {15}\^\^\^$",
        ),
        (
            ("(h d@tp) s -> (h d) s", "plain"),
            sf.ShardError,
            r"only the outermost factor of a dim can be split here\n    \(h d@tp\) s -> \(h d\) s\n       \^{4}",
        ),
        (("b( s -> b s", "plain"), sf.ShardError, r"bad rule: expected '\)'\n    b\( s -> b s\n {9}\^$"),
        (
            ("b s@tp -> b s", "other"),
            sf.ShardError,
            r"'s@tp' is not split as DTensor would: the ranks of tp=2 have \[1, 4\] of it, and chunks of 5 are \[3, ",
        ),
        (("b s -> b s", "dtensor"), TypeError, r"one plain local tensor, not DTensor"),
        (("b s -> b s", "list"), TypeError, r"one plain local tensor, not list"),
        (("b s -> b s", "no mesh"), TypeError, r"pass the mesh too: reshard\(x, 'b s@tp -> b s', mesh\)"),
    ]
    assert_all_raise(reshard_wrongly, table)
    assert not dist.is_initialized()


def composite_on_a_rank() -> None:
    mesh = make_mesh()
    full = torch.arange(24.0).view(8, 3)
    got = sf.reshard(part_of(full, "b@tp s", mesh), "(h@tp 2) _ -> (h 2) _", mesh)
    assert_same_bits(got, full)
    assert_same_bits(sf.reshard(part_of(full, "b@tp s", mesh), "(h@tp d) _ -> (h d) _", mesh), full)
    three = full[:6]  # whole pairs
    mine = three[:4] if mesh.get_local_rank("tp") == 0 else three[4:]
    assert_same_bits(sf.reshard(mine.contiguous(), "(h@tp 2) _ -> (h 2) _", mesh), three)
    assert_same_bits(sf.reshard(three, "(h 2) _ -> (h@tp 2) _", mesh), mine)


def test_composite_dims() -> None:
    run(composite_on_a_rank)
