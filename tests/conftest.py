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


@pytest.fixture(scope="module", autouse=True)
def _end_world() -> Iterator[None]:
    """A process group that a test leaves behind would be the world of all tests after it."""
    yield
    import torch.distributed as dist

    assert not dist.is_initialized(), "a test of this module left a process group behind"
