"""Shallow copies of modules: same class and attributes, tensors and children of their own. Layer 1.

`apply` and `init` run a model with other tensors than it holds. They do so on copies, so that the caller's model is
never changed, two calls never meet, and an exception leaves nothing bound.
"""

from typing import TypeVar

from torch import Tensor, nn

from shardfn._torch import children_of, set_tables

M = TypeVar("M", bound=nn.Module)
PLAIN = "_shardfn_plain_class"


def plain_class(module: M) -> type[M]:
    """The class of a module; of one that a compatible class wraps by standing before it, the class that was wrapped."""
    return getattr(type(module), PLAIN, type(module))


def shallow_copy(module: M, parameters: dict[str, Tensor | None], buffers: dict[str, Tensor | None]) -> M:
    """A module of the same class that shares every attribute except parameters, buffers and the list of children."""
    copy = object.__new__(plain_class(module))
    copy.__dict__.update(module.__dict__)
    set_tables(copy, parameters=parameters, buffers=buffers, modules=dict(children_of(module)))
    return copy
