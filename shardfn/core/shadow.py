"""Shallow copies of modules: same class and attributes, tensors and children of their own. Layer 1.

`apply` and `init` run a model with other tensors than it holds. They do so on copies, so that the caller's model is
never changed, two calls never meet, and an exception leaves nothing bound.
"""

from typing import Any

from torch import Tensor, nn

from shardfn._torch import children_of, set_tables

OWN = "_shardfn_"  # attributes that begin so are this library's
WRAPPED = f"{OWN}wrapped_module"
CLASS = f"{OWN}class"  # on a module whose class was replaced by one that shards: the class of its model


class StandIn:
    """What this library puts in the place of a module's own forward, which is `original`; None: its class's."""

    original: Any


def patched_forward(module: nn.Module) -> Any:
    """The forward that a module itself was given, before that of its class; None without."""
    forward = unwrapped(module).__dict__.get("forward")
    return forward.original if isinstance(forward, StandIn) else forward


def unwrapped(module: nn.Module) -> nn.Module:
    """The module behind one that only stands before it, and shares its tables of children, parameters and buffers.

    The compatible classes wrap so: a tree of modules may hold such objects, names carry no prefix, and what computes is
    the module behind.
    """
    return module.__dict__.get(WRAPPED, module)


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class whose forward a module computes, and which its copies are of.

    The compatible classes stand before a module, or replace its class by one derived from it.
    """
    module = unwrapped(module)
    return module.__dict__.get(CLASS, type(module))


def submodule(module: nn.Module, path: str) -> Any:
    """The module at a path, by the tables of children: a class may have a property of a child's name."""
    for name in path.split(".") if path else ():
        child = children_of(module)[name]
        assert child is not None
        module = child
    return module


def shallow_copy(module: nn.Module, parameters: dict[str, Tensor | None], buffers: dict[str, Tensor | None]) -> Any:
    """A module of the same class that shares every attribute except parameters, buffers and the list of children.

    What this library notes on modules (`OWN`) is about them, may hold them, and would keep them alive in a copy.
    """
    module = unwrapped(module)
    copy = object.__new__(class_of(module))
    copy.__dict__.update((key, value) for key, value in module.__dict__.items() if not key.startswith(OWN))
    if isinstance(copy.__dict__.get("forward"), StandIn):
        del copy.__dict__["forward"]
    set_tables(copy, parameters=parameters, buffers=buffers, modules=dict(children_of(module)))
    return copy
