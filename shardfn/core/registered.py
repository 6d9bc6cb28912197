"""How a parallel forward is declared: for the classes of a user's own modules, and what is known of it. Layer 1.

`Policy(compute={pattern: fn})` declares one for modules by name. What a forward has as attributes is known of it:

    keeps          the data axes over which it computes with a part of the weights
    without_data   `shaped(module, *args)`, which stands for the module's own forward in a run without data
    calls_own      whether it calls the module's own, and does the rest within `Layouts.hidden()`
"""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from shardfn.core.model import ModuleInfo, class_name

Forward = TypeVar("Forward", bound=Callable[..., Any])

# By the name of a class, for the whole program: a library registers its modules where it defines them.
_FORWARDS: dict[str, Callable[..., Any]] = {}


def register(module_class: type[nn.Module]) -> Callable[[Forward], Forward]:
    """A decorator: the function is the parallel forward of a module class whose weights may be split.

    Without it a module of torch other than linears, embeddings, convolutions, norms of channels and
    `nn.MultiheadAttention` cannot split a weight over a compute axis, and a class of your own only where a run without
    data can follow its parts. Plans made afterwards know it, in every process. `Policy(compute={pattern: fn})` does the
    same for modules by name, and comes first.

        >>> import torch, shardfn as sf
        >>> from torch import nn
        >>> class Gain(nn.Module):
        ...     def __init__(self, size):
        ...         super().__init__()
        ...         self.gain = nn.Parameter(torch.ones(size))
        ...     def forward(self, x):
        ...         return x * self.gain
        >>> @sf.register(Gain)
        ... def split_gain(module, local, layouts, x):  # x [..., size/tp], local["gain"] [size/tp]
        ...     return x * local["gain"]
        >>> sf.plan(Gain(8), sf.MeshSpec(tp=2), sf.Policy(rules={"gain": "c@tp"})).local_shape("gain")
        (4,)

    Args:
        module_class: the class; subclasses that keep its forward are meant too.

    Returns:
        the decorator, which returns the function itself. The function is called as `fn(module, local, layouts, *args,
        **kwargs)`: `local` maps the attributes of the module's own parameters, not of its children's, to what this rank
        computes with, whole over data axes and split over compute axes, and `layouts` to their `Layout`. Collectives in
        it are those of `sf.collectives`, over `layouts.mesh`.

    Raises:
        TypeError: not a module class.

    Communication: none; what the function does.
    """
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        raise TypeError(f"register: expected a class of nn.Module, got {module_class!r}")

    def keep(function: Forward) -> Forward:
        if not callable(function):
            raise TypeError(f"register: expected a function, got {function!r}")
        _FORWARDS[class_name(module_class)] = function
        return function

    return keep


def registered(module: ModuleInfo) -> Callable[..., Any] | None:
    """The one of the class whose forward a module has, or of the most derived class with that very forward."""
    until = module.classes.index(module.forward) + 1 if module.forward else 0
    return next((_FORWARDS[name] for name in module.classes[:until] if name in _FORWARDS), None)


def declares(**known: Any) -> Callable[[Forward], Forward]:
    """A decorator of a parallel forward: what is known of it, see above."""

    def note(forward: Forward) -> Forward:
        vars(forward).update(known)
        return forward

    return note


def calls_own(forward: Callable[..., Any]) -> bool:
    """Whether a parallel forward, or the one that a `partial` is of, calls the module's own."""
    return getattr(getattr(forward, "func", forward), "calls_own", False)
