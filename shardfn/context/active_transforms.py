"""What is under way: functions under `vmap`, losses that run to be differentiated, a recording by `jit`.

A graph is walked where it is asked about only: a node costs half a microsecond.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardfn import _torch
from shardfn.notation import ShardError

T = TypeVar("T")
_AXES: ContextVar[frozenset[str]] = ContextVar("axes", default=frozenset())


@contextmanager
def holding(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Within it the variable has this value; afterwards it has the one that it had before."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def having(*objects: object, **values: Any) -> Iterator[None]:
    """Within it these attributes of the objects have these values; afterwards those that they had before."""
    before = [(one, name, getattr(one, name)) for one in objects for name in values]
    for one, name, _ in before:
        setattr(one, name, values[name])
    try:
        yield
    finally:
        for one, name, value in before:
            setattr(one, name, value)


# The mesh axes over which samples or members lie that the `vmap`s around map over.
mapped_axes: Callable[[], frozenset[str]] = _AXES.get


def mapped_over(axes: Iterable[str]) -> AbstractContextManager[None]:
    """Within it a function runs on one of what lies on `axes`."""
    return holding(_AXES, _AXES.get() | set(axes))


# -- losses that run to be differentiated ------------------------------------------------------------------------------

requires_grad: Callable[[Tensor], bool] = attrgetter("requires_grad")  # whether anybody differentiates by a tensor


def leaves_requiring_grad(trees: Sequence[Any]) -> list[Tensor]:
    """What a differentiation is with respect to: of trees of shards, and of tensors."""
    flat = [leaf for tree in trees for leaf in ([tree] if isinstance(tree, Tensor) else tree.values())]
    return [leaf for leaf in flat if leaf.requires_grad]


class Differentiation:
    """One call of a loss, which is given `trees`; those of their leaves that are not in `others` were made for it."""

    def __init__(self, trees: Sequence[Any], others: Sequence[Any]) -> None:
        self.trees, self._others = trees, others
        self.around = _UNDER_WAY.get()  # those of whose losses it is a part, outermost first
        self.meets_others = False  # a tree was used that is made of what somebody outside asks for
        self.has_forward_mode = False  # a `jvp` or `hvp` is a part of the loss
        self.used: Any = None  # the first tree that the loss computes with
        self._inner: list[Tensor] = []  # leaves that were made for differentiations inside
        self._shared: list[tuple[Any, str, str]] = []  # node, axis and name of collectives whose result ranks share

    @cached_property
    def wanted(self) -> set[Any]:
        """What gradients are asked for of: ids of leaves, and the nodes that made leaves which are made of others."""
        return {id(leaf) if leaf.grad_fn is None else leaf.grad_fn for leaf in leaves_requiring_grad(self.trees)}

    @cached_property
    def _fresh(self) -> list[Tensor]:
        of_others = set(map(id, leaves_requiring_grad(self._others)))
        return [leaf for leaf in leaves_requiring_grad(self.trees) if id(leaf) not in of_others]

    def own(self) -> set[int]:
        """Ids of the leaves that nobody else asks for."""
        return set(map(id, [*self._fresh, *self._inner]))

    def require_varying(self, loss: Tensor, axes: Collection[str]) -> None:
        """Check that what ranks of data axes share comes into a loss, which each has for itself, by a `pvary`.

        Raises:
            ShardError: a sum over such an axis is used as it is: its cotangent would be that of this rank's loss.
        """
        for axis in axes:
            shared = {node: name for node, over, name in self._shared if over == axis}
            for node in _nodes([loss], partial(_makes_varying, axis=axis)) if shared else ():
                if node in shared:
                    raise ShardError(
                        f"value_and_grad: the loss uses what {shared[node]} over {axis!r} gives, which its ranks share,"
                        " and each of them has a loss of its own. Write sf.collectives.pvary(x, mesh, "
                        f"{axis!r}) of it, whose gradient is that of all losses"
                    )

    @contextmanager
    def runs(self) -> Iterator[None]:
        """Within it the loss runs."""
        try:
            with holding(_UNDER_WAY, (*self.around, self)):
                yield
        finally:
            for outer in self.around:
                outer._inner += self._fresh


# Data axes of trees that transforms around are given: each of their ranks has a loss of its own.
_AXES_OF_LOSSES: ContextVar[frozenset[str]] = ContextVar("axes of losses", default=frozenset())
axes_of_losses: Callable[[], frozenset[str]] = _AXES_OF_LOSSES.get
# Nodes of graphs: collectives, behind some of which what ranks share is varying; or behind which it is about trees,
# whose cotangents are means.
_COLLECTIVES, _VARYING = {"EagerBackward", "InTransformBackward"}, {"pvary", "into_losses"}
_OF_TREES = {"_GatherBackward", "GatherBucketBackward", "ReduceBucketBackward"}
_SHARED = {"psum", "pmean", "all_gather_invariant"}
_OF_PARTS = {"_ToTorchTensorBackward", "AcrossBackward"}  # behind which a tensor may be of this rank
_UNDER_WAY: ContextVar[tuple[Differentiation, ...]] = ContextVar("differentiations under way", default=())


def losses_over(axes: Collection[str]) -> AbstractContextManager[None]:
    """Within it runs a function, in a transform, of trees that have these data axes."""
    return holding(_AXES_OF_LOSSES, _AXES_OF_LOSSES.get() | set(axes))


def several_losses(name: str, axis: str, why: str) -> ShardError:
    """The error of what does not go with a loss of its own on each rank of an axis, inside a transform."""
    return ShardError(
        f"{name}: a gradient within sf.jvp, vjp, hvp or vmap goes on, in which each rank of {axis!r} has a loss of its "
        f"own, and {why}. Differentiate by sf.grad outside of transforms, twice for a Hessian-vector product: "
        "sf.grad(lambda p: sf.tree.dot(sf.grad(loss_fn)(p), v))(params)"
    )


def is_under_way() -> bool:
    """Whether a loss runs that is to be differentiated."""
    return bool(_UNDER_WAY.get())


def is_asked_for() -> bool:
    """Whether a loss that runs, or a transform, may ask for a derivative of what is computed now."""
    return torch.is_grad_enabled() and (is_under_way() or _torch.in_transform())


def derivatives_asked_for() -> str:
    """Which are, of what is computed now, besides a gradient: "jvp", "hvp" (that of a gradient), or "reverse" ones."""
    transforms = [kind for kind in _torch.kinds_of_transforms() if kind != "Vmap"]
    if not is_under_way() and transforms in (["Jvp"], ["Jvp", "Grad"]):
        return "hvp" if len(transforms) > 1 else "jvp"
    return "reverse" if order_of_derivatives() > 1 else ""


def order_of_derivatives() -> int:
    """How many times what is computed now may be differentiated."""
    return len(_UNDER_WAY.get()) + sum(kind != "Vmap" for kind in _torch.kinds_of_transforms())


def in_forward_mode() -> bool:
    """Note that forward mode begins; whether somebody around may ask for a derivative of it."""
    for each in _UNDER_WAY.get():
        each.has_forward_mode = True
    return is_asked_for()


def is_differentiated(tensors: Iterable[Tensor]) -> bool:
    """Whether a loss that runs now, or a transform, is differentiated with respect to what a tensor is made of."""
    if not is_asked_for():
        return False
    around = _UNDER_WAY.get()
    values = list(tensors)
    if _torch.in_transform() and any(map(_torch.differentiated_in_transform, values)):
        return True
    wanted = set[Any]().union(*(each.wanted for each in around))
    return any(source in wanted for source in _sources(map(_torch.innermost_value, values)))


def reaches_others(tensors: Iterable[Tensor], leaves: Collection[int]) -> bool:
    """Whether a tensor is made of leaves that ask for a gradient and are not among `leaves`."""
    return any(isinstance(source, int) and source not in leaves for source in _sources(tensors))


def note_shared(shared: Tensor, axis: str, name: str) -> None:
    """A collective has made what the ranks of an axis share, of what is differentiated."""
    if shared.grad_fn is not None and _torch.backward_id() == -1:
        for each in _UNDER_WAY.get():
            each._shared.append((shared.grad_fn, axis, name))


def note_met(shared: Tensor, axis: str) -> None:
    """A collective takes what the ranks of a data axis share to the loss of each."""
    for node in _nodes([shared], partial(_makes_shared, axis=axis)):
        if _makes_shared(node, axis):
            node.meets = True


def require_met(node: Any, name: str, axis: str) -> None:
    """Check in a backward of one's own, where each data rank has its own loss, that what they share came by a `pvary`.

    Raises:
        ShardError: it did not: the gradients of parameters would be those of a part of the losses.
    """
    if not _OF_TREES.isdisjoint(type(before).__name__ for before in _nodes([node])):
        why = f"the loss uses what {name} over {axis!r} gives, which its ranks share, and each has a loss of its own"
        write = f"Write sf.collectives.pvary(x, mesh, {axis!r}) of it; to print a loss, {name}(loss.detach(), ...)"
        raise ShardError(f"backward: {why}, whose gradients are averaged. {write}")


def note_tree(tree: Mapping[str, Tensor]) -> None:
    """A loss uses a tree: is it made of what somebody outside of all losses asks for?"""
    around = _UNDER_WAY.get()
    if around and around[0].used is None:
        around[0].used = tree
    if not around or around[0].meets_others or id(tree) in map(id, around[0].trees):
        return
    if torch.is_grad_enabled() and not _torch.in_transform():
        leaves = set[int]().union(*(each.own() for each in around))
        around[0].meets_others = reaches_others(tree.values(), leaves)


def _sources(tensors: Iterable[Tensor]) -> Iterator[Any]:
    """What tensors are made of: ids of leaves that ask for a gradient, and the nodes in between."""
    tracked = [x for x in tensors if x.requires_grad]
    yield from (id(x) for x in tracked if x.grad_fn is None)
    for node in _nodes(tracked):
        yield id(node.variable) if type(node).__name__ == "AccumulateGrad" else node


def _nodes(tensors: Iterable[Any], ends_at: Callable[[Any], bool] = lambda node: False) -> Iterator[Any]:
    """The nodes of the graph that tensors, or nodes, are made by, but for those before a node at which it `ends_at`."""
    nodes: list[Any] = [getattr(x, "grad_fn", x) for x in tensors]
    seen = set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if not ends_at(node):
            nodes += [before for before, _ in node.next_functions]


def _makes_varying(node: Any, axis: str) -> bool:
    """Whether what ranks share over an axis is varying behind a node, or about trees, whose cotangents are means."""
    name = type(node).__name__
    return name in _OF_TREES or (name in _COLLECTIVES and node.where[0] in _VARYING and node.where[2] == axis)


def is_shared(x: Tensor, axis: str) -> bool:
    """Whether a tensor is made of what collectives over an axis made its ranks share, and of no part of theirs."""
    shares = False
    for node in _nodes([x], partial(_makes_shared, axis=axis)):
        shares |= (ends := _makes_shared(node, axis))
        of_rank = type(node).__name__ in _COLLECTIVES and node.where[2] == axis and not ends
        if of_rank or type(node).__name__ in _OF_PARTS:
            return False
    return shares


def _makes_shared(node: Any, axis: str) -> bool:
    return type(node).__name__ in _COLLECTIVES and node.where[2] == axis and node.where[0] in _SHARED


# -- what is known of a step while `jit` records it --------------------------------------------------------------------


@dataclass
class Recording:
    """One run of a step on tensors without values."""

    inputs: dict[int, int]  # by identity, which input a tensor is
    models: list[nn.Module] = field(default_factory=list)  # that `apply` ran: their modes are constants of the graph
    # What Python says of an input before each run: the function, the number of the input, and where it goes, a scalar.
    numbers: list[tuple[Callable[[Tensor], Any], int, Tensor]] = field(default_factory=list)

    def number(self, what: str, fn: Callable[[Tensor], Any], of: Tensor) -> Tensor:
        """A tensor that has `fn(of)` whenever the graph runs: Python, before each run, of an input of the step.

        Raises:
            ShardError: `of` is something that the step has computed.
        """
        if id(of) not in self.inputs or _torch.version_of(of):  # which has been written
            why = f"{what} is a function of Python, and of a step that is computed inside of the compiled one"
            raise ShardError(f"{why}; use a number, or one update in each compiled step")
        with _torch.outside_modes():
            value = torch.zeros((), dtype=torch.float64)
        self.numbers.append((fn, self.inputs[id(of)], value))
        return value


RECORDING: ContextVar[Recording | None] = ContextVar("recording", default=None)
recording: Callable[[], Recording | None] = RECORDING.get  # the one under way
