"""What an optimizer is and the trees it works on, options and rates, and optimizers made of others."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import compress
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardfn._torch import dtypes_of, foreach, in_transform, same_layouts, unwrap_local, with_local
from shardfn.context import is_differentiated, recording
from shardfn.layout import first_match, has_derivatives, matches
from shardfn.notation import ShardError, did_you_mean, raise_problems, see
from shardfn.params import Params, data_axes_of, leaves

Tree: TypeAlias = Any  # Params, or a plain dict of tensors
Options: TypeAlias = Mapping[str, Any]
Groups: TypeAlias = Mapping[str, Options]
Rate: TypeAlias = float | Callable[[int], float]  # or a function of the number of updates so far


class Optimizer(NamedTuple):
    """Functions. Whatever an optimizer remembers is in its state, a pytree.

        >>> import torch, shardfn as sf
        >>> opt = sf.optim.sgd(0.5)
        >>> params, grads = {"w": torch.ones(2)}, {"w": torch.ones(2)}
        >>> updates, state = opt.update(grads, opt.init(params), params)
        >>> sf.optim.apply_updates(params, updates)
        {'w': tensor([0.5000, 0.5000])}
        >>> params, state = opt.step(params, grads, state)
        >>> params
        {'w': tensor([0.5000, 0.5000])}

    Attributes:
        init: `init(params) -> state`; allocates, communicates nothing.
        update: `update(grads, state, params) -> (updates, state)`, pure and differentiable. Updates are added to
            parameters, see `apply_updates`; they are in float32 or wider, and only for parameters that train.
        step: `step(params, grads, state) -> (params, state)`, the same in place: the parameters returned are the same
            objects, `nn.Parameter`s too, and so may the state be. Outside autograd.
        rate: `rate(state) -> lr`, the learning rate of the next update, without groups that have their own; None where
            there is no such thing, as for `clip_by_global_norm`.
    """

    init: Callable[[Tree], Any]
    update: Callable[[Tree, Any, Tree], tuple[Tree, Any]]
    step: Callable[[Tree, Tree, Any], tuple[Tree, Any]]
    rate: Callable[[Any], Any] | None = None


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """`params + updates`, in the parameters' dtypes; parameters without an update are the same objects.

        >>> import torch, shardfn as sf
        >>> sf.optim.apply_updates({"a": torch.ones(2), "b": torch.ones(1)}, {"a": torch.ones(2)})
        {'a': tensor([2., 2.]), 'b': tensor([1.])}

    Args:
        params: the parameters; not changed.
        updates: what an optimizer's `update` returned.

    Returns:
        a new tree like `params`.

    Raises:
        ShardError: updates of other names or layouts.
    """
    names = list(require_tree("apply_updates", "updates", updates))
    require_match("apply_updates", "updates", params, names, updates)
    local, wrap = views(params, updates, names=names)
    pairs = ((name, params[name], updates[name]) for name in names)
    new = {name: wrap(param, (local(param) + local(update)).to(param.dtype)) for name, param, update in pairs}
    return like(params, {**params, **new})


# -- trees: which leaves take part, and whether two trees go together --------------------------------------------------


def trainable(params: Tree) -> list[str]:
    """Names of the leaves that an optimizer updates."""
    dtypes = dtypes_of(params.values())
    names = list(params)
    if not all(map(has_derivatives, set(dtypes))):
        names = list(compress(names, map(has_derivatives, dtypes)))
    known = params.plan.leaves if isinstance(params, Params) else {}
    return [name for name in names if name not in known or known[name][0].trainable] if known else names


def leaves_of(tree: Tree, names: Sequence[str]) -> list[Any]:
    """The leaves of these names, None for one that is missing."""
    return list(tree.values()) if list(tree) == names else [tree.get(name) for name in names]


def model_names(params: Tree, name: str) -> tuple[str, ...]:
    """What the model calls a stored leaf: `wqkv.weight[q]` is part of `wqkv.weight`; tied names are all of them."""
    known = isinstance(params, Params) and name in params.plan.leaves
    return params.plan.leaves[name][0].names if known else (name,)


pattern_of = lru_cache(maxsize=2**16)(first_match)


def like(params: Tree, leaves: Mapping[str, Tensor]) -> Tree:
    """Other leaves in a tree of the same kind."""
    return params.like(leaves) if isinstance(params, Params) else dict(leaves)


def slot_like(params: Tree, leaves: Mapping[str, Tensor]) -> Tree:
    """A tree of state: like the parameters', without the model's buffers."""
    return Params(leaves, params.plan, params.mesh) if isinstance(params, Params) else dict(leaves)


def require_tree(verb: str, what: str, got: object) -> Mapping[str, Tensor]:
    if not isinstance(got, Mapping):
        raise TypeError(f"{verb}: {what} is a {type(got).__name__}; expected what sf.shard makes, or a dict of tensors")
    return got


def require_tensors(verb: str, params: Tree) -> None:
    for name, leaf in require_tree(verb, "params", params).items():
        if not isinstance(leaf, Tensor):
            why = f"params[{name!r}] is a {type(leaf).__name__}; a tree is flat, name -> tensor"
            raise TypeError(f"{verb}: {why}; trees of several models have an optimizer each")


def require_some(verb: str, params: Tree) -> None:
    """Tensors, some of which train: nothing to do is a mistake, most often a mapping of plain tensors was sharded."""
    require_tensors(verb, params)
    if len(params) and not trainable(params):
        why = f"{verb}: none of {len(params)} parameters trains: integers, or requires_grad=False in the model"
        raise ShardError(f"{why}. sf.shard takes a mapping's word for it too: write nn.Parameter(tensor) there.")


def other_state(verb: str, state: object, init: str) -> TypeError:
    order = "update(grads, state, params), step(params, grads, state)"
    why = f"{verb}: the state is a {type(state).__name__}, not what {init} returns; write {order}"
    return see(TypeError(why), "optimizers")


def dead_patterns(patterns: Iterable[str], params: Tree) -> Iterator[str]:
    """What is wrong with patterns that match no parameter."""
    names = [model_name for name in params for model_name in model_names(params, name)]
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            yield f"{pattern!r} matches no parameter{did_you_mean(pattern, names) or '.'}"


def require_outside(verb: str, params: Tree, grads: Tree) -> None:
    """A step in place is of parameters, and has no derivative."""
    if getattr(params, "are_gradients", False):
        why = f"{verb}: its first argument is a tree of gradients; write step(params, grads, state)"
        raise see(ShardError(why), "optimizers")
    if is_differentiated(leaf for tree in (params, grads) for leaf in leaves(tree)):
        write = "updates, state = optimizer.update(grads, state, params) and sf.optim.apply_updates(params, updates)"
        raise ShardError(f"{verb} works in place and has no derivative, for which something asks. Write {write}")


def require_match(verb: str, what: str, params: Tree, names: Sequence[str], other: Tree) -> None:
    """Check that `other` has a leaf of the parameter's layout for every name, and none that is no parameter."""
    require_tree(verb, "params", params)
    have = require_tree(verb, what, other)
    if isinstance(have, Params) and have.plan.reduction is None and what == "grads" and data_axes_of(have):
        raise ShardError(f"{verb}: grads come from reduce=None and were not reduced; call sf.reduce_grads first")
    known = len(have) == len(names) or have.keys() <= params.keys()
    if known and not in_transform() and same_layouts(leaves_of(params, names), leaves_of(have, names)):
        return  # nothing to complain about, as far as can be told fast
    problems = [f"{what} has no leaf {name!r}{did_you_mean(name, have)}" for name in names if name not in have]
    unknown = [name for name in have if name not in params]
    problems += [f"{what} has {name!r}, which is no parameter{did_you_mean(name, params)}" for name in unknown]
    if not in_transform():  # where DTensors are wrapped, so that nothing of them can be read
        pairs = [(name, params[name], have[name]) for name in names if name in have and name in params]
        problems += [f"{what}[{name!r}] {why}" for name, param, leaf in pairs if (why := _mismatch(param, leaf))]
    elif isinstance(params, Params) and isinstance(have, Params):
        planned = [name for name in names if name in have and name in params.plan.leaves and name in have.plan.leaves]
        layouts = [(name, *(tree.plan.leaves[name][1] for tree in (params, have))) for name in planned]
        problems += [
            f"{what}[{name!r}] has layout {other.rule}, the first {mine.rule}; sf.reshard one of the trees before, and "
            "pass trees from outside of a vmap to sf.vmap too, with None in in_dims"
            for name, mine, other in layouts
            if mine != other
        ]
    raise_problems(verb, problems[:5] + [f"and {len(problems) - 5} more"] * (len(problems) > 5), entry="optimizers")


