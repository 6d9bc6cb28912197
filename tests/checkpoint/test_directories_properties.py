"""Drawn trees that go through a directory: to other layouts on other ranks, and of any structure and names."""

import pickle
import shutil
import struct
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from drawing import (
    DTYPES,
    FLOATS,
    INTS,
    MESHES,
    OTHERS,
    Case,
    Turn,
    assert_same_bits,
    assert_same_tree,
    fewer_everyday,
    hold_for_all,
    hold_in_turn,
    mesh_of,
    moves,
)
from hypothesis import strategies as st
from ranks import folder
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from shardfn._torch import pytree

# To another mesh


def tree_of(case: Case, tensors: dict[str, Tensor] | nn.Module, number: int) -> dict[str, Any]:
    """In the layouts of a case; in those of the default policy as `DTensor`s; whole; and numbers."""
    layouts = case.layouts[0]
    plain = dict(tensors.named_parameters()) if isinstance(tensors, nn.Module) else tensors
    typed = dict(sf.shard(plain, layouts.mesh(), sf.Policy()))
    params = sf.shard(tensors, layouts.mesh(), layouts.policy())
    return {"params": params, "typed": typed, "whole": [plain], "step": number, "rate": number / 7}


def emptied(tensors: dict[str, Tensor] | nn.Module) -> dict[str, Tensor] | nn.Module:
    """Zeros in place of all numbers."""
    with torch.no_grad():
        for x in tensors.parameters() if isinstance(tensors, nn.Module) else tensors.values():
            x.zero_()
    return tensors


def save_a_case(path: str, turn: Turn) -> None:
    case = turn.case
    sf.checkpoint.save(f"{path}/{turn.number}", tree_of(case, case.model(), case.seed), case.layouts[0].mesh())


def load_a_case(path: str, turn: Turn) -> None:
    case = turn.case
    like, want = tree_of(case, emptied(case.model()), 0), tree_of(case, case.model(), case.seed)
    loaded = sf.checkpoint.load(f"{path}/{turn.number}", like, case.layouts[0].mesh())
    assert loaded["params"].plan == want["params"].plan
    assert_same_tree(loaded["params"], want["params"])
    assert_same_tree(loaded["typed"], want["typed"])
    assert (loaded["step"], loaded["rate"]) == (want["step"], want["rate"])
    for name, value in want["whole"][0].items():
        assert_same_bits(loaded["whole"][0][name], value, name)


@pytest.mark.law("P5")
def test_drawn_trees_go_to_another_mesh(tmp_path: Path) -> None:
    hold_in_turn([partial(law, str(tmp_path)) for law in (save_a_case, load_a_case)], moves(), fewer_everyday(0.3, 0.6))
    shutil.rmtree(tmp_path)


def trainer_of(case: Case, seed: int) -> sf.Trainer:
    """A trainer whose parameters, and all of whose state, are bits of their own."""
    model, layouts = nn.Module(), case.layouts[0]
    for name, x in bits(case, seed).items():
        model.register_parameter(name, nn.Parameter(x, requires_grad=x.is_floating_point()))
    trainer = sf.Trainer(model, layouts.mesh(), layouts.policy(), optimizer=sf.optim.adamw(0.1), ema=0.9)
    state, trainer.steps = trainer.optimizer_state, seed
    mu, nu = (with_bits(case, tree, seed + at) for at, tree in enumerate((state.mu, state.nu), 1))
    trainer.optimizer_state = state._replace(step=state.step + seed, mu=mu, nu=nu)
    assert trainer.ema is not None
    trainer.ema = with_bits(case, trainer.ema, seed + 3)
    return trainer


def bits(case: Case, seed: int) -> dict[str, Tensor]:
    drawn = Case(seed, case.shapes, case.dtypes, (), False, False, case.strided).tensors()
    return {**drawn, "trained": torch.tensor(float(seed))}


def with_bits(case: Case, tree: sf.Params, seed: int) -> sf.Params:
    """A tree like another one, of other numbers, in its dtypes."""
    values = bits(case, seed)
    for layout in tree.plan.layouts.values():
        if (leaf := tree.get(layout.leaves[0].name)) is not None:
            values[layout.name] = values[layout.name].to(leaf.dtype)
    other = sf.shard(values, tree.mesh, tree.plan.policy)
    return tree.like({name: other[name] for name in tree})


