"""Settings for all tests: one thread per process, and no rank or process group left behind."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: four ranks share few cores

from collections.abc import Iterator

import pytest

# What takes long, for `make test-all`; the rest is `make test`.
SLOW = frozenset(
    "test_benchmarks test_compat_scripts test_compiled_forwards test_experts test_transformers test_fsdp1_parity test_fsdp2_example "
    "test_fsdp2_options test_fsdp2_table test_module_call_generate test_jit test_safetensors test_wiring test_sweep".split()
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what takes long."""
    for item in items:
        if item.path.stem in SLOW:
            item.add_marker("slow")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Of the tables of compatible classes, how many rows are served, refused and missing."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    rows = [value for report in reports for key, value in report.user_properties if key == "rows"]
    if rows:
        terminalreporter.section("rows of the tables")
    for value in rows:
        terminalreporter.write_line(str(value))


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
