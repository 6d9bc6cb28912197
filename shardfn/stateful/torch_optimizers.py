"""torch optimizers of shards: their steps that would go wrong are refused, and the others counted."""

import gc
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardfn._torch import move_to_mesh, seen_by_dynamo, simulated, spec_of
from shardfn.comm import exchange_numbers, exchange_objects, note_of_ranks, rank_of_part
from shardfn.layout import OWN, REPLACED
from shardfn.notation import ShardError
from shardfn.params import is_sum

SHARD = f"{OWN}shard"  # on a parameter that is a shard: its name, and how many dims the model's has
SUCCESSOR = f"{OWN}successor"  # the same: the shard


@cache
def watch_optimizers() -> None:
    """Look at the parameters of every torch optimizer when it steps, and count steps for trainers."""
    register_optimizer_step_pre_hook(_check_optimizer)
    register_optimizer_step_post_hook(_count_step)


_STATES: "weakref.WeakKeyDictionary[Optimizer, int]" = weakref.WeakKeyDictionary()  # id of what was seen
_NUMBERS: "weakref.WeakKeyDictionary[Optimizer, int]" = weakref.WeakKeyDictionary()  # in the order of first steps
_count = itertools.count(1).__next__
# Trainer -> the first torch optimizer of its parameters that stepped, of those left, whose steps `trainer.steps` counts
DRIVERS: "weakref.WeakKeyDictionary[Any, weakref.ref[Optimizer] | None]" = weakref.WeakKeyDictionary()


def _count_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for trainer, driver in list(DRIVERS.items()):
        if driver is None or driver() is None:  # or it is gone
            ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            if any(id(leaf) in ids for leaf in trainer.parameters()):
                driver = DRIVERS[trainer] = weakref.ref(optimizer)
        if driver is not None and driver() is optimizer:
            trainer.steps += 1


def optimizers_of(shards: Iterable[Tensor], mesh: DeviceMesh) -> list[Optimizer]:
    """Those that have stepped with some of these, in the order of their first steps, if all ranks still have them.

    When an optimizer goes is a matter of each rank's garbage collector.

    Communication: a small exchange over the mesh.
    """
    ids = set(map(id, shards))
    alive = [one for one in _NUMBERS if any(id(p) in ids for group in one.param_groups for p in group["params"])]
    of_ranks = exchange_objects(mesh, [_NUMBERS[one] for one in alive])
    return [one for one in alive if all(_NUMBERS[one] in numbers for numbers in of_ranks)]


def take_shards() -> None:
    """Optimizers that were made of parameters before these were sharded, and have not stepped, get the shards."""
    for optimizer in gc.get_objects():
        if issubclass(type(optimizer), Optimizer):
            for group in optimizer.param_groups:
                group["params"][:] = [p if p in optimizer.state else vars(p).get(SUCCESSOR, p) for p in group["params"]]


