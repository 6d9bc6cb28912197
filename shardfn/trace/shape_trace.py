"""A run of a model's forward without data, with the sizes that one rank has.

It happens before the first real call on a mesh with compute axes, and in `plan(..., example=...)` without any process.
It finds sizes taken from the configuration instead of the tensors, adds the collectives that only the data flow shows
(see [Note: where a pvary goes]), and counts the bytes of activations that travel.
"""

import gc
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardfn import _torch, layout
from shardfn._torch import outside_transforms, pytree
from shardfn.binding import Around, Forward, InnerCall, ModelBinding, Wiring, goes_around, has_attribute, own_forward
from shardfn.comm import watched
from shardfn.context import derivatives_asked_for, having
from shardfn.layout import MeshSpec, Plan, Policy, Problem, Tag, compute_view, has_derivatives, is_in, unwrapped
from shardfn.notation import ShardError, of_like_layers, see
from shardfn.parallel import Adjustments, ComputeAxes, kept_by_acts, others_forwards, weight_parts, wiring
from shardfn.random import dropout_modules
from shardfn.trace import function_mode as beside
from shardfn.trace.guards import Guards, ValuePath, Watch, reads_noted
from shardfn.trace.interpreter import Interpreter
from shardfn.trace.meta_values import ValueReads, to_meta
from shardfn.trace.paired_sizes import Decision, Paired, Side, Size
from shardfn.trace.state_rollback import ReachableState
from shardfn.trace.suggestions import Failure, Unserved, advice, changes, described, header, of_torch, over, said
from shardfn.trace.traced_axes import StepFinder, TracedAxes
from shardfn.trace.value_numbering import ValueNumbers

_TRIES = 16  # how many further runs may look for what to write when one fails
# What a run adds for the next one, of the first kind of which there is more. Each only grows, and names places of one
# model, so that runs end.
_GROWS = ("several", "entries", "whole", "sums", "gather", "vary", "amended")
# What the last run found belongs to the adjustments as it is.
_ENDS = ("ready", "shared", "kept", "joined", "inputs", "outputs", "scattered")
_NO_ENDS: dict[str, Any] = dict.fromkeys(_ENDS, frozenset[Any]())


