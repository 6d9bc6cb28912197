"""Rules and policies that mean nothing: every rank says so, in an error of ours, or all of them go on."""

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from drawing import DTYPES, Case, assert_same_bits, cases, hold_for_all, whole_forward
from hypothesis import strategies as st
from torch import nn

import shardfn as sf
from shardfn._torch import unwrap_local

LINES = 12  # at most, of what is said about one problem
PACKAGE = str(Path(sf.__file__).parent)
Verb = Literal["shard", "reshard", "shard_map"]

CHARACTERS = (*"@?()+:._ ,->*{}[]n012p~\\'\"\n\té日\x00", "...", "@tp", "@fsdp", "@nope", "n3", "_ ", " + ", "->")
WORDS = (
    "tp",
    "fsdp",
    "dp",
    "dp_shard",
    "replicate",
    "cp",
    "nope",
    "n2",
    "n3",
    "p4",
    "_",
    "...",
    "3",
    "-1",
    "99999999999",
)
ODD_PATTERNS = ("t*", "t9", "", "re:(", "re:t.", "{t0,", "[", "**", "t0.t0", "**.*.**", "é")
# Of fields of a policy, values that mean something only now and then, or never.
FIELDS: tuple[tuple[str, Any], ...] = (
    ("default", "some"),
    ("default", "error"),
    ("default", None),
    ("min_size", -1),
    ("min_size", 2.5),
    ("min_size", "5"),
    ("min_size", None),
    ("pad", {"p3": 0}),
    ("pad", {"p3": -2, "p4": "x"}),
    ("pad", {"n3": 100}),
    ("pad", 3),
    ("sizes", {"n2": 3, "n3": 2}),
    ("sizes", {"n3": -1}),
    ("sizes", {"n3": "n3"}),
    ("sizes", {3: 3}),
    ("axes", {"n3": "nope"}),
    ("axes", {"n3": "tp", "n2": ("tp", "fsdp")}),
    ("axes", {"n3": ("fsdp", "fsdp")}),
    ("axes", {"n3": 3}),
    ("axes", {"n3": ("tp", 3)}),
    ("axes", {"n3": None}),
    ("axes", {3: "tp"}),
    ("axes", ["tp"]),
    ("batch", ("tp",)),
    ("batch", ()),
    ("batch", "fsdp"),
    ("batch", 3),
    ("batch", (3,)),
    ("batch", None),
    ("acts", {"**": "b@nope c"}),
    ("acts", {"nope": "b c"}),
    ("acts", {"**": 3}),
    ("units", ("nope.*",)),
    ("units", 3),
    ("units", {"**": {"regather": "x"}}),
    ("units", {"**": {"nope": 1}}),
    ("ignore", ("t0",)),
    ("ignore", ("nope",)),
    ("ignore", (3,)),
    ("regather", 7),
    ("regather", "no"),
    ("regather", -1),
    ("compute_dtype", "float32"),
    ("compute_dtype", torch.int8),
    ("reduce_dtype", torch.bool),
    ("offload", "disk"),
    ("local_sizes", {"**": {"size": "n3@nope"}}),
    ("local_sizes", {"**": "n3"}),
    ("compute", {"nope": whole_forward}),
    ("compute", {"**": "forward"}),
    ("rules", {"t0": 3}),
    ("rules", {3: "a b"}),
    ("rules", ["t0"]),
    ("nope", 1),
)


@dataclass(frozen=True)
class Broken:
    """A case with a rule that was changed, and perhaps with values of a policy that mean nothing."""

    case: Case
    verb: Verb
    rules: tuple[tuple[str, str], ...]
    fields: tuple[int, ...]  # of `FIELDS`
    alone: bool  # only the first rank has them

    @property
    def ranks(self) -> int:
        return self.case.ranks

    def policy(self) -> sf.Policy:
        legal = self.case.layouts[0]
        changed: dict[str, Any] = {"rules": dict(self.rules), **dict(FIELDS[i] for i in self.fields)}
        kept = {name: getattr(legal.policy(), name) for name in ("sizes", "pad", "default", "min_size", "compute")}
        return sf.Policy(**{**kept, **changed})


