"""What forwards do between the parts of ranks, by rules or as a run without data found it. Layer 4."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from shardfn.core import collectives
from shardfn.core.engine.tags import BY_ACTS
from shardfn.core.engine.variance import Variance
from shardfn.core.mesh import MeshSpec
from shardfn.core.parts import Part, Runs, even


class Step(NamedTuple):
    """What is done with leaf `at` of the inputs or outputs of the module at `path`, see [Note: steps] in sequence.py.

    how    | before                  | after                   | backward
    -------|-------------------------|-------------------------|---------------
    slice  | whole                   | this rank's piece       | all-gather
    own    | whole, used in shares   | this rank's piece       | zeros around it
    gather | this rank's piece       | whole, used in shares   | reduce-scatter
    join   | this rank's piece       | whole                   | slice
    """

    path: str
    at: int
    axis: str
    dim: int
    how: Literal["slice", "own", "gather", "join"]


@dataclass(frozen=True)
class Adjustments:
    """What a run without data added to the derivation, see [Note: varying and invariant].

    `vary`: parameters, and inputs and outputs of modules, that need a `pvary`, with the axis; `gather`: column-parallel
    modules whose output is gathered because it leaves `apply`. `sums`: which leaf of which module's output is a sum
    still to be added up over which axis. `ready`: linears, and sources, that had their `pvary` before. `shared`: leaves
    of the output that have had one, though they are the same on all ranks; `kept`: those that leave `apply` split over
    an axis, and their dim; `joined`: those that are gathered as they leave.
    `inputs`, `outputs`: steps of modules for activations split by `Policy.acts`; `scattered`: which modules scatter
    their sum, and over which dim. For the next run without data, `in_shares`: modules that use gathered inputs in
    shares only, `may_scatter`: sums that it tries to scatter, `whole`: modules in acts whose output something needs
    whole, `entries`: others that need their inputs whole, `several`: modules in acts of which more inputs are split.
    `splits`: if any dropout module is called on a split activation, all calls of such modules, by path and number, with
    the axis of each dim ("" for none); None when no dim explains the size.
    """

    vary: frozenset[tuple[str, str]] = frozenset()
    gather: frozenset[str] = frozenset()
    sums: frozenset[tuple[str, int, str]] = frozenset()
    ready: frozenset[tuple[str, str]] = frozenset()
    shared: frozenset[tuple[int, str]] = frozenset()
    kept: frozenset[tuple[int, str, int]] = frozenset()
    joined: frozenset[tuple[int, str, int]] = frozenset()
    inputs: frozenset[Step] = frozenset()
    outputs: frozenset[Step] = frozenset()
    scattered: frozenset[tuple[str, str, int]] = frozenset()
    in_shares: frozenset[str] = frozenset()
    may_scatter: frozenset[tuple[str, str, int]] = frozenset()
    whole: frozenset[str] = frozenset()
    entries: frozenset[str] = frozenset()
    several: frozenset[str] = frozenset()
    splits: frozenset[tuple[str, int, tuple[str, ...] | None]] = frozenset()

    def axes_of(self, source: str) -> list[str]:
        """The axes over which a source needs a `pvary`."""
        return sorted(axis for name, axis in self.vary if name == source)

    def scatters(self, path: str, axis: str) -> int | None:
        """The dim over which the sum that a module makes is scattered."""
        return next((dim for at, over, dim in self.scattered if (at, over) == (path, axis)), None)


Scatters = Callable[[str, str, Tensor], int | None]  # (module, axis, summand) -> dim
Gathers = Sequence[tuple[Step, Tensor, Tensor]]  # the step, what was gathered, the whole


class ComputeAxes:
    """The collectives over compute axes of one call; tells `Variance`, when there is one, what they did."""

    def __init__(
        self,
        mesh: DeviceMesh | MeshSpec,
        sizes: Mapping[str, int],
        coords: Mapping[str, int],
        variance: Variance | None = None,
    ) -> None:
        self.mesh, self.sizes, self.coords = mesh, sizes, coords
        self._variance = variance
        self.scatters: Scatters | None = None  # decides in a run without data which sums are scattered
        self.gathers_again: Callable[[Gathers], AbstractContextManager[Any]] = nullcontext
        self.drops: Callable[[str, Tensor, float, Sequence[str]], Tensor] | None = None  # scores, under a dropout_seed
        self.bytes_moved = 0  # counted in a run without data: received by each rank in a forward and a backward
        # In a run without data, by module and axis: inputs that were not varied before they came.
        self._not_ready: dict[tuple[str, str], list[Tensor]] = {}
        # An input read by several column-parallel linears is varied once, so that they share one backward all-reduce.
        # The values hold the same storage as the keys, not the keys: an entry goes when its input does.
        self._varied: dict[str, WeakIdKeyDictionary] = {}

    def forget(self) -> None:
        """Another call begins: what was varied belongs to the graph of the one before."""
        self._varied.clear()

    def vary(self, x: Tensor, axis: str) -> Tensor:
        """Identity on an invariant tensor; its backward is an all-reduce over `axis`."""
        cache = self._varied.setdefault(axis, WeakIdKeyDictionary())
        if x not in cache:
            with torch.set_grad_enabled(x.requires_grad or torch.is_grad_enabled()):  # also used outside a no_grad
                cache[x] = collectives.pvary(x, self.mesh, axis)
            self._count(x, axis, 2 if x.requires_grad else 0)
        return cache[x]

    def entered(self, x: Tensor, axis: str, path: str, ready: bool) -> Tensor:
        """The input of a column-parallel linear at `path`, varying; `ready` when it was before."""
        part = self._variance.tag(x).parts.get(axis) if self._variance is not None else None
        if self._variance is None or part is None or part.kind == "same":
            return self.varied_once(x, axis, path, ready)
        self._variance.refuse(
            f"an input that is already split over '{axis}' meets a weight that splits its output over it"
            + (f" ({part.why})" if part.why else ""),
            "rules",
            x,
        )
        return x

    def varied_once(self, x: Tensor, axis: str, reader: str, ready: bool) -> Tensor:
        """A value that does not vary, varying for a reader of it; `ready` when it varied before."""
        if self._variance is None:
            return x if ready else self.vary(x, axis)
        if self._variance.tag(x).parts.get(axis) is None:
            self._not_ready.setdefault((reader, axis), []).append(x)
            return self.vary(x, axis)
        self._variance.findings.ready.add((reader, axis))
        return x

    def own(self, x: Tensor, axis: str, path: str, wanted: Part, ready: bool) -> Tensor:
        """Of an input that may be whole, this rank's part of dim `wanted.dim`, such as [.., in@axis] of [.., in]."""
        part = self._variance.tag(x).parts.get(axis) if self._variance is not None else None
        size = sum(outer * inner for outer, inner in wanted.runs)
        if x.shape[wanted.dim] == size * self.sizes[axis]:
            if self._variance is not None and part is None:
                self._not_ready.setdefault((path, axis), []).append(x)
            elif self._variance is not None and part is not None and part.kind == "same":
                self._variance.findings.ready.add((path, axis))
            elif self._variance is not None:  # a sum, maybe, that the next run has added up
                self._variance.refuse(_not_its_part(x, axis, part, wanted), "rules", x)
            return self._taken(x, axis, wanted, ready or part is not None)
        if self._variance is not None and x.shape[wanted.dim] == size:
            if part is None or part != wanted:
                self._variance.refuse(_not_its_part(x, axis, part, wanted), "rules", x)
        return x

    def agree(self) -> None:
        """The run without data ends: all calls of a module get inputs that were varied before, or none does."""
        assert self._variance is not None
        for (path, axis), inputs in self._not_ready.items():
            for x in inputs if (path, axis) in self._variance.findings.ready else ():
                self._variance.require_varied(x, axis, path)

    def _taken(self, x: Tensor, axis: str, wanted: Part, ready: bool) -> Tensor:
        """This rank's pieces of a dim of a tensor that all ranks have whole."""
        pieces, start, size, dim = [], 0, self.sizes[axis], wanted.dim
        with self.hidden():
            for outer, inner in wanted.runs:
                piece = x.narrow(dim, start, outer * inner * size).unflatten(dim, (outer, size * inner))
                start += outer * inner * size
                if ready:
                    piece = piece.narrow(dim + 1, self.coords[axis] * inner, inner)
                else:
                    piece = collectives.shard_slice(piece, self.mesh, axis, dim + 1)
                pieces.append(piece.flatten(dim, dim + 1))
            taken = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
        self._count(x, axis, 0 if ready or not x.requires_grad else 1)
        self.note_part(taken, axis, wanted)
        return taken

    def leaf_total(self, leaves: list[Any], at: int, axis: str, path: str, dim: int | None) -> Tensor:
        """The sum that a leaf of the output of the module at `path` is, in each of its calls."""
        x = leaves[at] if at < len(leaves) else None
        part = self._variance.tag(x).parts.get(axis) if self._variance is not None and isinstance(x, Tensor) else None
        if self._variance is not None and isinstance(x, Tensor) and part is not None and part.kind == "lost":
            self._variance.refuse(
                f"output {at} is a sum over '{axis}' in one call, and in another one it cannot be told: {part.why}",
                "whole",
                x,
            )
        whole = self._variance is not None and (part is None or part.kind in ("same", "split"))
        if self._variance is not None and (whole or not isinstance(x, Tensor)):
            self._variance.refuse(
                f"output {at} is a sum over '{axis}' that is still pending in one call, and in another one it is not: "
                f"write sf.collectives.psum(x, mesh, '{axis}') where it is one",
                "gradient",
            )
        return self.total(x, axis, path, dim) if isinstance(x, Tensor) else leaves[at]

    def total(self, x: Tensor, axis: str, path: str, dim: int | None) -> Tensor:
        """The sum over `axis` that the module at `path` makes: whole, or of which each rank has its part of `dim`."""
        if self.scatters is not None:
            dim = self.scatters(path, axis, x)
        if dim is None:
            self._count(x, axis, 2)
            return collectives.psum(x, self.mesh, axis)
        self._count(x, axis, 2)
        return self._by_acts(collectives.psum_scatter(x, self.mesh, axis, dim), path)

    def step(self, x: Tensor, step: Step) -> Tensor:
        """Slice or gather a value."""
        if step.how == "own":
            size = x.shape[step.dim] // self.sizes[step.axis]
            with self.hidden():
                own = x.narrow(step.dim, self.coords[step.axis] * size, size)
            self.note_part(own, step.axis, even(step.dim, size))
            return self._by_acts(own, step.path)
        if step.how == "slice":
            self._count(x, step.axis, 1 if x.requires_grad else 0)
            return self._by_acts(collectives.shard_slice(x, self.mesh, step.axis, step.dim), step.path)
        if step.how == "join":
            return self.join(x, step.axis, step.dim)
        self._count(x, step.axis, self.sizes[step.axis] * (2 if x.requires_grad else 1))
        return collectives.all_gather(x, self.mesh, step.axis, step.dim)

    def _by_acts(self, x: Tensor, path: str) -> Tensor:
        """Tell the run without data that an entry of `Policy.acts` splits x."""
        if self._variance is not None:
            self._variance.mark(x, replace(self._variance.tag(x), split_by=frozenset([f"{BY_ACTS}{path}"])))
        return x

    def join(self, x: Tensor, axis: str, dim: int, runs: Runs = ()) -> Tensor:
        """The parts of all ranks of `axis` side by side, the same on all its ranks; `runs` when they are not even."""
        dim = dim % x.dim()
        self._count(x, axis, self.sizes[axis])
        if len(runs) < 2 and all(outer == 1 for outer, _ in runs):
            return collectives.all_gather_invariant(x, self.mesh, axis, dim)
        with self.hidden():
            whole, start = [], 0
            for outer, inner in runs:
                piece = x.narrow(dim, start, outer * inner).unflatten(dim, (outer, inner))
                start += outer * inner
                piece = collectives.all_gather_invariant(piece, self.mesh, axis, dim + 1)
                whole.append(piece.flatten(dim, dim + 1))
            joined = torch.cat(whole, dim)
        self.note_part(joined, axis, None)
        return joined

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Operations within are not the model's own."""
        with self._variance.hidden() if self._variance is not None else nullcontext():
            yield

    def note_part(self, x: Tensor, axis: str, part: Part | None) -> None:
        """Tell the run without data what x is over an axis."""
        if self._variance is not None:
            tag = self._variance.tag(x)
            parts = {a: p for a, p in tag.parts.items() if a != axis} | ({axis: part} if part is not None else {})
            self._variance.mark(x, replace(tag, parts=parts))

    def require(self, x: Tensor, axis: str, wanted: Part) -> None:
        """Have the run without data refuse an x that is something else over an axis."""
        part = self._variance.tag(x).parts.get(axis) if self._variance is not None else wanted
        if self._variance is not None and part != wanted:
            self._variance.refuse(_not_its_part(x, axis, part, wanted), "rules", x)

    def require_whole(self, x: Tensor, axis: str, what: str) -> None:
        """Have the run without data refuse an x that is not the same on all ranks of an axis."""
        part = self._variance.tag(x).parts.get(axis) if self._variance is not None else None
        if self._variance is not None and part is not None and part.kind != "same":
            why = f" ({part.why})" if part.why else ""
            self._variance.refuse(f"{what} differ over '{axis}', as a {part.kind} value{why}", "whole", x)

    def note_last(self, x: Tensor, parts: Mapping[str, Part]) -> None:
        """Tell the run without data what the last dim of x is over axes: sizes of 1 leave that open."""
        if self._variance is not None:
            for axis, part in parts.items():
                self.note_part(x, axis, part.at(x.dim() - 1))

    def note_source(self, out: Any, source: str, split_by: str | None = None) -> Any:
        """Tell the run without data where a module's output comes from."""
        if self._variance is not None and isinstance(out, Tensor):
            tag = self._variance.tag(out)
            added = frozenset([split_by]) if split_by is not None else frozenset()
            self._variance.mark(out, replace(tag, sources=frozenset([source]), split_by=tag.split_by | added))
        return out

    @property
    def follows(self) -> bool:
        """Whether this is a run without data that follows what differs over axes."""
        return self._variance is not None

    @contextmanager
    def seen_from(self, sources: Mapping[str, Any], but: Collection[str]) -> Iterator[None]:
        """In a run without data, the inputs of a module are sources within it: a `pvary` may be put there.

        `sources`: the inputs, by what they are called; `but`: sources that these keep.
        """
        variance, before = self._variance, list[tuple[Tensor, frozenset[str]]]()
        if variance is None:
            yield
            return
        for source, x in sources.items():
            if isinstance(x, Tensor) and x.requires_grad and not variance.tag(x).sources & set(but):
                before.append((x, variance.tag(x).sources))
                self.note_source(x, source)
        try:
            yield
        finally:
            for x, own in reversed(before):
                variance.mark(x, replace(variance.tag(x), sources=own))

    def received(self, count: int) -> None:
        """Add bytes that a rank receives in a forward and its backward, in a run without data."""
        if self._variance is not None:
            self.bytes_moved += count

    def _count(self, x: Tensor, axis: str, parts: int) -> None:
        """Add `parts (W - 1) / W` times the bytes of x: 2 for an all-reduce, W for an all-gather of shards."""
        if self._variance is not None:
            size = self.sizes[axis]
            self.bytes_moved += parts * (size - 1) * x.numel() * x.element_size() // size


def _not_its_part(x: Tensor, axis: str, part: Part | None, wanted: Part) -> str:
    """Why an input of the right size is not what a row-parallel weight needs."""
    if part is None:
        return (
            f"its input of {x.shape[wanted.dim]} features is the same on all ranks of '{axis}', and its weight is split"
        )
    if part.kind == "lost":
        return f"it cannot be told which part over '{axis}' its input is: {part.why}"
    if part.kind == "sum":
        return f"its input is a sum over '{axis}' that is still pending"
    return (
        f"its input has dim {part.dim} split over '{axis}' in pieces {part.runs}, and its weight needs dim "
        f"{wanted.dim} in {wanted.runs}"
    )