def _mismatch(param: Tensor, leaf: object) -> str | None:
    """Why a leaf cannot be combined with its parameter."""
    if not isinstance(leaf, Tensor):
        return f"is {leaf!r}, not a tensor; write zeros for a parameter that was not used"
    if leaf.shape != param.shape:
        return f"has shape {tuple(leaf.shape)}, the parameter {tuple(param.shape)}"
    kinds = kind_of(leaf), kind_of(param)
    if kinds[0] != kinds[1]:
        return f"is {kinds[0]}, the parameter is {kinds[1]}; sf.reduce_grads(grads, like=params) makes DTensors"
    if not isinstance(param, DTensor) or not isinstance(leaf, DTensor):
        return None
    if leaf.placements == param.placements and leaf.device_mesh == param.device_mesh:
        return None
    if any(placement.is_partial() for placement in leaf.placements):
        return "is a sum that is still pending; call sf.reduce_grads first"
    return f"has the layout {leaf.placements}, the parameter {param.placements}; sf.reshard one of the trees"


def kind_of(leaf: Tensor) -> str:
    return "a DTensor" if isinstance(leaf, DTensor) else "a plain tensor"


def views(*trees: Tree, names: Sequence[str]) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]:
    """How to compute on leaves, and to wrap a result like a parameter; see [Note: where a derivative flows]."""
    leaves = [tree[name] for tree in trees for name in names if name in tree]
    sharded = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
    flows = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
    if flows or len(sharded) < len(leaves):
        return lambda leaf: leaf, lambda param, result: result
    return unwrap_local, with_local


