"""`apply`: run a module with the weights of a tree. Layer 4.

inputs checked -> (first call: run without data) -> copies bound to a session -> forward -> outputs cast
"""

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardfn._torch import (
    checkpoint_nothing_in_transforms,
    differentiated_in_vmap,
    in_transform,
    is_traced,
    kinds_of_transforms,
    outside_modes,
    pytree,
    simulated,
)
from shardfn.core.agreement import check_batch, random_numbers_of_first, wrong_inputs
from shardfn.core.collectives import all_gather, all_gather_invariant, weighed
from shardfn.core.compute_axes import Adjustments, ComputeAxes, Gathers
from shardfn.core.context import recording
from shardfn.core.dropout import Masks, Offsets, Word, axes_of_dims, dropout_modules, dropping, index_over, stream
from shardfn.core.engine.binding import Bound, Forward, is_cache, no_escape
from shardfn.core.engine.guards import Guards, Structure, Watch, signature
from shardfn.core.engine.in_place import escaped
from shardfn.core.engine.remat import Borrowed, recomputed
from shardfn.core.engine.runtime import Runtime, runtime_of
from shardfn.core.engine.session import CurrentSession, Session
from shardfn.core.errors import ShardError, did_you_mean
from shardfn.core.forward_mode import as_now
from shardfn.core.generation import History, Shell, filled
from shardfn.core.loss import SplitLogits
from shardfn.core.mesh import Grid, grid
from shardfn.core.model import class_of, submodule, unwrapped
from shardfn.core.pattern import first_match
from shardfn.core.plan import Plan, decide
from shardfn.core.spec import parse
from shardfn.core.tensor_parallel import kept_by_acts
from shardfn.core.tree import Params
from shardfn.core.trial import Trial
from shardfn.core.underway import asks, derivatives_asked_for, note_tree
from shardfn.core.wiring import cast_floats, cast_inputs, chained, owned_names, ranks_of_acts, unit_casts, wire

_SMALL = 16  # in a loop, numbers up to that may choose between ways of a forward; others are counters or sizes
_TRIES = 2  # how many of these are asked whether they are about a call with other numbers
_WAYS = 64  # of one kind of call that are remembered
_CHECKED_CALLS = 2  # how many calls of a model compare their batch over the compute axes
_LOOPS = ("generate",)  # methods that call the model as often as its tokens say


