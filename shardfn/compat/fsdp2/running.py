"""What goes before the call of a module that `fully_shard` made a root. Layer 6."""

from functools import partial

from torch import nn

from shardfn.compat import sharded
from shardfn.compat.fsdp2.group import groups, own_of
from shardfn.compat.sharded import Tree


def _begin(module: nn.Module, tree: Tree) -> None:
    """The first forward decides who is the root: the module that it goes through.

    Raises:
        RuntimeError: a module inside was a root before, with the words of torch.
    """
    for group in tree.units.values():
        group.put_back()
    own = own_of(module)
    if own.is_root is not None:
        return
    inner = [(name, group) for name, _, group in groups(module) if group is not own]
    for name, group in inner:
        if group.is_root:
            raise RuntimeError(
                f"FSDP state has already been lazily initialized for {name}\nFSDP requires running forward through "
                "the root module first"
            )
    own.is_root = True
    for _, group in inner:
        group.is_root = False


run = partial(sharded.run, _begin)
