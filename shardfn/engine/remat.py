"""Units that compute again in the backward, for transforms of `torch.func`, which forbid saved-tensor hooks.

    forward    save the inputs and the shards, gather, compute, free
    backward   gather, compute again under `vjp`, free
    jvp        gather, compute under `jvp`, free;    vmap    the same of a function that is mapped

All of them are such functions again: `torch.func` differentiates every backward, and would keep what they computed.
So the whole weights of a unit live as long as one of these runs. What takes part must be an argument, and what comes
out a result: a tensor that a unit reaches or leaves behind in another way would have no derivative, or be computed anew
from what it was changed to. What a unit keeps is looked at in every call, and every operation of its first ones.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from enum import Enum
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from shardfn._torch import Level, buffers_of, from_outside, innermost, materialized, pull_back, pytree
from shardfn.binding import as_they_are
from shardfn.layout import may_be_differentiated
from shardfn.notation import ShardError

Outputs = tuple[Tensor, ...]
Run = Callable[[Sequence[Tensor], Any, Any], Any]
Again = Callable[[], AbstractContextManager[None]]


def recomputed(
    module: nn.Module, run: Run, leaves: Sequence[Tensor], args: Any, kwargs: Any, watches: bool, again: Again
) -> Any:
    """`run(leaves, args, kwargs)`, which saves only these for its derivatives, and draws the same numbers again.

    `watches`: look at every operation, which takes time; what else is wrong is found in any case. `again`: within it
    what Python code in `module` can reach holds what it held when this is called.

    Raises:
        ShardError: other tensors than these and the results take part, such as those that `module` keeps.
    """
    flat, structure = pytree.tree_flatten((args, kwargs))
    _require_plain("an argument", flat)
    tensors = [x for x in flat if isinstance(x, Tensor)]
    constants = [None if isinstance(x, Tensor) else (x,) for x in flat]
    output_spec: list[Any] = []  # the structure of the output, and what is in it besides tensors
    state: list[Any] = []

    def fn(*inputs: Tensor) -> Outputs:
        weights, rest = inputs[: len(leaves)], iter(inputs[len(leaves) :])
        first = not state
        a, k = pytree.tree_unflatten([next(rest) if const is None else const[0] for const in constants], structure)
        with as_they_are(), _same_circumstances(state, again), _Watch() if first and watches else nullcontext():
            before = kept_tensors(module)
            out = run(weights, a, k)
        results, shape = pytree.tree_flatten(out)
        if first:
            _require_plain("a result", results)
            if kept_tensors(module) != before:
                raise ShardError(f"{_WHY} keeps a tensor in an attribute or a buffer. {_INSTEAD}")
            now = [x for x in pytree.tree_leaves((a, k)) if isinstance(x, Tensor)]
            if [*map(id, now)] != [*map(id, inputs[len(leaves) :])]:
                raise ShardError(f"{_WHY} changes a list or dict that it was given. {_INSTEAD}")
        output_spec[:] = [None if isinstance(x, Tensor) else (x,) for x in results], shape
        # An input that is passed on as it is must be a tensor of its own.
        return tuple(x.view_as(x) if any(x is y for y in inputs) else x for x in results if isinstance(x, Tensor))

    outputs = iter(remat(fn, *leaves, *tensors))
    plain, shape = output_spec
    return pytree.tree_unflatten([next(outputs) if const is None else const[0] for const in plain], shape)


class Borrowed(Exception):
    """A unit that computes again reads a weight of another one, which it would have to be given."""


class _Watch(TorchFunctionMode):
    """Refuses tensors of transforms that are not running at this point: a unit reached them past its arguments."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(x, Tensor) and from_outside(x) for x in pytree.tree_leaves((args, kwargs))):
            raise ShardError(f"{_WHY} reads a tensor with a derivative that is no argument of its own. {_INSTEAD}")
        return func(*args, **kwargs)


_PLAIN = Tensor | bool | int | float | complex | str | bytes | range | slice | Enum | tuple | torch.dtype | torch.device
_WHY = "inside a transform a unit computes again from its arguments and its weights, but one of this model"
_INSTEAD = "Pass such tensors as arguments and results, or use Policy(regather=False)"


def _require_plain(what: str, leaves: Iterable[Any]) -> None:
    """Check that there is nothing that may hold tensors out of sight."""
    for leaf in leaves:
        if not isinstance(leaf, _PLAIN | None):
            raise ShardError(f"{_WHY} has {what} of {type(leaf).__name__}, which may hold a tensor. {_INSTEAD}")