class ShapeTrace:
    """Runs a forward on meta tensors until nothing is found to add."""

    def __init__(
        self,
        model: nn.Module,
        plan_: Plan,
        mesh: DeviceMesh | MeshSpec,
        buffers: Mapping[str, Tensor],
        method: str,
        calls: Sequence[InnerCall],
        *,
        differentiates: bool = True,
    ) -> None:
        """`calls`: what is run is the last one; those before it fill caches that it reads."""
        self.model, self.plan, self.mesh, self.method = model, plan_, mesh, method
        self.names = wiring.owned_names(model, plan_)
        self.bytes_moved: dict[Adjustments, int] = {}  # with these added, by each rank
        self._more: dict[str, Set[Any]] | None = None  # what a further run may try
        self._reached = ReachableState(model, calls)
        self.reads: dict[tuple[int, Any], ValuePath] = {}  # of attributes, in all runs
        self._watch: Watch | None = None
        self._buffers = dict(buffers)
        self._calls, self._differentiates, self._asked_for = calls, differentiates, derivatives_asked_for()
        self._blanks: Sequence[ValuePath] = ()
        self.varies_inputs = True  # of modules, where they enter; or in the calls that need it
        self._several, self._several_tried = True, False  # inputs of one module that `Policy.acts` splits
        self._amends = plan_.policy.compile is False and not any(map(_is_compiled, model.modules()))  # calls of torch
        self._decided: Sequence[Decision] = ()  # in the last run
        self.value_reads = ValueReads()  # the same
        self._on_cpu = isinstance(mesh, MeshSpec) or mesh.device_type == "cpu"

    def adjustments(self, known: Adjustments | None = None, blanks: Sequence[ValuePath] = ()) -> Adjustments:
        """What has to be added to the derived collectives.

        Args:
            known: what was found for other arguments, which may do.
            blanks: attributes that a call before has filled with tensors.

        Raises:
            ShardError: the forward fails with local sizes, or no collective can make its gradients whole.
        """
        self._blanks = blanks
        self._require_attributes()
        try:
            return self._settle(known)
        except Unserved as failure:
            change = self._change(failure.failure, Policy())
            text = said(change, self.plan, failure.failure) if change is not None else advice(failure.failure)
            raise see(ShardError(f"{failure}\n{text}"), "forwards") from failure.__cause__

    def guards(self, leaves: Sequence[Any]) -> Guards | None:
        """What has to be as it was in the last run, for a call with these leaves; None: what is drawn may decide."""
        if self._reached.draws:
            return None
        names, holders = self._reached.outside()
        places = {(id(table), name): ValuePath(table, name) for table, name in names}
        return Guards(leaves, [*(places | self.reads).values()], self.value_reads, holders)

    def watched(self, adjust: Adjustments, places: Sequence[ValuePath]) -> Watch | None:
        """What runs ask of the values in some places; None when they fail."""
        watch = Watch(places, pytree.tree_leaves([call[1:] for call in self._calls]))
        with having(self, _watch=watch), outside_transforms(), _torch.outside_modes(), _torch.out_of_inference_mode():
            try:
                for side in ("one", "rank"):
                    self._left(adjust, self._interpreter(side))
            except Exception:
                return None
        return watch

    def _require_attributes(self) -> None:
        """Every attribute that `Policy.local_sizes` names is there.

        Raises:
            ShardError: no module that a pattern matches has one.
        """
        for pattern, sizes in self.plan.policy.local_sizes.items():
            named = [unwrapped(module) for path, module in self.model.named_modules() if layout.matches(pattern, path)]
            for name in sizes if named else ():
                if not any(has_attribute(module, name) for module in named):
                    raise ShardError(f"apply: Policy.local_sizes[{pattern!r}] names {name!r}, and no module has that")

    def _change(self, failure: Failure, kept: Policy, tries: int = 0) -> Policy | None:
        """The change of the policy, besides one that is kept, with which the forward runs to its end; by trying."""
        for number, change in zip(range(tries + 1, _TRIES), changes(self.plan, failure), strict=False):
            with suppress(ShardError):
                policy = replace(self.plan.policy, ignore=()) | kept | change
                other = replace(layout.decide(self.plan.info, self.plan.axes, policy), policy=policy)
                arguments = self.model, other, self.mesh, self._buffers, self.method, self._calls
                trial = ShapeTrace(*arguments, differentiates=self._differentiates)
                try:
                    trial._settle()
                except Unserved as later:
                    if later.failure.where == failure.where:
                        continue
                    return self._change(later.failure, kept | change, number)
                return kept | change
        return None

    def _settle(self, known: Adjustments | None = None) -> Adjustments:
        # Where attention is one operation.
        with outside_transforms(), _torch.outside_modes(), _torch.out_of_inference_mode():
            if known is not None and (as_known := self._found_less(replace(known, **_NO_ENDS))):
                return as_known
            try:
                adjust = self._found(Adjustments())
            except ShardError:
                if not self._several_tried:
                    raise
                self._several = False
                adjust = self._found(Adjustments())
            # What varied still does, and the ends of that run are not those of this one.
            less = self._found_less(replace(adjust, **_NO_ENDS, **self._more)) if self._more is not None else None
            return less or adjust

    def _found_less(self, tried: Adjustments) -> Adjustments | None:
        """What a run that tries less communication finds, unless that leaves more whole."""
        with suppress(ShardError):
            less = self._found(tried)
            if (less.entries, less.whole, less.several) == (tried.entries, tried.whole, tried.several):
                return less
        return None

    def _found(self, known: Adjustments) -> Adjustments:
        # Keys of fewer heads than ranks stop a forward with a shape error before they meet the queries, or are
        # broadcast to them; or a rank takes its part of them where they are repeated.
        groups = self._groups()
        try:
            adjust = self._settled(known)
            with suppress(ShardError):
                less = self._settled(replace(known, vary=known.vary | groups)) if groups and adjust.amended else adjust
                if len(less.amended) < len(adjust.amended):
                    return less
            return adjust
        except ShardError as first:
            with suppress(ShardError), having(self, varies_inputs=False):
                if self._amends:
                    return self._settled(known)
            if not groups:
                raise
            try:
                return self._settled(replace(known, vary=known.vary | groups))
            except Unserved as later:
                raise Unserved(f"{later}\n{_with_groups(groups)}", later.failure) from later.__cause__
            except ShardError:
                raise first from first.__cause__  # it says more

    def _settled(self, adjust: Adjustments) -> Adjustments:
        while (grown := _grown(adjust, (run := self._run(adjust)).found)) is not None:
            self._several_tried |= grown.several != adjust.several
            adjust = grown
        found, problems = run.found, run.problems
        if not problems and not found.vary:
            ended = self._ended(adjust, found)
            self.bytes_moved[ended] = self._axes.bytes_moved
            self._require_none_left(run)
            if self._decided:
                self._require_values_of_a_rank(adjust, ended)
            if found.in_shares or found.may_scatter:
                self._more = {"in_shares": found.in_shares, "may_scatter": found.may_scatter}
            return ended
        for source, axis in sorted(found.vary if not problems else ()):
            what = f"{source} meets values that are split over '{axis}', also where it is not of the module that has it"
            problems.append(Problem(what, "gradient"))
        failure = self._unserved(problems)
        pending = all(problem.kind in ("sums", "backward") for problem in problems)  # whatever else varies
        for source, axis in sorted(adjust.vary) if not pending else ():
            path = source.removeprefix("module ")
            if path != source and not wiring.shared_parts(self.plan, path, axis):
                raise Unserved(f"{failure}\n{wiring.shared_alone(path, axis)}", failure.failure)
        raise failure

    def _require_none_left(self, run: Interpreter) -> None:
        """Check that no value outlives a run: where one is kept and found, it is put back, and made whole in a call.

        Raises:
            ShardError: the forward keeps one where it was not found.
        """
        del self._axes, run.sides.needs_whole, run.with_backwards  # which hold some
        self._reached.collected = []
        if run.left():
            gc.collect()
        for tag in run.left():
            what = f"of {min(tag.sources)!r} " if tag.sources else ""
            raise ShardError(
                f"apply: the forward keeps a value {what}where it is not found, and would stay this rank's part: in a "
                "class, a queue or a thread's own storage. Return it, or keep it in an attribute of a "
                "module, in a list or in a dict"
            )

    def _unserved(self, problems: Sequence[Problem]) -> Unserved:
        kinds = of_like_layers(list(dict.fromkeys(problem.what for problem in problems)))
        listed = "\n".join(f"  {kind}" for kind in kinds)
        return Unserved(f"apply: {header(self.plan, problems)}\n{listed}", Failure(tuple(dict.fromkeys(problems))))

    def _ended(self, adjust: Adjustments, found: Adjustments) -> Adjustments:
        """The same with what the last run found that is about itself."""
        ends = {name: getattr(found, name) for name in _ENDS}
        drops = self._drops if any(tag.parts for *_, tag in self._drops) else []
        splits = frozenset((path, call, _split_dims(ndim, tag)) for path, call, ndim, tag in drops)
        return replace(adjust, **ends, splits=splits)

    def _forward(
        self, wired: Wiring, run: Interpreter, functions: AbstractContextManager[Any], begin: Callable[[], None]
    ) -> tuple[Any, ...]:
        """What modules return and keep of inputs and buffers without data; `begin` is called before each call."""
        output, calls = None, wiring.cast_inputs(self.plan, to_meta(self._calls, run.values))
        weights = _WithoutData(cache(partial(self._weight, run)), dict(to_meta(self._buffers, run.values)))
        _name_all(run.numbers, calls, "input")
        _name_all(run.numbers, weights.buffers, "buffer")
        with ExitStack() as around:
            around.enter_context(self._reached.undone(x for _, args, named in calls for x in (*args, *named.values())))
            around.callback(run.values.reads.put_back)
            for place in self._blanks:
                if place.table is not None:
                    place.table[place.name] = blank = to_meta(place.table[place.name], run.values)
                    _name_all(run.numbers, blank, f"attribute {place.name} of {id(place.table)}")
            modules = ModelBinding(self.model, self.names, wired)
            modules.prepare()
            draws = torch.random.fork_rng([])  # random numbers go on from where they were
            noted = reads_noted(self.model, self.reads), watched(run.note_collective), run.sides.run()
            for mode in (modules.computes(weights), draws, *noted, run, functions, torch.enable_grad()):
                around.enter_context(mode)
            if self._watch is not None:
                leaves, structure = pytree.tree_flatten(calls)
                self._watch.put(leaves, run.values)
                calls = pytree.tree_unflatten(leaves, structure)
                around.enter_context(self._watch.math)
                around.enter_context(self._watch)
            for path, args, kwargs in calls:
                begin()
                output = getattr(unwrapped(layout.submodule(self.model, path)), self.method)(*args, **kwargs)
        return output, self._reached.collected, [*weights.buffers.values()]

    def _groups(self) -> frozenset[tuple[str, str]]:
        """The outputs of which ranks of an axis could each take a part, see `shared_parts`."""
        linears = (module for module in self.plan.info.modules if module.kind == "linear")
        shared = ((module.name, *pair) for module in linears for pair in self.plan.weight_of(module).shared)
        return frozenset((f"module {name}", axis) for name, axis, parts in shared if self.plan.axes[axis] % parts == 0)

    def _run(self, adjust: Adjustments) -> Interpreter:
        """One forward, which has found what is missing."""
        run = self._interpreter("both")
        kept = self._left(adjust, run)
        if kept is None:
            return run
        output, *others = kept
        beside.check_backwards(run, output)
        beside.check_outputs(run, output, kept_by_acts(self.plan))
        for values in others:
            beside.check_kept(run, values)
        self._axes.agree()
        self._decided = run.sides.decided
        return run

    def _require_values_of_a_rank(self, adjust: Adjustments, ended: Adjustments) -> None:
        """Check that a rank, which goes other ways than one process, makes the same values of what it has.

        Raises:
            ShardError: it does not, or that cannot be told.
        """
        mine = ValueNumbers(on_cpu=self._on_cpu)
        followed = mine, self._left(adjust, self._interpreter("both", mine))
        other = ValueNumbers(mine, self._on_cpu)
        alone = self._interpreter("rank", other)
        try:
            done = other, self._left(ended, alone, follows=False)
        except ShardError:
            raise
        except Exception as error:
            raise self._stopped(alone, error) from error
        if [*beside.values_left(*followed)] != [*beside.values_left(*done)]:
            raise self._unserved(_decisions(self._decided))

    def _interpreter(self, side: Side, numbers: ValueNumbers | None = None) -> Interpreter:
        sizes = {axis: self.plan.axes[axis] for axis in self.plan.roles.compute if self.plan.axes[axis] > 1}
        stored = [leaf for one in self.plan.layouts.values() for leaf in one.leaves]
        padded = {pair for leaf in stored for pair in zip(leaf.extent, leaf.shape, strict=True) if pair[0] != pair[1]}
        return Interpreter(sizes, side, others_forwards(self.plan), padded, self._asked_for, numbers, self._on_cpu)

    def _left(self, adjust: Adjustments, run: Interpreter, follows: bool = True) -> tuple[Any, ...] | None:
        """What a forward returns and keeps; None when it failed, and another run may do better.

        `follows`: which collectives are missing; or takes those that `adjust` says, as a real call does.
        """
        place = self.mesh, self.plan.axes, dict.fromkeys(self.plan.axes, 0)
        axes = ComputeAxes(*place)
        if follows:
            axes = self._axes = TracedAxes(*place, run)
        amends = self._axes if follows and self._amends and run.sides.at == "both" else None
        owners = {path for path, names in self.names.items() if names}
        above = layout.modules_above(owners)
        noted = owners | {source.removeprefix("module ") for source, _ in adjust.vary}
        self._drops, drops = list[_Drop](), dropout_modules(self.model)
        around = {
            path: _noting(run, axes, path, path in noted, path in above, self._drops if path in drops else None)
            for path in self.names
        }
        flow = StepFinder(self.plan, run, self._axes, adjust, self._several)
        steps = flow.around() if follows else {}
        around |= {path: wiring.chained(moves, around.get(path)) for path, moves in steps.items()}
        wired = self._of_both(wiring.wire(self.plan, self.names, axes, adjust, around), run)
        try:
            functions = beside.PairedFunctionMode(run, amends, self.varies_inputs)
            kept = self._forward(wired, run, functions, flow.begin)
            self.value_reads = run.values.reads
            return kept
        except ShardError:
            raise
        except Exception as error:
            if run.sides.at != "both":
                raise
            if flow.failed(run.failed_at):
                return None
            raise see(self._failed(adjust, run, error), "forwards") from error

    def _of_both(self, wired: Wiring, run: Interpreter) -> Wiring:
        """The same for a run on both sides: in one process, modules with parallel forwards run their own ones."""
        casts, forwards = wiring.unit_casts(self.plan), dict(wired.forwards)
        own = {module.name for module in self.plan.info.modules if module.kind == "own embedding"}
        for path in (others_forwards(self.plan) - own) & forwards.keys():
            module = unwrapped(layout.submodule(self.model, path))
            forward = getattr(self.plan.forwards.get(path), "without_data", None) or own_forward(module)
            forwards[path] = partial(run.on_each_side, forwards.get(path, forward), forward)
        around = {path: goes_around(_not_in_one, run, path, moves) for path, moves in wired.around.items()}
        around |= {path: wiring.chained(cast, around.get(path)) for path, cast in casts.items()}
        sizes = {path: self._sizes(path, local_sizes, run) for path, local_sizes in wired.sizes.items()}
        return replace(wired, forwards=forwards, around=around, compilers=None, sizes=sizes)

    def _sizes(self, path: str, local_sizes: Mapping[str, int], run: Interpreter) -> dict[str, Any]:
        """The sizes that a module has in attributes: on a rank and, where they differ, in one process."""
        module, sizes = unwrapped(layout.submodule(self.model, path)), dict[str, Any](local_sizes)
        for name, size in local_sizes.items():
            holder, _, attribute = name.rpartition(".")
            have = getattr(module.__dict__.get(holder) if holder else module, attribute, None)
            if isinstance(have, int) and run.sides.at != "rank":
                sizes[name] = have if have == size or run.sides.at == "one" else Size(size, have)
        return sizes

    def _failed(self, adjust: Adjustments, run: Interpreter, error: Exception) -> ShardError:
        decided = run.sides.decided
        if decided and not self._fails_in(adjust, "rank"):  # as it does the way of one process
            return self._unserved(_decisions(decided))
        why = self._fails_in(adjust, "one")
        if written := of_torch(f"{error}\n{why}") or wiring.advice_on(self.plan, self._buffers, error):
            where = why or f"{run.failed_at or type(self.model).__name__!r}: {error}"
            failed = f"apply: a run of the forward without data failed in {where}"
            return ShardError(f"{failed}\n{written}{self._loop_hint()}")
        if not why:
            return self._stopped(run, error)
        return ShardError(
            f"apply: a run of the forward without data, on whole weights, failed in {why}\nDoes the forward return on "
            "one rank with these inputs, and raise nothing of its own to leave early? Tensors that are no parameters "
            "or buffers must follow x.device, and control flow must not depend on values that depend on weights."
            f"{self._loop_hint()}"
        )

    def _stopped(self, run: Interpreter, error: Exception) -> Unserved:
        """What is said of a run with the sizes of a rank that failed."""
        path = run.failed_at or type(self.model).__name__
        reason = Failure(tuple(run.losses), run.failed_at, run.stuck, str(error) or type(error).__name__)
        why = f"with the sizes that one rank has over {over(self.plan)}, failed in {path!r}: {error}"
        why += f"{described(self.plan, reason)}{self._loop_hint()}"
        return Unserved(f"apply: a run of the forward without data, {why}", reason)

    def _fails_in(self, adjust: Adjustments, side: Side) -> str:
        """Where and why the forward cannot be run without data on one side; empty when it can."""
        alone = self._interpreter(side)
        try:
            self._left(adjust, alone)
        except Exception as error:
            return f"{alone.failed_at or type(self.model).__name__!r}: {error}"
        return ""

    def _loop_hint(self) -> str:
        if self.method in ("__call__", "forward"):
            return ""
        return (
            f" If '{self.method}' is a loop that calls the model until its values say so, name it 'generate' "
            f"(generate = {self.method}, in its class): apply(..., method='generate') runs such calls one by one, "
            "without gradients."
        )

    def _weight(self, run: Interpreter, name: str) -> Tensor:
        """A weight without data, in the shape that modules compute with, tagged by the axes that split it."""
        layout, sizes = self.plan.layouts[name], self.plan.axes
        keep = (*self.plan.roles.compute, *layout.kept)
        shapes = [leaf.local_shape(sizes, dict.fromkeys(sizes, 0), keep) for leaf in layout.leaves]
        dtype = self.plan.compute_dtypes[name]
        with _torch.outside_dispatch(), _torch.outside_functions(), outside_transforms():
            parts = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
            weight = compute_view(layout, parts).detach()
            whole = torch.empty(layout.shape, dtype=dtype, device="meta")
            weight = weight if weight.shape == whole.shape else Paired(weight, whole)
        weight.requires_grad_(layout.trainable and self._differentiates and has_derivatives(dtype))
        parts = weight_parts(self.plan, layout)
        sources = frozenset[str]() if parts else frozenset([f"parameter {name}"])
        empty = frozenset(parts).intersection(*(leaf.padded_axes for leaf in layout.leaves))
        run.mark(weight, Tag(parts, weight.requires_grad, sources, weight=True, empty=empty))
        _name_all(run.numbers, weight, f"weight {name}")
        return weight