def save_a_trainer(path: str, turn: Turn) -> None:
    trainer_of(turn.case, turn.case.seed).save(f"{path}/{turn.number}")


def load_a_trainer(path: str, turn: Turn) -> None:
    got, want = trainer_of(turn.case, 0), trainer_of(turn.case, turn.case.seed)
    with warnings.catch_warnings(action="ignore"):  # of random states, on other numbers of ranks
        got.load(f"{path}/{turn.number}")
    assert got.steps == want.steps and got.optimizer_state.step.equal(want.optimizer_state.step)
    assert got.ema is not None and want.ema is not None
    assert_same_tree(got.params, want.params)
    assert_same_tree(got.ema, want.ema)
    assert_same_tree(got.optimizer_state.mu, want.optimizer_state.mu)
    assert_same_tree(got.optimizer_state.nu, want.optimizer_state.nu)


@pytest.mark.law("P5")
def test_drawn_trainers_go_to_another_mesh(tmp_path: Path) -> None:
    laws = [partial(law, str(tmp_path)) for law in (save_a_trainer, load_a_trainer)]
    hold_in_turn(laws, moves(dtypes=(*FLOATS, *INTS)), fewer_everyday(0.2, 0.4))
    shutil.rmtree(tmp_path)


# Of any structure, under any names


class Pair(NamedTuple):
    """A container with names."""

    first: Any
    second: Any


@dataclass(frozen=True)
class Nested:
    """A tree, as data: a leaf is what `leaf_of` makes, a container its kind and its parts, with keys for a mapping."""

    ranks: int
    axes: tuple[tuple[str, int], ...]
    tree: tuple[Any, ...]


ODD_KEYS = (
    "",
    ".",
    "~",
    "~0",
    "~1",
    "a.b",
    "a",
    "b",
    "x",
    "x@0",
    "x@1",
    "@",
    "0",
    "1",
    " ",
    "\n",
    '"',
    "\\",
    "/",
    "..",
)
ODD_KEYS += ("None", "日本", "e\u0301", "é", "\x00", "\ud800")
ALIKE = ("a", "b", "a.b", "a~1b")  # names of which one may be made of others
NAMES = st.one_of(st.sampled_from(ALIKE), st.sampled_from(ODD_KEYS), st.text(max_size=3))
KEYS = st.one_of(st.sampled_from(ALIKE), NAMES, st.integers(-1, 3))
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
TENSORS = st.tuples(st.just("tensor"), SHAPES, st.sampled_from(DTYPES), st.integers(0, 3))
TREES = st.tuples(st.just("params"), st.lists(NAMES, min_size=1, max_size=3, unique=True).map(tuple), st.integers(0, 9))
NUMBERS = st.one_of(st.integers(-(2**63), 2**63), st.booleans(), st.floats(), st.none())
LEAVES = st.one_of(TENSORS, TENSORS, TREES, st.tuples(st.just("number"), NUMBERS.map(repr)))
DEPTH = 3


@st.composite
def containers(draw: st.DrawFn, depth: int = DEPTH) -> tuple[Any, ...]:
    """A container of leaves and, unless it is deep in the tree, of containers."""

    def part() -> tuple[Any, ...]:
        return draw(containers(depth - 1)) if depth and draw(st.booleans()) else draw(LEAVES)

    kind = draw(st.sampled_from(["dict", "dict", "list", "tuple", "pair"]))
    if kind == "dict":
        return kind, tuple((key, part()) for key in draw(st.lists(KEYS, max_size=4, unique=True)))
    return kind, tuple(part() for _ in range(2 if kind == "pair" else draw(st.integers(0, 3))))


@st.composite
def nested(draw: st.DrawFn) -> Nested:
    ranks = draw(st.sampled_from([1, 2]))
    return Nested(ranks, draw(st.sampled_from(MESHES[ranks])), draw(containers()))


