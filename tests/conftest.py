"""Settings for all tests: one thread per process, and no rank left behind at the end."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: four ranks share few cores

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _end_ranks() -> Iterator[None]:
    yield
    from shardfn.testing import shutdown

    shutdown()
