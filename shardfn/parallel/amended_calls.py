"""Calls of torch in a forward that is written for one process, amended for a rank.

[Note: amended calls]
A forward may say what is right in one process only: `qkv.split(C, dim=2)` with C of the configuration, or
`x @ self.a + self.bias` where the product is a sum that is still pending. Such a call fails on a rank, or makes nothing
that is a part of what one process makes. The shape-only trace sees that (`trace/function_mode.py`) and looks for other
arguments with which the call does:

    how      | an argument                             | on a rank it is
    ---------|-----------------------------------------|--------------------------------------
    divide   | a size, as one process has it           | the size that a rank has, n / W
    multiply | a size that was divided already         | W n
    sum      | a pending sum                           | the sum
    take     | a value that all ranks have whole       | this rank's part of one dim of it
    own      | the same, where it varies already       | the same
    vary     | a value whose gradient each rank has    | the value; gradients are added up
             | a part of                               |

A call is known by the module that makes it and its place: the instructions that are running, from the forward of that
module to torch. What runs once more when the module is left (a `torch.utils.checkpoint` in it, the backward of an
`autograd.Function`) is not amended, nor is what is compiled.

A new `how` is one here, a case of `ComputeAxes.amended`, what `TracedAxes.amended` expects of the argument, and a way
in `PairedFunctionMode._ways`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from inspect import currentframe
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardfn.binding import Around, Forward, ForwardStandIn, goes_around
from shardfn.context import holding
from shardfn.layout import Runs
from shardfn.notation import ShardError

How = Literal["divide", "multiply", "sum", "take", "own", "vary"]
Place = tuple[tuple[CodeType, int], ...]  # the innermost first
Changed = Callable[[Any, "Amendment"], Any]

_BETWEEN = ("__torch_function__", "handle_torch_function")
_AGAIN = ("torch.utils.checkpoint", "torch.autograd.function")


class Amendment(NamedTuple):
    """What is done with argument `at` of the calls at a place in the forward of the module at `path`."""

    path: str
    place: Place
    at: int  # among what is in the arguments' tuples, lists, dicts and slices; -1: of two that are compared, see `_at`
    axis: str
    how: How
    dim: int = 0
    runs: Runs = ()  # of the part that is taken
    given: int = 0  # the size, as the rank had it when this was found; that of the dim of which a part is taken


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of users and of torch, from a call of torch to the forward of the module that makes it."""
    while frame is not None and frame.f_code not in _BEGINS:
        ours = frame.f_globals.get("__name__", "").startswith("shardfn.")
        if not ours and frame.f_code.co_name not in _BETWEEN:
            yield frame
        frame = frame.f_back


def place_of_call() -> Place:
    """Where the call of torch is that a function mode has been told of."""
    return tuple((frame.f_code, frame.f_lasti) for frame in _frames(currentframe()))


def may_run_again() -> bool:
    """Whether that call is in something that runs once more when the module is left."""
    return any(frame.f_globals.get("__name__") in _AGAIN for frame in _frames(currentframe()))


def arguments_of(tree: Any) -> list[Any]:
    """What is in the arguments of a call: their tuples, lists, dicts and slices."""
    parts = _parts(tree)
    return [tree] if parts is None else [leaf for part in parts for leaf in arguments_of(part)]


def _parts(tree: Any) -> Iterable[Any] | None:
    if type(tree) is slice:
        return tree.start, tree.stop, tree.step
    if isinstance(tree, dict):
        return tree.values()
    return tree if isinstance(tree, list | tuple) else None


def _with(tree: Any, leaves: Iterator[Any]) -> Any:
    """The same with other leaves."""
    parts = _parts(tree)
    if parts is None:
        return next(leaves)
    new = [_with(part, leaves) for part in parts]
    if isinstance(tree, dict):
        return dict(zip(tree, new, strict=True))
    return slice(*new) if type(tree) is slice else new if isinstance(tree, list) else tuple(new)


def _at(leaves: Sequence[Any], amendment: Amendment) -> int:
    """The place of an argument; for `a < b` Python may ask b whether it is larger, so that sizes say which it is."""
    if amendment.at >= 0:
        return amendment.at
    sizes = [x.shape[amendment.dim] if isinstance(x, Tensor) and x.dim() > amendment.dim else None for x in leaves]
    fits = [at for at, size in enumerate(sizes) if type(size) is int and size == amendment.given]
    return fits[0] if len(fits) == 1 else len(leaves)


def amend(call: tuple[Any, Any], amendments: Sequence[Amendment], changed: Changed) -> tuple[Any, Any]:
    """The arguments of a call, (args, kwargs), as amended; `changed` says what becomes of one."""
    leaves = arguments_of(call)
    for amendment in amendments:
        at = _at(leaves, amendment)
        leaf = leaves[at] if at < len(leaves) else None
        if isinstance(leaf, Tensor) == (amendment.how in ("divide", "multiply")) or leaf is None:
            why = f"apply: in {amendment.path or '(the model)'!r}, a call of torch has other arguments each time"
            raise ShardError(f"{why}. In place of sum(...) or a loop that adds up, write torch.stack([...]).sum(0)")
        leaves[at] = changed(leaf, amendment)
    return _with(call, iter(leaves))


class _Amending(TorchFunctionMode):
    """Amends the calls that a module makes, while that is the innermost one of which some are."""

    def __init__(self, table: Mapping[Place, Sequence[Amendment]], changed: Changed) -> None:
        super().__init__()
        self._table, self._changed = table, changed
        self._calls = {place[0] for place in table}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = args, kwargs or {}
        if _INNERMOST.get() is self:
            frame = next(_frames(currentframe()), None)
            if frame is not None and (frame.f_code, frame.f_lasti) in self._calls:
                call = amend(call, self._table.get(place_of_call(), ()), self._changed)
        return func(*call[0], **call[1])


_INNERMOST: ContextVar[_Amending | None] = ContextVar("amending", default=None)


def amending(amendments: Iterable[Amendment], changed: Changed) -> Around:
    """What goes around the forward of a module whose calls are amended."""
    table: dict[Place, list[Amendment]] = {}
    for amendment in sorted(amendments, key=lambda amendment: amendment[2:]):
        table.setdefault(amendment.place, []).append(amendment)

    return goes_around(_amended, table, changed)


def _amended(table: Mapping[Place, Any], changed: Changed, inner: Forward, /, *args: Any, **kwargs: Any) -> Any:
    mode = _Amending(table, changed)
    with holding(_INNERMOST, mode), mode:
        return inner(*args, **kwargs)


# Above either of them nothing counts for a place: a unit that computes again has frames of torch around the second.
_BEGINS = (ForwardStandIn.__call__.__code__, _amended.__code__)
