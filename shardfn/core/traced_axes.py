"""What forwards do between the parts of ranks, in a run without data that follows what these parts are. Layer 4."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.core.compute_axes import Adjustments, ComputeAxes
from shardfn.core.engine.paired import local_of
from shardfn.core.engine.tags import BY_ACTS
from shardfn.core.engine.variance import Variance
from shardfn.core.mesh import MeshSpec
from shardfn.core.parts import Part

Scatters = Callable[[str, str, Tensor], int | None]  # (module, axis, summand) -> dim


class TracedAxes(ComputeAxes):
    """Tells `Variance` what the collectives did, and refuses values that are not what they need."""

    follows = True

    def __init__(
        self, mesh: DeviceMesh | MeshSpec, sizes: Mapping[str, int], coords: Mapping[str, int], variance: Variance
    ) -> None:
        super().__init__(mesh, sizes, coords)
        self._variance, self._part = variance, variance.part
        self.scatters: Scatters | None = None  # decides which sums are scattered
        self.bytes_moved = 0  # received by each rank in a forward and a backward
        self._not_ready: dict[tuple[str, str], list[Tensor]] = {}  # by module and axis: inputs that came unvaried

    def entered(self, x: Tensor, axis: str, path: str, ready: bool) -> Tensor:
        """As in a real call; an input that is split already is refused."""
        part = self._part(x, axis)
        if part is None or part.kind == "same":
            return self.varied_once(x, axis, path, ready)
        self._variance.refuse(
            f"an input that is already split over '{axis}' meets a weight that splits its output over it"
            + (f" ({part.why})" if part.why else ""),
            "rules",
            x,
        )
        return x

    def varied_once(self, x: Tensor, axis: str, reader: str, ready: bool) -> Tensor:
        """Whether it varied before is seen here, and noted."""
        if self._part(x, axis) is None:
            self._not_ready.setdefault((reader, axis), []).append(x)
            return self.vary(x, axis)
        self._variance.found |= Adjustments(ready={(reader, axis)})
        return x

    def own(self, x: Tensor, axis: str, path: str, wanted: Part, ready: bool) -> Tensor:
        """As in a real call; an input that is neither whole nor the wanted part is refused."""
        part = self._part(x, axis)
        size = sum(outer * inner for outer, inner in wanted.runs)
        if x.shape[wanted.dim] == size * self.sizes[axis]:
            if part is None:
                self._not_ready.setdefault((path, axis), []).append(x)
            elif part.kind == "same":
                self._variance.found |= Adjustments(ready={(path, axis)})
            else:  # a sum, maybe, that the next run has added up
                self._variance.refuse(_not_its_part(x, axis, part, wanted), "rules", x)
            return self._taken(x, axis, wanted, ready or part is not None)
        if x.shape[wanted.dim] == size:
            self.require(x, axis, wanted)
        return x

    def agree(self) -> None:
        """The run ends: all calls of a module get inputs that were varied before, or none does."""
        for (path, axis), inputs in self._not_ready.items():
            for x in inputs if (path, axis) in self._variance.found.ready else ():
                self._variance.require_varied(x, axis, path)

    def leaf_total(self, leaves: list[Any], at: int, axis: str, path: str, dim: int | None) -> Any:
        """As in a real call; a leaf that is no sum in this call is refused."""
        x = leaves[at] if at < len(leaves) else None
        if not isinstance(x, Tensor) or (part := self._part(x, axis)) is None or part.kind in ("same", "split"):
            self._variance.refuse(
                f"output {at} is a sum over '{axis}' that is still pending in one call, and in another one it is not: "
                f"write sf.collectives.psum(x, mesh, '{axis}') where it is one",
                "gradient",
            )
        elif part.kind == "lost":
            self._variance.refuse(
                f"output {at} is a sum over '{axis}' in one call, and in another one it cannot be told: {part.why}",
                "whole",
                x,
            )
        return super().leaf_total(leaves, at, axis, path, dim)

    def total(self, x: Tensor, axis: str, path: str, dim: int | None) -> Tensor:
        """As in a real call; what is scattered is decided here."""
        return super().total(x, axis, path, dim if self.scatters is None else self.scatters(path, axis, x))

    # -- what was done ------------------------------------------------------------------------------------------------

    def hidden(self) -> AbstractContextManager[Any]:
        """Operations within are not the model's own."""
        return self._variance.hidden()

    @contextmanager
    def seen_from(self, sources: Mapping[str, Any], but: Collection[str]) -> Iterator[None]:
        """As in a real call."""
        variance, before = self._variance, list[tuple[Tensor, frozenset[str]]]()
        for source, x in sources.items():
            if isinstance(x, Tensor) and x.requires_grad and not variance.tag(x).sources & set(but):
                before.append((x, variance.tag(x).sources))
                self.note_source(x, source)
        try:
            yield
        finally:
            for x, own in reversed(before):
                variance.mark(x, replace(variance.tag(x), sources=own))

    def note_part(self, x: Tensor, axis: str, part: Part | None, of: Tensor | None = None) -> Tensor:
        """What x is over an axis; one process has `of` in its place."""
        tag = self._variance.tag(x)
        parts = {a: p for a, p in tag.parts.items() if a != axis} | ({axis: part} if part is not None else {})
        self._variance.mark(x, replace(tag, parts=parts))
        return x if of is None else self._variance.beside(x, of)

    def note_last(self, x: Tensor, parts: Mapping[str, Part]) -> None:
        """What the last dim of x is over axes: sizes of 1 leave that open."""
        for axis, part in parts.items():
            self.note_part(x, axis, part.at(x.dim() - 1))

    def note_source(self, out: Any, source: str, split_by: str | None = None) -> Any:
        """Where a module's output comes from."""
        if isinstance(out, Tensor):
            tag = self._variance.tag(out)
            added = frozenset([split_by]) if split_by is not None else frozenset()
            self._variance.mark(out, replace(tag, sources=frozenset([source]), split_by=tag.split_by | added))
        return out

    def note_acts(self, x: Tensor, path: str) -> Tensor:
        """An entry of `Policy.acts` splits x."""
        self._variance.mark(x, replace(self._variance.tag(x), split_by=frozenset([f"{BY_ACTS}{path}"])))
        return x

    def require(self, x: Tensor, axis: str, wanted: Part) -> None:
        """An x that is something else over an axis is refused."""
        part = self._part(x, axis)
        if part != wanted:
            self._variance.refuse(_not_its_part(x, axis, part, wanted), "rules", x)

    def require_whole(self, x: Tensor, axis: str, what: str) -> None:
        """An x that is not the same on all ranks of an axis is refused."""
        part = self._part(x, axis)
        if part is not None and part.kind != "same":
            why = f" ({part.why})" if part.why else ""
            self._variance.refuse(f"{what} differ over '{axis}', as a {part.kind} value{why}", "whole", x)

    def received(self, count: int) -> None:
        """Bytes that a rank receives in a forward and its backward."""
        self.bytes_moved += count

    def _count(self, x: Tensor, axis: str, parts: int) -> None:
        size = self.sizes[axis]
        own = local_of(x)
        self.bytes_moved += parts * (size - 1) * own.numel() * own.element_size() // size


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