def apply(model: nn.Module, params: Params, *args: Any, method: str | None = None, **kwargs: Any) -> Any:
    """Run `model` with the weights of `params`, like `torch.func.functional_call`.

    Inside, modules see ordinary local tensors: whole over the data axes, split over the compute axes. Linears,
    embeddings, convolutions, norms of channels and `nn.MultiheadAttention` compute with split weights by their rules;
    sizes between them must come from the tensors, since only this rank's heads are there. The model itself is not
    changed, except for attributes that its forward assigns.

        >>> import torch, shardfn as sf
        >>> from torch import Tensor, nn
        >>> model = nn.Linear(4, 2)
        >>> params = sf.shard(model, sf.make_mesh("cpu", fsdp=1), sf.Policy())
        >>> x = torch.ones(3, 4)
        >>> torch.equal(sf.apply(model, params, x), model(x))
        True

    Args:
        model: the module, or one of the same structure; its own tensors are not used and may be on the meta device.
        params: the tree that `shard` made for it.
        *args: this data rank's inputs, plain tensors on the mesh's device, the same on all ranks of a compute axis.
        method: name of a method to call instead of `forward`. `"generate"` runs without gradients, on weights that are
            gathered before its first token and kept; its inner calls may depend on values, and it draws the random
            numbers of the first rank of a compute axis. A loop of your own gets that by its name, `generate = sample`
            in its class; under another one all ranks have to make the same calls.
        **kwargs: more inputs.

    Returns:
        what the method returns; floating tensors in `output_dtype`.

    Raises:
        ShardError: the tree is not this model's; inputs on another device; on the first two calls, inputs that differ
            between ranks of a compute axis; on the first call, sizes that do not fit the local parts, with the module.
        TypeError: not a module, or not a tree made by `shard`.

    Communication: one all-gather a bucket and data axis when the unit before it begins, and again in its backward
    (`regather=True`); one reduce-scatter a bucket in the backward; one all-reduce a row-parallel output and, in the
    backward, a tensor read by column-parallel linears. On gloo, buckets of 1 MiB and more travel rank to rank instead.
    The first two calls exchange a few bytes over each axis, and the first meets the others at the store once a unit.
    `"generate"` gathers each bucket once, then communicates over compute axes only; it exchanges a few bytes each time,
    and the state of torch's generators (5 kB) over compute axes.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"apply: expected an nn.Module, got {type(model).__name__}")
    if not isinstance(params, Params):
        hint = "; parts of trees are joined by a | b, {**a, **b} is a dict" if isinstance(params, Mapping) else ""
        raise TypeError(f"apply: expected the tree that shard() makes, got {type(params).__name__}{hint}")
    note_tree(params)
    call = _Call(model, params, method or "__call__")
    adjust = call.prepare(args, kwargs)
    args, kwargs = cast_inputs(params.plan, (args, kwargs))
    if not call.runs_in_place():
        params.in_place = None
    if params.in_place is not None:
        output = call.run_in_place(args, kwargs)
    else:
        with no_escape(model) if call.record.calls == 1 else nullcontext():
            output = call.run(adjust, args, kwargs)
    return cast_floats(output, params.plan.policy.output_dtype)


@dataclass
class _Record:
    """What is remembered about a model and a plan between calls."""

    plan: Plan
    names: Mapping[str, Mapping[str, str]]  # module path -> attribute -> canonical parameter
    frozen: Sequence[Tensor] = ()  # the model's parameters of which the tree has no gradients
    ranks_of_sequences: int = 1  # between how many ranks `Policy.acts` splits activations
    calls: int = 0
    adjustments: dict[Any, Adjustments] = field(default_factory=dict)

    @cached_property
    def compute(self) -> list[str]:
        """Ranks along them work on the same samples; what DTensors are split over, their modules decide."""
        several = (axis for axis in self.plan.roles.compute if self.plan.axes[axis] > 1)
        return [axis for axis in several if axis not in self.plan.placed_axes]


# Keyed by the model object, then by plan: two models of one class, or one model with two policies, never share.
_RECORDS: "weakref.WeakKeyDictionary[nn.Module, list[_Record]]" = weakref.WeakKeyDictionary()


class _Call:
    """One `apply`, from its checks to its result."""

    def __init__(self, model: nn.Module, params: Params, method: str) -> None:
        if not hasattr(model, method):
            raise ShardError(
                f"apply: {type(model).__name__} has no method '{method}'{did_you_mean(method, dir(model))}"
            )
        self.model, self.params, self.method = model, params, method
        self.loops = method in _LOOPS
        self.plan = params.plan
        self.grid = grid(params.mesh, self.plan.roles.storage)
        self.record = _record(model, self.plan)
        self.compute = self.record.compute

    def prepare(self, args: Any, kwargs: Any) -> Adjustments:
        """Check everything that can be checked without data, and find what the derivation needs.

        On the first calls all ranks raise when one must: an error on some ranks is a hang on the others.
        """
        self.record.calls += 1
        if inside := in_transform():
            checkpoint_nothing_in_transforms()
        is_recorded = is_traced() and not torch.compiler.is_compiling()
        if (recorded := recording()) is not None:
            recorded.models.append(self.model)
        elif is_recorded:
            raise ShardError(
                "apply: torch.func.linearize and make_fx record a graph that loses what collectives wait for, and "
                "would be wrong; use sf.jvp or sf.vjp"
            )
        adjust, problem = Adjustments(), None
        try:
            if self.loops:
                self._require_plain_loop()
            self._require_leaves()
            self._require_frozen()
            if inside:
                self._require_own_samples()
                self._require_no_dtensors()
            if why := wrong_inputs((args, kwargs), self.grid.device, bool(self.plan.placed_axes)):
                raise ShardError(why)
            if self.method == "__call__":
                _signature(class_of(self.model).forward).bind(self.model, *args, **kwargs)
            if not self.loops:
                adjust = self._adjustments(args, kwargs)
        except (ShardError, TypeError) as error:
            problem = error
        if (self.loops or self.record.calls <= _CHECKED_CALLS) and len(self.grid.ranks()) > 1 and not inside:
            batch = (args, kwargs, self.model.training)
            try:
                check_batch(self.grid, self.compute, batch, None if problem is None else str(problem))
            except ShardError as error:
                raise (problem or error) from None
        if problem is not None:
            raise problem
        return adjust

    def _require_plain_loop(self) -> None:
        """What a method that runs until its tokens say so cannot be part of."""
        if in_transform() or self.grid.pure:
            raise ShardError(
                f"apply: '{self.method}' goes on until its tokens say so, which no transform, recorded step or "
                "simulated mesh can follow; call it outside of them"
            )
        if self._masks() is not None:
            raise ShardError(f"apply: '{self.method}' with dropout under a dropout_seed; call model.eval() before")

    def _require_leaves(self) -> None:
        if not self.plan.leaves.keys() <= self.params.keys():
            missing = [name for name in self.plan.leaves if name not in self.params]
            raise ShardError(f"apply: the tree lacks {len(missing)} leaves, the first is {missing[0]!r}")

    def _require_frozen(self) -> None:
        """What asked for no gradient when the tree was made has none."""
        if torch.is_grad_enabled() and any(map(asks, self.record.frozen)):
            raise ShardError(
                "apply: parameters that asked for no gradient when sf.shard made the tree do now, and would get none. "
                "Write model.load_state_dict(sf.gather(params)), and shard the model again"
            )

    def _require_own_samples(self) -> None:
        """Inside torch's own vmap a gradient adds up samples of different data ranks."""
        several = any(self.plan.axes[axis] > 1 for axis in self.plan.roles.data)
        if several and self.plan.vmaps is None and differentiated_in_vmap(self.params.values()):
            raise ShardError(
                "apply: torch.func.vmap goes on around a gradient, which would add up samples of different data "
                "ranks. Use sf.vmap and sf.grad, with None in in_dims for the tree."
            )

    def _require_no_dtensors(self) -> None:
        """torch's DTensors, which modules compute with that `parallelize_module` has split, are in no transform."""
        if self.plan.placed_axes:
            raise ShardError(
                "apply: sf.jvp, vjp, hvp, vmap or a transform of torch.func goes on, and modules that "
                "parallelize_module has split compute with DTensors, which torch takes into none. Write sf.grad twice "
                "for a Hessian-vector product, sf.grad(lambda p: sf.tree.dot(sf.grad(loss_fn)(p), v))(params), or "
                "split the model by rules instead: sf.policies.from_parallelize_plan(plan)"
            )

    def _adjustments(self, args: Any, kwargs: Any) -> Adjustments:
        """What a run without data adds to the derivation; found once a kind of call, see [Note: guards]."""
        if not self.plan.splits_compute:
            return Adjustments()
        leaves, structure = pytree.tree_flatten((args, kwargs))
        caches = [leaf for leaf in leaves if is_cache(leaf)]
        kinds = [signature(leaf, sizes=not caches) for leaf in leaves]
        runtime = runtime_of(self.plan, self.grid)
        kept = self._kept(runtime)
        if not kept.structure.is_of(self.model):
            kept = self._kept(runtime, anew=True)
        derived = torch.is_grad_enabled(), derivatives_asked_for() if self.plan.policy.pad else ""
        key = (self.method, derived, str(structure), *kept.structure.hooks(), *kinds)
        ways = kept.ways.setdefault(key, [])
        # What a filled cache holds, only the run of the call that has filled it knows, whatever sizes that had.
        sizes = [tuple(x.shape) for x in leaves if isinstance(x, Tensor)] if caches else None
        goes_on = any(map(filled, caches))
        for at, way in enumerate(ways):
            if (goes_on or way.sizes == sizes) and way.guards.hold(leaves):
                if at:
                    ways.insert(0, ways.pop(at))
                return way.adjust
        return self._new_way(key, ways, sizes, args, kwargs)

    def _new_way(self, key: Any, known: "list[_Way]", sizes: Any, args: Any, kwargs: Any) -> Adjustments:
        """What a run without data finds, or that one of those before is about this call too; see [Note: guards]."""
        leaves = pytree.tree_leaves((args, kwargs))
        ways = [way for way in known if way.sizes == sizes]
        calls = [("", args, kwargs)]
        trial = Trial(self.model, self.plan, self.grid.mesh, self.params.buffers, self.method, calls)
        broken = [way.guards.broken(leaves) for way in ways]
        asked = {place for way in ways for place in way.asked}
        for way, places in zip(ways[:_TRIES], broken, strict=False):
            if not way.guards.answered(leaves) or any(
                place.key in asked or not Watch.serves(place.now(leaves)) for place in places
            ):
                continue
            more = [*places, *(place for place, _ in way.guards.loose.values())]
            watch = trial.watched(way.adjust, more)
            asked |= {place.key for place in more} if watch is None else watch.asked
            if watch is not None and way.guards.relaxed(watch):
                return way.adjust
        blanks = [place for places in broken for place in places if place.holds_tensors]
        same = (adjust for made, adjust in reversed(self.record.adjustments.items()) if made[:2] == key[:2])
        adjust = self.record.adjustments[key] = trial.adjustments(next(same, None), blanks)
        known.insert(0, _Way(adjust, Guards.of(leaves, list(trial.reads.found.values())), asked, sizes))
        del known[_WAYS:]
        return adjust

    def runs_in_place(self) -> bool:
        """Whether the modules themselves run, and no copies: these do in transforms, what is recorded, under a seed."""
        held = self.params.in_place
        if held is None or self.loops or self.grid.pure or in_transform() or is_traced():
            return False
        return held.is_of(self.model) and self._masks() is None

    def run_in_place(self, args: Any, kwargs: Any) -> Any:
        """The forward on this rank, of the modules themselves."""
        held, mode = self.params.in_place, (self.method, self.model.training)
        place = held.begin(self.model, self.params)
        session = Session(self.plan, self.grid, self.params, self.params.gradients, mode, in_place=True)
        try:
            with place.computes(session), session.hooks():
                output = getattr(unwrapped(self.model), self.method)(*args, **kwargs)
        except RuntimeError as error:
            if (told := escaped(error)) is not None:
                raise told from error
            raise
        finally:
            session.close()
        held.end(self.model, self.params)
        place.wait(session, output)
        return output

    def run(self, adjust: Adjustments, args: Any, kwargs: Any) -> Any:
        """The forward on this rank, of copies."""
        if self.loops:
            with torch.no_grad(), random_numbers_of_first(self.grid, self.compute):
                return self._loop(args, kwargs)
        mode = (self.method, self.model.training)
        masks = self._masks()
        session = Session(self.plan, self.grid, self.params, self.params.gradients, mode)
        session.masks = masks
        idle = self._kept(session.runtime).idle
        key = adjust, masks is not None
        copies = idle.pop(key, None)
        if copies is None or not copies.bound.up_to_date:
            copies = _Copies(self.model, self.plan, self.grid, self.record.names, *key)
        buffers = self.params.buffers
        copies.begin(session, buffers)
        output = None
        try:
            with session.hooks(traced=copies.bound.compiles):
                output = getattr(copies.bound.root, self.method)(*args, **kwargs)
                return leaving(output, adjust, self.grid, self.plan)
        finally:
            session.close()
            if masks is not None:
                masks.over = True
            copies.bound.write_back(buffers)
            if session.in_transform and session.runtime.recomputable:  # in derivatives, by these copies
                session.keeps, copies.current.session = copies.bound, None
            elif copies.bound.untouched:
                copies.current.session = None
                idle[key] = copies
            elif torch.is_grad_enabled() and not (session.in_transform or is_traced()):
                copies.bound.write_back_later(output)

    def _loop(self, args: Any, kwargs: Any) -> Any:
        """A method that calls the model as often as its tokens say.

        Data ranks stop at different tokens: all weights are gathered before the first one and kept, so that none waits
        for another one.
        """
        mode = (self.method, self.model.training)
        session = Session(self.plan, self.grid, self.params, None, mode)
        session.hold()
        history, used, idle = History(), dict[Adjustments, _Copies](), self._kept(session.runtime).idle
        training = tuple(module.training for module in self.model.modules())

        def step(path: str, args: Any, kwargs: Any) -> Any:
            args, kwargs = cast_inputs(self.plan, (args, kwargs))
            adjust = self._step_adjustments(history, training, path, args, kwargs)
            if adjust not in used:
                copies = idle.pop((adjust, False), None)
                if copies is None or not copies.bound.up_to_date:
                    copies = _Copies(self.model, self.plan, self.grid, self.record.names, adjust, False)
                used[adjust] = copies
            used[adjust].begin(session, self.params.buffers)
            try:
                output = submodule(used[adjust].bound.root, path).forward(*args, **kwargs)
                output = leaving(output, adjust, self.grid, self.plan)
                return cast_floats(output, self.plan.policy.output_dtype)
            finally:
                used[adjust].bound.write_back(self.params.buffers)

        shell = Shell(self.model, self.record.names, session.weight, frozenset(self.plan.info.ignored), step)
        try:
            return shell.run(self.method, args, kwargs, self.params.buffers)
        finally:
            session.close()
            for adjust, copies in used.items():
                if copies.bound.untouched:
                    copies.current.session = None
                    idle[adjust, False] = copies

    def _step_adjustments(self, history: History, training: Any, path: str, args: Any, kwargs: Any) -> Adjustments:
        """Those of an inner call, found once a kind, from a run without data of the calls before it too."""
        if not self.plan.splits_compute:
            return Adjustments()
        key = (
            self.method,
            training,
            *history.note(partial(_kind, ranks=self.record.ranks_of_sequences), path, args, kwargs),
        )
        if key not in self.record.adjustments:
            calls, mesh, buffers = history.calls(), self.grid.mesh, self.params.buffers
            found = Trial(self.model, self.plan, mesh, buffers, "forward", calls, differentiates=False).adjustments()
            if found.kept:
                where = repr(path) if path else "the model"
                raise ShardError(
                    f"apply: '{self.method}' needs whole outputs of {where}, and one stays split by Policy(acts=...); "
                    "leave it out for this tree"
                )
            self.record.adjustments[key] = replace(found, shared=frozenset())  # which only gradients ask for
        return self.record.adjustments[key]

    def _masks(self) -> Masks | None:
        """Those of the `dropout_seed` around, if the model drops anything."""
        given = stream()
        if given is None or not dropping(self.model):
            return None
        if self.plan.placed_axes:
            raise ShardError(
                "dropout_seed: modules compute with DTensors that parallelize_module made, and nobody knows which part "
                "of an activation a rank has. Split by rules: sf.policies.from_parallelize_plan(plan)"
            )
        data = self.plan.roles.data
        return Masks(given, index_over(self.grid, data), prod(self.plan.axes[axis] for axis in data))

    def _kept(self, runtime: Runtime, anew: bool = False) -> "_Kept":
        """What is kept of this model, which goes with the plan, to which it refers; `anew` of a model that changed."""
        kept, key = runtime.models, id(self.model)
        if anew:
            self.record.names = owned_names(self.model, self.plan)
            self.record.adjustments.clear()
        if anew or key not in kept:
            gone = weakref.ref(self.model, lambda _: kept.pop(key, None))  # it goes when the model goes
            kept[key] = gone, _Kept(Structure(self.model))
        return kept[key][1]


