"""A call of a module that `fully_shard` made: the plan of the tree below it, and `apply`. Layer 6."""

from typing import Any

from torch import Tensor, nn

from shardfn._torch import pytree
from shardfn.compat.fsdp2.group import Group, group_of, groups, policy_of
from shardfn.core.plan import plan
from shardfn.held import Held, adopt


def own_of(module: nn.Module) -> Group:
    """The group of a module that was sharded."""
    own = group_of(module)
    assert own is not None
    return own


def held_now(module: nn.Module) -> Held:
    """The leaves of the tree below a module, as one plan; made again when anything it was made from has changed.

    Raises:
        ShardError: a parameter is no shard, or no longer laid out as it was.
    """
    own = own_of(module)
    if own.held is not None:
        found, versions, held = own.held
        if held.fits and versions == [group.version for group in found]:
            return held
    made = plan(module, own.mesh, policy_of(module, own))
    held = adopt(module, made, own.mesh)
    found = [group for _, _, group in groups(module)]
    own.held = found, [group.version for group in found], held
    return held


def begin(module: nn.Module) -> None:
    """The first forward decides who is the root: the module that it goes through.

    Raises:
        RuntimeError: a module inside was a root before, with the words of torch.
    """
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


def run(module: nn.Module, method: str, args: Any, kwargs: Any) -> Any:
    """Call a method of a module that no other sharded one runs around."""
    begin(module)
    by_unit = {name: group for name, _, group in groups(module)}
    for group in by_unit.values():
        group.put_back()
    own, held = own_of(module), held_now(module)
    if own.device.type != "cpu":
        args, kwargs = pytree.tree_map(lambda x: x.to(own.device) if isinstance(x, Tensor) else x, (args, kwargs))
    params = held.params(module, holds_back=lambda unit: by_unit[unit].holds_back)
    if any(group.scale != 1 for group in by_unit.values()):
        params.scale_of_gradients = lambda unit: by_unit[unit].scale
    return held.run(module, params, method, args, kwargs)
