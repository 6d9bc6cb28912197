"""The functions that random programs call, for one process and the whole batch: plain torch, nothing of the library.

A program is given this module in place of `shardfn`. Every derivative is one of `torch.autograd.grad`, every `vmap` a
loop, so that what it gives is what the words mean.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from shardfn._torch import pytree


class Params(dict[str, Any]):
    """Parameters by name, tied ones once."""

    buffers: dict[str, Tensor]
    model: Any
    trains: frozenset[str]

    def like(self, leaves: Any) -> "Params":
        """The same with other leaves."""
        made = Params(leaves)
        made.buffers, made.model, made.trains = self.buffers, self.model, self.trains
        return made

    def select(self, *_: Any) -> "Params":
        """All of it: programs only look at what they selected."""
        return self


class _Context(tuple[str, ...]):
    """The names of a tree, which are what is compared, and the tree."""

    tree: Params


def _flatten(tree: Params) -> tuple[list[Any], _Context]:
    context = _Context(tree)
    context.tree = tree
    return list(tree.values()), context


pytree.register_pytree_node(
    Params, _flatten, lambda leaves, context: context.tree.like(zip(context, leaves, strict=True))
)


def Policy(**fields: Any) -> dict[str, Any]:
    """Nothing is split."""
    return fields


def register(_: type) -> Callable[[Any], Any]:
    """A parallel forward is for others."""
    return lambda fn: fn


def shard(model: Any, *_: Any, **__: Any) -> Params:
    """The parameters of a model themselves; another tree of the same model, or of a mapping, has copies."""
    named = dict(model.named_parameters()) if isinstance(model, nn.Module) else dict(model)
    if not isinstance(model, nn.Module) or hasattr(model, "_taken"):
        tree = Params({n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in named.items()})
    else:
        tree = Params(named)
        object.__setattr__(model, "_taken", True)
    tree.model = model
    tree.trains = frozenset(n for n, p in named.items() if p.requires_grad or not isinstance(model, nn.Module))
    tree.buffers = {n: b.clone() for n, b in model.named_buffers()} if isinstance(model, nn.Module) else {}
    return tree


def apply(model: nn.Module, params: Params, *args: Any, method: str | None = None, **kwargs: Any) -> Any:
    """`functional_call`; buffers that are assigned stay in the tree."""
    buffers = params.buffers if isinstance(params, Params) else {}
    weights: dict[str, Tensor] = {**params, **buffers}
    if method is None:
        out = functional_call(model, weights, args, kwargs, tie_weights=True)
    else:
        named = {f"model.{n}": w for n, w in weights.items()}
        out = functional_call(_Method(model, method), named, args, kwargs, tie_weights=True)
        weights = {name.removeprefix("model."): w for name, w in named.items()}
    buffers.update({name: weights[name].detach() for name in buffers})
    return out


class _Method(nn.Module):
    def __init__(self, model: nn.Module, method: str) -> None:
        super().__init__()
        self.model, self.method = model, method

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.model, self.method)(*args, **kwargs)


# ---------------------------------------------------------------------------------------------------------------------
# Derivatives

_depth = [0]


@contextmanager
def _deeper() -> Iterator[None]:
    _depth[0] += 1
    try:
        yield
    finally:
        _depth[0] -= 1


def _leaf(x: Any, wanted: bool = True) -> Any:
    """The same values as something to differentiate with respect to."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or not wanted or x.requires_grad:
        return x
    return x.detach().clone().requires_grad_()


def _leaves_of(tree: Any, frozen: bool = False) -> Any:
    """Of trees of parameters only those that train, or all."""
    if isinstance(tree, Params):
        return tree.like((name, _leaf(x, frozen or name in tree.trains)) for name, x in tree.items())
    if isinstance(tree, Mapping):
        return {name: _leaves_of(x, frozen) for name, x in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)([_leaves_of(x, frozen) for x in tree])
    return _leaf(tree)


