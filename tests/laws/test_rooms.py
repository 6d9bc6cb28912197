"""The shape of the package: rooms, cycles, purity, private names, lengths.

Everything here reads source with `ast` and imports nothing, so that it also runs over broken modules.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Which rooms each room imports from: what stands here and nothing else, in the order of a reader. A folder of shardfn
# is a room, and so is each of `compat`; modules beside them are faces, which only export.
ROOMS = {
    "_torch": "",
    "notation": "",
    "context": "_torch notation",
    "layout": "_torch notation",
    "comm": "_torch notation context layout",
    "watch": "_torch notation layout comm",
    "binding": "_torch notation context layout",
    "params": "_torch notation context layout comm",
    "random": "_torch notation context layout",
    "parallel": "_torch notation context layout comm binding",
    "engine": "_torch notation context layout comm binding params random",
    "trace": "_torch notation context layout comm binding random parallel",
    "transforms": "_torch notation context layout comm binding params random parallel engine trace",
    "optim": "_torch notation context layout comm params",
    "checkpoint": "_torch notation layout comm params",
    "policies": "_torch notation layout comm parallel",
    "inspect": "_torch notation layout params trace transforms optim",
    "stateful": "_torch notation context layout comm binding params transforms optim checkpoint watch",
    "compat.common": "_torch notation layout comm binding params stateful watch",
    "compat.fsdp2": "_torch notation layout binding params stateful compat.common",
    "compat.fsdp1": "_torch notation context layout comm binding params stateful compat.common compat.fsdp2",
    "compat.hfai": "_torch notation comm stateful compat.common compat.fsdp1",
    "compat": "notation layout compat.fsdp2 compat.fsdp1 compat.hfai",
    "run": "watch",
    "testing": "_torch layout comm",
}
FACES = ("shardfn", "shardfn.__main__", "shardfn.collectives", "shardfn.data", "shardfn.tree")
PUBLIC_ROOMS = ("optim", "checkpoint", "policies", "testing", "compat", "compat.fsdp1", "compat.fsdp2", "compat.hfai")
LEAVES = ("shardfn.compat", "shardfn.testing")  # imported by users only
STATEFUL = ("shardfn.stateful", *LEAVES)  # all else is functions of values
MAX_DEPTH, MAX_MODULES, MAX_MODULE_LINES = 12, 14, 600
PRIVATE_ALLOWED = ("shardfn._torch", "shardfn.compat")  # may use torch's private names, and silence a checker
MAX_LINES = 60


def find_modules() -> dict[str, Path]:
    """Dotted name -> file of every module of the package."""
    names = {}
    for path in sorted((ROOT / "shardfn").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


MODULES = find_modules()
each_module = pytest.mark.parametrize("module", MODULES, ids=[str(path.relative_to(ROOT)) for path in MODULES.values()])


@cache
def parse(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"), str(MODULES[module]))


@cache
def nodes_of(module: str) -> list[ast.AST]:
    return list(ast.walk(parse(module)))


def is_inside(name: str, packages: str | tuple[str, ...]) -> bool:
    """Whether dotted `name` is one of `packages` or below one."""
    packages = (packages,) if isinstance(packages, str) else packages
    return any(name == package or name.startswith(package + ".") for package in packages)


def where(module: str, node: ast.stmt | ast.expr) -> str:
    return f"{MODULES[module].relative_to(ROOT)}:{node.lineno}"


# ---------------------------------------------------------------------------------------------------------------------
# Imports


@cache
def read_imports(module: str) -> list[tuple[str, ast.stmt]]:
    """Every imported dotted name, `from a import b` as `a.b`, also inside functions and `if TYPE_CHECKING`."""
    found: list[tuple[str, ast.stmt]] = []
    for node in nodes_of(module):
        if isinstance(node, ast.Import):
            found += [(alias.name, node) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                is_package = MODULES[module].name == "__init__.py"
                parts = module.split(".")
                above = parts[: len(parts) - node.level + is_package]
                base = ".".join([*above, *([base] if base else [])])
            found += [(f"{base}.{alias.name}", node) for alias in node.names]
    return found


def own_module(dotted: str) -> str | None:
    """The module of this package that importing `dotted` reads from."""
    parts = dotted.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in MODULES), None)


def own_imports(module: str) -> Iterator[tuple[str, ast.stmt]]:
    for dotted, node in read_imports(module):
        target = own_module(dotted)
        if target is not None and target != module:
            yield target, node


def room_of(module: str) -> str:
    """The room of a module, "" of a face."""
    names = module.split(".")[1:]
    if module in FACES:
        return ""
    return ".".join(names[:2]) if ".".join(names[:2]) in ROOMS else names[0]


@cache
def rooms_imported(room: str) -> dict[str, str]:
    """Room that a room imports from -> where it does first."""
    found: dict[str, str] = {}
    for module in MODULES:
        if room_of(module) == room:
            for target, node in own_imports(module):
                if room_of(target) != room:
                    found.setdefault(room_of(target), where(module, node))
    return found


def depth_of(room: str) -> int:
    return 1 + max(map(depth_of, ROOMS[room].split()), default=0)


def test_every_module_is_in_a_room() -> None:
    strangers = {module for module in MODULES if module not in FACES and room_of(module) not in ROOMS}
    assert not strangers, f"{strangers}: which room do they belong to? Rooms stand in tests/laws/test_rooms.py"


@pytest.mark.parametrize("room", ROOMS)
def test_room_imports_from_the_rooms_of_the_table(room: str) -> None:
    found, allowed = rooms_imported(room), set(ROOMS[room].split())
    extra = [f"{at}: {room} imports from {other or 'a face'}" for other, at in found.items() if other not in allowed]
    assert not extra, extra
    assert not allowed - set(found), f"{room} imports nothing from {allowed - set(found)}; take them from the table"


def test_rooms_are_few_floors() -> None:
    depths = {room: depth_of(room) for room in ROOMS}  # also that there is no cycle
    assert max(depths.values()) <= MAX_DEPTH, depths


@pytest.mark.parametrize("room", ROOMS)
def test_room_is_small_and_says_what_lives_there(room: str) -> None:
    module = f"shardfn.{room}"
    assert MODULES[module].name == "__init__.py"
    inside = [name for name in MODULES if room_of(name) == room and name != module]
    assert len(inside) <= MAX_MODULES, f"{room} has {len(inside)} modules; is it two rooms?"
    docstring = " ".join((ast.get_docstring(parse(module)) or "").split())
    assert "Not here:" in docstring, f"{room} says what lives there, and what does not: 'Not here: ...'"
    if room not in PUBLIC_ROOMS:
        unnamed = [name for name in inside if f"`{name.rpartition('.')[2]}`" not in docstring]
        assert not unnamed, f"the docstring of {room} says in which order to read; it leaves out {unnamed}"


@each_module
def test_module_is_short(module: str) -> None:
    lines = len(MODULES[module].read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_MODULE_LINES, f"{module} has {lines} lines; split it ({MAX_MODULE_LINES})"


@each_module
def test_nothing_reaches_behind_a_room(module: str) -> None:
    """Other rooms import what a room's `__init__` exports, from there."""
    for target, node in own_imports(module):
        room = room_of(target)
        if room and room != room_of(module):
            assert isinstance(node, ast.ImportFrom) and not node.level, where(module, node)
            is_room = target == f"shardfn.{room}" and f"{node.module}." == target[: len(node.module or "") + 1]
            assert is_room or node.module == f"shardfn.{room}", f"{where(module, node)}: import from shardfn.{room}"


