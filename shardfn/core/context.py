"""Values that hold while something runs. Layer 0."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def holding(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Within it the variable has this value; afterwards it has the one that it had before."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
