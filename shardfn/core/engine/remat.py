"""Units that compute again in the backward, for transforms of `torch.func`, which forbid saved-tensor hooks. Layer 3.

    forward    save the inputs and the shards, gather, compute, free
    backward   gather, compute again under `vjp`, free
    jvp        the same under `jvp`;    vmap    the same of a function that is mapped

The last three are such functions again: `torch.func` differentiates every backward, and would keep what they computed.
So the whole weights of a unit live as long as one of these runs. What takes part must be an argument, and what comes
out a result: a tensor that a unit reaches or leaves behind in another way would have no derivative, or be computed anew
from what it was changed to. The first run of each call is watched for that.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardfn._torch import buffers_of, from_outside, materialized, pull_back, pytree
from shardfn.core.engine.compiled import as_they_are
from shardfn.core.errors import ShardError

Outputs = tuple[Tensor, ...]
Run = Callable[[Sequence[Tensor], Any, Any], Any]


def recomputed(module: nn.Module, run: Run, leaves: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
    """`run(leaves, args, kwargs)`, which saves only these for its derivatives, and draws the same numbers again.

    Raises:
        ShardError: more takes part than these and the results; found in what `module` keeps, among other places.
    """
    flat, structure = pytree.tree_flatten((args, kwargs))
    _require_plain("an argument", flat)
    tensors = [x for x in flat if isinstance(x, Tensor)]
    others = [None if isinstance(x, Tensor) else (x,) for x in flat]
    made: list[Any] = []  # what the output is made of, besides its tensors
    state: list[Any] = []

    def fn(*inputs: Tensor) -> Outputs:
        given, rest = inputs[: len(leaves)], iter(inputs[len(leaves) :])
        first = not state
        a, k = pytree.tree_unflatten([next(rest) if other is None else other[0] for other in others], structure)
        with as_they_are(), _same_circumstances(state), _Watch() if first else nullcontext():
            before = kept_tensors(module)
            out = run(given, a, k)
        found, shape = pytree.tree_flatten(out)
        if first:
            _require_plain("a result", found)
            if kept_tensors(module) != before:
                raise ShardError(f"{_WHY} keeps a tensor in an attribute or a buffer. {_INSTEAD}")
            if [id(x) for x in pytree.tree_leaves((a, k)) if isinstance(x, Tensor)] != list(
                map(id, inputs[len(leaves) :])
            ):
                raise ShardError(f"{_WHY} changes a list or dict that it was given. {_INSTEAD}")
        made[:] = [None if isinstance(x, Tensor) else (x,) for x in found], shape
        # An input that is passed on as it is must be a tensor of its own.
        return tuple(x.view_as(x) if any(x is y for y in inputs) else x for x in found if isinstance(x, Tensor))

    outputs = iter(Remat.apply(fn, *leaves, *tensors))
    plain, shape = made
    return pytree.tree_unflatten([next(outputs) if other is None else other[0] for other in plain], shape)


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
    """What a module and those in it hold in attributes and buffers, besides numbers."""
    found: list[int] = []
    for inner in module.modules():
        own = [value for name, value in vars(inner).items() if not name.startswith("_")]
        leaves = pytree.tree_leaves((own, list(buffers_of(inner).values())))
        found += [id(x) for x in leaves if isinstance(x, Tensor)]
    return found


@contextmanager
def _same_circumstances(state: list[Any]) -> Iterator[None]:
    """Within it torch draws the numbers, and casts, as it did the first time, when it notes how."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    kinds = ["cpu", *(["cuda"] if devices else [])]
    if not state:
        casts = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]
        state[:] = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in devices], casts
        yield
        return
    with torch.random.fork_rng(devices), ExitStack() as stack:
        torch.set_rng_state(state[0])
        for device, own in zip(devices, state[1], strict=True):
            torch.cuda.set_rng_state(own, device)
        for kind, dtype, enabled in state[2]:
            if enabled or torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, dtype, enabled))
        yield


class Remat(torch.autograd.Function):
    """`fn(*inputs)`, a tuple of tensors, without anything else saved for its derivatives."""

    @staticmethod
    def forward(fn: Callable[..., Outputs], *inputs: Tensor) -> Outputs:
        return fn(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
        ctx.fn, *tensors = inputs
        ctx.floats = [_differentiable(x) for x in output]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.mark_non_differentiable(*(x for x in output if not _differentiable(x)))

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        fn, inputs = ctx.fn, ctx.saved_tensors

        def pulled_back(*args: Tensor) -> Outputs:
            run, wanted = _on_floats(fn, args[: len(inputs)])
            _, pull, *_ = torch.func.vjp(run, *wanted)
            return pull_back(pull, args[len(inputs) :])

        given = [cotangent for cotangent, floats in zip(cotangents, ctx.floats, strict=True) if floats]
        found = iter(Remat.apply(pulled_back, *inputs, *map(materialized, given)))
        return None, *(next(found) if _differentiable(x) else None for x in inputs)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        fn, inputs = ctx.fn, ctx.saved_tensors

        def pushed_forward(*args: Tensor) -> Outputs:
            run, wanted = _on_floats(fn, args[: len(inputs)])
            return torch.func.jvp(run, tuple(wanted), args[len(inputs) :])[1]

        given = [(x, tangent) for x, tangent in zip(inputs, tangents[1:], strict=True) if _differentiable(x)]
        directions = (torch.zeros_like(x) if t is None else materialized(t) for x, t in given)
        found = iter(Remat.apply(pushed_forward, *inputs, *directions))
        return tuple(next(found) if floats else None for floats in ctx.floats)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        fn, *inputs = args
        out = Remat.apply(torch.func.vmap(fn, tuple(in_dims[1:]), 0, info.randomness), *inputs)
        return out, (0,) * len(out)


def _differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _on_floats(fn: Callable[..., Outputs], inputs: Sequence[Tensor]) -> tuple[Callable[..., Outputs], list[Tensor]]:
    """The function as one of its floating inputs only, with its floating outputs; those inputs."""

    def run(*floats: Tensor) -> Outputs:
        rest = iter(floats)
        out = fn(*(next(rest) if _differentiable(x) else x for x in inputs))
        return tuple(x for x in out if _differentiable(x))

    return run, [x for x in inputs if _differentiable(x)]