# -- rates and options -------------------------------------------------------------------------------------------------


def rate_at(verb: str, what: str, fn: float | Callable[..., Any], step: Tensor) -> Any:
    """The rate after so many updates, where it is a function of them; a recorded step asks for it before every run."""
    if not callable(fn):
        return fn

    def checked(step: Tensor) -> Any:
        value = fn(int(step))
        if not isinstance(value, Tensor) and not value >= 0:
            raise ValueError(f"{verb}: {what}({int(step)}) is {value!r}, which is not a number from 0 up")
        return value

    recorder = recording()
    return checked(step) if recorder is None else recorder.number(f"{verb}: {what}", checked, step)


def warmup_cosine(peak: float, warmup: int, total: int, floor: float = 0.0) -> Callable[[int], float]:
    """A learning rate that rises linearly over `warmup` steps and falls on a cosine to `floor` at step `total`.

        >>> import shardfn as sf
        >>> rate = sf.optim.warmup_cosine(1.0, warmup=4, total=12)
        >>> [round(rate(step), 3) for step in (0, 1, 3, 4, 8, 12, 99)]
        [0.25, 0.5, 1.0, 1.0, 0.5, 0.0, 0.0]

    Args:
        peak: the largest rate, reached at step `warmup - 1`; the first one is `peak / warmup`.
        warmup: steps that rise; 0 starts at the peak.
        total: the step from which on the rate is `floor`.
        floor: the last rate, not a fraction of the peak.

    Returns:
        a function of the number of updates so far, for `lr=` or `schedule`.

    Raises:
        ValueError: rates below 0, a floor above the peak, or a warm-up that is longer than the whole.
    """
    if not 0 <= floor <= peak < math.inf:
        raise ValueError(f"warmup_cosine: floor={floor!r} and peak={peak!r} must be 0 <= floor <= peak")
    if not 0 <= warmup <= total or total < 1:
        raise ValueError(f"warmup_cosine: warmup={warmup!r}, total={total!r} must be 0 <= warmup <= total, total >= 1")

    def rate(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / warmup
        done = min((step - warmup) / max(total - warmup, 1), 1.0) if step < total else 1.0
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * done))

    return rate


# Options that are numbers from 0 up: what they are below, and how that is said.
_FINITE, _SHARE = (math.inf, "a finite number from 0 up"), (1, "from 0 up to, but not including, 1")
_RANGES: dict[str, tuple[float, str]] = {"lr": (math.inf, f"{_FINITE[1]}, or a callable step -> float")}
_RANGES |= {**dict.fromkeys(("weight_decay", "eps", "momentum"), _FINITE), **dict.fromkeys(("b1", "b2"), _SHARE)}


def no_option(where: str, name: str, known: Collection[str]) -> str:
    return f"{where} has no option {name!r}{did_you_mean(name, known) or '.'} There are {', '.join(known)}."


def require_options(where: str, options: Options, defaults: Options) -> None:
    for name, value in options.items():
        if name not in defaults:
            raise ValueError(no_option(where, name, defaults))
        if isinstance(value, Iterable) and not isinstance(value, str | Tensor):
            why = f"{where}: {name} holds parameters; write {where}(lr=1e-3), and init(params) of it"
            raise see(TypeError(why), "optimizers")
        if name not in _RANGES:
            if not isinstance(value, bool):
                raise TypeError(f"{where}: {name}={value!r} is not True or False")
        elif isinstance(value, bool) or not (isinstance(value, int | float) or (name == "lr" and callable(value))):
            raise TypeError(f"{where}: {name}={value!r} must be {_RANGES[name][1]}")
        elif not callable(value) and not 0 <= value < _RANGES[name][0]:
            raise ValueError(f"{where}: {name}={value!r} must be {_RANGES[name][1]}")
    merged = {**defaults, **options}
    if merged.get("nesterov") and not merged["momentum"]:
        raise ValueError(f"{where}: nesterov=True needs a momentum, for example momentum=0.9")


# -- what changes gradients or updates on their way, and optimizers made of others -------------------------------------


