"""Whether the tests see a line that is broken: lines of shardfn are drawn by a seed and broken one by one.

    python tests/slow/break_lines.py --lines 50                      # evenly over the folders of shardfn
    python tests/slow/break_lines.py --lines 10 --only 'engine/*' --first-only
    python tests/slow/break_lines.py --again layout/policy.py:64:1    # one of them again, as its row names it

The seed is the commit's hash by default. Each line is broken in a clone of this checkout's commit; the tests of its
module run first, then those of its room and those that name it, then the rest of the everyday suite, until one fails. A
row says what was broken and which test saw it; a line that no test sees is equivalent or lacks a test.
"""

import argparse
import ast
import fnmatch
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPARED = {"==": "!=", "!=": "==", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "is": "is not", "is not": "is"}
COMPARED |= {"in": "not in", "not in": "in"}
SYMBOLS: dict[type[ast.AST], str] = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">"}
SYMBOLS |= {ast.GtE: ">=", ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in"}
ADDED: dict[type[ast.AST], str] = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.BitOr: "&", ast.BitAnd: "|"}
ADDED |= {ast.FloorDiv: "*", ast.Mod: "*"}


@dataclass(frozen=True)
class Break:
    """One way to break a line: text `old` at an offset of a file becomes `new`."""

    path: str  # below shardfn/
    line: int
    number: int  # among the breaks of this line
    start: int
    old: str
    new: str

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}:{self.number}"

    def __str__(self) -> str:
        return f"{self.name}  {' '.join(self.old.split())[:70]!r} -> {' '.join(self.new.split())[:70]!r}"


def broken_forms(node: ast.AST, text: str) -> Iterator[tuple[ast.AST, str]]:
    """(what is replaced, by what) for one node of a function."""

    def source(each: ast.AST) -> str:
        segment = ast.get_source_segment(text, each) or ""
        return f"({segment})" if isinstance(each, ast.NamedExpr) else segment

    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield node.test, f"not ({source(node.test)})"
    if isinstance(node, ast.comprehension):
        for test in node.ifs:
            yield test, f"not ({source(test)})"
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        other = COMPARED[SYMBOLS[type(node.ops[0])]]
        yield node, f"{source(node.left)} {other} {source(node.comparators[0])}"
    if isinstance(node, ast.BoolOp):
        yield node, (" or " if isinstance(node.op, ast.And) else " and ").join(f"({source(v)})" for v in node.values)
    if isinstance(node, ast.BinOp) and type(node.op) in ADDED:
        yield node, f"({source(node.left)}) {ADDED[type(node.op)]} ({source(node.right)})"
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield node, str(node.value + 1)
    if isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield node.value, "None"
    if isinstance(node, ast.Expr | ast.AugAssign) and not _is_text(node):
        yield node, "pass"


def walked(node: ast.AST) -> Iterator[ast.AST]:
    """A node and what is in it, but nothing within f-strings, of which Python 3.11 does not tell the place."""
    yield node
    if not isinstance(node, ast.JoinedStr):
        for child in ast.iter_child_nodes(node):
            yield from walked(child)


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def breaks(file: Path) -> list[Break]:
    """Every way to break a line of one module's functions."""
    text = file.read_text()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    raw, found, count = text.encode(), [], dict[int, int]()
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
    nodes = {id(n): n for function in functions for statement in function.body for n in walked(statement)}
    for node in nodes.values():
        for target, new in broken_forms(node, text):
            assert isinstance(target, ast.expr | ast.stmt) and target.end_lineno and target.end_col_offset is not None
            start = starts[target.lineno - 1] + target.col_offset
            old = raw[start : starts[target.end_lineno - 1] + target.end_col_offset].decode()
            number = count[target.lineno] = count.get(target.lineno, 0) + 1
            path = str(file.relative_to(ROOT / "shardfn"))
            found.append(Break(path, target.lineno, number, start, old, new))
    return [each for each in found if each.old.strip()]


