"""What is public: `public_names.txt` has every name that users write, and nothing else may be one.

A name that is meant to come is added there, with its page of docs; one that goes is an entry of the CHANGELOG too.
"""

import importlib
import pydoc
import re
import tomllib
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

from shardfn.compat import switch

PAGE = Path(__file__).with_name("public_names.txt")
LISTED = {line.partition(":")[0]: line.partition(":")[2].split() for line in PAGE.read_text().splitlines()}
NAMESPACES = [name for name in LISTED if not name.startswith("shardfn.compat")]


def is_module(value: object) -> bool:
    return isinstance(value, ModuleType)


@pytest.mark.parametrize("name", LISTED)
def test_module_has_the_names_that_are_listed(name: str) -> None:
    module = importlib.import_module(name)
    switch.off()  # which the import of one of them turns on
    assert [each for each in LISTED[name] if not hasattr(module, each)] == []
    # Of what a package with py.typed only imports, checkers of types say that it is private.
    assert sorted(vars(module)["__all__"]) == sorted(LISTED[name])


def test_nothing_else_at_top_level_is_public() -> None:
    package = importlib.import_module("shardfn")
    values = {name: value for name, value in vars(package).items() if not name.startswith("_")}
    assert {n for n, value in values.items() if not is_module(value)} <= set(LISTED["shardfn"])
    strangers = {n for n, value in values.items() if is_module(value) and value.__name__ != f"shardfn.{n}"}
    assert not strangers, f"shardfn re-exports modules of others: {sorted(strangers)}"


@pytest.mark.parametrize("name", [name for name in LISTED["shardfn"] if f"shardfn.{name}" not in LISTED])
def test_public_name_has_an_example(name: str) -> None:
    docstring = vars(importlib.import_module("shardfn"))[name].__doc__ or ""
    assert docstring.strip(), f"shardfn.{name} has no docstring"
    assert ">>>" in docstring or "```" in docstring, f"the docstring of shardfn.{name} has no example"


def test_testing_is_imported_at_need_and_nothing_else_is() -> None:
    package = importlib.import_module("shardfn")
    assert package.__getattr__("testing") is importlib.import_module("shardfn.testing")
    with pytest.raises(AttributeError, match="module 'shardfn' has no attribute 'testings'"):
        getattr(package, "testing" + "s")


@pytest.mark.parametrize("name", NAMESPACES)
def test_help_lists_what_a_module_has(name: str) -> None:
    """It goes by `__all__`: of a module without one it leaves out what is defined elsewhere."""
    module = importlib.import_module(name)
    text = pydoc.plain(pydoc.render_doc(module))
    for other in module.__all__:
        if not is_module(vars(module)[other]):
            assert vars(module)[other].__doc__, f"{name}.{other} has no docstring"
            assert re.search(rf"^    (class )?{other}\b", text, re.MULTILINE), other


def test_the_version_is_written_once() -> None:
    package = importlib.import_module("shardfn")
    assert metadata.version("shardfn") == package.__version__
    assert "version" in tomllib.loads((PAGE.parents[2] / "pyproject.toml").read_text())["project"]["dynamic"]


def test_types_are_there_for_checkers_of_users() -> None:
    assert (PAGE.parents[2] / "shardfn" / "py.typed").exists()
