"""Every example runs: ```python blocks of README.md and docs/, and the examples in docstrings.

The blocks of one page run in order, in one namespace, in this process, which is a world of one. A block right after the
line `<!-- ranks: 4 -->` is a program of its own and runs on 4 ranks. ```bash and ```text blocks are for reading.
"""

import ast
import doctest
import importlib
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardfn as sf
from shardfn.testing import run

pytestmark = pytest.mark.ranks  # blocks start what they like
ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"python", "bash", "text", "toml", "yaml", "mermaid"}
FENCE = re.compile(r"^(?P<indent>\s*)(?P<ticks>`{3,}|~{3,})\s*(?P<info>.*?)\s*$")
RANKS = re.compile(r"^\s*<!--\s*ranks:\s*(\d+)\s*-->\s*$")


# ---------------------------------------------------------------------------------------------------------------------
# Finding blocks


@dataclass(frozen=True)
class Block:
    """One fenced block; `source` starts with blank lines so that its line numbers are those of the file."""

    path: Path
    line: int  # of the opening fence
    language: str
    source: str
    ranks: int = 1

    @property
    def place(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}" if self.path.is_relative_to(ROOT) else str(self.path)


def find_blocks(path: Path, text: str, first_line: int = 1) -> list[Block]:
    """The fenced blocks of a text whose first line is line `first_line` of the file."""
    blocks = []
    lines = text.splitlines()
    i = 0
    while i < len(lines):
        opening = FENCE.match(lines[i])
        if opening is None:
            i += 1
            continue
        start = i
        i += 1
        while i < len(lines) and lines[i].strip() != opening["ticks"]:
            i += 1
        assert i < len(lines), f"{path}:{first_line + start}: this block is never closed"
        marker = RANKS.match(next((line for line in reversed(lines[:start]) if line.strip()), ""))
        code = textwrap.dedent("\n".join(lines[start + 1 : i]))
        blocks.append(
            Block(
                path=path,
                line=first_line + start,
                language=opening["info"].partition(" ")[0],
                source="\n" * (first_line + start) + code + "\n",
                ranks=int(marker[1]) if marker else 1,
            )
        )
        i += 1
    return blocks


def find_docstrings(path: Path) -> Iterator[tuple[str, str, int]]:
    """(name, docstring, line where its string starts) of a module and everything defined in it."""
    statements: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    for node in statements:
        statements += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node, clean=False)
            if docstring is not None:
                yield getattr(node, "name", path.stem), docstring, node.body[0].lineno


PAGE_BLOCKS = [block for path in PAGES for block in find_blocks(path, path.read_text(encoding="utf-8"))]
DOCSTRINGS = [(path, *found) for path in sorted((ROOT / "shardfn").rglob("*.py")) for found in find_docstrings(path)]
DOCSTRING_BLOCKS = [block for path, _, text, line in DOCSTRINGS for block in find_blocks(path, text, line)]
DOCTESTS = [(path, name, text, line) for path, name, text, line in DOCSTRINGS if ">>>" in text]


# ---------------------------------------------------------------------------------------------------------------------
# Running them


def exec_block(source: str, filename: str = "block", namespace: dict[str, Any] | None = None) -> None:
    """Run one block; on a rank of the pool, as a program of its own."""
    namespace = {"__name__": "__main__"} if namespace is None else namespace
    exec(compile(source, filename, "exec"), namespace)


class Reader:
    """Reads one page at a time, from its top, in a namespace, a directory and a world of one of its own."""

    def __init__(self, directories: pytest.TempPathFactory) -> None:
        self.directories = directories
        self.blocks: list[Block] = []
        self.failed: Block | None = None
        self.done = 0

    def open(self, blocks: list[Block]) -> None:
        self.close()
        self.blocks, self.done, self.failed = blocks, 0, None
        self.directory = self.directories.mktemp("page")
        self.module = sys.modules["page"] = ModuleType("page")  # dataclasses and pickle look classes up by module name
        torch.manual_seed(0)

    def read(self, blocks: list[Block], index: int) -> None:
        """Run the blocks up to `index` that have not run yet: -k may ask for a late one alone."""
        if self.blocks is not blocks:
            self.open(blocks)
        while self.done <= index:
            if self.failed is not None:
                pytest.fail(f"not run, because the block at {self.failed.place} failed", pytrace=False)
            self.failed = blocks[self.done]
            with chdir(self.directory):
                exec_block(self.failed.source, str(self.failed.path), vars(self.module))
            self.failed = None
            self.done += 1

    def close(self) -> None:
        self.blocks = []
        sys.modules.pop("page", None)
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    assert not dist.is_initialized(), "a test of another module left a process group behind"
    reader = Reader(tmp_path_factory)
    yield reader
    reader.close()


@pytest.fixture
def world_of_one(reader: Reader) -> Iterator[None]:
    """No launcher, and no process group before or after."""
    reader.close()
    torch.manual_seed(0)
    yield
    reader.close()


