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
matched module call by module call, in their order; one that only the whole run has, or only this one, is passed over.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from shardfn._torch import TorchDispatchMode, argument_names, base_name, base_of, holds_data, is_mutable, pytree
from shardfn.core.collectives import Moved, watching
from shardfn.core.engine.values import Values
from shardfn.core.operations import Operation, made_here, parts_after
from shardfn.core.parts import SAME, Part, after_collective

BY_ACTS = "acts "  # begins what `Tag.split_by` has of an entry of `Policy.acts`


@dataclass(frozen=True)
class Tag:
    """What is known about one tensor.

    `parts`: what it is over each axis it varies over. `wants`: whether it depends on what is differentiated, which its
    `requires_grad` does not say inside an autograd.Function or a checkpoint that will recompute. `source`: the one
    parameter or module output that it is made of (by operations whose other inputs need no gradient). `split_by`: the
    column-parallel modules whose split it carries, or the modules that `Policy.acts` splits.
    """

    parts: Mapping[str, Part] = field(default_factory=dict)
    wants: bool = False
    source: str | None = None
    split_by: frozenset[str] = frozenset()

    @property
    def axes(self) -> frozenset[str]:
        """The axes it varies over."""
        return frozenset(self.parts)

    @property
    def by_acts(self) -> set[str]:
        """The modules at which `Policy.acts` splits it."""
        return {source.removeprefix(BY_ACTS) for source in self.split_by if source.startswith(BY_ACTS)}

    def whole_shape(self, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the whole value, of which a rank has `shape`."""
        for axis, part in self.parts.items():
            shape = part.whole_shape(shape, sizes[axis])
        return shape


@dataclass
class Findings:
    """What a run without data found: which collectives are missing, and what none can mend."""

    vary: set[tuple[str, str]] = field(default_factory=set)  # (source, axis)
    mixed: list[str] = field(default_factory=list)  # problems that no single source explains
    gather: set[str] = field(default_factory=set)  # column-parallel modules whose output leaves `apply`
    sums: set[tuple[str, int, str]] = field(default_factory=set)  # (module, leaf of its output, axis) still to add up
    ready: set[tuple[str, str]] = field(default_factory=set)  # (module, axis): its input has been varied before
    shared: set[tuple[int, str]] = field(default_factory=set)  # (leaf of the output, axis): the same, used in shares
    kept: set[tuple[int, str, int]] = field(default_factory=set)  # (leaf of the output, axis, dim): stays split
    joined: set[tuple[int, str, int]] = field(default_factory=set)  # (leaf of the output, axis, dim): is gathered
    # of activations that `Policy.acts` splits, see `Adjustments`
    inputs: set[Any] = field(default_factory=set)
    outputs: set[Any] = field(default_factory=set)
    scattered: set[tuple[str, str, int]] = field(default_factory=set)
    in_shares: set[str] = field(default_factory=set)
    may_scatter: set[tuple[str, str, int]] = field(default_factory=set)
    whole: set[str] = field(default_factory=set)
    entries: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Record:
    """One operation of a run."""

    name: str
    shapes: tuple[tuple[int, ...], ...]  # of its results
    numbers: tuple[Any, ...]  # among its arguments, but for sizes

    @property
    def computes(self) -> bool:
        """Whether it makes other values than it is given."""
        return self.name not in _MOVES

    def may_be_part_of(self, whole: "_Record") -> bool:
        """Whether the same operation on whole values may have that result: each dim is as long, or a multiple."""
        if self.name != whole.name or len(self.shapes) != len(whole.shapes):
            return False
        pairs = zip(self.shapes, whole.shapes, strict=True)
        return all(
            len(mine) == len(other) and all(m == n or (m and n % m == 0) for m, n in zip(mine, other, strict=True))
            for mine, other in pairs
        )

    def falls_apart_unlike(self, whole: "_Record") -> bool:
        """Whether the same operation on whole values has another number of results."""
        return self.name == whole.name and len(self.shapes) != len(whole.shapes)


class Literals(TorchFunctionMode):
    """Has what is made of numbers begin on the CPU, so that a run without data sees of which."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        where = args[0].device if func is Tensor.new_tensor else given.get("device")
        if func not in (torch.tensor, Tensor.new_tensor) or where is None or torch.device(where).type != "meta":
            return func(*args, **given)
        wants = given.pop("requires_grad", False)
        return func(*args, **given | {"device": "cpu"}).to("meta").requires_grad_(wants)


class Framed(TorchDispatchMode):
    """A run whose operations are counted module call by module call."""

    def __init__(self) -> None:
        super().__init__()
        self._path: list[tuple[str, int]] = [("", 0)]
        self._calls: dict[str, int] = {}
        self._hidden = 0
        self.values = Values()
        self._failed_at: str | None = None

    @contextmanager
    def inside(self, path: str) -> Iterator[None]:
        """Within the forward of a module; remembers the deepest one that raised."""
        self._calls[path] = self._calls.get(path, 0) + 1
        self._path.append((path, self._calls[path]))
        try:
            yield
        except Exception:
            self._failed_at = self._failed_at or path
            raise
        finally:
            self._path.pop()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Within it operations are not those of the model's own forward."""
        self._hidden += 1
        try:
            yield
        finally:
            self._hidden -= 1

    @property
    def failed_at(self) -> str:
        """The path of the module in which the run failed; empty for the model itself."""
        return self._failed_at or ""


class Whole(Framed):
    """Notes the operations of a run with whole weights."""

    def __init__(self) -> None:
        super().__init__()
        self.records: dict[tuple[str, int], list[_Record]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self.values.run(func, args, kwargs or {})
        if not self._hidden and base_name(func) not in _COPIES:
            self.records.setdefault(self._path[-1], []).append(_record(func, args, kwargs or {}, out))
        return out

    def skipped(self, frame: tuple[str, int], start: int, end: int | None = None) -> bool:
        """Whether any of some records of a call makes other values."""
        return any(record.computes for record in self.records.get(frame, [])[start:end])


class Variance(Framed):
    """Follows tags through the operations of a forward."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        whole: Whole | None = None,
        ours: Collection[str] = (),
        padded: Collection[tuple[int, int]] = (),
    ) -> None:
        """Follow what differs over axes.

        Args:
            sizes: the axes over which values may be split, and their sizes.
            whole: a run with whole values, if there was one.
            ours: modules whose forwards are derived from rules, and so are not those of that run.
            padded: (true size, stored size) of factors that are padded here and not in that run.
        """
        super().__init__()
        self.sizes = dict(sizes)
        self._whole, self._ours, self._padded = whole, frozenset(ours), frozenset(padded)
        self._tags = WeakIdKeyDictionary()
        self._zeros = WeakIdKeyDictionary()  # tensors that hold nothing but zeros, and went nowhere yet
        self._next: dict[tuple[str, int], int] = {}  # in which place of a call's records the run is
        self._pieces: dict[tuple[str, int], set[str]] = {}  # of what `Policy.acts` splits, what a call computes with
        self.findings = Findings()
        self._skipped = False  # whether the last operation found was preceded, on one rank, by ones not done here
        self.needs_whole: Callable[[Collection[str], str], None] = lambda sources, path: None

    def tag(self, tensor: Tensor) -> Tag:
        """What is known; a tensor never seen is invariant."""
        return self._tags[tensor] if tensor in self._tags else Tag()

    def mark(self, tensor: Tensor, tag: Tag) -> None:
        """Say what a collective or a module made of a tensor."""
        self._tags[tensor] = tag

    def note_collective(self, moved: Moved, x: Tensor, out: Tensor) -> None:
        """A collective made `out` of x."""
        if moved.axis not in self.sizes:
            return
        known = self.tag(x)
        parts = dict(known.parts)
        before = parts.pop(moved.axis, None)
        varies = before is not None and (before != SAME or known.wants or x.requires_grad)
        if varies and moved.kind in ("pvary", "shard_slice"):
            self.refuse(
                f"{moved.kind} over '{moved.axis}' of a value that varies over it: its gradient would be added up "
                f"twice. For an argument of a parallel forward write layouts.entered(x, '{moved.axis}', its place)"
            )
        part = after_collective(moved.kind, before, out.shape, moved.dims)
        if part is not None:
            parts[moved.axis] = part
        wants = known.wants or x.requires_grad
        still_split = any(part.split for part in parts.values())
        self.mark(out, Tag(parts, wants, None, known.split_by if still_split else frozenset()))

    @contextmanager
    def inside(self, path: str) -> Iterator[None]:
        """Within the forward of a module, whose operations on pieces have to be all that there are on one rank."""
        with super().inside(path):
            yield
            frame = self._path[-1]
            sources = self._pieces.pop(frame, None)
            if sources and self._whole is not None and self._whole.skipped(frame, self._next.get(frame, 0)):
                self.needs_whole(sources, path)

    def refuse(self, why: str) -> None:
        """Note a problem at the module that is running."""
        self.findings.mixed.append(f"in {self._path[-1][0] or '(the model)'!r}: {why}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = self.values.run(func, args, kwargs)
        if not watching():
            return out  # within a collective, which says itself what it made
        self._follow(func, args, kwargs, out)
        return out

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        results = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
        whole = self._record_of(func, args, kwargs, out)
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        name = base_name(func)
        parts = self._parts(name, func, args, kwargs, out, whole)
        self._require_alike(func, inputs, parts, whole)
        self._require_groups(func, inputs, parts, whole)
        self._need_whole(inputs, parts)
        known = self._joined(inputs, parts, str(func))
        for result, own in zip(results, parts, strict=True):
            tag = replace(known, parts=own)
            if inputs or own:
                self._tags[result] = tag
            if is_mutable(func):
                self._tag_base(result, tag)
        for x in inputs:  # viewed, or written into
            self._zeros.pop(x, None)
        self._zeros.update(dict.fromkeys(results if name in ("zeros", "zeros_like", "new_zeros") else [], True))

    def _need_whole(self, inputs: list[Tensor], parts: list[dict[str, Part]]) -> None:
        """Tell whether an operation needs a value whole that `Policy.acts` splits."""
        lost = {axis for own in parts for axis, part in own.items() if part.kind == "lost"}
        for tag in map(self.tag, inputs) if lost else ():
            if tag.by_acts and any(part.split and axis in lost for axis, part in tag.parts.items()):
                self.needs_whole(tag.by_acts, self._path[-1][0])

    def _parts(
        self, name: str, func: Any, args: Any, kwargs: Any, out: Any, whole: _Record | None
    ) -> list[dict[str, Part]]:
        """By axis, the parts of each result."""
        results = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
        shapes = whole.shapes if whole is not None and len(whole.shapes) == len(results) else None
        pointwise = torch.Tag.pointwise in func.tags
        found: list[dict[str, Part]] = [{} for _ in results]

        def seen_from(axis: str) -> Operation:
            def part(x: Tensor) -> Part | None:
                return self.tag(x).parts.get(axis)

            zero = self._zeros.__contains__
            return Operation(name, args, kwargs, tuple(results), part, self.sizes[axis], pointwise, shapes, zero)

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
            numbers = self._cuts(name, args, kwargs) or _numbers(func, args, kwargs, out) == whole.numbers
            self._compare(name, results, whole, found, numbers)
        return found

    def _cuts(self, name: str, args: Any, kwargs: Any) -> bool:
        """Whether an operation picks from a split dim, whose rules know better than its numbers."""
        if name not in _CUTS:
            return False
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        parts = self.tag(args[0]).parts.values()
        return any(part.split and part.dim == dim % max(args[0].dim(), 1) for part in parts)

    def _compare(
        self, name: str, results: list[Tensor], whole: _Record, found: list[dict[str, Part]], numbers: bool
    ) -> None:
        """Lose what is not the part of the whole result that it is said to be; `numbers`: those given are alike."""
        if len(whole.shapes) != len(found):
            why = f"{name} has {len(found)} results here and {len(whole.shapes)} on one rank"
            for own in found:
                own.update(dict.fromkeys(own or list(self.sizes)[:1], Part("lost", why=why)))
            return
        if name == "_local_scalar_dense" and not numbers:
            self.refuse(
                "the forward asks for a value that is another one on one rank, since it is made of this rank's sizes"
            )
        problem = ""
        for result, own, expected in zip(results, found, whole.shapes, strict=True):
            if any(part.kind == "lost" for part in own.values()):
                continue
            shape = Tag(own).whole_shape(tuple(result.shape), self.sizes)
            if shape != expected:
                # Keys of grouped queries are not repeated on a rank that has one of these queries.
                once = {axis: replace(part, share=1) for axis, part in own.items()}
                if Tag(once).whole_shape(tuple(result.shape), self.sizes) == expected:
                    own.update(once)
                    shape = expected
            if self._fits(shape, expected) and numbers:
                continue
            problem = (
                f"{name} has a result of shape {tuple(result.shape)} here and of {expected} on one rank, where a part "
                f"of it would make {shape}: a size is taken from elsewhere than the tensors"
            )
            if self._fits(shape, expected):
                problem = f"{name} is given numbers made of this rank's sizes"
        for own in found if problem else ():  # one wrong result tells of the others
            own.update(dict.fromkeys(own or list(self.sizes)[:1], Part("lost", why=problem)))

    def _fits(self, shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
        """Whether shapes are equal, but for padding."""
        return len(shape) == len(expected) and all(
            mine == other or any(mine * true == other * padded for true, padded in self._padded)
            for mine, other in zip(shape, expected, strict=True)
        )

    def _record_of(self, func: Any, args: Any, kwargs: Any, out: Any) -> _Record | None:
        """The same operation in the run with whole values."""
        if self._whole is None or not self._compared(func):
            return None
        frame = self._path[-1]
        mine, records, start = (
            _record(func, args, kwargs, out),
            self._whole.records.get(frame, []),
            self._next.get(frame, 0),
        )
        self._skipped = False
        for at in range(start, min(start + _AHEAD, len(records))):
            if mine.may_be_part_of(records[at]) or (at == start and mine.falls_apart_unlike(records[at])):
                self._next[frame] = at + 1  # what was passed over is not done here, such as a repetition of one
                self._skipped = self._whole.skipped(frame, start, at)
                return records[at]
        return None  # it is done here only

    def _compared(self, func: Any) -> bool:
        """Whether an operation is the model's own, so that the run with whole values has done it too."""
        ours = self._hidden or self._path[-1][0] in self._ours
        return self._whole is not None and not ours and base_name(func) not in _COPIES

    def _require_alike(
        self, func: Any, inputs: list[Tensor], parts: list[dict[str, Part]], whole: _Record | None
    ) -> None:
        """Lose what is computed from pieces in another way than from whole values, as by `if x.shape[1] > 4`."""
        pieces = [tag for tag in map(self.tag, inputs) if any(part.split for part in tag.parts.values())]
        sources = {source for tag in pieces for source in tag.by_acts}
        if not sources or not self._compared(func):
            return
        self._pieces.setdefault(self._path[-1], set()).update(sources)
        if (whole is not None and self._skipped) or (whole is None and base_name(func) not in _MOVES):
            for own in parts:
                why = f"{base_name(func)} is not what follows here on one rank"
                own.update(dict.fromkeys(own or list(self.sizes)[:1], Part("lost", why=why)))

    def _require_groups(
        self, func: Any, inputs: list[Tensor], parts: list[dict[str, Part]], whole: _Record | None
    ) -> None:
        """Lose padded heads that are repeated another number of times than on one rank: they meet those of others."""
        frame = self._path[-1]
        if whole is not None or not self._padded or self._whole is None or not self._compared(func):
            return
        following = self._whole.records.get(frame, [])[self._next.get(frame, 0) :][:1]
        split = any(part.split for x in inputs for part in self.tag(x).parts.values())
        if split and following and following[0].name == base_name(func) == "expand":
            for own in parts:
                why = "heads are repeated more or less often than on one rank: pad queries and keys alike"
                own.update(dict.fromkeys(own, Part("lost", why=why)))

    def _tag_base(self, written: Tensor, tag: Tag) -> None:
        """What is written into a view is in the tensor that it views."""
        base = base_of(written)
        if base is None or not tag.parts:
            return
        known = self.tag(base)
        parts = dict(known.parts)
        for axis, part in tag.parts.items():
            fits = base.dim() == written.dim() and base.shape[part.dim] == written.shape[part.dim] if part.split else 0
            if not (fits and parts.get(axis) == part):
                parts[axis] = Part("lost", why="split values are written into a piece of a tensor that is not split")
        self._tags[base] = Tag(parts, known.wants or tag.wants, None, known.split_by | tag.split_by)

    def _joined(self, inputs: list[Tensor], parts: list[dict[str, Part]], operation: str) -> Tag:
        """What results have of their inputs besides parts."""
        tags = [(tensor, self.tag(tensor)) for tensor in inputs]
        axes = frozenset().union(*(tag.axes for _, tag in tags), *parts)
        grads = [tag for tensor, tag in tags if tensor.requires_grad or (tag.wants and not torch.is_grad_enabled())]
        for tag in grads:
            for axis in sorted(axes - tag.axes):
                if tag.source is not None:
                    self.findings.vary.add((tag.source, axis))
                else:
                    self.refuse(
                        f"{operation} joins a value that all ranks of '{axis}' share with one that is split over it"
                    )
        sources = {tag.source for tag in grads}
        split_by = frozenset().union(*(tag.split_by for _, tag in tags))
        wants = any(tag.wants or tensor.requires_grad for tensor, tag in tags) and "detach" not in operation
        return Tag({}, wants, sources.pop() if len(sources) == 1 else None, split_by)


# Whether a reshape copies depends on strides, and so on sizes.
_COPIES = {"clone", "contiguous"}
_AHEAD = 12  # how many operations of the whole run may have no counterpart here
_VIEWS = {"view", "_unsafe_view", "_reshape_alias"}
_MOVES = set(
    "expand unsqueeze squeeze transpose permute t slice select narrow split split_with_sizes unsafe_split unbind "
    "repeat alias detach lift_fresh cat stack empty empty_like zeros ones full arange scalar_tensor copy_ "
    "_to_copy".split()
)
_MOVES |= _COPIES | _VIEWS
_CUTS = {"slice", "select", "narrow"}
# Arguments that are sizes, or cut along a dim: the shapes of results tell whether they fit.
_SIZES = set(
    "size stride shape sizes split_size split_sizes repeats storage_offset output_size groups group N C HxW length "
    "normalized_shape num_classes".split()
)
_FEW = 2**12


def _record(func: Any, args: Any, kwargs: Any, out: Any) -> _Record:
    """What is remembered of an operation."""
    results = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
    name = base_name(func)
    shapes = tuple(tuple(leaf.shape) for leaf in results)
    return _Record("view" if name in _VIEWS else name, shapes, _numbers(func, args, kwargs, out))


def _numbers(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[Any, ...]:
    """The numbers among the arguments; what a tensor is made of; whether a value that is asked for is 0."""
    name = base_name(func)
    if name == "_local_scalar_dense":
        return (bool(out),)
    if name == "lift_fresh":
        return tuple(out.flatten().tolist()) if holds_data(out) and not out.is_meta and out.numel() <= _FEW else ()
    sizes = _SIZES | {"end"} if name in _CUTS else _SIZES
    named = dict(zip(argument_names(func), args, strict=False)) | kwargs
    given = [value for key, value in named.items() if key not in sizes]
    return tuple(leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, int | float))


def check_outputs(variance: Variance, output: Any, kept: Collection[str] = ()) -> None:
    """Note what has to be done with the parts that leave `apply`; modules in `kept` may leave theirs split."""
    for at, leaf in enumerate(pytree.tree_leaves(output)):
        for inner, tensor in enumerate(_tensors(leaf, depth=4)):
            tag = variance.tag(tensor)
            for axis, part in tag.parts.items():
                direct = isinstance(leaf, Tensor) and not inner
                _check_output(variance, tag, axis, part, at if direct else None, tuple(tensor.shape), kept)


def _check_output(
    variance: Variance, tag: Tag, axis: str, part: Part, at: int | None, shape: tuple[int, ...], kept: Collection[str]
) -> None:
    found = variance.findings
    asked = bool(tag.split_by) and tag.split_by <= set(kept)
    if asked and part.split and at is not None:
        found.kept.add((at, axis, part.dim))
    elif asked:
        found.mixed.append(
            f"{', '.join(sorted(tag.split_by))}: Policy.acts leaves its output split over '{axis}', and what is made "
            f"of it within the model is not the same as of the whole output ({part.why or part.kind}). Compute a loss "
            "outside of the model, by sf.cross_entropy, or drop the entry"
        )
    elif tag.by_acts and part.split and at is not None:
        found.joined.add((at, axis, part.dim))
    elif tag.by_acts:
        found.whole |= tag.by_acts
    elif part.kind == "same" and at is not None:
        found.shared.add((at, axis))
    elif tag.split_by:
        found.gather |= tag.split_by
    else:
        why = f": {part.why}" if part.why else ""
        found.mixed.append(f"an output of shape {shape} differs over '{axis}' ({part.kind}){why}")


def _tensors(tree: Any, depth: int) -> Iterator[Tensor]:
    """Every tensor of a tree, and of the objects in it that torch does not know as containers."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and hasattr(leaf, "__dict__") and not isinstance(leaf, type | Callable) and not stays(leaf):
            yield from _tensors(dict(vars(leaf)), depth - 1)


def stays(value: object) -> bool:
    """Whether a value is for later calls of the same model and may hold parts: a cache of keys and values."""
    return any(
        f"{cls.__module__}.{cls.__qualname__}" == "transformers.cache_utils.Cache" for cls in type(value).__mro__
    )


def to_meta(tree: Any, values: Values | None = None) -> Any:
    """A tree with every tensor on the meta device, without data; gradients are asked for as before.

    Integers and booleans are noted in `values`. Caches, which a forward fills, are copied; two that are one stay one.
    """
    caches: dict[int, Any] = {}

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return _blank(leaf, values)
        return _copied(leaf, lambda x: _blank(x, values), caches) if stays(leaf) else leaf

    return pytree.tree_map(move, tree)


def _blank(x: Tensor, values: Values | None) -> Tensor:
    # Not `empty_like`, whose result would belong to the transform that `x` belongs to.
    blank = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    if values is not None and not x.is_meta and holds_data(x):
        values.note(blank, x)
    return blank.requires_grad_(x.requires_grad)


def snapshot(cache: Any) -> Any:
    """A cache as it is now, for a later run without data: its integers, which are lengths, keep their values."""
    return _copied(cache, lambda x: _blank(x, None) if x.is_floating_point() else x.clone(), {})


def _copied(value: Any, of_tensor: Callable[[Tensor], Tensor], known: dict[int, Any]) -> Any:
    with _Copying(of_tensor):
        return deepcopy(value, known)


class _Copying(TorchFunctionMode):
    """Within it `deepcopy` makes something else of every tensor."""

    def __init__(self, of_tensor: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._of_tensor = of_tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._of_tensor(args[0]) if func is Tensor.__deepcopy__ else func(*args, **(kwargs or {}))
