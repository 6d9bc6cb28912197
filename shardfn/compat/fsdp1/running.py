"""A forward of an instance: the plan of the tree below it, and `apply`. Layer 6."""

from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp._common_utils import TrainingState

from shardfn._torch import pytree
from shardfn.compat.fsdp1.buffers import cast_buffers
from shardfn.compat.fsdp1.instance import Instance, instance_of, instances, policy_of
from shardfn.core.engine.in_place import is_computing
from shardfn.core.plan import plan
from shardfn.core.shadow import unwrapped
from shardfn.held import Held, adopt


def own_of(module: nn.Module) -> Instance:
    """The instance of an FSDP1 module."""
    own = instance_of(module)
    assert own is not None
    return own


def held_now(module: nn.Module, full_precision: bool = False) -> Held:
    """The leaves of the tree below an instance, as one plan; made again when modules came in between."""
    own = own_of(module)
    held = own.held.get(full_precision)
    if held is None or not held.fits:
        ignored = {id(p) for _, _, inner in instances(module) for p in inner.ignored_params}
        made = plan(module, own.mesh, policy_of(module, ignore=ignored, full_precision=full_precision))
        held = own.held[full_precision] = adopt(module, made, own.mesh)
    if own.is_root is None:
        for name, _, inner in instances(module):
            inner.is_root = False if name else not inner.inner
    return held


def require_root(module: nn.Module, words: str) -> None:
    """Raise on an inner instance.

    Raises:
        RuntimeError: with these words.
    """
    held_now(module)
    if own_of(module).inner:
        raise RuntimeError(words)


def run(module: nn.Module, method: str, args: Any, kwargs: Any) -> Any:
    """The forward of an instance; inside of another one, that of its module."""
    if is_computing(module):
        return getattr(unwrapped(module), method)(*args, **kwargs)
    own = own_of(module)
    full_precision = own.full_precision_in_eval and not module.training
    held = held_now(module, full_precision)
    cast_buffers(module, not full_precision)
    if own.device.type != "cpu":
        args, kwargs = pytree.tree_map(lambda x: x.to(own.device) if isinstance(x, Tensor) else x, (args, kwargs))
    summoned = own.training_state == TrainingState.SUMMON_FULL_PARAMS and own.whole_everywhere
    if summoned and not held.plan.placed_axes:
        return getattr(unwrapped(module), method)(*args, **kwargs)
    params = held.params(module, own.comm_hook or "mean", holds_back=lambda unit: not own.syncs)
    if summoned:  # modules want DTensors
        params = held.params_of_whole(module)
    return held.run(module, params, method, args, kwargs)