class _Current(CurrentSession):
    """That of copies, which it knows weakly: a cycle would outlive the call."""

    bound: "weakref.ref[Bound] | None" = None

    def gathers_again(self, gathers: Gathers, mesh: DeviceMesh) -> AbstractContextManager[None]:
        """Within it, autograd keeps this rank's pieces of what was gathered."""
        assert self.session is not None
        pieces = [
            (own, whole, partial(all_gather, mesh=mesh, axis=step.axis, dim=step.dim)) for step, own, whole in gathers
        ]
        return self.session.keeps_pieces(pieces)

    def in_unit(self, unit: str) -> Callable[[Forward], Forward]:
        """What goes around the forward of a unit."""

        def around(inner: Forward) -> Forward:
            def forward(*args: Any, **kwargs: Any) -> Any:
                session = self.session
                assert session is not None
                bound = self.bound() if self.bound is not None else None
                if session.computes_again(unit) and bound is not None and not bound.hooked(unit):
                    try:
                        return self._recomputed(session, unit, submodule(bound.root, unit), inner, args, kwargs)
                    except Borrowed:
                        session.runtime.recomputable.discard(unit)
                session.enter(unit)
                try:
                    return inner(*args, **kwargs)
                finally:
                    session.leave(unit)

            return forward

        return around

    def _recomputed(
        self, session: Session, unit: str, module: nn.Module, inner: Forward, args: Any, kwargs: Any
    ) -> Any:
        """The forward of a unit that computes again for its derivatives, also when the call is over."""
        leaves = session.leaves_of(unit)
        random = session.masks.inputs if session.masks is not None else []
        formulas = as_now()

        def run(given: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
            outer, self.session = self.session, session
            drops = session.masks.given(given[len(leaves) :]) if session.masks is not None else nullcontext()
            try:
                with session.only(unit, dict(zip(leaves, given, strict=False))), drops, formulas:
                    return inner(*args, **kwargs)
            finally:
                self.session = outer

        way = unit, module.training, kinds_of_transforms()
        out = recomputed(module, run, [*leaves.values(), *random], args, kwargs, way not in session.runtime.watched)
        session.runtime.watched.add(way)
        return out

    def dropout(self, path: str, offsets: Callable[[int, int], Offsets]) -> Forward:
        """The forward of a dropout module under a `dropout_seed`."""

        def forward(own: Any, x: Tensor) -> Tensor:
            assert self.session is not None and self.session.masks is not None
            return self.session.masks.apply(path, own, x, offsets)

        return forward

    def scores(self, path: str, x: Tensor, p: float, axes: Sequence[str], grid: Grid) -> Tensor:
        """Scores of attention, of whose heads this rank has its part over some axes, under a `dropout_seed`."""
        assert self.session is not None and self.session.masks is not None
        return self.session.masks.scores(path, x, p, _part(grid, axes))


@dataclass
class _Way:
    """What runs without data found, what has to be as it was, and which changes of that need a new run at once."""

    adjust: Adjustments
    guards: Guards
    asked: set[Any]
    sizes: Any  # of the inputs beside a cache; None without one, when they are part of the kind


@dataclass
class _Kept:
    """Copies of a model that may serve again, and the ways that its forward took, by kind of call."""

    structure: Structure
    idle: dict[tuple[Adjustments, bool], "_Copies"] = field(default_factory=dict)
    ways: dict[Any, list[_Way]] = field(default_factory=dict)


def leaving(output: Any, adjust: Adjustments, grid: Grid, plan: Plan) -> Any:
    """An output as callers get it: split leaves as `SplitLogits`, so that taking them for whole ones is an error."""
    if not (adjust.kept or adjust.shared or adjust.joined):
        return output
    leaves, structure = pytree.tree_flatten(output)
    for at, axis, dim in adjust.joined:
        leaves[at] = all_gather_invariant(leaves[at], grid.mesh, axis, dim)
    for at, axis in adjust.shared:  # each rank takes it for its own, and their gradients are added up
        leaves[at] = weighed(leaves[at], 1 / grid.sizes[axis])
    for at, axis, dim in adjust.kept:
        with nullcontext() if simulated() else outside_modes():  # a mesh computes with tensors
            mesh = grid.mesh[axis]
        leaves[at] = SplitLogits.of(leaves[at], mesh, dim, partial(_origin, plan))
    return pytree.tree_unflatten(leaves, structure)


def _origin(plan: Plan) -> str:
    """What left an output split, for errors."""
    acts = plan.policy.acts
    entries = {module: first_match(acts, [module]) or module for module in sorted(kept_by_acts(plan))}
    written = ", ".join(f"{entry!r}: {acts[entry]!r}" for entry in dict.fromkeys(entries.values()))
    return f"Policy(acts={{{written}}}) leaves the output of {' and '.join(map(repr, entries))} split"


class _Copies:
    """Copies of a model's modules, and what they reach in the call that they serve."""

    def __init__(self, model: nn.Module, plan: Plan, grid: Grid, names: Any, adjust: Adjustments, seeded: bool) -> None:
        """`seeded`: a `dropout_seed` goes on."""
        self.current, self.axes = _Current(), ComputeAxes(grid.mesh, grid.sizes, grid.coords)
        self.axes.gathers_again = partial(self.current.gathers_again, mesh=grid.mesh)
        self.axes.drops = partial(self.current.scores, grid=grid) if seeded else None
        around = {unit.name: self.current.in_unit(unit.name) for unit in plan.units if unit.name}
        around |= {name: chained(cast, around[name]) for name, cast in unit_casts(plan).items()}
        dropouts = {
            path: self.current.dropout(path, partial(_offsets, path, plan, grid, adjust))
            for path in (dropout_modules(model) if seeded else ())
        }
        self.bound = Bound(model, wire(plan, names, self.current.weight, self.axes, adjust, around, dropouts))
        self.current.bound = weakref.ref(self.bound)

    def begin(self, session: Session, buffers: Mapping[str, Tensor]) -> None:
        """Serve a call."""
        self.current.session = session
        self.axes.forget()
        self.bound.begin(buffers)


def _offsets(path: str, plan: Plan, grid: Grid, adjust: Adjustments, call: int, ndim: int) -> Offsets:
    """Which part this rank has of the input of a call of a dropout module.

    Raises:
        ShardError: the activation is split, and nobody knows where.
    """
    compute = [axis for axis in plan.roles.compute if plan.axes[axis] > 1]
    pattern = first_match(plan.policy.acts, [path])
    if pattern is not None:
        dims = axes_of_dims(parse(plan.policy.acts[pattern]), ndim, plan.axes)
        batch = next((d for d, axes in enumerate(dims) if set(axes) & set(plan.roles.data)), 0)
        return [_part(grid, [axis for axis in axes if axis in compute]) for axes in dims], batch
    if not adjust.splits:
        return [_part(grid, [])] * ndim, 0
    known = {(name, number): axes for name, number, axes in adjust.splits}
    if (path, call) not in known:
        raise ShardError(
            f"dropout_seed: call {call + 1} of {path!r} was not made in the run without data, which another forward of "
            f"such inputs led to; say how its input is split, if at all: Policy(acts={{{path!r}: 'b s c'}})"
        )
    found = known[path, call]
    if found is None:
        raise ShardError(
            f"dropout_seed: the input of {path!r} is split over {', '.join(compute)}, and no dim of it explains how; "
            f"say it: Policy(acts={{{path!r}: 'b s c@{compute[0]}'}}), or drop before samples and heads are joined"
        )
    return [_part(grid, [axis] if axis else []) for axis in found], 0


def _part(grid: Grid, axes: Sequence[str]) -> tuple[Word, int]:
    return index_over(grid, axes), prod(grid.sizes[axis] for axis in axes)


@lru_cache(maxsize=2**8)
def _signature(forward: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(forward)


def _kind(leaf: Any, goes_on: bool, ranks: int) -> Any:
    """What of an input of an inner call of a loop is looked at: there, sizes change with every token.

    A call that `goes_on` has a filled cache, of which only the calls before it know what it holds.

    Activations may be split between `ranks` where they can be.
    """
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.requires_grad, *((goes_on or min(size, 2), size % ranks) for size in leaf.shape)
    if type(leaf) is int and abs(leaf) <= _SMALL:
        return leaf
    return leaf if isinstance(leaf, bool | str | None) else type(leaf)


def _record(model: nn.Module, plan: Plan) -> _Record:
    records = _RECORDS.setdefault(model, [])
    for record in records:
        if record.plan is plan or record.plan == plan:
            return record
    _require_one(model, plan)
    _require_sizes(model, plan)
    records.append(_Record(plan, owned_names(model, plan), _frozen(model, plan), ranks_of_acts(plan)))
    return records[-1]


def _require_sizes(model: nn.Module, plan: Plan) -> None:
    """Check that `Policy.local_sizes` names attributes as what they are, which one rank would not notice."""
    if not plan.policy.local_sizes:
        return
    policy = replace(plan.policy, ignore=(), pad={})
    whole = decide(plan.info, dict.fromkeys(plan.axes, 1), policy).local_sizes
    for path, sizes in whole.items():
        module = unwrapped(submodule(model, path))
        for attribute, size in sizes.items():
            have = getattr(module, attribute, None)
            if isinstance(have, int) and have != size:
                raise ShardError(
                    f"apply: Policy.local_sizes names {attribute!r} of {path or 'the model'!r}, which is {have}, as "
                    f"what is {size} on one rank. Name all of its factors, such as {{{attribute!r}: 'heads@tp d'}}"
                )


def _require_one(model: nn.Module, plan: Plan) -> None:
    """Check that the tree is not one of several members."""
    for name, param in model.named_parameters():
        layout = plan.layouts.get(plan.canonical.get(name, ""))
        if layout is not None and len(layout.shape) > param.dim() and layout.shape[1:] == param.shape:
            raise ShardError(
                f"apply: the tree has several members, {name!r} of shape {tuple(layout.shape)}, the model's has "
                f"{tuple(param.shape)}. Map over them, sf.vmap(lambda p: sf.apply(model, p, x))(tree), or take one, "
                "sf.tree.map(lambda w: w[0], tree)"
            )


def _frozen(model: nn.Module, plan: Plan) -> list[Tensor]:
    """Parameters that were frozen when the tree was made; those that are shards themselves are looked at elsewhere."""
    named = [(plan.canonical.get(name, ""), p) for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    return [p for name, p in named if name in plan.layouts and not plan.layouts[name].trainable]
