"""`comm/flat_memory.py`: runs against a brute-force search for neighbours, and writes through flat tensors."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from drawing import PROPERTY
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from shardfn._torch import version_of
from shardfn.comm.flat_memory import empty_flat, map_runs, merged, split_flat, view_of

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int32)
SHAPES = ((), (1,), (3,), (17,), (2, 3), (4, 5), (0,), (0, 3), (40,))
BYTES = 2**13


@dataclass(frozen=True)
class Place:
    """Where a tensor lies, by the one before it in its column."""

    kind: str  # next to it, behind a gap, in a storage of its own, or with its elements apart
    dtype: torch.dtype


Table = tuple[list[tuple[int, ...]], list[list[Place]]]
places = st.builds(
    Place, st.sampled_from(["next"] * 6 + ["gap", "new", "apart"]), st.sampled_from([DTYPES[0]] * 8 + [*DTYPES])
)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """The shapes of rows, and a place for every row in every column."""
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=9))
    columns = draw(st.integers(1, 3))
    return shapes, [draw(st.lists(places, min_size=len(shapes), max_size=len(shapes))) for _ in range(columns)]


def build(shapes: list[tuple[int, ...]], plan: list[Place]) -> list[Tensor]:
    """The tensors of a column."""
    storage, at = torch.zeros(BYTES, dtype=torch.uint8).untyped_storage(), 0
    out = []
    for shape, place in zip(shapes, plan, strict=True):
        size = place.dtype.itemsize
        if place.kind == "new":
            storage, at = torch.zeros(BYTES, dtype=torch.uint8).untyped_storage(), 0
        if place.kind == "gap":
            at += size
        at = -(-at // size) * size
        step = 2 if place.kind == "apart" else 1
        strides = [step * stride for stride in torch.empty(shape).stride()]
        tensor = torch.empty(0, dtype=place.dtype)
        tensor.set_(storage, at // size, torch.Size(shape), strides)
        tensor.copy_(torch.arange(tensor.numel()).view(shape) % 7)
        at += step * tensor.numel() * size
        out.append(tensor)
    return out


def memory_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's storage."""
    whole = torch.empty(0, dtype=torch.uint8)
    return whole.set_(tensor.untyped_storage(), 0, (BYTES,), (1,))


def follows(above: Tensor, below: Tensor) -> bool:
    """Whether two tensors are side by side in memory."""
    ends = above.data_ptr() + above.numel() * above.element_size() == below.data_ptr()
    return ends and above.dtype == below.dtype and above.is_contiguous() and below.is_contiguous()


def count_rows(columns: list[list[Tensor]]) -> list[int]:
    """Elements of every row that `merged` should find."""
    rows = [(i, row) for i, row in enumerate(zip(*columns, strict=True)) if row[0].numel()]
    rows.sort(key=lambda pair: pair[1][0].data_ptr())
    runs = [[row] for row in rows[:1]]
    for above, below in pairwise(rows):
        if all(follows(a, b) for a, b in zip(above[1], below[1], strict=True)):
            runs[-1].append(below)
        else:
            runs.append([below])
    runs.sort(key=lambda run: min(i for i, _ in run))
    return [sum(row[0].numel() for _, row in run) for run in runs]


def change(columns: list[list[Tensor]]) -> None:
    """Elementwise work in place, which mixes the columns."""
    for row in zip(*columns, strict=True):
        for other in row[1:]:
            row[0].add_(other.to(row[0].dtype), alpha=3)
            other.mul_(2).sub_(row[0].to(other.dtype))
        row[0].mul_(5)


@PROPERTY
@given(tables())
def test_writing_through_merged_rows_equals_writing_one_by_one(table: Table) -> None:
    shapes, plan = table
    columns = [build(shapes, places) for places in plan]
    twins = [build(shapes, places) for places in plan]
    before = [memory_of(x).clone() for column in columns for x in column]
    rows = merged(columns)
    assert [x.numel() for x in rows[0]] == count_rows(columns)
    assert all([x.numel() for x in column] == count_rows(columns) for column in rows)
    now = [memory_of(x) for column in columns for x in column]
    assert all(torch.equal(x, y) for x, y in zip(now, before, strict=True)), "finding runs changes nothing"
    change(rows)
    change(twins)
    for column, twin in zip(columns, twins, strict=True):
        for ours, theirs in zip(column, twin, strict=True):
            assert torch.equal(ours, theirs)
            assert torch.equal(memory_of(ours), memory_of(theirs)), "nothing else is written"


@PROPERTY
@given(tables())
def test_map_runs_equals_the_function_on_each(table: Table) -> None:
    shapes, plan = table
    tensors = build(shapes, plan[0])
    before = [x.clone() for x in tensors]
    calls = []

    def doubled(given: list[Tensor]) -> list[Tensor]:
        calls.append(len(given))
        return [2 * x for x in given]

    results = map_runs(doubled, tensors)
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))
    for result, tensor in zip(results, tensors, strict=True):
        assert result.dtype == tensor.dtype and torch.equal(result, 2 * tensor)
    assert calls == [len(count_rows([tensors])) + sum(not x.numel() for x in tensors)]
    assert len(merged([results])[0]) <= len(merged([tensors])[0]), "what lay side by side does again"


