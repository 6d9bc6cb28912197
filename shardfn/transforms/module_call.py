"""`apply`: run a module with the weights of a tree.

inputs checked -> (first call: shape-only trace) -> modules compute with a session -> outputs cast
"""

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from operator import attrgetter
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardfn import _torch, comm
from shardfn.binding import Forward, InnerCall, ModelBinding, Wiring, call_now, escaped, goes_around, has_attribute
from shardfn.context import derivatives_asked_for, is_under_way, note_tree, recording, requires_grad
from shardfn.engine import Borrowed, Session, recomputed
from shardfn.layout import Grid, Plan, class_of, decide, first_match, grid_of, submodule, unwrapped
from shardfn.notation import ShardError, did_you_mean, see
from shardfn.parallel import Adjustments, ComputeAxes, SplitLogits, kept_by_acts, wiring
from shardfn.params import Params, plain_leaf
from shardfn.random import Masks, Offsets, dropout_modules, dropping, offsets_of_call, part_over, stream
from shardfn.trace import Guards, ReachableState, ShapeTrace, Structure, Watch, is_cache, is_filled, signature, snapshot
from shardfn.transforms.forward_mode import as_now, where_torch_is_wrong
from shardfn.transforms.unsupported_calls import OutsideOfTree

_THREADS = set[int]()  # those that are in a call
_signature = lru_cache(maxsize=2**8)(inspect.signature)
_SMALL = 16  # in a loop, numbers up to that may choose between ways of a forward; others are counters or sizes
_TRIES = 2  # how many of these are asked whether they are about a call with other numbers
_MOST_TRACES = 64  # of one kind of call that are remembered
_CHECKED_CALLS = 2  # how many calls of a model compare their batch over the compute axes
_LOOPS = ("generate",)  # methods that call the model as often as its tokens say


@_torch.left_by_dynamo
def apply(model: nn.Module, params: Params, *args: Any, method: str | None = None, **kwargs: Any) -> Any:
    """Run `model` with the weights of `params`, like `torch.func.functional_call`.

    Inside, modules see ordinary local tensors: whole over the data axes, split over the compute axes. Linears,
    embeddings, convolutions, norms of channels and `nn.MultiheadAttention` compute with split weights by their rules;
    sizes between them must come from the tensors, since only this rank's heads are there. The model's own modules
    compute, and whatever else holds them (closures, lists, dicts) holds what computes; a parameter that something else
    than its module holds is an error where a forward computes with it. Outside of calls the model is its own: its
    parameters and buffers stay, and it has the attributes that its forward assigned.

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
        ShardError: the tree is not this model's; inputs on another device; on the first two calls, inputs or random
            numbers that differ between ranks of a compute axis; on the first call, sizes that do not fit the local
            parts, with the module.
        TypeError: not a module, or not a tree made by `shard`.

    Communication: one all-gather a bucket and data axis when the unit before it begins, and again in its backward
    (`regather=True`); one reduce-scatter a bucket in the backward; one all-reduce a row-parallel output and, in the
    backward, a tensor read by column-parallel linears. On gloo, buckets of 1 MiB and more travel rank to rank instead.
    The first two calls exchange a few bytes over the mesh, and the first meets the others at the store once a unit.
    `"generate"` gathers each bucket once, then communicates over compute axes only; it exchanges a few bytes each time,
    and the state of torch's generators (5 kB) over compute axes.
    """
    if _torch.callback_of_dynamo() is not None:
        instead = "Put sf.jit around the whole step; or Policy(compile=True), which compiles the forward of every unit"
        why = f"apply: torch.compile does not follow what gathers and reduces shards. {instead}"
        raise see(ShardError(why), "compile")
    if not isinstance(model, nn.Module):
        why = f"apply: expected an nn.Module, got {type(model).__name__}; write apply(model, params, x)"
        raise see(TypeError(why), "arguments")
    if not isinstance(params, Params):
        mapped = ". For a dict made of trees: a | b joins them, sf.tree.map(lambda p, g: p - lr * g, a, b) computes"
        hint = mapped if isinstance(params, Mapping) else ""
        made = f"write params = sf.shard(model, mesh, policy){hint}"
        why = f"apply: expected the tree that shard() makes, got {type(params).__name__}; {made}"
        raise see(TypeError(why), "trees")
    note_tree(params)
    call = _Call(model, params, method or "__call__")
    thread = get_ident()
    if not _THREADS <= {thread} and call.grid.exchanges:
        why = "another thread is in a call of it, and ranks would gather in different orders"
        raise ShardError(f"apply: {why}. Make the calls in one thread, one after the other")
    outermost = thread not in _THREADS
    _THREADS.add(thread)
    try:
        adjust = call.prepare(args, kwargs)
        args, kwargs = wiring.cast_inputs(params.plan, (args, kwargs))
        if call.grid.pure and _torch.simulated():  # or what is made of them would be one tensor, which each rank writes
            args, kwargs = _torch.pytree.tree_map_only(Tensor, _torch.of_each_rank, (args, kwargs))
        # A loop takes the numbers of the first rank; under a `dropout_seed` masks do not depend on torch's.
        notes = bool(call.kept.compute) and comm.journal_of(params.mesh) is not None
        draws = (params.compares or notes) and not call.loops and stream() is None and not call.grid.pure
        since = comm.random_states(call.grid.device) if draws else []
        output = call.run(adjust, args, kwargs)
        if draws:
            if params.compares:
                comm.require_same_draws(since, call.grid, params.compares)
            comm.note_draws(since, call.grid, call.kept.compute)
        if params.compares and not is_under_way():
            comm.compare_gradients(output, call.grid, params.compares)
        return wiring.cast_floats(output, params.plan.policy.output_dtype)
    finally:
        if outermost:
            _THREADS.discard(thread)


