"""Optimizer classes of torch, on trees of shards."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, optim
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop

from shardfn._torch import unwrap_local, with_local
from shardfn.notation import ShardError
from shardfn.optim import base
from shardfn.optim.base import Optimizer, Tree
from shardfn.params import Params

# What they do to an element does not depend on other elements, so that a shard can be updated alone.
ELEMENTWISE = Adam, AdamW, SGD, RMSprop, Adagrad, Adadelta, NAdam, RAdam, Adamax, ASGD, Rprop
# What they do to matrices DTensor computes, as one process does.
WHOLE = (optim.Muon,)
REFUSED = {
    optim.LBFGS: "it needs a closure and one vector of all parameters; use sf.value_and_grad and a solver of your own",
    optim.Adafactor: "it looks at rows and columns of whole matrices, which torch's DTensor has no operators for; use "
    "sf.optim.adamw, or lion for less state",
    optim.SparseAdam: "it takes sparse gradients only, and gradients of shards are dense; use torch.optim.Adam",
}


class TorchState(NamedTuple):
    """State of `from_torch`: the number of updates, torch's tensors per parameter by their torch names (`exp_avg`), and
    its numbers that are the same for all parameters (`step`)."""

    step: Tensor
    slots: dict[str, Tree]
    scalars: dict[str, Tensor]


def from_torch(cls: type[optim.Optimizer], *, elementwise: bool = False, **kwargs: Any) -> Optimizer:
    """An optimizer class of torch as an `Optimizer`.

    torch's elementwise classes (Adam, AdamW, SGD, RMSprop, Adagrad, Adadelta, NAdam, RAdam, Adamax, ASGD, Rprop) run on
    local shards. `torch.optim.Muon` sees whole `DTensor`s; `init` tries which it can update. Of another class, and of a
    subclass with methods of its own, you have to know, and say, that it is elementwise: a norm of a tensor in it would
    be that of a shard, without an error.

        >>> import torch, shardfn as sf
        >>> opt = sf.optim.from_torch(torch.optim.Adam, lr=0.5)
        >>> params = {"w": torch.ones(2)}
        >>> params, state = opt.step(params, {"w": torch.ones(2)}, opt.init(params))
        >>> params["w"], sorted(state.slots), state.scalars
        (tensor([0.5000, 0.5000]), ['exp_avg', 'exp_avg_sq'], {'step': tensor(1.)})

    Args:
        cls: a class like those in `torch.optim`.
        elementwise: what `cls` does to an element depends on no other element, so that it may run on local shards.
        kwargs: its options; `lr` may be a callable of the number of updates so far.

    Returns:
        an optimizer with state `TorchState(step, slots, scalars)`. Its `update` is pure, but not differentiable.

    Raises:
        TypeError: not an optimizer class, or an option it does not have.
        ValueError: an option out of range.
        ShardError: a class that cannot work on shards, with the reason, or that is not known and not said to be
            elementwise; in `init`, parameters that torch cannot update, or state that is no tensor.

    Communication: none for elementwise classes; what DTensor needs for others.
    """
    if not (isinstance(cls, type) and issubclass(cls, optim.Optimizer)):
        raise TypeError(f"from_torch: expected a class of torch.optim, for example torch.optim.Adam, got {cls!r}")
    for refused, why in REFUSED.items():
        if issubclass(cls, refused):
            raise ShardError(f"from_torch: {cls.__name__} cannot run on shards: {why}")
    elementwise = elementwise or _acts_as_one_of(cls, ELEMENTWISE)
    if not elementwise and not _acts_as_one_of(cls, WHOLE):
        raise ShardError(
            f"from_torch: nothing is known of {cls.__name__}, and a rank has a part of each parameter. If what it "
            "does to an element depends on no other element (no norm of a tensor, no product of matrices), write "
            f"from_torch({cls.__name__}, elementwise=True, ...); otherwise use one of sf.optim."
        )
    known = [name for name in inspect.signature(cls).parameters if name != "params"]
    for name in kwargs:
        if name not in known:
            raise TypeError(base.no_option(f"from_torch: {cls.__name__}", name, known))
    if kwargs.get("differentiable"):
        raise ValueError("from_torch: differentiable=True is not served; sf.optim.adamw and sgd are differentiable")
    adapter = _FromTorch(cls, dict(kwargs), elementwise)
    adapter.make([torch.zeros(1, 1)], torch.zeros((), dtype=torch.int64))  # torch checks its options
    default = inspect.signature(cls).parameters.get("lr")
    if default is None:
        return Optimizer(adapter.init, adapter.update, adapter.step)
    rate = partial(base.rate_at, f"from_torch({cls.__name__})", "lr", kwargs.get("lr", default.default))
    return Optimizer(adapter.init, adapter.update, adapter.step, lambda state: rate(state.step))


def _acts_as_one_of(cls: type, known: Sequence[type]) -> bool:
    """Whether a class is one of these, or a subclass with no methods of its own but `__init__`."""

    def is_alike(one: type) -> bool:
        pairs = [(getattr(cls, name), getattr(one, name)) for name in dir(one) if not name.startswith("__")]
        # Torch puts a wrapper around `step` when the first instance is made.
        return all(inspect.unwrap(a) == inspect.unwrap(b) for a, b in pairs if callable(a) or callable(b))

    return any(issubclass(cls, one) and is_alike(one) for one in known)


def _outside_tensors(optimizer: optim.Optimizer) -> dict[Any, Any]:
    """What an optimizer remembers outside of the tensors of its parameters' state."""
    remembered: dict[Any, Any] = {name: value for name, value in vars(optimizer).items() if type(value) in (int, float)}
    for group in optimizer.param_groups:
        remembered |= {name: value for name, value in group.items() if name != "params"}
    for of, state in optimizer.state.items():
        slots = state if isinstance(of, Tensor) else {of: state}
        remembered |= {name: value for name, value in slots.items() if not isinstance(value, Tensor | None)}
    return remembered


