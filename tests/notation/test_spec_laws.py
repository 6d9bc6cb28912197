"""One notation: what is written, what `typeof` prints and what an error points at are the same text."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import pytest
import torch
from drawing import PROPERTY, Case, cases, hold_for_all
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import shardfn as sf
from shardfn.inspect.views import typeof
from shardfn.notation.spec import Block, Dim, Factor, Spec, parse
from shardfn.testing import on_meshes

# Drawing: first the rule, then a way to write it


NAMES = st.sampled_from(["c", "ff", "heads", "_", "_x", "b2", "été", "3", "0", "128"])
AXES = ["tp", "fsdp", "dp_shard", "0", "12"]


@dataclass(frozen=True)
class Written:
    """The tokens of a rule, what stands before each of them, and what after the last."""

    tokens: tuple[str, ...]
    blanks: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(blank + token for blank, token in zip(self.blanks, (*self.tokens, ""), strict=True))

    def span(self, first: int, last: int | None = None) -> tuple[int, int]:
        """Where the tokens from `first` to `last` stand in the text."""
        lengths = [len(blank) + len(token) for blank, token in zip(self.blanks, (*self.tokens, ""), strict=True)]
        start = sum(lengths[:first]) + len(self.blanks[first])
        return start, max(start + 1, sum(lengths[: (first if last is None else last) + 1]))


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Any rule of the grammar."""
    count = draw(st.integers(0, 4))
    fused = draw(st.integers(-3, count - 1))
    free = draw(st.permutations(AXES))
    dims: list[Dim] = []
    for at in range(count):
        here, free = free[: (cut := draw(st.integers(0, 2)))], free[cut:]
        blocks = []
        for index in range(draw(st.integers(2, 3)) if at == fused else 1):
            label = draw(st.sampled_from([None, f"q{index}"]))
            size = draw(st.integers(1, 3))
            where = [(axis, draw(st.integers(0, size - 1))) for axis in here]
            factors = [
                Factor(draw(NAMES), tuple(axis for axis, place in where if place == i), draw(st.integers(0, 3)) == 0)
                for i in range(size)
            ]
            blocks.append(Block(tuple(factors), label))
        dims.append(Dim(tuple(blocks)))
    if draw(st.integers(0, 3)) == 0:
        dims.insert(draw(st.integers(0, len(dims))), Dim(()))
    return Spec(tuple(dims), tuple(free[: draw(st.integers(0, 2))]))


def tokens_of(spec: Spec) -> Iterator[str]:
    for dim in spec.dims:
        yield from dim_tokens(dim)
    for i, axis in enumerate(spec.partial):
        yield from (",+"[i == 0], axis)


def dim_tokens(dim: Dim) -> Iterator[str]:
    bare = len(dim.blocks) == 1 and len(dim.factors) == 1 and not dim.blocks[0].label
    if not dim.blocks:
        yield "..."
    elif not bare:
        yield "("
    for i, block in enumerate(dim.blocks):
        yield from ["+"] if i else []
        yield from [block.label, ":"] if block.label else []
        for factor in block.factors:
            yield from factor_tokens(factor)
    if dim.blocks and not bare:
        yield ")"


def factor_tokens(factor: Factor) -> Iterator[str]:
    yield factor.name
    for axis in factor.axes:
        yield from ("@", axis)
    yield from ["?"] if factor.optional else []


@st.composite
def written(draw: st.DrawFn, tokens: Sequence[str]) -> Written:
    """A way to write the tokens: any blanks, and one at least between two words."""
    blanks = [draw(st.sampled_from(["", "", " ", "  ", "\t", "\n "])) for _ in range(len(tokens) + 1)]
    for i in range(1, len(tokens)):
        if not blanks[i] and tokens[i - 1][-1:].isalnum() | tokens[i - 1].endswith("_") and re.match(r"\w", tokens[i]):
            blanks[i] = " "
    return Written(tuple(tokens), tuple(blanks))


