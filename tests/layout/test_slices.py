"""`layout/slices.py`: what goes from whom to whom, element by element against the tensors, without processes."""

from collections import Counter
from time import perf_counter

import torch
from drawing import MESHES, PROPERTY, Layouts, layouts_for, whole_forward
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import shardfn as sf
from shardfn.layout.layout import local_slice, narrowed, to_leaves
from shardfn.layout.mesh import Ranks
from shardfn.layout.slices import Held, Slice, as_runs, overlaps, received, sent


@st.composite
def moves(draw: st.DrawFn) -> tuple[tuple[int, ...], Layouts, Layouts, int]:
    """A shape, two layouts on as many ranks or on others, and the number of the first of the new ranks."""
    shape = tuple(draw(st.integers(0, 9)) for _ in range(draw(st.integers(0, 4))))
    old, new = (draw(layouts_for([shape], draw(st.sampled_from([*MESHES])))) for _ in range(2))
    return shape, old, new, draw(st.sampled_from([0, 0, 2, 7]))


def held(shape: tuple[int, ...], layouts: Layouts, first: int = 0) -> Held:
    axes = dict(layouts.axes)
    layout = sf.plan({"t0": torch.empty(shape)}, sf.MeshSpec(**axes), layouts.policy()).layouts["t0"]
    count = sf.MeshSpec(**axes).size
    return Held(layout, Ranks(sizes=axes, ranks=(*range(first, first + count),)))


def parts(held: Held, full: Tensor, rank: int) -> dict[str, Tensor]:
    """What a rank has, by names of leaves, with the dims of the model."""
    out: dict[str, Tensor] = {}
    for leaf, whole in zip(held.layout.leaves, to_leaves(held.layout, full), strict=True):
        local = local_slice(leaf, whole, held.ranks.sizes, held.ranks.coords_of[rank]).contiguous()
        out[leaf.name] = local.view(leaf.merged(local.shape))
    return out


def elements(x: Tensor) -> set[int]:
    return {*x.flatten().tolist()} - {0}


@PROPERTY
@given(moves())
def test_every_element_comes_once_from_one_that_has_it(move: tuple[tuple[int, ...], Layouts, Layouts, int]) -> None:
    shape, *layouts, first = move
    old, new = held(shape, layouts[0]), held(shape, layouts[1], first)
    full = torch.arange(1, torch.Size(shape).numel() + 1).view(shape)  # zeros are padding
    have = {rank: parts(old, full, rank) for rank in old.ranks.ranks}
    messages = list[Slice]()
    for rank in new.ranks.ranks:
        want = parts(new, full, rank)
        got = {name: torch.zeros_like(x) for name, x in want.items()}
        own = set().union(*map(elements, have.get(rank, {}).values()))
        for part in received(old, new, rank):
            value = narrowed(have[part.source][part.leaf.name], part.there)
            assert value.numel() and value.equal(narrowed(full, part.box))
            place = narrowed(got[part.into.name], part.here)
            assert part.target == rank and not place.any(), "an element comes once"
            assert (part.source == rank) == (elements(value) <= own), "what a rank has it does not get from others"
            assert part.source == rank or elements(value).isdisjoint(own)
            place.copy_(value)
            messages += [part] * (part.source != rank)
        for name, value in want.items():
            assert got[name].equal(value), name
    found = [part for rank in old.ranks.ranks for part in sent(old, new, rank)]
    assert Counter(found) == Counter(messages)
    for a, b in {(part.source, part.target) for part in messages}:  # in the same order on both
        assert [x for x in sent(old, new, a) if x.target == b] == [x for x in received(old, new, b) if x.source == a]


def one(rule: str, shape: tuple[int, ...], **axes: int) -> Held:
    layout = sf.plan({"w": torch.empty(shape, device="meta")}, sf.MeshSpec(**axes), _policy(rule)).layouts["w"]
    return Held(layout, Ranks(sizes=axes, ranks=(*range(sf.MeshSpec(**axes).size),)))


def _policy(rule: str) -> sf.Policy:
    return sf.Policy(rules={"w": rule}, compute={"**": whole_forward})


def test_replicas_take_turns() -> None:
    rows, whole = one("a@fsdp b", (8, 2), replicate=4, fsdp=2), one("a b", (8, 2), replicate=4, fsdp=2)
    sends = Counter(part.source for rank in range(8) for part in received(rows, whole, rank) if part.source != rank)
    assert sends == dict.fromkeys(range(8), 1)
    firsts = {part.source for name in "abcdefgh" for part in received(*_to_first(f"w.{name}"), 0)}
    assert firsts == {0, 1, 3, 5, 7}, "the first rank asks another of those that have the same for each parameter"


def _to_first(name: str) -> tuple[Held, Held]:
    spec, policy = sf.MeshSpec(replicate=4, fsdp=2), sf.Policy()
    layout = sf.plan({name: torch.empty(8, 2)}, spec, policy).layouts[name]
    return Held(layout, Ranks(sizes=spec.axes, ranks=(*range(8),))), Held(
        layout.without(layout.axes), Ranks(sizes={}, ranks=(0,))
    )


def test_boxes_that_overlap() -> None:
    assert [*overlaps(as_runs(((1, 3), (0, 5))), as_runs(((2, 9), (4, 4))))] == [
        (((2, 2), (4, 1)), ((1, 2), (4, 1)), ((0, 2), (0, 1)))
    ]
    assert not [*overlaps(as_runs(((1, 3), (0, 5))), as_runs(((4, 9), (4, 4))))]
    assert [*overlaps([], [])] == [((), (), ())]


def test_a_plan_for_4096_ranks() -> None:
    shape = (8192, 8192)
    there = one("a@fsdp b", shape, fsdp=4096)
    began = perf_counter()
    for new, numel in (
        (one("a@tp b@fsdp", shape, fsdp=512, tp=8), 2**26 // 4096),
        (one("(2 a@tp 512) b", shape, tp=8, replicate=512), 2**26 // 8),
        (one("a b@fsdp", shape, fsdp=4096), 2**26 // 4096),
    ):
        for rank in (0, 1234, 4095):
            parts_ = [*received(there, new, rank)]
            assert sum(torch.Size([n for _, n in part.box]).numel() for part in parts_) == numel
            assert len(parts_) >= 512 and [*sent(there, new, rank)]
    assert perf_counter() - began < 10, "seconds, of which it takes 0.2"