def _trains(tree: Any) -> Any:
    """Whether each leaf is differentiated."""
    if isinstance(tree, Params):
        return [name in tree.trains for name in tree]
    if isinstance(tree, Mapping):
        return [_trains(x) for x in tree.values()]
    return [_trains(x) for x in tree] if isinstance(tree, list | tuple) else True


def _gradients(outputs: Sequence[Tensor], wanted: Sequence[Any], given: Sequence[Tensor] | None = None) -> list[Any]:
    """Zeros where there is none."""
    chosen = [x for x in wanted if isinstance(x, Tensor) and x.requires_grad]
    pairs = [(out, None if given is None else given[i]) for i, out in enumerate(outputs) if out.requires_grad]
    found: Sequence[Any] = [None] * len(chosen)
    if pairs and chosen:
        outs, cotangents = zip(*pairs, strict=True)
        found = torch.autograd.grad(
            outs, chosen, None if given is None else cotangents, create_graph=True, allow_unused=True
        )
    by_id = dict(zip(map(id, chosen), found, strict=True))
    return [g if (g := by_id.get(id(x))) is not None else torch.zeros_like(x) for x in wanted]


def _result(tree: Any) -> Any:
    if _depth[0]:
        return tree
    return pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, tree)


def value_and_grad(fn: Callable[..., Any], *, argnums: Any = 0, has_aux: bool = False, reduce: Any = "mean") -> Any:
    """As the library's."""
    positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad(), _deeper():
            given = [_leaves_of(x) if i in positions else x for i, x in enumerate(args)]
            out = fn(*given, **kwargs)
            loss, aux = out if has_aux else (out, None)
            if isinstance(loss, Mean):
                loss = loss.total / loss.count
            flat, structure = pytree.tree_flatten([given[i] for i in positions])
            trains = pytree.tree_leaves([_trains(given[i]) for i in positions])
            found = _gradients([loss], flat)
            found = [g if wanted else torch.zeros_like(g) for g, wanted in zip(found, trains, strict=True)]
            grads = pytree.tree_unflatten(found, structure)
        grads = grads[0] if isinstance(argnums, int) else tuple(grads)
        return _result((((loss, aux) if has_aux else loss), grads))

    return call


