"""Which values differ between the ranks of a compute axis, and how, found by a run without data. Layer 3.

[Note: varying and invariant]
Along a compute axis a value is *varying* when each rank has another part of it, *invariant* when all have the same.
The derived collectives keep both sides consistent as long as no gradient flows from a varying value into an invariant
one without a `pvary` between them: `q_norm` (a scale over head_dim, replicated) applied to tp-local heads, or keys that
are replicated because their heads do not divide. There the gradient on each rank is only a part of the sum. JAX inserts
the missing `pvary` from its types; here the forward runs once on meta tensors under `Variance`, which follows the types
through every operation and says where it is missing.

[Note: run beside the whole one]
Parts alone would believe a `view(b, s, 32, -1)` that takes a rank's 8 heads for 32 small ones. So the forward also runs
with whole weights, under `Whole`, and each result must be the part of the whole one that is claimed. Operations are
matched module call by module call, in their order. What is made of weights and inputs has to be made alike: what only
one of the runs does with it is lost, or refused where nothing is split, unless it repeats values in their places; so is
what is done with another value, see [Note: origins].
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from shardfn._torch import base_name, base_of, has_hooks, is_mutable, storage_number, users_backward
from shardfn.core.collectives import Moved, watching
from shardfn.core.engine import padding
from shardfn.core.engine.origins import OF_SHAPES, Origin, differ, passed_on
from shardfn.core.engine.records import (
    ARRANGING,
    COPIES,
    EMPTY,
    MOVES,
    REPEATING,
    Framed,
    Record,
    Whole,
    called,
    dim_of_cut,
    record_of,
    tensors_of,
)
from shardfn.core.engine.tags import Findings, Kind, Problem, Stuck, Tag
from shardfn.core.operations import Operation, made_here, parts_after
from shardfn.core.parts import SAME, Part, Shape, after_collective, even


class Variance(Framed):
    """Follows tags through the operations of a forward."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        whole: Whole | None = None,
        ours: Collection[str] = (),
        padded: Collection[tuple[int, int]] = (),
        asked_for: str = "",
    ) -> None:
        """Follow what differs over axes.

        Args:
            sizes: the axes over which values may be split, and their sizes.
            whole: a run with whole values, if there was one.
            ours: modules whose forwards are derived from rules, and so are not those of that run.
            padded: (true size, stored size) of factors that are padded here and not in that run.
            asked_for: which derivatives are, besides a gradient, see `derivatives_asked_for`.
        """
        super().__init__(whole.origins if whole is not None else None)
        self.sizes = dict(sizes)
        self._whole, self._ours, self._padded = whole, frozenset(ours), frozenset(padded)
        self._asked_for = asked_for
        self._tags = WeakIdKeyDictionary()
        self._zeros = WeakIdKeyDictionary()  # tensors that hold nothing but zeros, and went nowhere yet
        self._fresh = WeakIdKeyDictionary()  # tensors that hold nothing yet
        self._next: dict[tuple[str, int], int] = {}  # in which place of a call's records the run is
        self._passed: dict[tuple[str, int], list[str]] = {}  # what of them was not done here, and nothing was lost for
        self._after_loss = set[tuple[str, int]]()  # calls with values that were lost before
        self._copied_dims: list[int] = []  # the dims that were repeated before the last operation found, not here
        self._pieces: dict[tuple[str, int], set[str]] = {}  # of what `Policy.acts` splits, what a call computes with
        self._writes = 0  # of values that are split otherwise than what they replace
        self._written: dict[int, tuple[torch.UntypedStorage, int]] = {}  # storage, number of the last one to it
        self._seen = WeakIdKeyDictionary()  # how many there were when its tag was made
        self._drawn = WeakIdKeyDictionary()  # tensors with random values -> whether these are between 0 and 1
        self.findings = Findings()
        self.needs_whole: Callable[[Collection[str], str], None] = lambda sources, path: None
        self.stuck: Stuck | None = None
        self.losses: list[Problem] = []  # where parts were lost, in order
        self.with_backwards: dict[int, tuple[Tensor, str]] = {}  # what ranks use in shares of a user's Function; where

    def tag(self, tensor: Tensor) -> Tag:
        """What is known; a tensor never seen is invariant."""
        known: Tag = self._tags.get(tensor) or Tag()
        written = self._written.get(storage_number(tensor)) if self._written else None
        if written is not None and written[1] > (self._seen.get(tensor) or 0):
            why = "another view of its memory was written with values that are split otherwise"
            return replace(known, parts=dict.fromkeys(known.parts or self.sizes, Part("lost", why=why, cure="rules")))
        return known

    def mark(self, tensor: Tensor, tag: Tag) -> None:
        """Say what a collective or a module made of a tensor."""
        self._tags[tensor] = tag
        if self._written:
            self._seen[tensor] = self._writes

    def note_collective(self, moved: Moved, x: Tensor, out: Tensor) -> None:
        """A collective made `out` of x."""
        self.origins.put([out], self.origins.of([x]))
        if moved.axis not in self.sizes:
            return
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
        lost = before is not None and before.kind == "lost" and not self._is_made_within(before)
        part = before if lost else after_collective(moved.kind, before, out.shape, moved.dims)
        if part is not None:
            parts[moved.axis] = part
        wants = known.wants or x.requires_grad
        still_split = any(part.split for part in parts.values())
        self.mark(out, Tag(parts, wants, frozenset(), known.split_by if still_split else frozenset()))
        if x in self._made:
            self.begins_with(out)

    @contextmanager
    def inside(self, path: str, given: Sequence[Tensor] = (), places: tuple[Hashable, ...] = ()) -> Iterator[None]:
        """Within the forward of a module, whose operations have to be all that there are on one rank."""
        if self._is_models_own:
            mine = called(path, self.origins.of(given), places)
            whole = self._matching(mine)
            if whole is None:
                self._differs(f"{path!r} is called, and not on one rank")
            elif self._given_others(mine, whole):
                self._differs(f"{path!r} is called with another value than on one rank")
        with super().inside(path, given, places):
            yield
            self.end()

    def _left(self, frame: tuple[str, int], given: list[Tensor], results: list[Tensor]) -> None:
        """Of a forward that is not the module's own, outputs are what and where they are in the whole run."""
        wholes = self._whole.left.get(frame, ()) if self._whole is not None and frame[0] in self._ours else ()
        for x, (origin, shape) in zip(results, wholes, strict=True) if len(results) == len(wholes) else ():
            same = any(x is other for other in given) and self.origins.of([x]) != (origin,)
            self.origins.put([x], [None if same else origin])
            self._place(x, shape)

    def _place(self, x: Tensor, whole: Shape) -> None:
        """A view of a batch of 1 leaves two dims that may be the split one; the shape of the whole value says which."""
        tag = self.tag(x)
        for axis, part in tag.parts.items() if len(tag.parts) == 1 else ():
            ways = [part, *(even(dim, size) for dim, size in enumerate(x.shape))] if part.alone else []
            fits = [way for way in ways if way.whole_shape(x.shape, self.sizes[axis]) == whole]
            if fits and fits[0] is not part:
                self.mark(x, replace(tag, parts={axis: fits[0]}))

    def differ(self, mine: Sequence[Tensor], whole: Sequence[Tensor]) -> bool:
        """Whether values are known to be others than some of the whole run."""
        return self._whole is not None and differ(self.origins.of(mine), self._whole.origins.of(whole))

    def _is_made_within(self, part: Part) -> bool:
        """Whether a part was lost in a parallel forward that is running, whose author knows what is done with it."""
        return part.where is not None and any(path in self._ours and part.where == path for path, _ in self._path)

    def _given_others(self, mine: Record, whole: Record) -> bool:
        """Whether something is given other values than on one rank."""
        if any(path in self._ours for path, _ in self._path):
            return False
        return mine.places != whole.places or differ(mine.given, whole.given)

    def end(self) -> None:
        """The forward of a module, or of the model, ends: on one rank nothing more is done in it."""
        frame = self._path[-1]
        sources = self._pieces.pop(frame, None)
        passed = self._passed.pop(frame, [])
        if self._whole is not None and self._is_models_own:
            passed += [record.name for record in self._whole.after(frame, self._next.get(frame, 0)) if record.counts]
        if passed and sources:
            self.needs_whole(sources, frame[0])
        elif passed:
            self._differs(f"{passed[0]} is not done, which one rank does")

    def _differs(self, what: str) -> None:
        """Refuse a forward that does something else than on one rank."""
        sources = self._pieces.get(self._path[-1])
        if sources:
            self.needs_whole(sources, self._path[-1][0])
        else:
            # What was lost says more, if it is used.
            problems = self.findings.doubts if self._path[-1] in self._after_loss else self.findings.mixed
            problems.append(self._problem(f"{what}: its control flow depends on this rank's sizes", "sizes"))

    @property
    def _is_models_own(self) -> bool:
        """Whether the module that is running does what it does on one rank, as far as that is known."""
        return self._whole is not None and not self._hidden and self._path[-1][0] not in self._ours

    def refuse(self, why: str, kind: Kind = "rules", x: Tensor | None = None) -> None:
        """Note a problem with a value at the module that is running; of a lost one, its part says the kind."""
        self.findings.mixed.append(self._problem(why, kind, x))

    def _problem(self, why: str, kind: Kind, x: Tensor | None = None) -> Problem:
        path = here = self._path[-1][0]
        known = self.tag(x) if x is not None else Tag()
        lost = next((part for part in known.parts.values() if part.kind == "lost"), None)
        if lost is not None:
            kind, here = lost.cure, path if lost.where is None else lost.where
        where = f" (in {here or '(the model)'!r})" if here != path else ""
        what = f"in {path or '(the model)'!r}: {why}{where}"
        return Problem(what, kind, known.split_by, here)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.stuck = None
        try:
            out = self.values.run(func, args, kwargs)
        except Exception:
            tensors = tensors_of((args, kwargs))
            self.stuck = Stuck(base_name(func), tuple((tuple(x.shape), self.tag(x)) for x in tensors))
            raise
        if not watching():
            return out  # within a collective, which says itself what it made
        self._note_draws(func, args, out)
        self._follow(func, args, kwargs, out)
        return out

    def _note_draws(self, func: Any, args: Any, out: Any) -> None:
        """Refuse decisions by random values: each way would need a run of its own."""
        name = base_name(func)
        results = [x for x in tensors_of(out) if not x.is_meta]
        if torch.Tag.nondeterministic_seeded in func.tags:
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
            self._drawn.update(dict.fromkeys(results, all(drawn) and name in REPEATING))

    def is_zero(self, x: Tensor) -> bool:
        """Whether x is known to hold nothing but zeros."""
        return x in self._zeros

    def hooked(self, x: Tensor) -> None:
        """Something will be called with the gradient of x: refuse that where it is a part of it."""
        for axis, part in self.tag(x).parts.items():
            if part.in_shares:
                what = f"a hook on a value that ranks of '{axis}' use in shares gets a part of its gradient"
                self.refuse(what, "backward", x)

    def note_backwards(self, values: Sequence[Tensor]) -> None:
        """Remember those that ranks use in shares, and that were made by what has a backward of the user's."""
        for x in values:
            if has_hooks(x):
                self.hooked(x)
            elif users_backward(x) is not None and any(part.in_shares for part in self.tag(x).parts.values()):
                self.with_backwards.setdefault(id(x), (x, self._path[-1][0]))

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        inputs, results = tensors_of((args, kwargs)), tensors_of(out)
        self.note_backwards(inputs)
        counts = self.counts(func, args, kwargs, out)
        mine = record_of(func, args, kwargs, out, counts, self.origins.of(inputs))
        whole = self._matching(mine) if self._compared(func) else None
        name = base_name(func)
        parts = self._parts(mine, func, args, kwargs, out, whole)
        self._require_alike(func, inputs, parts, self._unlike(name, mine, whole, inputs, counts))
        self.origins.put(results, self._origins(mine, whole, counts), is_mutable(func))
        self._require_groups(func, inputs, parts, whole)
        self._need_whole(inputs, parts)
        known = self._joined(inputs, parts, str(func))
        for own in parts:
            fresh = {axis: part for axis, part in own.items() if part.kind == "lost" and part.where is None}
            own.update({axis: replace(part, where=self._path[-1][0]) for axis, part in fresh.items()})
            self.losses += [Problem(p.why, p.cure, known.split_by, self._path[-1][0]) for p in fresh.values()]
        weight = bool(inputs) and name in MOVES and all(self.tag(x).weight for x in inputs)
        empty = self._empty(func, args, kwargs) if self._padded else frozenset[str]()
        for result, own in zip(results, parts, strict=True):
            splits = frozenset(axis for axis, part in own.items() if part.split)
            tag = replace(known, parts=own, weight=weight, empty=empty & splits)
            if is_mutable(func):
                self._note_written(result, own)
                self._tag_base(result, tag)
            if inputs or own:
                self.mark(result, tag)
        for x in inputs:  # viewed, or written into
            self._zeros.pop(x, None)
        zeros = name in ("zeros", "zeros_like", "new_zeros") or (name == "scalar_tensor" and args[0] == 0)
        self._zeros.update(dict.fromkeys(results if zeros else [], True))
        self._fresh.update(dict.fromkeys(results if name in EMPTY else [], True))

    def _empty(self, func: Any, args: Any, kwargs: Any) -> frozenset[str]:
        """The axes over which results are zero in padding; refuses what is no number there."""
        found = set[str]()
        for axis in frozenset().union(*(self.tag(x).empty for x in tensors_of((args, kwargs)))):
            stays, breaks = padding.after(func, args, kwargs, partial(self._is_empty, axis), self._asked_for)
            if breaks:
                name = base_name(func).rstrip("_")
                self.refuse(f"{name} of zeros, which are in what '{axis}' splits with padding (Policy.pad)", "zeros")
            found.update([axis] if stays else [])
        return frozenset(found)

    def _is_empty(self, axis: str, x: Tensor) -> bool:
        return axis in self.tag(x).empty

    def _unlike(self, name: str, mine: Record, whole: Record | None, inputs: list[Tensor], counts: bool) -> str:
        """What is done in another way than on one rank, if it is; `counts`: with what is made of weights or inputs."""
        if whole is not None and name == "expand":
            return self._of_other_shapes(name, whole, inputs)  # a row or a column
        if not counts or not mine.counts:
            return ""
        if whole is None:
            return f"{name} is done here, and not on one rank"
        if name in OF_SHAPES:
            return ""
        if not whole.counts:
            return f"{name} is given a value, and a constant on one rank"
        if self._given_others(mine, whole):
            return f"{name} is given another value than on one rank"
        if mine.differentiated != whole.differentiated:
            return f"{name} is done {'with' if mine.differentiated else 'without'} gradients, other than on one rank"
        return self._of_other_shapes(name, whole, inputs)

    def _of_other_shapes(self, name: str, whole: Record, inputs: list[Tensor]) -> str:
        for x, shape in zip(inputs, whole.given_shapes, strict=True) if len(inputs) == len(whole.given_shapes) else ():
            if not self.tag(x).parts and not self._fits(tuple(x.shape), shape):
                return f"{name} is given a value of shape {tuple(x.shape)}, and of {shape} on one rank"
        return ""

    def _origins(self, mine: Record, whole: Record | None, counts: bool) -> Sequence[Origin]:
        """Where the results of an operation come from."""
        count = len(mine.shapes)
        if not self._is_models_own:
            return (passed_on(mine.given) if self._hidden else None,) * count
        if mine.name in REPEATING - {"lift_fresh"}:
            return (self.passed_on(mine),) * count
        if not counts:
            return self.origins.constants(mine)
        return whole.made if whole is not None and whole.counts and len(whole.made) == count else (None,) * count

    def _need_whole(self, inputs: list[Tensor], parts: list[dict[str, Part]]) -> None:
        """Tell whether an operation needs a value whole that `Policy.acts` splits."""
        lost = {axis for own in parts for axis, part in own.items() if part.kind == "lost"}
        for tag in map(self.tag, inputs) if lost else ():
            if tag.by_acts and any(part.split and axis in lost for axis, part in tag.parts.items()):
                self.needs_whole(tag.by_acts, self._path[-1][0])

    def _parts(
        self, mine: Record, func: Any, args: Any, kwargs: Any, out: Any, whole: Record | None
    ) -> list[dict[str, Part]]:
        """By axis, the parts of each result."""
        name, results = base_name(func), tensors_of(out)
        shapes = whole.shapes if whole is not None and len(whole.shapes) == len(results) else None
        pointwise = torch.Tag.pointwise in func.tags
        found: list[dict[str, Part]] = [{} for _ in results]
        tags = {id(x): self.tag(x) for x in tensors_of((args, kwargs))}

        def seen_from(axis: str) -> Operation:
            def part(x: Tensor) -> Part | None:
                return tags[id(x)].parts.get(axis)

            zero = self._zeros.__contains__
            size = self.sizes[axis]
            found = (name, args, kwargs, tuple(results), part, size, pointwise, shapes, zero, self._padded)
            return Operation(*found, lambda x: self.tag(x).weight)

        operations = {axis: seen_from(axis) for axis in self.sizes}
        varied = [axis for axis, op in operations.items() if any(op.part(x) is not None for x in op.inputs)]
        made = {axis: parts_after(operations[axis]) for axis in varied}
        if not varied and shapes is not None:
            made = made_here(operations)
        for axis, parts in made.items():
            for own, part in zip(found, parts, strict=True):
                if part is not None:
                    own[axis] = part
        if whole is not None:
            numbers = mine.numbers == whole.numbers and self._starts_alike(mine, whole, args, kwargs)
            self._compare(mine, whole, results, found, numbers, self._repeats_in_order(name, args, kwargs))
        return found

    def _starts_alike(self, mine: Record, whole: Record, args: Any, kwargs: Any) -> bool:
        """Whether a cut begins where it does in the whole value."""
        if mine.start is None or whole.start is None:
            return mine.start == whole.start
        x, dim = args[0], dim_of_cut(args, kwargs)
        at = tuple(mine.start if d == dim else n for d, n in enumerate(x.shape))
        return self._fits((self.tag(x).whole_shape(at, self.sizes)[dim],), (whole.start,))

    def _repeats_in_order(self, name: str, args: Any, kwargs: Any) -> bool:
        """Whether keys that one rank repeats here, and ranks share, are one after the other there: k0 k0 k1 k1."""
        inputs = tensors_of((args, kwargs))
        split = [(axis, part, x) for x in inputs for axis, part in self.tag(x).parts.items() if part.split]
        heads = [(part, part.whole_shape(x.shape, self.sizes[axis])[part.dim]) for axis, part, x in split]
        shared = [part.dim for part, count in heads if part.share > 1 and count > 1]  # one has no order
        return not shared or (name not in ARRANGING and all(at > dim for at in self._copied_dims for dim in shared))

    def _compare(
        self,
        mine: Record,
        whole: Record,
        results: list[Tensor],
        found: list[dict[str, Part]],
        numbers: bool,
        in_order: bool,
    ) -> None:
        """Lose what is not the part of the whole result that it is said to be.

        `numbers`: those given are alike. `in_order`: what was repeated before is in the order of the heads that use it.
        """
        name = mine.name
        if len(whole.shapes) != len(found):
            why = f"{name} has {len(found)} results here and {len(whole.shapes)} on one rank"
            for own in found:
                own.update(dict.fromkeys(own or list(self.sizes)[:1], Part("lost", why=why, cure="sizes")))
            return
        if name == "_local_scalar_dense" and not numbers:
            self.refuse(
                "the forward asks for a value that is another one on one rank, since it is made of this rank's sizes",
                "sizes",
            )
        problem = ""
        for result, own, expected in zip(results, found, whole.shapes, strict=True):
            if any(part.kind == "lost" for part in own.values()):
                continue
            shape = Tag(own).whole_shape(tuple(result.shape), self.sizes)
            if shape != expected:
                # Keys of grouped queries are not repeated on a rank that has one of these queries.
                once = {axis: replace(part, share=1, second=None) for axis, part in own.items()}
                repeated = Tag(once).whole_shape(tuple(result.shape), self.sizes)
                for_all = all(part.share in (1, self.sizes[axis]) for axis, part in own.items())  # also padded queries
                if in_order and (repeated == expected or (for_all and self._fits(repeated, expected))):
                    own.update(once)
                    shape = repeated
            if self._fits(shape, expected) and numbers:
                continue
            problem = (
                f"{name} has a result of shape {tuple(result.shape)} here and of {expected} on one rank, where a part "
                f"of it would make {shape}: a size is taken from elsewhere than the tensors"
            )
            if self._fits(shape, expected):
                problem = f"{name} is given numbers made of this rank's sizes"
        for own in found if problem else ():  # one wrong result tells of the others
            own.update(dict.fromkeys(own or list(self.sizes)[:1], Part("lost", why=problem, cure="sizes")))

    def _fits(self, shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
        """Whether shapes are equal, but for padding."""
        return len(shape) == len(expected) and all(
            mine == other or any(mine * true == other * padded for true, padded in self._padded)
            for mine, other in zip(shape, expected, strict=True)
        )

    def _matching(self, mine: Record) -> Record | None:
        """The next record that something done here may be a part of; None when it is done here only."""
        assert self._whole is not None
        frame = self._path[-1]
        start = self._next.get(frame, 0)
        records = self._whole.after(frame, start, start + _AHEAD)
        self._copied_dims = []
        for at, record in enumerate(records):
            if mine.may_be_part_of(record, self._padded) or (at == 0 and mine.falls_apart_unlike(record)):
                passed = [other for other in records[:at] if other.counts]
                if passed and mine.name in REPEATING:
                    return None
                self._next[frame] = start + at + 1
                if passed:
                    self._passed.setdefault(frame, []).extend(other.name for other in passed)
                self._copied_dims = [other.repeats for other in records[:at] if other.repeats is not None]
                return record
        return None

    def _compared(self, func: Any) -> bool:
        """Whether an operation is the model's own, so that the run with whole values has done it too."""
        return self._is_models_own and base_name(func) not in COPIES

    def _require_alike(self, func: Any, inputs: list[Tensor], parts: list[dict[str, Part]], unlike: str) -> None:
        """Lose what is computed in another way than on one rank, as by `if x.shape[1] > 4`; `unlike` says in which."""
        kinds = ("split", "sum")
        pieces = [tag for tag in map(self.tag, inputs) if any(part.kind in kinds for part in tag.parts.values())]
        sources = {source for tag in pieces for source in tag.by_acts}
        for own in parts if sources else ():  # what follows gathers one dim
            split = {axis for axis, part in own.items() if part.second is not None}
            own.update(dict.fromkeys(split, Part("lost", why=f"{base_name(func)} makes two split dims of one")))
        if not self._compared(func):
            return
        frame = self._path[-1]
        if sources:
            self._pieces.setdefault(frame, set()).update(sources)
        passed = self._passed.get(frame, [])
        if any(_is_lost(part) for x in inputs for part in self.tag(x).parts.values()):
            self._after_loss.add(frame)
            return
        if not (unlike or passed):
            return
        why = unlike or f"{passed[0]} is done on one rank, not here"
        if pieces:
            self._passed.pop(frame, None)
            lost = Part("lost", why=f"{why}: control flow depends on this rank's sizes", cure="sizes")
            for own in parts:  # what is lost already says more
                own.update({axis: lost for axis in own or list(self.sizes)[:1] if not _is_lost(own.get(axis))})
        elif unlike:
            self._differs(why)

    def _require_groups(
        self, func: Any, inputs: list[Tensor], parts: list[dict[str, Part]], whole: Record | None
    ) -> None:
        """Lose padded heads that are repeated another number of times than on one rank: they meet those of others."""
        frame = self._path[-1]
        if not self._padded or self._whole is None or not self._compared(func):
            return
        if whole is not None:
            known = [part for x in inputs for part in self.tag(x).parts.values() if part.split]
            for own in parts if self._copied_dims and known and all(part.share == 1 for part in known) else ():
                why = "heads are not repeated as on one rank: pad queries and keys alike"
                own.update(dict.fromkeys(own, Part("lost", why=why, cure="pads")))
            return
        following = self._whole.records.get(frame, [])[self._next.get(frame, 0) :][:1]
        split = any(part.split for x in inputs for part in self.tag(x).parts.values())
        if split and following and following[0].name == base_name(func) == "expand":
            for own in parts:
                why = "heads are repeated more or less often than on one rank: pad queries and keys alike"
                own.update(dict.fromkeys(own, Part("lost", why=why, cure="pads")))

    def require_varied(self, x: Tensor, axis: str, path: str) -> None:
        """Have an input of a module varied where it is made, since those of other calls are."""
        known = self.tag(x)
        if not (known.wants or x.requires_grad):
            return
        if known.sources:
            self.findings.vary.update((source, axis) for source in known.sources)
            return
        what = (
            f"in {path!r}: it is called with a value that ranks of '{axis}' use in shares and with one that they share"
        )
        self.findings.mixed.append(Problem(what, "gradient", at=path))

    def _note_written(self, written: Tensor, parts: dict[str, Part]) -> None:
        """Other views of the same memory know nothing of what is in it now."""
        if self.tag(written).parts != parts:
            self._writes += 1
            self._written[storage_number(written)] = written.untyped_storage(), self._writes

    def _tag_base(self, written: Tensor, tag: Tag) -> None:
        """What is written into a view is in the tensor that it views."""
        base = base_of(written)
        if base is None or not tag.parts:
            return
        known, fresh = self._tags.get(base) or Tag(), base in self._fresh
        parts = dict(known.parts)
        for axis, part in tag.parts.items():
            fits = base.dim() == written.dim() and base.shape[part.dim] == written.shape[part.dim] if part.split else 0
            if part == SAME and parts.get(axis) in (None, SAME):
                parts[axis] = SAME
            elif fits and fresh and axis not in parts:
                parts[axis] = part
            elif not (fits and parts.get(axis) == part):
                parts[axis] = Part("lost", why="split values are written into a piece of a tensor that is not split")
        self._fresh.pop(base, None)
        self.mark(base, Tag(parts, known.wants or tag.wants, frozenset(), known.split_by | tag.split_by))

    def _joined(self, inputs: list[Tensor], parts: list[dict[str, Part]], operation: str) -> Tag:
        """What results have of their inputs besides parts."""
        tags = [(tensor, self.tag(tensor)) for tensor in inputs]
        axes = frozenset().union(*(tag.axes for _, tag in tags), *parts)
        grads = [tag for tensor, tag in tags if tensor.requires_grad or (tag.wants and not torch.is_grad_enabled())]
        for tag in grads:
            for axis in sorted(axes - tag.axes):
                if tag.sources:
                    self.findings.vary.update((source, axis) for source in tag.sources)
                else:
                    self.refuse(
                        f"{operation} joins a value that all ranks of '{axis}' share with one that is split over it",
                        "gradient",
                    )
        sources = (
            frozenset().union(*(tag.sources for tag in grads)) if all(tag.sources for tag in grads) else frozenset()
        )
        split_by = frozenset().union(*(tag.split_by for _, tag in tags))
        wants = any(tag.wants or tensor.requires_grad for tensor, tag in tags) and "detach" not in operation
        return Tag({}, wants, sources, split_by)


_AHEAD = 64  # how many operations of the whole run may have no counterpart here


def _is_lost(part: Part | None) -> bool:
    return part is not None and part.kind == "lost"
