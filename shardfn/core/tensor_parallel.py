"""Parallel forwards derived from the rules of a module's weights. Layer 4.

A weight W of a linear is [out, in]. A compute axis on an out factor makes it column-parallel, on an in factor
row-parallel; on the vocab factor of an embedding the lookup is masked. [Note: varying and invariant] is in
`engine/variance.py`.

    column   x [.., in]     -> pvary (once a tensor) -> x @ W.T + b            -> [.., out@tp]
    row      x [.., in@tp]  -> x @ W.T -> psum -> + b                          -> [.., out]
    lookup   ids [..]       -> masked rows of W [vocab@tp, c] -> psum          -> [.., c]
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from shardfn._torch import has_no_memory, outside_transforms, simulated, values_of
from shardfn.core import collectives
from shardfn.core.engine.binding import Forward
from shardfn.core.engine.variance import BY_ACTS, Variance
from shardfn.core.errors import ShardError
from shardfn.core.layout import Layout
from shardfn.core.mesh import MeshSpec
from shardfn.core.model import OUT_DIM, ModuleInfo
from shardfn.core.parts import Part, Runs, even
from shardfn.core.pattern import first_match
from shardfn.core.plan import Plan
from shardfn.core.shadow import class_of
from shardfn.core.spec import parse


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

    `vary`: parameters and module outputs that need a `pvary`, with the axis; `gather`: column-parallel modules whose
    output is gathered because it leaves `apply`. `sums`: which leaf of which module's output is a sum still to be added
    up over which axis. `ready`: linears whose input has had its `pvary` before. `shared`: leaves of the output that
    have had one, though they are the same on all ranks; `kept`: those that leave `apply` split over an axis, and their
    dim; `joined`: those that are gathered as they leave.
    `inputs`, `outputs`: steps of modules for activations split by `Policy.acts`; `scattered`: which modules scatter
    their sum, and over which dim. For the next run without data, `in_shares`: modules that use gathered inputs in
    shares only, `may_scatter`: sums that it tries to scatter, `whole`: modules in acts whose output something needs
    whole, `entries`: others that need their inputs whole.
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
        self.bytes_moved = 0  # counted in a run without data: received by each rank in a forward and a backward
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
        if self._variance is None:
            return x if ready else self.vary(x, axis)
        part = self._variance.tag(x).parts.get(axis)
        if part is None:
            return self.vary(x, axis)
        if part.kind == "same":
            self._variance.findings.ready.add((path, axis))
        else:
            self._variance.refuse(
                f"an input that is already split over '{axis}' meets a weight that splits its output over it"
                + (f" ({part.why})" if part.why else "")
            )
        return x

    def own(self, x: Tensor, axis: str, path: str, wanted: Part, ready: bool) -> Tensor:
        """Of an input that may be whole, this rank's part of dim `wanted.dim`, such as [.., in@axis] of [.., in]."""
        part = self._variance.tag(x).parts.get(axis) if self._variance is not None else None
        size = sum(outer * inner for outer, inner in wanted.runs)
        if x.shape[wanted.dim] == size * self.sizes[axis]:
            if self._variance is not None and part is not None and part.kind == "same":
                self._variance.findings.ready.add((path, axis))
            elif self._variance is not None and part is not None:  # a sum, maybe, that the next run has added up
                self._variance.refuse(_not_its_part(x, axis, part, wanted))
            return self._taken(x, axis, wanted, ready or part is not None)
        if self._variance is not None and x.shape[wanted.dim] == size:
            if part is None or part != wanted:
                self._variance.refuse(_not_its_part(x, axis, part, wanted))
        return x

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
            self._variance.refuse(_not_its_part(x, axis, part, wanted))

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
            self._variance.mark(out, replace(tag, source=source, split_by=tag.split_by | added))
        return out

    def _count(self, x: Tensor, axis: str, parts: int) -> None:
        """Add `parts (W - 1) / W` times the bytes of x: 2 for an all-reduce, W for an all-gather of shards."""
        if self._variance is not None:
            size = self.sizes[axis]
            self.bytes_moved += parts * (size - 1) * x.numel() * x.element_size() // size


