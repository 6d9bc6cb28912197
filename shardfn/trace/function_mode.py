"""What a shape-only trace looks at beside operations: functions of torch, what leaves it, users' backwards.

Parts leave it by outputs or in modules, and numbers that are made of a rank's sizes may, too.

[Note: backwards of users]
Where ranks use a shared value in shares, the gradient of each is a part of a sum, which is added up where the value
comes from. What torch's own operations do with it on the way there is linear, so that the sum is the same. The backward
of an `autograd.Function` may be anything. So it runs without data, on a gradient that is a pending sum, by the rules
that forwards follow: a clamp of it is lost.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, combinations, islice
from numbers import Number
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardfn import _torch
from shardfn._torch import pytree
from shardfn.comm import watched
from shardfn.layout import SAME, SUM, Problem, Tag
from shardfn.parallel import Adjustments, Amendment, amend, arguments_of, may_run_again, place_of_call
from shardfn.trace.interpreter import Interpreter
from shardfn.trace.meta_values import tensors_of
from shardfn.trace.paired_sizes import Paired, Size, SizesDiffer, local_of, of_side, sizes_of, whole_of
from shardfn.trace.state_rollback import all_in
from shardfn.trace.traced_axes import TracedAxes
from shardfn.trace.value_numbering import ValueNumbers

_READING = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__repr__, Tensor.__reduce_ex__, torch.equal}
_OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
_WRITING = {F.batch_norm, F.instance_norm, torch.batch_norm, torch.instance_norm}  # statistics, which are not amended
_COMPARING = {Tensor.lt, Tensor.le, Tensor.gt, Tensor.ge, Tensor.eq, Tensor.ne, Tensor.__eq__, Tensor.__ne__}
_MOST_WAYS = 64  # to amend one call
_Call = tuple[Any, Any]  # args, kwargs
_AXIS = ""  # any
_OBJECT = "an object that is no plain tuple, list or dict: return it in one of these"
_PLAIN = (Number, str, range, torch.dtype)


class PairedFunctionMode(TorchFunctionMode):
    """Does a function on each side by itself where torch decides by a size that differs; see [Note: paired sizes].

    What is made of numbers begins on the CPU, so that a shape-only trace sees of which. Lists become known tensors, and
    known tensors lists. A hook is told of. Of calls that are right in one process only, amendments are looked for.
    """

    def __init__(self, run: Interpreter, axes: TracedAxes | None = None, varies_inputs: bool = True) -> None:
        """Begin.

        Args:
            run: the run.
            axes: has what amends calls, and what runs before have added; None if no call may be amended.
            varies_inputs: whether inputs of modules are varied where they enter, or in the calls that need it.
        """
        super().__init__()
        self._run, self._sides, self._axes, self._varies_inputs = run, run.sides, axes, varies_inputs
        self._known = axes.adjust if axes is not None else Adjustments()
        self._amended = {(one.path, one.place) for one in self._known.amended}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _torch.HOOKING:
            self._run.hooked(args[0])
        if func in _READING:
            self._run.read(*args[: 1 + (func is torch.equal)])
        if func in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[1], tuple | list):
            args = (args[0], _of_tensors(args[1]), *args[2:])
        if func is Tensor.is_contiguous and self._sides.at == "both":
            return self._apart(func, args, kwargs)
        numbers = self._run.numbers if self._sides.at != "one" else None
        draws = numbers.draws if numbers is not None else 0
        amends = self._axes is not None and self._sides.at == "both" and func not in _WRITING
        amends = amends and getattr(func, "__name__", "") != "__get__"  # an attribute
        (args, kwargs), out = (self._amending if amends else self._served)(func, (args, kwargs))
        if numbers is not None:
            numbers.note(func, args, kwargs, out, draws)
        if type(out) in (Tensor, bool):
            return out
        return sizes_of(out, self._run.tag(args[0]).by_acts if args and type(args[0]) is Paired else ())

    def _served(self, func: Any, call: _Call) -> tuple[_Call, Any]:
        """A call, and its result."""
        before, self._sides.in_torch = self._sides.in_torch, getattr(func, "__name__", "function")
        try:
            return call, self._done(func, *call)
        except (SizesDiffer, RuntimeError) as error:
            if SizesDiffer.__name__ not in f"{type(error)} {error}":  # which unflatten raises in words
                raise
        finally:
            self._sides.in_torch = before
        return call, self._apart(func, *call)

    def _apart(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self._run.function_on_each_side(partial(self._done, func, args, kwargs), (args, kwargs))

    def _done(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if func is Tensor.tolist and (known := self._run.as_list(args[0])) is not None:
            return known
        folds = func in _torch.FOLDED_BY_VALUE and len(args) > 1 and not args[0].requires_grad
        if folds and args[0].dim() > 2 == args[1].dim():
            return func(args[0].flatten(0, -2), *args[1:], **kwargs).unflatten(0, args[0].shape[:-1])
        where = args[0].device if func is Tensor.new_tensor else kwargs.get("device")
        numbers = func in _OF_NUMBERS and not (func is not Tensor.new_tensor and args and isinstance(args[0], Tensor))
        if not numbers or where is None or torch.device(where).type != "meta":
            return func(*args, **kwargs)
        plain = {key: x for key, x in kwargs.items() if key != "requires_grad"} | {"device": "cpu"}
        held = func(*args, **plain)
        out = held.to("meta")
        self._run.values.note(out, held, made=True)
        return out.requires_grad_(kwargs.get("requires_grad", False))

    # -- amended calls ------------------------------------------------------------------------------------------------

    def _amending(self, func: Any, call: _Call) -> tuple[_Call, Any]:
        """A call, amended where that makes it a part of what one process makes, and its result."""
        leaves, name = arguments_of(call), getattr(func, "__name__", "")
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        writes = name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
        found, problems, undo = self._run.found, len(self._run.problems), self._run.undoing(tensors)
        ways = self._ways(call, leaves, writes, func in _COMPARING and len({*map(type, tensors)}) > 1)
        try:
            call, out = self._served(func, call)
        except Exception as error:
            undo()
            if (served := self._as_amended(func, call, undo, ways)) is None:
                raise error
            return served
        # Whatever else was found, a further run does otherwise.
        if self._is_right(out, tensors, problems) or self._run.found != replace(found, vary=self._run.found.vary):
            return call, out
        undo()
        return self._as_amended(func, call, undo, ways) or self._served(func, call)

    def _as_amended(
        self, func: Any, call: _Call, undo: Callable[[], None], ways: Iterator[Sequence[Amendment]]
    ) -> tuple[_Call, Any] | None:
        problems, axes = len(self._run.problems), self._axes
        assert axes is not None
        for way in islice(ways, _MOST_WAYS):
            moved = axes.bytes_moved
            with suppress(Exception):
                amended = amend(call, way, axes.amended)
                inputs = [x for x in arguments_of(amended) if isinstance(x, Tensor)]
                amended, out = self._served(func, amended)
                if self._is_right(out, inputs, problems):
                    self._run.found |= Adjustments(amended=set(way))
                    return amended, out
            undo()
            axes.bytes_moved = moved
        return None

    def _is_right(self, out: Any, inputs: Sequence[Tensor], problems: int) -> bool:
        """Whether nothing was lost, and no gradient would be."""
        found = self._run.found.vary
        if len(self._run.problems) > problems or found & self._known.vary:
            return False
        if not self._varies_inputs and any(source.startswith("input ") for source, _ in found):
            return False
        return not any(map(self._is_lost, tensors_of(out))) or any(map(self._is_lost, inputs))

    def _is_lost(self, x: Tensor) -> bool:
        return any(part.kind == "lost" for part in self._run.tag(x).parts.values())

    def _ways(self, call: _Call, leaves: Sequence[Any], writes: bool, compares: bool) -> Iterator[Sequence[Amendment]]:
        """What may be amended, the likeliest first; `compares`: which argument comes first may be Python's choice."""
        path, place = self._run.running, place_of_call()
        if path is None or not place or (path, place) in self._amended or may_run_again() or "out" in call[1]:
            return
        singles, pairs, groups, lists = list[Amendment](), *(list[list[Amendment]]() for _ in range(3))
        for axis, size in self._run.sizes.items():
            of_axis = partial(Amendment, path, place, axis=axis)
            held = [(at, x, self._run.part(x, axis)) for at, x in enumerate(leaves) if isinstance(x, Tensor)]
            parts = held[writes:]  # of what may be amended, which is not what is written into
            sums = [at for at, _, part in parts if part is not None and part.kind == "sum" and not compares]
            groups.append([of_axis(at, how="sum") for at in sums])
            if any(part is not None and part.split for *_, part in parts):  # which meet the sum
                pairs += [[of_axis(at, how="sum"), of_axis(at, how="vary")] for at in sums]
            whole = [(at, x, "own" if part else "take") for at, x, part in parts if part is None or part == SAME]
            for split in dict.fromkeys(part for *_, part in held if part is not None and part.alone):
                length = size * sum(outer * inner for outer, inner in split.runs)
                takes = [
                    of_axis(-1 if compares else at, how=how, dim=dim, runs=split.runs, given=length)
                    for at, x, how in whole
                    if split.second is None
                    for dim, n in enumerate(x.shape)
                    if of_side(n, "one") == of_side(n, "rank") == length
                ]
                groups.append(takes)
            sizes = [(at, n) for at, n in enumerate(leaves) if type(n) in (int, Size) and n]
            singles += [of_axis(at, how="divide", given=n) for at, n in sizes if type(n) is int and n % size == 0]
            for ats in _lists_of_sizes(call):
                if all(leaves[at] and leaves[at] % size == 0 for at in ats):
                    lists.append([of_axis(at, how="divide", given=leaves[at]) for at in ats])
            parted = [(at, n.node) for at, n in sizes if type(n) is Size]
            singles += [of_axis(at, how="multiply", given=n.rank) for at, n in parted if n.rank * size == n.one]
            groups.append([of_axis(at, how="vary") for at, x, part in parts if part is None and x.requires_grad])
        for group in groups:
            yield from ([one] for one in group)
            yield from [group] if len(group) > 1 and len({one.at for one in group}) == len(group) else []
        yield from ([one] for one in singles)
        yield from [*lists, *pairs]
        each = [*chain(*groups), *singles]
        yield from ([one, other] for one, other in combinations(each, 2) if one.at != other.at)


