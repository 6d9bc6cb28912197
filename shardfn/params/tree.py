"""`Params`, the tree of shards, and functions over it.

`Params` is a `dict` registered as a pytree: keys are parameter names, leaves are `DTensor`s, and the plan is its static
context, so `torch.utils._pytree.tree_map` and every `torch.func` transform keep the type.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from shardfn import _torch
from shardfn.comm import in_layout, pvary, require_own_part
from shardfn.context import holding, is_under_way
from shardfn.layout import Plan, clear_padding_, grid_of, matches, per_rank
from shardfn.notation import ShardError, did_you_mean, see

_INSTEAD = {  # of methods of a module
    "to cuda cpu": "shards live on their mesh's device; make the mesh there, or gather(params, to='cpu')",
    "half float double bfloat16 type": "use sf.tree.cast(params, dtype), or Policy(compute_dtype=...)",
    "parameters named_parameters": "params is a dict: use params.values() or params.items()",
    "state_dict": "use sf.gather(params) for full tensors; params itself is the sharded one",
    "requires_grad_": "use sf.value_and_grad(loss_fn)(params, ...), or sf.tree.map on the leaves",
    "size shape dim": "a loss function gets (params, *batch): lambda p, x, y: F.mse_loss(sf.apply(model, p, x), y)",
    "train eval zero_grad": "params holds only tensors; call it on the model",
}


def _unpickled(leaves: Mapping[str, Tensor], *rest: Any) -> "Params":
    """A tree as another process, or this one, has pickled it.

    Raises:
        ShardError: that was another rank.
    """
    params = Params(leaves, *rest)
    _require_own_parts(leaves, params.mesh)
    return params


def _require_own_parts(leaves: Mapping[str, Any], mesh: DeviceMesh) -> None:
    found = {
        (id(leaf.device_mesh), leaf.placements): (name, leaf)
        for name, leaf in (leaves.items() if dist.is_initialized() else ())
        if isinstance(leaf, DTensor)
    }
    ranks = mesh.mesh.flatten().tolist() if found else []
    for name, leaf in found.values():
        require_own_part(f"'{name}'", leaf, ranks)


class PartOfLeaf(NamedTuple):
    """What is noted of a tensor that is this rank's part of a leaf, or of what is made of one, inside a transform."""

    leaf: str
    members: bool  # whether the first dim is whole, so that sums over it are those of this rank's part


_PARTS: ContextVar[WeakIdKeyDictionary | None] = ContextVar("parts of leaves", default=None)