def parallel_forwards(
    plan: Plan, axes: ComputeAxes, weight: Callable[[str], Tensor], adjust: Adjustments
) -> dict[str, Forward]:
    """Module path -> forward, for every module that owns a parameter split over a compute axis of several ranks."""
    forwards: dict[str, Forward] = {}
    for module in plan.info.modules:
        custom = first_match(plan.policy.compute, [module.name])
        if custom is not None:
            forwards[module.name] = _custom(module, plan, axes, weight, adjust, plan.policy.compute[custom])
        elif _derived_here(module) and splits(plan, module):
            names = dict(module.params)
            layout = plan.layouts[names["weight"]]
            if module.kind in OUT_DIM:
                forwards[module.name] = _linear(module, layout, names.get("bias"), plan, axes, weight, adjust)
            else:
                lookup = _lookup(module, layout, plan, axes, weight, adjust)
                forwards[module.name] = lookup if module.kind == "embedding" else _around_lookup(lookup)
    return forwards


def splits(plan: Plan, module: ModuleInfo) -> bool:
    """Whether a rule splits a parameter of a module over a compute axis of several ranks."""
    return any(plan.compute_axes(plan.layouts[name]) for _, name in module.params)


def _derived_here(module: ModuleInfo) -> bool:
    """Whether it is a linear or a table; other layers are in `parallel_layers.py`."""
    return module.kind in OUT_DIM or "embedding" in module.kind


def weight_parts(plan: Plan, layout: Layout) -> dict[str, Part]:
    """By axis, which part of a weight a module computes with."""
    zero, sizes = dict.fromkeys(plan.axes, 0), plan.axes
    found: dict[str, Part] = {}
    for axis in plan.compute_axes(layout):
        for dim in range(len(layout.shape)):
            runs: list[tuple[int, int] | None] = []
            for leaf in layout.leaves:
                first = sum(leaf.merges[:dim])
                local = leaf.local_shape(sizes, zero, plan.roles.compute)[first : first + leaf.merges[dim]]
                splits = leaf.splits[first : first + leaf.merges[dim]]
                at = next((i for i, split in enumerate(splits) if axis in split), None)
                runs.append(None if at is None else (prod(local[:at]), prod(local[at:])))
            runs = runs if dim == layout.block_dim else runs[:1]
            known = tuple(run for run in runs if run is not None)
            if len(known) == len(runs):
                found[axis] = Part("split", dim, known)
            elif known:
                found[axis] = Part("lost", why=f"only some blocks of '{layout.rule}' are split over '{axis}'")
    return found


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


class Layouts(dict[str, Layout]):
    """How the weights of a module lie, by attribute, the `mesh` for collectives, and the `axes` that split any.

    Operations within `hidden()` have no counterpart in the module's own forward. `require(x, axis, part)` has a run
    without data check which part x is; `entered(x, axis, at)` is the at-th argument as a varying value, which it may
    have been before.
    """

    def __init__(
        self, layouts: Mapping[str, Layout], axes: "ComputeAxes", split: Sequence[str], path: str, adjust: Adjustments
    ) -> None:
        super().__init__(layouts)
        self._entered, self._path, self._ready = axes.entered, path, adjust.ready
        self.mesh, self.axes, self.hidden, self.note_part = axes.mesh, tuple(split), axes.hidden, axes.note_part
        self.require = axes.require

    def entered(self, x: Tensor, axis: str, at: int) -> Tensor:
        """An argument, varying over an axis."""
        name = f"{self._path}, argument {at}"
        return self._entered(x, axis, name, (name, axis) in self._ready)


def without_data(shaped: Forward) -> Callable[[Forward], Forward]:
    """A decorator of a parallel forward: `shaped(module, *args)` stands for the module's own in a run without data."""

    def keep(forward: Forward) -> Forward:
        _SHAPED[forward] = shaped
        return forward

    return keep


def calls_own_forward(forward: Forward) -> Forward:
    """A decorator of a parallel forward that calls the module's own, and does the rest within `Layouts.hidden()`."""
    _CALLING.add(forward)
    return forward


_SHAPED: dict[Forward, Forward] = {}
_CALLING: set[Forward] = set()


def others_forwards(plan: Plan) -> set[str]:
    """The modules whose forward is not their own."""
    found = ((module, first_match(plan.policy.compute, [module.name])) for module in plan.info.modules)
    return {
        module.name
        for module, pattern in found
        if _derived_here(module)
        or (module.kind != "other" and splits(plan, module))
        or (pattern is not None and getattr(fn := plan.policy.compute[pattern], "func", fn) not in _CALLING)
    }


def shaped_forwards(plan: Plan) -> dict[str, Forward]:
    """Module path -> what stands for its forward in a run without data on whole weights."""
    found = ((m.name, first_match(plan.policy.compute, [m.name])) for m in plan.info.modules)
    functions = {name: plan.policy.compute[pattern] for name, pattern in found if pattern is not None}
    shaped = {name: _SHAPED.get(fn) or getattr(fn, "without_data", None) for name, fn in functions.items()}
    return {name: fn for name, fn in shaped.items() if fn is not None}