def shown(error: BaseException) -> list[tuple[str, tuple[int, int]]]:
    """The rules that a message shows, each with what its caret marks."""
    lines = str(error).split("\n")
    found = []
    for rule, mark in pairwise(lines):
        if rule.startswith("    ") and re.fullmatch(r"     *\^+", mark):
            found.append((rule[4:], (mark.index("^") - 4, len(mark) - 4)))
    return found


def one_line(text: str) -> str:
    """A rule as an error shows it: every kind of blank is one."""
    return re.sub(r"\s", " ", text)


# The rule string


@PROPERTY
@given(st.data())
def test_a_rule_is_read_as_it_was_meant_and_printed_as_it_is_read(data: st.DataObject) -> None:
    meant = data.draw(specs())
    way = data.draw(written(list(tokens_of(meant))))
    spec = parse(way.text)
    assert spec == meant and spec.source == way.text
    assert parse(str(spec)) == spec, "law: parse(format(rule)) == rule"
    assert str(parse(str(spec))) == str(spec) == " ".join(str(spec).split()), "law: formatting is idempotent"
    assert re.sub(r"\s", "", str(spec)) == "".join(way.tokens), "nothing is added or lost"
    for part in (*spec.factors, *spec.dims):
        assert re.sub(r"\s", "", way.text[slice(*part.span)]).strip("()") == re.sub(r"\s", "", str(part)).strip("()")


# The caret


def break_token(data: st.DataObject, tokens: list[str]) -> tuple[list[str], int, int, str] | None:
    """Tokens with something wrong, the first and last token that the caret has to mark, and why."""
    kind = data.draw(st.sampled_from(["character", "axis", "open", "after the sum", "dots", "labels", "twice"]))
    at = data.draw(st.integers(0, len(tokens)))
    if kind == "character":
        return [*tokens[:at], data.draw(st.sampled_from("$!-=[.")), *tokens[at:]], at, at, "unexpected character"
    if kind == "axis" and "@" in tokens:
        at = data.draw(st.sampled_from([i for i, token in enumerate(tokens) if token == "@"])) + 1
        return [*tokens[:at], "@", *tokens[at:]], at, at, "expected a mesh axis after '@'"
    if kind == "open" and "+" not in tokens and "..." not in tokens:
        return [*tokens, "(", "a"], len(tokens) + 2, len(tokens) + 2, "expected ')'"
    if kind == "after the sum":
        before = tokens if is_sum(tokens) else [*tokens, "+", "pp"]
        return [*before, "a"], len(before), len(before), "nothing may follow the pending sum"
    if kind == "dots" and not is_sum(tokens):
        dots = ["..."] * (1 if "..." in tokens else 2)
        last = len(tokens) + len(dots) - 1
        return [*tokens, *dots], last, last, "'...' may stand only once"
    if kind == "labels" and not any(token in ("+", ":") for token in tokens):
        end = len(tokens)
        return [*tokens, *"( q : a + q : b )".split()], end, end + 8, "two blocks have the same label"
    if kind == "twice" and not is_sum(tokens):
        end = len(tokens)
        return [*tokens, *"a @ pp b @ pp".split()], end + 3, end + 5, "mesh axis 'pp' is used 2 times"
    return None


def is_sum(tokens: Sequence[str]) -> bool:
    """Whether a pending sum ends the rule."""
    return "+" in tokens and ")" not in tokens[len(tokens) - 1 - tokens[::-1].index("+") :]


@PROPERTY
@given(st.data())
def test_the_caret_stands_under_what_cannot_be_read(data: st.DataObject) -> None:
    broken = break_token(data, list(tokens_of(data.draw(specs()))))
    if broken is None:
        return
    tokens, first, last, why = broken
    way = data.draw(written(tokens))
    with pytest.raises(sf.ShardError, match=re.escape(why)) as caught:
        parse(way.text)
    [(rule, span)] = shown(caught.value)
    assert rule == one_line(way.text), "the rule as it was written"
    assert span == (way.span(first, last) if last < len(tokens) else (len(way.text), len(way.text) + 1))