def _check_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Refuse a step that would train nothing, or with gradients of this rank only.

    Raises:
        ShardError: a parameter that a shard has replaced; a gradient that was held back under `no_sync`; groups made by
            dims which the model's parameters do not have; another rank's state.
    """
    name = type(optimizer).__name__
    params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    ours = [parameter for parameter in params if isinstance(parameter, DTensor) and SHARD in vars(parameter)]
    for parameter in params:
        if REPLACED in vars(parameter):
            raise ShardError(
                f"{name}.step: the optimizer was made before the model was sharded: it has "
                f"'{vars(parameter)[REPLACED]}' as it was, whose place a shard has taken, and would train nothing. "
                "Make the optimizer from the sharded model's parameters()."
            )
    *_, closure = (None, *args[1:], *kwargs.values())
    if not callable(closure):
        refuse_held_back(f"{name}.step", [parameter.grad for parameter in params])
    if ours and optimizer not in _STATES:
        _require_groups_of_the_model(optimizer)
    if ours:
        _NUMBERS[optimizer] = _NUMBERS.get(optimizer) or _count()
        note_of_ranks(ours[0].device_mesh, f"step an optimizer{_where_it_is(optimizer, ours[0])}")
        _require_own_states(optimizer, ours)
    if callable(closure):  # whose backward may be the one that reduces
        return args[:1], {"closure": partial(_reduced_by, closure, f"{name}.step", params)}
    return None


def _where_it_is(optimizer: Optimizer, shard: Tensor) -> str:
    """Its rates of learning and the number of its step, where Python knows them: the same on all ranks."""
    rates = [group["lr"] for group in optimizer.param_groups if isinstance(group.get("lr"), float)]
    step: Any = optimizer.state[shard].get("step") if shard in optimizer.state else None
    known = isinstance(step, int) or (isinstance(step, Tensor) and step.device.type == "cpu" and not step.dim())
    return f"{f' after {int(step)} steps' if known else ''} at {rates}"


def _reduced_by(closure: Callable[[], Any], verb: str, params: Sequence[Tensor]) -> Any:
    loss = closure()
    refuse_held_back(verb, [parameter.grad for parameter in params])
    return loss


def refuse_held_back(verb: str, grads: Iterable[Tensor | None], what: str = "a gradient") -> None:
    """Refuse gradients that were held back under `no_sync`.

    Raises:
        ShardError: there is one.
    """
    if any(map(is_sum, grads)):
        why = f"{what} was only added up under no_sync(), never reduced"
        raise ShardError(f"{verb}: {why}; run the last backward of a step outside of no_sync()")


def _require_groups_of_the_model(optimizer: Optimizer) -> None:
    """A vector whose rule has parentheses is stored with several dims: `p.dim() >= 2` takes it for a matrix.

    Raises:
        ShardError: one is in the group of the matrices, and the vectors are in another.
    """
    groups = [[(*vars(p)[SHARD], p.dim()) for p in one["params"] if SHARD in vars(p)] for one in optimizer.param_groups]
    true = [[dims for _, dims, stored in group if (dims < 2) == (stored < 2)] for group in groups]
    of_vectors = any(true_dims and max(true_dims) < 2 for true_dims in true)
    for group, true_dims in zip(groups, true, strict=True):
        taken = [f"{name!r} ({stored} dims, 1 in the model)" for name, dims, stored in group if dims < 2 <= stored]
        if taken and true_dims and of_vectors and min(true_dims) >= 2:
            raise ShardError(
                f"{type(optimizer).__name__}.step: {', '.join(taken)} is in the group of the matrices, other vectors "
                "in another: shards have a dim for each factor of a rule, so groups made by their p.dim() are not the "
                "model's. Note names by p.dim() of the model before it is sharded, and make groups by name."
            )


def _require_own_states(optimizer: Optimizer, shards: Sequence[DTensor]) -> None:
    """A pickled state is that of the rank which pickled it, whoever loads it.

    Looked at before the first step, and before the first one after `load_state_dict`.

    Raises:
        ShardError: on every rank, when one has the state of another rank, or only some have a state.

    Communication: one small all-gather over the mesh.
    """
    if _STATES.get(optimizer) == id(optimizer.state) or seen_by_dynamo() or simulated():
        return
    name, mesh = type(optimizer).__name__, shards[0].device_mesh
    problem = next(filter(None, (_foreign(optimizer.state.get(shard, {}), shard) for shard in shards)), None)
    rows = exchange_numbers(mesh, [problem is not None, bool(optimizer.state)])
    (wrong, loaded), ranks = map(sum, zip(*rows, strict=True)), len(rows)
    if wrong:
        what = problem or f"{wrong} of {ranks} ranks have loaded the state of another rank"
        raise ShardError(
            f"{name}.step: {what}. optimizer.state_dict() has this rank's parts: save it on every rank and load each "
            "its own, or whole by FSDP.optim_state_dict, get_optimizer_state_dict or trainer.save(..., optimizer=...)."
        )
    if loaded not in (0, ranks):
        raise ShardError(f"{name}.step: {loaded} of {ranks} ranks have a state and the others none; load it on all")
    _STATES[optimizer] = id(optimizer.state)


def _foreign(state: dict[str, Any], shard: DTensor) -> str | None:
    """Which part of a shard's state is another rank's, in words; the others are on the shard's own mesh from here.

    Whole tensors, such as `state_dict()` has in hfai's `summon_full_params`, are cut.
    """
    spec = spec_of(shard)
    for key, value in list(state.items()):
        plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
        if plain and value.dim() and value.shape == shard.shape:
            state[key] = distribute_tensor(value, spec.mesh, spec.placements, src_data_rank=None)
        if isinstance(value, DTensor) and value.device_mesh is not spec.mesh:
            if foreign := rank_of_part(value, spec.mesh.mesh.flatten().tolist()):
                return f"'{key}' of a parameter is {foreign}"
            if value.device_mesh == spec.mesh:
                move_to_mesh(value, spec.mesh, value.placements)
    return None
