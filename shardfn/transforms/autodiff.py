"""`grad` and `value_and_grad` with respect to trees of shards, also inside `vmap`, `jvp` and each other."""

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import wraps
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardfn import _torch, comm
from shardfn.context import active_transforms
from shardfn.engine import Gradients
from shardfn.layout import Grid, Plan, grid_of, has_derivatives, may_be_differentiated
from shardfn.layout import Reduction as PlanReduction
from shardfn.notation import ShardError, see
from shardfn.params import Mean, Params, data_axes_of, entered, is_tree, map_local
from shardfn.transforms.forward_mode import where_torch_is_wrong
from shardfn.transforms.module_call import apply
from shardfn.transforms.unsupported_calls import ours_only

Reduction = Literal["mean", "sum"] | None
_CANNOT = (  # what torch says of DTensors, the last in forward mode
    "got mixed torch.Tensor and DTensor",
    "not supported with DTensor",
    "not have a sharding strategy registered",
    "out variant should have at least one out arg",
)
_WEIGHT = (
    'Take a weight in a loss, beside apply, from sf.gather(params)["name"] (a penalty of all of them: '
    "sf.tree.dot(params, params))"
)
_NOTHING = "value_and_grad: the argument holds no floating tensor that may be differentiated (argnums)"
LossOf = Callable[[Sequence[Any]], tuple[Any, Any]]  # of what is differentiated: the loss and aux
Found = tuple[Tensor, Any, list[Any], Tensor | None]  # value, aux, gradients, what a `Mean` counted


