"""Parts by themselves: views and slices of runs."""

import pytest

from shardfn.layout.partition import NotRankByRank, Part, even, reshaped, sliced

FUSED = Part("split", 0, ((3, 2),))  # (3 x@tp): three blocks of two


@pytest.mark.parametrize(
    ("part", "shape", "new", "dims"),
    [
        (even(1, 8), (5, 8), (5, 2, 4), [(1, ((1, 2),)), (2, ((2, 4),))][:1]),
        (even(1, 8), (5, 8), (40,), [(0, ((5, 8),))]),
        (FUSED, (6, 4), (3, 2, 4), [(1, ((1, 2),))]),
        (FUSED, (6, 4), (6, 2, 2), [(0, ((3, 2),))]),
        (Part("split", 0, ((1, 4), (1, 2))), (6, 4), (3, 2, 4), [(0, ((1, 2), (1, 1)))]),
        (even(1, 1), (4, 1, 3), (4, 3), [(0, ((4, 1),)), (1, ((1, 3),))]),
    ],
)
def test_a_view(part: Part, shape: tuple[int, ...], new: tuple[int, ...], dims: list[tuple[int, object]]) -> None:
    ways = [(way.dim, way.runs) for way in reshaped(part, shape, new)]
    assert all(dim in ways for dim in dims), ways


@pytest.mark.parametrize(
    ("part", "shape", "new"),
    [(FUSED, (6, 4), (2, 3, 4)), (Part("split", 1, ((1, 4), (1, 2))), (2, 6), (12,)), (even(0, 0), (0, 4), (0,))],
)
def test_a_view_that_cuts_between_parts(part: Part, shape: tuple[int, ...], new: tuple[int, ...]) -> None:
    with pytest.raises(NotRankByRank):
        reshaped(part, shape, new)


def test_a_slice() -> None:
    assert sliced(FUSED, 2, 4).runs == ((2, 2),)
    assert sliced(Part("split", 0, ((1, 4), (1, 2))), 4, 2).runs == ((1, 2),)
    for start, length in ((1, 2), (0, 3)):
        with pytest.raises(NotRankByRank, match="cuts through"):
            sliced(FUSED, start, length)


def test_neighbours_of_one_size_are_one_run() -> None:
    assert Part("split", 0, ((1, 2), (2, 2), (1, 3))).runs == ((3, 2), (1, 3))
