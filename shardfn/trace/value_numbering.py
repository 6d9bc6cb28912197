"""Numbers of values: what two runs of one forward make alike has the same one.

[Note: numbers of values]
A forward that decides by a size of this rank may still compute the same: `k if repeats == 1 else k.expand(...)`. So a
run that goes the way of one process, and one that goes the way of a rank, number what a rank has:

    a weight, buffer, input      its name
    a result                     its function, the numbers among the arguments, and what these are
    a view or a copy             that of the value; another one where its memory has been written since
    a value without its graph    the value's, cut
    a draw                       which one it is
    a tensor from elsewhere      its values

Functions are those of torch that a forward calls: what torch makes of one depends on sizes, too.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from shardfn._torch import address_of, base_of, bytes_of, holds_data, pytree
from shardfn.trace.meta_values import MetaValues
from shardfn.trace.paired_sizes import Paired, local_of, of_side

# Of what they are given only shape and dtype count.
_OF_SHAPES = {f"{what}_like" for what in ("zeros", "ones", "full", "empty", "rand", "randn", "randint")}
_OF_SHAPES |= {f"new_{what}" for what in ("zeros", "ones", "full", "empty", "empty_strided")}
# What keeps elements and their order, where it makes neither more nor less of them.
_KEEPING = set(
    "view reshape view_as reshape_as unsqueeze squeeze flatten unflatten expand expand_as broadcast_to repeat tile "
    "repeat_interleave contiguous clone detach alias to type type_as float double half bfloat16 cat concat "
    "__getitem__ narrow requires_grad_ cpu cuda".split()
)
_SLICES = (slice, int, type(None), type(Ellipsis))
_MOST = 2**20  # elements of a tensor from elsewhere
_UNWRITTEN = -1


class ValueNumbers:
    """The numbers of the values of one run."""

    def __init__(self, other: "ValueNumbers | None" = None, on_cpu: bool = True) -> None:
        """`other`: those of a run that they are compared with; `on_cpu`: see `MetaValues`."""
        self.values = MetaValues(on_cpu)  # which are known in this run
        self._known: dict[Hashable, int] = other._known if other is not None else {}
        self._of = WeakIdKeyDictionary()  # tensor -> its number, and what had been written to its memory by then
        self._written: dict[int, tuple[torch.UntypedStorage, int]] = {}  # storage, what has been written to it
        self.draws = 0  # operations that drew random numbers
        self.writes: list[Tensor] = []  # what the function that is running has written

    def of(self, x: Tensor) -> int:
        """The number of a value."""
        if (known := self._of.get(x)) is not None:
            number, before = known
            now = self._history(x)
            return number if now == before else self._number("written", number, now)
        held = self.values.of(local_of(x))
        if held is None or not holds_data(held) or held.numel() > _MOST:
            return self._number("unknown", len(self._known))
        return self._number("held", held.dtype, tuple(held.shape), hash(bytes_of(held.cpu()).numpy().tobytes()))

    def name(self, x: Tensor, *words: Hashable) -> None:
        """Say what a value is."""
        self._put(x, self._number(*words))

    def same(self, x: Tensor, as_: Tensor, *words: Hashable) -> None:
        """A value is what a collective, named by words, makes of another one; or that itself."""
        self._put(x, self._number(*words, self.of(as_)) if words else self.of(as_))

    def note(self, func: Any, args: Any, kwargs: Any, out: Any, draws: int) -> None:
        """What a function has made of what a rank has, before which there had been `draws`."""
        results = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
        writes, self.writes = self.writes, []
        if not results and not writes:
            return
        number = self._made(func, args, kwargs, results, draws)
        for x in writes:
            storage = local_of(x).untyped_storage()
            self._written[address_of(storage)] = storage, self._number("history", self._history(x), number)
            if (base := base_of(x)) is not None:
                self._put(base, number)
            self._put(x, number)
        for at, x in enumerate(results):
            self._put(x, number if len(results) == 1 else self._number(number, at))

    def _made(self, func: Any, args: Any, kwargs: Any, results: Sequence[Tensor], draws: int) -> int:
        name = getattr(func, "__name__", str(func))
        if func is F.scaled_dot_product_attention and local_of(args[0]).shape[1] == local_of(args[1]).shape[1]:
            kwargs = {key: x for key, x in kwargs.items() if key != "enable_gqa"}  # there are no groups
        leaves = pytree.tree_leaves((args, kwargs))
        inputs = [x for x in leaves if isinstance(x, Tensor)]
        if name in _KEEPING and len(inputs) == len(results) == 1 and _keeps(inputs[0], results[0], args):
            number = self.of(inputs[0])
            return self._number("cut", number) if name == "detach" else number
        if func in (torch.tensor, torch.as_tensor) and not inputs:  # of which the numbers are known
            return self._number("numbers", str(args), str(kwargs))
        plain = tuple(_plain(x) for x in leaves if not isinstance(x, Tensor))
        of_inputs = () if name in _OF_SHAPES else tuple((self.of(x), tuple(local_of(x).shape)) for x in inputs)
        graph = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        drawn = self.draws if self.draws > draws else 0
        return self._number(name, plain, tuple(kwargs), graph, drawn, *of_inputs)

    def _put(self, x: Tensor, number: int) -> None:
        self._of[x] = number, self._history(x)

    def _history(self, x: Tensor) -> int:
        """What has been written to the memory of a tensor, in this run; one of a transform has none of its own."""
        if not self._written or not (type(x) is Paired or holds_data(x)):
            return _UNWRITTEN
        return self._written.get(address_of(local_of(x).untyped_storage()), (None, _UNWRITTEN))[1]

    def _number(self, *words: Hashable) -> int:
        return self._known.setdefault(words, len(self._known))


def _keeps(x: Tensor, result: Tensor, args: Any) -> bool:
    """Whether there is nothing more or less in a result than in a value, nor in another order."""
    index = args[1] if len(args) > 1 and isinstance(args[1], tuple) else args[1:2]
    in_order = all(isinstance(at, _SLICES) for at in index) or not isinstance(args[0], Tensor)
    return in_order and local_of(result).numel() == local_of(x).numel() and result.dtype == x.dtype


def _plain(leaf: Any) -> Hashable:
    leaf = of_side(leaf, "rank")
    if isinstance(leaf, slice):
        return tuple(map(_plain, (leaf.start, leaf.stop, leaf.step)))
    return leaf if isinstance(leaf, int | str) else str(leaf)
