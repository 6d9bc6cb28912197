"""`typeof` and `visualize`: what they print is a rule, and what they draw is where the values are."""

import sys
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardfn as sf
from shardfn.inspect import views
from shardfn.inspect.pictures import names_text, visualize
from shardfn.inspect.views import dtype_text, owners, ranks_text, segments, typeof
from shardfn.layout.mesh import nested_chunk
from shardfn.notation.spec import parse
from shardfn.testing import count_collectives, on_meshes, run


def rule_of(text: str) -> str:
    """`f32[rule]` -> rule."""
    return text[text.index("[") + 1 : text.rindex("]")]


# ---------------------------------------------------------------------------------------------------------------------
# Ownership, against brute force


@given(data=st.data())
def test_segments_are_the_indices_of_every_rank(data: st.DataObject) -> None:
    sizes = {"tp": data.draw(st.integers(1, 4)), "fsdp": data.draw(st.integers(1, 4))}
    extent = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple))
    shape = tuple(size + data.draw(st.integers(0, 2)) for size in extent)
    cuts = data.draw(st.permutations([("tp",), ("fsdp",), ()]).map(lambda order: order[: len(shape)]))
    if data.draw(st.booleans()):
        cuts = [("tp", "fsdp"), *[()] * (len(shape) - 1)]
    found = list(segments(shape, extent, cuts, sizes))
    for coords in [dict(zip(sizes, at, strict=True)) for at in product(*map(range, sizes.values()))]:
        ranges = [
            range(start, min(start + length, true))
            for (start, length), true in zip(
                [nested_chunk(n, [(sizes[a], coords[a]) for a in cut]) for n, cut in zip(shape, cuts, strict=True)],
                extent,
                strict=True,
            )
        ]
        index = torch.arange(prod(extent)).reshape(extent)
        want = sorted(int(index[at]) for at in product(*ranges))
        mine = [p for p in found if all(coords[axis] == i for axis, i in p.at)]
        assert [i for p in mine for i in range(p.start, p.stop)] == want
    bounds = [0] + [p.stop for p in found]
    assert [p.start for p in found] == bounds[:-1] and bounds[-1] == prod(extent)  # no gap, no overlap
    assert all(a.at != b.at for a, b in pairwise(found))  # neighbours are joined


def test_segments_of_uneven_and_empty_shards() -> None:
    found = [(p.start, p.stop, dict(p.at)["fsdp"]) for p in segments((5,), (5,), (("fsdp",),), {"fsdp": 4})]
    assert found == [(0, 2, 0), (2, 4, 1), (4, 5, 2)]  # torch.chunk: the last rank has nothing


def test_owners_are_in_the_order_of_the_mesh() -> None:
    sizes = {"replicate": 2, "fsdp": 3, "tp": 2}
    grid = torch.arange(100, 112).reshape(2, 3, 2)
    assert owners(sizes, grid.flatten().tolist(), (("fsdp", 1),)) == grid[:, 1].flatten().tolist()
    assert owners(sizes, grid.flatten().tolist(), (("tp", 1), ("replicate", 0))) == grid[0, :, 1].tolist()


RULES = {
    "plain": ("ff@tp c@fsdp", (8, 5)),
    "uneven": ("a@fsdp b", (3, 7)),
    "nested": ("e@tp@fsdp", (12,)),
    "fused": ("(3 heads@tp d) f@fsdp", (24, 6)),
    "inner": ("g@fsdp (2 h@tp)", (5, 8)),
    "gqa": ("(q: heads@tp d + k: kv@tp d + v: kv@tp d) i@fsdp", (32, 3)),
    "experts": ("x j@fsdp k@tp", (2, 3, 4)),
    "padded": ("vocab@tp l@fsdp", (5, 3)),
    "optional": ("m@tp? n", (3, 2)),
    "scalar": ("", ()),
    "empty": ("o@fsdp p", (0, 4)),
    "whole": ("...", (2, 2)),
}
POLICY = sf.Policy(
    rules={name: rule for name, (rule, _) in RULES.items()}, sizes={"heads": 4, "d": 2}, pad={"vocab": 4}
)
SHAPES = {name: shape for name, (_, shape) in RULES.items()} | {"gqa": (24, 3)}


