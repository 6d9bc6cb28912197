"""All ranks of a mesh in one process, by `LocalTensorMode` of torch, which is private."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor
from torch.distributed import _local_tensor
from torch.distributed._local_tensor import LocalIntNode, LocalTensor, LocalTensorMode, enabled_local_tensor_mode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardfn._torch.transforms import innermost_value

# Zeros without memory, which forward mode makes, crash an operation that a dispatch mode hands on (torch 2.13).
AS_TENSORS: dict[Any, Any] = {torch.ops.aten._efficientzerotensor.default: torch.ops.aten.zeros.default}


# All ranks of a mesh in one process, by `LocalTensorMode` of torch, which is private.


class _AsOneRank(TorchDispatchMode):
    """What torch's mode for simulated ranks (2.13) leaves open.

    Each rank draws the same from a `Generator`, as ranks do that have one each. A number that ranks have each their own
    of is that number, also where all tensors are from outside; the mode would take a placeholder. Zeros of forward mode
    have memory: a kernel that gets one without, in a tensor of many ranks, reads where there is nothing. Scripts of
    torch, which are its forward mode of some operations, get the size of a tensor.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = AS_TENSORS.get(func, func)
        if func is torch.ops.aten.size.default:
            return list(args[0].shape)
        kwargs = kwargs or {}
        generator: torch.Generator | None = kwargs.get("generator")
        flat, structure = pytree.tree_flatten((args, kwargs))
        if generator is None and not self._only_numbers_differ(flat):
            return func(*args, **kwargs)
        changes = isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable
        if changes and generator is None:
            why = "ranks would write different values into one tensor from outside of the simulation, or a copy of one"
            raise RuntimeError(f"{func}: {why}; compute a new tensor instead, such as x + n")
        before = None if generator is None else generator.get_state()

        def on_one(_: int, inputs: list[Any]) -> list[Tensor]:
            if generator is not None and before is not None:
                generator.set_state(before)
            own_args, own_kwargs = pytree.tree_unflatten(inputs, structure)
            out = func(*own_args, **own_kwargs)
            return [out] if isinstance(out, Tensor) else list(out)

        out = on_each_rank(on_one, flat)
        return args[0] if changes else out[0] if len(out) == 1 else out

    @staticmethod
    def _only_numbers_differ(values: list[Any]) -> bool:
        """Whether there are plain tensors, and of what ranks have each their own of only numbers."""
        if not any(isinstance(x, torch.SymInt) and isinstance(x.node, LocalIntNode) for x in values):
            return False
        tensors = [x for x in values if isinstance(x, Tensor)]
        return bool(tensors) and not any(isinstance(x, LocalTensor) for x in tensors)


@contextmanager
def _states_of_ranks() -> Iterator[None]:
    """Within it `get_rng_state` keeps those of all simulated ranks with what it returns, and `set_rng_state` sets them.

    Torch's mode (2.13) sets them at every operation to what it knows: what a checkpoint sets would have no effect.
    """
    get, put = torch.get_rng_state, torch.set_rng_state
    collect, spread = _local_tensor._collect_accelerator_rng_states, _local_tensor._set_accelerator_rng_states

    def states() -> dict[int, Any]:
        mode = enabled_local_tensor_mode()
        return {} if mode is None else mode._per_rank_rng_states

    def get_all() -> Tensor:
        state = get()
        vars(state)["of_ranks"] = dict(states())
        return state

    def put_all(state: Tensor) -> None:
        put(state)
        current = states()
        current.update(vars(state).get("of_ranks") or dict.fromkeys(current, (state, {})))

    def put_one(cpu: Tensor, others: dict[int, Tensor]) -> None:
        put(cpu)
        spread(others)

    with (
        patch.multiple(torch, get_rng_state=get_all, set_rng_state=put_all),
        patch.multiple(torch.random, get_rng_state=get_all, set_rng_state=put_all),
        patch.multiple(_local_tensor, _get_rng_state=lambda: (get(), collect()), _set_rng_state=put_one),
    ):
        yield


@contextmanager
def simulated_ranks(count: int) -> Iterator[None]:
    """Within it this process is `count` ranks, which have the default process group to themselves."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    c10d = dist.distributed_c10d
    outer, hook = c10d._world.default_pg, sys.excepthook
    tables = {name: getattr(c10d, name) for name in _GROUP_TABLES}
    copies: Any = {name: {k: v[:] if isinstance(v, list) else v for k, v in tables[name].items()} for name in tables}
    # Names of groups stay unique; the next group has the same name on ranks that have not simulated.
    with patch.multiple(c10d, _group_count=c10d._world.group_count, **copies):
        c10d._update_default_pg(None)
        try:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
            sys.excepthook = hook
            with LocalTensorMode(count), _states_of_ranks(), _AsOneRank():
                yield
        finally:
            for group, name in c10d._pg_names.items():
                if group not in tables["_pg_names"]:
                    c10d.__dict__["_unregister_process_group"](name)
            c10d._update_default_pg(outer)
            sys.excepthook = hook


_GROUP_TABLES = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag")


def on_each_rank(fn: Callable[[int, list[Any]], Sequence[Tensor]], values: Sequence[Any]) -> list[Tensor]:
    """`fn(rank, its values)` for every simulated rank; each result holds what all of them got. Outside autograd."""
    mode = enabled_local_tensor_mode()
    assert mode is not None
    with mode.disable():
        results = {rank: fn(rank, [part_of_rank(x, rank) for x in values]) for rank in sorted(mode.ranks)}
        return [LocalTensor(dict(zip(results, same, strict=True))) for same in zip(*results.values(), strict=True)]


def of_each_rank(x: Tensor) -> Tensor:
    """A tensor from outside of the simulation as one of all ranks, differentiable."""
    is_of_all = isinstance(innermost_value(x), LocalTensor)
    return x if is_of_all or x.is_meta else torch.where(torch.ones((), dtype=torch.bool), x, x)


def part_of_rank(x: Any, rank: int) -> Any:
    """What one simulated rank has of a tensor or a number; what is not told apart by rank is the same on all."""
    if isinstance(x, torch.SymInt):
        return x.node._local_ints[rank] if isinstance(x.node, LocalIntNode) else x.node.maybe_as_int()
    return x._local_tensors[rank] if isinstance(x, LocalTensor) else x
