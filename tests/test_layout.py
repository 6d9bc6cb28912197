"""The shape of the package: layers, cycles, purity, private names, function length, and what is public.

Everything up to "What is public" reads source with `ast` and imports nothing, so that it also runs over broken modules.
"""

import ast
import importlib
import io
import pydoc
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]

# A module imports only from its own layer or a lower one. A package without an entry takes its parent's.
LAYERS = {
    "shardfn._torch": 0,
    "shardfn.notation.errors": 0,
    "shardfn.layout.policy": 0,
    "shardfn.context.transform_state": 0,
    "shardfn.notation.spec": 1,
    "shardfn.layout.layout": 1,
    "shardfn.layout.mesh": 1,
    "shardfn.layout.model": 1,
    "shardfn.trace.operations": 1,
    "shardfn.layout.partition": 1,
    "shardfn.comm.point_to_point": 1,
    "shardfn.transforms.forward_mode": 1,
    "shardfn.comm.storage": 1,
    "shardfn.layout.plan": 2,
    "shardfn.layout.planning": 2,
    "shardfn.params.tree": 2,
    "shardfn.checkpoint.stored_names": 2,
    "shardfn.checkpoint.tensor_files": 2,
    "shardfn.random.masks": 2,
    "shardfn.comm.collectives": 2,
    "shardfn.comm.agreement": 3,
    "shardfn.transforms.foreign": 3,
    "shardfn.comm.buckets": 3,
    "shardfn.comm.packing": 3,
    "shardfn.params.initialize": 3,
    "shardfn.params.functional": 3,
    "shardfn.parallel.compute_axes": 3,
    "shardfn.core.engine": 3,
    "shardfn.parallel.linears": 4,
    "shardfn.parallel.loss": 4,
    "shardfn.parallel.experts": 4,
    "shardfn.parallel.layers": 4,
    "shardfn.parallel.wiring": 4,
    "shardfn.trace.traced_axes": 4,
    "shardfn.trace.suggestions": 4,
    "shardfn.trace.shape_trace": 4,
    "shardfn.transforms.module_call": 4,
    "shardfn.params.batches": 4,
    "shardfn.transforms.autodiff": 4,
    "shardfn.transforms.torch_func": 4,
    "shardfn.params.lowering": 4,
    "shardfn.core.optim": 4,
    "shardfn.inspect.check": 4,
    "shardfn.checkpoint.directories": 4,
    "shardfn.inspect.inspect": 4,
    "shardfn.transforms.shard_map": 4,
    "shardfn.checkpoint.safetensors": 4,
    "shardfn.transforms.jit": 4,
    "shardfn.core": 4,
    "shardfn.collectives": 5,
    "shardfn.optim": 5,
    "shardfn.tree": 5,
    "shardfn.checkpoint": 5,
    "shardfn.data": 5,
    "shardfn.families": 5,
    "shardfn.policies": 5,
    "shardfn.held": 5,
    "shardfn.torch_optimizers": 5,
    "shardfn.stateful": 5,
    "shardfn.trainer": 5,
    "shardfn": 5,
    "shardfn.compat": 6,
    "shardfn.testing": 7,
}
LEAVES = ("shardfn.compat", "shardfn.testing")  # imported by users only
# How modules compute with split weights knows nothing of the run without data, which overrides it.
PARALLEL = ("compute_axes", "tensor_parallel", "parallel_layers", "wiring", "experts", "loss")
TRACE = ("trial", "flow", "cures", "operations", "variance", "paired", "numbering", "beside_operations")
PRIVATE_ALLOWED = ("shardfn._torch", "shardfn.compat")  # may use torch's private names, and silence a checker
MAX_LINES = 60

# The names at top level, and no others (docs/design.md); some come in later releases.
PUBLIC = set(
    "make_mesh MeshSpec simulate Policy plan Plan shard Params gather reduce_grads reshard apply value_and_grad grad "
    "vmap jvp vjp hvp jit shard_map register cross_entropy typeof visualize check Report Trainer ShardError".split()
)
NAMESPACES = ("optim", "tree", "collectives", "checkpoint", "policies", "data", "testing")


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
    for node in ast.walk(parse(module)):
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


def find_layer(module: str) -> int | None:
    """The layer of a module, or of the nearest package above it; the two outermost packages lend theirs to nobody."""
    name = module
    while name not in LAYERS or (name != module and name in ("shardfn", "shardfn.core")):
        name = name.rpartition(".")[0]
        if not name:
            return None
    return LAYERS[name]


@each_module
def test_module_has_a_layer(module: str) -> None:
    layer = find_layer(module)
    assert layer is not None, f"{module} has no layer: add it to LAYERS in tests/test_layout.py"
    docstring = ast.get_docstring(parse(module)) or ""
    if MODULES[module].name != "__init__.py":
        stated = re.search(r"\blayer (\d)", docstring, re.IGNORECASE)
        assert stated, f"the docstring of {module} does not say its layer; write 'Layer {layer}.'"
        assert int(stated[1]) == layer, f"{module}: its docstring says layer {stated[1]}, LAYERS says {layer}"


