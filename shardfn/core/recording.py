"""What is known of a step while `jit` records it. Layer 1."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardfn._torch import outside_modes
from shardfn.core.errors import ShardError
from shardfn.core.underway import holding


@dataclass
class Number:
    """What Python says of an input before each run."""

    fn: Callable[[Tensor], Any]
    of: int
    value: Tensor  # []

    def renew(self, inputs: Sequence[Tensor]) -> None:
        """Ask for it."""
        self.value.fill_(self.fn(inputs[self.of]))


@dataclass
class Recording:
    """One run of a step on tensors without values."""

    inputs: dict[int, int]  # by identity, which input a tensor is
    models: list[nn.Module] = field(default_factory=list)  # that `apply` ran: their modes are constants of the graph
    numbers: list["Number"] = field(default_factory=list)

    def number(self, what: str, fn: Callable[[Tensor], Any], of: Tensor) -> Tensor:
        """A tensor that has `fn(of)` whenever the graph runs: Python, before each run, of an input of the step.

        Raises:
            ShardError: `of` is something that the step has computed.
        """
        if id(of) not in self.inputs:
            raise ShardError(
                f"{what} is a function of Python, and of a step that is computed inside of the compiled one; use a "
                f"number, or one update in each compiled step"
            )
        with outside_modes():
            made = Number(fn, self.inputs[id(of)], torch.zeros((), dtype=torch.float64))
        self.numbers.append(made)
        return made.value


_CURRENT: ContextVar[Recording | None] = ContextVar("recording", default=None)
recording: Callable[[], Recording | None] = _CURRENT.get  # the one under way


@contextmanager
def recorded(inputs: Sequence[Tensor]) -> Iterator[Recording]:
    """Within it runs a step whose operations are recorded."""
    made = Recording({id(x): i for i, x in enumerate(inputs)})
    with holding(_CURRENT, made):
        yield made
