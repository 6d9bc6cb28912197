"""The tests stand by rooms: a test file's folder is the room, and its name the module, that it is about."""

import ast
import re
from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "shardfn"
# Folders that are no rooms: helpers; the shape of the project; forwards, backwards and programs that were wrong once,
# which no module has alone; what costs hours or is a tool; and the examples.
OTHERS = ("helpers", "laws", "wrong_once", "slow", "examples")
ROOMS = sorted(str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE)
FILES = sorted(str(path.relative_to(TESTS)) for path in TESTS.rglob("test_*.py"))


def words_of(room: str) -> set[str]:
    """What a test of a room may be named after: the room, its modules."""
    return {Path(room).name.strip("_"), *(path.stem for path in (PACKAGE / room).glob("*.py")), "compat"}


@pytest.mark.parametrize("file", FILES)
def test_a_test_is_in_the_room_of_its_module(file: str) -> None:
    """`tests/<room>/test_<module>.py`, or `test_<module>_<topic>.py`."""
    room, _, name = file.rpartition("/")
    if room in OTHERS or room == "compat/megatron":
        return
    assert room in ROOMS, f"{file}: shardfn has no room {room}"
    stem = name.removeprefix("test_").removesuffix(".py")
    assert any(stem == word or stem.startswith(f"{word}_") for word in words_of(room)), f"{file}: no module of {room}"


@pytest.mark.parametrize("room", [room for room in ROOMS if room not in ("context", "compat")])
def test_a_room_has_tests(room: str) -> None:
    assert list((TESTS / room).glob("test_*.py"))


@pytest.mark.parametrize("file", FILES)
def test_no_private_cache_or_table_of_the_library(file: str) -> None:
    """What a test reads of the library has a public name, and what it changes is put back by what it calls."""
    for node in ast.walk(ast.parse((TESTS / file).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardfn."):
            private = [x.name for x in node.names if re.match(r"_[a-z]|_[A-Z]", x.name) and x.name != "_torch"]
            assert not [name for name in private if name != "_runtime_utils"], f"{file}:{node.lineno}"
        if isinstance(node, ast.Attribute) and node.attr in ("cache_clear", "cache_info"):
            raise AssertionError(f"{file}:{node.lineno}: {node.attr}")


def test_properties_have_as_many_examples_as_are_asked_for(pytestconfig: pytest.Config) -> None:
    """Whatever is imported: torch.testing._internal loads a profile of its own, of 10 examples."""
    assert settings().max_examples in (pytestconfig.getoption("examples"), 50, 300)


def test_names_of_files_are_told_apart() -> None:
    """pytest imports them by their names alone."""
    stems = [Path(file).stem for file in FILES]
    assert len(set(stems)) == len(stems)