def _custom(
    module: ModuleInfo,
    plan: Plan,
    axes: ComputeAxes,
    weight: Callable[[str], Tensor],
    adjust: Adjustments,
    fn: Forward,
) -> Forward:
    own_layouts = {attribute: plan.layouts[name] for attribute, name in module.params}
    split = {axis for layout in own_layouts.values() for axis in plan.compute_axes(layout)}
    compute = [axis for axis in plan.roles.compute if axis in split]
    layouts = Layouts(own_layouts, axes, compute, module.name, adjust)

    def forward(own: nn.Module, *args: Any, **kwargs: Any) -> Any:
        local = {attribute: weight(layout.name) for attribute, layout in layouts.items()}
        return fn(own, local, layouts, *args, **kwargs)

    return forward


def _linear(
    module: ModuleInfo,
    layout: Layout,
    bias_name: str | None,
    plan: Plan,
    axes: ComputeAxes,
    weight: Callable[[str], Tensor],
    adjust: Adjustments,
) -> Forward:
    """Column-parallel, row-parallel or both, by the axes on the out and in dims of the weight."""
    out = OUT_DIM[module.kind]
    columns, rows = plan.compute_axes(layout, out), plan.compute_axes(layout, 1 - out)
    name, parts, out_features = module.name, weight_parts(plan, layout), layout.shape[out]
    gathers = name in adjust.gather or gathered_by_acts(plan, name)
    ready = {axis for path, axis in adjust.ready if path == name}
    split = {axis: parts[axis] for axis in columns}

    def forward(own: nn.Module, x: Tensor) -> Any:
        w = weight(layout.name) if out == 0 else weight(layout.name).t()  # [out/columns, in/rows]
        bias = weight(bias_name) if bias_name is not None else None
        for axis in rows:
            x = axes.own(x, axis, name, parts[axis].at(x.dim() - 1), axis in ready)
        _check_features(name, layout, x, w, layout.shape[1 - out], rows)
        for axis in columns:
            x = axes.entered(x, axis, name, axis in ready)
        if not rows:
            y = F.linear(x, w, bias)
        else:
            y = F.linear(x, w)
            for axis in rows:
                y = axes.total(y, axis, name, adjust.scatters(name, axis))
            y = y if bias is None else y + bias  # after the sum, or it would count once a rank
        axes.note_last(y, split)
        y = axes.note_source(y, f"module {name}", name if columns else None)
        if gathers:
            for axis in reversed(columns):
                y = axes.join(y, axis, -1, parts[axis].runs)
            with axes.hidden():
                y = y[..., :out_features]
        return y

    return forward


def _check_features(name: str, layout: Layout, x: Tensor, w: Tensor, features: int, rows: Sequence[str]) -> None:
    if x.shape[-1] != w.shape[1]:
        why = f" over {', '.join(rows)}" if rows else ""
        raise ShardError(
            f"apply: {name!r} got an input of {x.shape[-1]} features; rule '{layout.rule}' leaves {w.shape[1]} of "
            f"{features} here{why}. The layer that produces it must be split alike: use the same name and axis in its "
            "rule, and sizes taken from the tensors, not from the configuration, in between."
        )


def kept_by_acts(plan: Plan) -> set[str]:
    """The column-parallel linears whose output `Policy.acts` leaves split over the compute axes of their weight.

    Raises:
        ShardError: an entry names other axes than the weight's, or the dim is padded.
    """
    found = set()
    for module, (layout, columns, last) in _acts_on_linears(plan).items():
        if not last:
            continue
        if list(last) != columns or len(columns) != 1:
            raise ShardError(
                f"apply: Policy.acts asks for {module!r} split over {', '.join(last)}, whose last dim is split over "
                f"{', '.join(columns) or 'nothing'}"
            )
        if layout.leaves[0].shape[0] != layout.leaves[0].extent[0]:
            raise ShardError(
                f"apply: Policy.acts at {module!r}: logits over a padded dim cannot stay split; drop the entry or the "
                "padding"
            )
        found.add(module)
    return found


def gathered_by_acts(plan: Plan, path: str) -> bool:
    """Whether `Policy.acts` has the output of a column-parallel linear whole: `"b s c"`."""
    _, _, last = _acts_on_linears(plan).get(path, (None, (), ("",)))
    return not last