def numbered() -> dict[str, Tensor]:
    """Every element is its own index, from 1: padding is 0."""
    return {name: torch.arange(1.0, prod(shape) + 1).reshape(shape) for name, shape in SHAPES.items()}


def held_on_this_rank(mesh: DeviceMesh) -> dict[str, list[int]]:
    params = sf.shard(numbered(), mesh, POLICY)
    with count_collectives() as count:
        visualize(params)
        assert [typeof(params, name) for name in params.plan.layouts]
    assert count.total == 0
    out = {}
    for name, layout in params.plan.layouts.items():
        parts = [params[leaf.name] for leaf in layout.leaves]
        values = torch.cat([p.to_local().flatten() for p in parts if isinstance(p, DTensor)])
        out[name] = sorted(int(value) - 1 for value in values if value)
    return out


def shards_of(axes: dict[str, int]) -> dict[str, list[int]]:
    return held_on_this_rank(init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes)))


@pytest.mark.parametrize("axes", [{"fsdp": 4, "tp": 1}, {"fsdp": 2, "tp": 2}, {"fsdp": 1, "tp": 4}], ids=str)
def test_cells_are_what_the_ranks_hold(axes: dict[str, int]) -> None:
    plan = sf.plan(numbered(), sf.MeshSpec(**axes), POLICY)
    actual = run(shards_of, axes, ranks=4)
    for name, layout in plan.layouts.items():
        view = views.views_of("test", plan, name)[name]
        assert view.shape == layout.shape
        drawn: dict[int, list[int]] = {rank: [] for rank in range(4)}
        index = torch.arange(layout.numel).reshape(layout.shape)
        for cell in product(*view.segments):
            part = index[tuple(slice(piece.start, piece.stop) for piece in cell)]
            for rank in view.owners(tuple(at for piece in cell for at in piece.at)):
                drawn[rank] += part.flatten().tolist()
        for rank in range(4):
            assert sorted(drawn[rank]) == actual[rank][name], (name, rank)


# ---------------------------------------------------------------------------------------------------------------------
# typeof


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.wqkv = nn.Linear(4, 32, bias=False)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(()))


QKV = sf.Policy(
    rules={"wqkv.weight": "(q: heads@tp d + k: kv@tp d + v: kv@tp d) c@fsdp", "embed.weight": "vocab@tp c@fsdp"},
    sizes={"heads": 8, "d": 2},
)


def pending(params: sf.Params) -> sf.Params:
    """What gradients look like before `reduce_grads`."""
    out = {}
    for name, leaf in params.items():
        assert isinstance(leaf, DTensor)
        axes = dict(zip(leaf.device_mesh.mesh_dim_names or (), leaf.placements, strict=True))
        placed = [Partial() if axis == "fsdp" else placement for axis, placement in axes.items()]
        whole = [Replicate() if axis == "fsdp" else placement for axis, placement in axes.items()]
        local = leaf.redistribute(placements=whole).to_local()
        out[name] = DTensor.from_local(
            local, leaf.device_mesh, placed, run_check=False, shape=leaf.shape, stride=leaf.stride()
        )
    return params.like(out)


@on_meshes()
def test_typeof_a_tree(mesh: DeviceMesh) -> None:
    params = sf.shard(Tied(), mesh, QKV)
    assert typeof(params, "embed.weight") == typeof(params, "head.weight") == "f32[vocab@tp c@fsdp]"  # tied
    assert typeof(params, "wqkv.weight") == "f32[(q: heads@tp d + k: kv@tp d + v: kv@tp d) c@fsdp]"
    assert typeof(params, "wqkv.weight[k]") == "f32[(kv@tp d) c@fsdp]"
    assert typeof(params, "scale") == "f32[]"
    assert typeof(params.plan, "head.weight") == "f32[vocab@tp c@fsdp]"
    assert typeof(sf.tree.cast(params, torch.bfloat16), "scale") == "bf16[]"
    grads = pending(params)
    assert typeof(grads, "embed.weight") == "f32[vocab@tp c +fsdp]"
    assert typeof(grads, "wqkv.weight") == "f32[(q: heads@tp d + k: kv@tp d + v: kv@tp d) c +fsdp]"
    assert typeof(grads, "scale") == "f32[+fsdp]"
    assert "terms of a pending sum" in visualize(grads, "scale")
    gathered = params.like({n: x.full_tensor() for n, x in params.items() if isinstance(x, DTensor)})
    assert typeof(gathered, "embed.weight") == "f32[8 4]"
    with pytest.raises(sf.ShardError, match=r"parts of 'wqkv.weight' differ .* wqkv.weight\[q\], wqkv.weight\[k\]"):
        typeof(gathered, "wqkv.weight")


