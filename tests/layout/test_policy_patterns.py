"""Patterns against a matcher written the slow way, segment by segment."""

import pytest
from drawing import PROPERTY
from hypothesis import given
from hypothesis import strategies as st

from shardfn.layout.policy import compile_pattern, first_match, matches
from shardfn.notation.errors import ShardError


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        (
            "layers.*.weight",
            ["layers.0.weight", "layers..weight"],
            ["layers.0.1.weight", "layers.weight", "xlayers.0.weight"],
        ),
        (
            "layers.**.weight",
            ["layers.weight", "layers.0.weight", "layers.0.a.weight"],
            ["layersweight", "layers.xweight"],
        ),
        ("**.weight", ["weight", "a.weight", "a.b.weight"], ["aweight", "weight.a"]),
        ("layers.**", ["layers", "layers.0", "layers.0.a"], ["layersx"]),
        ("**", ["", "a", "a.b.c"], []),
        ("**.**", ["a", "a.b"], []),
        ("*.{wq,wk}.weight", ["a.wq.weight", "a.wk.weight"], ["a.wqwk.weight", "a.wv.weight"]),
        ("w*_**x", ["w1_x", "w1_a.b.x"], ["w.1_x"]),
        ("a+b", ["a+b"], ["aab"]),
        (r"re:layers\.(\d+)\.w", ["layers.12.w"], ["layers.a.w", "layers.1.w.b"]),
    ],
)
def test_what_a_pattern_matches(pattern: str, yes: list[str], no: list[str]) -> None:
    assert [name for name in yes if not matches(pattern, name)] == []
    assert [name for name in no if matches(pattern, name)] == []


@pytest.mark.parametrize(
    ("pattern", "why"), [("a{b", "'{' without its pair"), ("a}b", "'}' without its pair"), ("re:(", "re:")]
)
def test_a_pattern_that_cannot_be_read(pattern: str, why: str) -> None:
    with pytest.raises(ShardError, match=f"bad pattern '.*{why}"):
        compile_pattern(pattern)


def slow_match(pattern: list[str], name: list[str]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(slow_match(pattern[1:], name[i:]) for i in range(len(name) + 1))
    return bool(name) and (pattern[0] in ("*", name[0])) and slow_match(pattern[1:], name[1:])


SEGMENTS = st.sampled_from(["a", "b", "*", "**"])


@PROPERTY
@given(st.lists(SEGMENTS, min_size=1, max_size=5), st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=5))
def test_patterns_match_segment_by_segment(pattern: list[str], name: list[str]) -> None:
    assert matches(".".join(pattern), ".".join(name)) == slow_match(pattern, name)


def test_the_first_pattern_wins() -> None:
    rules = {"*.b": 1, "a.*": 2}
    assert first_match(rules, ["a.b"]) == "*.b"
    assert first_match(rules, ["a.c"]) == "a.*"
    assert first_match(rules, ["x", "a.c"]) == "a.*", "any of the names counts"
    assert first_match(rules, ["x.y"]) is None
