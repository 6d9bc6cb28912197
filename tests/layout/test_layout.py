"""`layout/layout.py`: leaves and compute views of a tensor, checked on every coordinate of a mesh without processes."""

from itertools import product

import pytest
import torch
from drawing import DTYPES, PROPERTY, Case, assert_same_bits, cases, hold_here
from hypothesis import given
from torch import Tensor

import shardfn as sf
from shardfn.layout.layout import (
    clear_padding_,
    compute_view,
    compute_view_shape,
    from_compute_view,
    local_boxes,
    local_slice,
    narrowed,
    runs,
    to_leaves,
)


def assert_arithmetic(case: Case) -> None:
    layouts = case.layouts[0]
    plan = sf.plan(case.tensors(), sf.MeshSpec(**dict(layouts.axes)), layouts.policy())
    for name, full in case.tensors().items():
        layout = plan.layouts[name]
        wholes = to_leaves(layout, full)
        for leaf, whole in zip(layout.leaves, wholes, strict=True):
            assert tuple(whole.shape) == leaf.shape
        assert_same_bits(compute_view(layout, wholes), full, name)
        if full.is_floating_point() or full.dtype == torch.bool:
            continue  # integers show where every element went
        for coords in all_coordinates(plan):
            assert_parts(plan, name, wholes, coords)


def all_coordinates(plan: sf.Plan) -> list[dict[str, int]]:
    return [dict(zip(plan.axes, at, strict=True)) for at in product(*(range(n) for n in plan.axes.values()))]


