"""What a run without data knows of a tensor, and what it has found. Layer 3."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shardfn.core.parts import Part

BY_ACTS = "acts "  # begins what `Tag.split_by` has of an entry of `Policy.acts`


@dataclass(frozen=True)
class Tag:
    """What is known about one tensor.

    `parts`: what it is over each axis it varies over. `wants`: whether it depends on what is differentiated, which its
    `requires_grad` does not say inside an autograd.Function or a checkpoint that will recompute. `sources`: the
    parameters, and inputs and outputs of modules, that its gradient goes to; none when they are not known. `split_by`:
    the column-parallel modules whose split it carries, or the modules that `Policy.acts` splits. `weight`: whether it
    is a weight, moved at most. `empty`: the axes that split it with padding in which there are only zeros.
    """

    parts: Mapping[str, Part] = field(default_factory=dict)
    wants: bool = False
    sources: frozenset[str] = frozenset()
    split_by: frozenset[str] = frozenset()
    weight: bool = False
    empty: frozenset[str] = frozenset()

    @property
    def source(self) -> str | None:
        """The one parameter, or input or output of a module, that it is made of."""
        return next(iter(self.sources)) if len(self.sources) == 1 else None

    @property
    def by_acts(self) -> set[str]:
        """The modules at which `Policy.acts` splits it."""
        return {source.removeprefix(BY_ACTS) for source in self.split_by if source.startswith(BY_ACTS)}

    def whole_shape(self, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the whole value, of which a rank has `shape`."""
        for axis, part in self.parts.items():
            shape = part.whole_shape(shape, sizes[axis])
        return shape


Kind = Literal["gradient", "whole", "sizes", "pads", "rules", "sums", "acts", "twice", "random", "backward", "zeros"]


@dataclass(frozen=True)
class Problem:
    """Something that no collective can mend: what it is, and by its kind what may be done about it.

    `sources`: the modules whose split the value carries. `at`: the module in which it went wrong.
    """

    what: str
    kind: Kind
    sources: frozenset[str] = frozenset()
    at: str = ""


@dataclass(frozen=True)
class Stuck:
    """An operation that raised, and what was known of the tensors that it was given."""

    name: str
    inputs: tuple[tuple[tuple[int, ...], Tag], ...]


@dataclass
class Findings:
    """What a run without data found: which collectives are missing, and what none can mend."""

    vary: set[tuple[str, str]] = field(default_factory=set)  # (source, axis)
    mixed: list[Problem] = field(default_factory=list)  # problems that no single source explains
    gather: set[str] = field(default_factory=set)  # column-parallel modules whose output leaves `apply`
    sums: set[tuple[str, int, str]] = field(default_factory=set)  # (module, leaf of its output, axis) still to add up
    ready: set[tuple[str, str]] = field(default_factory=set)  # (module, axis): its input has been varied before
    shared: set[tuple[int, str]] = field(default_factory=set)  # (leaf of the output, axis): the same, used in shares
    kept: set[tuple[int, str, int]] = field(default_factory=set)  # (leaf of the output, axis, dim): stays split
    joined: set[tuple[int, str, int]] = field(default_factory=set)  # (leaf of the output, axis, dim): is gathered
    # of activations that `Policy.acts` splits, see `Adjustments`
    inputs: set[Any] = field(default_factory=set)
    outputs: set[Any] = field(default_factory=set)
    scattered: set[tuple[str, str, int]] = field(default_factory=set)
    in_shares: set[str] = field(default_factory=set)
    may_scatter: set[tuple[str, str, int]] = field(default_factory=set)
    whole: set[str] = field(default_factory=set)
    entries: set[str] = field(default_factory=set)
    several: set[str] = field(default_factory=set)