@pytest.mark.parametrize("room", [room for room in ROOMS if room not in PUBLIC_ROOMS])
def test_a_room_exports_what_others_use(room: str) -> None:
    module = f"shardfn.{room}"
    exported = {alias.asname or alias.name for node in parse(module).body for alias in getattr(node, "names", ())}
    used = set()
    for other in MODULES:
        for dotted, _ in read_imports(other):
            if room_of(other) != room and dotted.startswith(f"{module}."):
                used.add(dotted.removeprefix(f"{module}.").partition(".")[0])
            if room_of(other) != room and dotted == module:  # `from shardfn import _torch`
                nodes = [node for node in nodes_of(other) if isinstance(node, ast.Attribute)]
                used |= {node.attr for node in nodes if ast.unparse(node.value) == room}
    assert exported - used == set(), f"{room} exports {exported - used}, which no other room uses"


@each_module
def test_no_import_cycle(module: str) -> None:
    came_from: dict[str, str] = {}
    queue = [module]
    while queue:
        here = queue.pop(0)
        for target, _ in own_imports(here):
            if target == module:
                cycle = [module, here]
                while cycle[-1] != module:
                    cycle.append(came_from[cycle[-1]])
                pytest.fail(f"import cycle: {' <- '.join(cycle)}")
            if target not in came_from:
                came_from[target] = here
                queue.append(target)


@each_module
def test_nothing_imports_compat_or_testing(module: str) -> None:
    for dotted, node in read_imports(module):
        for leaf in LEAVES:
            if is_inside(dotted, leaf):
                assert is_inside(module, leaf), f"{where(module, node)}: nothing imports {leaf}"


def test_planning_needs_no_processes() -> None:
    """Decide, then do: a plan is made from sizes alone, and knows `DeviceMesh` only as a type."""
    imports = [*read_imports("shardfn.layout.planning"), *read_imports("shardfn.layout.plan")]
    reached = {dotted for dotted, _ in imports if is_inside(dotted, "torch.distributed")}
    assert reached <= {"torch.distributed.device_mesh.DeviceMesh"}


# ---------------------------------------------------------------------------------------------------------------------
# Purity, private names, length


