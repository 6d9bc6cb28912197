"""`nn.Module`: its tables, hooks and compiler, wrap policies, and what models of transformers say of themselves."""

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch.distributed.fsdp.wrap import _recursive_wrap

# What a `CustomPolicy` of FSDP1 was made with.
function_of_custom: Callable[[Any], Callable[[Any], Any]] = attrgetter("_lambda_fn")


def wrapped_by(policy: Callable[..., Any], root: nn.Module) -> list[nn.Module]:
    """The modules in `root` that FSDP1 wraps when its `auto_wrap_policy` is a function; they stay as they are."""
    wrapped: list[nn.Module] = []

    def note(module: nn.Module, **overrides: Any) -> nn.Module:
        wrapped.append(module)
        return module

    _recursive_wrap(root, policy, note, set(), set(), only_wrap_children=True)
    return wrapped


def unsplit_classes(model: Any) -> Collection[str] | None:
    """The classes of a transformers model, or class of them, whose modules stay in one piece; None for another one."""
    return (model._no_split_modules or ()) if hasattr(model, "_no_split_modules") else None


def init_of(model: Any) -> Callable[[Any], Any] | None:
    """How a transformers model initializes one of its modules; None for another model."""
    return getattr(model, "_init_weights", None)


def names_left_out(model: Any, when: str) -> Collection[str]:
    """Names that a transformers model does without: `"load_missing"`, `"load_unexpected"` (patterns) or `"save"`."""
    return getattr(model, f"_keys_to_ignore_on_{when}", None) or ()


def convolves_plainly(cls: Any) -> bool:
    """Whether a class, if it is a convolution of torch, has its inner forward, too."""
    kinds = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
    return all(cls._conv_forward is kind._conv_forward for kind in kinds if issubclass(cls, kind))


# What a convolution whose padding is not of zeros pads before and after each dim, the last one first.
padding_widths: Callable[[Any], list[int]] = attrgetter("_reversed_padding_repeated_twice")


# The tables of what an nn.Module owns directly, also as absent (None): what `torch.func.functional_call` swaps too,
# without a public way to reach them.

parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")


def set_tables(module: nn.Module, **tables: dict[str, Any]) -> None:
    """Replace `parameters`, `buffers` or `modules` of a module, without the checks of its attributes."""
    module.__dict__.update({f"_{name}": table for name, table in tables.items()})


Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


def compiler_of(module: nn.Module) -> Compiler | None:
    """What compiles a function as `module.compile(...)` was told to compile the module; None without that call."""
    compiled: Any = module._compiled_call_impl
    # Of the context that `torch.compile` made.
    return None if compiled is None else compiled.get_compiler_config.__closure__[0].cell_contents


def compiler_of_wrapped(module: nn.Module) -> Compiler | None:
    """The same for the module in what `torch.compile(module, ...)` returned."""
    dynamo = sys.modules.get("torch._dynamo")  # without the 0.7 s that importing it takes
    wrapper: Any = module if dynamo is not None and isinstance(module, dynamo.OptimizedModule) else None
    return None if wrapper is None else wrapper.dynamo_ctx


def call_wrapped(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the module in what `torch.compile(module)` returned, not its graph."""
    return module._orig_mod(*args, **kwargs)


_READERS: list[Callable[[Any, str], None]] = []  # who wants to know, in any thread


@contextmanager
def attributes_read(note: Callable[[Any, str], None]) -> Iterator[None]:
    """Within it `note(module, name)` is called before an attribute of any module is read."""

    def read(module: Any, name: str) -> Any:
        for reader in _READERS:
            reader(module, name)
        return object.__getattribute__(module, name)

    _READERS.append(note)
    nn.Module.__getattribute__ = read
    try:
        yield
    finally:
        _READERS.remove(note)
        if not _READERS and "__getattribute__" in nn.Module.__dict__:
            del nn.Module.__getattribute__


call_uncompiled: Callable[[nn.Module], Callable[..., Any]] = attrgetter("_call_impl")  # which `compile()` compiles


def left_by_dynamo(function: Any) -> Any:
    """A decorator: Dynamo ends its graph at the function, and begins others in what that calls.

    `torch.compiler.disable(recursive=False)` does the same, and imports Dynamo, which takes 0.7 s.
    """
    action = eval_frame._FrameAction
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT))
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg="write sf.jit instead")
    return function


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether hooks run around the forward of a module or in its backward."""
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def forward_hooks(model: nn.Module) -> list[dict[int, Any]]:
    """The tables of hooks around the forward of each module, and of all modules, which fill later."""
    in_model = [hooks for m in model.modules() for hooks in (m._forward_pre_hooks, m._forward_hooks)]
    return [*in_model, torch.nn.modules.module._global_forward_pre_hooks, torch.nn.modules.module._global_forward_hooks]


def refresh_flat_weights(rnn: nn.RNNBase, plain: bool = False) -> None:
    """RNNs read their weights from a list made when they were built; make it from their attributes.

    `plain`: from what their table of parameters holds as a dict, whatever its class says.
    """
    read = partial(dict.get, rnn._parameters) if plain else partial(getattr, rnn)
    rnn._flat_weights = [read(name) for name in rnn._flat_weights_names]


IncompatibleKeys = nn.modules.module._IncompatibleKeys