def kept_tensors(module: nn.Module) -> list[int]:
    """The ids of the tensors that a module and those in it hold in attributes and buffers."""
    kept: list[Any] = []
    for inner in module.modules():
        kept += [value for name, value in vars(inner).items() if not name.startswith("_")]
        kept += buffers_of(inner).values()
    return [id(x) for x in pytree.tree_leaves(kept) if isinstance(x, Tensor)]


@contextmanager
def _same_circumstances(state: list[Any], again: Again) -> Iterator[None]:
    """Within it torch draws the same random numbers and casts alike, and Python has the same state.

    The first time, this is noted in `state`.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    kinds = ["cpu", *(["cuda"] if devices else [])]
    if not state:
        casts = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]
        state[:] = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in devices], casts
        yield
        return
    with again(), torch.random.fork_rng(devices), ExitStack() as stack:
        torch.set_rng_state(state[0])
        for device, rng_state in zip(devices, state[1], strict=True):
            torch.cuda.set_rng_state(rng_state, device)
        for kind, dtype, enabled in state[2]:
            if enabled or torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, dtype, enabled))
        yield


def remat(fn: Callable[..., Outputs], *inputs: Tensor) -> Outputs:
    """`fn(*inputs)`, a tuple of tensors, without anything else saved for its derivatives.

    In forward mode values and tangents are computed together, once. An autograd function would be asked for values
    first, and then for tangents, for which it would have to compute the values again.
    """
    level = innermost()
    if level is not None and level.kind == "Grad":
        return level.tracked(Remat, remat, fn, inputs)
    return _with_tangents(level, fn, inputs) if level is not None and level.kind == "Jvp" else Remat.apply(fn, *inputs)


def _with_tangents(level: Level, fn: Callable[..., Outputs], inputs: Sequence[Tensor]) -> Outputs:
    pairs = [level.parts(x) for x in inputs]
    moves = [tangent is not None for _, tangent in pairs]
    floats: list[bool] = []  # of the outputs

    def pushed_forward(*args: Tensor) -> Outputs:
        values, tangents = args[: len(inputs)], args[len(inputs) :]

        run, moving = _of_some(fn, values, moves, floats)
        outputs, directions, *rest = torch.func.jvp(run, moving, tangents, has_aux=True)
        return *outputs, *directions, *rest[0]

    values = [value for value, _ in pairs]
    with level.below():
        if not any(moves):
            return remat(fn, *values)
        results = remat(pushed_forward, *values, *(tangent for _, tangent in pairs if tangent is not None))
    count = sum(floats)
    duals = map(forward_ad.make_dual, results[:count], results[count : 2 * count])
    rest = iter(results[2 * count :])
    return tuple(next(duals) if is_float else next(rest) for is_float in floats)


class Remat(torch.autograd.Function):
    """`remat` without a transform, and what is the same in all of them."""

    @staticmethod
    def forward(fn: Callable[..., Outputs], *inputs: Tensor) -> Outputs:
        return fn(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
        ctx.fn, *tensors = inputs
        ctx.floats = [*map(may_be_differentiated, output)]
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(x for x in output if not may_be_differentiated(x)))

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        fn, inputs = ctx.fn, ctx.saved_tensors

        def pulled_back(*args: Tensor) -> Outputs:
            run, wanted = _of_some(fn, args[: len(inputs)], [*map(may_be_differentiated, inputs)], [])
            _, pull, *_ = torch.func.vjp(run, *wanted, has_aux=True)
            return pull_back(pull, args[len(inputs) :])

        grads = iter(remat(pulled_back, *inputs, *map(materialized, compress(cotangents, ctx.floats))))
        return None, *(next(grads) if may_be_differentiated(x) else None for x in inputs)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        fn, *inputs = args
        out = remat(torch.func.vmap(fn, tuple(in_dims[1:]), 0, info.randomness), *inputs)
        return out, (0,) * len(out)


def _of_some(
    fn: Callable[..., Outputs], inputs: Sequence[Tensor], chosen: Sequence[bool], floats: list[bool]
) -> tuple[Callable[..., tuple[Outputs, Outputs]], Outputs]:
    """The function of the chosen inputs only, which returns (floating outputs, other outputs); and these inputs.

    When it runs, `floats` says of each output whether it is floating.
    """

    def run(*values: Tensor) -> tuple[Outputs, Outputs]:
        rest = iter(values)
        out = fn(*(next(rest) if wanted else x for x, wanted in zip(inputs, chosen, strict=True)))
        floats[:] = map(may_be_differentiated, out)
        return tuple(compress(out, floats)), tuple(x for x in out if not may_be_differentiated(x))

    return run, tuple(compress(inputs, chosen))