def _lists_of_sizes(call: _Call) -> Iterator[range]:
    """Where in the arguments of a call lists of several numbers are: the sizes of `qkv.split([64, 32, 32])`."""
    at = 0
    for argument in (*call[0], *call[1].values()):
        count = len(arguments_of(argument))
        if isinstance(argument, list | tuple) and count > 1 and all(type(n) is int for n in argument):
            yield range(at, at + count)
        at += count


def _of_tensors(index: Any) -> Any:
    """An index with tensors for the lists of numbers in it, of which a shape-only trace sees what is in them."""
    if isinstance(index, tuple):
        return tuple(_of_tensors(at) if isinstance(at, list) else at for at in index)
    return torch.tensor(index).to("meta") if index and all(type(at) is int for at in index) else index


# -- what leaves a run ------------------------------------------------------------------------------------------------


def _tensors_in(values: Any) -> Iterator[Tensor]:
    return (x for x in all_in(values) if isinstance(x, Tensor))


def check_kept(run: Interpreter, values: Any) -> None:
    """Note what has to be done with the parts in values that modules keep after `apply`."""
    _check_numbers(run, values)
    for tensor in _tensors_in(values):
        tag = run.tag(tensor)
        for axis, part in tag.parts.items():
            if part.kind != "same":
                _check_output(run, tensor, axis, "a value that a module keeps")
            elif tag.wants or tensor.requires_grad:
                what = (
                    f"a value of shape {tuple(local_of(tensor).shape)} that ranks of '{axis}' use in shares is kept, "
                    "where its gradient would be a part of a sum: return it, or detach it"
                )
                run.problems.append(Problem(what, "gradient"))


