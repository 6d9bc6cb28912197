"""A method that calls its model as often as the values say, such as `generate`: its inner calls, one by one. Layer 4.

Tokens decide when it stops, so that it cannot run without data. It runs on a shell: a copy of the model, in which every
module hands on the calls that it gets from the method. Those are what runs without data, and then on the copies that
compute; a cache that goes from one call to the next keeps what they put into it, this rank's part.
"""

import weakref
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from torch import Tensor, nn

from shardfn._torch import pytree
from shardfn.core.engine.binding import Bound, Forward, InnerCall, Wiring, is_cache
from shardfn.core.engine.values import snapshot, tensors_in
from shardfn.core.errors import ShardError
from shardfn.core.model import submodule, unwrapped

Step = Callable[[str, Any, Any], Any]


class Shell:
    """The copy of a model that a method runs on: `step(path, args, kwargs)` is every call of a module."""

    def __init__(
        self,
        model: nn.Module,
        names: Mapping[str, Mapping[str, str]],
        weight: Callable[[str], Tensor],
        ignored: frozenset[str],
        step: Step,
    ) -> None:
        around = {path: self._entry(model, path, step) for path, _ in model.named_modules()}
        self._bound = Bound(model, Wiring(names, weight, around=around, ignored=ignored))

    @staticmethod
    def _entry(model: nn.Module, path: str, step: Step) -> Callable[[Forward], Forward]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return step(path, args, kwargs)

        # The method may ask for its signature: `generate` passes what a forward takes.
        return lambda _: wraps(unwrapped(submodule(model, path)).forward)(call)

    def run(self, method: str, args: Any, kwargs: Any, buffers: dict[str, Tensor]) -> Any:
        """What the method returns."""
        root = self._bound.root
        self._bound.begin(buffers)
        uncompiled = hasattr(root, "get_compiled_call")
        if uncompiled:  # generate compiles the model for static caches; units are compiled by the policy
            here = weakref.ref(root)
            root.__dict__["get_compiled_call"] = lambda compile_config: here()
        try:
            return getattr(root, method)(*args, **kwargs)
        finally:
            if uncompiled:
                del root.__dict__["get_compiled_call"]
            self._bound.write_back(buffers)


class History:
    """The first inner call of each kind: a run without data repeats them, so that caches are filled as they were."""

    def __init__(self) -> None:
        self._calls: dict[Any, InnerCall] = {}
        self._caches: dict[int, tuple[Any, Any]] = {}  # the cache itself keeps its id from being given to another one

    def note(self, kind: Any, path: str, args: Any, kwargs: Any) -> Any:
        """Remember a call that is about to be made, if it is the first of its kind; returns that kind."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        known = any(map(filled, filter(is_cache, leaves)))  # how, a run of calls before says, of any length
        kinds = ((type(x), filled(x)) if is_cache(x) else kind(x, known) for x in leaves)
        key = (path, str(structure), *kinds)
        for cache in filter(is_cache, leaves):
            if id(cache) not in self._caches:
                self._caches[id(cache)] = cache, None if filled(cache) else snapshot(cache)
        if key not in self._calls:
            args, kwargs = pytree.tree_unflatten([self._empty(x) for x in leaves], structure)
            self._calls[key] = path, args, kwargs
        return key

    def _empty(self, leaf: Any) -> Any:
        return self._caches[id(leaf)][1] or _FILLED if is_cache(leaf) else leaf

    def calls(self) -> list[InnerCall]:
        """The calls up to now.

        Raises:
            ShardError: a cache was filled before the method began, and nobody knows with what.
        """
        calls = list(self._calls.values())
        if any(leaf is _FILLED for leaf in pytree.tree_leaves(calls)):
            raise ShardError(
                "apply: the first call of its kind gets a cache that is filled already, so that nothing tells which "
                "part of it this rank has. Generate once with an empty cache, which is then known, or leave it out."
            )
        return calls


_FILLED = object()


def filled(cache: Any) -> bool:
    """Whether a cache holds keys and values."""
    return any(x.is_floating_point() and x.numel() for x in tensors_in(cache, 4, of_caches=True))
