"""How problems become one message."""

import pytest

from shardfn.notation.errors import ShardError, caret, did_you_mean, raise_problems


def test_caret_points_at_the_span() -> None:
    assert caret("ff@tp c", (3, 5)) == "    ff@tp c\n       ^^"
    assert caret("ab", (2, 2)) == "    ab\n      ^", "an empty span still shows where"


def test_did_you_mean_names_the_closest() -> None:
    assert did_you_mean("ftp", ["fsdp", "tp"]) == "; did you mean 'tp'?"
    assert did_you_mean("xyz", ["fsdp", "tp"]) == ""


def test_all_problems_are_one_error() -> None:
    raise_problems("plan", [])
    with pytest.raises(ShardError, match=r"(?m)^plan: first$"):
        raise_problems("plan", ["first"])
    with pytest.raises(ShardError, match=r"(?m)^plan: 2 problems\n1\. first\n2\. second$"):
        raise_problems("plan", ["first", "second"])
    assert issubclass(ShardError, ValueError)
    with pytest.raises(ShardError, match=r"(?m)^load: 4 problems\n1\. a\n    b\nand 3 more$"):
        raise_problems("load", ["a\n    b", "c", "d", "e"], lines=4)
    with pytest.raises(ShardError, match=r"(?m)^load: 3 problems\n1\. a\n2\. c\n3\. d$"):
        raise_problems("load", ["a", "c", "d"], lines=4)


def test_problems_of_like_layers_are_one() -> None:
    of_layers = [f"'layers.{i}.up' has 5 rows.\n    rows\n    ^^^^" for i in range(6)]
    with pytest.raises(ShardError) as error:
        raise_problems("plan", [*of_layers, "'norm' is alone", "'layers.2.up' has 6 rows."])
    assert str(error.value) == (
        "plan: 8 problems, of 3 kinds\n"
        "1. 'layers.0.up' has 5 rows.\n    rows\n    ^^^^\n"
        "    The same for 5 more, 'layers.1.up' to 'layers.5.up'.\n"
        "2. 'norm' is alone\n"
        "3. 'layers.2.up' has 6 rows."
    )
    with pytest.raises(
        ShardError, match=r"(?m)^plan: 'layers\.0\.up' .*\n .*\n .*\n    The same for 'layers\.1\.up'\.$"
    ):
        raise_problems("plan", of_layers[:2])
    in_front = [f"{i}.weight (6, 6): bad rule\n    a@tp" for i in range(3)] + ["7 % 2 = 1", "6 % 2 = 1"]
    with pytest.raises(ShardError) as error:
        raise_problems("plan", in_front)
    assert str(error.value) == (
        "plan: 5 problems, of 3 kinds\n1. 0.weight (6, 6): bad rule\n    a@tp\n"
        "    The same for '1.weight' and '2.weight'.\n2. 7 % 2 = 1\n3. 6 % 2 = 1"
    )
    nested = [f"'layers.{i}.experts.{j}.up' in 'layers.{i}'" for i in range(2) for j in range(3)]
    with pytest.raises(
        ShardError, match=r"(?m)^plan: .*\n    The same for 5 more, '.*0\.experts\.1\.up' to '.*experts\.2\.up'"
    ):
        raise_problems("plan", nested)