def grad(fn: Callable[..., Any], *, argnums: Any = 0, has_aux: bool = False, reduce: Any = "mean") -> Any:
    """As the library's."""
    both = value_and_grad(fn, argnums=argnums, has_aux=has_aux, reduce=reduce)

    def call(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return call


def vjp(fn: Callable[..., Any], *primals: Any) -> Any:
    """As the library's, without `has_aux`."""
    with torch.enable_grad(), _deeper():
        given = [_leaves_of(x, frozen=True) for x in primals]
        out = fn(*given)
    flat, structure = pytree.tree_flatten(tuple(given))
    outs, _ = pytree.tree_flatten(out)

    def pull(cotangent: Any) -> Any:
        with torch.enable_grad(), _deeper():
            found = _gradients(outs, flat, pytree.tree_leaves(cotangent))
        return _result(pytree.tree_unflatten(found, structure))

    return _result(out), pull


class _LayerNorm(TorchFunctionMode):
    """By its formula: torch's has a wrong third derivative (2.13)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.layer_norm:
            return func(*args, **(kwargs or {}))
        x, shape = args
        named = {"weight": None, "bias": None, "eps": 1e-5} | (kwargs or {})
        dims = tuple(range(-len(shape), 0))
        var, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
        out = (x - mean) / (var + named["eps"]).sqrt()
        out = out if named["weight"] is None else out * named["weight"]
        return out if named["bias"] is None else out + named["bias"]


def jvp(fn: Callable[..., Any], primals: Any, tangents: Any) -> Any:
    """By differentiating twice backwards."""
    with torch.enable_grad(), _deeper():
        given = [_leaves_of(x, frozen=True) for x in primals]
        with _LayerNorm():
            out = fn(*given)
        flat, outs = pytree.tree_leaves(tuple(given)), pytree.tree_flatten(out)
        tied = [torch.zeros_like(x).requires_grad_() for x in outs[0]]
        pulled = _gradients(outs[0], flat, tied)
        slopes = _gradients(pulled, tied, pytree.tree_leaves(tangents))
    return _result((out, pytree.tree_unflatten(slopes, outs[1])))


def hvp(fn: Callable[..., Any], primals: Any, tangent: Any) -> Any:
    """As the library's."""
    params, *batch = primals
    return jvp(lambda p: grad(fn)(p, *batch), (params,), (tangent,))[1]


def vmap(fn: Callable[..., Any], in_dims: Any = 0, out_dims: int = 0) -> Any:
    """By a loop."""

    def call(*args: Any) -> Any:
        dims = in_dims if isinstance(in_dims, tuple) else (in_dims,) * len(args)
        sizes = [pytree.tree_leaves(x)[0].shape[d] for x, d in zip(args, dims, strict=True) if d is not None]

        def entry(i: int) -> list[Any]:
            return [
                x if d is None else pytree.tree_map(lambda leaf, d=d: leaf.select(d, i), x)
                for x, d in zip(args, dims, strict=True)
            ]

        found = [fn(*entry(i)) for i in range(sizes[0])]
        return pytree.tree_map(lambda *xs: torch.stack(xs, out_dims), *found)

    return call


def jit(fn: Any) -> Any:
    """Nothing is compiled."""
    return fn


# ---------------------------------------------------------------------------------------------------------------------
# Layouts


def gather(tree: Any, names: Any = None, *, to: str = "all", dtype: Any = None) -> dict[str, Tensor]:
    """Parameters under the model's names."""
    if isinstance(tree, Params) and isinstance(tree.model, nn.Module):
        by_id = {id(p): name for name, p in tree.model.named_parameters()}
        every = tree.model.named_parameters(remove_duplicate=False)
        return {name: tree[by_id[id(p)]] for name, p in every if by_id[id(p)] in tree}
    return dict(tree)


def reshard(tree: Any, *_: Any) -> Any:
    """One layout."""
    return tree


def reduce_grads(grads: Any, *, op: str = "mean", like: Any = None) -> Any:
    """One rank."""
    return grads


def cross_entropy(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """Mean cross entropy of classes in the last dim."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), **options)


def _dot(a: Any, b: Any) -> Tensor:
    return torch.stack([(x * y).sum() for x, y in zip(_tensors(a), _tensors(b), strict=True)]).sum()


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def _map(fn: Callable[..., Any], *trees: Any) -> Any:
    """What is made of a tree outside of a differentiation is a new tree."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and _depth[0] > 0):
        return pytree.tree_map(fn, *trees)


tree = SimpleNamespace(
    map=_map,
    zeros_like=lambda t: _map(torch.zeros_like, t),
    cast=lambda t, dtype: _map(lambda x: x.to(dtype), t),
    lerp=lambda a, b, w: _map(lambda x, y: x + w * (y - x), a, b),
    ema=lambda a, b, decay: _map(lambda x, y: decay * x + (1 - decay) * y, a, b),
    dot=_dot,
    select=lambda t, _: t,
)


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers, by their formulas


class Optimizer:
    """Rules one after the other: rule(grads, params, state, step) -> (updates, state)."""

    def __init__(self, *rules: Callable[..., Any]) -> None:
        self.rules = rules

    def init(self, params: Params) -> Any:
        """State before the first step."""
        return 0, [None] * len(self.rules)

    def update(self, grads: Params, state: Any, params: Params) -> tuple[Params, Any]:
        """Pure."""
        step, states = state[0] + 1, list(state[1])
        for i, rule in enumerate(self.rules):
            grads, states[i] = rule(grads, params, states[i], step)
        return grads, (step, states)

    def step(self, params: Params, grads: Params, state: Any) -> tuple[Params, Any]:
        """In place, unless it is differentiated."""
        updates, state = self.update(grads, state, params)
        if torch.is_grad_enabled() and any(grad.requires_grad for grad in grads.values()):
            return params.like((name, leaf + updates[name]) for name, leaf in params.items()), state
        with torch.no_grad():
            for name, leaf in params.items():
                if name in params.trains:
                    leaf.add_(updates[name])
        return params, state


def _each(rule: Callable[..., tuple[Tensor, Any]]) -> Optimizer:
    def all_of(grads: Params, params: Params, state: Any, step: int) -> tuple[Params, Any]:
        found = {
            n: rule(g, params[n], (state or {}).get(n), step) if n in params.trains else (torch.zeros_like(g), None)
            for n, g in grads.items()
        }
        return grads.like((n, u) for n, (u, _) in found.items()), {n: s for n, (_, s) in found.items()}

    return Optimizer(all_of)


def _adamw(lr: float, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01) -> Optimizer:
    def rule(g: Tensor, p: Tensor, state: Any, step: int) -> tuple[Tensor, Any]:
        mu, nu = state or (torch.zeros_like(g), torch.zeros_like(g))
        mu, nu = b1 * mu + (1 - b1) * g, b2 * nu + (1 - b2) * g * g
        scaled = (mu / (1 - b1**step)) / ((nu / (1 - b2**step)).sqrt() + eps)
        return -lr * (scaled + weight_decay * p), (mu, nu)

    return _each(rule)


def _sgd(lr: float, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> Optimizer:
    def rule(g: Tensor, p: Tensor, state: Any, step: int) -> tuple[Tensor, Any]:
        g = g + weight_decay * p
        if not momentum:
            return -lr * g, None
        kept = g if state is None else momentum * state + g
        return -lr * (g + momentum * kept if nesterov else kept), kept

    return _each(rule)


def _lion(lr: float, b1: float = 0.9, b2: float = 0.99, weight_decay: float = 0.01) -> Optimizer:
    def rule(g: Tensor, p: Tensor, state: Any, step: int) -> tuple[Tensor, Any]:
        mu = torch.zeros_like(g) if state is None else state
        return -lr * ((b1 * mu + (1 - b1) * g).sign() + weight_decay * p), b2 * mu + (1 - b2) * g

    return _each(rule)


def _norm(grads: Any) -> Tensor:
    return torch.stack([g.square().sum() for g in _tensors(grads)]).sum().sqrt()


def _clip_by_global_norm(max_norm: float) -> Optimizer:
    def rule(grads: Params, *_: Any) -> tuple[Params, Any]:
        trained = {n: grads[n] for n in grads if n in grads.trains}
        factor = (max_norm / (_norm(trained) + 1e-6)).clamp(max=1.0)
        return grads.like((n, g * factor if n in trained else g) for n, g in grads.items()), None

    return Optimizer(rule)


def _clip(grads: Params, max_norm: float) -> tuple[Params, Tensor]:
    norm = _norm({n: grads[n] for n in grads if n in grads.trains})
    return _clip_by_global_norm(max_norm).rules[0](grads)[0], norm


def _from_torch(cls: Any, **options: Any) -> Optimizer:
    def rule(grads: Params, params: Params, state: Any, step: int) -> tuple[Params, Any]:
        own = state or (leaves := {n: params[n].detach().clone() for n in params.trains}, None)
        leaves, made = own
        made = made or cls([leaf.requires_grad_() for leaf in leaves.values()], **options)
        before = {n: leaf.detach().clone() for n, leaf in leaves.items()}
        for n, leaf in leaves.items():
            leaf.grad = grads[n].detach().clone()
        with torch.enable_grad():
            made.step()
        moved = {n: leaf.detach() - before[n] for n, leaf in leaves.items()}
        return grads.like((n, moved.get(n, torch.zeros_like(g))) for n, g in grads.items()), (leaves, made)

    return Optimizer(rule)


optim = SimpleNamespace(
    adamw=_adamw,
    sgd=_sgd,
    lion=_lion,
    chain=lambda *parts: Optimizer(*(rule for part in parts for rule in part.rules)),
    clip_by_global_norm=_clip_by_global_norm,
    global_norm=_norm,
    clip=_clip,
    from_torch=_from_torch,
    apply_updates=lambda params, updates: params.like((n, p + updates[n]) for n, p in params.items()),
)


# ---------------------------------------------------------------------------------------------------------------------
# Data and classes


class Mean(NamedTuple):
    """A mean as its sum and its count."""

    total: Tensor
    count: Any


data = SimpleNamespace(local_batch=lambda batch, _: batch, rank=lambda _: (0, 1), Mean=Mean)

collectives = SimpleNamespace(**dict.fromkeys(("pvary", "psum", "pmean", "all_gather"), lambda x, *_: x))


def shard_map(*_: Any) -> Callable[[Any], Any]:
    """A region is of whole tensors."""
    return lambda fn: fn


def _itself(model: nn.Module, *_: Any, **__: Any) -> Any:
    """A model with the methods that classes add."""
    named: dict[str, Any] = {
        "module": model,
        "no_sync": nullcontext,
        "clip_grad_norm_": lambda limit: nn.utils.clip_grad_norm_(model.parameters(), limit),
        "set_requires_gradient_sync": lambda _: None,
        "summon_full_params": nullcontext,
    }
    for name, method in named.items():
        object.__setattr__(model, name, method)
    return model


def _tied(model: nn.Module, *_: Any, **__: Any) -> Any:
    """The same, whose shared parameters stay shared when others take their place."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)

    def share(*_: Any) -> None:
        for first, *others in names.values():
            for other in others:
                *path, attribute = other.split(".")
                setattr(model.get_submodule(".".join(path)), attribute, model.get_parameter(first))

    model.register_load_state_dict_post_hook(share)
    return _itself(model)


compat = SimpleNamespace(
    fsdp1=SimpleNamespace(FullyShardedDataParallel=_itself),
    fsdp2=SimpleNamespace(fully_shard=_tied),
    hfai=SimpleNamespace(FullyShardedDataParallel=_itself),
    megatron=SimpleNamespace(TorchFullyShardedDataParallel=lambda _config, _ddp, model, **__: _itself(model)),
)


class Trainer(nn.Module):
    """The steps of a `Trainer` on the whole batch."""

    model: nn.Module

    def __init__(
        self,
        model: nn.Module,
        mesh: Any = None,
        policy: Any = None,
        *,
        optimizer: Any = None,
        loss_fn: Any = None,
        accumulate: int = 1,
        clip: float | None = None,
        ema: float | None = None,
    ) -> None:
        super().__init__()
        self.__dict__["model"] = model
        self._parameters, self._modules, self._buffers = model._parameters, model._modules, model._buffers
        self.loss_fn, self.clip, self.decay = loss_fn, clip, ema
        self.optimizer = optimizer
        self.params = shard(model)
        self.params.update({n: p.detach() for n, p in model.named_parameters()})  # the same memory
        self.state = optimizer.init(self.params) if optimizer is not None else None
        self.ema_params = self.params.like((n, p.clone()) for n, p in self.params.items()) if ema else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    @property
    def module(self) -> nn.Module:
        return self.model

    def step(self, *batch: Any) -> dict[str, Any]:
        """One update."""
        loss, grads = value_and_grad(self.loss_fn)(self.params, *batch)
        norm = _norm(grads)
        if self.clip:
            grads = _clip_by_global_norm(self.clip).rules[0](grads)[0]
        self.params, self.state = self.optimizer.step(self.params, grads, self.state)
        if self.ema_params is not None:
            self.ema_params = tree.ema(self.ema_params, self.params, self.decay)
        return {"loss": loss, "grad_norm": norm}

    def evaluate(self, *batch: Any) -> dict[str, Any]:
        """The loss."""
        with torch.no_grad():
            out = self.loss_fn(self.params, *batch)
        return {"loss": out.total / out.count if isinstance(out, Mean) else out}

    def clip_grad_norm_(self, limit: float) -> Tensor:
        """torch's."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), limit)

    no_sync = staticmethod(nullcontext)


def copied(model: nn.Module) -> nn.Module:
    """A copy."""
    return copy.deepcopy(model)