@dataclass(frozen=True)
class _FromTorch:
    """Runs a torch optimizer that lives for one call: everything it remembers is in `TorchState`.

    Before the first update torch makes its own state, so the one of `init` only shows what there will be.
    """

    cls: type[optim.Optimizer]
    kwargs: dict[str, Any]
    elementwise: bool
    templates: dict[Any, dict[str, Tensor]] = field(default_factory=dict)

    def make(self, weights: Sequence[Tensor], step: Tensor) -> optim.Optimizer:
        kwargs: dict[str, Any] = dict(self.kwargs)
        if "lr" in kwargs:
            kwargs["lr"] = base.rate_at(f"from_torch({self.cls.__name__})", "lr", kwargs["lr"], step)
        return self.cls(weights, **kwargs)

    def init(self, params: Tree) -> TorchState:
        base.require_some("from_torch.init", params)
        step = torch.zeros((), dtype=torch.int64)
        slots: dict[str, dict[str, Tensor]] = {}
        scalars: dict[str, Tensor] = {}
        for name in base.trainable(params):
            for key, value in self._template(params, name).items():
                if self.elementwise and not value.ndim:
                    scalars[key] = torch.zeros_like(value)
                else:
                    leaf = params[name] if self.elementwise else value
                    zeros = torch.zeros_like(unwrap_local(leaf), dtype=value.dtype)
                    slots.setdefault(key, {})[name] = with_local(leaf, zeros)
        return TorchState(step, {key: self._slot(params, leaves) for key, leaves in slots.items()}, scalars)

    def _slot(self, params: Tree, leaves: dict[str, Tensor]) -> Tree:
        return base.slot_like(params, leaves) if self.elementwise else leaves

    def _template(self, params: Tree, name: str) -> dict[str, Tensor]:
        """What torch remembers about a leaf, from one update of zeros: small ones where the shape does not matter."""
        local = unwrap_local(params[name])
        if self.elementwise:
            key = (local.dtype, local.device)
            if key not in self.templates:
                self.templates[key] = self._tried(torch.zeros(2, 3, dtype=local.dtype, device=local.device))
            return self.templates[key]
        layout = params.plan.leaves[name][0] if isinstance(params, Params) and name in params.plan.leaves else None
        if layout is not None and not layout.plain:
            why = f"{self.cls.__name__} looks at whole matrices; '{layout.name}' is stored in parts by '{layout.rule}'"
            raise ShardError(f"from_torch: {why}. Leave it to another optimizer by masked(...), or write a plain rule.")
        try:
            return self._tried(torch.zeros_like(params[name]).detach())
        except (RuntimeError, ValueError, NotImplementedError) as error:
            what = f"'{name}', {base.kind_of(params[name])} of shape {tuple(params[name].shape)}"
            why = f"torch's {self.cls.__name__} cannot update {what}: {str(error).partition(chr(10))[0]}"
            raise ShardError(f"from_torch: {why} Choose what it can with masked(...).") from error

    def _tried(self, weight: Tensor) -> dict[str, Tensor]:
        optimizer = self.make([weight], torch.zeros((), dtype=torch.int64))
        weight.grad = torch.zeros_like(weight)
        before = _outside_tensors(optimizer)
        optimizer.step()
        for name, value in _outside_tensors(optimizer).items():
            if name not in before or (before[name] is not value and before[name] != value):
                why = f"{self.cls.__name__} counts {name!r} = {value!r}, which is no tensor in the state of a parameter"
                raise ShardError(f"from_torch: {why}: it would begin anew. Give trainer.parameters() to it.")
        return {key: value for key, value in optimizer.state[weight].items() if isinstance(value, Tensor)}

    def update(self, grads: Tree, state: TorchState, params: Tree) -> tuple[Tree, TorchState]:
        names = self._checked("from_torch.update", params, grads, state)
        if torch.is_grad_enabled() and any(grads[name].requires_grad for name in names):
            raise ShardError("from_torch.update has no derivative; detach the gradients, or use sf.optim.adamw or sgd")
        with torch.no_grad():
            weights = {name: self._view(params[name]).clone() for name in names}
            slots = {key: {name: leaf.clone() for name, leaf in tree.items()} for key, tree in state.slots.items()}
            after = self._advance(params, grads, state._replace(slots=slots), weights)
            for name, weight in weights.items():
                weights[name] = with_local(params[name], unwrap_local(weight - self._view(params[name])))
        return base.slot_like(params, weights), after

    def step(self, params: Tree, grads: Tree, state: TorchState) -> tuple[Tree, TorchState]:
        names = self._checked("from_torch.step", params, grads, state)
        base.require_outside("from_torch.step", params, grads)
        with torch.no_grad():
            after = self._advance(params, grads, state, {name: self._view(params[name]) for name in names})
        state.step.copy_(after.step)  # a state that is used again goes on
        state.slots.update(after.slots)
        state.scalars.update(after.scalars)
        return params, state

    def _view(self, leaf: Tensor) -> Tensor:
        """The same memory without autograd: torch writes into it, and hangs a gradient on it."""
        return (unwrap_local(leaf) if self.elementwise else leaf).detach()

    def _checked(self, verb: str, params: Tree, grads: Tree, state: Any) -> list[str]:
        names = base.trainable(params)
        base.require_match(verb, "grads", params, names, grads)
        if not isinstance(state, TorchState):
            raise base.other_state(verb, state, "from_torch(...).init(params)")
        for key, tree in state.slots.items() if self.elementwise else ():
            base.require_match(verb, f"state.slots[{key!r}]", params, names, tree)
        return names

    def _advance(self, params: Tree, grads: Tree, state: TorchState, weights: dict[str, Tensor]) -> TorchState:
        """One step of torch's optimizer on `weights` and on the slots of the state, in place."""
        if not weights:
            return state._replace(step=state.step + 1)
        optimizer = self.make(list(weights.values()), state.step)
        started = int(state.step) > 0
        for name, weight in weights.items():
            weight.grad = self._view(grads[name]).to(weight.dtype).contiguous()
            if started:
                slots = {key: self._view(tree[name]) for key, tree in state.slots.items() if name in tree}
                optimizer.state[weight] = slots | {key: value.clone() for key, value in state.scalars.items()}
        optimizer.step()
        after: dict[str, dict[str, Tensor]] = {key: {} for key in state.slots}
        scalars = dict(state.scalars)
        for name, weight in weights.items():
            for key, value in optimizer.state[weight].items():
                if key in scalars:
                    scalars[key] = value
                elif isinstance(value, Tensor):
                    after[key][name] = with_local(params[name], value) if self.elementwise else value
            weight.grad = None
        return TorchState(state.step + 1, {key: self._slot(params, leaves) for key, leaves in after.items()}, scalars)
