"""Which tests run when, one thread per process, and no rank or process group left behind.

`make test` is everything but what is marked `slow`: files that take long (`SLOW`), single tests, and a test that begins
ranks on all but one mesh for each case. `@pytest.mark.everyday(n)` keeps n cases of any test, also in such a file.
`make test-all` is what is slow, and every property (`hypothesis`, `hold_for_all`) with six times the examples. Of a
test marked `one_mesh` each case runs on one of its meshes, of one marked `sample(n)` n cases; the others are marked
`rest`, and run when no marks are asked for. `-m "not slow and not ranks"` needs no process group. `make properties` is
what is marked `law`, with the number of examples that `--examples` says, and prints how many each has had.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: four ranks share few cores

import gc
import sys
from collections.abc import Iterator
from itertools import groupby
from random import Random
from types import CodeType, FunctionType

import pytest
from hypothesis import settings

# What takes long, for `make test-all`; the rest is `make test`.
SLOW = frozenset(
    "test_benchmarks test_compat_scripts test_experts test_transformers test_fsdp1_parity "
    "test_fsdp2_example test_fsdp2_options test_fsdp2_table test_module_call_generate test_jit test_safetensors "
    "test_wiring test_sweep".split()
)
# What begins ranks, or a process group of this one process; and what draws many examples.
STARTS = {"run", "run_raises", "on_meshes", "make_mesh", "init_device_mesh", "init_process_group", "subprocess"}
DRAWS = {"changes", "hold_for_all", "hold_in_turn", "hold_here", "run_state_machine_as_test"}
MANY, PATIENCE = 1000, 1800  # so many examples of a property may take so many seconds


def pytest_addoption(parser: pytest.Parser) -> None:
    """How many examples of each property."""
    parser.addoption("--examples", type=int, help="of each property; 50 by default, 300 in make test-all")


def pytest_configure(config: pytest.Config) -> None:
    """Few examples of each property every day."""
    few = 300 if "property" in (config.option.markexpr or "") else 50
    settings.register_profile("tier", max_examples=config.getoption("examples") or few, deadline=None)
    settings.load_profile("tier")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with what it is."""
    for (path, _), group in groupby(items, lambda item: (item.path, getattr(item, "originalname", item.name))):
        cases = list(group)
        test = getattr(cases[0], "function", None)
        names = _names_used(test, set())
        marks = [mark for mark in ("slow", "ranks", "property") if cases[0].get_closest_marker(mark)]
        few = cases[0].get_closest_marker("everyday")
        marks += ["slow"] * (path.stem in SLOW and few is None) + ["ranks"] * bool(names & STARTS)
        marks += ["property"] * (bool(names & DRAWS) or getattr(test, "is_hypothesis_test", False))
        draw = Random(cases[0].nodeid.partition("[")[0])
        chosen = _one_mesh_each(cases, draw) if cases[0].get_closest_marker("one_mesh") else cases
        if sample := cases[0].get_closest_marker("sample"):
            chosen = draw.sample(chosen, min(sample.args[0], len(chosen)))
        if few is not None:
            kept = draw.sample(chosen, min(few.args[0], len(chosen)))
        else:
            kept = _one_mesh_each(chosen, draw) if "ranks" in marks else chosen
        if "property" in marks and settings.get_profile("tier").max_examples >= MANY:
            for item in cases:
                item.add_marker(pytest.mark.timeout(PATIENCE))
        for item in cases:
            for mark in marks + ["slow"] * (item not in kept) + ["rest"] * (item not in chosen):
                item.add_marker(mark)


def _one_mesh_each(cases: list[pytest.Item], draw: Random) -> list[pytest.Item]:
    """The cases of a test that differ in more than the mesh, each on a mesh that is drawn."""
    alike: dict[str, list[pytest.Item]] = {}
    for item in cases:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        others = {name: value for name, value in params.items() if name not in ("mesh", "axes")}
        alike.setdefault(repr(others), []).append(item)
    return [draw.choice(several) for several in alike.values()]


def _names_used(fn: object, seen: set[object]) -> set[str]:
    """The names that a test uses, and the functions of the tests, or of `testing`, that it calls."""
    if not isinstance(fn, FunctionType) or fn in seen:
        return set()
    seen.add(fn)
    inside = [fn.__code__]
    for code in inside:
        inside += [each for each in code.co_consts if isinstance(each, CodeType)]
    names = {name for code in inside for name in code.co_names}
    called = [fn.__globals__[name] for name in names if name in fn.__globals__] + [getattr(fn, "hypothesis", None)]
    called += [getattr(called[-1], "inner_test", None)]
    return names.union(*(_names_used(each, seen) for each in called if _is_of_tests(each)))


def _is_of_tests(value: object) -> bool:
    file = value.__code__.co_filename if isinstance(value, FunctionType) else ""
    return "/tests/" in file or "/shardfn/testing/" in file


def pytest_collection_finish() -> None:
    """What was imported and collected stays: no collection of garbage looks at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _only_what_is_marked_starts_ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that `-m "not ranks"` is what it says."""
    if request.node.get_closest_marker("ranks") is None:
        import torch.distributed as dist

        from shardfn.testing import process_pool

        init = dist.init_process_group
        monkeypatch.setattr(process_pool, "call_ranks", _not_marked)
        monkeypatch.setattr(dist, "init_process_group", lambda *a, **k: (init if "fake" in a else _not_marked)(*a, **k))


def _not_marked(*args: object, **kwargs: object) -> None:
    raise AssertionError("this test starts ranks, or a process group, by a name that tests/conftest.py does not know")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Note how many examples a law has had."""
    from drawing import EXAMPLES

    settings.load_profile("tier")  # torch.testing._internal loads one of its own, of 10 examples
    EXAMPLES.clear()
    law = item.get_closest_marker("law")
    try:
        yield
    finally:
        if law is not None:
            item.user_properties.append(("law", f"{law.args[0]:4}{item.name:60}{EXAMPLES['ran']:6} examples"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Examples of the laws; of the tables of compatible classes, how many rows are served, refused and missing."""
    if terminalreporter.config.getoption("examples"):
        _write_laws(terminalreporter)
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    rows = [value for report in reports for key, value in report.user_properties if key == "rows"]
    if rows:
        terminalreporter.section("rows of the tables")
    for value in rows:
        terminalreporter.write_line(str(value))


def _write_laws(terminalreporter: pytest.TerminalReporter) -> None:
    """A line for each property: how many examples it has had, whether it holds, and how long that took."""
    reports = [(x, y) for x in ("passed", "failed") for y in terminalreporter.getreports(x)]
    lines = [
        (v, x, y.duration) for x, y in reports for key, v in y.user_properties if key == "law" and y.when == "call"
    ]
    terminalreporter.section("properties")
    for law, outcome, seconds in sorted(lines, key=lambda line: (int(str(line[0]).split()[0][1:]), line)):
        terminalreporter.write_line(f"{law} {outcome} {seconds:6.0f} s")


@pytest.fixture(scope="session", autouse=True)
def _end_ranks() -> Iterator[None]:
    yield
    from shardfn.testing import shutdown

    shutdown()


@pytest.fixture(scope="module", autouse=True)
def _end_world() -> Iterator[None]:
    """The world of one rank that a test starts is not that of the tests of other modules."""
    yield
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module", autouse=True)
def _leave_torch_as_it_was() -> Iterator[None]:
    """What a test imports of torch is torch's: no module of tests leaves the import switch on."""
    yield
    assert not any(type(finder).__module__ == "shardfn.compat.switch" for finder in sys.meta_path), "switch.off() it"