def page_cases() -> list[Any]:
    """One case per block that runs in this process; the blocks of a page share one list."""
    alone = [block for block in PAGE_BLOCKS if block.language == "python" and block.ranks == 1]
    pages = [list(blocks) for _, blocks in groupby(alone, key=lambda block: block.path)]
    return [pytest.param(page, index, id=block.place) for page in pages for index, block in enumerate(page)]


@pytest.mark.everyday(30)
@pytest.mark.parametrize(("blocks", "index"), page_cases())
def test_block_runs(reader: Reader, blocks: list[Block], index: int) -> None:
    reader.read(blocks, index)


MANY_RANKS = [block for block in PAGE_BLOCKS + DOCSTRING_BLOCKS if block.language == "python" and block.ranks > 1]


@pytest.mark.everyday(2)
@pytest.mark.parametrize("block", MANY_RANKS, ids=lambda block: block.place)
def test_block_runs_on_ranks(block: Block, tmp_path: Path) -> None:
    with chdir(tmp_path):
        run(exec_block, block.source, str(block.path), ranks=block.ranks)


def test_the_file_that_the_page_on_testing_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = [block for block in PAGE_BLOCKS if block.path.name == "testing.md"]
    (tmp_path / "shown_tests.py").write_text(block.source)
    monkeypatch.syspath_prepend(str(tmp_path))
    shown = importlib.import_module("shown_tests")
    shown.test_gradients()
    shown.test_gradients_on_meshes({"fsdp": 1, "tp": 4})
    monkeypatch.setattr(shown, "expected", dict)
    with pytest.raises(AssertionError):
        shown.test_gradients()


def test_docstring_blocks_run(world_of_one: None, tmp_path: Path) -> None:
    with chdir(tmp_path):
        for block in DOCSTRING_BLOCKS:
            if block.language == "python" and block.ranks == 1:
                exec_block(block.source, str(block.path))


def run_doctest(name: str, docstring: str, path: Path, line: int) -> None:
    """Run the `>>>` lines of one docstring; `sf`, `torch` and `nn` are there already."""
    names = {"__name__": "__main__", "sf": sf, "torch": torch, "nn": nn}
    test = doctest.DocTestParser().get_doctest(docstring, names, name, str(path), line - 1)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
    if runner.run(test, out=report.append).failed:
        pytest.fail("".join(report), pytrace=False)


@pytest.mark.everyday(1000)
@pytest.mark.parametrize(
    ("path", "name", "docstring", "line"),
    [pytest.param(*case, id=f"{case[0].relative_to(ROOT)}:{case[3]} {case[1]}") for case in DOCTESTS],
)
@pytest.mark.usefixtures("world_of_one")
def test_docstring_example(path: Path, name: str, docstring: str, line: int, tmp_path: Path) -> None:
    with chdir(tmp_path):
        run_doctest(name, docstring, path, line)


# ---------------------------------------------------------------------------------------------------------------------
# The pages themselves, and the checks above


@pytest.mark.everyday(1000)
@pytest.mark.parametrize("block", PAGE_BLOCKS, ids=lambda block: block.place)
def test_block_has_a_known_language(block: Block) -> None:
    """A misspelt language would be a block that nobody runs."""
    assert block.language in LANGUAGES, f"{block.place}: write one of {sorted(LANGUAGES)} after the backticks"


def test_every_public_name_is_on_one_api_page() -> None:
    pages = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "api").glob("*.md")))
    shown = re.findall(r"^::: shardfn\.(\w+)(?:\.\1)?$", pages, re.MULTILINE)
    public = [name for name, value in vars(sf).items() if name[0] != "_" and not isinstance(value, ModuleType)]
    missing = sorted(set(public) - set(shown))
    assert not missing, f"no page in docs/api shows {missing}: add '::: shardfn.{missing[0]}'"
    assert len(shown) == len(set(shown)), "a name is shown twice in docs/api"


def test_a_block_that_raises_fails() -> None:
    text = "intro\n\n```python\nx = 1\n```\n\n<!-- ranks: 4 -->\n\n```python\nraise ValueError(x)\n```\n"
    good, bad = find_blocks(ROOT / "page.md", text)
    assert (good.place, bad.place, good.ranks, bad.ranks) == ("page.md:3", "page.md:9", 1, 4)
    namespace = {"x": 0}
    exec_block(good.source, "page.md", namespace)
    with pytest.raises(ValueError, match="1") as error:
        exec_block(bad.source, "page.md", namespace)
    assert error.traceback[-1].lineno == 9  # counted from 0: line 10 of the page


def test_an_example_with_a_wrong_answer_fails() -> None:
    with pytest.raises(pytest.fail.Exception, match="Expected:\n    3"):
        run_doctest("sum", "Adds.\n\n    >>> 1 + 1\n    3\n", Path("page.py"), 1)


@pytest.mark.slow
def test_a_block_that_raises_on_one_rank_fails() -> None:
    source = (
        "import torch.distributed as dist\nassert dist.get_world_size() == 2\nassert dist.get_rank() == 0, 'not here'"
    )
    with pytest.raises(AssertionError, match="not here"):
        run(exec_block, source, ranks=2)


def test_no_launcher_is_pretended() -> None:
    """Blocks must see what a reader sees: a process that torchrun did not start."""
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} & set(os.environ)
