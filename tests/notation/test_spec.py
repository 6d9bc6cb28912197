"""The notation: a round trip over the whole grammar, carets, and the sizes that names stand for."""

import pytest
from drawing import PROPERTY
from hypothesis import given
from hypothesis import strategies as st

from shardfn.notation.errors import ShardError
from shardfn.notation.spec import Block, Dim, Factor, Sizes, Spec, parse, repeated_axes

# Law: parse(str(parse(rule))) == parse(rule)

NAMES = st.sampled_from(["c", "ff", "heads", "_", "_x", "b2", "3", "0", "128"])
AXES = st.lists(st.sampled_from(["tp", "fsdp", "dp_shard"]), max_size=2, unique=True).map(tuple)
SPACE = st.sampled_from(["", " ", "  "])


@st.composite
def factor_texts(draw: st.DrawFn) -> str:
    text = draw(NAMES)
    for axis in draw(AXES):
        text += f"{draw(SPACE)}@{draw(SPACE)}{axis}"
    return text + draw(st.sampled_from(["", "", "?", " ?"]))


@st.composite
def dim_texts(draw: st.DrawFn, fused: bool) -> str:
    if not fused and draw(st.booleans()):
        return draw(factor_texts())
    parts = []
    for i in range(draw(st.integers(2, 3)) if fused else 1):
        label = draw(st.sampled_from(["", f"q{i}:", f"q{i} : "]))
        parts.append(label + draw(SPACE) + " ".join(draw(st.lists(factor_texts(), min_size=1, max_size=3))))
    return "(" + draw(SPACE) + f"{draw(SPACE)}+{draw(SPACE)}".join(parts) + draw(SPACE) + ")"


@st.composite
def rule_texts(draw: st.DrawFn) -> str:
    count = draw(st.integers(0, 4))
    fused = draw(st.integers(-2, count - 1))
    dims = [draw(dim_texts(at == fused)) for at in range(count)]
    if draw(st.integers(0, 3)) == 0:
        dims.insert(draw(st.integers(0, len(dims))), "...")
    partial = draw(st.lists(st.sampled_from(["pp", "cp"]), max_size=2, unique=True))
    return draw(SPACE) + " ".join([*dims, *(["+" + ",".join(partial)] if partial else [])]) + draw(SPACE)


@PROPERTY
@given(rule_texts())
def test_what_is_printed_is_what_is_read(text: str) -> None:
    try:
        spec = parse(text)
    except ShardError as error:
        assert "is used 2 times" in str(error) or "times; an axis can split at most one factor" in str(error), error
        return
    again = parse(str(spec))
    assert again == spec and str(again) == str(spec)
    for factor in spec.factors:
        start, end = factor.span
        assert text[start:end].replace(" ", "").startswith(factor.name), "a caret finds its factor"


def test_the_tree_of_a_rule() -> None:
    spec = parse("(q: heads@tp d + k: kv@tp? d) c@tp2@fsdp 3 _ ... +dp,pp")
    q = Block((Factor("heads", ("tp",)), Factor("d")), "q")
    k = Block((Factor("kv", ("tp",), True), Factor("d")), "k")
    plain = [Dim((Block((f,)),)) for f in (Factor("c", ("tp2", "fsdp")), Factor("3"), Factor("_"))]
    assert spec == Spec((Dim((q, k)), *plain, Dim(())), ("dp", "pp"))
    assert parse("") == Spec(()) and parse("+tp") == Spec((), ("tp",))


@pytest.mark.parametrize(
    ("rule", "why", "at"),
    [
        ("ff@tp c$", "unexpected character '$'", 7),
        ("ff@ c", None, None),
        ("ff@", "expected a mesh axis after '@'", 3),
        ("ff @(", "expected a mesh axis after '@'", 4),
        ("(ff c", "expected ')'", 5),
        ("()", "expected a name, a number or '_'", 1),
        ("(q: + k: a)", "expected a name, a number or '_'", 4),
        ("a) b", "expected a name, a number, '_', '(' or '...'", 1),
        ("a +tp b", "nothing may follow the pending sum", 6),
        ("a +", "expected a mesh axis after '+'", 3),
        ("... a ...", "'...' may stand only once", 6),
        ("(a + b) (c + d)", "only one dim of a tensor may be fused of blocks", 8),
        ("(q: a + q: b)", "two blocks have the same label", 0),
        ("a@tp b@tp", "mesh axis 'tp' is used 2 times", 5),
        ("(a@tp b@tp)", "mesh axis 'tp' is used 2 times", 6),
        ("(a@tp b@tp + c@tp)", "mesh axis 'tp' is used 2 times", 6),
        ("a@tp +tp", "mesh axis 'tp' is used 2 times", 5),
        ("a +tp,tp", "mesh axis 'tp' is used 2 times", 2),
    ],
)
def test_a_bad_rule_shows_where(rule: str, why: str | None, at: int | None) -> None:
    if why is None:
        assert str(parse(rule)) == "ff@c"
        return
    with pytest.raises(ShardError) as caught:
        parse(rule)
    lines = str(caught.value).split("\n")
    assert why in lines[0] and lines[1] == f"    {rule}"
    assert lines[2].index("^") - 4 == at


