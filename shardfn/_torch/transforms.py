"""Transforms and modes that go on: which they are, what they wrap, what runs outside of them."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch._C._functorch as functorch
import torch.utils.checkpoint
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter, temporarily_clear_interpreter_stack
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.distributed._local_tensor import LocalTensor, enabled_local_tensor_mode
from torch.distributed.tensor import DTensor


def materialized(x: torch.Tensor) -> torch.Tensor:
    """x with memory behind it: forward mode hands over ZeroTensors, which a collective cannot read or fill."""
    return x.clone() if not torch.compiler.is_compiling() and x._is_zerotensor() else x


def traces_first_order() -> bool:
    """Whether the graph being traced is at most one `func.grad` deep. Answered while tracing, a constant of the graph.

    In a graph (torch 2.13) the tangent of an `autograd.Function` without `jvp` is zero, `vmap` runs its collective on
    an undefined value, and its second derivative is that of a constant: all without an error.
    """
    return kinds_of_transforms() in ((), ("Grad",))


# What `torch.compiler.assume_constant_result` does, without the 0.7 s that importing Dynamo takes.
traces_first_order.__dict__["_dynamo_marked_constant"] = True


innermost_transform: Callable[[], Any] = functorch.peek_interpreter_stack  # of `torch.func`; None outside of all


def in_transform() -> bool:
    """Whether a `torch.func` transform is active; saved-tensor hooks are forbidden there."""
    return functorch.peek_interpreter_stack() is not None


def from_outside(x: Tensor) -> bool:
    """Whether x belongs to a transform that is not running at this point."""
    return functorch.maybe_get_level(x) > len(functorch.get_interpreter_stack() or ())


def differentiated_in_vmap(tensors: Iterable[Tensor]) -> bool:
    """Whether a `grad` inside a `vmap` differentiates with respect to one of the tensors."""
    stack = functorch.get_interpreter_stack() or []
    first = next((level.level() for level in stack if level.key() == functorch.TransformType.Vmap), None)
    grads = {level.level() for level in stack if level.key() == functorch.TransformType.Grad}
    return first is not None and any((at := functorch.maybe_get_level(x)) > first and at in grads for x in tensors)


def differentiated_in_transform(x: Tensor) -> bool:
    """Whether an active transform differentiates with respect to what x is made of."""
    if functorch.is_functorch_wrapped_tensor(x) and forward_ad.unpack_dual(x).tangent is not None:
        return True
    while functorch.is_functorch_wrapped_tensor(x):
        if x.requires_grad:
            return True
        x = functorch.get_unwrapped(x)
    return False


def innermost_value(x: Tensor) -> Tensor:
    """The tensor that transforms wrap, with all mapped dims and no derivative."""
    while functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return x


def values_of(x: Tensor) -> list[Tensor]:
    """The same; of simulated ranks, each one's."""
    x = innermost_value(x)
    return [x._local_tensors[rank] for rank in sorted(x._ranks)] if isinstance(x, LocalTensor) else [x]


# What torch.distributed does with its arguments in place, and what `torch.func.jvp` of a DTensor begins with.
MESSAGES = [getattr(torch.ops.c10d, name).default for name in ("allreduce_", "reduce_", "broadcast_", "allgather_")]
JVP = torch.ops.aten._has_same_storage_numel.default


def refuse_of_dtensors(operations: Iterable[Any], why: Callable[[], Exception]) -> None:
    """Have operations on a DTensor, which torch refuses without a reason, raise this."""

    def refuse(*_: Any) -> Any:
        raise why()

    DTensor._op_dispatcher._custom_op_handlers.update(dict.fromkeys(operations, refuse))


@cache
def checkpoint_nothing_in_transforms() -> None:
    """Have `torch.utils.checkpoint` only call its function inside a transform, where torch forbids its hooks."""
    module = torch.utils.checkpoint
    autograd: Any = vars(torch._C)["_autograd"]
    generator = module._checkpoint_without_reentrant_generator

    def plain_in_transforms(*args: Any, **kwargs: Any) -> Any:
        forbidden = autograd._saved_tensors_hooks_get_disabled_error_message()
        if in_transform() or forbidden is not None:  # the second in a shape-only trace, outside of transforms
            yield
        else:
            yield from generator(*args, **kwargs)

    module._checkpoint_without_reentrant_generator = plain_in_transforms