@on_meshes({"fsdp": 2, "tp": 2})
def test_typeof_a_dtensor(mesh: DeviceMesh) -> None:
    whole = torch.zeros(16, 8, dtype=torch.int64)
    assert typeof(distribute_tensor(whole, mesh, [Replicate(), Shard(0)])) == "i64[16@tp 8]"
    assert typeof(distribute_tensor(whole, mesh, [Shard(0), Shard(0)])) == "i64[16@fsdp@tp 8]"
    assert typeof(DTensor.from_local(whole[:8], mesh, [Partial(), Shard(0)], run_check=False)) == "i64[16@tp 8 +fsdp]"
    assert typeof(DTensor.from_local(whole[0, 0], mesh, [Partial(), Partial()], run_check=False)) == "i64[+fsdp,tp]"
    assert (
        typeof(DTensor.from_local(whole[0], mesh, [Partial("max"), Replicate()], run_check=False))
        == "i64[8 +fsdp] (max)"
    )
    anonymous = init_device_mesh("cpu", (2, 2))
    assert typeof(distribute_tensor(whole, anonymous, [Shard(1), Shard(0)])) == "i64[16@1 8@0]"
    assert "16@1" in visualize(distribute_tensor(whole, anonymous, [Shard(1), Shard(0)]))
    tp = distribute_tensor(whole, mesh["tp"], [Shard(0)])
    first = mesh.mesh.flatten()[2 * mesh.get_local_rank("fsdp")].item()
    text = visualize(tp)
    assert typeof(tp) == "i64[16@tp 8]" and f" {first} " in text and f" {first + 1} " in text


