"""What forwards do between the parts of ranks, by rules or as a shape-only trace found it.

Nothing here knows whether such a run goes on: that is a `ComputeAxes` of its own, see `traced_axes.py`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import or_
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from shardfn import _torch
from shardfn.comm import collectives
from shardfn.layout import MeshSpec, Part, Runs, even
from shardfn.notation import ShardError
from shardfn.parallel.amended_calls import Amendment


class Step(NamedTuple):
    """What is done with leaf `at` of the inputs or outputs of the module at `path`, see [Note: steps] in wiring.py.

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
    """What shape-only traces add to the derivation, see [Note: where a pvary goes].

    One run goes by what those before it have added, and adds to an empty record what it finds, by `|`.

    `vary`: parameters, and inputs and outputs of modules, that need a `pvary`, with the axis; `gather`: column-parallel
    modules whose output is gathered because it leaves `apply`. `sums`: which leaf of which module's output is a sum
    still to be added up over which axis. `ready`: linears, and sources, that had their `pvary` before. `shared`: leaves
    of the output that have had one, though they are the same on all ranks; `kept`: those that leave `apply` split over
    an axis, and their dim; `joined`: those that are gathered as they leave.
    `inputs`, `outputs`: steps of modules for activations split by `Policy.acts`; `scattered`: which modules scatter
    their sum, and over which dim. For the next shape-only trace, `in_shares`: modules that use gathered inputs in
    shares only, `may_scatter`: sums that it tries to scatter, `whole`: modules in acts whose output something needs
    whole, `entries`: others that need their inputs whole, `several`: modules in acts of which more inputs are split.
    `amended`: calls of torch in forwards, see [Note: amended calls].
    `splits`: if any dropout module is called on a split activation, all calls of such modules, by path and number, with
    the axis of each dim ("" for none); None when no dim explains the size.
    """

    vary: Set[tuple[str, str]] = frozenset()
    gather: Set[str] = frozenset()
    sums: Set[tuple[str, int, str]] = frozenset()
    ready: Set[tuple[str, str]] = frozenset()
    shared: Set[tuple[int, str]] = frozenset()
    kept: Set[tuple[int, str, int]] = frozenset()
    joined: Set[tuple[int, str, int]] = frozenset()
    inputs: Set[Step] = frozenset()
    outputs: Set[Step] = frozenset()
    scattered: Set[tuple[str, str, int]] = frozenset()
    in_shares: Set[str] = frozenset()
    may_scatter: Set[tuple[str, str, int]] = frozenset()
    whole: Set[str] = frozenset()
    entries: Set[str] = frozenset()
    several: Set[str] = frozenset()
    splits: Set[tuple[str, int, tuple[str, ...] | None]] = frozenset()
    amended: Set[Amendment] = frozenset()

    def __or__(self, more: "Adjustments") -> "Adjustments":
        """All of both."""
        return Adjustments(*map(or_, vars(self).values(), vars(more).values()))

    def axes_of(self, source: str) -> list[str]:
        """The axes over which a source needs a `pvary`."""
        return sorted(axis for name, axis in self.vary if name == source)


