"""Which values differ between the ranks of a compute axis, found by a run without data. Layer 3.

[Note: varying and invariant]
Along a compute axis a value is *varying* when each rank has another part of it, *invariant* when all have the same.
The derived collectives keep both sides consistent as long as no gradient flows from a varying value into an invariant
one without a `pvary` between them: `q_norm` (a scale over head_dim, replicated) applied to tp-local heads, or keys that
are replicated because their heads do not divide. There the gradient on each rank is only a part of the sum. JAX inserts
the missing `pvary` from its types; here the forward runs once on meta tensors under `Variance`, which follows the types
through every operation and says where it is missing.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from shardfn._torch import TorchDispatchMode, base_of, pytree


@dataclass(frozen=True)
class Tag:
    """What is known about one tensor.

    `axes`: the axes it varies over. `wants`: whether it depends on what is differentiated, which its `requires_grad`
    does not say inside an autograd.Function or a checkpoint that will recompute. `source`: the one parameter or module
    output that it is made of (by operations whose other inputs need no gradient). `split_by`: the column-parallel
    modules whose split it carries.
    """

    axes: frozenset[str] = frozenset()
    wants: bool = False
    source: str | None = None
    split_by: frozenset[str] = frozenset()


@dataclass
class Findings:
    """What a run without data found: where a `pvary` is missing, and which outputs leave `apply` split."""

    vary: set[tuple[str, str]] = field(default_factory=set)  # (source, axis)
    mixed: list[str] = field(default_factory=list)  # problems that no single source explains
    gather: set[str] = field(default_factory=set)  # column-parallel modules whose output leaves `apply`


class Variance(TorchDispatchMode):
    """Follows tags through the operations of a forward."""

    def __init__(self, axes: Collection[str]) -> None:
        """`axes` are those over which values may be split."""
        super().__init__()
        self._axes = axes
        self._tags = WeakIdKeyDictionary()
        self._path: list[str] = []
        self._failed_at: str | None = None
        self.findings = Findings()

    def tag(self, tensor: Tensor) -> Tag:
        """What is known; a tensor never seen is invariant."""
        return self._tags[tensor] if tensor in self._tags else Tag()

    def mark(self, tensor: Tensor, tag: Tag) -> None:
        """Say what a collective or a module made of a tensor."""
        self._tags[tensor] = tag

    def note_collective(self, varies: bool, x: Tensor, out: Tensor, axis: str) -> None:
        """A collective over `axis` made `out` of x; its result varies, or is the same on all ranks."""
        if axis in self._axes:
            known = self.tag(x)
            axes = known.axes | {axis} if varies else known.axes - {axis}
            wants = known.wants or x.requires_grad
            self.mark(out, Tag(axes, wants, None, known.split_by if axes else frozenset()))

    def refuse(self, why: str) -> None:
        """Note a problem at the module that is running."""
        self.findings.mixed.append(f"in {self._path[-1] if self._path else '(the model)'!r}: {why}")

    @contextmanager
    def inside(self, path: str) -> Iterator[None]:
        """Within the forward of a module; remembers the deepest one that raised."""
        self._path.append(path)
        try:
            yield
        except Exception:
            self._failed_at = self._failed_at or path
            raise
        finally:
            self._path.pop()

    @property
    def failed_at(self) -> str:
        """The path of the module in which the run failed; empty for the model itself."""
        return self._failed_at or ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if inputs:
            tag = self._joined(inputs, str(func))
            for leaf in pytree.tree_leaves(out):
                if isinstance(leaf, Tensor):
                    self._tags[leaf] = tag
                    self._tag_base(leaf, tag)
        return out

    def _tag_base(self, written: Tensor, tag: Tag) -> None:
        """What is written into a view is in the tensor that it views."""
        base = base_of(written)
        if base is not None and tag.axes - self.tag(base).axes:
            known = self.tag(base)
            self._tags[base] = Tag(known.axes | tag.axes, known.wants or tag.wants, None, known.split_by | tag.split_by)

    def _joined(self, inputs: list[Tensor], operation: str) -> Tag:
        tags = [(tensor, self.tag(tensor)) for tensor in inputs]
        axes = frozenset().union(*(tag.axes for _, tag in tags))
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
        return Tag(axes, wants, sources.pop() if len(sources) == 1 else None, split_by)


def check_outputs(variance: Variance, output: Any) -> None:
    """Note the column-parallel modules whose split would leave `apply`."""
    for leaf in _tensors(output, depth=4):
        if isinstance(leaf, Tensor) and variance.tag(leaf).axes:
            tag = variance.tag(leaf)
            variance.findings.gather |= tag.split_by
            if not tag.split_by:
                variance.findings.mixed.append(
                    f"an output of shape {tuple(leaf.shape)} is split over {sorted(tag.axes)}"
                )


def _tensors(tree: Any, depth: int) -> Iterator[Tensor]:
    """Every tensor of a tree, and of the objects in it that torch does not know as containers."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and hasattr(leaf, "__dict__") and not isinstance(leaf, type | Callable):
            yield from _tensors(dict(vars(leaf)), depth - 1)


def to_meta(tree: Any) -> Any:
    """A tree with every tensor on the meta device, without data; gradients are asked for as before."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        # Not `empty_like`, whose result would belong to the transform that `leaf` belongs to.
        blank = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
        return blank.requires_grad_(leaf.requires_grad)

    return pytree.tree_map(move, tree)
