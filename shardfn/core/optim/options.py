"""Options of an optimizer and of its groups of parameters. Layer 4."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

from torch import Tensor

from shardfn.core.errors import did_you_mean
from shardfn.core.optim.rates import rate_at

Options: TypeAlias = Mapping[str, Any]
Groups: TypeAlias = Mapping[str, Options]


def at_step(verb: str, options: Options, step: Tensor) -> Options:
    """Options with the learning rate of this step, which counts from 0."""
    lr = options["lr"]
    return options if not callable(lr) else {**options, "lr": rate_at(verb, "lr", lr, step)}


_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "lr": (lambda x: 0 <= x < math.inf, "a finite number from 0 up, or a callable step -> float"),
    "weight_decay": (lambda x: 0 <= x < math.inf, "a finite number from 0 up"),
    "eps": (lambda x: 0 <= x < math.inf, "a finite number from 0 up"),
    "momentum": (lambda x: 0 <= x < math.inf, "a finite number from 0 up"),
    "b1": (lambda x: 0 <= x < 1, "from 0 up to, but not including, 1"),
    "b2": (lambda x: 0 <= x < 1, "from 0 up to, but not including, 1"),
}


def no_option(where: str, name: str, known: Collection[str]) -> str:
    return f"{where} has no option {name!r}{did_you_mean(name, known) or '.'} There are {', '.join(known)}."


def require_options(where: str, given: Options, defaults: Options) -> None:
    for name, value in given.items():
        if name not in defaults:
            raise ValueError(no_option(where, name, defaults))
        if name not in _RANGES:
            if not isinstance(value, bool):
                raise TypeError(f"{where}: {name}={value!r} is not True or False")
        elif isinstance(value, bool) or not (isinstance(value, int | float) or (name == "lr" and callable(value))):
            raise TypeError(f"{where}: {name}={value!r} must be {_RANGES[name][1]}")
        elif not callable(value) and not _RANGES[name][0](value):
            raise ValueError(f"{where}: {name}={value!r} must be {_RANGES[name][1]}")
    merged = {**defaults, **given}
    if merged.get("nesterov") and not merged["momentum"]:
        raise ValueError(f"{where}: nesterov=True needs a momentum, for example momentum=0.9")