class ComputeAxes:
    """The collectives over compute axes.

    `note_part` and those after it tell a shape-only trace what was done; here they do nothing.
    """

    follows = False  # whether this is a shape-only trace that follows what differs over axes

    def __init__(self, mesh: DeviceMesh | MeshSpec, sizes: Mapping[str, int], coords: Mapping[str, int]) -> None:
        self.mesh, self.sizes, self.coords = mesh, sizes, coords
        self.adjust = Adjustments()  # what the shape-only trace added, once modules are wired
        self.gathers_again: Callable[[collectives.Gathers], AbstractContextManager[Any]] = nullcontext
        self.drops: Callable[[str, Tensor, float, Sequence[str]], Tensor] | None = None  # scores, under a dropout_seed
        # An input read by several column-parallel linears is varied once, so that they share one backward all-reduce.
        # The values hold the same storage as the keys, not the keys: an entry goes when its input does.
        varied: dict[str, WeakIdKeyDictionary] = {}
        self.varied: Callable[[], dict[str, WeakIdKeyDictionary]] = lambda: varied

    def vary(self, x: Tensor, axis: str) -> Tensor:
        """Identity on an invariant tensor; its backward is an all-reduce over `axis`."""
        cache = self.varied().setdefault(axis, WeakIdKeyDictionary())
        if x not in cache:
            with torch.set_grad_enabled(x.requires_grad or torch.is_grad_enabled()):  # also used outside a no_grad
                cache[x] = collectives.pvary(x, self.mesh, axis)
            self._count(x, axis, 2 if x.requires_grad else 0)
        return cache[x]

    def varied_once(self, x: Tensor, axis: str, reader: str) -> Tensor:
        """A value that does not vary, varying for a reader of it, which may get it so already."""
        return x if (reader, axis) in self.adjust.ready else self.vary(x, axis)

    entered = varied_once  # the input of a column-parallel linear, the reader, which must not be split

    def own_part(self, x: Tensor, axis: str, path: str, wanted: Part) -> Tensor:
        """Of an input that may be whole, this rank's part of dim `wanted.dim`, such as [.., in@axis] of [.., in]."""
        size = sum(outer * inner for outer, inner in wanted.runs)
        whole = x.shape[wanted.dim] == size * self.sizes[axis]
        return self._taken(x, axis, wanted, (path, axis) in self.adjust.ready) if whole else x

    def _taken(self, x: Tensor, axis: str, wanted: Part, ready: bool) -> Tensor:
        """This rank's pieces of a dim of a tensor that all ranks have whole."""
        gathers = not ready and (x.requires_grad or _torch.differentiated_in_transform(x))

        def own(piece: Tensor, dim: int) -> Tensor:
            if gathers:
                return collectives.shard_slice(piece, self.mesh, axis, dim)
            size = piece.shape[dim] // self.sizes[axis]
            return piece.narrow(dim, self.coords[axis] * size, size)

        with self.hidden():
            whole_runs = [(outer, inner * self.sizes[axis]) for outer, inner in wanted.runs]
            taken = _run_by_run(x, wanted.dim, whole_runs, own)
        self._count(x, axis, 0 if ready or not x.requires_grad else 1)
        return self.note_part(taken, axis, wanted, x)

    def leaf_total(self, leaves: list[Any], at: int, axis: str, path: str) -> Any:
        """The sum that a leaf of the output of the module at `path` is, in each of its calls."""
        return self.total(leaves[at], axis, path) if isinstance(leaves[at], Tensor) else leaves[at]

    def scatters(self, path: str, axis: str, x: Tensor) -> int | None:
        """The dim over which x, the summand of the module at `path`, is scattered when it is added up."""
        return next((dim for at, over, dim in self.adjust.scattered if (at, over) == (path, axis)), None)

    def total(self, x: Tensor, axis: str, path: str) -> Tensor:
        """The sum over `axis` that the module at `path` makes: whole, or of which each rank has its part of a dim."""
        self._count(x, axis, 2)
        if (dim := self.scatters(path, axis, x)) is None:
            return collectives.psum(x, self.mesh, axis)
        return self.note_acts(collectives.psum_scatter(x, self.mesh, axis, dim), path)

    def step(self, x: Tensor, step: Step) -> Tensor:
        """Slice or gather a value."""
        if step.how == "own":
            wanted = even(step.dim, x.shape[step.dim] // self.sizes[step.axis])
            return self.note_acts(self._taken(x, step.axis, wanted, ready=True), step.path)
        if step.how == "slice":
            self._count(x, step.axis, 1 if x.requires_grad else 0)
            return self.note_acts(collectives.shard_slice(x, self.mesh, step.axis, step.dim), step.path)
        if step.how == "join":
            return self.join(x, step.axis, step.dim)
        self._count(x, step.axis, self.sizes[step.axis] * (2 if x.requires_grad else 1))
        return collectives.all_gather(x, self.mesh, step.axis, step.dim)

    def join(self, x: Tensor, axis: str, dim: int, runs: Runs = ()) -> Tensor:
        """The parts of all ranks of `axis` side by side, the same on all its ranks; `runs` when they are not even."""
        dim = dim % x.dim()
        self._count(x, axis, self.sizes[axis])
        if len(runs) < 2 and all(outer == 1 for outer, _ in runs):
            return collectives.all_gather_invariant(x, self.mesh, axis, dim)
        with self.hidden():
            joined = _run_by_run(x, dim, runs, lambda x, dim: collectives.all_gather_invariant(x, self.mesh, axis, dim))
        return self.note_part(joined, axis, None, x)

    def amended(self, x: Any, amendment: Amendment) -> Any:
        """An argument of a call of torch in a forward, on a rank; see [Note: amended calls]."""
        axis, how, size = amendment.axis, amendment.how, self.sizes[amendment.axis]
        if how in ("multiply", "divide"):
            if x != amendment.given:
                why = f"in {amendment.path or '(the model)'!r}, a call of torch is given the size {x}"
                raise ShardError(f"apply: {why}, which was {amendment.given}; take it from a tensor, x.shape[-1]")
            return x * size if how == "multiply" else x // size
        if how == "sum":
            self._count(x, axis, 2)
            return collectives.psum(x, self.mesh, axis)
        if how == "vary":
            return self.vary(x, axis)
        return self._taken(x, axis, Part("split", amendment.dim, amendment.runs), ready=how == "own")

    # -- for a shape-only trace ---------------------------------------------------------------------------------------

    def on_each_side(self, of_rank: Callable[..., Any], of_one: Callable[..., Any], *args: Any) -> Any:
        """What a rank makes of arguments; in a shape-only trace beside what one process does."""
        return of_rank(*args)

    def hidden(self) -> AbstractContextManager[Any]:
        """Operations within are not the model's own."""
        return nullcontext()

    def seen_from(self, sources: Mapping[str, Any], but: Collection[str]) -> AbstractContextManager[Any]:
        """The inputs of a module are sources within it: a `pvary` may be put there.

        `sources`: the inputs, by what they are called; `but`: sources that these keep.
        """
        return nullcontext()

    def note_part(self, x: Tensor, axis: str, part: Part | None, of: Tensor | None = None) -> Tensor:
        """What x is over an axis; and `of` what it is a part, or the whole."""
        return x

    def note_source(self, out: Any, source: str, split_by: str | None = None) -> Any:
        """Where a module's output comes from."""
        return out

    def note_acts(self, x: Tensor, path: str) -> Tensor:
        """An entry of `Policy.acts` splits x."""
        return x

    def require(self, x: Tensor, axis: str, wanted: Part) -> None:
        """An x that is something else over an axis is refused."""

    def require_whole(self, x: Tensor, axis: str, what: str) -> None:
        """An x that is not the same on all ranks of an axis is refused."""

    def received(self, count: int) -> None:
        """Bytes that a rank receives in a forward and its backward."""

    def _count(self, x: Tensor, axis: str, parts: int) -> None:
        """`parts (W - 1) / W` times the bytes of x are received: 2 for an all-reduce, W for an all-gather of shards."""


def _run_by_run(x: Tensor, dim: int, runs: Sequence[tuple[int, int]], make: Callable[[Tensor, int], Tensor]) -> Tensor:
    """What `make(piece, dim + 1)` makes of each run of a dim, [.., outer, inner, ..], side by side."""
    pieces = x.split([outer * inner for outer, inner in runs], dim)
    pairs = zip(pieces, runs, strict=True)
    results = [make(piece.unflatten(dim, run), dim + 1).flatten(dim, dim + 1) for piece, run in pairs]
    return results[0] if len(results) == 1 else torch.cat(results, dim)