def _acts_on_linears(plan: Plan) -> dict[str, tuple[Layout, list[str], tuple[str, ...]]]:
    """Path of a column-parallel linear -> its weight, column axes, compute axes of the last dim that acts asks for."""
    known = plan.__dict__.get("_acts_on_linears")
    if known is not None:
        return known
    found = plan.__dict__["_acts_on_linears"] = {}
    for module in plan.info.modules if plan.policy.acts else ():
        act = first_match(plan.policy.acts, [module.name])
        if act is not None and module.kind in OUT_DIM:
            layout = plan.layouts[dict(module.params)["weight"]]
            dims = parse(plan.policy.acts[act]).dims
            last = dims[-1].factors[-1].axes if dims and dims[-1].factors else ()
            if columns := plan.compute_axes(layout, OUT_DIM[module.kind]):
                found[module.name] = layout, columns, tuple(axis for axis in last if plan.axes[axis] > 1)
    return found


class _Lookups(TorchFunctionMode):
    """Has lookups in the table of one module done by its parallel forward."""

    def __init__(self, lookup: Forward, own: nn.Module) -> None:
        super().__init__()
        self._lookup, self._own = lookup, own

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.embedding:
            return self._lookup(self._own, args[0])
        return func(*args, **(kwargs or {}))


def _around_lookup(lookup: Forward) -> Forward:
    """The forward of a subclass of `nn.Embedding`, which does something with the ids or the rows."""

    def forward(own: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _Lookups(lookup, own):
            return class_of(own).forward(own, *args, **kwargs)

    return forward


def _lookup(
    module: ModuleInfo,
    layout: Layout,
    plan: Plan,
    axes: ComputeAxes,
    weight: Callable[[str], Tensor],
    adjust: Adjustments,
) -> Forward:
    """Rows of a split table: each rank looks up the ids that it has, and the sum is the row."""
    vocab, columns = plan.compute_axes(layout, 0), plan.compute_axes(layout, 1)
    act = first_match(plan.policy.acts, [module.name])
    joins = act is None or not set(columns) & {axis for f in parse(plan.policy.acts[act]).factors for axis in f.axes}

    def forward(own: Any, ids: Tensor) -> Tensor:
        if own.max_norm is not None or own.scale_grad_by_freq or own.sparse:
            raise ShardError(
                f"apply: {module.name!r} splits its table by '{layout.rule}'; max_norm, scale_grad_by_freq and "
                "sparse need it whole"
            )
        w = weight(layout.name)  # [vocab/axes, c/columns]
        require_ids(module.name, ids, layout.shape[0])
        first = _first_row(axes, vocab, w.shape[0])
        here = ids - first
        elsewhere = (here < 0) | (here >= w.shape[0])
        padding = None if own.padding_idx is None or simulated() else own.padding_idx - first
        inside = padding is not None and 0 <= padding < w.shape[0]
        rows = F.embedding(here.masked_fill(elsewhere, 0), w, padding if inside else None)
        if own.padding_idx is not None and simulated():  # where each rank has another first row
            rows = torch.where((ids == own.padding_idx).unsqueeze(-1), rows.detach(), rows)
        if vocab:
            rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0)
        for axis in vocab:
            rows = axes.total(rows, axis, module.name, adjust.scatters(module.name, axis))
        for axis in reversed(columns) if joins else ():
            rows = axes.join(rows, axis, -1)
        return axes.note_source(rows, f"module {module.name}")

    return forward


def require_ids(where: str, ids: Tensor, size: int, ignore: int | None = None) -> None:
    """On the CPU, as torch does there: an id that no rank has would silently be a row of zeros.

    Raises:
        IndexError: an id other than `ignore` is not from 0 to `size - 1`.
    """
    if ids.device.type != "cpu" or torch.compiler.is_compiling() or has_no_memory():
        return
    with outside_transforms():
        for own in values_of(ids):
            known = own if ignore is None else own[own != ignore]
            if known.numel() and not 0 <= int(known.min()) <= int(known.max()) < size:
                raise IndexError(
                    f"{where}: index out of range: ids from {int(known.min())} to {int(known.max())}, size {size}"
                )


def _first_row(axes: ComputeAxes, names: Sequence[str], rows: int) -> int:
    """The index of this rank's first row when the axes `names` split a table, outermost first, into parts of `rows`."""
    index = 0
    for axis in names:
        index = index * axes.sizes[axis] + axes.coords[axis]
    return index * rows