@PROPERTY
@given(st.data())
def test_the_caret_stands_under_what_a_plan_refuses(data: st.DataObject) -> None:
    """Rules `ff@tp@fsdp`, one of them wrong, written with any blanks."""
    tokens, sizes = data.draw(st.sampled_from([("( 3 ff @ fsdp ? )", (12,)), ("ff @ fsdp c", (4, 6)), ("...", (4, 6))]))
    wrong, size, why = data.draw(
        st.sampled_from(
            [
                ("e @ nope", 4, "unknown mesh axis 'nope'"),
                ("( 2 e @ tp @ nope )", 4, "unknown mesh axis 'nope'"),
                ("e @ 0", 4, "unknown mesh axis '0'"),
                ("e @ replicate", 4, "weights never shard over 'replicate'"),
                ("e @ tp", 7, "7 % 2 = 1"),
                ("5", 7, "of size 7 does not match 5"),
                ("( e 2 )", 7, "7 % 2 = 1"),
                ("( e f )", 8, "cannot infer e, f"),
                ("+ tp", 0, "a parameter cannot be a pending sum"),
            ]
        )
    )
    # Within a dim of several factors, one of them is named when its axes are wrong, and all of it when its size is.
    inner = wrong.startswith("( 2")
    middle = wrong.split()
    at = len(tokens.split())
    way = data.draw(written([*tokens.split(), *middle]))
    shape = (*sizes, size) if size else sizes
    mesh = sf.MeshSpec(replicate=2, fsdp=2, tp=2)
    with pytest.raises(sf.ShardError, match=re.escape(why)) as caught:
        sf.plan({"w": torch.empty(shape)}, mesh, sf.Policy(rules={"w": way.text}))
    marked = dict(shown(caught.value))
    span = way.span(at + 2, at + len(middle) - 2) if inner else way.span(at, at + len(middle) - 1)
    assert marked == {one_line(way.text): span}


@pytest.mark.parametrize("blanks", ["", " ", "   "])
def test_the_caret_of_other_texts(blanks: str) -> None:
    """Layouts of activations and sizes of modules, which are pairs of rules or end in a sum."""
    torch_linear = torch.nn.Sequential(torch.nn.Linear(4, 6))

    def message(policy: sf.Policy) -> str:
        with pytest.raises(sf.ShardError) as caught:
            sf.plan(torch_linear, sf.MeshSpec(fsdp=2, tp=2), policy)
        return str(caught.value)

    rules = {"0.weight": "(heads 2) c"}
    for text, wrong in {
        f"b{blanks} s@nope": "s@nope",
        f"{blanks}b s{blanks} +nope": "+nope",
        f"b {blanks}s@": " ",
    }.items():
        [(rule, (start, stop))] = shown(Exception(message(sf.Policy(acts={"0": text}))))
        assert rule == text and (text + " ")[start:stop] == wrong
    for text, wrong in {
        f"{blanks}heads@tp /{blanks}2": "heads@tp",
        f"2{blanks}/{blanks}nope": "nope",
        f"2 /{blanks}c@nope": "c@nope",
        f"2 {blanks}/ 2 /3": "/",
    }.items():
        [(rule, (start, stop))] = shown(
            Exception(message(sf.Policy(rules=rules, local_sizes={"0": {"out_features": text}})))
        )
        assert rule == text and text[start:stop] == wrong


# `typeof`