@st.composite
def broken_text(draw: st.DrawFn, text: str) -> str:
    """A rule with some characters more, fewer, or in other places."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(text)))
        how = draw(st.sampled_from(["delete", "insert", "insert", "swap", "word", "twice"]))
        if how == "delete":
            text = text[:at] + text[at + draw(st.integers(1, 3)) :]
        elif how == "insert":
            text = text[:at] + draw(st.sampled_from(CHARACTERS)) + text[at:]
        elif how == "swap":
            text = text[:at] + text[at + 1 : at + 2] + text[at : at + 1] + text[at + 2 :]
        elif how == "twice":
            text = text[:at] + text
        elif words := list(re.finditer(r"\w+", text)):
            word = draw(st.sampled_from(words))
            text = text[: word.start()] + draw(st.sampled_from(WORDS)) + text[word.end() :]
    return text


@st.composite
def broken(draw: st.DrawFn) -> Broken:
    case = draw(cases(dtypes=DTYPES))
    rules = {f"t{i}": rule for i, rule in enumerate(case.layouts[0].rules) if rule is not None}
    which = f"t{draw(st.integers(0, len(case.shapes) - 1))}"
    rules[which] = draw(broken_text(rules.get(which, " ".join("_" for _ in case.shapes[int(which[1:])]))))
    if draw(st.integers(0, 7)) == 0:
        rules = {draw(st.sampled_from(ODD_PATTERNS)): rules.pop(which), **rules}
    fields = draw(st.lists(st.integers(0, len(FIELDS) - 1), max_size=2)) if draw(st.booleans()) else []
    verbs: list[Verb] = ["shard", "shard", "reshard", "shard_map"]
    alone = draw(st.integers(0, 3)) == 0
    return Broken(case, draw(st.sampled_from(verbs)), tuple(rules.items()), tuple(fields), alone)


def outcome(call: Callable[[], None]) -> str:
    """What a call says if it refuses; nothing if it goes on."""
    try:
        call()
    except (ValueError, TypeError) as error:
        assert type(error) in (sf.ShardError, ValueError, TypeError), type(error)
        frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        assert frames[-1].startswith(PACKAGE), f"an error of {frames[-1]}: {error}"
        named = re.match(r"[A-Za-z_.]+(\(.*\)|:| takes| has no)", str(error))
        assert named or isinstance(error, sf.ShardError), f"no function is named: {error}"
        many = re.search(r"(\d+) problems", str(error))
        lines = str(error).count("\n") + 1
        assert lines <= LINES * (int(many[1]) if many else 1) + bool(many), f"{lines} lines: {error}"
        return f"{type(error).__name__}: {error}"
    return ""


def everyone(value: Any) -> list[Any]:
    """What each rank has."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def called_with(case: Broken, policy: sf.Policy) -> None:
    """The verb itself; if it goes on, its result is right."""
    mesh, model = case.case.layouts[0].mesh(), case.case.model()
    if case.verb == "reshard":
        params = sf.reshard(sf.shard(model, mesh, sf.Policy()), policy)
    else:
        params = sf.shard(model, mesh, policy)
    full = sf.gather(params)
    want = dict(model.named_parameters(remove_duplicate=False)) if isinstance(model, nn.Module) else model
    for name, value in full.items():
        assert_same_bits(value, want[name], name)


def mapped_by(case: Broken) -> None:
    """A function of local parts under a rule: what it returns are the parts that it was given."""
    name, rule = case.rules[0]
    value = case.case.tensors().get(name, torch.ones(4, 2)).detach()
    mapped = sf.shard_map(f"{rule} -> {rule}", case.case.layouts[0].mesh())(lambda x: x)(value)
    if isinstance(mapped, torch.Tensor):
        assert_same_bits(unwrap_local(mapped), value)


def every_rank_hears_of_it(case: Broken) -> None:
    made: list[sf.Policy] = []
    mine = case.case.layouts[0].policy if case.alone and dist.get_rank() else case.policy
    said = everyone(outcome(lambda: made.append(mine())))
    if case.verb == "shard_map":
        said = everyone(outcome(lambda: mapped_by(case)))
        assert len(set(said)) == 1, said
    elif not any(said):
        said = everyone(outcome(lambda: called_with(case, made[0])))
        assert all(said) or not any(said), said
        assert case.alone or len(set(said)) == 1 or all("so no rank goes on" in x for x in set(said) - {said[0]}), said


@pytest.mark.law("P9")
def test_what_means_nothing_is_an_error_on_every_rank() -> None:
    hold_for_all(every_rank_hears_of_it, broken())