def assert_parts(plan: sf.Plan, name: str, wholes: list[Tensor], coords: dict[str, int]) -> None:
    layout, data = plan.layouts[name], plan.roles.data
    gathered = [
        local_slice(leaf, whole, plan.axes, coords, plan.roles.compute)
        for leaf, whole in zip(layout.leaves, wholes, strict=True)
    ]
    seen = compute_view(layout, gathered)
    assert tuple(seen.shape) == compute_view_shape(layout, data, plan.axes)
    for leaf, back, want in zip(layout.leaves, from_compute_view(layout, seen, data, plan.axes), gathered, strict=True):
        assert_same_bits(back, want, name)
        assert tuple(want.shape) == leaf.local_shape(plan.axes, coords, plan.roles.compute)
    for leaf, whole in zip(layout.leaves, wholes, strict=True):
        chunks = whole  # by torch.chunk, one axis after another
        for axis in (*plan.roles.compute, *data):
            dim = leaf.split_dim(axis)
            if dim is not None:
                step = -(-chunks.shape[dim] // plan.axes[axis])
                chunks = chunks[(slice(None),) * dim + (slice(step * coords[axis], step * (coords[axis] + 1)),)]
        mine = local_slice(leaf, whole, plan.axes, coords)
        assert_same_bits(mine, chunks, name)
        ones = local_slice(
            leaf, to_leaves(layout, torch.ones(layout.shape))[layout.leaves.index(leaf)], plan.axes, coords
        )
        cleared = torch.full(mine.shape, 1.0)
        clear_padding_(leaf, cleared, plan.axes, coords)
        assert_same_bits(cleared, ones.contiguous(), name)


@PROPERTY
@given(cases(dtypes=("int64", "int64", *DTYPES)))
def test_leaves_and_views_are_inverse(case: Case) -> None:
    assert_arithmetic(case)


def boxes_are_disjoint_and_cover(case: Case) -> None:
    """Every number of a tensor is in one box of one leaf of each rank that differs in other axes, and has its place."""
    layouts = case.layouts[0]
    plan = sf.plan(case.tensors(), sf.MeshSpec(**dict(layouts.axes)), layouts.policy())
    for layout in plan.layouts.values():
        numbered = torch.arange(layout.numel).view(layout.shape)
        covered = torch.zeros(layout.shape, dtype=torch.int64)
        for leaf, whole in zip(layout.leaves, to_leaves(layout, numbered), strict=True):
            for coords in all_coordinates(plan):
                part = local_slice(leaf, whole, plan.axes, coords)
                merged = part.reshape(leaf.merged(part.shape))
                first_of_its_kind = all(coords[axis] == 0 for axis in plan.axes if axis not in leaf.axes)
                for box, here in local_boxes(layout, leaf, plan.axes, coords):
                    assert narrowed(numbered, box).equal(narrowed(merged, here)), (layout.name, coords, box, here)
                    assert narrowed(numbered, box).numel(), "an empty box"
                    narrowed(covered, box).add_(int(first_of_its_kind))
        assert (covered == 1).all(), (layout.name, covered)


@pytest.mark.law("P2")
def test_boxes_are_disjoint_and_cover() -> None:
    hold_here(boxes_are_disjoint_and_cover, cases())


def test_the_leaves_of_a_fused_weight() -> None:
    policy = sf.Policy(rules={"w": "(3 heads@tp d) c@fsdp", "g": "(q: h@tp d + k: kv@tp d) c@fsdp"}, sizes={"d": 2})
    model = {"w": torch.arange(24 * 3).view(24, 3), "g": torch.arange(24).view(12, 2)}
    plan = sf.plan(
        model,
        sf.MeshSpec(fsdp=2, tp=2),
        policy | sf.Policy(sizes={"h": 4, "heads": 4}, rules={"g": "(q: h@tp d + k: kv@tp d) e@fsdp"}),
    )
    leaf = plan.layouts["w"].leaves[0]
    assert leaf.shape == (3, 4, 2, 3) and leaf.splits == ((), ("tp",), (), ("fsdp",)) and leaf.merges == (3, 1)
    assert leaf.axes == ("tp", "fsdp") and leaf.split_dim("tp") == 1 and leaf.split_dim("pp") is None
    assert leaf.local_range(plan.axes, {"tp": 1, "fsdp": 1}) == ((0, 3), (2, 2), (0, 2), (2, 1))
    assert not plan.layouts["w"].plain and plan.layouts["w"].model_axes(0) == ("tp",) and plan.layouts["w"].numel == 72
    assert [leaf.name for leaf in plan.layouts["g"].leaves] == ["g[q]", "g[k]"]
    assert [leaf.shape for leaf in plan.layouts["g"].leaves] == [(8, 2), (4, 2)], "whole outer factors stay flat"
    gathered = [
        local_slice(x, w, plan.axes, {"tp": 1, "fsdp": 0}, ("tp",))
        for x, w in zip(plan.layouts["g"].leaves, to_leaves(plan.layouts["g"], model["g"]), strict=True)
    ]
    assert compute_view(plan.layouts["g"], gathered)[:, 0].tolist() == [8, 10, 12, 14, 20, 22]


def test_padding_stays_where_a_compute_axis_splits() -> None:
    policy = sf.Policy(rules={"w": "vocab@tp c@fsdp"}, pad={"vocab": 4, "c": 4})
    plan = sf.plan({"w": torch.ones(5, 3)}, sf.MeshSpec(fsdp=2, tp=2), policy)
    layout = plan.layouts["w"]
    assert layout.leaves[0].shape == (8, 4) and layout.leaves[0].extent == (5, 3) and not layout.plain
    assert compute_view_shape(layout, ("fsdp",), plan.axes) == (4, 3)
    assert compute_view(layout, [torch.ones(4, 4)]).shape == (4, 3)
    cleared = torch.ones(4, 4)
    clear_padding_(layout.leaves[0], cleared, plan.axes, {"tp": 1, "fsdp": 0}, ("tp",))
    assert cleared.tolist() == [[1, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_a_stacked_weight_of_blocks_keeps_all_of_them() -> None:
    weights = {"w": torch.ones(6, 4)}
    plan = sf.plan(weights, sf.MeshSpec(fsdp=1), sf.Policy(rules={"w": "(q: 2 + k: 4) c@fsdp"}))
    many = plan.stacked(3, ())
    assert str(many.layouts["w"].rule) == "b (q: 2 + k: 4) c@fsdp" and "b (q: 2 + k: 4)" in str(sf.typeof(many, "w"))
    assert many.member(()).layouts["w"].rule == plan.layouts["w"].rule


def test_runs_of_a_dim_with_padding_inside() -> None:
    """Three of four stored elements, twice: they are no neighbours in the rank's part."""
    assert list(runs((2, 3), [(0, 2), (0, 4)])) == [(0, 3, 0), (3, 3, 4)]
    assert list(runs((2, 3), [(0, 2), (0, 3)])) == [(0, 6, 0)]