class Params(dict[str, Any]):
    """A tree of shards: parameter name -> `DTensor`, with its plan, its mesh and the model's buffers.

    Made by `shard`. Tied parameters appear once, under their first name.

        >>> import shardfn as sf
        >>> from torch import nn
        >>> params = sf.shard(nn.Linear(4, 2), sf.make_mesh("cpu", fsdp=1), sf.Policy())
        >>> list(params), params.mesh.mesh_dim_names
        (['weight', 'bias'], ('fsdp',))
        >>> doubled = sf.tree.map(lambda leaf: 2 * leaf, params)
        >>> type(doubled).__name__, list(params.select("w*"))
        ('Params', ['weight'])

    Args:
        leaves: stored name -> tensor.
        plan: what the names mean.
        mesh: the mesh the user gave.
        buffers: the model's buffers, replicated; they take no part in tree functions.
    """

    def __init__(
        self,
        leaves: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        plan: Plan,
        mesh: DeviceMesh,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__(leaves)
        self.plan = plan
        self.mesh = mesh
        self.buffers: dict[str, Tensor] = dict(buffers or {})
        # Where the engine puts gradients of these very leaves; set by a differentiation for its own tree only.
        self.gradients: Any = None
        self.sources: Mapping[str, Tensor] | None = None  # the leaves that those of a differentiation are made of
        self.holds_back: Callable[[str], bool] | None = None  # whether a unit's gradients stay unreduced in `.grad`
        self.scale_of_gradients: Callable[[str], float] | None = None  # by which a backward multiplies those of a unit
        self.are_gradients = False  # whether a differentiation made it
        self.compares: Sequence[str] = ()  # axes whose ranks a loss of the last call with it has to be compared over
        self.in_place: Any = None  # what holds these very leaves (`ModuleShards`), when its modules compute themselves
        if plan.vmaps is not None and (watched := _PARTS.get()) is not None:
            self._note_parts(watched)

    def _note_parts(self, parts: WeakIdKeyDictionary) -> None:
        members = self.plan.has_members
        for name, leaf in self._parts():
            parts[leaf] = PartOfLeaf(name, members)

    def _parts(self) -> Iterator[tuple[str, Tensor]]:
        """The leaves of which this rank has a part, inside a transform."""
        for name, leaf in self.items() if self.plan.vmaps is not None else ():
            known = self.plan.leaves.get(name)
            if known is not None and isinstance(leaf, Tensor) and any(self.plan.axes[a] > 1 for a in known[1].axes):
                yield name, leaf

    def like(self, leaves: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> "Params":
        """Other leaves under the same plan, mesh and buffers."""
        return Params(leaves, self.plan, self.mesh, self.buffers)

    def select(self, patterns: str | Sequence[str]) -> "Params":
        """The leaves whose names match a pattern (`"layers.0.**"`), or any of several.

        Raises:
            KeyError: a pattern matches nothing.
        """
        wanted = (patterns,) if isinstance(patterns, str) else tuple(patterns)
        for pattern in wanted:
            if not any(matches(pattern, name) for name in self):
                raise KeyError(f"select: {pattern!r} matches none of {', '.join(list(self)[:4])}, ...")
        return self.like((name, leaf) for name, leaf in self.items() if any(matches(p, name) for p in wanted))

    @property
    def _metadata(self) -> Any:
        """What `nn.Module.load_state_dict` asks a state dict for."""
        why = "load_state_dict: a tree of shards; write model.load_state_dict(sf.gather(params))"
        raise see(ShardError(why), "trees")

    def copy(self) -> "Params":
        """The same leaves in a new tree."""
        return self.like(self)

    def _no_arithmetic(self, other: Any) -> Any:
        why = "a tree has no arithmetic; write sf.tree.map(lambda a, b: a + b, params, other)"
        raise see(TypeError(why), "trees")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _no_arithmetic

    def __or__(self, other: Any) -> "Params":
        mine, other = _alike([self, other])
        mine._require_fits(other)
        return mine.like({**mine, **other})

    def __ror__(self, other: Any) -> "Params":
        self._require_fits(other)
        return self.like({**other, **self})

    def _require_fits(self, other: Mapping[str, Tensor]) -> None:
        if isinstance(other, Params) and other.plan != self.plan:
            raise ShardError(f"params | other: the layouts differ; reshard one of them\n{self.plan.diff(other.plan)}")
        _require_own_parts(other, self.mesh)
        if (unknown := next((name for name in other if name not in self.plan.leaves), None)) is not None:
            raise ShardError(f"params | other: the model has no '{unknown}'{did_you_mean(unknown, self.plan.leaves)}")

    def __deepcopy__(self, memo: dict[int, Any]) -> "Params":
        copies = {n: _torch.with_local(leaf, _torch.unwrap_local(leaf).detach().clone()) for n, leaf in self.items()}
        return Params(copies, self.plan, self.mesh, {name: buffer.clone() for name, buffer in self.buffers.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (dict(self), self.plan, self.mesh, self.buffers)

    def __getattr__(self, name: str) -> NoReturn:
        for names, instead in _INSTEAD.items():
            if name in names.split():
                raise see(AttributeError(f"Params has no '{name}': {instead}"), "trees")
        raise AttributeError(f"Params has no attribute '{name}'")

    def __missing__(self, name: str) -> NoReturn:
        some = ", ".join(list(self)[:4])
        raise see(KeyError(f"no leaf {name!r}; the tree has {some}, ...; several are select('{name}.*')"), "trees")

    def __repr__(self) -> str:
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.plan.axes.items())
        rows = "".join(f"\n  {name}: {self.plan.leaves[name][1].rule}" for name in self if name in self.plan.leaves)
        return f"Params on {mesh}, {len(self)} leaves{rows}"


def _refuse_idle(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Leaves ask for no gradient: an optimizer of torch that has them gets none, and would train nothing."""
    params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(map(callable, (*args[1:], *kwargs.values()))) and params and all(map(_is_idle, params)):
        name = type(optimizer).__name__
        why = f"{name}.step: it has leaves of a tree, which have no gradient, and would train nothing. Give those of"
        why = f"{why} value_and_grad to sf.optim.from_torch({name}, ...), by step(params, grads, state)"
        raise see(ShardError(why), "optimizers")


def _is_idle(leaf: Tensor) -> bool:
    leaf_of_tree = isinstance(leaf, DTensor) and not isinstance(leaf, nn.Parameter)
    return leaf_of_tree and not leaf.requires_grad and leaf.grad is None


def _no_message() -> ShardError:
    instead = "Write x = x.full_tensor() instead, which is of all ranks; or leave it out, where that is reduced already"
    ddp = "DistributedDataParallel goes: value_and_grad and a Trainer reduce gradients themselves"
    return ShardError(f"torch.distributed sends plain tensors, and this is a DTensor. {instead}. {ddp}")


_torch.refuse_of_dtensors(_torch.MESSAGES, _no_message)


watch_optimizers = cache(partial(register_optimizer_step_pre_hook, _refuse_idle))


def is_tree(x: object) -> bool:
    """Whether it is a tree of shards."""
    return isinstance(x, Params)


def trees_in(given: Any) -> list[Params]:
    """The trees of shards in a pytree."""
    return [x for x in _torch.pytree.tree_leaves(given, is_leaf=is_tree) if isinstance(x, Params)]


def data_axes_of(given: Any) -> frozenset[str]:
    """The data axes of several ranks of the trees among what is given."""
    return frozenset(a for tree in trees_in(given) for a in tree.plan.roles.data if tree.plan.axes[a] > 1)


def has_parts(given: Any) -> bool:
    """Whether there are trees among what is given of whose leaves this rank has parts, inside a transform."""
    return any(True for tree in trees_in(given) for _ in tree._parts())


@contextmanager
def watched_parts(given: Any) -> Iterator[WeakIdKeyDictionary]:
    """Within it parts of leaves of trees that are given, or made, inside a transform, are noted as `PartOfLeaf`s."""
    parts = WeakIdKeyDictionary()
    for tree in trees_in(given):
        tree._note_parts(parts)
    with holding(_PARTS, parts):
        yield parts


@dataclass(frozen=True)
class _Context:
    """The static part of a `Params` in a pytree: equal when names and plan are."""

    names: tuple[str, ...]
    plan: Plan
    mesh: DeviceMesh = field(compare=False)
    buffers: dict[str, Tensor] = field(compare=False)


def _flatten(params: Params) -> tuple[list[Tensor], _Context]:
    return list(params.values()), _Context(tuple(params), params.plan, params.mesh, params.buffers)


def _unflatten(leaves: Iterable[Any], context: _Context) -> Params:
    return Params(zip(context.names, leaves, strict=True), context.plan, context.mesh, context.buffers)


def _flatten_with_keys(params: Params) -> tuple[list[tuple[Any, Tensor]], _Context]:
    leaves, context = _flatten(params)
    return [(_torch.pytree.MappingKey(name), leaf) for name, leaf in zip(context.names, leaves, strict=True)], context


_torch.pytree.register_pytree_node(Params, _flatten, _unflatten, flatten_with_keys_fn=_flatten_with_keys)


def map(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`fn` on every leaf of `tree` (and of trees of the same structure), on whole `DTensor`s.

    No communication as long as `fn` is elementwise. What `fn` lays out in another way (`w.T`, `w.softmax(0)`) is put
    into the layout of the leaf of `tree`, if it has the same shape and is not padded: a redistribution, beside those of
    `fn`. A plain tensor stays one, such as `w.full_tensor()` is, which no tree has for a leaf.

        >>> import torch, shardfn as sf
        >>> sf.tree.map(torch.add, {"a": torch.ones(2)}, {"a": torch.ones(2)})
        {'a': tensor([2., 2.])}

    Raises:
        ShardError: the trees have other names or layouts, or some of them, but not all, are pending gradients; a padded
            leaf is laid out in another way.
    """
    tree, *rest_alike = _alike([tree, *rest])
    flat, structure = _torch.pytree.tree_flatten(tree)
    others = []
    for other in rest_alike:
        try:
            others.append(structure.flatten_up_to(_like_members(other, tree)))
        except ValueError as error:
            raise ShardError(f"tree.map: {_difference(tree, other) or error}") from None
    rows = list(zip(flat, *others, strict=True))
    if isinstance(tree, Params) and any(x.plan.reduction is None for x in (tree, *rest_alike) if isinstance(x, Params)):
        _refuse_mixed_sums(tree, rows)
    if isinstance(tree, Params) and tree.plan.vmaps is not None:
        results = [_on_parts(fn, tree, name, row) for name, row in zip(tree, rows, strict=True)]
    else:
        with _saying_what_mixes():
            results = [fn(*row) for row in rows]
    if isinstance(tree, Params) and not _torch.same_layouts(flat, results):
        results = [_in_layout(tree, name, x) for name, x in zip(tree, results, strict=True)]
    if isinstance(tree, Params) and tree.plan.policy.pad:
        results = [_without_padding(tree, name, leaf) for name, leaf in zip(tree, results, strict=True)]
    out = structure.unflatten(results)
    return _as_members(out, tree) if isinstance(tree, Params) and tree else out


def is_sum(leaf: object) -> bool:
    """Whether a leaf, or a gradient, is a sum over ranks that is still pending."""
    return isinstance(leaf, DTensor) and any(placement.is_partial() for placement in leaf.placements)


def _refuse_mixed_sums(tree: Params, rows: Iterable[Sequence[Any]]) -> None:
    for name, row in zip(tree, rows, strict=True):
        if len({is_sum(leaf) for leaf in row if isinstance(leaf, DTensor)}) > 1:
            why = "is a sum that is still pending in some of the trees, which torch would add up, and not average"
            raise ShardError(f"tree.map: {name!r} {why}; call sf.reduce_grads first")


def _in_layout(tree: Params, name: str, result: Any) -> Any:
    """What is made of a leaf and has its shape, in its layout; what is made of a pending sum stays as it is."""
    leaf, (_, known) = tree[name], tree.plan.leaves.get(name, (None, None))
    if not isinstance(leaf, DTensor) or not isinstance(result, DTensor) or is_sum(leaf):
        return result
    if result.shape != leaf.shape or result.device_mesh != leaf.device_mesh or result.placements == leaf.placements:
        return result
    if known is not None and known.shape != known.extent:
        why = f"is padded, {known.extent} to {known.shape}, and the function computes along a dim that is split"
        raise ShardError(f"tree.map: {name!r} {why}; write sf.gather(tree)[{name!r}], which is without padding")
    return in_layout(result, _torch.spec_of(leaf))


@contextmanager
def _saying_what_mixes() -> Iterator[None]:
    """Within it torch's error of plain tensors among DTensors says what to write."""
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error) or is_under_way() or _torch.in_transform():
            raise  # a differentiation says it for its own function
        raise ShardError(
            f"tree.map: the function mixes leaves, which are DTensors, with plain tensors: {str(error).splitlines()[0]}"
            "\nCompute with Python numbers. Noise is torch.randn_like(leaf), a whole leaf sf.gather(tree)[name]. "
            "A number for each member of a stack: sf.vmap(lambda x, p: sf.tree.map(lambda w: x * w, p))(numbers, tree)"
        ) from error


def _as_members(mapped: Params, tree: Params) -> Params:
    """What is made of a tree; the plan says so where each leaf got a new first dim (`torch.stack`), or lost it."""
    pairs = [(leaf, mapped[name]) for name, leaf in tree.items()]
    more = {x.dim() - leaf.dim() if isinstance(x, Tensor) else 0 for leaf, x in pairs}
    if more == {1} and len({x.shape[0] for _, x in pairs}) == 1 and all(_is_first(x, leaf) for leaf, x in pairs):
        return Params(mapped, tree.plan.stacked(pairs[0][1].shape[0], ()), mapped.mesh, mapped.buffers)
    if more == {-1} and tree.plan.has_members and all(_is_first(leaf, x) for leaf, x in pairs):
        return Params(mapped, tree.plan.member(()), mapped.mesh, mapped.buffers)
    return mapped


def _is_first(more: Tensor, less: Tensor) -> bool:
    """Whether one has a first dim that is whole on each rank before those of the other."""
    have, given = ([*x.placements] if isinstance(x, DTensor) else [] for x in (more, less))
    moved = [Shard(place.dim + 1) if isinstance(place, Shard) else place for place in given]
    return more.shape[1:] == less.shape and have == moved


def _like_members(other: Any, tree: Any) -> Any:
    """A tree of members under the plan of a tree that is one of them, or the other way round: leaves are broadcast."""
    if not (isinstance(other, Params) and isinstance(tree, Params)) or other.plan == tree.plan or not (other and tree):
        return other
    for many, one in ((other.plan, tree.plan), (tree.plan, other.plan)):
        if many.has_members and many.member(()) == one:
            return Params(other, tree.plan, other.mesh, other.buffers)
    return other


def _without_padding(tree: Params, name: str, result: Any) -> Any:
    """What is made of a leaf, with zeros where a policy pads: modules, norms and `dot` count on them."""
    _, leaf = tree.plan.leaves.get(name, (None, None))
    if leaf is None or leaf.shape == leaf.extent or not isinstance(result, Tensor):
        return result
    grid = grid_of(tree.mesh, tree.plan.roles.storage)

    def inside(coords: Mapping[str, int], values: Sequence[Tensor]) -> list[Tensor]:
        (local,) = values
        for keep in (None, tree.plan.roles.compute):  # a shard, or a pending gradient
            shape = leaf.local_shape(grid.sizes, coords, keep)
            if shape == local.shape[local.dim() - len(shape) :]:  # behind dims that were stacked
                mask = torch.ones(shape, dtype=torch.bool, device=local.device)
                clear_padding_(leaf, mask, grid.sizes, coords, keep)
                return [mask.expand(local.shape)]
        return [torch.ones_like(local, dtype=torch.bool)]

    (mask,) = per_rank(grid, inside, [_torch.unwrap_local(result).detach()])
    nothing = False if result.dtype is torch.bool else 0  # which would make it int64
    return torch.where(_torch.with_local(result, mask) if isinstance(result, DTensor) else mask, result, nothing)


def _on_parts(fn: Callable[..., Any], tree: Params, name: str, leaves: Sequence[Any]) -> Any:
    """`fn` of this rank's parts of a leaf; what it takes from elsewhere is marked where it meets them."""
    with _Meeting(tree, name, leaves) if name in tree.plan.leaves else nullcontext():
        return fn(*leaves)


# What draws a number for each element: the same ones for the parts of all ranks.
DRAWS = frozenset(
    "rand rand_like randn randn_like randint randint_like normal uniform exponential cauchy log_normal geometric "
    "random bernoulli poisson dropout alpha_dropout feature_alpha_dropout gumbel_softmax".split()
)


def drawn_for_parts(name: str, leaf: str) -> str:
    """Why a function inside a transform may not draw numbers for a leaf, and what to write."""
    why = f"{name} would draw the same numbers for the parts of {leaf!r} on all ranks"
    return f"{why}. Draw outside, noise = sf.tree.map(torch.randn_like, params), and pass the tree as an argument"


class _Meeting(TorchFunctionMode):
    """Within it a plain tensor that asks for a gradient (a learnt step size) has that of all parts of a leaf.

    What would draw numbers for the parts of a leaf is refused.
    """

    def __init__(self, tree: Params, name: str, parts: Iterable[Any]) -> None:
        super().__init__()
        self._mesh, self._name, self._axes = tree.mesh, name, tree.plan.leaves[name][1].axes
        self._parts = {id(part): part for part in parts}
        self._shapes = {part.shape for part in self._parts.values() if isinstance(part, Tensor)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat, structure = _torch.pytree.tree_flatten((args, kwargs or {}))
        meets = any(id(x) in self._parts for x in flat)
        if meets and len(flat) > 1:
            args, kwargs = _torch.pytree.tree_unflatten([self._varied(x) for x in flat], structure)
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if self._axes and name.strip("_") in DRAWS and isinstance(out, Tensor) and out.shape in self._shapes:
            raise ShardError(f"tree.map: {drawn_for_parts(name, self._name)}")
        if meets:
            self._parts |= {id(x): x for x in _torch.pytree.tree_leaves(out) if isinstance(x, Tensor)}
        return out

    def _varied(self, x: Any) -> Any:
        if isinstance(x, Tensor) and id(x) not in self._parts and x.requires_grad:
            for axis in self._axes:
                x = pvary(x, self._mesh, axis)
        return x


def _alike(trees: Sequence[Any]) -> list[Any]:
    """Inside a transform, trees that come from outside as constants of the same kind as those of the transform."""
    inner = next((t for t in trees if isinstance(t, Params) and t.plan.vmaps is not None), None)
    if inner is None:
        return list(trees)
    plan = inner.plan.in_vmaps(None)
    return [_constant(t, inner) if isinstance(t, Params) and t.plan == plan else t for t in trees]


def _constant(tree: Params, inner: Params) -> Params:
    if any(leaf.requires_grad for leaf in tree.values()):
        why = "where its derivative would be lost; pass it to the transform as an argument too"
        raise ShardError(f"a tree that somebody differentiates meets one inside a transform, {why}")
    leaves = ((name, _torch.unwrap_local(leaf)) for name, leaf in tree.items())
    return Params(leaves, inner.plan, tree.mesh, tree.buffers)


def map_local(fn: Callable[..., Tensor], tree: Any, *rest: Any) -> Any:
    """`fn` on this rank's part of every leaf; the results are wrapped like the leaves of `tree`.

    Faster than `map` (no DTensor dispatch). `fn` must be elementwise and keep the shape. Where something asks for a
    gradient leaves are given to `fn` whole, as `map` does: their local parts are outside autograd.

        >>> import torch, shardfn as sf
        >>> sf.tree.map_local(torch.neg, {"a": torch.ones(2)})
        {'a': tensor([-1., -1.])}
    """

    def on_local(leaf: Tensor, *others: Tensor) -> Tensor:
        if torch.is_grad_enabled() and any(x.requires_grad for x in (leaf, *others)):
            return fn(leaf, *others)
        out = fn(_torch.unwrap_local(leaf), *(_torch.unwrap_local(other) for other in others))
        closes_over = isinstance(leaf, DTensor) and out.requires_grad  # something that asks for a gradient
        return fn(leaf, *others) if closes_over else _torch.with_local(leaf, out)

    return map(on_local, tree, *rest)


def _difference(tree: Any, other: Any) -> str | None:
    """Why two trees do not go together."""
    if isinstance(tree, Params) != isinstance(other, Params):
        write = "tree | {name: fn(tree[name], others[name]) for name in tree}"
        return (
            f"one is a tree of shards, another a {type(tree if isinstance(other, Params) else other).__name__}; {write}"
        )
    if not (isinstance(tree, Params) and isinstance(other, Params)):
        return None
    if set(tree) != set(other):
        odd = sorted(set(tree) ^ set(other))
        return f"{len(odd)} leaves are in one tree only, for example {odd[0]!r}"
    if tuple(tree) != tuple(other):
        return "the leaves stand in another order"
    if {leaf.dim() - other[name].dim() for name, leaf in tree.items()} == {-1} and not other.plan.has_members:
        return "one has a gradient for each sample: sf.reduce_grads(sf.tree.map(lambda g: g.sum(0), each), like=params)"
    return f"the layouts differ; reshard one of them\n{tree.plan.diff(other.plan)}" if tree.plan != other.plan else None


def zeros_like(tree: Any, dtype: torch.dtype | None = None) -> Any:
    """A tree of zeros with the same layouts.

    >>> import torch, shardfn as sf
    >>> sf.tree.zeros_like({"a": torch.ones(2)})
    {'a': tensor([0., 0.])}
    """
    return map_local(lambda x: torch.zeros_like(x, dtype=dtype), tree)


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """The tree with floating leaves in `dtype`.

    >>> import torch, shardfn as sf
    >>> sf.tree.cast({"a": torch.ones(2)}, torch.float64)["a"].dtype
    torch.float64
    """
    if not isinstance(dtype, torch.dtype):
        raise see(TypeError(f"tree.cast: {dtype!r} is no dtype, as torch.bfloat16 is"), "arguments")
    return map_local(lambda x: x.to(dtype, copy=True) if x.is_floating_point() else x, tree)


def lerp(start: Any, end: Any, weight: float) -> Any:
    """`start + weight * (end - start)`, leaf by leaf, without communication; integer leaves are `end`'s.

    >>> import torch, shardfn as sf
    >>> sf.tree.lerp({"a": torch.zeros(2)}, {"a": torch.ones(2)}, 0.25)
    {'a': tensor([0.2500, 0.2500])}
    """
    return map_local(lambda a, b: torch.lerp(a, b.to(a.dtype), weight) if a.is_floating_point() else b, start, end)


def ema(average: Any, new: Any, decay: float) -> Any:
    """Exponential moving average: `decay * average + (1 - decay) * new`.

    >>> import torch, shardfn as sf
    >>> sf.tree.ema({"a": torch.zeros(2)}, {"a": torch.ones(2)}, decay=0.75)
    {'a': tensor([0.2500, 0.2500])}
    """
    if isinstance(decay, dict) or not 0 <= decay <= 1:
        why = f"tree.ema: decay={decay!r} is not from 0 to 1; write ema(average, new, decay=0.999)"
        raise see(ValueError(why), "arguments")
    return lerp(average, new, 1 - decay)


def select(tree: Any, patterns: str | Sequence[str]) -> Any:
    """The leaves of a tree of named tensors whose names match; see `Params.select`.

    >>> import torch, shardfn as sf
    >>> sf.tree.select({"a.w": torch.zeros(1), "b.w": torch.ones(1)}, "a.*")
    {'a.w': tensor([0.])}
    """
    if isinstance(tree, Params):
        return tree.select(patterns)
    wanted = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    return {name: leaf for name, leaf in tree.items() if any(matches(pattern, name) for pattern in wanted)}


def paths(tree: Any) -> list[str]:
    """The name of every leaf, in order: keys joined by dots.

    >>> import torch, shardfn as sf
    >>> sf.tree.paths({"mu": {"a": torch.zeros(1)}, "step": torch.zeros(1)})
    ['mu.a', 'step']
    """
    return [path_name(path) for path, _ in _torch.pytree.tree_flatten_with_path(tree)[0]]


def path_name(path: Sequence[Any]) -> str:
    """The keys of a path into a pytree, joined by dots."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)


def leaves(tree: Any) -> Iterator[Tensor]:
    """Every tensor of a tree, in order."""
    return (leaf for leaf in _torch.pytree.tree_leaves(tree) if isinstance(leaf, Tensor))
