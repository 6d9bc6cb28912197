"""Units that compute again in the backward, for transforms of `torch.func`, which forbid saved-tensor hooks. Layer 3.

    forward    save the inputs and the shards, gather, compute, free
    backward   gather, compute again under `vjp`, free
    jvp        the same under `jvp`;    vmap    the same of a function that is mapped

The last three are such functions again: `torch.func` differentiates every backward, and would keep what they computed.
So the whole weights of a unit live as long as one of these runs. What takes part must be an argument: a tensor that a
function reaches in another way has no derivative here.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardfn._torch import materialized, pull_back, pytree

Outputs = tuple[Tensor, ...]
Run = Callable[[Sequence[Tensor], Any, Any], Any]


def recomputed(run: Run, leaves: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
    """`run(leaves, args, kwargs)`, which saves only these for its derivatives, and draws the same numbers again."""
    flat, structure = pytree.tree_flatten((args, kwargs))
    tensors = [x for x in flat if isinstance(x, Tensor)]
    others = [None if isinstance(x, Tensor) else (x,) for x in flat]
    made: list[Any] = []  # what the output is made of, besides its tensors
    state: list[Any] = []

    def fn(*inputs: Tensor) -> Outputs:
        given, rest = inputs[: len(leaves)], iter(inputs[len(leaves) :])
        a, k = pytree.tree_unflatten([next(rest) if other is None else other[0] for other in others], structure)
        with _same_numbers(state):
            out = run(given, a, k)
        found, shape = pytree.tree_flatten(out)
        made[:] = [None if isinstance(x, Tensor) else (x,) for x in found], shape
        # An input that is passed on as it is must be a tensor of its own.
        return tuple(x.view_as(x) if any(x is y for y in inputs) else x for x in found if isinstance(x, Tensor))

    outputs = iter(Remat.apply(fn, *leaves, *tensors))
    plain, shape = made
    return pytree.tree_unflatten([next(outputs) if other is None else other[0] for other in plain], shape)


@contextmanager
def _same_numbers(state: list[Any]) -> Iterator[None]:
    """Within it, torch draws the numbers that it drew the first time; the first time it notes where it began."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    if not state:
        state[:] = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in devices]
        yield
        return
    with torch.random.fork_rng(devices):
        torch.set_rng_state(state[0])
        for device, own in zip(devices, state[1], strict=True):
            torch.cuda.set_rng_state(own, device)
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
