"""Which values differ between the ranks of a compute axis, and how, found by a shape-only trace.

[Note: where a pvary goes]
Along a compute axis a value is *varying* when each rank has another part of it, *invariant* when all have the same.
The derived collectives keep both sides consistent as long as no gradient flows from a varying value into an invariant
one without a `pvary` between them: `q_norm` (a scale over head_dim, replicated) applied to tp-local heads, or keys that
are replicated because their heads do not divide. There the gradient on each rank is only a part of the sum. JAX inserts
the missing `pvary` from its types; here the forward runs once on meta tensors under `Interpreter`, which follows the
types through every operation and says where it is missing.

[Note: beside the whole]
Parts alone would believe a `view(b, s, 32, -1)` that takes a rank's 8 heads for 32 small ones. So every operation is
done on what one process has, too (`paired_sizes.py`), and each result must be the part of the whole one that is
claimed.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from shardfn import _torch
from shardfn.comm import Moved, watching
from shardfn.layout import SAME, Cure, FailedOperation, Kind, Part, Problem, Shape, Tag, after_collective, even
from shardfn.parallel import Adjustments
from shardfn.trace import padding, paired_sizes
from shardfn.trace.meta_values import EMPTY, MetaValues, leaves_of, tensors_of
from shardfn.trace.operation_rules import parts_after
from shardfn.trace.operations import MOVES, CallInOneProcess, Operation, Shapes, is_stored, made_here, numbers_agree
from shardfn.trace.paired_sizes import Paired, Side, Sides, local_of, taken, whole_of
from shardfn.trace.value_numbering import ValueNumbers

_REPEATING = {"expand", "repeat"}
_DROPS = re.compile("dropout|attention")  # which may draw alike for the parts of a value, see docs/howto/dropout.md
_APART = re.compile(r"detach|(zeros|ones|full|empty|rand\w*)_like|\.new_")  # from what is differentiated
_VIEWS = {"view", "_unsafe_view", "_reshape_alias"}  # whether a reshape copies depends on strides, and so on sizes
_NEVER_SEEN = Tag(), 0  # and before anything was written
_Made = list[dict[str, Part]]  # by axis, what each result of an operation is


def _shapes(tree: Any) -> Shapes:
    return tuple(tuple(x.shape) for x in tensors_of(tree))


class Interpreter(_torch.TorchDispatchMode):
    """Follows tags through the operations of a forward."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        side: Side = "both",
        ours: Collection[str] = (),
        padded: Collection[tuple[int, int]] = (),
        asked_for: str = "",
        numbers: ValueNumbers | None = None,
        on_cpu: bool = True,
    ) -> None:
        """Follow what differs over axes.

        Args:
            sizes: the axes over which values may be split, and their sizes.
            side: the sides to run in.
            ours: modules whose forwards are derived from rules.
            padded: (true size, stored size) of factors that are padded on ranks.
            asked_for: which derivatives are, besides a gradient, see `derivatives_asked_for`.
            numbers: those of values, if they count.
            on_cpu: whether the forward computes there, see `MetaValues`.
        """
        super().__init__()
        self.sizes = dict(sizes)
        self.sides, self._pairs = Sides(side), side == "both"
        self.sides.path = lambda: self._path[-1]
        self.values, self.numbers = numbers.values if numbers is not None else MetaValues(on_cpu), numbers
        self._ours, self._padded = frozenset(ours), frozenset(padded)
        self._asked_for = asked_for
        self._path: list[str] = [""]
        self.failed_at = ""  # the path of the module in which the run failed; empty for the model itself
        self._instead: Tensor | None = None  # what the next copy gives
        self._done: list[CallInOneProcess] | None = None  # by a function in one process
        self._expected: Iterator[CallInOneProcess] | None = None  # the same, when a rank does it after that
        self._tags = WeakIdKeyDictionary()  # tensor -> its tag, and how many writes there were when that was made
        self.zeros = WeakIdKeyDictionary()  # tensors that hold nothing but zeros, and went nowhere yet
        self._fresh = WeakIdKeyDictionary()  # tensors that hold nothing yet
        self._writes = 0  # of values that are split otherwise than what they replace
        self._written: dict[int, tuple[torch.UntypedStorage, int]] = {}  # storage, number of the last one to it
        self._drawn = WeakIdKeyDictionary()  # tensors with random values -> whether these are between 0 and 1
        self.found, self.problems = Adjustments(), list[Problem]()  # what is missing, and what nothing can mend
        self.stuck: FailedOperation | None = None
        self.losses: list[Problem] = []  # where parts were lost, in order
        self.with_backwards: dict[int, tuple[Tensor, str]] = {}  # what ranks use in shares of a user's Function; where

    # -- what is known ------------------------------------------------------------------------------------------------

    def tag(self, tensor: Tensor) -> Tag:
        """What is known; a tensor never seen is invariant."""
        known, seen = self._tags.get(tensor) or _NEVER_SEEN
        written = self._written.get(_torch.address_of(local_of(tensor).untyped_storage())) if self._written else None
        if written is not None and written[1] > seen:
            why = "another view of its memory was written with values that are split otherwise"
            return replace(known, parts=dict.fromkeys(known.parts or self.sizes, Part("lost", why=why, cure="rules")))
        return known

    def part(self, x: Tensor, axis: str) -> Part | None:
        """What a tensor is over an axis."""
        return self.tag(x).parts.get(axis)

    def _is_parted(self, x: Tensor) -> bool:
        """Whether ranks have other values of it."""
        return any(part.kind != "same" for part in self.tag(x).parts.values())

    def left(self) -> list[Tag]:
        """What is known of values that are there, and are parts or want gradients; weights are none."""
        known = [tag for tag, _ in self._tags.values() if not tag.weight]
        return [tag for tag in known if tag.wants or any(part.kind != "same" for part in tag.parts.values())]

    def mark(self, tensor: Tensor, tag: Tag) -> None:
        """Say what a collective or a module made of a tensor."""
        self._tags[tensor] = tag, self._writes

    def as_list(self, x: Tensor) -> Any:
        """The values of a tensor; None when they are not known."""
        rank, one = self.values.as_list(local_of(x)), self.values.as_list(whole_of(x))
        return None if rank is None or one is None else paired_sizes.both(rank, one)

    def read(self, *values: Tensor) -> None:
        """Python reads these: refuse what is made of a rank's sizes, of which both sides have one memory."""
        for x in values:
            if not x.is_meta and self.sides.at == "both" and self._is_parted(x):
                self.refuse("the forward reads a value that is made of this rank's sizes", "sizes", x)

    # -- where the run is ---------------------------------------------------------------------------------------------

    @contextmanager
    def inside(self, path: str) -> Iterator[None]:
        """Within the forward of a module; remembers the deepest one that raised."""
        self._path.append(path)
        try:
            yield
        except Exception:
            self.failed_at = self.failed_at or path
            raise
        finally:
            self._path.pop()

    @property
    def running(self) -> str | None:
        """The innermost module that is running; None outside of their forwards."""
        return self._path[-1] if len(self._path) > 1 else None

    def hidden(self) -> AbstractContextManager[None]:
        """Within it operations are those of a rank alone."""
        return self.sides.only("one" if self.sides.at == "one" else "rank")

    # -- both sides --------------------------------------------------------------------------------------------------

    def on_each_side(self, of_rank: Callable[..., Any], of_one: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a rank and one process make of arguments, each by itself, as one; of one side alone what that makes."""
        if self.sides.at != "both":
            return (of_one if self.sides.at == "one" else of_rank)(*args, **kwargs)
        with self.sides.only("rank"):
            mine = of_rank(*args, **kwargs)
        with self.sides.only("one"), torch.no_grad():
            whole = of_one(*args, **kwargs)
        return self.packed(mine, whole)

    def function_on_each_side(self, function: Callable[[], Any], arguments: Any) -> Any:
        """What a function of torch makes of what it is given, on each side by itself.

        As long as it does the same operations in both, the shapes of results are known.
        """
        self._done = []
        with self.sides.only("one"), torch.no_grad():
            whole = function()
        self._expected, self._done = iter(self._done), None
        with self.sides.only("rank"):
            mine = function()
        self._expected = None
        out = self.packed(mine, whole)
        results, why = tensors_of(_torch.pytree.tree_leaves(out)), self._repeats(tensors_of(arguments))
        if why:
            self._lose(results, why, "pads")
        for x in results:
            shape, expected = tuple(local_of(x).shape), tuple(whole_of(x).shape)
            if any(part.kind == "lost" for part in self.tag(x).parts.values()):
                continue  # which says more
            if not self._fits(self.tag(x).whole_shape(shape, self.sizes), expected):
                self._lose([x], f"a result has shape {shape} here and {expected} on one rank, which it is no part of")
        return out

    def packed(self, mine: Any, whole: Any) -> Any:
        """What a rank has, and what one process has in its place, as one."""
        leaves, structure = _torch.pytree.tree_flatten(mine)
        others, other = _torch.pytree.tree_flatten(whole)
        if len(leaves) != len(others) or structure != other:
            self._lose(tensors_of(leaves), f"{len(leaves)} values are made here, and {len(others)} on one rank")
            return self.sides.as_many(mine, whole)
        return _torch.pytree.tree_unflatten([self._pack(a, b) for a, b in zip(leaves, others, strict=True)], structure)

    def beside(self, x: Tensor, whole: Tensor) -> Tensor:
        """What a rank has, beside what one process has in its place."""
        return self._pack(x, whole_of(whole)) if self._pairs else x

    def _pack(self, mine: Any, whole: Any) -> Any:
        if isinstance(mine, tuple) and isinstance(whole, tuple) and len(mine) == len(whole):  # sizes
            return type(mine)(self._pack(a, b) for a, b in zip(mine, whole, strict=True))
        if not (isinstance(mine, Tensor) and isinstance(whole, Tensor)):
            plain = isinstance(mine, int | float | str | list | range | torch.dtype)
            return paired_sizes.both(mine, whole) if plain and type(mine) is type(whole) else mine
        if mine is whole:
            return mine
        local, other = local_of(mine), whole_of(whole)
        if local.dim() != other.dim():
            self._lose([mine], f"a value has shape {tuple(local.shape)} here and {tuple(other.shape)} on one rank")
            return mine
        alike = type(mine) is not Paired and paired_sizes.lie_alike(local, other)
        if alike and self.values.agree(local, other, held=True):
            return mine
        tag = self.tag(mine)
        with _torch.outside_dispatch():
            pair = Paired(local.detach(), other.detach())  # another tensor, of the same memory
        for old, new in ((local, pair.local), (other, pair.whole)):
            self.values.same(new, old)
        with torch.set_grad_enabled(mine.requires_grad):
            self._instead = pair
            out = mine.clone()
        self.mark(out, tag)
        if self.numbers is not None:
            self.numbers.same(out, mine)
        self._place(out, tuple(other.shape))
        if not tag.parts and not self.values.agree(local, other, held=True):
            self._lose([out], "a value is made of this rank's sizes")
        return out

    def _place(self, x: Tensor, whole: Shape) -> None:
        """A view of a batch of 1 leaves two dims that may be the split one; the shape of the whole value says which."""
        tag, shape = self.tag(x), tuple(local_of(x).shape)
        for axis, part in tag.parts.items() if len(tag.parts) == 1 else ():
            candidates = [part, *(even(dim, size) for dim, size in enumerate(shape))] if part.alone else []
            fits = [way for way in candidates if way.whole_shape(shape, self.sizes[axis]) == whole]
            if fits and fits[0] is not part:
                self.mark(x, replace(tag, parts={axis: fits[0]}))

    def _lose(self, tensors: Sequence[Tensor], why: str, cure: Cure = "sizes") -> None:
        lost = Part("lost", why=why, cure=cure, where=self._path[-1])
        for x in tensors:
            self.mark(x, replace(self.tag(x), parts=dict.fromkeys(self.tag(x).parts or list(self.sizes)[:1], lost)))

    def _lose_all(self, results: Sequence[dict[str, Part]], why: str, cure: Cure = "sizes") -> None:
        """Lose the parts of the results of an operation."""
        for by_axis in results:
            by_axis.update(dict.fromkeys(by_axis or list(self.sizes)[:1], Part("lost", why=why, cure=cure)))

    # -- collectives --------------------------------------------------------------------------------------------------

    def note_collective(self, moved: Moved, x: Tensor, out: Tensor) -> Tensor:
        """A collective made `out` of x; one process has x itself."""
        if self.sides.at == "one":
            return out
        if moved.axis in self.sizes:
            self._follow_collective(moved, x, out)
        if self.numbers is not None:
            self.numbers.same(out, x, moved.kind, moved.axis, moved.dims)
        return self.beside(out, x)

    def _follow_collective(self, moved: Moved, x: Tensor, out: Tensor) -> None:
        known = self.tag(x)
        parts = dict(known.parts)
        before = parts.pop(moved.axis, None)
        varies = before is not None and (before != SAME or known.wants or x.requires_grad)
        if varies and moved.kind in ("pvary", "shard_slice"):
            self.refuse(
                f"{moved.kind} over '{moved.axis}' of a value that varies over it: its gradient would be added up "
                f"twice. For an argument of a parallel forward write layouts.entered(x, '{moved.axis}', its place)",
                "twice",
            )
        # What was lost in a parallel forward that is running: its author knows what is done with it.
        theirs = before is not None and before.where in self._path and before.where in self._ours
        lost = before is not None and before.kind == "lost" and not theirs
        part = before if lost else after_collective(moved.kind, local_of(out).shape, moved.dims)
        if moved.kind.startswith("all_gather") and before is not None and before.split and not before.is_even:
            part = Part("lost", why="parts are joined in another order than that of one rank", cure="rules")
        if part is not None:
            parts[moved.axis] = part
        wants = known.wants or x.requires_grad
        still_split = any(part.split for part in parts.values())
        self.mark(out, Tag(parts, wants, frozenset(), known.split_by if still_split else frozenset()))

    # -- problems -----------------------------------------------------------------------------------------------------

    def refuse(self, why: str, kind: Kind = "rules", x: Tensor | None = None) -> None:
        """Note a problem with a value at the module that is running; of a lost one, its part says the kind."""
        path = here = self._path[-1]
        known = self.tag(x) if x is not None else Tag()
        if (lost := next((part for part in known.parts.values() if part.kind == "lost"), None)) is not None:
            kind, here = lost.cure, path if lost.where is None else lost.where
        where = f" (in {here or '(the model)'!r})" if here != path else ""
        self.problems.append(Problem(f"in {path or '(the model)'!r}: {why}{where}", kind, known.split_by, here))

    def undoing(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """What takes back all that is noted from here on, also of some tensors that are known now."""
        found, counts = self.found, [len(noted) for noted in (self.problems, self.losses, self.sides.decided)]
        tables = [table for table in (self._tags, self.zeros, self._fresh) if table]
        known = [(table, x, value) for table in tables for x in tensors if (value := table.get(x)) is not None]
        written = dict(self._written)

        def undo() -> None:
            self.found, self._written = found, dict(written)
            self._instead = self._done = self._expected = None
            for noted, count in zip((self.problems, self.losses, self.sides.decided), counts, strict=True):
                del noted[count:]
            for table, x, value in known:
                table[x] = value
            if self.numbers is not None:
                self.numbers.writes.clear()

        return undo

    # -- operations ---------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _torch.OF_MEMORY:
            return paired_sizes.of_memory(func, args)
        inputs = args, kwargs or {}
        if self._instead is not None:
            out, self._instead = self._instead, None
            return out
        side = self.sides.at if watching() or self.sides.at == "one" else "rank"
        self.stuck = None
        pairs = paired_sizes.is_paired(inputs)
        if side == "one":
            return self._of_one(func, inputs)
        operation, name = func, _torch.base_name(func)
        if pairs and name in _VIEWS:
            operation, inputs = torch.ops.aten.reshape.default, (args[:2], inputs[1])
        mine = taken(inputs, "rank") if pairs else inputs
        try:
            out = local = whole = self.values.run(operation, *mine)
            if pairs and side == "both":
                whole = self.values.run(operation, *taken(inputs, "one"))
                local = self.sides.as_many(local, whole)
        except Exception:
            given = tuple((tuple(local_of(x).shape), self.tag(x)) for x in tensors_of(inputs))
            self.stuck = FailedOperation(name, given)
            raise
        if pairs:
            out = paired_sizes.paired(local, whole, {id(local_of(x)): x for x in tensors_of(inputs)}, self.values.agree)
        if not watching():
            return out  # within a collective, which says itself what it made
        self._note_draws(func, args, out)
        if name == "_local_scalar_dense":
            self.read(args[0])
        self._follow(func, inputs, mine, out, local, whole if side == "both" else None)
        if self.numbers is not None:
            self.numbers.draws += torch.Tag.nondeterministic_seeded in func.tags
            self.numbers.writes += tensors_of(out) if _torch.is_mutable(func) else []
        return out

    def _of_one(self, func: Any, arguments: Any) -> Any:
        """An operation in one process; a tensor that it writes into is returned as the pair that it was given."""
        given = taken(arguments, "one")
        out = self.values.run(func, *given)
        if self._done is not None and (name := CallInOneProcess.name_of(func)):
            self._done.append(CallInOneProcess(name, given, _shapes(out)))
        return paired_sizes.paired(out, out, {id(whole_of(x)): x for x in tensors_of(arguments)}, self.values.agree)

    def _in_one(self, func: Any) -> CallInOneProcess | None:
        """The same operation in one process, of a function that is done on each side by itself."""
        if self._expected is None or (name := CallInOneProcess.name_of(func)) is None:
            return None
        if (done := next(self._expected, None)) is None or done.name == name:
            return done
        self._expected = iter(())  # it does others from here on
        return None

    def _note_draws(self, func: Any, args: Any, out: Any) -> None:
        """Refuse decisions by random values: each way would need a run of its own."""
        random, name = torch.Tag.nondeterministic_seeded in func.tags, _torch.base_name(func)
        results = [x for x in tensors_of(out) if not x.is_meta] if random or self._drawn else []
        if random:
            self._drawn.update(dict.fromkeys(results, name in ("rand", "rand_like")))
            return
        drawn = [self._drawn[x] for x in tensors_of(args) if x in self._drawn] if self._drawn else []
        if not drawn:
            return
        if name == "_local_scalar_dense":
            self.refuse(
                "the forward decides by a random value, which goes one way here and may go another one later: draw it "
                "outside of the model and pass it as an argument, or do without (layerdrop=0)",
                "random",
            )
        certain = all(drawn) and name in ("lt", "le", "gt", "ge") and isinstance(args[1], int | float)
        if not (certain and not 0 < args[1] < 1):
            self._drawn.update(dict.fromkeys(results, all(drawn) and name in MOVES))

    def hooked(self, x: Tensor) -> None:
        """Something will be called with the gradient of x: refuse that where it is a part of it."""
        for axis, part in self.tag(x).parts.items():
            if part.in_shares:
                what = f"a hook on a value that ranks of '{axis}' use in shares gets a part of its gradient"
                self.refuse(what, "backward", x)

    def note_backwards(self, values: Sequence[Tensor]) -> None:
        """Remember those that ranks use in shares, and that were made by what has a backward of the user's."""
        for x in values:
            if _torch.has_hooks(x):
                self.hooked(x)
            elif _torch.users_backward(x) is not None and any(part.in_shares for part in self.tag(x).parts.values()):
                self.with_backwards.setdefault(id(x), (x, self._path[-1]))

    def _follow(self, func: Any, arguments: Any, mine: Any, out: Any, local: Any, whole: Any) -> None:
        inputs, results = tensors_of(arguments), tensors_of(out)
        local_results = results if local is out else tensors_of(local)
        self.note_backwards(inputs)
        name, done, apart = _torch.base_name(func), self._in_one(func), self._expected is not None
        shapes = _shapes(whole) if whole is not None else done and done.shapes
        parts = self._parts(func, inputs, mine, local_results, shapes)
        if torch.Tag.nondeterministic_seeded in func.tags and not _DROPS.search(f"{name} {self.sides.in_torch}"):
            split = [by_axis for by_axis in parts if any(p.split or p.where is None for p in by_axis.values())]
            self._lose_all(split, f"{name} in the shape of a split value draws the same numbers on each rank", "draws")
        if apart and (_torch.is_mutable(func) if done is None else not numbers_agree(func, mine, done.given)):
            self._lose_all(parts, f"{name} is given numbers made of this rank's sizes")
        elif apart and done is not None and not self._fit(local_results, done.shapes, parts):
            self._lose_all(parts, f"{name} is given sizes of this rank")
        if whole is not None:
            self._compare(func, arguments, mine, local_results, whole, parts)
            if why := self._repeats(inputs, results if name in _REPEATING else ()):
                self._lose_all([by_axis for by_axis in parts if by_axis], why, "pads")
        unseen = _torch.is_mutable(func) and (func.namespace != "aten" or not results)
        if unseen and any(self._is_parted(x) for x in inputs):
            self._note_writes(inputs)  # of something, to any of them
        self._require_alike(func, inputs, parts)
        self._need_whole(inputs, parts)
        known = self._joined(inputs, parts, str(func))
        for by_axis in parts:
            fresh = {axis: part for axis, part in by_axis.items() if part.kind == "lost" and part.where is None}
            by_axis.update({axis: replace(part, where=self._path[-1]) for axis, part in fresh.items()})
            self.losses += [Problem(p.why, p.cure, known.split_by, self._path[-1]) for p in fresh.values()]
        weight = bool(inputs) and name in MOVES and all(self.tag(x).weight for x in inputs)
        empty = self._empty(func, inputs, mine) if self._padded else frozenset[str]()
        for result, by_axis in zip(results, parts, strict=True):
            splits = frozenset(axis for axis, part in by_axis.items() if part.split)
            tag = replace(known, parts=by_axis, weight=weight, empty=empty & splits)
            if _torch.is_mutable(func):
                if by_axis and not result.is_meta and not inputs[0].is_meta:
                    self.refuse(f"{name} writes a value that is made of this rank's sizes", "sizes", result)
                alike = self.tag(result).parts == by_axis
                if not alike:  # other views of its memory know nothing of what is in it now
                    self._note_writes([result])
                self._tag_base(result, tag, alike)
            if inputs or by_axis:
                self.mark(result, tag)
        for x in inputs if self.zeros else ():  # viewed, or written into
            self.zeros.pop(x, None)
        zeros = name in ("zeros", "zeros_like", "new_zeros") or (name == "scalar_tensor" and arguments[0][0] == 0)
        for x in results if zeros or name in EMPTY else ():
            (self.zeros if zeros else self._fresh)[x] = True

    def _note_writes(self, tensors: Sequence[Tensor]) -> None:
        self._writes += 1
        stored = [local_of(x).untyped_storage() for x in tensors]
        self._written |= {_torch.address_of(storage): (storage, self._writes) for storage in stored}

    def _empty(self, func: Any, inputs: Sequence[Tensor], mine: tuple[Any, Any]) -> frozenset[str]:
        """The axes over which results are zero in padding; an operation that gives no number there is refused."""
        axes = set[str]()
        of = {id(local_of(x)): self.tag(x).empty for x in inputs}
        asks = {id(local_of(x)): x.requires_grad for x in inputs}
        for axis in frozenset[str]().union(*of.values()):
            zero, asked = (lambda x, axis=axis: axis in of[id(x)]), self._asked_for
            stays, breaks = padding.after(func, *mine, zero, lambda x: asks[id(x)], asked)
            if breaks:
                name = _torch.base_name(func).rstrip("_")
                self.refuse(f"{name} of zeros, which are in what '{axis}' splits with padding (Policy.pad)", "zeros")
            axes.update([axis] if stays else [])
        return frozenset(axes)

    def _need_whole(self, inputs: list[Tensor], parts: _Made) -> None:
        """Tell whether an operation needs a value whole that `Policy.acts` splits."""
        lost = {axis for by_axis in parts for axis, part in by_axis.items() if part.kind == "lost"}
        for tag in map(self.tag, inputs) if lost else ():
            if tag.by_acts and any(part.split and axis in lost for axis, part in tag.parts.items()):
                self.sides.needs_whole(tag.by_acts, self._path[-1])

    def _parts(self, func: Any, inputs: list[Tensor], mine: Any, results: list[Tensor], shapes: Shapes | None) -> _Made:
        """What each result is; `shapes`: of these in one process."""
        shapes = shapes if shapes is not None and len(shapes) == len(results) else None
        tags = {id(local_of(x)): self.tag(x) for x in inputs}
        zeros = {id(local_of(x)) for x in inputs if x in self.zeros}
        args, kwargs = mine
        given = tensors_of((args, {key: x for key, x in kwargs.items() if key != "out"} if kwargs else {}))
        call = _torch.base_name(func), args, kwargs, results, given
        known = tags, zeros, torch.Tag.pointwise in func.tags, shapes, self._padded
        operations = {axis: Operation(*call, *known, axis, size) for axis, size in self.sizes.items()}
        varied = [axis for axis in operations if any(axis in tag.parts for tag in tags.values())]
        by_axis = {axis: parts_after(operations[axis]) for axis in varied}
        if not varied and shapes is not None:
            by_axis = made_here(operations)
        each = range(len(results))
        return [{axis: part for axis, parts in by_axis.items() if (part := parts[at]) is not None} for at in each]

    def _compare(self, func: Any, arguments: Any, mine: Any, results: list[Tensor], whole: Any, parts: _Made) -> None:
        """Mark parts as lost where a result is not the part of the whole result that they say."""
        name, wholes = _torch.base_name(func), tensors_of(whole)
        if len(wholes) != len(results):
            self._lose_all(parts, f"{name} has {len(results)} results here and {len(wholes)} on one rank")
            return
        numbers = mine is arguments or numbers_agree(func, mine, taken(arguments, "one"))
        problem = ""
        for result, whole, by_axis in zip(results, wholes, parts, strict=True):
            if any(part.kind == "lost" for part in by_axis.values()):
                continue
            expected = tuple(whole.shape)
            shape = Tag(by_axis).whole_shape(tuple(result.shape), self.sizes)
            if not self._fits(shape, expected):
                problem = (
                    f"{name} has a result of shape {tuple(result.shape)} here and of {expected} on one rank, where a "
                    f"part of it would make {shape}: a size is taken from elsewhere than the tensors"
                )
            elif not numbers or not (by_axis or self.values.agree(result, whole)):
                problem = f"{name} is given numbers made of this rank's sizes"
        if problem:
            self._lose_all(parts, problem)  # one wrong result tells of the others
            if sources := paired_sizes.sources_of(leaves_of(arguments)):
                self.sides.needs_whole(sources, self._path[-1])

    def _fit(self, results: Sequence[Tensor], shapes: Shapes, parts: _Made) -> bool:
        """Whether results that are not lost are the parts that are said of values with these shapes."""
        lost = any(part.kind == "lost" for by_axis in parts for part in by_axis.values())
        known = zip(results, parts, shapes, strict=False)
        return lost or all(self._fits(Tag(p).whole_shape(tuple(x.shape), self.sizes), shape) for x, p, shape in known)

    def _fits(self, shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
        """Whether shapes are equal, but for padding."""
        pairs = zip(shape, expected, strict=False)
        return len(shape) == len(expected) and all(is_stored(mine, other, self._padded) for mine, other in pairs)

    def _repeats(self, inputs: Sequence[Tensor], results: Sequence[Tensor] = ()) -> str:
        """Why padded heads meet those of others, if they do."""
        return padding.repeated_otherwise(inputs, results, lambda x: self.tag(x).parts) if self._padded else ""

    def _require_alike(self, func: Any, inputs: list[Tensor], parts: _Made) -> None:
        """Lose two split dims of what `Policy.acts` splits: what follows gathers one dim."""
        lost = Part("lost", why=f"{_torch.base_name(func)} makes two split dims of one")
        for by_axis in parts:
            in_two = {axis: lost for axis, part in by_axis.items() if part.second is not None}
            by_axis.update(in_two if in_two and any(self.tag(x).by_acts for x in inputs) else {})

    def require_varied(self, x: Tensor, axis: str, path: str) -> None:
        """Have an input of a module varied where it is made, since those of other calls are."""
        known = self.tag(x)
        if known.wants or x.requires_grad:
            why = f"it is called with a value that ranks of '{axis}' use in shares and with one that they share"
            with self.inside(path):
                self._vary(known, axis, why)

    def _vary(self, shared: Tag, axis: str, why: str) -> None:
        """Have a value varied where it is made; that it is not, is refused where this is not known."""
        self.found |= Adjustments(vary={(source, axis) for source in shared.sources})
        if not shared.sources:
            self.refuse(why, "gradient")

    def _tag_base(self, written: Tensor, tag: Tag, alike: bool) -> None:
        """What is written into a view is in the tensor that it views; `alike`: it is the part that was there."""
        base = _torch.base_of(written)
        if base is None or not tag.parts:
            return
        (known, _), fresh = self._tags.get(base) or _NEVER_SEEN, base in self._fresh
        parts, have, new = dict(known.parts), local_of(base).shape, local_of(written).shape
        for axis, part in tag.parts.items():
            if alike and part.kind != "lost":
                continue
            fits = len(have) == len(new) and have[part.dim] == new[part.dim] if part.split else 0
            if part == SAME and parts.get(axis) in (None, SAME):
                parts[axis] = SAME
            elif fits and fresh and axis not in parts:
                parts[axis] = part
            elif not (fits and parts.get(axis) == part):
                parts[axis] = Part("lost", why="split values are written into a piece of a tensor that is not split")
        self._fresh.pop(base, None)
        self.mark(base, Tag(parts, known.wants or tag.wants, frozenset(), known.split_by | tag.split_by))

    def _joined(self, inputs: list[Tensor], parts: _Made, operation: str) -> Tag:
        """What results have of their inputs besides parts."""
        tags = [(tensor, self.tag(tensor)) for tensor in inputs]
        axes = frozenset[str]().union(*(tag.parts for _, tag in tags), *parts)
        grads = [tag for tensor, tag in tags if tensor.requires_grad or (tag.wants and not torch.is_grad_enabled())]
        for tag in grads:
            for axis in sorted(axes - tag.parts.keys()):
                why = f"{operation} joins a value that all ranks of '{axis}' share with one that is split over it"
                self._vary(tag, axis, why)
        known = frozenset[str]().union(*(tag.sources for tag in grads))
        sources = known if all(tag.sources for tag in grads) else frozenset[str]()
        split_by = frozenset().union(*(tag.split_by for _, tag in tags))
        wants = any(tag.wants or tensor.requires_grad for tensor, tag in tags)
        return Tag({}, wants and not _APART.search(operation), sources, split_by)
