"""hfai's `FullyShardedDataParallel`: FSDP1's with other arguments, and state dicts of this rank's parts."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy, StateDictType
from torch.distributed.fsdp._common_utils import TrainingState
from torch.distributed.tensor import DTensor

from shardfn._torch import group_of
from shardfn.comm import failing_together, whole
from shardfn.compat import fsdp1
from shardfn.compat.common import HYBRID, OWN_AXES
from shardfn.compat.fsdp1 import Instance, OnClassOrInstance, state_dict_settings
from shardfn.notation import ShardError
from shardfn.stateful import optimizers_of

_ONE_GROUP = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)  # as `HYBRID`: frees weights, or keeps them
PART = "shardfn"  # in the metadata of a state dict: which part it is


@contextmanager
def _summon_full_params(module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[None]:
    """FSDP1's; within it `state_dict()` of this model's optimizers is whole on the first rank, in host memory.

    Communication: what FSDP1's has, and one all-gather a tensor of optimizers that have stepped.
    """
    with ExitStack() as stack:
        for optimizer in optimizers_of(module.parameters(), Instance.of(module).mesh):
            params = (parameter for group in optimizer.param_groups for parameter in group["params"])
            states = [{key: _on_host(x) for key, x in optimizer.state.get(p, {}).items()} for p in params]
            if dist.get_rank() == Instance.of(module).mesh.mesh.flatten()[0]:
                whole_states = {"state": {at: state for at, state in enumerate(states) if state}}
                stack.callback(optimizer.register_state_dict_post_hook(lambda _, own, w=whole_states: own | w).remove)
        stack.enter_context(fsdp1.FullyShardedDataParallel.summon_full_params(module, *args, **kwargs))
        yield


def _on_host(value: Any) -> Any:
    return whole(value).cpu() if isinstance(value, DTensor) else value


class FullyShardedDataParallel(fsdp1.FullyShardedDataParallel):
    """hfai's class, also known as `haiscale.fsdp`'s, on shardfn: change the import, keep the script.

        >>> import torch, shardfn as sf
        >>> from torch import nn
        >>> from shardfn.compat.hfai import FullyShardedDataParallel
        >>> mesh = sf.make_mesh("cpu", fsdp=1)  # or torch.distributed.init_process_group(...)
        >>> model = FullyShardedDataParallel(nn.Linear(4, 2))
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> with model.summon_full_params():
        ...     model.state_dict()["weight"].shape
        torch.Size([2, 4])

    Args:
        module: what to wrap; parameters become shards in place, and `module` itself stays `fsdp.module`.
        process_group: all ranks that train together. Default: those of the default group.
        auto_wrap_policy: which modules become units.
        reshard_after_forward: whether weights are freed after the forward.
        backward_prefetch: no effect: the engine looks one unit ahead.
        forward_prefetch: no effect.
        fsdp_group_size: how many ranks share a copy of the weights; groups of so many replicate it. Default: all.
        _is_root: no effect.

    Raises:
        TypeError: an argument of another type.
        ShardError: a group size that does not divide the ranks; what FSDP1's class refuses.

    Communication: one small object exchange.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        auto_wrap_policy: Callable[..., bool] | None = None,
        reshard_after_forward: bool = True,
        backward_prefetch: BackwardPrefetch | None = None,
        forward_prefetch: bool = False,
        fsdp_group_size: int | None = None,
        _is_root: bool = True,
    ) -> None:
        if not isinstance(reshard_after_forward, bool):
            raise TypeError(f"FullyShardedDataParallel: reshard_after_forward={reshard_after_forward!r} is no bool")
        groups = _groups(process_group, fsdp_group_size)
        frees, keeps = HYBRID if isinstance(groups, tuple) else _ONE_GROUP
        with _quiet():
            super().__init__(
                module,
                groups,
                frees if reshard_after_forward else keeps,
                auto_wrap_policy=auto_wrap_policy,
                backward_prefetch=backward_prefetch,
                forward_prefetch=forward_prefetch,
                use_orig_params=True,
            )
        for _, _, record in Instance.all_in(self):
            record.state_dicts = state_dict_settings(StateDictType.LOCAL_STATE_DICT)

    summon_full_params = OnClassOrInstance(_summon_full_params)

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        """This rank's parts, as plain tensors under the model's names; in `summon_full_params` whole ones.

        Communication: none, so that one rank may call it alone.
        """
        with _quiet():
            state = super().state_dict(*args, **kwargs)
        if Instance.of(self).training_state == TrainingState.IDLE and hasattr(state, "_metadata"):
            state._metadata[PART] = _part_of(self)
        return state

    def load_state_dict(self: Any, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copy in what `state_dict` made: outside of `summon_full_params` by this rank, inside by the plain model.

        Raises:
            ShardError: on all ranks, when one has the file of another.

        Communication: outside of `summon_full_params`, one small all-gather.
        """
        if Instance.of(self).training_state == TrainingState.IDLE:
            _require_own_part(self, getattr(state_dict, "_metadata", {}).get(PART))
        with _quiet():
            return super().load_state_dict(state_dict, strict, assign)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what FSDP1's class says of NO_SHARD, a name that hfai's scripts do not know."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP is switching to use `NO_SHARD`")
        warnings.filterwarnings("ignore", "When using ``NO_SHARD``")
        yield


def _groups(base: dist.ProcessGroup | None, size: int | None) -> Any:
    """The group to shard over, or a pair with that to replicate over.

    Raises:
        TypeError, ShardError: not a group, or a size that does not fit.
    """
    if base is not None and not isinstance(base, dist.ProcessGroup):
        raise TypeError(f"FullyShardedDataParallel: process_group={base!r} is no process group")
    if size is None:
        return base
    ranks = dist.get_process_group_ranks(base if base is not None else dist.group.WORLD)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1 or len(ranks) % size:
        raise ShardError(
            f"FullyShardedDataParallel: fsdp_group_size={size!r} must divide the number of ranks, {len(ranks)}"
            + (f", {len(ranks)} % {size} = {len(ranks) % size}" if isinstance(size, int) and size > 0 else "")
        )
    if size == len(ranks):
        return base
    rows, rank = torch.tensor(ranks).view(-1, size), dist.get_rank()
    # of the groups that rows, and then columns, name this rank's; only its members make it
    return tuple(group_of(next(row for row in each.tolist() if rank in row)) for each in (rows, rows.T))


def _part_of(module: nn.Module) -> dict[str, Any]:
    mesh = Instance.of(module).mesh
    return {"rank": dist.get_rank(), "of": mesh.mesh.flatten().tolist(), "shards": mesh.get_group(OWN_AXES[1]).size()}


def _require_own_part(module: nn.Module, part: Mapping[str, Any] | None) -> None:
    here = _part_of(module)
    with failing_together(Instance.of(module).mesh, "load_state_dict"):
        if part is not None and not _alike(part, here):
            raise ShardError(
                f"load_state_dict: this is the part of rank {part['rank']} of {len(part['of'])}, cut in "
                f"{part['shards']}, and here is rank {here['rank']} of {len(here['of'])}, cut in {here['shards']}. "
                "Load this rank's own file; on another number of ranks, or with another fsdp_group_size, load a full "
                "one in summon_full_params()."
            )


def _alike(part: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    """Whether two ranks have the same part: one and the same, and those that replicate each other."""
    replicates = part["of"] == here["of"] and part["rank"] % here["shards"] == here["rank"] % here["shards"]
    return part["shards"] == here["shards"] and (part["rank"] == here["rank"] or replicates)
