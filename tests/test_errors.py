"""How problems become one message."""

import pytest

from shardfn.core.errors import ShardError, caret, did_you_mean, raise_problems


def test_caret_points_at_the_span() -> None:
    assert caret("ff@tp c", (3, 5)) == "    ff@tp c\n       ^^"
    assert caret("ab", (2, 2)) == "    ab\n      ^", "an empty span still shows where"


def test_did_you_mean_names_the_closest() -> None:
    assert did_you_mean("ftp", ["fsdp", "tp"]) == "; did you mean 'tp'?"
    assert did_you_mean("xyz", ["fsdp", "tp"]) == ""


def test_all_problems_are_one_error() -> None:
    raise_problems("plan", [])
    with pytest.raises(ShardError, match=r"^plan: first$"):
        raise_problems("plan", ["first"])
    with pytest.raises(ShardError, match=r"^plan: 2 problems\n1\. first\n2\. second$"):
        raise_problems("plan", ["first", "second"])
    assert issubclass(ShardError, ValueError)