@each_module
def test_what_is_not_stateful_is_pure(module: str) -> None:
    if is_inside(module, STATEFUL):
        return
    for node in nodes_of(module):
        assert not isinstance(node, ast.Global), f"{where(module, node)}: `global`"
        if isinstance(node, ast.ClassDef):
            modules = [ast.unparse(b) for b in node.bases if re.match(r"(torch\.)?nn\.|Module$", ast.unparse(b))]
            assert not modules, f"{where(module, node)}: {node.name} is an nn.Module; here are functions"


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__")) and name != "_"


@cache
def private_definitions(module: str) -> set[str]:
    """Private names that a module defines: functions, classes, variables, fields, attributes set on `self`."""
    found: set[str] = set()
    for node in nodes_of(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "object.__setattr__":
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
    return {name for name in found if is_private(name)}


def is_own(value: ast.expr) -> bool:
    return ast.unparse(value) in ("self", "cls", "super()")


def read_private_uses(module: str) -> Iterator[tuple[str, bool, ast.expr]]:
    """(name, whether it is read from self, node) of every `x._name` and `getattr(x, "_name")`."""
    for node in nodes_of(module):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr, is_own(node.value), node
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            name = node.args[1] if len(node.args) > 1 else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str) and is_private(name.value):
                yield name.value, is_own(node.args[0]), node


@each_module
def test_private_names_stay_in_one_place(module: str) -> None:
    """A private name of torch belongs in `_torch.py`; one of another module of ours should not be private."""
    if is_inside(module, PRIVATE_ALLOWED):
        return
    problems = []
    for dotted, node in read_imports(module):
        if any(map(is_private, dotted.split("."))) and not is_inside(dotted, ("shardfn._torch", "__future__")):
            problems.append(f"{where(module, node)}: imports {dotted}")
    ours = set().union(*(private_definitions(other) for other in MODULES if not is_inside(other, PRIVATE_ALLOWED)))
    documented = {"_replace", "_asdict", "_fields", "_make", "_exit", "_torch"}  # namedtuple, os._exit, our own module
    for name, on_self, node in read_private_uses(module):
        if name not in (ours if on_self else private_definitions(module)) | documented:
            problems.append(f"{where(module, node)}: uses {ast.unparse(node)}")
    assert not problems, "private names outside shardfn/_torch.py:\n" + "\n".join(problems)


@each_module
def test_functions_are_short(module: str) -> None:
    for node in nodes_of(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            start = body[0].lineno if body else node.lineno
            lines = (node.end_lineno or start) - start + 1
            assert lines <= MAX_LINES, f"{where(module, node)}: {node.name} has {lines} lines; split it ({MAX_LINES})"


def python_files() -> list[Path]:
    return [path for folder in ("shardfn", "tests", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]


@each_module
def test_names_tell_things_apart(module: str) -> None:
    """Of the names that say nothing, a function has one at most."""
    for node in nodes_of(module):
        if isinstance(node, ast.FunctionDef):
            inside = list(ast.walk(node))
            names = {each.id for each in inside if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
            names |= {each.arg for each in inside if isinstance(each, ast.arg)}
            vague = names & {"found", "made", "own", "given"}
            assert len(vague) < 2, f"{where(module, node)}: {node.name} has {sorted(vague)}; say what they are"


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_checker_is_silenced(path: Path) -> None:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    if is_inside(name, PRIVATE_ALLOWED):
        return
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.COMMENT:
            silenced = re.search(r"\bnoqa\b|type:\s*ignore|pyright:\s*ignore|fmt:\s*(off|skip)", token.string)
            assert not silenced, f"{path.relative_to(ROOT)}:{token.start[0]}: {token.string}"


# ---------------------------------------------------------------------------------------------------------------------
# Pages


def test_the_page_of_a_weight_names_what_there_is() -> None:
    """Every function in the table of docs/design.md that follows a weight."""
    page = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    page = page.partition("## A weight, function by function")[2].partition("\n## ")[0]
    rows = [row.split("|")[2] for row in page.splitlines() if row.startswith("| ")][1:]
    named = {
        re.split(r"[./]", name)[-1] for row in rows for name in re.findall(r"`([\w./]+)(?:\(\.\.\.\)\.\w+)?`", row)
    }
    nodes = [node for module in MODULES for node in nodes_of(module)]
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    modules = {name.rpartition(".")[2] for name in MODULES}
    for module, name in re.findall(r"`(?:\w+/)?([a-z_]+)\.(\w+)", " ".join(rows)):
        homes = [m for m in MODULES if m.rpartition(".")[2] == module]
        inside = {getattr(node, "name", "") for home in homes for node in parse(home).body}
        assert name in inside | {"Function", "py"}, f"{module} has no {name}"
    assert len(rows) > 15 and named - defined - modules <= {"Function", "py"}, named - defined - modules
