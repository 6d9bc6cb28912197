"""`summon_full_params`: whole, ordinary parameters in the places of shards, for a while. Layer 6."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._common_utils import TrainingState

from shardfn._torch import unwrap_local
from shardfn.compat.fsdp1.instance import Instance
from shardfn.compat.sharded import held_now
from shardfn.core.checkpoint import from_state_dict
from shardfn.core.functional import gather
from shardfn.core.tree import Params
from shardfn.held import having, whole_in_place


class OnClassOrInstance:
    """A static method that also takes the instance it is called on for its module, as hfai's scripts do."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, module: nn.Module | None, owner: type) -> Callable[..., Any]:
        if module is None:
            return self._function

        def call(*args: Any, **kwargs: Any) -> Any:
            named = "module" in kwargs or (args and isinstance(args[0], nn.Module))
            return self._function(*args, **kwargs) if named else self._function(module, *args, **kwargs)

        return call


@dataclass(frozen=True)
class Asked:
    """What `summon_full_params` is asked for."""

    recurse: bool = True
    writeback: bool = True
    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False


@contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Within it, `named_parameters()` of the instances in `module` are whole and ordinary.

    A forward inside computes with them; with `rank0_only` it computes with the shards, on all ranks.

    Args:
        module: an instance, or a module that holds some.
        recurse: whether inner instances take part.
        writeback: whether changes count; under NO_SHARD they always do.
        rank0_only: whether only the first rank gets them.
        offload_to_cpu: whether they are on the host.
        with_grads: whether `.grad` is whole too.

    Raises:
        NotImplementedError: combinations that torch refuses, with its words.
        AssertionError: inside another one.

    Communication: one all-gather a bucket on entry.
    """
    found = [(inside, own) for _, inside, own in Instance.all_in(module) if recurse or inside is module]
    asked = Asked(recurse, writeback, rank0_only, offload_to_cpu, with_grads)
    for _, own in found:
        _check(own, asked)
    if offload_to_cpu and not rank0_only and found:
        warnings.warn(
            "offload_to_cpu=True and rank0_only=False may result in theunsharded parameters being redundantly copied "
            "to CPU memory for GPUs sharing the same CPU memory, which risks CPU OOM. We recommend using "
            "offload_to_cpu=True with rank0_only=True.",
            stacklevel=3,
        )
    inner = {id(inside) for outer, _ in found for name, inside, _ in Instance.all_in(outer) if name}
    with ExitStack() as stack:
        for inside, _ in found:
            if id(inside) not in inner:
                stack.enter_context(whole_parameters(inside, asked))
        yield


def _check(own: Instance, asked: Asked) -> None:
    orig = own.settings.use_orig_params
    if asked.with_grads and (asked.offload_to_cpu or not orig):
        raise NotImplementedError(
            f"with_grads=True, use_orig_params={orig}, offload_to_cpu={asked.offload_to_cpu} is not supported yet"
        )
    if asked.offload_to_cpu and not own.settings.shards:
        raise NotImplementedError("offload_to_cpu=True and NO_SHARD is not supported yet")
    if asked.writeback and asked.rank0_only:
        raise NotImplementedError("writeback=True and rank0_only=True is not supported yet")
    if own.training_state == TrainingState.SUMMON_FULL_PARAMS:
        raise AssertionError("Cannot manually unshard parameters when already unsharding parameters")


@contextmanager
def whole_parameters(module: nn.Module, asked: Asked) -> Iterator[None]:
    """Whole parameters in an instance, and with `recurse` in those inside it."""
    recurse, to = asked.recurse, "cpu" if asked.offload_to_cpu else "all"
    held = held_now(module)
    params = held.params(module)
    tree = params.like((name, x) for name, x in params.items() if recurse or not held.plan.leaves[name][0].unit)
    full = _full(tree, to)
    gradients = ((name, leaf.grad) for name, leaf in tree.items() if leaf.grad is not None)
    grads = _full(tree.like(gradients), to) if asked.with_grads else {}
    here = not asked.rank0_only or dist.get_rank() == Instance.of(module).first_rank
    states = [own for _, inside, own in Instance.all_in(module) if recurse or inside is module]
    with having(*states, training_state=TrainingState.SUMMON_FULL_PARAMS, is_whole=not asked.rank0_only):
        with whole_in_place(module, full if here else {}, held) as made:
            for name, grad in grads.items():
                if name in made:
                    made[name].grad = grad
            yield
        # what is not split at all is changed in any case, as in torch
        kept = {name: p for name, p in made.items() if asked.writeback or not held.plan.layouts[name].axes}
        held.copy_in(_shards(tree, {name: p.detach() for name, p in kept.items()}))
        if asked.with_grads:
            _put_grads(tree, {name: p.grad.detach() for name, p in kept.items() if p.grad is not None})


def _full(tree: Params, to: Any) -> dict[str, Tensor]:
    """Whole values of canonical names, which nobody else has."""
    found = gather(tree, to=to) if tree else {}
    return {name: found[name].detach() for name in tree.plan.layouts if name in found}


def _shards(tree: Params, full: Mapping[str, Tensor]) -> Params:
    """The shards of whole values of canonical names."""
    like = tree.like((name, leaf) for name, leaf in tree.items() if tree.plan.leaves[name][0].name in full)
    return from_state_dict(like, full)


def _put_grads(tree: Params, full: Mapping[str, Tensor]) -> None:
    """Give the leaves of a tree the shards of whole gradients."""
    for name, grad in _shards(tree, full).items():
        if tree[name].grad is None:
            tree[name].grad = grad
        else:
            unwrap_local(tree[name].grad).copy_(unwrap_local(grad))
