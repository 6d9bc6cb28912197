"""Mistakes that a new user makes: what each error says to write is put in, and the program runs."""

import re
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import einops
import pytest
import torch
from drawing import untyped
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import shardfn as sf
from shardfn.compat.fsdp1 import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from shardfn.testing import RankError, on_meshes, run

RULES = {"0.weight": "f@tp c@fsdp", "0.bias": "f@tp", "2.weight": "c@fsdp f@tp"}
X = torch.ones(4, 8)


def _mlp(hidden: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 8))


def _tree(mesh: DeviceMesh, model: nn.Module | None = None, rules: Any = RULES, **fields: Any) -> sf.Params:
    return sf.shard(model or _mlp(), mesh, sf.Policy(rules=rules, **fields))


def _loss(model: nn.Module) -> Callable[[sf.Params, Tensor], Tensor]:
    return lambda params, x: sf.apply(model, params, x).square().mean()


def _step(mesh: DeviceMesh, loss: Callable[[nn.Module], Callable[..., Any]], **options: Any) -> Any:
    model = _mlp()
    return sf.value_and_grad(loss(model), **options)(_tree(mesh, model), X)


class _Rotated(nn.Module):
    """Activations times a buffer, as rotary embeddings are."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("angles", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.angles)


def _low(mesh: DeviceMesh, model: nn.Module, dtype: torch.dtype = torch.float32) -> sf.Params:
    params = sf.shard(model, mesh, sf.Policy(compute_dtype=torch.bfloat16))
    params.buffers["angles"] = params.buffers["angles"].to(dtype)
    return params


class _Looped(nn.Module):
    """Attention within one position, head by head, as a loop or by einops."""

    def __init__(self, head: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.o, self.head = nn.Linear(8, 16), nn.Linear(16, 8), head

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.head(self.q(x)))


def _by_loop(q: Tensor) -> Tensor:
    heads = q.unflatten(-1, (-1, 4))
    return torch.cat([heads[..., i, :].softmax(-1) for i in range(heads.shape[-2])], -1)


def _with_number(q: Tensor) -> Tensor:
    return einops.rearrange(einops.rearrange(q, "b (h d) -> b h d", d=4).softmax(-1), "b h d -> b (h d)", h=4)


def _without_number(q: Tensor) -> Tensor:
    return einops.rearrange(einops.rearrange(q, "b (h d) -> b h d", d=4).softmax(-1), "b h d -> b (h d)")


HEADS = {"q.weight": "(heads@tp d) c@fsdp", "o.weight": "c@fsdp (heads@tp d)"}


def _heads(mesh: DeviceMesh, head: Callable[[Tensor], Tensor], **fields: Any) -> Any:
    model = _Looped(head)
    return sf.apply(model, _tree(mesh, model, HEADS, sizes={"heads": 4}, **fields), X)


def _normed(mesh: DeviceMesh, rules: Any) -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8))
    return sf.apply(model, _tree(mesh, model, {**RULES, **rules}), X)


class _Inside(nn.Module):
    """Something done with the middle of a forward."""

    def __init__(self, change: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.change = nn.Linear(8, 16), nn.Linear(16, 8), change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(lambda x: self.down(self.up(x).relu()), x)


def _inside(mesh: DeviceMesh, change: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> Any:
    model = _Inside(change)
    params = _tree(mesh, model, {"up.weight": "f@tp c@fsdp", "down.weight": "c@fsdp f@tp"})
    return sf.grad(_loss(model))(params, X)


def _around(mesh: DeviceMesh) -> Any:
    model = _Inside(lambda f, x: f(x))
    params = _tree(mesh, model, {"up.weight": "f@tp c@fsdp", "down.weight": "c@fsdp f@tp"})

    def loss(params: sf.Params, x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: sf.apply(model, params, y).sum())(x).square().mean()

    return sf.grad(loss)(params, X)


class _Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = _mlp()

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        out = self.net(x)
        seen = cache["seen"] if isinstance(cache, dict) else cache.seen
        seen[0] = out
        return out + seen.sum(0)


def _cached(mesh: DeviceMesh, cache: Any) -> Any:
    model = _Cached()
    rules = {f"net.{name}": rule for name, rule in RULES.items()}
    with torch.no_grad():
        return sf.apply(model, _tree(mesh, model, rules), X, cache)


def _slope(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.func.grad(lambda y: f(y).sum())(x)


def _slope_by_autograd(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(f(x).sum(), x, create_graph=True)[0]


class _Joined(nn.Module):
    """Two convolutions whose channels are concatenated, as a U-Net has them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Conv1d(1, 4, 1), nn.Conv1d(1, 4, 1), nn.Conv1d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([self.a(x), self.b(x)], 1))


