"""The pages for users are in short sentences, and errors name entries that there are."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOR_US = ("design.md", "performance.md", "verified.md")  # reports, in the words of who works on the library
SHORT = [ROOT / "README.md", *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.name not in FOR_US)]
MOST_WORDS = 30


def sentences(text: str) -> list[str]:
    """The sentences of a page: without code, tables and comments; links by what they show, code as a word."""
    text = re.sub(r"^```.*?^```$", "\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^\|.*$|^#.*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    blocks = re.split(r"\n\s*\n|\n(?=\s*[*-] )", text)
    pieces = [
        piece for block in blocks for piece in re.split(r"(?<=[.!?:])\s+(?=[\"'A-Z(*a-z])", " ".join(block.split()))
    ]
    return [piece for piece in pieces if piece]


@pytest.mark.parametrize("page", SHORT, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_has_to_be_read_twice(page: Path) -> None:
    long = [piece for piece in sentences(page.read_text(encoding="utf-8")) if len(piece.split()) > MOST_WORDS]
    assert not long, f"{page.name}: more than {MOST_WORDS} words: {long[0]}"


def test_long_sentences_are_found() -> None:
    words = " ".join(["word"] * 31)
    text = (
        f"# {words}\n\nShort one. {words.capitalize()} `x.y` [link](to.md).\n\n```python\n{words}\n```\n\n| {words} |\n"
    )
    assert [len(piece.split()) for piece in sentences(text)] == [2, 33]
    assert sentences("* one\n* two: three\n") == ["* one", "* two:", "three"]


def entries(source: str) -> set[str]:
    """The entries of the page that a module names: `see(error, "rules")`, `raise_problems(..., entry="rules")`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            given = [*node.args[1:2]] if node.func.id in ("see", "_see") else node.args[4:5]
            given += [keyword.value for keyword in node.keywords if keyword.arg == "entry"]
            known = node.func.id in ("see", "_see", "raise_problems")
            found |= {str(value.value) for value in given if known and isinstance(value, ast.Constant)}
        if isinstance(node, ast.FunctionDef) and node.name == "raise_problems":
            found |= {str(default.value) for default in node.args.defaults[-1:] if isinstance(default, ast.Constant)}
    return found


def test_errors_name_entries_of_the_page_and_all_of_them() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "shardfn").rglob("*.py")]
    named = set[str]().union(*map(entries, sources))
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert named == {title.lower() for title in re.findall(r"^## (\w+)$", page, re.MULTILINE)}