def pull_back(pull: Any, cotangents: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What a function that `torch.func.vjp` made says of cotangents; without grad mode, too, for the sake of `jvp`.

    Some backward formulas have a form of their own for when nobody differentiates them, which has no forward mode.
    """
    return pull(cotangents, create_graph="Jvp" in kinds_of_transforms() or torch.is_grad_enabled())


class Level:
    """The innermost transform of `torch.func`, for an operation that says itself what it is there and below."""

    def __init__(self, interpreter: Any) -> None:
        self._interpreter, self._number = interpreter, interpreter.level()
        self.kind: str = interpreter.key().name  # "Grad", "Jvp", "Vmap"

    def below(self) -> AbstractContextManager[Any]:
        """Within it, the transform around this one is the innermost."""
        return self._interpreter.lower()

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Value and tangent of a tensor, as they are below; None where it has no tangent."""
        primal, tangent = forward_ad.unpack_dual(x)
        return self._inside(primal), None if tangent is None else materialized(self._inside(tangent))

    def tracked(
        self, function: type[torch.autograd.Function], below: Callable[..., Any], fn: Any, inputs: Sequence[Tensor]
    ) -> Any:
        """`below(fn, *inputs)` without this transform, of which `function` says how it is differentiated."""

        def wrapped(x: Tensor) -> Tensor:
            return functorch._wrap_for_grad(x, self._number)

        def forward(fn: Any, *operands: Tensor) -> Any:
            lowered = [self._inside(x) for x in operands]
            with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), self._interpreter.lower():
                outputs = below(fn, *lowered)
            return tuple(map(wrapped, outputs))

        methods = {name: staticmethod(getattr(function, name)) for name in ("setup_context", "backward")}
        methods["forward"] = staticmethod(forward)
        once: Any = type(function.__name__, (torch.autograd.function._SingleLevelFunction,), methods)
        # One that only transforms around this one differentiate would be asked here for what it is in forward mode.
        lifted = [x if functorch.maybe_get_level(x) == self._number else wrapped(x) for x in inputs]
        with enable_single_level_autograd_function():
            return once.apply(fn, *lifted)

    def _inside(self, x: Tensor) -> Tensor:
        return functorch._unwrap_for_grad(x, self._number)


def innermost() -> Level | None:
    """The innermost transform, if there is one."""
    return Level(retrieve_current_functorch_interpreter()) if in_transform() else None


def kinds_of_transforms() -> tuple[str, ...]:
    """Of the active ones, outermost first."""
    return tuple(level.key().name for level in functorch.get_interpreter_stack() or ())


def vmap_depth() -> int:
    """How many `vmap`s are active."""
    return kinds_of_transforms().count("Vmap")


def outside_transforms() -> AbstractContextManager[Any]:
    """Within it no `torch.func` transform is active, for work on tensors that none of them has to do with."""
    return temporarily_clear_interpreter_stack() if in_transform() else nullcontext()


def has_no_memory() -> bool:
    """Whether new tensors stand for values that a graph will compute; see `sf.jit`."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def simulated() -> bool:
    """Whether tensors hold the values of all ranks; see `sf.simulate`."""
    return enabled_local_tensor_mode() is not None


def is_traced() -> bool:
    """Whether operations are recorded into a graph by `make_fx`, as `torch.func.linearize` does."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def seen_by_dynamo() -> bool:
    """Whether Dynamo traces this call, or looks at the calls that are made here: in a frame that it gave up, say."""
    return torch.compiler.is_compiling() or callback_of_dynamo() is not None


# What Dynamo does with the frames of calls that are made here; None when it does not look at them.
callback_of_dynamo: Callable[[], Any] = eval_frame.get_eval_frame_callback