def _joined(mesh: DeviceMesh, **rules: str) -> Any:
    model = _Joined()
    rules = {"a.weight": "k@tp _ _", "b.weight": "k@tp _ _", **{f"{name}.weight": rule for name, rule in rules.items()}}
    return sf.apply(model, _tree(mesh, model, rules), X[:, None])


class _Named(nn.Module):
    """A weight that the root looks up."""

    def __init__(self, weight: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.up, self.weight = nn.Linear(8, 8), weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight(self)


def _named(mesh: DeviceMesh, weight: Callable[[Any], Tensor]) -> Any:
    return sf.apply(model := _Named(weight), sf.shard(model, mesh, sf.Policy()), X)


class Mistake(NamedTuple):
    """A program, what its error says, and the program with what that says to write."""

    wrong: Callable[[DeviceMesh], Any]
    says: str
    mended: Callable[[DeviceMesh], Any]


def _torch_step(mesh: DeviceMesh) -> Any:
    model, adam = _mlp(), sf.optim.from_torch(torch.optim.AdamW)
    params = _tree(mesh, model)
    return adam.step(params, sf.grad(_loss(model))(params, X), adam.init(params))


def _alone(**axes: int) -> Any:
    return sf.plan(_mlp(), sf.MeshSpec(**axes), sf.Policy(rules=RULES))


def _step_on(mesh: DeviceMesh, rules: dict[str, str], **fields: Any) -> Any:
    model = _mlp()
    return sf.value_and_grad(_loss(model))(_tree(mesh, model, rules, **fields), X)


def _sgd_step(mesh: DeviceMesh, swaps: bool) -> Any:
    model, sgd = _mlp(), sf.optim.sgd(lr=0.1)
    params = _tree(mesh, model)
    grads = sf.grad(_loss(model))(params, X)
    return sgd.step(*((grads, params) if swaps else (params, grads)), sgd.init(params))


def _of_ddp() -> dict[str, Tensor]:
    return {f"module.{name}": x for name, x in _mlp().state_dict().items()}


MISTAKES: dict[str, Mistake] = {
    "a rule with too few dims": Mistake(
        lambda mesh: _tree(mesh, rules={"0.weight": "f@tp"}),
        "the rule has 1 dims, the tensor has 2",
        lambda mesh: _tree(mesh, rules={"0.weight": "f@tp c"}),
    ),
    "a typo in a pattern": Mistake(
        lambda mesh: _tree(mesh, rules={"0.wieght": "f@tp c"}),
        r"did you mean '0\.weight'\?",
        lambda mesh: _tree(mesh, rules={"0.weight": "f@tp c"}),
    ),
    "a typo in an axis": Mistake(
        lambda mesh: _tree(mesh, rules={"0.weight": "f@tpp c"}),
        r"did you mean 'tp'\?",
        lambda mesh: _tree(mesh, rules={"0.weight": "f@tp c"}),
    ),
    "a rule the wrong way round": Mistake(
        lambda mesh: _tree(mesh, rules={"0.weight": "tp@ff c"}),
        r"write 'ff@tp'",
        lambda mesh: _tree(mesh, rules={"0.weight": "ff@tp c"}),
    ),
    "an axis in capitals": Mistake(
        lambda mesh: _tree(mesh, rules={"0.weight": "ff@TP c"}),
        r"did you mean 'tp'\?",
        lambda mesh: _tree(mesh, rules={"0.weight": "ff@tp c"}),
    ),
    "an axis that the mesh lacks": Mistake(
        lambda _: _alone(fsdp=4), "to split nothing over it: fsdp=4, tp=1", lambda _: _alone(fsdp=4, tp=1)
    ),
    "a typo in a field": Mistake(
        lambda mesh: _tree(mesh, unit="*"), r"did you mean 'units'\?", lambda mesh: _tree(mesh, units="*")
    ),
    "a size that does not divide": Mistake(
        lambda mesh: _tree(mesh, _mlp(15)),
        r"Write 'f@tp\?' .* or Policy\(pad=\{'f': 2\}\)",
        lambda mesh: _tree(mesh, _mlp(15), pad={"f": 2}),
    ),
    "a tree of another model": Mistake(
        lambda mesh: sf.apply(_mlp(32), _tree(mesh), X),
        r"made for another model, with '0\.weight' of shape \(16, 8\), the model's has \(32, 8\); shard this model",
        lambda mesh: sf.apply(model := _mlp(32), _tree(mesh, model), X),
    ),
    "a module called by itself in a loss": Mistake(
        lambda mesh: _step(
            mesh, lambda model: lambda params, x: torch.func.functional_call(model, params, (x,)).mean()
        ),
        r"sf\.apply\(model, params, x\), not in model\(x\)",
        lambda mesh: _step(mesh, lambda model: lambda params, x: sf.apply(model, params, x).mean()),
    ),
    "a module without the tree in a loss": Mistake(
        lambda mesh: _step(mesh, lambda model: lambda params, x: model(x).mean()),
        r"sf\.apply\(model, params, x\), not model\(x\)",
        lambda mesh: _step(mesh, _loss),
    ),
    "a tree as a state dict": Mistake(
        lambda mesh: _mlp().load_state_dict(_tree(mesh)),
        r"model\.load_state_dict\(sf\.gather\(params\)\)",
        lambda mesh: _mlp().load_state_dict(sf.gather(_tree(mesh))),
    ),
    "a loss of several numbers": Mistake(
        lambda mesh: _step(mesh, lambda model: lambda params, x: sf.apply(model, params, x)),
        "the loss must be a scalar tensor",
        lambda mesh: _step(mesh, lambda model: lambda params, x: sf.apply(model, params, x).mean()),
    ),
    "a mesh as JAX makes it": Mistake(
        lambda _: untyped(sf.make_mesh)((2, 2), ("fsdp", "tp")),
        r"each size has a name, as in make_mesh\(fsdp=2, tp=2\)",
        lambda _: sf.MeshSpec(fsdp=2, tp=2),
    ),
    "a spec in place of a mesh": Mistake(
        lambda _: sf.shard(_mlp(), untyped(sf.MeshSpec(fsdp=2)), sf.Policy()),
        r"a MeshSpec is for plan\(\) only",
        lambda _: sf.plan(_mlp(), sf.MeshSpec(fsdp=2), sf.Policy()),
    ),
    "a batch that does not divide": Mistake(
        lambda mesh: sf.data.local_batch(torch.ones(3, 8), mesh),
        "Use 2 or 4 samples",
        lambda mesh: sf.data.local_batch(torch.ones(4, 8), mesh),
    ),
    "a dict in place of a policy": Mistake(
        lambda mesh: sf.shard(_mlp(), mesh, untyped(RULES)),
        r"write sf\.Policy\(rules=\{\.\.\.\}\)",
        lambda mesh: sf.shard(_mlp(), mesh, sf.Policy(rules=RULES)),
    ),
    "the tree before the model": Mistake(
        lambda mesh: sf.apply(untyped(_tree(mesh)), untyped(_mlp()), X),
        r"write apply\(model, params, x\)",
        lambda mesh: sf.apply(model := _mlp(), _tree(mesh, model), X),
    ),
    "a state dict in place of a tree": Mistake(
        lambda mesh: sf.apply(model := _mlp(), untyped(model.state_dict()), X),
        r"write params = sf\.shard\(model, mesh, policy\)",
        lambda mesh: sf.apply(model := _mlp(), sf.shard(model, mesh, sf.Policy()), X),
    ),
    "what gather returns in place of a tree": Mistake(
        lambda mesh: sf.apply(model := _mlp(), untyped(sf.gather(_tree(mesh, model))), X),
        r"write params = sf\.shard\(model, mesh, policy\)",
        lambda mesh: sf.apply(model := _mlp(), _tree(mesh, model), X),
    ),
    "a loss in place of its function": Mistake(
        lambda mesh: sf.grad(untyped(sf.apply(model := _mlp(), _tree(mesh, model), X).mean())),
        r"expected a function loss_fn\(params, \*batch\), got",
        lambda mesh: _step(mesh, _loss),
    ),
    "a loss with something beside it": Mistake(
        lambda mesh: _step(mesh, lambda model: lambda params, x: (sf.apply(model, params, x).mean(), 1)),
        r"or, for value_and_grad\(has_aux=True\), \(loss, aux\)",
        lambda mesh: _step(mesh, lambda model: lambda params, x: (sf.apply(model, params, x).mean(), 1), has_aux=True),
    ),
    "torch.compile around apply": Mistake(
        lambda mesh: torch.compile(_loss(model := _mlp()), backend="eager")(_tree(mesh, model), X),
        r"Put sf\.jit around the whole step",
        lambda mesh: _loss(model := _mlp())(_tree(mesh, model, compile={"backend": "eager"}, units=("*",)), X),
    ),
    "a state dict that DistributedDataParallel saved": Mistake(
        lambda mesh: sf.Trainer(_mlp(), mesh).load_state_dict(_of_ddp()),
        r"pass \{name\.removeprefix\('module\.'\): x for name, x in state_dict\.items\(\)\}",
        lambda mesh: sf.Trainer(_mlp(), mesh).load_state_dict(
            {name.removeprefix("module."): x for name, x in _of_ddp().items()}
        ),
    ),
    "channels that are concatenated": Mistake(
        lambda mesh: _joined(mesh), r"that is '_ \(2 k@tp\)'", lambda mesh: _joined(mesh, out="_ (2 k@tp) _")
    ),
    "two column-parallel linears": Mistake(
        lambda mesh: _step_on(mesh, {"0.weight": "f@tp c", "2.weight": "c@tp f"}),
        r"Write policy \| sf\.Policy\(acts=\{'0': '\.\.\. f'\}\)",
        lambda mesh: _step_on(mesh, {"0.weight": "f@tp c", "2.weight": "c@tp f"}, acts={"0": "... f"}),
    ),
    "gradients before parameters": Mistake(
        lambda mesh: _sgd_step(mesh, swaps=True),
        r"a tree of gradients; write step\(params, grads, state\)",
        lambda mesh: _sgd_step(mesh, swaps=False),
    ),
    "an optimizer of groups of parameters": Mistake(
        lambda mesh: sf.optim.adamw(untyped([{"params": [*_tree(mesh).values()], "lr": 0.1}])),
        r"write adamw\(lr=1e-3\), and init\(params\) of it",
        lambda mesh: sf.optim.adamw(lr=1e-3).init(_tree(mesh)),
    ),
    "torch.compile around value_and_grad": Mistake(
        lambda mesh: torch.compile(sf.value_and_grad(_loss(model := _mlp())), backend="eager")(_tree(mesh, model), X),
        r"or Policy\(compile=True\)",
        lambda mesh: sf.value_and_grad(_loss(model := _mlp()))(
            _tree(mesh, model, compile={"backend": "eager"}, units=("*",)), X
        ),
    ),
    "a backward as of a module": Mistake(
        lambda mesh: _loss(model := _mlp())(_tree(mesh, model), X).backward(),
        r"Write loss, grads = sf\.value_and_grad\(loss_fn\)\(params, x\)",
        lambda mesh: _step(mesh, _loss),
    ),
    "a batch norm without a rule": Mistake(
        lambda mesh: _normed(mesh, {}),
        r"write a rule, \{'1\.\*': '_@tp'\}",
        lambda mesh: _normed(mesh, {"1.*": "_@tp"}),
    ),
    "torch.func inside of a forward": Mistake(
        lambda mesh: _inside(mesh, _slope), r"torch\.func\.grad\(lambda y: sf\.apply\(model, params, y\)", _around
    ),
    "vmap inside of a forward": Mistake(
        lambda mesh: _inside(mesh, lambda f, x: torch.vmap(f)(x)),
        r"around a forward, not inside of it",
        lambda mesh: _inside(mesh, lambda f, x: f(x)),
    ),
    "derivatives inside of a forward": Mistake(
        lambda mesh: _inside(mesh, _slope_by_autograd), r"around a forward, not inside of it", _around
    ),
    "a number made of floats": Mistake(
        lambda mesh: _inside(mesh, lambda f, x: f(x * x.mean().item())),
        r"x \* x\.mean\(\) for x \* x\.mean\(\)\.item\(\)",
        lambda mesh: _inside(mesh, lambda f, x: f(x * x.mean())),
    ),
    "a way chosen by floats": Mistake(
        lambda mesh: _inside(mesh, lambda f, x: f(x * 2) if x.mean() > 0 else f(x)),
        r"torch\.where\(x\.mean\(\) > 0, a, b\) for an `if`",
        lambda mesh: _inside(mesh, lambda f, x: torch.where(x.mean() > 0, f(x * 2), f(x))),
    ),
    "a cache that an object holds": Mistake(
        lambda mesh: _cached(mesh, SimpleNamespace(seen=torch.zeros(2, 4, 8))),
        r"pass others as an argument, in a tuple, list or dict",
        lambda mesh: _cached(mesh, {"seen": torch.zeros(2, 4, 8)}),
    ),
    "a loop over heads": Mistake(
        lambda mesh: _heads(mesh, _by_loop),
        r"Write policy \| sf\.Policy\(acts=\{'q': '\.\.\. _'\}\)",
        lambda mesh: _heads(mesh, _by_loop, acts={"q": "... _"}),
    ),
    "the number of heads in a pattern of einops": Mistake(
        lambda mesh: _heads(mesh, _with_number),
        r"rearrange with the size of a head, not with their number",
        lambda mesh: _heads(mesh, _without_number),
    ),
    "a rule as JAX writes it": Mistake(
        lambda mesh: _tree(mesh, rules={"0.weight": "tp fsdp"}),
        "write '_@tp'(.|\n)*write '_@fsdp'",
        lambda mesh: _tree(mesh, rules={"0.weight": "_@tp _@fsdp"}),
    ),
    "a field as FSDP2 calls it": Mistake(
        lambda mesh: _tree(mesh, reshard_after_forward=True),
        "that is 'regather' here",
        lambda mesh: _tree(mesh, regather=True),
    ),
    "a policy as FSDP2 calls it": Mistake(
        lambda mesh: _tree(mesh, mp_policy=torch.bfloat16),
        "that is 'compute_dtype' here",
        lambda mesh: _tree(mesh, compute_dtype=torch.bfloat16),
    ),
    "the policy before the mesh": Mistake(
        lambda mesh: sf.shard(_mlp(), untyped(sf.Policy()), untyped(mesh)),
        r"write shard\(model, mesh, policy\)",
        lambda mesh: sf.shard(_mlp(), mesh, sf.Policy()),
    ),
    "an optimizer of torch on the leaves": Mistake(
        lambda mesh: torch.optim.AdamW(_tree(mesh).values()).step(),
        r"sf\.optim\.from_torch\(AdamW, \.\.\.\), by step\(params, grads, state\)",
        lambda mesh: _torch_step(mesh),
    ),
    "parameters of a tree": Mistake(
        lambda mesh: _tree(mesh).parameters(), r"use params\.values\(\)", lambda mesh: _tree(mesh).values()
    ),
    "a tree in another dtype": Mistake(
        lambda mesh: _tree(mesh).bfloat16(),
        r"use sf\.tree\.cast\(params, dtype\)",
        lambda mesh: sf.tree.cast(_tree(mesh), torch.bfloat16),
    ),
    "gather of a leaf": Mistake(
        lambda mesh: sf.gather(untyped(_tree(mesh)["0.weight"])),
        r"write gather\(params\)\[name\]",
        lambda mesh: sf.gather(_tree(mesh))["0.weight"],
    ),
    "gather of a model": Mistake(
        lambda mesh: sf.gather(untyped(_mlp())),
        r"write gather\(sf\.shard\(model, mesh, policy\)\)",
        lambda mesh: sf.gather(sf.shard(_mlp(), mesh, sf.Policy())),
    ),
    "clipping as torch calls it": Mistake(
        lambda _: untyped(sf).clip_grad_norm_,
        r"write grads, norm = sf\.optim\.clip\(grads, max_norm\)",
        lambda mesh: sf.optim.clip(_step(mesh, _loss)[1], 1.0),
    ),
    "gradients that were not reduced": Mistake(
        lambda mesh: sf.gather(_step(mesh, _loss, reduce=None)[1]),
        "sf.reduce_grads|reduce_grads comes first|pending",
        lambda mesh: sf.gather(sf.reduce_grads(_step(mesh, _loss, reduce=None)[1])),
    ),
    "an optimizer made as torch's are": Mistake(
        lambda mesh: sf.optim.adamw(untyped(_tree(mesh))),
        r"write adamw\(lr=1e-3\), and init\(params\)",
        lambda mesh: sf.optim.adamw(lr=1e-3).init(_tree(mesh)),
    ),
    "the arguments of an update in another order": Mistake(
        lambda mesh: (adam := sf.optim.adamw(1e-3)).update(params := _tree(mesh), params, untyped(adam.init(params))),
        r"write update\(grads, state, params\), step\(params, grads, state\)",
        lambda mesh: (adam := sf.optim.adamw(1e-3)).update(params := _tree(mesh), adam.init(params), params),
    ),
    "arithmetic on a tree": Mistake(
        lambda mesh: untyped(_tree(mesh)) * 0.9,
        r"write sf\.tree\.map\(lambda a, b: a \+ b, params, other\)",
        lambda mesh: sf.tree.map(lambda a: a * 0.9, _tree(mesh)),
    ),
    "a tree mapped over with its batch": Mistake(
        lambda mesh: sf.vmap(lambda p, x: sf.apply(_mlp(), p, x))(_tree(mesh, rules={}), X),
        r"write in_dims=\(None, 0\)",
        lambda mesh: sf.vmap(partial(sf.apply, model := _mlp()), in_dims=(None, 0))(_tree(mesh, model, {}), X),
    ),
    "heads without their number": Mistake(
        lambda mesh: _tree(mesh, rules={"0.weight": "(heads@tp d) c"}),
        r"pass sizes=\{'heads': \.\.\.\}",
        lambda mesh: _tree(mesh, rules={"0.weight": "(heads@tp d) c"}, sizes={"heads": 4}),
    ),
    "FSDP2 in the wrong place": Mistake(
        lambda _: untyped(sf).fully_shard,
        r"write from shardfn\.compat\.fsdp2 import fully_shard",
        lambda _: import_module("shardfn.compat.fsdp2").fully_shard,
    ),
    "a buffer in another dtype than activations": Mistake(
        lambda mesh: sf.apply(model := _Rotated(), _low(mesh, model), X),
        r"write \.to\(x\.dtype\) where .*or params\.buffers\['angles'\] = .*\['angles'\]\.to\(torch\.bfloat16",
        lambda mesh: sf.apply(model := _Rotated(), _low(mesh, model, torch.bfloat16), X),
    ),
    "a decay above 1": Mistake(
        lambda mesh: sf.tree.ema(params := _tree(mesh), params, 1.5),
        "decay=1.5 is not from 0 to 1",
        lambda mesh: sf.tree.ema(params := _tree(mesh), params, 0.5),
    ),
    "a decay before the new values": Mistake(
        lambda mesh: sf.tree.ema(params := _tree(mesh), 0.5, untyped(params)),
        r"write ema\(average, new, decay=0\.999\)",
        lambda mesh: sf.tree.ema(params := _tree(mesh), params, 0.5),
    ),
    "a tree read as nested modules": Mistake(
        lambda mesh: _tree(mesh)["0"],
        r"the tree has 0\.weight, .*; several are select\('0\.\*'\)",
        lambda mesh: _tree(mesh).select("0.*"),
    ),
    "an optimizer that was not called": Mistake(
        lambda mesh: sf.Trainer(_mlp(), mesh, optimizer=untyped(sf.optim.adamw)),
        r"such as sf\.optim\.adamw\(1e-3\)",
        lambda mesh: sf.Trainer(_mlp(), mesh, optimizer=sf.optim.adamw(1e-3)),
    ),
    "a class of torch as an optimizer": Mistake(
        lambda mesh: sf.Trainer(_mlp(), mesh, optimizer=untyped(torch.optim.SGD)),
        r"such as sf\.optim\.from_torch\(SGD, lr=1e-3\)",
        lambda mesh: sf.Trainer(_mlp(), mesh, optimizer=sf.optim.from_torch(torch.optim.SGD, lr=1e-3)),
    ),
    "a schedule of torch as a callback": Mistake(
        lambda mesh: sf.Trainer(_mlp(), mesh, callbacks=[untyped("schedule")]),
        "a function of the trainer and what its step returns",
        lambda mesh: sf.Trainer(_mlp(), mesh, callbacks=[lambda trainer, out: None]),
    ),
    "parameters in place of primals": Mistake(
        lambda mesh: sf.hvp(_loss(model := _mlp()), params := _tree(mesh, model, {}), params),
        r"primals are the tuple \(params, \*batch\)",
        lambda mesh: sf.hvp(_loss(model := _mlp()), (params := _tree(mesh, model, {}), X), params),
    ),
    "a strategy by its name": Mistake(
        lambda _: FullyShardedDataParallel(_mlp(), sharding_strategy=untyped("FULL_SHARD")),
        r"is no sharding_strategy, as ShardingStrategy\.FULL_SHARD is",
        lambda _: ShardingStrategy.FULL_SHARD,
    ),
    "a class as a wrapping policy": Mistake(
        lambda _: FullyShardedDataParallel(_mlp(), auto_wrap_policy=nn.Linear),
        r"write ModuleWrapPolicy\(\{Linear\}\)",
        lambda _: ModuleWrapPolicy({nn.Linear}),
    ),
    "a dtype as mixed precision": Mistake(
        lambda _: FullyShardedDataParallel(_mlp(), mixed_precision=untyped(torch.bfloat16)),
        r"as MixedPrecision\(param_dtype=torch\.bfloat16\) is",
        lambda _: MixedPrecision(param_dtype=torch.bfloat16),
    ),
    "a module as a unit": Mistake(
        lambda _: sf.Policy(units=[_mlp()[0]]),
        r"by its path, as in 'layers\.\*', or by its class, Linear",
        lambda _: sf.Policy(units=[nn.Linear]),
    ),
    "a dtype by its name": Mistake(
        lambda mesh: sf.tree.cast(_tree(mesh), untyped("bfloat16")),
        r"'bfloat16' is no dtype, as torch\.bfloat16 is",
        lambda mesh: sf.tree.cast(_tree(mesh), torch.bfloat16),
    ),
    "a parallel forward without the layouts": Mistake(
        lambda _: sf.Policy(compute={"0": lambda module, x: x}),
        r"it will be called as fn\(module, local, layouts, \*args\)",
        lambda _: sf.Policy(compute={"0": lambda module, local, layouts, x: x}),
    ),
    "a parameter by its path in a forward": Mistake(
        lambda mesh: _named(mesh, lambda own: own.get_parameter("up.weight")),
        r"write self\.up\.weight for self\.get_parameter\('up\.weight'\)",
        lambda mesh: _named(mesh, lambda own: own.up.weight),
    ),
    "a method that the model lacks": Mistake(
        lambda mesh: sf.apply(model := _mlp(), _tree(mesh, model), X, method="forwrd"),
        r"did you mean 'forward'\?",
        lambda mesh: sf.apply(model := _mlp(), _tree(mesh, model), X, method="forward"),
    ),
}


@pytest.mark.everyday(26)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_says_what_to_write(name: str) -> None:
    mistake = MISTAKES[name]
    with sf.simulate(fsdp=2, tp=2) as mesh:
        kinds = sf.ShardError, TypeError, ValueError, AttributeError, KeyError
        with pytest.raises(kinds, match=mistake.says) as error:
            mistake.wrong(mesh)
        assert re.search(r"In the docs: errors\.md#[a-z]+", "\n".join(getattr(error.value, "__notes__", ())))
        mistake.mended(mesh)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_mesh_of_gpus_where_there_is_none_says_so() -> None:
    with pytest.raises(sf.ShardError, match=r"torch sees none here; write make_mesh\('cpu', \.\.\.\)"):
        sf.make_mesh("cuda", fsdp=1)


@on_meshes({"fsdp": 1, "tp": 2})
def test_a_mistake_of_one_rank_says_what_to_write(mesh: DeviceMesh, tmp_path: Path) -> None:
    torch.manual_seed(mesh.get_rank())
    with pytest.raises(sf.ShardError, match=r"Call torch\.manual_seed before making the model, or pass src=0"):
        _tree(mesh)
    torch.manual_seed(0)
    model = _mlp()
    params = _tree(mesh, model)
    with pytest.raises(sf.ShardError, match=r"load inputs and targets by sf\.data\.rank\(mesh\)"):
        sf.apply(model, params, X + mesh.get_rank())
    sf.apply(model, params, X + sf.data.rank(mesh)[0])
    targets = X * (1 + mesh.get_rank())
    far = sf.value_and_grad(lambda params, x, y: (sf.apply(model, params, x) - y).square().mean())
    with pytest.raises(sf.ShardError, match=r"the loss differs .* load inputs and targets by sf\.data\.rank\(mesh\)"):
        far(_tree(mesh, model), X, targets)
    far(_tree(mesh, model), X, X * (1 + sf.data.rank(mesh)[0]))
    with pytest.raises(TypeError, match=r"write save\(path, tree\)"):
        sf.checkpoint.save(untyped(params), str(tmp_path / "step-1"))
    sf.checkpoint.save(str(tmp_path / "step-1"), params)
    with pytest.raises(sf.ShardError, match=r"'model\.0\.weight' is not in it; did you mean '0\.weight'\?"):
        sf.checkpoint.load(str(tmp_path / "step-1"), {"model": params})
    sf.checkpoint.load(str(tmp_path / "step-1"), params)
    (tmp_path / "notes.txt").write_text("mine")
    for path, why in ((tmp_path, "is no checkpoint, and would be replaced"), (tmp_path / "notes.txt", "is no check")):
        with pytest.raises(sf.ShardError, match=f"{why}.*give a new name"):
            sf.checkpoint.save(str(path), params)
    with pytest.raises(sf.ShardError, match=r"notes\.txt' is a file; give a path below a directory"):
        sf.checkpoint.save(str(tmp_path / "notes.txt" / "step-1"), params)
    with pytest.raises(sf.ShardError, match=r"step-1' is there already; .*write overwrite=True"):
        sf.checkpoint.save(str(tmp_path / "step-1"), params)
    sf.checkpoint.save(str(tmp_path / "step-1"), params, overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    saves = sf.jit(lambda params: sf.checkpoint.save(str(tmp_path / "step-2"), params))
    with pytest.raises(sf.ShardError, match="return what is to be saved, and save it outside"):
        saves(params)
    sf.checkpoint.save(str(tmp_path / "step-2"), sf.jit(lambda params: sf.tree.map(lambda x: x * 2, params))(params))


@on_meshes({"fsdp": 2, "tp": 2})
def test_other_seeds_along_tp_say_what_to_write(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*_mlp(), nn.Dropout(0.5))
    torch.manual_seed(mesh.get_rank())  # as data parallel scripts do
    params = _tree(mesh, model)
    trained = sf.Trainer(deepcopy(model), mesh, sf.Policy(rules=RULES))
    for call in (_loss(model), sf.value_and_grad(_loss(model)), lambda _, x: trained(x)):
        with pytest.raises(sf.ShardError, match=r"write torch\.manual_seed\(seed \+ sf\.data\.rank\(mesh\)\[0\]\)"):
            call(params, X)
    sf.apply(model.eval(), params, X)  # draws none
    model.train()
    torch.manual_seed(7 + sf.data.rank(mesh)[0])
    sf.value_and_grad(_loss(model))(_tree(mesh, model), X)


@on_meshes({"fsdp": 2})
def test_a_mistake_with_data_axes_alone_says_what_to_write(mesh: DeviceMesh) -> None:
    model = _Inside(_slope)
    with pytest.raises(sf.ShardError, match=r"torch\.func\.grad\(lambda y: sf\.apply\(model, params, y\)"):
        sf.grad(_loss(model))(_tree(mesh, model, {}), X)
    model = _Inside(lambda f, x: f(x))
    params = _tree(mesh, model, {})
    sf.grad(lambda params, x: torch.func.grad(lambda y: sf.apply(model, params, y).sum())(x).square().mean())(params, X)


def _gathered_by_the_first() -> None:
    mesh = sf.make_mesh("cpu", fsdp=2)
    params = _tree(mesh, rules={})
    sf.gather(params)
    if mesh.get_rank():
        raise RuntimeError("ended")
    with pytest.raises(sf.ShardError, match=r"All ranks call it, .* before, not inside of, `if rank == 0:`"):
        sf.gather(params)


def test_what_one_rank_gathers_says_that_all_have_to() -> None:
    with pytest.raises(RankError, match="ended") as error:
        run(_gathered_by_the_first, ranks=2)
    assert [*error.value.errors] == [1], "the other one expects what it gets"