def drawn(lines: int, seed: str, only: str) -> list[Break]:
    """As many breaks as asked for, evenly over folders, over the lines of each."""
    folders: dict[str, list[Break]] = {}
    for file in sorted((ROOT / "shardfn").rglob("*.py")):
        path = str(file.relative_to(ROOT / "shardfn"))
        if fnmatch.fnmatch(path, only):
            folders.setdefault(str(Path(path).parent), []).extend(breaks(file))
    rng = random.Random(seed)
    rows: list[Break] = []
    while len(rows) < lines and any(folders.values()):
        for ways in folders.values():
            if ways and len(rows) < lines:
                line = rng.choice(sorted({(each.path, each.line) for each in ways}))
                here = [each for each in ways if (each.path, each.line) == line]
                rows.append(rng.choice(here))
                ways[:] = [each for each in ways if each not in here]
    return rows


def tests_of(path: str, clone: Path) -> tuple[list[str], list[str]]:
    """(test files of a module's room, or that name the module; the others), the nearest first."""
    room, stem = str(Path("tests") / Path(path).parent), Path(path).stem
    dotted = "shardfn." + path.removesuffix(".py").replace("/", ".")
    names = re.findall(r"^(?:def|class) ([a-zA-Z]\w+)", (clone / "shardfn" / path).read_text(), re.MULTILINE)
    words = re.compile(rf"\b(?:{'|'.join(map(re.escape, names or [stem]))})\b")
    near: dict[str, tuple[bool, bool, bool, int]] = {}
    for file in sorted((clone / "tests").rglob("test_*.py")):
        text = file.read_text()
        here = str(file.relative_to(clone).parent)
        named = here == room and stem in file.stem
        near[str(file.relative_to(clone))] = (named or here == room, named, dotted in text, len(words.findall(text)))
    order = sorted(near, key=lambda name: near[name], reverse=True)
    first = [name for name in order if near[name][0] or near[name][2]] or order[:3]
    return first, [name for name in order if name not in first]


def seen_by(clone: Path, files: list[str]) -> str | None:
    """The first test of those files that fails, or None."""
    pytest = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-m",
        "not slow",
        "--numprocesses",
        "2",
        "--dist",
        "worksteal",
    ]
    environment = os.environ | {"PYTHONPATH": str(clone), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*pytest, "--dist", "worksteal", *files],
        cwd=clone,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as tests:
        try:
            printed, _ = tests.communicate(timeout=3600)
        except subprocess.TimeoutExpired:
            os.killpg(tests.pid, signal.SIGKILL)
            return "a hang of an hour"
    if tests.returncode in (0, 5):
        return None
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", printed, re.MULTILINE)
    return failed[0] if failed else f"exit code {tests.returncode}"


def main() -> None:
    """Break the lines that are asked for, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=50)
    parser.add_argument("--seed", help="by default the commit's hash")
    parser.add_argument("--only", default="*", help="modules below shardfn/")
    parser.add_argument("--first-only", action="store_true", help="only the tests that name the module")
    parser.add_argument("--again", nargs="*", default=[], metavar="PATH:LINE:NUMBER")
    parser.add_argument("--list", action="store_true", help="break nothing")
    args = parser.parse_args()
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    rows = drawn(args.lines, args.seed or commit, args.only)
    if args.again:
        files = {ROOT / "shardfn" / name.split(":")[0] for name in args.again}
        rows = [each for file in sorted(files) for each in breaks(file) if each.name in args.again]
    if args.list:
        print(*rows, sep="\n")
        return
    unseen = 0
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        for row in rows:
            file = clone / "shardfn" / row.path
            sound = file.read_bytes()
            end = row.start + len(row.old.encode())
            file.write_bytes(sound[: row.start] + row.new.encode() + sound[end:])
            first, rest = tests_of(row.path, clone)
            seen = seen_by(clone, first) or (None if args.first_only else seen_by(clone, rest))
            file.write_bytes(sound)
            unseen += seen is None
            print(f"{'UNSEEN' if seen is None else 'seen  '} {row}  {seen or ''}", flush=True)
    print(f"{len(rows) - unseen} of {len(rows)} seen")
    sys.exit(bool(unseen))


if __name__ == "__main__":
    main()
