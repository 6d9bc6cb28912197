"""What a run without data knows of a tensor, and what it cannot go on with. Layer 3."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

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