# A call of a dropout module, by path and number: how many dims its input has, and what that is.
_Drop = tuple[str, int, int, Tag]
_Drops = list[_Drop] | None


class _WithoutData:
    """What modules ask for weights in a shape-only trace, in the place of a session."""

    def __init__(self, weight: Callable[[str], Tensor], buffers: dict[str, Tensor]) -> None:
        self.weight, self.buffers = weight, buffers
        self.made, self.varied = list[Any](), dict[str, Any]()  # which a session has
        self.not_in_tree = cache(partial(torch.empty_like, device="meta"))  # of a parameter that is not in the tree


def _grown(adjust: Adjustments, found: Adjustments) -> Adjustments | None:
    """What the next run goes by; None when this one has found nothing new."""
    for name in _GROWS:
        known = getattr(adjust, name)
        new = getattr(found, name) - known
        if name == "sums":  # the outer ones later: before what these sums meet asks for more
            new = {at for at in new if not any(is_in(path, at[0]) for path, _, _ in new)}
        if new:
            anew = {"sums": frozenset[Any]()} if name == "gather" else {}  # of what is whole there are none
            return replace(adjust, **anew, **{name: known | new})
    return None


def _is_compiled(module: nn.Module) -> bool:
    return _torch.compiler_of(module) is not None or _torch.compiler_of_wrapped(module) is not None


