"""Names of parameters and modules that are alike but for the numbers of layers, as one."""

import re
from collections.abc import Sequence
from math import prod

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole segment of a name


def without_numbers(name: str) -> str:
    """What names of like layers have in common: `layers.#.up`."""
    return _NUMBER.sub("#", name)


def in_one(names: Sequence[str]) -> str | None:
    """Names that differ by numbers as one, `layers.{0..79}.up`; None where these are not all their combinations."""
    columns = [sorted(set(map(int, column))) for column in zip(*map(_NUMBER.findall, names), strict=True)]
    if len(set(names)) != prod(map(len, columns)) and len(set(names)) > 1:
        return None
    texts = iter(map(_run, columns))
    return _NUMBER.sub(lambda _: next(texts), names[0])


def _run(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    if first == last:
        return str(first)
    whole = last - first + 1 == len(numbers) > 2
    return f"{{{first}..{last}}}" if whole else "{" + ",".join(map(str, numbers)) + "}"
