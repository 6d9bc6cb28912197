"""Autograd: nodes, hooks, versions of tensors, backwards that run."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from operator import attrgetter, methodcaller
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils import _python_dispatch

from shardfn._torch.modules import left_by_dynamo


def in_selective_checkpoint() -> bool:
    """Whether a selective checkpoint keeps what operations give here, or looks for it: it counts them."""
    kinds = torch.utils.checkpoint._CachingTorchDispatchMode, torch.utils.checkpoint._CachedTorchDispatchMode
    return any(isinstance(mode, kinds) for mode in _python_dispatch._get_current_dispatch_mode_stack())


def in_reentrant_checkpoint() -> bool:
    """Whether `torch.utils.checkpoint` runs a forward here that has no graph: with `use_reentrant=True`."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not torch.utils.checkpoint.CheckpointFunction.forward.__code__:
        frame = frame.f_back
    return frame is not None


# What calls something with the gradient of a tensor.
HOOKING = (Tensor.register_hook, Tensor.retain_grad)


def has_hooks(x: Tensor) -> bool:
    """Whether something is called with the gradient of a tensor, or of outputs of the module that made it."""
    return bool(x._backward_hooks) or _function_of(x) is BackwardHookFunction


def users_backward(x: Tensor) -> type | None:
    """The `autograd.Function` of the user's that made x."""
    function = _function_of(x)
    module = function.__module__ if function is not None else ""
    ours = module.partition(".")[0] == __name__.partition(".")[0]
    torchs = module.startswith("torch.") and not module.startswith("torch._library.")  # which wraps the user's
    return None if ours or torchs else function


def _function_of(x: Tensor) -> type | None:
    return getattr(x.grad_fn, "_forward_cls", None)


def blank_gradients(x: Tensor) -> list[Tensor]:
    """Gradients without data of all that the `autograd.Function` made that made x."""
    node: Any = x.grad_fn
    return [torch.empty(tuple(y.shape), dtype=y.dtype, device="meta") for y in node._input_metadata]


# A number of the backward under way in this thread, larger than those of all that began before; -1 when there is none.
backward_id: Callable[[], int] = torch._C._current_graph_task_id


# Run a callback when the backward that is running now has visited its whole graph.
after_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback


def accumulates(node: Any) -> bool:
    """Whether the backward under way only adds a gradient for `node` to the `.grad` of a leaf."""
    if type(node).__name__ != "AccumulateGrad":
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # autograd.grad collects it
        return False


node_that_runs: Callable[[], Any] = torch._C._current_autograd_node  # of the backward in this thread; None outside
number_of: Callable[[Any], int] = methodcaller("_sequence_nr")  # of a node: how many this thread had made before it
made_before: Callable[[], int] = attrgetter("_C._autograd._get_sequence_nr")(torch)
metadata_of: Callable[[Any], dict[Any, Any]] = attrgetter("metadata")  # a dict that lives as long as a node of a graph


profiles: Callable[[], bool] = attrgetter("_profiler_enabled")(torch.autograd)  # whether torch's profiler runs


def out_of_inference_mode() -> AbstractContextManager[Any]:
    """Tensors made within are ordinary ones, which may be written later; gradients are recorded as before."""
    return _out_of_inference_mode() if torch.is_inference_mode_enabled() else nullcontext()


@contextmanager
def _out_of_inference_mode() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def grad_dtypes_of(leaves: Iterable[Tensor]) -> list[torch.dtype]:
    """The dtypes of the gradients of leaves, which may be set to others than the leaves' own."""
    return [(leaf.grad_dtype if leaf.is_leaf else None) or leaf.dtype for leaf in leaves]


def has_gradient_hooks(leaf: Tensor) -> bool:
    """Whether hooks of a leaf wait for its gradient."""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


def watch_backward(why: Callable[[], Exception]) -> None:
    """Have a backward of what asked for no gradient, of which torch says just that, raise this."""
    original = torch.autograd.backward

    @left_by_dynamo
    @wraps(original)
    def backward(*args: Any, **kwargs: Any) -> None:
        try:
            original(*args, **kwargs)
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            raise why() from error

    torch.autograd.backward = backward
