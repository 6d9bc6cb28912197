"""A plan while it is decided: what is known so far, and the problems that were found."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Literal

from shardfn.layout.mesh import Roles
from shardfn.layout.model_info import ModelInfo
from shardfn.layout.policy import Policy, matches
from shardfn.notation import Factor, Sizes, Spec, did_you_mean

Sized = tuple[Factor, int, int]  # a factor of a rule, and its size without and with padding
ParamRule = tuple[Spec, str]  # of one parameter, expanded and with all axes in place; and where it comes from


@dataclass(frozen=True)
class Draft:
    """A plan in the making: what it is made of, and what is wrong with that so far."""

    info: ModelInfo
    axes: dict[str, int]
    role: Roles
    policy: Policy
    sizes: Sizes
    problems: list[str]

    def splitting(self, axes: Iterable[str]) -> list[str]:
        """Those that are compute axes of several ranks."""
        return [axis for axis in axes if axis in self.role.compute and self.axes[axis] > 1]

    def ways(self, factor: Factor) -> int:
        """How many parts a rule asks for."""
        return prod(self.axes.get(axis, 1) for axis in factor.axes)

    def padded(self, factor: Factor, size: int) -> int:
        """The size of a factor with the padding that the policy asks for."""
        multiple = self.policy.pad.get(factor.name, 1)
        return -(-size // multiple) * multiple

    def check_patterns(self, where: str, patterns: Iterable[str], kind: Literal["module", "parameter"]) -> None:
        """Note the patterns that match no module, or no parameter."""
        params = (name for param in self.info.params for name in param.names)
        names = list(params) if kind == "parameter" else [module.name for module in self.info.modules]
        known = [name for name in names if name]
        few = f" The model has {', '.join(known[:3])}{', ...' if len(known) > 3 else ''}." if known else ""
        for pattern in patterns:
            if not any(matches(pattern, name) for name in names):
                hint = did_you_mean(pattern, known) or "."
                self.problems.append(f"{where} {pattern!r} matches no {kind}{hint}{few}")