@each_module
def test_imports_only_from_own_or_lower_layers(module: str) -> None:
    layer = find_layer(module)
    for target, node in own_imports(module):
        below = find_layer(target)
        if layer is not None and below is not None:
            assert below <= layer, f"{where(module, node)}: layer {layer} imports {target} of layer {below}"


@pytest.mark.parametrize("name", PARALLEL)
def test_what_computes_imports_nothing_that_traces(name: str) -> None:
    module = f"shardfn.core.{name}"
    traced = [where(module, node) for target, node in own_imports(module) if target.rpartition(".")[2] in TRACE]
    assert not traced, f"{traced}: let TracedAxes override it"


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
def test_core_is_pure(module: str) -> None:
    if not is_inside(module, "shardfn.core"):
        return
    for node in ast.walk(parse(module)):
        assert not isinstance(node, ast.Global), f"{where(module, node)}: `global` in core"
        if isinstance(node, ast.ClassDef):
            modules = [ast.unparse(b) for b in node.bases if re.match(r"(torch\.)?nn\.|Module$", ast.unparse(b))]
            assert not modules, f"{where(module, node)}: {node.name} is an nn.Module; core holds functions"


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__")) and name != "_"


@cache
def private_definitions(module: str) -> set[str]:
    """Private names that a module defines: functions, classes, variables, fields, attributes set on `self`."""
    found: set[str] = set()
    for node in ast.walk(parse(module)):
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
    for node in ast.walk(parse(module)):
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
    for node in ast.walk(parse(module)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            start = body[0].lineno if body else node.lineno
            lines = (node.end_lineno or start) - start + 1
            assert lines <= MAX_LINES, f"{where(module, node)}: {node.name} has {lines} lines; split it ({MAX_LINES})"


def python_files() -> list[Path]:
    return [path for folder in ("shardfn", "tests", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]


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
# What is public


def read_public_names() -> list[str]:
    """The names that `shardfn/__init__.py` imports or defines."""
    names: set[str] = set()
    for node in parse("shardfn").body if "shardfn" in MODULES else []:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return sorted(name for name in names if not name.startswith("_"))


def test_no_public_name_but_those_of_the_design() -> None:
    package = importlib.import_module("shardfn")
    values = {name for name, value in vars(package).items() if not isinstance(value, ModuleType)}
    modules = {name for name, value in vars(package).items() if isinstance(value, ModuleType)}
    extra = {name for name in values if not name.startswith("_")} - PUBLIC
    assert not extra, f"shardfn has public names that are not in the design: {sorted(extra)}"
    strangers = {name for name in modules if f"shardfn.{name}" not in MODULES and not is_namespace(name)}
    assert not strangers, f"shardfn re-exports modules of others: {sorted(strangers)}"


def is_namespace(name: str) -> bool:
    return name in (*NAMESPACES, "core", "compat")


@pytest.mark.parametrize("name", [name for name in read_public_names() if not is_namespace(name)])
def test_public_name_has_an_example(name: str) -> None:
    docstring = vars(importlib.import_module("shardfn"))[name].__doc__ or ""
    assert docstring.strip(), f"shardfn.{name} has no docstring"
    assert ">>>" in docstring or "```" in docstring, f"the docstring of shardfn.{name} has no example"


@pytest.mark.parametrize("name", NAMESPACES)
def test_namespace_can_be_imported(name: str) -> None:
    assert isinstance(importlib.import_module(f"shardfn.{name}"), ModuleType)


@pytest.mark.parametrize("name", ["", *NAMESPACES])
def test_help_and_api_pages_list_what_a_module_has(name: str) -> None:
    """Both go by `__all__`: of a module without one they leave out what is defined elsewhere."""
    module = importlib.import_module(f"shardfn.{name}".rstrip("."))
    ours = [node for node in ast.walk(parse(module.__name__)) if isinstance(node, ast.ImportFrom)]
    exported = {alias.asname for node in ours for alias in node.names if alias.asname == alias.name}
    assert exported <= set(module.__all__)
    text = pydoc.plain(pydoc.render_doc(module))
    for other in module.__all__:
        if not isinstance(vars(module)[other], ModuleType):
            assert vars(module)[other].__doc__, f"{module.__name__}.{other} has no docstring"
            assert re.search(rf"^    (class )?{other}\b", text, re.MULTILINE), other


def test_the_page_of_a_weight_names_what_there_is() -> None:
    """Every function in the table of docs/design.md that follows a weight."""
    page = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    page = page.partition("## A weight, function by function")[2].partition("\n## ")[0]
    rows = [row.split("|")[2] for row in page.splitlines() if row.startswith("| ")][1:]
    named = {name.rpartition(".")[2] for row in rows for name in re.findall(r"`([\w./]+)(?:\(\.\.\.\)\.\w+)?`", row)}
    nodes = [node for module in MODULES for node in ast.walk(parse(module))]
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    modules = {name.rpartition(".")[2] for name in MODULES}
    assert len(rows) > 15 and named - defined - modules <= {"Function", "py"}, named - defined - modules
