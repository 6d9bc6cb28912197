"""Learning rates: numbers, or functions of the number of updates so far. Layer 4."""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor

from shardfn.core.context import recording

Rate: TypeAlias = float | Callable[[int], float]


def rate_at(verb: str, what: str, fn: Callable[..., Any], step: Tensor) -> Any:
    """The rate after so many updates; in a recorded step it is asked for before every run."""

    def checked(step: Tensor) -> Any:
        value = fn(int(step))
        if not isinstance(value, Tensor) and not value >= 0:
            raise ValueError(f"{verb}: {what}({int(step)}) is {value!r}, which is not a number from 0 up")
        return value

    recorder = recording()
    return checked(step) if recorder is None else recorder.number(f"{verb}: {what}", checked, step)


def warmup_cosine(peak: float, warmup: int, total: int, floor: float = 0.0) -> Callable[[int], float]:
    """A learning rate that rises linearly over `warmup` steps and falls on a cosine to `floor` at step `total`.

        >>> import shardfn as sf
        >>> rate = sf.optim.warmup_cosine(1.0, warmup=4, total=12)
        >>> [round(rate(step), 3) for step in (0, 1, 3, 4, 8, 12, 99)]
        [0.25, 0.5, 1.0, 1.0, 0.5, 0.0, 0.0]

    Args:
        peak: the largest rate, reached at step `warmup - 1`; the first one is `peak / warmup`.
        warmup: steps that rise; 0 starts at the peak.
        total: the step from which on the rate is `floor`.
        floor: the last rate, not a fraction of the peak.

    Returns:
        a function of the number of updates so far, for `lr=` or `schedule`.

    Raises:
        ValueError: rates below 0, a floor above the peak, or a warm-up that is longer than the whole.
    """
    if not 0 <= floor <= peak < math.inf:
        raise ValueError(f"warmup_cosine: floor={floor!r} and peak={peak!r} must be 0 <= floor <= peak")
    if not 0 <= warmup <= total or total < 1:
        raise ValueError(
            f"warmup_cosine: warmup={warmup!r} and total={total!r} must be 0 <= warmup <= total, total >= 1"
        )

    def rate(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / warmup
        done = min((step - warmup) / max(total - warmup, 1), 1.0) if step < total else 1.0
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * done))

    return rate