class _Call:
    """One `apply`, from its checks to its result."""

    def __init__(self, model: nn.Module, params: Params, method: str) -> None:
        if not hasattr(model, method):
            why = f"apply: {type(model).__name__} has no '{method}'{did_you_mean(method, dir(model))}"
            raise see(ShardError(why), "arguments")
        self.model, self.params, self.method = model, params, method
        self.loops = method in _LOOPS
        self.plan = params.plan
        self.grid = grid_of(params.mesh, self.plan.roles.storage)
        self.kept = kept_of(model, self.plan, self.grid)
        held = params.in_place
        self.held = held if held is not None and held.is_of(model) else None  # when leaves are the model's parameters

    def prepare(self, args: Any, kwargs: Any) -> Adjustments:
        """Check everything that can be checked without data, and find what the derivation needs.

        On the first calls all ranks raise when one must: an error on some ranks is a hang on the others.
        """
        self.kept.calls += 1
        if inside := _torch.in_transform():
            _torch.checkpoint_nothing_in_transforms()
        if (recorded := recording()) is not None:
            recorded.models.append(self.model)
        elif _torch.is_traced() and not torch.compiler.is_compiling():
            what = "apply: torch.func.linearize and make_fx record a graph that loses what collectives wait for"
            raise ShardError(f"{what}, and would be wrong; use sf.jvp or sf.vjp")
        adjust, problem = Adjustments(), None
        try:
            if self.loops:
                self._require_plain_loop()
            self._require_usable_tree(inside)
            if why := comm.wrong_inputs((args, kwargs), self.grid.device, bool(self.plan.placed_axes)):
                raise ShardError(why)
            self.module = unwrapped(self.model)  # what computes
            own = vars(self.module).get("forward")  # which may take other arguments
            if self.method == "__call__" and getattr(own, "original", own) is None:
                _signature(class_of(self.module).forward).bind(self.model, *args, **kwargs)
            if not self.loops:
                adjust = self._adjustments(args, kwargs)
        except (ShardError, TypeError) as error:
            problem = error
        compares = (self.loops or self.kept.calls <= _CHECKED_CALLS) and len(self.grid.ranks) > 1 and not inside
        self.params.compares = self.kept.compute if compares and not self.grid.pure else ()
        if compares:
            batch = args, kwargs, self.model.training
            try:
                comm.check_batch(self.grid, self.kept.compute, batch, problem and str(problem))
            except ShardError as error:
                raise (problem or error) from None
        if problem is not None:
            raise problem
        if comm.JOURNALS and not self.loops:
            comm.note_batch(self.grid, self.kept.compute, (args, kwargs), self.kept.calls)
        return adjust

    def _require_plain_loop(self) -> None:
        """What a method that runs until its tokens say so cannot be part of."""
        if _torch.in_transform() or self.grid.pure:
            why = f"apply: '{self.method}' goes on until its tokens say so, which no transform"
            raise ShardError(f"{why}, recorded step or simulated mesh can follow; call it outside of them")
        if self._masks() is not None:
            raise ShardError(f"apply: '{self.method}' with dropout under a dropout_seed; call model.eval() before")

    def _require_usable_tree(self, inside: bool) -> None:
        """What the tree has to be, also `inside` a transform; frozen parameters must have stayed so."""
        if not self.plan.leaves.keys() <= self.params.keys():
            missing = [name for name in self.plan.leaves if name not in self.params]
            raise ShardError(f"apply: the tree lacks {len(missing)} leaves, the first is {missing[0]!r}")
        if not inside and not {Tensor, nn.Parameter}.isdisjoint(map(type, self.params.values())):
            plain = next(name for name, leaf in self.params.items() if not isinstance(leaf, DTensor))
            raise plain_leaf("apply", plain)
        if torch.is_grad_enabled() and any(map(requires_grad, self.kept.frozen)):
            why = "parameters that asked for no gradient when sf.shard made the tree do now, and would get none"
            raise ShardError(f"apply: {why}. Write model.load_state_dict(sf.gather(params)), and shard the model again")
        several = inside and any(self.plan.axes[axis] > 1 for axis in self.plan.roles.data)
        if several and self.plan.vmaps is None and _torch.differentiated_in_vmap(self.params.values()):
            why = "torch.func.vmap goes on around a gradient, which would add up samples of different data ranks"
            raise ShardError(f"apply: {why}. Use sf.vmap and sf.grad, with None in in_dims for the tree.")
        if inside and self.plan.placed_axes:
            raise ShardError(
                "apply: sf.jvp, vjp, hvp, vmap or a transform of torch.func goes on, and modules that "
                "parallelize_module has split compute with DTensors, which torch takes into none. Write sf.grad twice "
                "for a Hessian-vector product, sf.grad(lambda p: sf.tree.dot(sf.grad(loss_fn)(p), v))(params), or "
                "split the model by rules instead: sf.policies.from_parallelize_plan(plan)"
            )

    def _adjustments(self, args: Any, kwargs: Any) -> Adjustments:
        """What a shape-only trace adds to the derivation; found once a kind of call, see [Note: guards]."""
        if not self.plan.splits_compute:
            return Adjustments()
        leaves, structure = _torch.pytree.tree_flatten((args, kwargs))
        caches = [leaf for leaf in leaves if is_cache(leaf)]
        kinds = [signature(leaf, sizes=not caches) for leaf in leaves]
        leaves += self.params.buffers.values()
        derived = torch.is_grad_enabled(), derivatives_asked_for() if self.plan.policy.pad else ""
        key = (self.method, derived, str(structure), *self.kept.structure.hooks(), *kinds)
        candidates = self.kept.traces.setdefault(key, [])
        # What a filled cache holds, only the run of the call that has filled it knows, whatever sizes that had.
        sizes = [tuple(x.shape) for x in leaves if isinstance(x, Tensor)] if caches else None
        goes_on = any(map(is_filled, caches))
        for at, traced in enumerate(candidates):
            if (goes_on or traced.sizes == sizes) and traced.guards.hold(leaves):
                if at:
                    candidates.insert(0, candidates.pop(at))
                return traced.adjust
        return self._trace(key, candidates, sizes, leaves, args, kwargs)

    def _trace(self, key: Any, known: "list[_Traced]", sizes: Any, leaves: Any, args: Any, kwargs: Any) -> Adjustments:
        """What a shape-only trace finds, or that one of those before is about this call too; see [Note: guards]."""
        candidates = [traced for traced in known if traced.sizes == sizes]
        calls = [("", args, kwargs)]
        trace = ShapeTrace(self.model, self.plan, self.grid.mesh, self.params.buffers, self.method, calls)
        broken = [traced.guards.broken(leaves) for traced in candidates]
        asked = {place for traced in candidates for place in traced.asked}
        for traced, places in zip(candidates[:_TRIES], broken, strict=False):
            unwatched = (place for place in places if place.key in asked or type(place.now(leaves)) not in Watch.serves)
            if not traced.guards.answered(leaves, values=Guards.VALUES in asked) or any(True for _ in unwatched):
                continue
            more = [*places, *(place for place, _ in traced.guards.loose.values())]
            watch = trace.watched(traced.adjust, more)
            asked |= {place.key for place in more} if watch is None else watch.asked
            asked |= {Guards.VALUES} if watch is None or not traced.guards.told_alike(watch) else set()
            if watch is not None and traced.guards.relaxed(watch):
                return traced.adjust
        blanks = [place for places in broken for place in places if place.holds_tensors]
        same = (adjust for other, adjust in reversed(self.kept.adjustments.items()) if other[:2] == key[:2])
        adjust = self.kept.adjustments[key] = trace.adjustments(next(same, None), blanks)
        if (guards := trace.guards(leaves)) is not None:
            known.insert(0, _Traced(adjust, guards, asked, sizes))
        del known[_MOST_TRACES:]
        return adjust

    def run(self, adjust: Adjustments, args: Any, kwargs: Any) -> Any:
        """The forward on this rank."""
        if self.loops:
            with torch.no_grad(), comm.random_numbers_of_first(self.grid, self.kept.compute):
                return self._loop(args, kwargs)
        masks, held = self._masks(), self.held
        inside = _torch.in_transform()
        parameters = held is not None and not (self.grid.pure or inside or _torch.is_traced())
        session = Session(self.params, self.grid, (self.method, self.model.training), parameters)
        session.masks = masks
        binding = self._begin(session, adjust)
        try:
            new = self.kept.calls <= _CHECKED_CALLS and not (binding.compiles or self.grid.pure or recording())
            watch = OutsideOfTree(self.model, self.params) if new else nullcontext()
            formulas = where_torch_is_wrong() if inside else nullcontext()
            with binding.computes(session), session.hooks(traced=binding.compiles), watch, formulas:
                output = getattr(self.module, self.method)(*args, **kwargs)
                output = leaving(output, adjust, self.grid, self.plan)
        except (RuntimeError, AttributeError) as error:
            if isinstance(error, RuntimeError) and (told := escaped(error)) is not None:
                raise told from error
            if advice := wiring.advice_on(self.plan, self.params.buffers, error):
                raise see(ShardError(f"apply: {error}\n{advice}"), "forwards") from error
            raise
        finally:
            session.close()
            if masks is not None:
                masks.over = True
        if held is not None:
            held.end(self.model, self.params)
        if not inside:
            binding.wait(session, output)
        return output

    def _begin(self, session: Session, adjust: Adjustments) -> ModelBinding:
        """What modules do in a call, with the buffers of the tree or, where these are theirs, their own."""
        if self.held is None:
            session.buffers = self.params.buffers
        else:
            self.held.begin(self.model, self.params)
        bindings, key = self.kept.bindings, (adjust, session.masks is not None)
        binding = bindings.get(key)
        if binding is None or not binding.is_there:
            binding = bindings[key] = _bind(self.model, self.plan, self.grid, self.kept.names, *key)
        binding.prepare()
        return binding

    def _loop(self, args: Any, kwargs: Any) -> Any:
        """A method that calls the model as often as its tokens say.

        Data ranks stop at different tokens: all weights are gathered before the first one and kept, so that none waits
        for another one.
        """
        session = Session(self.params, self.grid, (self.method, self.model.training))
        session.hold()
        history = _History(self.kept.ranks_of_sequences)
        training = tuple(module.training for module in self.model.modules())

        def step(path: str, _: Forward, /, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = wiring.cast_inputs(self.plan, (args, kwargs))
            adjust = self._step_adjustments(history, training, path, args, kwargs)
            with self._begin(session, adjust).computes(session):
                output = unwrapped(submodule(self.model, path)).forward(*args, **kwargs)
                output = leaving(output, adjust, self.grid, self.plan)
                return wiring.cast_floats(output, self.plan.policy.output_dtype)

        model = self.module
        around = {path: goes_around(step, path) for path, _ in model.named_modules()}
        binding = ModelBinding(model, self.kept.names, Wiring(around=around))
        if hasattr(model, "get_compiled_call"):  # generate compiles the model for static caches; the policy, units
            vars(model)["get_compiled_call"] = lambda compile_config: model
        try:
            with binding.for_now(), binding.computes(session):
                return getattr(model, self.method)(*args, **kwargs)
        finally:
            session.close()
            vars(model).pop("get_compiled_call", None)

    def _step_adjustments(self, history: "_History", training: Any, path: str, args: Any, kwargs: Any) -> Adjustments:
        """Those of an inner call, found once a kind, from a shape-only trace of the calls before it too."""
        if not self.plan.splits_compute:
            return Adjustments()
        key = (self.method, training, *history.note(path, args, kwargs))
        if key not in self.kept.adjustments:
            calls, mesh, buffers = history.calls(), self.grid.mesh, self.params.buffers
            trace = ShapeTrace(self.model, self.plan, mesh, buffers, "forward", calls, differentiates=False)
            adjust = trace.adjustments()
            if adjust.kept:
                where = repr(path) if path else "the model"
                why = f"'{self.method}' needs whole outputs of {where}, and one stays split by Policy(acts=...)"
                raise ShardError(f"apply: {why}; leave it out for this tree")
            self.kept.adjustments[key] = replace(adjust, shared=frozenset())  # which only gradients ask for
        return self.kept.adjustments[key]

    def _masks(self) -> Masks | None:
        """Those of the `dropout_seed` around, if the model drops anything."""
        rng = stream()
        if rng is None or not dropping(self.model):
            return None
        if self.plan.placed_axes:
            raise ShardError(
                "dropout_seed: modules compute with DTensors that parallelize_module made, and nobody knows which part "
                "of an activation a rank has. Split by rules: sf.policies.from_parallelize_plan(plan)"
            )
        return Masks(rng, *part_over(self.grid, self.plan.roles.data))


@_torch.left_by_dynamo
def _in_unit(unit: str, here: "weakref.ref[nn.Module]", inner: Forward, /, *args: Any, **kwargs: Any) -> Any:
    """The forward of a unit."""
    session, module = call_now().session, here()
    assert module is not None
    if session.computes_again(unit) and not any(map(_torch.has_forward_hooks, module.modules())):
        try:
            return _recomputed(unit, module, inner, args, kwargs)
        except Borrowed:
            session.runtime.recomputable.discard(unit)
    session.enter(unit)
    try:
        return inner(*args, **kwargs)
    finally:
        session.leave(unit)


def _recomputed(unit: str, module: nn.Module, inner: Forward, args: Any, kwargs: Any) -> Any:
    """The forward of a unit that computes again for its derivatives, also when the call is over."""
    call = call_now()
    session = call.session
    leaves = {name: session.leaves[name] for name in session.runtime.leaves_of[unit]}
    random = session.masks.inputs if session.masks is not None else []
    formulas = as_now()

    def run(saved: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
        drops = session.masks.given(saved[len(leaves) :]) if session.masks is not None else nullcontext()
        only = session.only(unit, dict(zip(leaves, saved, strict=False)))
        with call.binding.computes(session), only, drops, formulas:
            return inner(*args, **kwargs)

    way = unit, module.training, _torch.kinds_of_transforms()
    saved, again = [*leaves.values(), *random], ReachableState(module).again
    out = recomputed(module, run, saved, args, kwargs, way not in session.runtime.watched, again)
    session.runtime.watched.add(way)
    return out


def _dropout(path: str, offsets: Callable[[int, int], Offsets], module: Any, input: Tensor) -> Tensor:
    """The forward of a dropout module under a `dropout_seed`; `input` as torch calls it, which may be given by name."""
    return call_now().session.masks.apply(path, module, input, offsets)


def _scores(path: str, x: Tensor, p: float, axes: Sequence[str], grid: Grid) -> Tensor:
    """Scores of attention, of whose heads this rank has its part over some axes, under a `dropout_seed`."""
    return call_now().session.masks.scores(path, x, p, part_over(grid, axes))


class _Traced(NamedTuple):
    """What shape-only traces found, what has to be as it was, and which changes of that need a new run at once."""

    adjust: Adjustments
    guards: Guards
    asked: set[Any]
    sizes: Any  # of the inputs beside a cache; None without one, when they are part of the kind


@dataclass
class _CallCache:
    """What is remembered between calls about a model with a plan on a grid."""

    structure: Structure
    names: Mapping[str, Mapping[str, str]]  # module path -> attribute -> canonical parameter
    frozen: Sequence[Tensor]  # the model's parameters of which the tree has no gradients
    compute: Sequence[str]  # axes along which ranks work on the same samples; of DTensors, their modules decide
    ranks_of_sequences: int  # between how many ranks `Policy.acts` splits activations
    calls: int = 0
    adjustments: dict[Any, Adjustments] = field(default_factory=dict)
    bindings: dict[tuple[Adjustments, bool], ModelBinding] = field(default_factory=dict)
    traces: dict[Any, list[_Traced]] = field(default_factory=dict)


def kept_of(model: nn.Module, plan: Plan, grid: Grid) -> _CallCache:
    """It goes with the plan, to which it refers, or with the model; of a model that has changed it is made anew."""
    known: dict[int, tuple[Any, _CallCache]] = plan.home.once(("models", grid), dict)
    key = id(model)
    had = known[key][1] if key in known else None
    if had is None or not had.structure.is_of(model):
        _require_one(model, plan)
        _require_sizes(model, plan)
        compute = [axis for axis in plan.roles.compute if plan.axes[axis] > 1 and axis not in plan.placed_axes]
        # Those that are shards themselves are looked at elsewhere.
        named = [(plan.canonical.get(n, ""), p) for n, p in model.named_parameters() if not isinstance(p, DTensor)]
        frozen = [p for name, p in named if name in plan.layouts and not plan.layouts[name].trainable]
        calls = 0 if had is None else had.calls  # maybe changed on one rank only, which must not ask the others again
        acts = wiring.ranks_of_acts(plan)
        had = _CallCache(Structure(model), wiring.owned_names(model, plan), frozen, compute, acts, calls)
        known[key] = weakref.ref(model, lambda _: known.pop(key, None)), had
    return had


def leaving(output: Any, adjust: Adjustments, grid: Grid, plan: Plan) -> Any:
    """An output as callers get it: split leaves as `SplitLogits`, so that taking them for whole ones is an error."""
    if not (adjust.kept or adjust.shared or adjust.joined):
        return output
    leaves, structure = _torch.pytree.tree_flatten(output)
    for at, axis, dim in sorted(adjust.joined):  # in the same order on all ranks
        leaves[at] = comm.all_gather_invariant(leaves[at], grid.mesh, axis, dim)
    for at, axis in sorted(adjust.shared):  # each rank takes it for its own, and their gradients are added up
        leaves[at] = comm.weighed(leaves[at], 1 / grid.sizes[axis])
    for at, axis, dim in sorted(adjust.kept):
        with nullcontext() if _torch.simulated() else _torch.outside_modes():  # a mesh computes with tensors
            mesh = grid.mesh[axis]
        leaves[at] = SplitLogits.of(leaves[at], mesh, dim, partial(_origin, plan))
    return _torch.pytree.tree_unflatten(leaves, structure)


def _origin(plan: Plan) -> str:
    """What left an output split, for errors."""
    acts = plan.policy.acts
    entries = {module: first_match(acts, [module]) or module for module in sorted(kept_by_acts(plan))}
    written = ", ".join(f"{entry!r}: {acts[entry]!r}" for entry in dict.fromkeys(entries.values()))
    return f"Policy(acts={{{written}}}) leaves the output of {' and '.join(map(repr, entries))} split"


def _bind(model: nn.Module, plan: Plan, grid: Grid, names: Any, adjust: Adjustments, seeded: bool) -> ModelBinding:
    """What modules do in calls of a plan, to which shape-only traces have added; `seeded`: a `dropout_seed` goes on."""
    for name, p in model.named_parameters(remove_duplicate=False):
        if not (isinstance(p, DTensor) or name in plan.canonical or name in plan.info.ignored):
            raise ShardError(f"apply: {name!r} was added to the model after sf.shard made the tree: shard it again")
    axes = ComputeAxes(grid.mesh, grid.sizes, grid.coords)
    axes.varied = lambda: call_now().session.varied
    axes.gathers_again = lambda gathers: call_now().session.keeps_pieces(gathers)
    axes.drops = partial(_scores, grid=grid) if seeded else None
    units = {unit.name: weakref.ref(unwrapped(submodule(model, unit.name))) for unit in plan.units if unit.name}
    around = {unit: goes_around(_in_unit, unit, here) for unit, here in units.items()}
    around |= {name: wiring.chained(cast, around[name]) for name, cast in wiring.unit_casts(plan).items()}
    paths = dropout_modules(model) if seeded else ()
    dropouts = {at: partial(_dropout, at, partial(offsets_of_call, at, plan, grid, adjust.splits)) for at in paths}
    wired = wiring.wire(plan, names, axes, adjust, around)
    return ModelBinding(model, names, replace(wired, forwards={**wired.forwards, **dropouts}))


class _History:
    """The first inner call of each kind: a shape-only trace repeats them, so that caches are filled as they were.

    Tokens decide when a loop stops, so that it cannot run without data. Its inner calls can, and a cache that goes from
    one to the next keeps what they put into it, this rank's part.
    """

    def __init__(self, ranks: int) -> None:
        """`ranks`: between how many activations may be split."""
        self._ranks = ranks
        self._calls: dict[Any, InnerCall] = {}
        self._caches: dict[int, tuple[Any, Any]] = {}  # the cache itself keeps its id from being given to another one

    def note(self, path: str, args: Any, kwargs: Any) -> Any:
        """Remember a call that is about to be made, if it is the first of its kind; returns that kind."""
        leaves, structure = _torch.pytree.tree_flatten((args, kwargs))
        known = any(map(is_filled, filter(is_cache, leaves)))  # how, a run of calls before says, of any length
        kinds = ((type(x), is_filled(x)) if is_cache(x) else _kind(x, known, self._ranks) for x in leaves)
        key = (path, str(structure), *kinds)
        for cache in filter(is_cache, leaves):
            if id(cache) not in self._caches:
                self._caches[id(cache)] = cache, None if is_filled(cache) else snapshot(cache)
        if key not in self._calls:
            empty = [self._caches[id(x)][1] or _FILLED if is_cache(x) else x for x in leaves]
            args, kwargs = _torch.pytree.tree_unflatten(empty, structure)
            self._calls[key] = path, args, kwargs
        return key

    def calls(self) -> list[InnerCall]:
        """The calls up to now.

        Raises:
            ShardError: a cache was filled before the method began, and nobody knows with what.
        """
        calls = list(self._calls.values())
        if any(leaf is _FILLED for leaf in _torch.pytree.tree_leaves(calls)):
            raise ShardError(
                "apply: the first call of its kind gets a cache that is filled already, so that nothing tells which "
                "part of it this rank has. Generate once with an empty cache, which is then known, or leave it out."
            )
        return calls


_FILLED = object()


def _kind(leaf: Any, goes_on: bool, ranks: int) -> Any:
    """What of an input of an inner call of a loop is looked at: there, sizes change with every token.

    A call that `goes_on` has a filled cache, of which only the calls before it know what it holds.

    Activations may be split between `ranks` where they can be.
    """
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.requires_grad, *((goes_on or min(size, 2), size % ranks) for size in leaf.shape)
    counts = isinstance(leaf, bool | str | None) or (type(leaf) is int and abs(leaf) <= _SMALL)
    return leaf if counts else type(leaf)


def _require_sizes(model: nn.Module, plan: Plan) -> None:
    """Check that `Policy.local_sizes` names attributes as what they are, which one rank would not notice."""
    if not plan.policy.local_sizes:
        return
    policy = replace(plan.policy, ignore=(), pad={})
    whole = decide(plan.info, dict.fromkeys(plan.axes, 1), policy).local_sizes
    for path, sizes in whole.items():
        module = unwrapped(submodule(model, path))
        for attribute, size in sizes.items():
            have = attrgetter(attribute)(module) if has_attribute(module, attribute) else None
            if isinstance(have, int) and have != size:
                raise ShardError(
                    f"apply: Policy.local_sizes names {attribute!r} of {path or 'the model'!r}, which is {have}, as "
                    f"what is {size} on one rank. Name all of its factors, such as {{{attribute!r}: 'heads@tp d'}}"
                )


def _require_one(model: nn.Module, plan: Plan) -> None:
    """Check that the tree is not one of several members, nor that of a model with other sizes."""
    for name, param in model.named_parameters():
        layout = plan.layouts.get(plan.canonical.get(name, ""))
        if layout is None or isinstance(param, DTensor) or tuple(layout.shape) == tuple(param.shape):
            continue
        shapes = f"{name!r} of shape {tuple(layout.shape)}, the model's has {tuple(param.shape)}"
        if layout.shape[1:] != param.shape:
            why = f"apply: the tree was made for another model, with {shapes}; shard this model"
            raise see(ShardError(why), "trees")
        write = "Map over them, sf.vmap(lambda p: sf.apply(model, p, x))(tree), or take one, sf.tree.map(lambda w: w[0]"
        raise ShardError(f"apply: the tree has several members, {shapes}. {write}, tree)")