def _name_all(numbers: ValueNumbers | None, tree: Any, kind: str) -> None:
    """Say of every tensor of a tree that it is one of a kind, by its place."""
    for at, leaf in enumerate(pytree.tree_leaves(tree)):
        if isinstance(leaf, Tensor) and numbers is not None:
            numbers.name(leaf, kind, at)


def _not_in_one(run: Interpreter, path: str, moves: Around, inner: Forward, /, *args: Any, **kwargs: Any) -> Any:
    """A forward with what goes around it, but for one process."""
    if run.sides.at != "one":
        return moves(inner)(*args, **kwargs)
    with run.inside(path):
        return inner(*args, **kwargs)


def _decisions(decided: Sequence[Decision]) -> list[Problem]:
    """What is wrong with control flow that depends on sizes of a rank."""
    then = "and other values are made: its control flow depends on this rank's sizes"
    what = ((at, f"{at.line} decides by {at.rank!r}, which is {at.one!r} on one rank, {then}") for at in decided)
    return [Problem(f"in {at.path or '(the model)'!r}: {text}", "sizes", at=at.path) for at, text in what]


def _noting(run: Interpreter, axes: ComputeAxes, path: str, owns: bool, above: bool, drops: _Drops) -> Around:
    """Name the module in errors, and as the source of its output when it owns parameters; `above` others that do.

    The calls of one that drops something are noted in `drops`.
    """

    def pending(x: Any) -> set[str]:
        parts = run.tag(x).parts if isinstance(x, Tensor) else {}
        return {axis for axis, part in parts.items() if part.kind == "sum"}

    def around(inner: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if drops is not None:
                x, *_ = (*args, *kwargs.values())
                drops.append((path, sum(drop[0] == path for drop in drops), x.dim(), run.tag(x)))
            given = {axis for leaf in pytree.tree_leaves((args, kwargs)) for axis in pending(leaf)}  # made elsewhere
            with run.inside(path):
                out = inner(*args, **kwargs)
            for at, leaf in enumerate(pytree.tree_leaves(out)) if owns or above else ():
                run.found |= Adjustments(sums={(path, at, axis) for axis in pending(leaf) - given})
            apart = not run.tag(out).parts and beside.acts_on_gradient(out) if isinstance(out, Tensor) else False
            return axes.note_source(out, f"module {path}") if owns or apart else out

        return forward

    return around


def _split_dims(ndim: int, tag: Tag) -> tuple[str, ...] | None:
    """The axis that splits each dim of what is dropped, "" for none; None when a rank has no one piece of it."""
    dims = [""] * ndim
    for axis, part in tag.parts.items():
        if part.kind == "same":
            continue
        if not part.is_even or dims[part.dim]:
            return None
        dims[part.dim] = axis
    return tuple(dims)


def _with_groups(groups: frozenset[tuple[str, str]]) -> str:
    """What a run took for granted that failed, of keys of fewer heads than ranks."""
    source, axis = min(groups)
    return (
        f"That is with one part of {source.removeprefix('module ')!r} for each rank of '{axis}', since its rule has "
        "fewer parts than ranks. Attention may repeat keys, or group queries, in another way where a rank has few of "
        "them. For a model of transformers attn_implementation='eager' repeats keys in one way, and so does generation "
        "without padding or a static cache; or take a smaller axis."
    )