def resolved(rule: str, shape: Sequence[int], case: Case) -> Spec:
    """A rule of `drawing` with every `?` decided: `n6` and 6 have size 6, `p6` the next multiple of the padding."""
    layouts = case.layouts[0]
    axes = dict(layouts.axes)

    def decide(factor: Factor, size: int) -> Factor:
        if factor.name != "_":
            size = int(factor.name.lstrip("np"))
            size = -(-size // layouts.pad) * layouts.pad if factor.name.startswith("p") else size
        divides = size % prod(axes[axis] for axis in factor.axes) == 0
        return factor if divides or not factor.optional else replace(factor, axes=(), optional=False)

    dims = []
    for dim, size in zip(parse(rule).dims, shape, strict=True):
        blocks = [replace(b, factors=tuple(decide(f, size) for f in b.factors)) for b in dim.blocks]
        dims.append(replace(dim, blocks=tuple(blocks)))
    return Spec(tuple(dims))


def inside(text: str, dtype: str) -> str:
    """The rule of `dtype[rule]`."""
    found = re.fullmatch(rf"{dtype}\[(.*)\]", text)
    assert found is not None, text
    return found[1]


SHORT = {"complex": "c", "float": "f", "bfloat": "bf", "uint": "u", "int": "i"}


def short(dtype: str) -> str:
    return re.sub(r"^(complex|bfloat|float|uint|int)(\d+)_?", lambda m: SHORT[m[1]] + m[2], dtype)


@PROPERTY
@given(cases())
def test_typeof_prints_the_rule_that_was_given(case: Case) -> None:
    layouts = case.layouts[0]
    plan = sf.plan(case.model(), sf.MeshSpec(**dict(layouts.axes)), layouts.policy())
    printed = {}
    for i, (rule, shape) in enumerate(zip(layouts.rules, case.shapes, strict=True)):
        name = f"t{i}"
        printed[name] = inside(typeof(plan, name), short(case.dtypes[i]))
        if rule is not None:
            assert parse(printed[name]) == resolved(rule, shape, case)
        assert str(parse(printed[name])) == printed[name]
    # What is printed is a policy: pasted, it makes the same plan.
    pasted = replace(layouts, rules=tuple(printed.values())).policy()
    again = sf.plan(case.model(), sf.MeshSpec(**dict(layouts.axes)), pasted)
    assert again.leaves.keys() == plan.leaves.keys()
    assert all(again.leaves[leaf][1] == plan.leaves[leaf][1] for leaf in plan.leaves)


def assert_partly_split(mesh: DeviceMesh) -> None:
    """Keys of one head stay whole where the queries are split."""
    policy = sf.Policy(rules={"w": "(q: heads@tp d + k: kv@tp? d) c@fsdp"}, sizes={"heads": 4, "d": 2})
    params = sf.shard({"w": torch.arange(30.0).view(10, 3)}, mesh, policy)
    want = "(q: heads@tp d + k: kv d) c@fsdp" if mesh["tp"].size() > 1 else "(q: heads@tp d + k: kv@tp? d) c@fsdp"
    assert typeof(params, "w") == f"f32[{want}]"
    params["w[q]"] = sf.reshard(params, sf.Policy())["w"]  # laid out some other way
    with pytest.raises(sf.ShardError, match=r"the parts of 'w' differ from their plan; name one of w\[q\], w\[k\]"):
        typeof(params, "w")


@on_meshes({"fsdp": 4, "tp": 1}, {"fsdp": 2, "tp": 2})
def test_typeof_of_a_fused_weight_of_which_a_part_is_split(mesh: DeviceMesh) -> None:
    assert_partly_split(mesh)


def assert_types_of_tensors(case: Case) -> None:
    """On ranks, a tree prints what its plan prints, and each leaf of it a rule with its sizes for names."""
    layouts = case.layouts[0]
    params = sf.shard(case.model(), layouts.mesh(), layouts.policy())
    pending = sf.tree.zeros_like(params)
    for name in params.plan.layouts:
        assert typeof(params, name) == typeof(params.plan, name) == typeof(pending, name)
    for name, leaf in params.items():
        assert isinstance(leaf, DTensor)
        text = inside(typeof(leaf), short(str(leaf.dtype).removeprefix("torch.")))
        spec = parse(text)
        assert str(spec) == text and [int(dim.factors[0].name) for dim in spec.dims] == list(leaf.shape)
        stored = parse(inside(typeof(params, name), ".*"))
        if stored.factors and len(params.plan.layouts.get(name, params.plan.leaves[name][0]).leaves) == 1:
            axes = {axis for factor in spec.factors for axis in factor.axes}
            assert axes == {axis for factor in stored.factors for axis in factor.axes}


def test_a_tensor_prints_a_rule_too() -> None:
    hold_for_all(assert_types_of_tensors, cases(), share=0.3)
