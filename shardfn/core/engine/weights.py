"""The parameters of a module's copy, looked up when they are read. Layer 3."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from shardfn._torch import parameters_of, set_tables
from shardfn.core.errors import ShardError


class LazyWeights(dict[str, Any]):
    """The `_parameters` of a copy: looks a weight up when it is read.

    Missing biases stay None, and what the tree leaves out (`Policy.ignore`) is the tensor of the module itself.
    """

    def __init__(
        self,
        names: Mapping[str, str | None],
        fetch: Callable[[str], Tensor],
        own: Mapping[str, Tensor | None] = MappingProxyType({}),
    ) -> None:
        """`names[attribute]` is what `fetch` gets; without a name it is what the module's own table `own` has there."""
        super().__init__(names)
        self._fetch, self._own = fetch, own

    def __getitem__(self, attribute: str) -> Any:
        name = super().__getitem__(attribute)
        if name is None:
            return self._own.get(attribute)
        return self._fetch(name)

    def __setitem__(self, attribute: str, value: Any) -> None:
        raise ShardError(
            f"apply: a forward assigns the parameter '{attribute}'; parameters come from the tree: change the tree, or "
            "assign a plain tensor under another name"
        )

    def get(self, attribute: str, default: Any = None) -> Any:
        return self[attribute] if attribute in self else default

    def items(self) -> Any:
        own = self._own.get
        return ((attr, own(attr) if name is None else self._fetch(name)) for attr, name in super().items())

    def values(self) -> Any:
        return (weight for _, weight in self.items())

    def gathered(self) -> dict[str, Tensor | None]:
        """An ordinary table of them."""
        return {attribute: self[attribute] for attribute in self}


@contextmanager
def plain_weights(module: nn.Module) -> Iterator[None]:
    """Within it, `module` and those in it hold their weights as any module does."""
    lazy = [(m, table) for m in module.modules() if type(table := parameters_of(m)) is LazyWeights]
    try:
        for owner, table in lazy:
            set_tables(owner, parameters=table.gathered())
        yield
    finally:
        for owner, table in lazy:
            set_tables(owner, parameters=table)
