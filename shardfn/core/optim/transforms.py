"""What changes gradients or updates on their way, and optimizers made of others. Layer 4."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn._torch import foreach, unwrap_local
from shardfn.core.errors import did_you_mean, raise_problems
from shardfn.core.optim import trees
from shardfn.core.optim.base import Optimizer, rate_at
from shardfn.core.optim.norms import clip, require_positive
from shardfn.core.optim.trees import Tree


def _transform(init: Callable[[Tree], Any], update: Callable[[Tree, Any, Tree], tuple[Tree, Any]]) -> Optimizer:
    """An optimizer whose `step` adds what its `update` returns."""

    def step(params: Tree, grads: Tree, state: Any) -> tuple[Tree, Any]:
        trees.require_outside("step", params, grads)
        with torch.no_grad():
            updates, state = update(grads, state, params)
            if updates:
                weights = [unwrap_local(params[name]) for name in updates]
                foreach("add_")(weights, [unwrap_local(update) for update in updates.values()])
        return params, state

    return Optimizer(init, update, step)


def _of_trainable(verb: str, params: Tree, grads: Tree) -> Tree:
    """The gradients of parameters that train, once they fit their parameters."""
    names = trees.trainable(params)
    trees.require_match(verb, "grads", params, names, grads)
    return trees.slot_like(params, {name: grads[name] for name in names})


def clip_by_global_norm(max_norm: float) -> Optimizer:
    """Scale gradients down so that their global norm is at most `max_norm`; goes before the optimizer in a `chain`.

        >>> import torch, shardfn as sf
        >>> opt = sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.sgd(1.0))
        >>> params = {"w": torch.zeros(2)}
        >>> params, state = opt.step(params, {"w": torch.tensor([3.0, 4.0])}, opt.init(params))
        >>> params["w"]
        tensor([-0.6000, -0.8000])

    The same as `clip`, which also returns the norm.

    Args:
        max_norm: the largest norm.

    Returns:
        a transform without state.

    Raises:
        ValueError: `max_norm` is not positive.

    Communication: that of one `global_norm` an update.
    """
    require_positive("clip_by_global_norm", max_norm)

    def init(params: Tree) -> tuple[()]:
        trees.require_tensors("clip_by_global_norm.init", params)
        return ()

    def update(grads: Tree, state: tuple[()], params: Tree) -> tuple[Tree, tuple[()]]:
        return clip(_of_trainable("clip_by_global_norm", params, grads), max_norm)[0], state

    return _transform(init, update)


class ScheduleState(NamedTuple):
    """State of `schedule`: the number of updates."""

    step: Tensor


def schedule(fn: Callable[[int], float]) -> Optimizer:
    """Multiply updates by `fn(step)`; goes after the optimizer in a `chain`.

    To change only the learning rate, `adamw(lr=fn)` does the same and keeps the fused step.

        >>> import torch, shardfn as sf
        >>> opt = sf.optim.chain(sf.optim.sgd(1.0), sf.optim.schedule(lambda step: 0.5**step))
        >>> params, grads = {"w": torch.zeros(1)}, {"w": torch.ones(1)}
        >>> state = opt.init(params)
        >>> for _ in range(2):
        ...     params, state = opt.step(params, grads, state)
        >>> params["w"]
        tensor([-1.5000])

    Args:
        fn: the factor, given the number of updates so far: 0, 1, ...

    Returns:
        a transform with state `ScheduleState(step)`.

    Raises:
        TypeError: `fn` is not callable.
        ValueError: in `update`, the factor is negative or nan.

    Communication: none.
    """
    if not callable(fn):
        raise TypeError(f"schedule: expected a callable step -> float, got {fn!r}")

    def init(params: Tree) -> ScheduleState:
        trees.require_tensors("schedule.init", params)
        return ScheduleState(torch.zeros((), dtype=torch.int64))

    def update(grads: Tree, state: ScheduleState, params: Tree) -> tuple[Tree, ScheduleState]:
        given = _of_trainable("schedule", params, grads)
        factor = rate_at("schedule", "fn", fn, state.step)
        local, wrap = trees.views(given, params, names=list(given))
        scaled = {name: wrap(params[name], factor * local(leaf)) for name, leaf in given.items()}
        return trees.slot_like(params, scaled), ScheduleState(state.step + 1)

    return _transform(init, update)


def chain(*optimizers: Optimizer) -> Optimizer:
    """One after another: each takes the updates of the one before it for gradients.

    `step` uses the fused step of the last one. A member that leaves a leaf out (`masked`) passes it on unchanged, as in
    optax: its gradient, which is then taken for its update. And the last one decides what is updated. So a `masked`
    optimizer is no member: write `masked(chain(sgd(0.1), schedule(fn)), "**.weight")`, and another one for the others.

        >>> import torch, shardfn as sf
        >>> opt = sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.adamw(1e-3))
        >>> len(opt.init({"w": torch.ones(2)}))
        2

    Args:
        optimizers: transforms and, usually last, an optimizer.

    Returns:
        an optimizer whose state is the tuple of its members' states.

    Raises:
        ValueError: there is no member.
        TypeError: a member is no optimizer; a state of another chain.

    Communication: that of its members.
    """
    if not optimizers:
        raise ValueError("chain: name at least one optimizer")
    for member in optimizers:
        if not isinstance(member, Optimizer):
            raise TypeError(f"chain: {member!r} is not an Optimizer; wrap a torch class in from_torch(cls, ...)")

    def prepared(grads: Tree, state: Any, params: Tree) -> tuple[Tree, list[Any]]:
        """What the last member gets, and the states of those before it."""
        if not isinstance(state, tuple) or len(state) != len(optimizers):
            raise TypeError(
                f"chain: expected a tuple of {len(optimizers)} states, the one that chain(...).init returns"
            )
        states: list[Any] = []
        for member, own in zip(optimizers[:-1], state[:-1], strict=True):
            updates, after = member.update(grads, own, params)
            grads = updates if len(updates) == len(grads) else trees.like(grads, {**grads, **updates})
            states.append(after)
        return grads, states

    def init(params: Tree) -> tuple[Any, ...]:
        return tuple(member.init(params) for member in optimizers)

    def update(grads: Tree, state: Any, params: Tree) -> tuple[Tree, tuple[Any, ...]]:
        grads, states = prepared(grads, state, params)
        updates, last = optimizers[-1].update(grads, state[-1], params)
        return updates, (*states, last)

    def step(params: Tree, grads: Tree, state: Any) -> tuple[Tree, tuple[Any, ...]]:
        trees.require_outside("chain.step", params, grads)
        with torch.no_grad():
            grads, states = prepared(grads, state, params)
        params, last = optimizers[-1].step(params, grads, state[-1])
        return params, (*states, last)

    return Optimizer(init, update, step)


def masked(optimizer: Optimizer, mask: str | Sequence[str] | Mapping[str, bool]) -> Optimizer:
    """An optimizer for some of the parameters; it leaves the others alone.

    Two optimizers for two sets of parameters are two `masked` ones, whose steps are called one after the other with the
    same gradients, and not members of one `chain`.

        >>> import torch, shardfn as sf
        >>> opt = sf.optim.masked(sf.optim.sgd(1.0), "**.bias")
        >>> params = {"up.weight": torch.ones(1), "up.bias": torch.ones(1)}
        >>> params, state = opt.step(params, {name: torch.ones(1) for name in params}, opt.init(params))
        >>> params
        {'up.weight': tensor([1.]), 'up.bias': tensor([0.])}

    Args:
        optimizer: what updates the chosen parameters.
        mask: a pattern of parameter names or several, or a mapping of every parameter's name to whether it is chosen.

    Returns:
        an optimizer with the state of `optimizer`.

    Raises:
        TypeError: a mask of another kind.
        ShardError: in `init`, a pattern that matches nothing, or a mapping with other names than the parameters'.

    Communication: that of `optimizer`.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"masked: {optimizer!r} is not an Optimizer")
    if not isinstance(mask, str | Mapping | Sequence):
        raise TypeError(f"masked: the mask is a {type(mask).__name__}; expected patterns, or a mapping of name -> bool")
    chosen = mask if isinstance(mask, Mapping) else ((mask,) if isinstance(mask, str) else tuple(mask))

    def part(params: Tree, tree: Tree) -> Tree:
        picked = [name for name in params if _is_chosen(chosen, trees.model_names(params, name))]
        return trees.like(tree, {name: tree[name] for name in picked if name in tree})

    def init(params: Tree) -> Any:
        trees.require_tensors("masked.init", params)
        _require_live_mask(chosen, params)
        return optimizer.init(part(params, params))

    def update(grads: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        return optimizer.update(part(params, trees.require_tree("masked", "grads", grads)), state, part(params, params))

    def step(params: Tree, grads: Tree, state: Any) -> tuple[Tree, Any]:
        grads = part(params, trees.require_tree("masked", "grads", grads))
        return params, optimizer.step(part(params, params), grads, state)[1]

    return Optimizer(init, update, step)


def _is_chosen(chosen: Mapping[str, bool] | tuple[str, ...], names: tuple[str, ...]) -> bool:
    if isinstance(chosen, Mapping):
        return any(chosen.get(name, False) for name in names)
    return trees.pattern_of(chosen, names) is not None


def _require_live_mask(chosen: Mapping[str, bool] | tuple[str, ...], params: Tree) -> None:
    if isinstance(chosen, Mapping):
        groups = [trees.model_names(params, name) for name in params]
        names = [name for group in groups for name in group]
        problems = [f"the mask has no entry for {g[0]!r}" for g in groups if not any(name in chosen for name in g)]
        problems += [
            f"the mask has {n!r}, which is no parameter{did_you_mean(n, names)}" for n in chosen if n not in names
        ]
    else:
        problems = list(trees.dead_patterns(chosen, params))
    raise_problems("masked", problems)
