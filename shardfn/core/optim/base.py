"""What an optimizer is: its updates, its options and those of groups of parameters, its learning rate. Layer 4."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from shardfn.core.context import recording
from shardfn.core.errors import did_you_mean
from shardfn.core.optim.trees import Tree, like, require_match, require_tree, views

Options: TypeAlias = Mapping[str, Any]
Groups: TypeAlias = Mapping[str, Options]
Rate: TypeAlias = float | Callable[[int], float]  # or a function of the number of updates so far


class Optimizer(NamedTuple):
    """Three functions. Whatever an optimizer remembers is in its state, a pytree.

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
            objects, `nn.Parameter`s too, and the old state is used up. Outside autograd.
    """

    init: Callable[[Tree], Any]
    update: Callable[[Tree, Any, Tree], tuple[Tree, Any]]
    step: Callable[[Tree, Tree, Any], tuple[Tree, Any]]


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
    new = {
        name: wrap(params[name], (local(params[name]) + local(updates[name])).to(params[name].dtype)) for name in names
    }
    return like(params, {**params, **new})


def rate_at(verb: str, what: str, fn: Callable[..., Any], step: Tensor) -> Any:
    """The rate after so many updates; in a recorded step it is asked for before every run."""

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
        raise ValueError(
            f"warmup_cosine: warmup={warmup!r} and total={total!r} must be 0 <= warmup <= total, total >= 1"
        )

    def rate(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / warmup
        done = min((step - warmup) / max(total - warmup, 1), 1.0) if step < total else 1.0
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * done))

    return rate


def at_step(verb: str, options: Options, step: Tensor) -> Options:
    """Options with the learning rate of this step, which counts from 0."""
    lr = options["lr"]
    return options if not callable(lr) else {**options, "lr": rate_at(verb, "lr", lr, step)}


_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "lr": (lambda x: 0 <= x < math.inf, "a finite number from 0 up, or a callable step -> float"),
    "weight_decay": (lambda x: 0 <= x < math.inf, "a finite number from 0 up"),
    "eps": (lambda x: 0 <= x < math.inf, "a finite number from 0 up"),
    "momentum": (lambda x: 0 <= x < math.inf, "a finite number from 0 up"),
    "b1": (lambda x: 0 <= x < 1, "from 0 up to, but not including, 1"),
    "b2": (lambda x: 0 <= x < 1, "from 0 up to, but not including, 1"),
}


def no_option(where: str, name: str, known: Collection[str]) -> str:
    return f"{where} has no option {name!r}{did_you_mean(name, known) or '.'} There are {', '.join(known)}."


def require_options(where: str, given: Options, defaults: Options) -> None:
    for name, value in given.items():
        if name not in defaults:
            raise ValueError(no_option(where, name, defaults))
        if name not in _RANGES:
            if not isinstance(value, bool):
                raise TypeError(f"{where}: {name}={value!r} is not True or False")
        elif isinstance(value, bool) or not (isinstance(value, int | float) or (name == "lr" and callable(value))):
            raise TypeError(f"{where}: {name}={value!r} must be {_RANGES[name][1]}")
        elif not callable(value) and not _RANGES[name][0](value):
            raise ValueError(f"{where}: {name}={value!r} must be {_RANGES[name][1]}")
    merged = {**defaults, **given}
    if merged.get("nesterov") and not merged["momentum"]:
        raise ValueError(f"{where}: nesterov=True needs a momentum, for example momentum=0.9")