def value_and_grad(
    loss_fn: Callable[..., Any], *, argnums: int | Sequence[int] = 0, has_aux: bool = False, reduce: Reduction = "mean"
) -> Callable[..., Any]:
    """A function that returns the loss and its gradients with respect to a tree of shards.

    `loss_fn(params, *batch)` is ordinary code that calls `apply`; it returns this data rank's mean loss, a scalar, or
    `sf.data.Mean(total, count)` for an exact mean over ranks with unequal counts.

        >>> import torch, shardfn as sf
        >>> from torch import nn
        >>> model = nn.Linear(4, 1)
        >>> params = sf.shard(model, sf.make_mesh("cpu", fsdp=1), sf.Policy())
        >>> step = sf.value_and_grad(lambda p, x: sf.apply(model, p, x).square().mean())
        >>> loss, grads = step(params, torch.ones(3, 4))
        >>> grads["weight"].placements == params["weight"].placements
        True

    Args:
        loss_fn: the function; the loss is a scalar tensor, or `(loss, aux)` with `has_aux`.
        argnums: which arguments to differentiate: trees made by `shard`, or any tree of plain tensors, whose
            gradients are this rank's own: their mean over the data ranks is that of one process. What a plain tensor
            has of a product with leaves (a step size, a mixture) is of all ranks, the same on each.
        has_aux: whether `loss_fn` also returns something that is passed through.
        reduce: gradients are the mean or the sum over data ranks, with their parameters' placements; `None` leaves
            them as pending sums (`+fsdp`) to be added over microbatches and given to `reduce_grads` once.

    Returns:
        `f(*args) -> (loss, grads)`, or `((loss, aux), grads)`. The loss is averaged over the data axes. Frozen
        parameters and those the loss does not depend on have zeros.

    Raises:
        ShardError: the loss is not a scalar; it depends on no leaf at all, unless it is part of another one; on the
            first two calls of `apply` in it, it differs between ranks of a compute axis.
        TypeError: an argument holds nothing to differentiate.

    Communication: what `apply` needs, and one all-reduce of a scalar a data axis for the loss.
    """
    if reduce not in ("mean", "sum", None):
        raise ValueError(f"value_and_grad(reduce={reduce!r}): 'mean', 'sum' or None")
    if not callable(loss_fn):
        why = f"value_and_grad: expected a function loss_fn(params, *batch), got {type(loss_fn).__name__}"
        raise see(TypeError(why), "losses")
    differentiate = differentiator(loss_fn, argnums, has_aux, reduce)

    @wraps(loss_fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        value, aux, grads, _ = differentiate(*args, **kwargs)
        return ((value, aux) if has_aux else value), grads

    return call


def differentiator(
    loss_fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, reduce: Reduction = "mean"
) -> Callable[..., tuple[Tensor, Any, Any, Tensor | None]]:
    """`value_and_grad` that also says what the loss counted: f(*args) -> (loss, aux, grads, count of a `Mean` or None).

    Means over microbatches are exact when each is weighted by its count, which is averaged over the data ranks, unless
    the count requires a gradient.
    """
    positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    average: Reduction = None if reduce is None else "mean"

    @_torch.left_by_dynamo
    def call(*args: Any, **kwargs: Any) -> tuple[Tensor, Any, Any, Tensor | None]:
        for position in positions:
            if not -len(args) <= position < len(args):
                raise TypeError(f"value_and_grad: argnums={argnums}, but there are {len(args)} arguments")
        chosen = [position % len(args) for position in positions]
        flat, structure, indices = [args[position] for position in chosen], None, [*range(len(chosen))]
        if set(map(type, flat)) != {Params}:  # not the usual case
            flat, structure = _torch.pytree.tree_flatten(flat, is_leaf=is_tree)
            indices = [i for i, leaf in enumerate(flat) if is_tree(leaf) or may_be_differentiated(leaf)]
        inside = _torch.in_transform()
        function = ours_only("grad", loss_fn) if inside else loss_fn

        def with_values(values: Sequence[Any], rest: Iterable[Any]) -> list[Any]:
            """The chosen arguments with these in place of what is differentiated in them."""
            if structure is None:
                return list(values)
            by_index = dict(zip(indices, values, strict=True))
            return _torch.pytree.tree_unflatten([by_index.get(i, other) for i, other in enumerate(rest)], structure)

        def loss_of(values: Sequence[Any]) -> tuple[Any, Any]:
            inputs = list(args)
            for position, value in zip(chosen, with_values(values, flat), strict=True):
                inputs[position] = value
            result = function(*inputs, **kwargs)
            return result if has_aux else (result, None)

        primals = [flat[i] for i in indices]
        if inside:
            value, aux, grads, count = _by_torch_func(loss_of, primals, average)
        else:
            beside = [*(x for i, x in enumerate(args) if i not in chosen), *kwargs.values()]
            value, aux, grads, count = _by_autograd(loss_of, primals, beside, average)
        if reduce == "sum":  # of every level: a mean, times the ranks, so that levels need not agree
            grads = [_times_ranks(grad) for grad in grads]
        for tree in grads:
            if isinstance(tree, Params):
                tree.are_gradients = True
        rest = (torch.zeros_like(x) if isinstance(x, Tensor) and i not in indices else x for i, x in enumerate(flat))
        trees = with_values(grads, rest)
        return value, aux, (trees[0] if isinstance(argnums, int) else tuple(trees)), count

    return call


def _by_autograd(loss_of: LossOf, primals: Sequence[Any], beside: Sequence[Any], reduce: Reduction) -> Found:
    """`differentiator` outside of transforms, by torch.autograd; the arguments `beside` may ask for a gradient, too."""
    connected = torch.is_grad_enabled() and any(map(_is_asked_for, primals))
    trees = [_differentiable(tree, reduce) for tree in primals]
    if connected:
        _require_reduction(reduce, trees[0])
    owner = _first_tree(primals)
    here = active_transforms.Differentiation(trees, primals)
    with torch.enable_grad():
        with here.runs(), explained("value_and_grad"), where_torch_is_wrong() if here.around[1:] else nullcontext():
            loss, aux = loss_of(trees)
        over = owner if owner is not None or here.around else here.used  # whose data ranks have the batch
        loss, count = _objective(loss, over)
        tree = over if over is not None else next(filter(None, (each.used for each in here.around)), None)
        if tree is not None:
            here.require_varying(loss, [axis for axis in tree.plan.roles.data if tree.plan.axes[axis] > 1])
            used = here.used
            if used is not None and used.compares:
                grid, eps = grid_of(used.mesh, used.plan.roles.storage), torch.finfo(loss.dtype).eps
                what = "value_and_grad: the loss"
                comm.require_same(what, loss, grid, used.compares, eps**0.5, comm.SAME_SAMPLES)
    if not connected and (owner is None or here.around or here.meets_others or _is_asked_for(beside)):
        connected = torch.is_grad_enabled() and active_transforms.reaches_others(_tensors((loss, aux)), here.own())
        _require_reduction(reduce if connected else "mean", owner)
    with explained("value_and_grad", loss=here):
        grads = _gradients(loss, trees, connected, used=owner is not None and not here.around)
    value = _over_data(comm.pmean_of_losses, loss if connected else loss.detach(), over)
    value = _over_data(comm.pvary, value, over) if connected else value
    return value, aux, grads, count


def _first_tree(primals: Sequence[Any]) -> Params | None:
    return next((x for x in primals if isinstance(x, Params)), None)


@contextmanager
def explained(verb: str, write: str = _WEIGHT, loss: active_transforms.Differentiation | None = None) -> Iterator[None]:
    """Within it an error of torch's says what to write: about `DTensor`s, which leaves are, or its own forward mode.

    Raises:
        ShardError: of what is computed outside of `apply`, or of its backward; of a `loss` with a forward mode in it.
    """
    try:
        yield
    except (TypeError, AttributeError) as error:
        if "Params" in str(error) or "positional argument" in str(error):
            called = f"{verb}: the loss is called as loss_fn(params, *batch), of which the first is a tree of shards"
            error.add_note(f"{called}: write sf.apply(model, params, x) in it for model(x)")
        raise
    except (RuntimeError, AssertionError) as error:
        if loss is not None and loss.has_forward_mode and "modified by an inplace operation" in str(error):
            raise ShardError(
                f"value_and_grad: torch cannot differentiate its forward mode here: {error}\n"
                "In place of sf.hvp(f, (p,), v) write sf.grad(lambda p: sf.tree.dot(sf.grad(f)(p), v))(p)"
            ) from error
        files = {frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)}
        if not any(words in str(error) for words in _CANNOT) or apply.__code__.co_filename in files:
            raise
        if write == _WEIGHT and nn.Module.__setattr__.__code__.co_filename in files:
            write = "A module computes with weights of a tree in sf.apply(model, params, x), not in model(x)"
        why = "the function computes with leaves what DTensors cannot, or mixes them with plain tensors"
        raise see(ShardError(f"{verb}: {why}: {str(error).splitlines()[0]}\n{write}"), "losses") from error