def made(spec: tuple[Any, ...], mesh: DeviceMesh, blank: bool, known: dict[Any, Any]) -> Any:
    """The tree; leaves that are the same as data are the same object."""
    kind, *rest = spec
    if kind == "dict":
        return {key: made(inside, mesh, blank, known) for key, inside in rest[0]}
    if kind in ("list", "tuple", "pair"):
        parts = [made(inside, mesh, blank, known) for inside in rest[0]]
        return Pair(*parts) if kind == "pair" else parts if kind == "list" else tuple(parts)
    if spec not in known:
        known[spec] = leaf_of(spec, mesh, blank)
    return known[spec]


def leaf_of(spec: tuple[Any, ...], mesh: DeviceMesh, blank: bool) -> Any:
    kind, *rest = spec
    if kind == "number":
        number = eval(rest[0], {"nan": float("nan"), "inf": float("inf")})
        return type(number)() if blank and number is not None else number
    if kind == "params":
        names, seed = rest
        numbers = {name: torch.arange(6).view(2, 3) + seed * 10 + i for i, name in enumerate(names)}
        return sf.shard({name: x * (not blank) for name, x in numbers.items()}, mesh, sf.Policy())
    shape, dtype, seed = rest
    (value,) = Case(seed, (shape,), (dtype,), (), False, False).tensors().values()
    return torch.zeros_like(value) if blank else value


def names_in(spec: tuple[Any, ...], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The keys on the way to each leaf, one for each parameter of a tree of shards."""
    kind, *rest = spec
    keys = {"pair": ("first", "second")}.get(kind) or map(str, range(len(rest[0]))) if kind != "dict" else ()
    if kind in ("dict", "list", "tuple", "pair"):
        parts = rest[0] if kind == "dict" else zip(keys, rest[0], strict=True)
        for key, inside in parts:
            yield from names_in(inside, (*above, str(key)))
    elif spec != ("number", "None"):
        yield above


def same(got: Any, want: Any, where: str = "") -> None:
    """Equal structure, types, names and bits."""
    assert type(got) is type(want), (where, got, want)
    if isinstance(want, sf.Params):
        assert_same_tree(got, want)
    elif isinstance(want, dict):
        assert list(got) == list(want), (where, got, want)
        for key, inside in want.items():
            same(got[key], inside, f"{where} {key!r}")
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), (where, got, want)
        for at, (one, other) in enumerate(zip(got, want, strict=True)):
            same(one, other, f"{where} {at}")
    elif isinstance(want, Tensor):
        assert_same_bits(got, want, where)
    elif isinstance(want, float):
        assert struct.pack("d", got) == struct.pack("d", want), (where, got, want)
    else:
        assert got == want, (where, got, want)


def has_a_tree_without_a_name(spec: tuple[Any, ...]) -> bool:
    """Whether parameters may have the names of other leaves: where the key of their tree is empty."""
    text = repr(spec)
    return "('', ('params'" in text


def trees_come_back(case: Nested) -> None:
    mesh = mesh_of(case.axes)
    tree, like = (made(case.tree, mesh, blank, {}) for blank in (False, True))
    if not any(dtype in repr(case.tree) for dtype in OTHERS[1:]):  # which torch (2.13) pickles only in torch.save
        same(pickle.loads(pickle.dumps(tree)), tree)
    leaves, structure = pytree.tree_flatten(tree)
    same(pytree.tree_unflatten(leaves, structure), tree)
    names = [*names_in(case.tree)]
    with folder() as at:
        try:
            path = sf.checkpoint.save(at / "step-1", tree, mesh)
        except sf.ShardError as error:
            if "does not fit into 64 bits" in str(error):
                assert str(2**63) in repr(case.tree)
            else:
                assert "two leaves of the tree have the name" in str(error)
                assert len(set(names)) < len(names) or has_a_tree_without_a_name(case.tree), "no two have"
            return
        assert len(set(names)) == len(names)
        sf.checkpoint.verify(path)
        same(sf.checkpoint.load(path, like, mesh), tree)


@pytest.mark.law("P6")
def test_trees_of_any_structure_come_back() -> None:
    hold_for_all(trees_come_back, nested())