@PROPERTY
@given(st.lists(st.sampled_from(SHAPES)), st.sampled_from(DTYPES))
def test_flat_tensors_are_one_run(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    parts = empty_flat(shapes, dtype, CPU)
    assert [tuple(x.shape) for x in parts] == shapes and all(x.dtype == dtype for x in parts)
    assert all(x.is_contiguous() for x in parts)
    size = sum(x.numel() for x in parts)
    assert [x.numel() for x in merged([parts])[0]] == [size] * (size > 0)
    assert all(x.untyped_storage().nbytes() == x.numel() * dtype.itemsize and not x.storage_offset() for x in parts)


def test_map_runs_of_nothing() -> None:
    assert map_runs(lambda tensors: pytest.fail("called"), []) == [] and merged([[], []]) == [[], []]


def test_parts_begin_where_their_tensor_does() -> None:
    whole = torch.arange(10.0)
    a, b = split_flat(whole[2:8], [(2, 2), (2,)])
    assert a.tolist() == [[2, 3], [4, 5]] and b.tolist() == [6, 7]
    b.zero_()
    assert whole[6:8].tolist() == [0, 0]


def test_rows_of_unequal_length_stay_alone() -> None:
    """What would be a run of the first column is none of the second, though that has no gap either."""
    long, short = empty_flat([(4,), (4,), (4,)], torch.float32, CPU), empty_flat([(4,), (2,), (4,)], torch.float32, CPU)
    whole = split_flat(short[0], [(4,)])[0]
    for other in ([*short], [whole, whole[:2], whole]):
        for columns in ([long, other], [other, long]):
            assert [x.shape for x in merged(columns)[1]] == [x.shape for x in columns[1]]


def test_neighbours_in_different_storages_are_one_run() -> None:
    memory = torch.zeros(24)
    buffer = memory.numpy()
    first, second = torch.frombuffer(buffer, dtype=torch.float32, count=12), torch.from_numpy(buffer[12:])
    parts = [*split_flat(first, [(4,), (8,)]), *split_flat(second, [(5,), (7,)])]
    assert first.data_ptr() + 48 == second.data_ptr() == parts[2].data_ptr()
    (flat,) = merged([parts])[0]
    assert torch.equal(flat.fill_(3), torch.full((24,), 3.0)) and memory.eq(3).all()
    own = empty_flat([x.shape for x in parts], torch.float32, CPU)
    assert [x.numel() for x in merged([own, parts[::-1]])[0]] == [4, 8, 5, 7], "not in the second column"


def test_tensors_without_memory_stay_as_they_are() -> None:
    sparse = [torch.eye(2).to_sparse(), torch.eye(2).to_sparse()]
    meta = [torch.empty(2, device="meta"), torch.empty(2, device="meta")]
    emptied = empty_flat([(2,), (2,), (2,)], torch.float32, CPU)
    emptied = [torch.ones(4), torch.ones(4)]
    emptied[0].untyped_storage().resize_(0)
    turned = empty_flat([(2,), (2,)], torch.complex64, CPU)
    for tensors in (sparse, meta, emptied, [turned[0], turned[1].conj()]):
        assert all(x is y for x, y in zip(merged([tensors])[0], tensors, strict=True))
    parameters = [nn.Parameter(x) for x in empty_flat([(2,), (2,)], torch.float32, CPU)]
    (flat,) = merged([parameters])[0]
    assert flat.shape == (4,) and not flat.requires_grad and flat.is_leaf

    class Wrapper(Tensor):
        pass

    wrapped = [x.as_subclass(Wrapper) for x in parameters]
    assert merged([wrapped])[0] == wrapped


def test_versions_are_separate_and_counted_on_request() -> None:
    a, b = empty_flat([(2,), (3,)], torch.float32, CPU)
    (flat,) = merged([[a, b]])[0]
    before = version_of(a), version_of(b)
    a.zero_()
    assert (version_of(a), version_of(b)) == (before[0] + 1, before[1])
    flat.fill_(7)
    assert b.tolist() == [7, 7, 7] and version_of(b) == before[1], "the reason for increment_version"
    increment_version([a, b])
    assert (version_of(a), version_of(b)) == (before[0] + 2, before[1] + 1)


def test_parts_have_no_autograd_relation() -> None:
    """A change of one part does not invalidate what autograd saved of another."""
    a, b = (x.fill_(1).requires_grad_() for x in empty_flat([(2,), (2,)], torch.float32, CPU))
    loss = (a * a).sum()
    with torch.no_grad():
        b.add_(1)
    loss.backward()
    assert a.grad is not None and a.grad.tolist() == [2, 2] and b.grad is None
    parts = split_flat(a.detach().clone().requires_grad_(), [(1,), (1,)])
    assert not any(part.requires_grad for part in parts)


def test_a_run_may_be_given_in_any_order() -> None:
    a, b, c = empty_flat([(2, 3), (4,), (5,)], torch.float32, CPU)
    assert [x.numel() for x in merged([[c, a, b]])[0]] == [15]
    for tensor, result in zip(
        (c, a, b), map_runs(lambda flats: [x.fill_(2) + 1 for x in flats], [c, a, b]), strict=True
    ):
        assert result.shape == tensor.shape and bool(result.eq(3).all())


def test_a_view_says_where_it_is() -> None:
    flat = torch.arange(24.0)
    view = view_of(flat[4:16].view(3, 4)[1:, ::2])
    assert view == ((2, 2), (4, 2), 8, 15)
    assert view_of(flat[5:5]) == ((0,), (1,), 5, 5)
