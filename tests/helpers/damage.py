"""Bytes that are changed at random, as disks and people change them."""

import random
from collections.abc import Iterator

from drawing import EXAMPLES
from hypothesis import settings


def changes() -> Iterator[int]:
    """So many changes, five for each example of a property: 10,000 in `make properties`."""
    for EXAMPLES["ran"] in range(1, 5 * settings().max_examples + 1):
        yield EXAMPLES["ran"]


def changed(data: bytearray, draw: random.Random) -> bytearray:
    """A change of a file."""
    at = draw.randrange(len(data))
    match draw.choice(("bit", "byte", "zeros", "cut", "longer", "twice", "swap")):
        case "bit":
            data[at] ^= 1 << draw.randrange(8)
        case "byte":
            data[at] = draw.randrange(256)
        case "zeros":
            data[at : at + 64] = bytes(len(data[at : at + 64]))
        case "cut":
            del data[at:]
        case "longer":
            data += draw.randbytes(draw.randrange(1, 9))
        case "twice":
            data[at:at] = data[at : at + 32]
        case _:
            other = draw.randrange(len(data))
            data[at], data[other] = data[other], data[at]
    return data
