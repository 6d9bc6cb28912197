"""What a shape-only trace follows between modules: what collectives make of parts, and which steps it takes.

`TracedAxes` has what forwards do between the parts of ranks. `StepFinder` finds where `Policy.acts` needs values sliced
or gathered, see [Note: steps] in wiring.py.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardfn.binding import Around
from shardfn.layout import BY_ACTS, OUT_DIM, MeshSpec, Part, Plan, Tag, class_name
from shardfn.notation import ShardError, parse
from shardfn.parallel import Adjustments, Amendment, ComputeAxes, Step, wiring
from shardfn.random import axes_of_dims
from shardfn.trace.interpreter import Interpreter
from shardfn.trace.paired_sizes import both, local_of, of_side

_OF_A_CALL = ("inputs", "outputs", "scattered", "in_shares", "may_scatter")  # what is decided anew in each
_LISTS = {class_name(nn.ModuleList), class_name(nn.ModuleDict)}  # which are not called


class TracedAxes(ComputeAxes):
    """Tells `Interpreter` what the collectives did, and refuses values that are not what they need."""

    follows = True

    def __init__(
        self, mesh: DeviceMesh | MeshSpec, sizes: Mapping[str, int], coords: Mapping[str, int], run: Interpreter
    ) -> None:
        super().__init__(mesh, sizes, coords)
        self._run, self._part = run, run.part
        self.bytes_moved = 0  # received by each rank in a forward and a backward
        self._not_ready: dict[tuple[str, str], list[Tensor]] = {}  # by module and axis: inputs that came unvaried

    def entered(self, x: Tensor, axis: str, reader: str) -> Tensor:
        """As in a real call; an input that is split already is refused."""
        part = self._part(x, axis)
        if part is None or part.kind == "same":
            return self.varied_once(x, axis, reader)
        why = f" ({part.why})" if part.why else ""
        what = f"an input that is already split over '{axis}' meets a weight that splits its output over it{why}"
        self._run.refuse(what, "rules", x)
        return x

    def varied_once(self, x: Tensor, axis: str, reader: str) -> Tensor:
        """Whether it varied before is seen here, and noted."""
        if self._part(x, axis) is None:
            self._not_ready.setdefault((reader, axis), []).append(x)
            return self.vary(x, axis)
        self._run.found |= Adjustments(ready={(reader, axis)})
        return x

    def own_part(self, x: Tensor, axis: str, path: str, wanted: Part) -> Tensor:
        """As in a real call; an input that is neither whole nor the wanted part is refused."""
        part = self._part(x, axis)
        size = sum(outer * inner for outer, inner in wanted.runs)
        if x.shape[wanted.dim] == size * self.sizes[axis]:
            if part is None:
                self._not_ready.setdefault((path, axis), []).append(x)
            elif part.kind == "same":
                self._run.found |= Adjustments(ready={(path, axis)})
            else:  # a sum, maybe, that the next run has added up
                self._run.refuse(_not_its_part(x, axis, part, wanted), "rules", x)
            return self._taken(x, axis, wanted, part is not None or (path, axis) in self.adjust.ready)
        if x.shape[wanted.dim] == size:
            self.require(x, axis, wanted)
        return x

    def amended(self, x: Any, amendment: Amendment) -> Any:
        """As in a real call; a value that is something else than when this was found is refused."""
        at, axis = self._run.sides.at, amendment.axis
        if at == "one":
            return x
        if not isinstance(x, Tensor):
            rank = super().amended(of_side(x, "rank"), amendment)
            return both(rank, of_side(x, "one")) if at == "both" else rank
        part = self._part(x, axis)
        if (None if part is None else part.kind) != {"sum": "sum", "own": "same"}.get(amendment.how):
            self._run.refuse(f"an argument of a call of torch is something else over '{axis}' each time", "rules", x)
        return super().amended(x, amendment)

    def agree(self) -> None:
        """The run ends: all calls of a module get inputs that were varied before, or none does."""
        for (path, axis), inputs in self._not_ready.items():
            for x in inputs if (path, axis) in self._run.found.ready else ():
                self._run.require_varied(x, axis, path)

    def leaf_total(self, leaves: list[Any], at: int, axis: str, path: str) -> Any:
        """As in a real call; a leaf that is no sum in this call is refused."""
        x = leaves[at] if at < len(leaves) else None
        if not isinstance(x, Tensor) or (part := self._part(x, axis)) is None or part.kind in ("same", "split"):
            what = f"output {at} is a sum over '{axis}' that is still pending in one call, and in another one it is not"
            self._run.refuse(f"{what}: write sf.collectives.psum(x, mesh, '{axis}') where it is one", "gradient")
        elif part.kind == "lost":
            what = f"output {at} is a sum over '{axis}' in one call, and in another one it cannot be told: {part.why}"
            self._run.refuse(what, "whole", x)
        return super().leaf_total(leaves, at, axis, path)

    # -- what was done ------------------------------------------------------------------------------------------------

    def on_each_side(self, of_rank: Callable[..., Any], of_one: Callable[..., Any], *args: Any) -> Any:
        """As in a real call."""
        return self._run.on_each_side(of_rank, of_one, *args)

    def hidden(self) -> AbstractContextManager[Any]:
        """Operations within are not the model's own."""
        return self._run.hidden()

    @contextmanager
    def seen_from(self, sources: Mapping[str, Any], but: Collection[str]) -> Iterator[None]:
        """As in a real call."""
        run, before = self._run, list[tuple[Tensor, frozenset[str]]]()
        for source, x in sources.items():
            if isinstance(x, Tensor) and x.requires_grad and not run.tag(x).sources & set(but):
                before.append((x, run.tag(x).sources))
                self.note_source(x, source)
        try:
            yield
        finally:
            for x, known in reversed(before):
                run.mark(x, replace(run.tag(x), sources=known))

    def note_part(self, x: Tensor, axis: str, part: Part | None, of: Tensor | None = None) -> Tensor:
        """What x is over an axis; one process has `of` in its place."""
        tag = self._run.tag(x)
        parts = {a: p for a, p in tag.parts.items() if a != axis} | ({axis: part} if part is not None else {})
        self._run.mark(x, replace(tag, parts=parts))
        return x if of is None else self._run.beside(x, of)

    def note_source(self, out: Any, source: str, split_by: str | None = None) -> Any:
        """Where a module's output comes from."""
        if isinstance(out, Tensor):
            tag = self._run.tag(out)
            added = frozenset([split_by]) if split_by is not None else frozenset()
            self._run.mark(out, replace(tag, sources=frozenset([source]), split_by=tag.split_by | added))
        return out

    def note_acts(self, x: Tensor, path: str) -> Tensor:
        """An entry of `Policy.acts` splits x."""
        self._run.mark(x, replace(self._run.tag(x), split_by=frozenset([f"{BY_ACTS}{path}"])))
        return x

    def require(self, x: Tensor, axis: str, wanted: Part) -> None:
        """An x that is something else over an axis is refused."""
        part = self._part(x, axis)
        if part != wanted:
            self._run.refuse(_not_its_part(x, axis, part, wanted), "rules", x)

    def require_whole(self, x: Tensor, axis: str, what: str) -> None:
        """An x that is not the same on all ranks of an axis is refused."""
        part = self._part(x, axis)
        if part is not None and part.kind != "same":
            why = f" ({part.why})" if part.why else ""
            self._run.refuse(f"{what} differ over '{axis}', as a {part.kind} value{why}", "whole", x)

    def received(self, count: int) -> None:
        """Bytes that a rank receives in a forward and its backward."""
        self.bytes_moved += count

    def _count(self, x: Tensor, axis: str, parts: int) -> None:
        size, local = self.sizes[axis], local_of(x)
        self.bytes_moved += parts * (size - 1) * local.numel() * local.element_size() // size


