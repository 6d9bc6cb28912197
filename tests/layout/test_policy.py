"""`Policy`: fields that are checked, and how two become one."""

import copy
import pickle
from typing import Any

import pytest
import torch
from drawing import untyped

import shardfn as sf


@pytest.mark.parametrize(
    ("fields", "kind", "match"),
    [
        ({"rule": {}}, TypeError, r"Policy has no field 'rule'; did you mean 'rules'\? Its fields: rules, axes"),
        ({"quantum": 1}, TypeError, r"Policy has no field 'quantum'\. Its fields"),
        ({"rules": [("a", "b")]}, TypeError, r"Policy\(rules=...\) takes a mapping, not list"),
        (
            {"rules": {"a": ["b@tp"]}},
            TypeError,
            r"Policy\(rules=\{'a': \['b@tp'\]\}\): a pattern and a rule, both strings",
        ),
        ({"acts": {3: "b"}}, TypeError, r"Policy\(acts=\{3: 'b'\}\)"),
        (
            {"compute_dtype": torch.int8},
            TypeError,
            r"Policy\(compute_dtype=...\) takes a floating torch.dtype, as torch.bfloat16 is, not torch.int8",
        ),
        (
            {"reduce_dtype": "bf16"},
            TypeError,
            r"Policy\(reduce_dtype=...\) takes a floating torch.dtype, .* not 'bf16'",
        ),
        ({"default": "fsdp"}, ValueError, r"Policy\(default='fsdp'\): one of 'auto', 'replicate', 'error'"),
        ({"ignore": (3,)}, TypeError, r"Policy\(ignore=\(3,\)\): names are needed"),
        ({"batch": 3}, TypeError, r"Policy\(batch=3\): names are needed"),
        ({"axes": {"c": ("tp", 3)}}, TypeError, r"Policy\(axes=\{'c': \('tp', 3\)\}\): names are needed"),
        ({"sizes": {3: 3}}, TypeError, r"Policy\(sizes=\{3: 3\}\): names are needed"),
        ({"min_size": "5"}, ValueError, r"Policy\(min_size='5'\): a whole number is needed"),
        ({"offload": "disk"}, ValueError, r"Policy\(offload='disk'\): None or 'cpu'"),
        ({"regather": -1}, ValueError, r"Policy\(regather=-1\)"),
        ({"regather": "no"}, ValueError, r"Policy\(regather='no'\)"),
        ({"sizes": {"c": 2.5}}, ValueError, r"Policy\(sizes=\{'c': 2.5\}\): a whole number"),
        ({"local_sizes": {"attn": ["heads"]}}, TypeError, r"Policy\(local_sizes=\{'attn': \['heads'\]\}\): attributes"),
        ({"local_sizes": {"attn.heads": "heads@tp"}}, TypeError, r"as in local_sizes=\{'attn': \{'heads': 'heads@tp'"),
        ({"local_sizes": {"attn": {"heads": 2}}}, TypeError, r"local_sizes=\{'attn': \{'heads': 2\}\}"),
        ({"sizes": {"c": True}}, ValueError, r"Policy\(sizes=\{'c': True\}\)"),
        ({"pad": {"c": 0}}, ValueError, r"Policy\(pad=\{'c': 0\}\)"),
    ],
)
def test_a_bad_field(fields: dict[str, Any], kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        sf.Policy(**fields)


def test_keywords_only_and_no_setters() -> None:
    with pytest.raises(TypeError, match=r"keyword arguments only, for example Policy\(rules="):
        untyped(sf.Policy)({"a": "b"})
    with pytest.raises(AttributeError):
        untyped(sf.Policy()).default = "error"
    given = {"a": "b"}
    policy = sf.Policy(rules=given)
    given["c"] = "d"
    assert policy.rules == {"a": "b"}, "what the caller does to its dict later does not reach the policy"


def test_what_is_given_wins() -> None:
    a = sf.Policy(rules={"x": "1", "y": "2"}, regather=False, compute_dtype=torch.float16, batch="rows", sizes={"c": 1})
    b = sf.Policy(rules={"z": "3", "y": "4"}, compute_dtype=None, sizes={"d": 2})
    both = a | b
    assert list(both.rules.items()) == [("z", "3"), ("y", "4"), ("x", "1")], "b's rules come first"
    assert both.sizes == {"d": 2, "c": 1}
    assert both.regather is False and both.batch == ("rows",), "what b was not given stays"
    assert both.compute_dtype is None, "b was given None"
    assert (sf.Policy(default="error") | a | b).default == "error" and (a | both).compute_dtype is None
    with pytest.raises(TypeError):
        _ = a | untyped({"rules": {}})


def test_names_of_fsdp2_are_translated() -> None:
    for theirs, ours in {"param_dtype": "compute_dtype", "reshard_after_forward": "regather"}.items():
        with pytest.raises(TypeError, match=f"no field '{theirs}'; that is '{ours}' here"):
            sf.Policy(**dict[str, Any]({theirs: None}))


def test_copies_remember_what_was_given() -> None:
    a = sf.Policy(regather=False)
    b = sf.Policy(compute_dtype=torch.bfloat16)
    for twin in (copy.copy(b), copy.deepcopy(b), pickle.loads(pickle.dumps(b))):
        assert twin == b and (a | twin).regather is False
