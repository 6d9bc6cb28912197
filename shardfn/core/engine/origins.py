"""Where the values of a run without data come from, so that two runs can tell whether they use the same ones. Layer 3.

[Note: origins]
Two values of the same shape may be taken for each other: `y if h.shape[-1] > 8 else z`. So each value has an *origin*,
which is the same number in the run with whole values and in those with parts:

    a weight, buffer, input         its name
    a result that counts            the record of its operation in the whole run, and which result it is
    a view or copy, a collective    that of the value; another one where its memory has been written since
    a value without its graph       the value's, cut
    a constant, an integer          what it was made by, of which constants and numbers
    a tensor from elsewhere         its values
    the output of a module          what the whole run has there, when another forward stands for the module's own

None is unknown, which is never another one than anything.
"""

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from shardfn._torch import base_of, holds_data, pytree, storage_number

Origin = int | None

# Of what they are given only shape and dtype count.
OF_SHAPES = {f"{what}_like" for what in ("zeros", "ones", "full", "empty", "rand", "randn", "randint")}
OF_SHAPES |= {f"new_{what}" for what in ("zeros", "ones", "full", "empty", "empty_strided")}


_NOTHING = (None, -1)  # has been written
_MOST = 2**20  # elements of a tensor from elsewhere


class Made(Protocol):
    """What an operation is remembered by."""

    @property
    def name(self) -> str: ...
    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]: ...
    @property
    def numbers(self) -> tuple[Any, ...]: ...
    @property
    def given(self) -> tuple[Origin, ...]: ...


class Origins:
    """The origins of the values of one run."""

    def __init__(self, other: "Origins | None" = None) -> None:
        """`other`: those of a run that they are compared with."""
        self._of = WeakIdKeyDictionary()  # tensor -> its origin, and what had been written to its memory by then
        self._written: dict[int, tuple[torch.UntypedStorage, Origin]] = {}  # storage, what has been written to it
        self._numbers: dict[Hashable, int] = other._numbers if other is not None else {}

    def of(self, tensors: Sequence[Tensor]) -> tuple[Origin, ...]:
        """The origins of values."""
        return tuple(map(self._origin, tensors))

    def _origin(self, x: Tensor) -> Origin:
        if (known := self._of.get(x)) is not None:
            origin, before = known
            now = self._history(x)
            if now == before or origin is None:
                return origin
            return None if now is None else self._number(("written", origin, now))
        if x.is_meta or not holds_data(x) or x.numel() > _MOST:
            return None
        return self._number(("held", x.dtype, tuple(x.shape), hash_of(x)))

    def name(self, x: Tensor, *words: Hashable) -> None:
        """Say what a value is."""
        self._put(x, self._number(words))

    def name_all(self, tree: Any, kind: str) -> None:
        """Say of every tensor of a tree that it is one of a kind, by its place."""
        for at, leaf in enumerate(pytree.tree_leaves(tree)):
            if isinstance(leaf, Tensor):
                self.name(leaf, kind, at)

    def numbers(self, count: int, *words: Hashable) -> tuple[int, ...]:
        """Those of the results of an operation that words are about."""
        return tuple(self._number((*words, at)) for at in range(count))

    def constants(self, record: "Made") -> tuple[Origin, ...]:
        """Those of what an operation makes of constants and numbers."""
        given = () if record.name in OF_SHAPES or record.name == "lift_fresh" else record.given
        count = len(record.shapes)
        return (None,) * count if None in given else self.numbers(count, record.name, record.numbers, *given)

    def put(self, results: Sequence[Tensor], origins: Sequence[Origin], written: bool = False) -> None:
        """Remember the origins of results; `written`: they may be views of what an operation has written."""
        for x, origin in zip(results, origins, strict=True):
            if written:
                before = self._history(x)
                history = None if None in (origin, before) else self._number(("history", before, origin))
                self._written[storage_number(x)] = x.untyped_storage(), history
            self._put(x, origin)
            base = base_of(x) if written else None
            if base is not None:
                self._put(base, origin)

    def _put(self, x: Tensor, origin: Origin) -> None:
        self._of[x] = origin, self._history(x)

    def _history(self, x: Tensor) -> Origin:
        """What has been written to the memory of a tensor, in this run; None is unknown."""
        return self._written.get(storage_number(x), _NOTHING)[1] if self._written else _NOTHING[1]

    def cut(self, origin: Origin) -> Origin:
        """That of a value without its graph."""
        return None if origin is None else self._number(("cut", origin))

    def _number(self, words: Hashable) -> int:
        return self._numbers.setdefault(words, len(self._numbers))


def hash_of(x: Tensor) -> int:
    """The same number for the same values."""
    values = x.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten()
    return hash(values.view(torch.uint8).numpy().tobytes())


def passed_on(given: Sequence[Origin]) -> Origin:
    """That of what is made of values of one origin."""
    return given[0] if given and given.count(given[0]) == len(given) else None


def differ(mine: Sequence[Origin], others: Sequence[Origin]) -> bool:
    """Whether values are known to be others."""
    pairs = zip(mine, others, strict=True) if len(mine) == len(others) else ()
    return any(None not in pair and pair[0] != pair[1] for pair in pairs)