def _times_ranks(grads: Any) -> Any:
    """A tree of means over the data ranks as sums; the gradient of a plain tensor is this rank's own."""
    if not isinstance(grads, Params):
        return grads
    ranks = prod(grads.plan.axes[axis] for axis in grads.plan.roles.data)
    return grads if ranks == 1 else map_local(lambda g: g * ranks, grads)


def _require_reduction(reduce: Reduction, tree: Any) -> None:
    if reduce is None and isinstance(tree, Params) and data_axes_of(tree):
        why = "value_and_grad(reduce=None): pending sums cannot be differentiated again, as leaves that ask"
        raise ShardError(f"{why} for gradients would want. Use 'mean', or sf.tree.map(torch.detach, params)")


def grad(
    loss_fn: Callable[..., Any], *, argnums: int | Sequence[int] = 0, has_aux: bool = False, reduce: Reduction = "mean"
) -> Callable[..., Any]:
    """Like `value_and_grad` without the value: `f(*args) -> grads`, or `(grads, aux)`.

    >>> import torch, shardfn as sf
    >>> from torch import nn
    >>> model = nn.Linear(4, 1)
    >>> params = sf.shard(model, sf.make_mesh("cpu", fsdp=1), sf.Policy())
    >>> sf.grad(lambda p, x: sf.apply(model, p, x).sum())(params, torch.ones(3, 4))["bias"].full_tensor()
    tensor([3.])

    Args:
        loss_fn: as in `value_and_grad`.
        argnums: as there.
        has_aux: as there.
        reduce: as there.
    """
    both = value_and_grad(loss_fn, argnums=argnums, has_aux=has_aux, reduce=reduce)

    @wraps(loss_fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return call


def _is_asked_for(tree: Any) -> bool:
    """Whether somebody else differentiates with respect to a leaf: an outer differentiation, or a `backward` later."""
    return any(map(active_transforms.requires_grad, tree.values() if isinstance(tree, Params) else _tensors(tree)))


def _differentiable(tree: Any, reduce: Reduction) -> Any:
    """The same tree, or tensor, with fresh leaves that ask for a gradient; those that others ask for stay connected."""
    connects = torch.is_grad_enabled()
    if not isinstance(tree, Params):
        return tree if connects and tree.requires_grad else tree.detach().requires_grad_()
    if unknown := tree.keys() - tree.plan.leaves.keys():
        raise ShardError(f"value_and_grad: the tree has a leaf {min(unknown)!r}, which its plan does not know")
    plan = tree.plan.with_reduction(reduce)
    trains = _trained(tree.plan)
    old = {n: x for n, x in tree.items() if isinstance(x, DTensor) and not (connects and x.requires_grad)}
    if hooked := [n for n, x in old.items() if isinstance(x, nn.Parameter) and _torch.has_gradient_hooks(x)]:
        why = f"value_and_grad: {hooked[0]!r} has hooks for its gradient, which only loss.backward() would call"
        raise ShardError(f"{why}. Remove them, and map gradients: sf.tree.map(fn, grads)")
    new = dict(zip(old, _torch.fresh_leaves([*old.values()], [*map(trains.__contains__, old)]), strict=True))
    params = Params({**tree, **new} if len(new) < len(tree) else new, plan, tree.mesh, tree.buffers)
    params.sources = tree
    params.buffers = tree.buffers  # the same dict: what a forward assigns to buffers stays
    params.in_place = tree.in_place
    if reduce is not None:
        params.gradients = Gradients(new)
    return params


def _by_torch_func(loss_of: LossOf, primals: Sequence[Any], reduce: Reduction) -> Found:
    """`differentiator` inside a transform, by `torch.func.grad`."""
    inputs = [_with_reduction(x, reduce) for x in entered("grad", primals)]
    owner = _first_tree(inputs)
    wanted = [_wanted_of(x) for x in inputs]
    leaves = sum(len(x) if isinstance(x, dict) else 1 for x in wanted)
    if not leaves:
        raise TypeError(_NOTHING)
    outermost = not active_transforms.is_under_way() and all(kind == "Vmap" for kind in _torch.kinds_of_transforms())
    passed: list[Any] = []  # what goes out beside the loss: its tensors have to leave the transform

    def objective(*values: Any) -> tuple[Tensor, Any]:
        pairs = zip(inputs, values, strict=True)
        loss, aux = loss_of([x.like({**x, **value}) if isinstance(x, Params) else value for x, value in pairs])
        loss, count = _objective(loss, owner)
        if outermost and owner is not None and not loss.requires_grad:
            raise unused("value_and_grad", leaves)
        passed[:] = [aux, count]
        return loss, (loss, _tensors(passed))

    gradients, (loss, tensors) = torch.func.grad(objective, argnums=tuple(range(len(wanted))), has_aux=True)(*wanted)
    rest = iter(tensors)
    aux, count = _torch.pytree.tree_map_only(Tensor, lambda _: next(rest), passed)
    grads = [_gradients_of(x, grads) for x, grads in zip(inputs, gradients, strict=True)]
    return _over_data(comm.pvary, _over_data(comm.pmean_of_losses, loss, owner), owner), aux, grads, count


def _with_reduction(tree: Any, reduce: Reduction) -> Any:
    """A tree under a plan with this reduction; a tensor as it is."""
    if not isinstance(tree, Params):
        return tree
    _require_reduction(reduce, tree)
    return Params(tree, tree.plan.with_reduction(reduce), tree.mesh, tree.buffers)


def _wanted_of(tree: Any) -> Any:
    """A tensor, or the leaves of a tree that have gradients."""
    if not isinstance(tree, Params):
        return tree
    trains = _trained(tree.plan)
    return {name: leaf for name, leaf in tree.items() if name in trains and may_be_differentiated(leaf)}


def _gradients_of(tree: Any, gradients: Any) -> Any:
    """What `torch.func.grad` found, as a tree: zeros where there is none."""
    if not isinstance(tree, Params):
        return gradients
    leaves = {name: gradients[name] if name in gradients else torch.zeros_like(leaf) for name, leaf in tree.items()}
    return _with_reduction(tree, "mean").like(leaves)


def _trained(plan: Plan) -> frozenset[str]:
    """Leaves that may have a gradient."""

    def found() -> frozenset[str]:
        rows = plan.leaves.items()
        return frozenset(name for name, (x, _) in rows if x.trainable and has_derivatives(x.dtype))

    return plan.home.once("trained", found)


def _objective(loss: Any, owner: Params | None) -> tuple[Tensor, Tensor | None]:
    """(what to differentiate, count of a `Mean`): divided by the mean count over ranks, so that their mean is exact.

    A count with a derivative is shared by the losses of all ranks, so that their mean has that of the quotient.
    """
    count = None
    if isinstance(loss, Mean):
        count = torch.as_tensor(_whole(loss.count), dtype=torch.float64, device=loss.total.device)
        count = _over_data(comm.pmean_of_losses, count, owner)
        shared = _over_data(comm.pvary, count, owner) if count.requires_grad or _torch.in_transform() else count
        divisor = torch.where(shared != 0, shared, 1)  # nothing counted: a loss of zero
        loss = _whole(loss.total) / divisor.to(loss.total.dtype)
    loss = _whole(loss)
    if not isinstance(loss, Tensor) or isinstance(loss, DTensor) or loss.dim():
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        aux = ", or, for value_and_grad(has_aux=True), (loss, aux)" if isinstance(loss, tuple) else ""
        must = f"value_and_grad: the loss must be a scalar tensor or sf.data.Mean(total, count){aux}"
        raise see(ShardError(f"{must}, not {what}"), "losses")
    return loss, count


def _whole(value: Any) -> Any:
    """A scalar `DTensor` as a plain one of all ranks; what `to_local` gives is a part, which counts as one of a sum."""
    return value.full_tensor() if isinstance(value, DTensor) and not value.dim() else value


def value_of(loss: Any, owner: Params) -> tuple[Tensor, Tensor | None]:
    """What `value_and_grad` with respect to a tree gives for a loss, and the count of a `Mean`, averaged over ranks."""
    value, count = _objective(loss, owner)
    return _over_data(comm.pmean_of_losses, value, owner), count


def _over_data(collective: Callable[..., Tensor], value: Tensor, owner: Params | None) -> Tensor:
    """A collective over the data ranks of the tree that is differentiated.

    `pmean_of_losses` gives their mean, `pvary` a value that all of them have alike, for use in the loss of each.
    """
    if owner is not None:
        for axis in owner.plan.roles.data:
            value = collective(value, owner.mesh, axis)
    return value


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in _torch.pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _gradients(loss: Tensor, trees: Sequence[Any], outer: bool, used: bool) -> list[Any]:
    """What autograd finds for each tree; `used`: one of their leaves must have a part in the loss."""
    wanted = active_transforms.leaves_requiring_grad(trees)
    if not wanted:
        raise TypeError(_NOTHING)
    grads: list[Tensor | None] = [None] * len(wanted)
    collected = [tree.gradients for tree in trees if isinstance(tree, Params) and tree.gradients is not None]
    if loss.requires_grad:
        with ExitStack() as stack:  # what `collected` take comes on top
            for gradients in collected:
                stack.enter_context(gradients.collect())
            grads = list(torch.autograd.grad(loss, wanted, allow_unused=True, create_graph=outer))
    if used and not any(gradients.settle() for gradients in collected) and all(grad is None for grad in grads):
        raise unused("value_and_grad", len(wanted))
    by_leaf = dict(zip(map(id, wanted), grads, strict=True))
    return [_as_tree(x, by_leaf) if isinstance(x, Params) else _plain(x, by_leaf[id(x)], trees) for x in trees]


def unused(verb: str, leaves: int) -> ShardError:
    """The error of a function that computes with other parameters than those it is given."""
    error = ShardError(
        f"{verb}: the loss depends on none of the {leaves} leaves that are differentiated, and all derivatives "
        "would be zeros. Compute with the tree that the loss is given: sf.apply(model, params, x), not model(x), nor "
        "under no_grad, inference_mode or with detach; a torch.utils.checkpoint has some with use_reentrant=False only"
    )
    return see(error, "losses")


def _plain(leaf: Tensor, gradient: Tensor | None, trees: Sequence[Any]) -> Tensor | None:
    """The gradient of a plain tensor, beside those of trees: zeros when it has none."""
    plain = plain_gradient(leaf, gradient)
    pending = (tree for tree in trees if isinstance(tree, Params) and tree.plan.reduction is None)
    if plain is not gradient and any(map(data_axes_of, pending)):
        raise ShardError("value_and_grad(reduce=None): a plain tensor is multiplied with leaves; use reduce='mean'")
    return plain if plain is not None or isinstance(leaf, DTensor) else torch.zeros_like(leaf, requires_grad=False)


def plain_gradient(leaf: Any, gradient: Any) -> Any:
    """The gradient of a plain tensor that was multiplied with leaves: plain, of all parts of them; another as it is.

    It is that of the mean of the losses, the same on all ranks; over axes that share it a mean changes no cotangent.
    """
    if not isinstance(gradient, DTensor) or isinstance(leaf, DTensor):
        return gradient
    mesh = gradient.device_mesh
    return comm.into_losses(gradient.full_tensor(), mesh, mesh.mesh_dim_names or ())


def _as_tree(tree: Params, gradients: dict[int, Tensor | None]) -> Params:
    """Gradients under the caller's plan, with placements that are those of the parameters."""
    reduction = tree.plan.reduction  # None: they are pending, which their plan remembers
    plan = tree.plan.with_reduction(None if reduction is None else "mean")
    collected = tree.gradients.settle() if tree.gradients is not None else {}
    if collected.keys() == tree.keys() and all(gradient is None for gradient in gradients.values()):  # the usual case
        reduced = _torch.with_locals(list(tree.values()), [collected[name] for name in tree])
        return Params(zip(tree, reduced, strict=True), plan, tree.mesh, tree.buffers)
    grid, leaves = grid_of(tree.mesh, tree.plan.roles.storage), dict[str, Tensor]()
    for name, leaf in tree.items():
        gradient, local = gradients.get(id(leaf)), collected.get(name)
        if local is not None:
            if gradient is not None:  # what reached the leaf without the engine
                local.add_(_torch.unwrap_local(_placed(name, gradient, _torch.spec_of(leaf), reduction)))
            leaves[name] = _torch.wrap_local(local, _torch.spec_of(leaf))
            continue
        pending = reduction is None and leaf.requires_grad
        # A leaf may be stacked, of which the plan knows nothing.
        spec = comm.leaf_spec(plan, grid, name, leaf.dtype, "sum") if pending else _torch.spec_of(leaf)
        if gradient is None:
            leaves[name] = _zeros(plan, grid, leaf, name, spec, pending)
        elif not isinstance(gradient, DTensor) or tuple(gradient.placements) != spec.placements:
            leaves[name] = _placed(name, gradient, spec, reduction)
        else:
            leaves[name] = gradient
    return Params(leaves, plan, tree.mesh, tree.buffers)


def _zeros(plan: Plan, grid: Grid, leaf: Tensor, name: str, spec: _torch.DTensorSpec, pending: bool) -> Tensor:
    """The gradient of a leaf that the loss does not depend on; that of a frozen one takes no memory."""
    stacked = tuple(spec.shape[: len(spec.shape) - len(plan.leaves[name][1].shape)])
    bucket = replace(plan.bucket_of(name), leaves=(name,))
    on_grid = comm.BucketOnGrid(plan, grid, bucket, comm.FreshBuffers(grid.device), stacked)

    def zeros(shape: Sequence[int], **kind: Any) -> Tensor:
        return torch.zeros(shape if leaf.requires_grad else (), **kind).expand(shape)

    return _torch.wrap_local(on_grid.new_shards(zeros, leaf.dtype, on_grid.computed if pending else None)[0], spec)


def _placed(name: str, gradient: Tensor, spec: _torch.DTensorSpec, reduce: PlanReduction | None) -> Tensor:
    """A gradient that arithmetic on the DTensor itself made, in its parameter's placements."""
    if not isinstance(gradient, DTensor):
        raise ShardError(f"value_and_grad: '{name}' got a plain gradient of shape {tuple(gradient.shape)}")
    if reduce is None:
        raise ShardError(f"value_and_grad(reduce=None): '{name}' is used outside apply and gather; reduce it at once")
    return gradient.redistribute(gradient.device_mesh, list(spec.placements))