@on_meshes({"fsdp": 2, "tp": 2})
def test_typeof_what_fsdp2_makes(mesh: DeviceMesh) -> None:
    """Its strided shard over fsdp nests inside tp, though fsdp comes first in the mesh."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = parallelize_module(nn.Linear(6, 8), mesh["tp"], ColwiseParallel())
    fully_shard(model, mesh=mesh["fsdp"])
    assert isinstance(model.weight, DTensor)
    assert typeof(model.weight) == "f32[8@tp@fsdp 6]"
    local = model.weight.to_local()
    start = 4 * mesh.get_local_rank("tp") + 2 * mesh.get_local_rank("fsdp")
    assert torch.equal(local, model.weight.full_tensor()[start : start + 2])


def draw_rules() -> st.SearchStrategy[str]:
    dims = st.sampled_from(["ff@tp", "(h@tp d)", "(3 h@tp d)", "(q: h@tp d + k: kv@tp d)", "m@tp?"])
    rest = st.sampled_from(["c@fsdp", "_", "c@dp@fsdp"])
    return st.tuples(dims, rest).map(" ".join)


@given(
    rule=draw_rules(),
    tp=st.integers(1, 3),
    fsdp=st.integers(1, 5),
    dtype=st.sampled_from([torch.float16, torch.float8_e5m2]),
)
@settings(deadline=None)
def test_what_is_printed_can_be_read_again(rule: str, tp: int, fsdp: int, dtype: torch.dtype) -> None:
    rows = {"(q: h@tp d + k: kv@tp d)": 6 * 4 + 6 * 4}.get(rule.rpartition(" ")[0], 72)
    tensors = {"w": torch.zeros(rows, 7, dtype=dtype), "b": torch.zeros(3)}
    policy = sf.Policy(rules={"w": rule}, sizes={"h": 6, "d": 4} if "q:" in rule else {"h": 6})
    plan = sf.plan(tensors, sf.MeshSpec(dp=2, fsdp=fsdp, tp=tp), policy)
    for name in ("w", "b"):
        text = typeof(plan, name)
        assert parse(rule_of(text)) == plan.layouts[name].rule
        assert str(parse(rule_of(text))) == rule_of(text)
        assert all(max(map(len, picture.splitlines()[2:])) <= 66 for picture in [visualize(plan, name)])


@given(shape=st.lists(st.integers(0, 9), max_size=4).map(tuple))
def test_a_plain_tensor_prints_its_sizes(shape: tuple[int, ...]) -> None:
    text = typeof(torch.zeros(shape))
    assert text == f"f32[{' '.join(map(str, shape))}]"
    parse(rule_of(text)).expand(len(shape))
    assert "local" in visualize(torch.zeros(shape)) or not prod(shape)


def test_short_names_of_dtypes() -> None:
    names = (
        "float64 bfloat16 int8 int16 int32 uint8 uint64 bool complex64 float8_e4m3fn float8_e8m0fnu float4_e2m1fn_x2"
    )
    short = "f64 bf16 i8 i16 i32 u8 u64 bool c64 f8e4m3fn f8e8m0fnu f4e2m1fn_x2"
    assert " ".join(dtype_text(getattr(torch, name)) for name in names.split()) == short


def test_what_is_not_there() -> None:
    plan = sf.plan(Tied(), sf.MeshSpec(fsdp=2, tp=2), QKV)
    with pytest.raises(
        TypeError, match=r"Plan is a tree; pass the name of a parameter, for example typeof\(x, 'scale'\)"
    ):
        typeof(plan)
    with pytest.raises(TypeError, match=r"dict is a tree; pass the name of a parameter$"):
        typeof({})
    for see in (typeof, visualize):
        with pytest.raises(KeyError, match=r"no parameter 'wqkv\.wieght'; did you mean 'wqkv\.weight'"):
            see(plan, "wqkv.wieght")
        with pytest.raises(KeyError, match="no parameter 'a'"):
            see({"b": torch.zeros(1)}, "a")
        with pytest.raises(TypeError, match="got int"):
            see(3)
        with pytest.raises(TypeError, match="a tensor has no parameter 'w'"):
            see(torch.zeros(1), "w")
        with pytest.raises(TypeError, match="'step' is a int, not a tensor"):
            see({"step": 1}, "step")


def selected_on_a_rank() -> str:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("fsdp", "tp"))
    params = sf.shard(Tied(), mesh, QKV).select("embed.*")
    with pytest.raises(KeyError, match="no parameter 'scale'"):
        typeof(params, "scale")
    assert "wqkv" not in visualize(params)
    return typeof(params, "head.weight")


def test_a_part_of_a_tree() -> None:
    assert run(selected_on_a_rank, ranks=1) == ["f32[vocab@tp c@fsdp]"]


# ---------------------------------------------------------------------------------------------------------------------
# visualize


def planned(rule: str, shape: tuple[int, ...], **axes: int) -> sf.Plan:
    return sf.plan({"w": torch.zeros(shape)}, sf.MeshSpec(**axes), sf.Policy(rules={"w": rule}))


def test_picture_of_a_matrix() -> None:
    assert visualize(planned("ff@tp c@fsdp", (8, 6), fsdp=4, tp=2), "w") == (
        "w\n"
        "f32[ff@tp c@fsdp]  8 x 6  on fsdp=4, tp=2\n"
        "                           c@fsdp = 6\n"
        "            0            2            4            6\n"
        "          0 ┌────────────┬────────────┬────────────┐\n"
        "            │            │            │            │\n"
        "            │     0      │     2      │     4      │\n"
        "            │            │            │            │\n"
        "ff@tp = 8 4 ├────────────┼────────────┼────────────┤\n"
        "            │            │            │            │\n"
        "            │     1      │     3      │     5      │\n"
        "            │            │            │            │\n"
        "          8 └────────────┴────────────┴────────────┘"
    )


def test_picture_of_a_vector_and_of_a_scalar() -> None:
    tensors = {"b": torch.zeros(5), "s": torch.zeros(()), "e": torch.zeros(0, 3)}
    plan = sf.plan(tensors, sf.MeshSpec(replicate=2, fsdp=2), sf.Policy())
    vector, scalar, empty = visualize(plan).split("\n\n")
    assert vector.splitlines()[2:6] == [
        "          5@fsdp",
        "0            3            5",
        "┌────────────┬────────────┐",
        "│            │            │",
    ]
    assert "0,2" in vector and "1,3" in vector
    assert "0-3" in scalar and scalar.startswith("s\nf32[]  scalar  on replicate=2, fsdp=2\n┌─")
    assert empty == "e\nf32[0 3]  0 x 3  on replicate=2, fsdp=2\n(empty: there is nothing to hold)"


def test_large_meshes_fit_a_terminal() -> None:
    for rule in ("a@fsdp b@tp", "b@tp a@fsdp", "a@tp@fsdp b", "(1024 a@tp) b@fsdp"):
        lines = visualize(planned(rule, (8192, 8192), fsdp=512, tp=8), "w").splitlines()
        assert max(map(len, lines[2:])) <= 66 and len(lines) < 40, (rule, lines)
        assert any("…" in line for line in lines)
    last = visualize(planned("a@fsdp b", (512, 8), fsdp=512, tp=8), "w").splitlines()
    assert "4088-4095" in last[-2] and last[-1].lstrip().startswith("512 └")


def test_dims_that_are_not_drawn_are_told() -> None:
    plan = planned("e@ep a@tp b@fsdp", (2, 4, 4), ep=2, fsdp=2, tp=2)
    assert "dim 2 (b@fsdp) is split too: the ranks of a cell hold its slices, in order" in visualize(plan, "w")
    plan = planned("e a@tp b@fsdp", (3, 4, 4), fsdp=2, tp=2)
    assert "split too" not in visualize(plan, "w")  # what is split is drawn first


def test_like_parameters_share_a_picture() -> None:
    blocks = nn.ModuleList(nn.Linear(4, 8) for _ in range(3))
    text = visualize(sf.plan(blocks, sf.MeshSpec(fsdp=2), sf.Policy()))
    assert text.count("┌") == 2 and "{0..2}.weight\nf32[8@fsdp 4]" in text and "{0..2}.bias\nf32[8@fsdp]" in text
    assert visualize({}) == "(an empty tree)"


def test_short_texts() -> None:
    assert names_text(["a", "b", "c", "d", "e", "f"]) == ["a", "b", "c", "and 3 more"]
    assert names_text(["h0.w", "h1.w"]) == ["h0.w", "h1.w"]  # the numbers of segments only
    assert ranks_text([0, 1, 4, 5]) == "0,1,4,5" and ranks_text(range(2, 9)) == "2-8" and ranks_text([]) == "local"


def test_a_picture_in_a_file(tmp_path: Path) -> None:
    plan = sf.plan(numbered(), sf.MeshSpec(fsdp=2, tp=2), POLICY)
    assert visualize(plan, file=tmp_path / "layout.png") == visualize(plan)
    png = (tmp_path / "layout.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and len(png) > 10_000
    visualize(planned("a@fsdp b@tp", (300, 300), replicate=2, fsdp=64, tp=2), "w", file=str(tmp_path / "one.svg"))
    assert "<svg" in (tmp_path / "one.svg").read_text()
    visualize({}, file=tmp_path / "empty.png")
    visualize(torch.zeros(2, 3), file=tmp_path / "plain.png")
    assert "matplotlib.pyplot" not in sys.modules  # no global state


def test_a_place_without_a_layout_is_blank(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file: drawn.append(figure))
    visualize({f"p{n}": torch.zeros(n, n + 1) for n in (2, 3, 4)}, file="unused.png")
    assert [tile.axison for tile in drawn[0].axes] == [True, True, True, False]


def test_a_picture_has_a_tile_for_what_each_rank_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file: drawn.append(figure))
    visualize(planned("a@fsdp b@tp", (4, 6), fsdp=2, tp=2), "w", file="unused.png")
    visualize(planned("a@fsdp b", (0, 6), fsdp=2), "w", file="unused.png")
    assert [len(figure.axes[0].patches) for figure in drawn] == [4, 0]


def test_no_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install shardfn\[plot\]"):
        visualize(torch.zeros(1), file=tmp_path / "x.png")
