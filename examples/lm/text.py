"""Bytes to train on: the sources of Python's own standard library, split by file, cut into windows, drawn by number.

Everything here is a pure function of its arguments. Every rank reads the same files, so nothing has to be sent, and a
restart needs only the number of the next step to go on with the same bytes.
"""

import os
import sysconfig
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

# Tests, tables of numbers, generated help texts and other people's packages: little to learn from.
SKIPPED = frozenset(
    "site-packages dist-packages test tests idle_test idlelib lib2to3 turtledemo encodings pydoc_data ensurepip "
    "__pycache__".split()
)
VALIDATION_PERCENT = 5


@dataclass(frozen=True)
class Corpus:
    """Two runs of bytes, `uint8`, from different files."""

    train: Tensor
    valid: Tensor

    @property
    def digest(self) -> str:
        """A short name for exactly these bytes: a run resumes only on the text it began with."""
        return f"{zlib.crc32(self.valid.numpy(), zlib.crc32(self.train.numpy())):08x}"


def source_files(root: Path) -> list[str]:
    """Return the `*.py` files below `root` in a fixed order, as relative POSIX paths, without the `SKIPPED` folders."""
    found: list[str] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED]  # the others are not walked through
        found += (Path(folder, name).relative_to(root).as_posix() for name in names if name.endswith(".py"))
    return sorted(found)


def is_validation(relative: str) -> bool:
    """Say on which side of the split a file is; it depends on nothing but its relative path."""
    return zlib.crc32(relative.encode()) % 100 < VALIDATION_PERCENT


def load_corpus(root: Path | None = None) -> Corpus:
    """Read the sources below `root` (default: the running Python's standard library).

    Raises:
        ValueError: one side of the split is empty.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    sides: dict[bool, bytearray] = {False: bytearray(), True: bytearray()}
    for relative in source_files(root):
        sides[is_validation(relative)] += (root / relative).read_bytes() + b"\n"
    if not all(sides.values()):
        raise ValueError(f"load_corpus: too few *.py files below {root} to train and validate on; name another folder")
    return Corpus(*(torch.frombuffer(sides[side], dtype=torch.uint8) for side in (False, True)))


@lru_cache(maxsize=2)
def _window_order(windows: int, seed: int, epoch: int) -> Tensor:
    """Return the order in which `epoch` goes through the windows; cached, since every step asks."""
    return torch.randperm(windows, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def _pairs(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the windows at `starts` as inputs and next bytes, `[len(starts), length]` each."""
    rows = text[starts[:, None] + torch.arange(length + 1)].long()
    return rows[:, :-1], rows[:, 1:]


@dataclass(frozen=True)
class Batches:
    """Training batches by number: each epoch visits every window of the text once, in its own order.

    `batches(step)` is the global batch, the same on every rank and every mesh; each rank then takes its rows.
    """

    text: Tensor
    batch: int
    length: int
    seed: int = 0

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and next bytes, `[batch, length]` each."""
        windows = (len(self.text) - 1) // self.length
        numbers = [divmod(step * self.batch + row, windows) for row in range(self.batch)]
        starts = [_window_order(windows, self.seed, epoch)[place] * self.length for epoch, place in numbers]
        return _pairs(self.text, torch.stack(starts), self.length)


def validation_batches(text: Tensor, windows: int, batch: int, length: int) -> list[tuple[Tensor, Tensor]]:
    """Return `windows` windows (rounded down to whole batches) spread evenly over `text`, in batches.

    Raises:
        ValueError: the text is shorter than that.
    """
    last = len(text) - length - 1
    if last < 0 or windows < batch:
        raise ValueError(f"validation_batches: {windows} windows of {length} by {batch} from {len(text)} bytes")
    starts = torch.linspace(0, last, windows // batch * batch, dtype=torch.float64).long()
    return [_pairs(text, part, length) for part in starts.split(batch)]


def bigram_counts(text: Tensor) -> Tensor:
    """Count how often each byte follows each byte: `[256, 256]`, row = first byte."""
    pairs = text[:-1].long() * 256 + text[1:].long()
    return torch.bincount(pairs, minlength=256 * 256).reshape(256, 256)


def bigram_loss(counts: Tensor, batches: Sequence[tuple[Tensor, Tensor]], smoothing: float = 1.0) -> float:
    """Return the nats per byte of the table that adds `smoothing` to every count, on the pairs in `batches`."""
    smoothed = counts.double() + smoothing
    log_prob = (smoothed / smoothed.sum(1, keepdim=True)).log()
    return -torch.cat([log_prob[x, y].flatten() for x, y in batches]).mean().item()