class StepFinder:
    """Decides, in a shape-only trace, which steps the inputs and outputs of modules need; see [Note: steps]."""

    def __init__(self, plan: Plan, run: Interpreter, axes: TracedAxes, adjust: Adjustments, several: bool) -> None:
        """`several`: whether more inputs of a module in acts than its first one may be split."""
        self._plan, self._run, self._axes, self._adjust, self._several = (plan, run, axes, adjust, several)
        self._part, self._rules, self._wholes = run.part, wiring.boundaries(plan), wiring.made_whole(plan)
        if self._rules.keys() <= adjust.entries:  # all of them compute with whole values: nothing is split
            self._rules = {}
        if self._rules:
            axes.scatters, run.sides.needs_whole = self._scatters, self.needs_whole
        self._split, self._linears = self._split_modules()
        above = {path.rpartition(".")[0] for path in self._split if self._linears.get(path) != "row"}
        self._entries = above - self._rules.keys() | self._split | adjust.entries
        # The modules that are running, and the sizes of what each has gathered, by axis and dim.
        self._calls: list[tuple[str, dict[tuple[str, int], int]]] = []
        self._decided: dict[tuple[str, str], frozenset[Step]] = {}
        self._beside: set[str] = set()  # modules of acts with whole inputs as long as the one that is split
        self._sources: dict[str, set[str]] = {}  # where `acts` splits what modules are given
        self._last = ""  # the last module of `acts` that has ended

    def _split_modules(self) -> tuple[set[str], dict[str, str]]:
        """Those that compute with split weights, but for tables; of linears, whether they are row-parallel only."""
        plan, split, linears = self._plan, set[str](), {}
        for module in plan.info.modules:
            layouts = [plan.layouts[name] for _, name in module.params]
            if "embedding" in module.kind or not any(plan.compute_axes(layout) for layout in layouts):
                continue
            split.add(module.name)
            if module.kind in OUT_DIM:
                weight = plan.weight_of(module)
                linears[module.name] = "column" if plan.compute_axes(weight, OUT_DIM[module.kind]) else "row"
        return split, linears

    def begin(self) -> None:
        """Another call begins: those before it filled caches, and what they decided is not for this one."""
        self._decided.clear()
        self._run.found = replace(self._run.found, **dict.fromkeys(_OF_A_CALL, frozenset[Any]()))

    def around(self) -> dict[str, Around]:
        """Module path -> what finds and takes its steps."""
        paths = self._wholes | (self._entries | self._rules.keys() if self._rules else set())
        both = self._inputs, self._outputs
        return {path: wiring.stepping(self._axes, *(partial(self._of_rank, of, path) for of in both)) for path in paths}

    def _of_rank(self, steps: Callable[[str, list[Any]], list[Step]], path: str, leaves: list[Any]) -> list[Step]:
        with self._run.hidden():  # sizes are those of a rank
            return steps(path, leaves)

    @property
    def _region(self) -> str | None:
        """The entry of the innermost module of acts that is running."""
        inside = [path for path, _ in self._calls if path in self._rules and path not in self._adjust.entries]
        return self._rules[inside[-1]] if inside else None

    def _inputs(self, path: str, leaves: list[Any]) -> list[Step]:
        asked = self._asked(path, leaves) if path not in self._adjust.entries else []  # it computes with whole values
        more = self._others(asked, leaves)
        if more:
            self._beside.add(path)
        asked = asked + more if path in self._adjust.several else asked
        steps = [step for at, axis, dim in asked if (step := self._slice(path, at, axis, dim, leaves))]
        sizes: dict[tuple[str, int], int] = {}
        self._sources.setdefault(path, set()).update(*(self._run.tag(x).by_acts for _, x in _floats(leaves)))
        if path in self._entries:
            # What is used in shares only: by a linear, or as a run before has seen.
            how = "gather" if path in self._linears or path in self._adjust.in_shares else "join"
            for at, x in _floats(leaves):
                tag = self._run.tag(x)
                for axis, part in tag.parts.items() if tag.by_acts else ():
                    if part.split and not part.is_even:  # samples and positions in one dim: no gather has them in order
                        self.needs_whole(tag.by_acts, path)
                    elif part.split:
                        steps.append(Step(path, at, axis, part.dim, how))
                        sizes[axis, part.dim] = x.shape[part.dim] * self._plan.axes[axis]
        self._calls.append((path, sizes))
        self._note("inputs", path, steps)
        return steps

    def _outputs(self, path: str, leaves: list[Any]) -> list[Step]:
        _, sizes = self._calls.pop()
        steps: list[Step] = []
        if path in self._rules:
            steps = self._ending(path, leaves)
            self._last = path
        elif path not in self._linears and self._region is not None:
            for at, x in _floats(leaves):
                for (axis, dim), size in sizes.items():
                    if x.dim() > dim and x.shape[dim] == size and (step := self._slice(path, at, axis, dim, leaves)):
                        steps.append(step)
                        self._may_scatter(path, x, axis, dim)
        if path in self._wholes:
            split = ((at, axis, tag) for at, x in _floats(leaves) for tag in [self._run.tag(x)] for axis in tag.parts)
            steps += [Step(path, at, axis, t.parts[axis].dim, "join") for at, axis, t in split if t.can_join(axis)]
        self._note("outputs", path, steps)
        return steps

    def _ending(self, path: str, leaves: list[Any]) -> list[Step]:
        """What a module of an entry gives: its first output, split, or whole when something after it needs that."""
        steps = []
        for at, axis, dim in self._asked(path, leaves):
            part = self._part(leaves[at], axis)
            if path in self._adjust.whole:
                steps += [Step(path, at, axis, dim, "join")] if part is not None and part.split else []
            elif part is not None and part.split:
                known = self._run.tag(leaves[at])
                self._run.mark(leaves[at], Tag(known.parts, known.wants, split_by=frozenset([f"{BY_ACTS}{path}"])))
            elif step := self._slice(path, at, axis, dim, leaves):
                steps.append(step)
        return steps

    def _asked(self, path: str, leaves: list[Any]) -> list[tuple[int, str, int]]:
        """(leaf, axis, dim) of the first leaf that the entry for a module may be about."""
        if path not in self._rules:
            return []
        optional = {axis for f in parse(self._rules[path]).factors if f.optional for axis in f.axes}
        for at, x in _floats(leaves):
            if (split := self._split_dims(self._rules[path], x)) is not None:
                pairs = [(a, dim) for dim, axes in enumerate(split) for a in axes if wiring.is_split(self._plan, a)]
                return [(at, a, dim) for a, dim in pairs if not (a in optional and self._uneven(x, a, dim))]
        return []

    def _others(self, asked: list[tuple[int, str, int]], leaves: list[Any]) -> list[tuple[int, str, int]]:
        """(leaf, axis, dim) of the other leaves that are whole, and as long as the one that is asked for is or was."""
        more = []
        for first, axis, dim in asked:
            split = self._part(leaves[first], axis)
            size = leaves[first].shape[dim] * (self._plan.axes[axis] if split is not None and split.split else 1)
            for at, x in enumerate(leaves):
                if at != first and isinstance(x, Tensor) and (x.is_floating_point() or x.dtype == torch.bool):
                    fits = x.dim() > dim and x.shape[dim] == size and self._part(x, axis) is None
                    more += [(at, axis, dim)] if fits else []
        return more

    def _split_dims(self, rule: str, x: Tensor) -> list[tuple[str, ...]] | None:
        """The axes that split each dim of x by an entry; None when x has other dims than it is about."""
        spec = parse(rule)
        most = any(dim.ellipsis for dim in spec.dims)
        if not (x.dim() >= len(spec.dims) - 1 if most else x.dim() == len(spec.dims)):
            return None
        split = axes_of_dims(spec, x.dim(), dict(self._plan.axes))
        features = split[-1:]  # of "b s@tp ..." when there are no other dims
        return None if any(wiring.is_split(self._plan, axis) for axes in features for axis in axes) else split

    def _uneven(self, x: Tensor, axis: str, dim: int) -> bool:
        part = self._part(x, axis)
        return (part is None or part.kind == "same") and x.shape[dim] % self._plan.axes[axis] != 0

    def _slice(self, path: str, at: int, axis: str, dim: int, leaves: list[Any]) -> Step | None:
        """This rank's piece of a leaf that is whole.

        Raises:
            ShardError: there is no equal piece for each rank.
        """
        part, size, ranks = self._part(leaves[at], axis), leaves[at].shape[dim], self._plan.axes[axis]
        if part is not None and part.kind != "same":
            return None
        if size % ranks:
            near = self._rules.get(path) or self._region or next(iter(self._rules.values()))
            why = f"{size} over {axis}={ranks}, {size} % {ranks} = {size % ranks}"
            instead = f"Pad the batch to a multiple, or write '@{axis}?' to leave such inputs whole."
            raise ShardError(f"apply: Policy.acts splits dim {dim} at {path!r} by '{near}', {why}. {instead}")
        return Step(path, at, axis, dim, "slice" if part is None else "own")

    def _may_scatter(self, path: str, x: Tensor, axis: str, dim: int) -> None:
        """Note what a second run may try."""
        source = (self._run.tag(x).source or "").removeprefix("module ")
        if source.rpartition(".")[0] == path and source in self._linears:
            self._run.found |= Adjustments(may_scatter={(source, axis, dim)})

    def _scatters(self, path: str, axis: str, x: Tensor) -> int | None:
        """Over which dim the sum that a module makes is scattered, if it is."""
        x, known = local_of(x), [dim for at, over, dim in self._adjust.may_scatter if (at, over) == (path, axis)]
        if path in self._adjust.whole:
            return None
        inside = any(sizes for running, sizes in self._calls if running != path)
        rule = self._rules.get(path) or (self._region if not inside else None)
        if not known and rule is not None:
            split = self._split_dims(rule, x) or []
            ranks = self._plan.axes[axis]
            known = [dim for dim, axes in enumerate(split) if axis in axes and x.shape[dim] % ranks == 0]
        if not known:
            return None
        self._run.found |= Adjustments(scattered={(path, axis, known[0])})
        return known[0]

    def needs_whole(self, sources: Collection[str], path: str) -> None:
        """Note that the module at `path` cannot compute with pieces of values that `acts` splits at `sources`.

        Only the first one of a run: what comes after it is made of what it has lost.
        """
        if self._has_news():
            return
        region = next((rule for rule in self._rules if path == rule or path.startswith(f"{rule}.")), None)
        if region is None:
            linears = {source.rpartition(".")[2] for source in sources if source in self._linears}
            alike = {rule for rule in self._rules if rule in self._linears and rule.rpartition(".")[2] in linears}
            self._run.found |= Adjustments(whole=alike | set(sources))
            return
        same = self._structure(region)  # it will be found in each layer alike
        alike = {rule for rule in self._rules if self._structure(rule) == same}
        child = self._child(region, path)
        if not child and self._several and region in self._beside and not alike <= self._adjust.several:
            self._run.found |= Adjustments(several=alike)
        elif new := {f"{rule}{child}" for rule in alike} - self._adjust.entries or alike - self._adjust.entries:
            self._run.found |= Adjustments(entries=new)
        else:
            self._run.found |= Adjustments(whole=set(sources))

    def _child(self, region: str, path: str) -> str:
        """The outermost module within that of an entry that leads to a path, and is called itself: no mere list."""
        names = path[len(region) :].split(".")
        for end in range(2, len(names)):
            child = ".".join(names[:end])
            module = self._plan.info.module(f"{region}{child}")
            if module is None or not _LISTS.intersection(module.classes):
                return child
        return ".".join(names)

    def _structure(self, rule: str) -> tuple[tuple[str, str], ...]:
        """The classes of the modules of an entry, by their paths in it."""
        modules = [m for m in self._plan.info.modules if m.name == rule or m.name.startswith(f"{rule}.")]
        return tuple((module.name[len(rule) :], module.classes[0]) for module in modules)

    def _has_news(self) -> bool:
        """Whether another run has more to leave whole than this one."""
        found, known = self._run.found, self._adjust
        return not (found.entries <= known.entries and found.whole <= known.whole and found.several <= known.several)

    def failed(self, path: str) -> bool:
        """The forward of a module failed; whether another run may do better."""
        if self._rules and (any(self._decided.values()) or self._run.found.scattered):
            self.needs_whole([self._last], path)
            self.needs_whole(self._rules, path)  # if that was known
        return self._has_news()

    def _note(self, side: str, path: str, steps: list[Step]) -> None:
        """Every call of a module takes the same steps: what only some get split is made whole where it comes from."""
        taken = frozenset(steps)
        if self._decided.setdefault((side, path), taken) != taken:
            self._run.refuse(
                f"{path!r} is called with values that Policy.acts splits, and with whole ones: its {side} cannot be "
                "both; take the module out of acts, or call another one"
            )
            self._not_both(path)
        self._run.found |= Adjustments(inputs=taken) if side == "inputs" else Adjustments(outputs=taken)
        if side == "inputs" and any(step.how == "join" for step in steps):
            children = {other for other in self._split if other.rpartition(".")[0] == path}
            if children and children <= self._linears.keys() and path not in self._split:
                self._run.found |= Adjustments(in_shares={path})

    def _not_both(self, path: str) -> None:
        """Note what makes the calls of a module alike: whole outputs of what they come from, then whole inputs."""
        sources = self._sources.get(path, set())
        if path not in self._rules:
            self.needs_whole(sources, path)
        elif not self._has_news():
            more = sources - self._adjust.whole
            self._run.found |= Adjustments(whole=more) if more else Adjustments(whole={path}, entries={path})


def _floats(leaves: list[Any]) -> list[tuple[int, Tensor]]:
    return [(at, x) for at, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point()]


def _not_its_part(x: Tensor, axis: str, part: Part | None, wanted: Part) -> str:
    """Why an input of the right size is not what a row-parallel weight needs."""
    if part is None:
        size = x.shape[wanted.dim]
        return f"its input of {size} features is the same on all ranks of '{axis}', and its weight is split"
    if part.kind == "lost":
        return f"it cannot be told which part over '{axis}' its input is: {part.why}"
    if part.kind == "sum":
        return f"its input is a sum over '{axis}' that is still pending"
    return (
        f"its input has dim {part.dim} split over '{axis}' in pieces {part.runs}, and its weight needs dim "
        f"{wanted.dim} in {wanted.runs}"
    )