def transform(verb: str, start: Callable[[], Any], change: Callable[[Tree, Any, Tree], tuple[Tree, Any]]) -> Optimizer:
    """An optimizer whose `step` adds what its `update` returns: `change` of the gradients of parameters that train."""

    def init(params: Tree) -> Any:
        require_tensors(f"{verb}.init", params)
        return start()

    def update(grads: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        names = trainable(params)
        require_match(verb, "grads", params, names, grads)
        return change(slot_like(params, {name: grads[name] for name in names}), state, params)

    def step(params: Tree, grads: Tree, state: Any) -> tuple[Tree, Any]:
        require_outside(f"{verb}.step", params, grads)
        with torch.no_grad():
            updates, state = update(grads, state, params)
            if updates:
                weights = [unwrap_local(params[name]) for name in updates]
                foreach("add_")(weights, [unwrap_local(update) for update in updates.values()])
        return params, state

    return Optimizer(init, update, step)


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

    def change(grads: Tree, state: ScheduleState, params: Tree) -> tuple[Tree, ScheduleState]:
        factor = rate_at("schedule", "fn", fn, state.step)
        local, wrap = views(grads, params, names=list(grads))
        scaled = {name: wrap(params[name], factor * local(leaf)) for name, leaf in grads.items()}
        return slot_like(params, scaled), ScheduleState(state.step + 1)

    made = transform("schedule", lambda: ScheduleState(torch.zeros((), dtype=torch.int64)), change)
    return made._replace(rate=lambda state: rate_at("schedule", "fn", fn, state.step))


def chain(*optimizers: Optimizer) -> Optimizer:
    """One after another: each takes the updates of the one before it for gradients.

    `step` uses the fused step of the last one. A `masked` optimizer is no member: as in optax, it passes on gradients
    of leaves that it leaves out, and the next member would take these for updates. Write `masked(chain(sgd(0.1),
    schedule(fn)), "**.weight")`, and another one for the others.

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
            raise TypeError(f"chain: expected a tuple of {len(optimizers)} states, that chain(...).init returns")
        states: list[Any] = []
        for member, member_state in zip(optimizers[:-1], state[:-1], strict=True):
            updates, after = member.update(grads, member_state, params)
            grads = updates if len(updates) == len(grads) else like(grads, {**grads, **updates})
            states.append(after)
        return grads, states

    def init(params: Tree) -> tuple[Any, ...]:
        return tuple(member.init(params) for member in optimizers)

    def update(grads: Tree, state: Any, params: Tree) -> tuple[Tree, tuple[Any, ...]]:
        grads, states = prepared(grads, state, params)
        updates, last = optimizers[-1].update(grads, state[-1], params)
        return updates, (*states, last)

    def step(params: Tree, grads: Tree, state: Any) -> tuple[Tree, tuple[Any, ...]]:
        require_outside("chain.step", params, grads)
        with torch.no_grad():
            grads, states = prepared(grads, state, params)
        params, last = optimizers[-1].step(params, grads, state[-1])
        return params, (*states, last)

    def rate(state: Any) -> Any:
        """A schedule after an optimizer multiplies its rate."""
        pairs = zip(optimizers, state, strict=True)
        return math.prod(member.rate(of_member) for member, of_member in pairs if member.rate is not None)

    return Optimizer(init, update, step, rate if any(member.rate for member in optimizers) else None)


def masked(optimizer: Optimizer, mask: str | Sequence[str]) -> Optimizer:
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
        mask: a pattern of parameter names, or several.

    Returns:
        an optimizer with the state of `optimizer`.

    Raises:
        TypeError: a mask of another kind.
        ShardError: in `init`, a pattern that matches nothing.

    Communication: that of `optimizer`.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"masked: {optimizer!r} is not an Optimizer")
    if not isinstance(mask, str | Sequence):
        raise TypeError(f"masked: the mask is a {type(mask).__name__}; expected patterns of names, or a list of names")
    chosen = (mask,) if isinstance(mask, str) else tuple(mask)

    def part(params: Tree, tree: Tree) -> Tree:
        picked = [name for name in params if pattern_of(chosen, model_names(params, name)) is not None]
        return like(tree, {name: tree[name] for name in picked if name in tree})

    def init(params: Tree) -> Any:
        require_tensors("masked.init", params)
        raise_problems("masked", list(dead_patterns(chosen, params)), entry="optimizers")
        return optimizer.init(part(params, params))

    def update(grads: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        return optimizer.update(part(params, require_tree("masked", "grads", grads)), state, part(params, params))

    def step(params: Tree, grads: Tree, state: Any) -> tuple[Tree, Any]:
        grads = part(params, require_tree("masked", "grads", grads))
        return params, optimizer.step(part(params, params), grads, state)[1]

    return Optimizer(init, update, step, optimizer.rate)