def test_a_rule_is_a_string() -> None:
    with pytest.raises(TypeError, match="a rule is a string such as 'ff@tp c@fsdp', not int"):
        parse(3)


def test_blocks_may_share_an_axis() -> None:
    assert repeated_axes(parse("(q: a@tp + k: b@tp) c")) == []


def test_dots_stand_for_any_number_of_dims() -> None:
    assert str(parse("a@tp ... b").expand(4)) == "a@tp _ _ b"
    assert str(parse("a ...").expand(1)) == "a"
    assert str(parse("a b").expand(2)) == "a b"
    with pytest.raises(ShardError, match=r"the rule has at least 2 dims, the tensor has 1\n    a ... b\n    \^{7}"):
        parse("a ... b").expand(1)
    with pytest.raises(ShardError, match=r"the rule has 2 dims, the tensor has 3\n    a b\n    \^\^\^"):
        parse("a b").expand(3)


# Sizes


def solved(given: dict[str, int], **tensors: tuple[str, tuple[int, ...]]) -> tuple[Sizes, list[tuple[str, str]]]:
    sizes = Sizes(given)
    for name, (rule, shape) in tensors.items():
        sizes.add(name, parse(rule), shape)
    return sizes, sizes.solve()


def test_names_are_inferred_across_tensors() -> None:
    sizes, problems = solved(
        {}, w=("(heads d) c", (12, 7)), b=("heads", (4,)), q=("(q: heads d + k: kv d + v: kv d) c", (24, 7))
    )
    assert not problems and sizes.known == {"heads": 4, "c": 7, "d": 3, "kv": 2}
    sizes, problems = solved({}, w=("(3 _ 2)", (12,)), v=("(3 _)", (12,)))
    assert not problems
    assert sizes.of("w", parse("(3 _ 2)")) == [3, 2, 2] and sizes.of("v", parse("(3 _)")) == [3, 4]
    sizes, problems = solved({"a": 2, "b": 3}, w=("(a + b + k)", (9,)), v=("(a + b)", (5,)))
    assert not problems and sizes.known["k"] == 4
    sizes, problems = solved({"c": 0}, w=("c d", (0, 3)))
    assert not problems and sizes.known["d"] == 3


def test_a_clash_names_both_parameters() -> None:
    _, problems = solved({}, up=("ff c", (12, 7)), down=("c ff", (8, 12)))
    why = (
        "down: dim 0 of size 8 does not match 7: c=7 (from up); a name has one size, so write another one here, or '_'"
    )
    assert problems == [("down", f"{why}\n    c ff\n    ^")]
    _, problems = solved({"c": 6}, up=("c", (7,)))
    assert problems[0][1].startswith("up: dim 0 of size 7 does not match 6: c=6 (from Policy.sizes)")
    _, problems = solved({}, up=("4", (7,)))
    assert problems[0][1].startswith("up: dim 0 of size 7 does not match 4\n")


def test_what_does_not_divide() -> None:
    _, problems = solved({}, d=("d", (4,)), w=("(heads d)", (10,)))
    assert problems == [
        ("w", "w: a dim of size 10 is not 4 x heads: 10 % 4 = 2: d=4 (from d)\n    (heads d)\n    ^^^^^^^^^")
    ]
    _, problems = solved({"d": 4}, w=("(3 d + k d)", (10,)))
    assert "a dim of size 10 is not 4 x k + 12: 10 < 12: d=4 (from Policy.sizes)" in problems[0][1]
    _, problems = solved({}, w=("(3 + k 4)", (10,)))
    assert "(10 - 3) % 4 = 3" in problems[0][1]


def test_what_cannot_be_inferred() -> None:
    _, problems = solved({}, w=("(heads d) c", (12, 7)))
    want = "w: cannot infer heads, d from a dim of size 12; pass sizes={'heads': ...}\n    (heads d) c\n    ^^^^^^^^^"
    assert problems == [("w", want)]
    _, problems = solved({}, w=("(h h)", (9,)))
    assert "cannot infer h from a dim of size 9; pass sizes={'h': ...}" in problems[0][1]
    _, problems = solved({"d": 0}, w=("(_ d)", (0,)))
    assert "cannot infer _ from a dim of size 0; write a number or a name for it" in problems[0][1]
    _, problems = solved({}, w=("(_ d)", (12,)), v=("e", (3,)))
    assert "pass sizes={'d': ...}" in problems[0][1]