def check_outputs(run: Interpreter, output: Any, kept: Collection[str] = ()) -> None:
    """Note what has to be done with the parts that leave `apply`; modules in `kept` may leave theirs split."""
    _check_numbers(run, output)
    leaves, structure = pytree.tree_flatten(output)
    found: list[tuple[int | None, Tensor]] = [(at, leaf) for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    found += [(None, x) for holder in (*leaves, structure) for x in _tensors_in(holder) if x is not holder]
    for at, tensor in found:
        tag = run.tag(tensor)
        for axis, part in tag.parts.items():
            if at is not None or part.kind != "same" or tag.wants or tensor.requires_grad:
                _check_output(run, tensor, axis, "an output" if at is not None else f"what is in {_OBJECT};", at, kept)


def _check_numbers(run: Interpreter, values: Any) -> None:
    """Refuse sizes of this rank that outlive the forward."""
    for size in all_in(values):
        if type(size) is Size:
            rank, one = size.node.rank, size.node.one
            what = f"{rank!r} leaves the forward, which is {one!r} on one rank: it is made of this rank's sizes"
            run.problems.append(Problem(what, "sizes"))


def values_left(numbers: ValueNumbers, tree: Any) -> Iterator[Any]:
    """The values of a rank that a run leaves, to be compared with those of another one."""
    leaves, structure = pytree.tree_flatten(tree)
    yield structure
    for leaf in leaves:
        tensors = [*_tensors_in(leaf)]
        yield [(numbers.of(x), tuple(local_of(x).shape), x.dtype, x.requires_grad) for x in tensors]
        if not tensors:
            yield type(leaf), repr(of_side(leaf, "rank")) if isinstance(leaf, _PLAIN) else None


def _check_output(
    run: Interpreter, x: Tensor, axis: str, name: str, at: int | None = None, kept: Collection[str] = ()
) -> None:
    tag, shape, whole = run.tag(x), tuple(local_of(x).shape), tuple(whole_of(x).shape)
    part, asked = tag.parts[axis], bool(tag.split_by) and tag.split_by <= set(kept)
    fits = tag.can_join(axis) and tag.whole_shape(shape, run.sizes) == whole
    if asked and part.is_even and at is not None:
        run.found |= Adjustments(kept={(at, axis, part.dim)})
    elif asked:
        modules = ", ".join(sorted(tag.split_by))
        why = f"what is made of it within the model is not the same as of the whole output ({part.why or part.kind})"
        why = f"it leaves the forward in {_OBJECT}" if part.is_even else why
        what = f"{modules}: Policy.acts leaves its output split over '{axis}', and {why}"
        run.problems.append(Problem(what, "acts", tag.split_by))
    elif fits and at is not None:
        run.found |= Adjustments(joined={(at, axis, part.dim)})
    elif tag.by_acts:
        run.found |= Adjustments(whole=tag.by_acts)
    elif part.kind == "same" and at is not None:
        run.found |= Adjustments(shared={(at, axis)})
    elif tag.split_by:
        run.found |= Adjustments(gather=tag.split_by)
    elif part.kind == "same":
        what = f"a value of shape {shape} that ranks of '{axis}' use in shares leaves the forward in {_OBJECT}"
        run.problems.append(Problem(what, "gradient"))
    else:
        why = f": {part.why}" if part.why else ""
        why += f" (in {part.where!r})" if part.where else ""
        kind = part.cure if part.kind == "lost" else "sums" if part.kind == "sum" else "rules"
        what = f"{name} of shape {shape} differs over '{axis}' ({part.kind}){why}"
        run.problems.append(Problem(what, kind, at=part.where or ""))


def check_backwards(run: Interpreter, output: Any) -> None:
    """Note what users' backwards make of parts of gradients; the forward has ended, see [Note: backwards of users]."""
    run.note_backwards([*_tensors_in(output)])
    for x, path in run.with_backwards.values():
        axes = ", ".join(axis for axis, part in run.tag(x).parts.items() if part.in_shares)
        if why := why_not_linear(x):
            with run.inside(path):
                run.refuse(f"each rank of '{axes}' has a part of a gradient, and {why}", "backward")


def acts_on_gradient(x: Tensor) -> bool:
    """Whether something of the user's is given the gradient of x that may not be given a part of it."""
    return _torch.has_hooks(x) or bool(why_not_linear(x))


def why_not_linear(x: Tensor) -> str:
    """Why what a user wrote may not be given parts of the gradient of x; empty when it may, or there is nothing."""
    function = _torch.users_backward(x)
    if function is None:
        return ""
    name, run = function.__qualname__, Interpreter({_AXIS: 2}, "rank")
    node: Any = x.grad_fn
    grads = _torch.blank_gradients(x)
    for grad in grads:
        run.mark(grad, Tag({_AXIS: SUM}))
    try:
        with _torch.outside_dispatch(), torch.no_grad(), watched(run.note_collective), run.sides.run(), run:
            results = tensors_of(node.apply(*grads))  # hooks are not called
    except Exception as error:
        return f"the backward of {name} cannot be run without data ({error})"
    parts = [run.tag(grad).parts.get(_AXIS) for grad in results if grad not in run.zeros]
    why = next((part.why if part is not None else "it adds numbers to it" for part in parts if part != SUM), None)
    return "" if why is None else f"the backward of {name} is not linear in it ({why})"
