"""What goes before the call of an instance of FSDP1. Layer 6."""

from functools import partial

from torch import nn

from shardfn.compat import sharded
from shardfn.compat.fsdp1.buffers import cast_buffers
from shardfn.compat.fsdp1.instance import own_of
from shardfn.compat.sharded import Tree, held_now


def require_root(module: nn.Module, words: str) -> None:
    """Raise on an inner instance.

    Raises:
        RuntimeError: with these words.
    """
    held_now(module)
    if own_of(module).inner:
        raise RuntimeError(words)


def _begin(module: nn.Module, tree: Tree) -> None:
    cast_buffers(module, not own_of(module).is_exact(module))


run = partial(sharded.run, _begin)
