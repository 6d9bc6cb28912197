"""Errors of a shape-only trace: their headers, and that what they say to write works."""

import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES, InDouble
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from shardfn.testing import assert_parity, on_meshes

TP = sf.MeshSpec(fsdp=1, tp=2)
RULES = sf.Policy(rules={"up.weight": "(heads@tp d) c@fsdp", "down.weight": "c@fsdp (heads@tp d)"}, sizes={"heads": 4})
COMPILED = sf.Policy(compile=True)  # a graph has its calls as they are


class _Between(nn.Module):
    """Something between a column-parallel and a row-parallel linear."""

    def __init__(self, fn: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)
        self.heads, self.inner, self.fn = 4, 24, fn

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.fn(self, self.up(x)))


def _message(model: nn.Module, policy: sf.Policy, example: Any, mesh: sf.MeshSpec = TP) -> str:
    with pytest.raises(sf.ShardError) as caught:
        sf.plan(model, mesh, policy, example=example)
    return str(caught.value)


def _written(message: str) -> sf.Policy:
    """The change of the policy that an error says to write."""
    found = re.search(r"Write policy \| (sf\.Policy\(.*\)), with which this run goes to its end", message)
    assert found is not None, message
    return eval(found[1], {"sf": sf})


def _by_heads(own: Any, h: Tensor) -> Tensor:
    return h.view(*h.shape[:-1], own.heads, -1).softmax(-1).flatten(-2)


@pytest.mark.parametrize(
    ("fn", "why", "change"),
    [
        (lambda own, h: h - h.mean(-1, keepdim=True), "mean over dim 1, of which", {"acts": {"up": "... _"}}),
        (lambda own, h: h.softmax(-1), "_softmax along dim 1, of which", {"acts": {"up": "... _"}}),
        (lambda own, h: h * h.sum(-1, True) ** 2, "pow of a sum that is still", {"acts": {"up": "... _"}}),
    ],
)
def test_what_an_error_says_to_write_fits_the_problem(fn: Any, why: str, change: dict[str, Any]) -> None:
    model, x = _Between(fn), torch.randn(3, 8)
    message = _message(model, RULES | COMPILED, x)
    assert re.search(why, message) and "partial sums" not in message and "pvary" not in message
    written = _written(message)
    assert {name: getattr(written, name) for name in written.given} == change
    policy = RULES | written
    sf.plan(model, TP, policy, example=x)
    with sf.simulate(fsdp=1, tp=2) as mesh:
        out = sf.apply(model, sf.shard(model, mesh, policy), x)
        assert_parity({"out": out}, {"out": model(x).detach()}, tol=1e-5)


DRAWN: dict[str, Callable[[Tensor], Tensor]] = {
    "randn_like": lambda h: h + torch.randn_like(h),
    "randint_like": lambda h: h + torch.randint_like(h, 5),
    "rand_like": lambda h: h * torch.rand_like(h),
    "bernoulli": lambda h: h * torch.bernoulli(h.sigmoid()),
    "bernoulli_": lambda h: h * torch.empty_like(h).bernoulli_(0.5),
    "exponential_": lambda h: F.gumbel_softmax(h.unflatten(-1, (-1, 6))).flatten(-2),
    "rrelu_with_noise": lambda h: F.rrelu(h, training=True),
    "normal_": lambda h: h + h.new_empty(h.shape).normal_(),
    "normal": lambda h: torch.normal(h, h.abs() + 1),
    "poisson": lambda h: h * torch.poisson(h.abs()),
}


@pytest.mark.everyday(2)
@pytest.mark.parametrize("name", DRAWN)
def test_numbers_are_not_drawn_alike_for_the_parts_of_a_value(name: str) -> None:
    message = _message(_Between(lambda own, h: DRAWN[name](h)), RULES, torch.randn(3, 8))
    assert f"{name} in the shape of a split value draws the same numbers on each rank" in message
    assert _written(message).acts == {"up": "... _"} and "torch.rand(p.shape, device=p.device) < p" in message


class _Held(nn.Module):
    """A sum that is not returned in a tuple, or kept."""

    def __init__(self, hold: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.up, self.down, self.hold = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(6, 8)), hold
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Any:
        return self.hold(self, x @ self.up)


def _kept(own: Any, h: Tensor) -> Tensor:
    own.mean = 0.9 * own.mean + 0.1 * h.mean(0)
    return h @ own.down


@pytest.mark.parametrize(
    ("hold", "why"),
    [
        (lambda own, h: SimpleNamespace(out=h @ own.down), r"no plain tuple, list or dict: return it in one of these;"),
        (_kept, r"a value that a module keeps of shape \(3,\) differs over 'tp' \(split\)"),
    ],
)
def test_an_error_says_where_the_value_is(hold: Any, why: str) -> None:
    assert re.search(why, _message(_Held(hold), sf.Policy(rules={"up": "c f@tp", "down": "f@tp c"}), torch.randn(3, 8)))
    sf.plan(_Held(lambda own, h: (h @ own.down,)), TP, sf.Policy(rules={"up": "c f@tp"}), example=torch.randn(3, 8))


class _OwnUp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class _Weights(nn.Module):
    """Weights of its own, of a module of one's own, of a linear and of convolutions, all split over features."""

    def __init__(self, fn: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.fn, self.weight, self.own, self.up = fn, nn.Parameter(torch.randn(8, 6)), _OwnUp(), nn.Linear(8, 6)
        self.conv, self.group_norm, self.norm = nn.Conv1d(8, 6, 3, padding=1), nn.GroupNorm(1, 6), nn.BatchNorm1d(6)
        self.layer_norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        return self.fn(self, x)


FEATURES = {"weight": "_ f@tp", "own.weight": "_ f@tp", "up.weight": "f@tp _", "up.bias": "f@tp"}
FEATURES |= {"conv.*": "f@tp ...", "norm.*": "f@tp"}
OWN, CONV, NORM = {"acts": {"own": "... _"}}, {"acts": {"conv": "b f ..."}}, {"norm": "b f ..."}


@pytest.mark.everyday(4)
@pytest.mark.parametrize(
    ("fn", "change"),
    [
        (lambda own, x: own.own(x).tanh(), {}),
        (lambda own, x: {"a": [own.own(x).t(), x.sum()]}, {}),
        (lambda own, x: own.own(x).softmax(-1), OWN),
        (lambda own, x: own.head(own.own(x)), OWN),
        (lambda own, x: own.own(x).flatten(), OWN),
        (lambda own, x: x @ own.weight.softmax(1), {"rules": {"weight": "_ f"}}),
        (lambda own, x: own.layer_norm(x @ own.weight), {"rules": {"weight": "_ f"}}),
        (lambda own, x: x @ own.weight / own.weight.shape[1] ** 0.5, {"rules": {"weight": "_ f"}}),
        (
            lambda own, x: F.linear(x, own.up.weight / own.up.weight.norm()),
            {"rules": {"up.weight": "f _", "up.bias": "f"}},
        ),
        (lambda own, x: own.head(own.conv(x.unsqueeze(-1)).flatten(1)), CONV),
        (lambda own, x: own.conv(x.unsqueeze(-1)).softmax(1), {}),
        (lambda own, x: own.head(own.group_norm(own.conv(x.unsqueeze(-1))).squeeze(-1)), CONV),
        (lambda own, x: own.head(own.norm(own.conv(x.unsqueeze(-1))).squeeze(-1)), {"acts": CONV["acts"] | NORM}),
    ],
)
def test_with_what_an_error_says_to_write_gradients_are_those_of_one_process(fn: Any, change: dict[str, Any]) -> None:
    model, x, policy = _Weights(fn).double(), torch.randn(4, 8, dtype=torch.float64), sf.Policy(rules=FEATURES)
    if change:
        written = _written(_message(model, policy, x))
        assert {name: getattr(written, name) for name in written.given} == change
        policy |= written

    def loss(params: Any, x: Tensor) -> Tensor:
        out = model(x) if params is None else sf.apply(model, params, x)
        leaves = [out] if isinstance(out, Tensor) else out["a"]
        return torch.stack([(leaf**3).mul(torch.arange(leaf.numel()).view_as(leaf)).sum() for leaf in leaves]).sum()

    wanted = loss(None, x)
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(wanted, [*named.values()], materialize_grads=True, allow_unused=True)
    with sf.simulate(fsdp=1, tp=2) as mesh:
        found, tree = sf.value_and_grad(loss)(sf.shard(model, mesh, policy), x)
        assert_parity({"loss": found}, {"loss": wanted.detach()}, tol=1e-10)
        assert_parity(tree, dict(zip(named, grads, strict=True)), tol=1e-10)


def test_what_two_axes_split_in_one_dim_is_not_joined() -> None:
    model = _Weights(lambda own, x: own.own(x))
    model.own.weight = nn.Parameter(torch.randn(8, 12))
    for acts in ({}, {"own": "... _"}):  # one after the other they would lie in another order
        policy = sf.Policy(rules={"own.weight": "_ (2@cp f@tp)"}, acts=acts)
        assert "differs over 'cp'" in _message(model, policy, torch.randn(4, 8), sf.MeshSpec(fsdp=1, tp=2, cp=2))


@pytest.mark.parametrize(
    ("fn", "why", "sizes"),
    [
        (_by_heads, "a size is taken from elsewhere", {"heads": "heads@tp"}),
        (
            lambda own, h: h.view(-1, own.inner).tanh(),
            r"failed in '_Between': (.|\n)*this rank's part of \(3, 24\), split by 'up'",
            {"inner": "heads@tp d"},
        ),
    ],
)
def test_sizes_of_attributes_in_a_compiled_module(fn: Any, why: str, sizes: dict[str, str]) -> None:
    model, x = _Between(fn), torch.randn(3, 8)
    message = _message(model, RULES | COMPILED, x)
    assert re.search(why, message) and "local_sizes={'attn': {'heads': 'heads@tp'}}" in message
    sf.plan(model, TP, RULES | COMPILED | sf.Policy(local_sizes={"": sizes}), example=x)


def test_a_sum_that_is_pending_is_not_written_into_what_is_whole() -> None:
    def forward(own: Any, h: Tensor) -> Tensor:
        return h * torch.ones(3, 1).index_put((torch.tensor([0]),), h.sum(-1, True)[:1])

    message = _message(_Between(forward), RULES | COMPILED, torch.randn(3, 8))
    assert "values are written into a tensor that is split otherwise" in message


def test_what_nothing_helps_against_has_advice_by_its_kind() -> None:
    model = _Between(lambda own, h: torch.linalg.matrix_exp(h @ h.mT) @ h)
    message = _message(model, RULES | COMPILED, torch.randn(2, 8))
    assert "part by part over tp=2" in message and "pvary" not in message


class _Left(Exception):
    pass


def _leaves(own: Any, h: Tensor) -> Tensor:
    raise _Left(h)


@pytest.mark.parametrize(
    ("fn", "remedy"),
    [
        (lambda own, h: h * len(h.sum(0).tolist()), "return it, and read it outside"),
        (lambda own, h: h * float(h.detach().sum(0).numpy()[0]), "return the tensor and read it outside"),
        (_leaves, "raise nothing of its own to leave early"),
    ],
)
def test_values_that_are_read_and_early_exits_have_a_remedy(fn: Any, remedy: str) -> None:
    assert remedy in _message(_Between(fn), RULES, torch.randn(2, 8))


def test_a_result_as_long_as_values_say_is_named() -> None:
    message = _message(_Between(lambda own, h: h * len(torch.unique(h > 0))), RULES, torch.randn(2, 8))
    assert "How long the result of that operation is depends on values" in message and "mask of fixed shape" in message


class _Tiny(nn.Module):
    """A language model that computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.lm_head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.lm_head(self.emb(ids))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("acts", [{}, {"lm_head": "b s vocab@tp"}])
def test_a_loss_within_the_model_names_what_gathers_the_logits(acts: dict[str, str]) -> None:
    class Cuts(_Tiny):
        def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
            logits = super().forward(ids)
            return F.cross_entropy(logits.view(-1, 16), ids.flatten()) if labels is not None else logits

    ids = torch.zeros(2, 5, dtype=torch.long)
    policy = sf.Policy(rules={"{emb,lm_head}.weight": "vocab@tp c"}, acts=acts)
    for kind in (_Tiny, Cuts) if acts else (Cuts,):
        message = _message(kind(), policy | COMPILED, {"ids": ids, "labels": ids})
        assert _written(message).acts == {"lm_head": "... vocab"}
        assert ("or compute the loss outside of the model, by sf.cross_entropy(logits" in message) == bool(acts)
        sf.plan(kind(), TP, policy | _written(message), example=((ids,), {"labels": ids}))


class _Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.A, self.B = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.B(self.A(x))


def _with_adapters(*names: str, **fields: int) -> Any:
    model = replace(FAMILIES["Llama"], fields=FAMILIES["Llama"].fields | fields).make(torch.float32)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in names and isinstance(child, nn.Linear):
                setattr(module, name, _Adapted(child))
    return model


@pytest.mark.everyday(1)
@on_meshes({"fsdp": 1, "tp": 2})
def test_adapters_without_rules_are_as_on_one_rank(mesh: DeviceMesh) -> None:
    model: Any = _with_adapters("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj", vocab_size=128)
    ids = torch.randint(3, 96, (2, 5), generator=torch.Generator().manual_seed(1))
    params = sf.shard(model, mesh, sf.policies.from_transformers(model))
    loss, grads = sf.value_and_grad(lambda p: sf.apply(model, p, input_ids=ids, labels=ids).loss)(params)
    expected = model(input_ids=ids, labels=ids).loss
    expected.backward()
    assert_parity({"loss": loss}, {"loss": expected.detach()}, tol=1e-5)
    assert_parity(sf.gather(grads), {name: weight.grad for name, weight in model.named_parameters()}, tol=1e-4)


@pytest.mark.parametrize(
    ("vocab", "why"),
    [
        (130, r"vocab=130 is stored padded to 192 .*acts=\{'lm_head': '\.\.\. vocab'\}.*130 % 4 = 2"),
        (132, r"vocab=132 is stored padded to 192 .*Write pad=\{'vocab': 4\}, since 132 % 4 = 0"),
    ],
)
def test_logits_over_a_padded_vocabulary_say_what_to_write(vocab: int, why: str) -> None:
    model = replace(FAMILIES["Llama"], fields=FAMILIES["Llama"].fields | {"vocab_size": vocab}).make()
    policy = sf.policies.from_transformers(model) | sf.Policy(acts={"lm_head": "b s vocab@tp"})
    ids, mesh = torch.zeros(2, 5, dtype=torch.long), sf.MeshSpec(fsdp=1, tp=4)
    assert re.search(why, _message(model, policy, ids, mesh))
    change = sf.Policy(acts={"lm_head": "... vocab"}) if vocab == 130 else sf.Policy(pad={"vocab": 4})
    sf.plan(model, mesh, policy | change, example=ids)


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) * self.scale


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("q.weight", r"owns itself: 'scale'. '0.q.weight' is owned by '0.q': call that child, module.q\(x\)"),
        ("scales", "owns itself: 'scale'; did you mean 'scale'"),
    ],
)
@pytest.mark.parametrize("table", [0, 1])
def test_a_parallel_forward_that_asks_for_what_its_module_has_not(key: str, why: str, table: int) -> None:
    def forward(own: Any, local: Any, layouts: Any, x: Tensor) -> Tensor:
        assert "scale" in local and local.get("bias") is None
        return x * (local, layouts)[table][key]

    model, policy = nn.Sequential(_Scaled()), sf.Policy(compute={"0": forward})
    assert re.search(f"the parallel forward of '0' asks for '{key}'.*{why}", _message(model, policy, torch.ones(2, 8)))


_PADDED = [
    ("Llama", 3, 1, {"heads": 4}),
    ("Llama", 6, 1, {"heads": 4}),
    ("Llama", 6, 3, {"heads": 8, "kv": 4}),
    ("Qwen3", 6, 2, {"heads": 12, "kv": 4}),
    ("GPT-2", 6, 0, {"heads": 4}),
    ("GPT-NeoX", 6, 0, {"heads": 4}),
    ("OPT", 6, 0, {"heads": 4}),
    ("BLOOM", 6, 0, {"heads": 4}),
    ("T5", 3, 0, {"heads": 4}),
]


@pytest.mark.everyday(1)
@pytest.mark.sample(6)
@pytest.mark.parametrize(("name", "heads", "kv", "pad"), _PADDED)
@on_meshes({"fsdp": 1, "tp": 4})
def test_heads_that_do_not_divide_are_padded_as_the_error_says(
    mesh: DeviceMesh, name: str, heads: int, kv: int, pad: dict[str, int]
) -> None:
    family = FAMILIES[name]
    fields = {"num_attention_heads": heads, "n_head": heads, "num_heads": heads, "num_key_value_heads": kv}
    fields |= dict.fromkeys(("hidden_size", "n_embd", "word_embed_proj_dim"), 8 * heads)
    family = replace(family, fields=family.fields | {k: v for k, v in fields.items() if k in family.fields})
    model: Any = family.make()
    batch: Any = family.batch()
    inputs, ids = batch
    policy = sf.policies.from_transformers(model)
    with pytest.raises(sf.ShardError) as caught:
        sf.shard(model, mesh, policy)
    assert set(re.findall(r"Policy\(pad=.*\)", str(caught.value))) == {f"Policy(pad={pad})"}
    assert ("'heads@tp?'" in str(caught.value)) == (not policy.local_sizes), "local sizes are those of a part"
    params = sf.shard(model, mesh, policy | sf.Policy(pad=pad))
    with InDouble():
        loss, grads = sf.value_and_grad(lambda p: family.loss(sf.apply(model, p, **inputs), ids))(params)
        expected = family.loss(model(**inputs), ids)
    expected.backward()
    assert_parity({"loss": loss}, {"loss": expected.detach()}, tol=1e-9)
    full = sf.gather(grads)
    named = {n: w.grad for n, w in model.named_parameters() if w.grad is not None}
    assert_parity({n: full[n] for n in named}, named, tol=1e-9)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("pad", [{"heads": 4}, {"kv": 4}, {"heads": 8}])
def test_padding_that_parts_queries_from_their_keys_is_an_error(pad: dict[str, int]) -> None:
    fields = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48}
    model = replace(FAMILIES["Llama"], fields=FAMILIES["Llama"].fields | fields).make()
    policy = sf.policies.from_transformers(model) | sf.Policy(pad=pad)
    with pytest.raises(sf.ShardError, match=r"Write Policy\(pad=\{'heads': 12, 'kv': 4\}\)"):
        sf.plan(model, sf.MeshSpec(fsdp=1, tp=4), policy)
    without = sf.Policy(**{name: getattr(policy, name) for name in policy.given if name != "local_sizes"})
    with pytest.raises(sf.ShardError):
        ids = torch.zeros(2, 8, dtype=torch.long)
        sf.plan(model, sf.MeshSpec(fsdp=1, tp=4), without, example=ids)


def test_padded_local_sizes_on_one_rank_are_the_models_own() -> None:
    policy = sf.Policy(
        rules={"0.weight": "f@tp c", "1.weight": "c f@tp"},
        pad={"f": 16},
        local_sizes={"0": {"out_features": "f@tp"}, "1": {"in_features": "f@tp"}},
    )
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False))
    for tp, size in ((1, 6), (2, 8)):
        made = sf.plan(model, sf.MeshSpec(tp=tp), policy, example=torch.randn(2, 4))
        assert made.local_sizes == {"0": {"out_features": size}, "1": {"in_features": size}}


def test_a_number_in_a_ratio_of_local_sizes() -> None:
    ratios = {"a": "12@tp / f@tp?", "b": "f@tp / 2@tp", "c": "f@tp / 3", "d": "12 / f"}
    policy = sf.Policy(rules={"weight": "f@tp c", "bias": "f@tp"}, local_sizes={"": ratios})
    made = sf.plan(nn.Linear(4, 6), sf.MeshSpec(tp=2), policy)
    assert made.local_sizes == {"": {"a": 2, "b": 3, "c": 1, "d": 2}}
    padded = policy | sf.Policy(pad={"f": 4})
    with pytest.raises(sf.ShardError, match="12=12 and f=6 padded to 8 over 2 ranks"):
        sf.plan(nn.Linear(4, 6), sf.MeshSpec(tp=2), padded)
    padded = padded | sf.Policy(local_sizes={"": {"half": "f@tp / 2"}})
    assert sf.plan(nn.Linear(4, 6), sf.MeshSpec(tp=2), padded).local_sizes == {"": {"half": 2}}
    numbered = sf.Policy(rules={"weight": "6@tp c"}, local_sizes={"": {"out_features": "6@tp"}})
    with pytest.raises(sf.ShardError, match=r"6 % 4 = 2(.|\n)*    Use a mesh whose axes divide it\."):
        sf.plan(nn.Linear(4, 6, bias=False), sf.MeshSpec(tp=4), numbered)


@on_meshes({"fsdp": 1, "tp": 1}, {"fsdp": 1, "tp": 2})
def test_local_sizes_that_are_not_the_attributes_own(mesh: DeviceMesh) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    model[0].config = SimpleNamespace(size=8)
    rules = {"0.weight": "(heads@tp d) c", "1.weight": "c (heads@tp d)"}
    for name in ("out_features", "config.size"):
        params = sf.shard(model, mesh, sf.Policy(rules=rules, sizes={"d": 2}, local_sizes={"0": {name: "heads@tp"}}))
        with pytest.raises(sf.ShardError, match=rf"names '{name}' of '0', which is 8, as what is 4 on one rank"):
            sf.apply(model, params, torch.ones(2, 4))


@on_meshes({"fsdp": 1, "tp": 2})
def test_a_linear_that_is_ignored_beside_split_ones(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 4))
    policy = sf.Policy(rules={"0.weight": "f@tp c", "1.weight": "c f@tp"}, ignore=["2.**"], acts={"2": "b _"})
    x = torch.randn(2, 4)
    torch.testing.assert_close(sf.apply(model, sf.shard(model, mesh, policy), x), model(x))


def test_local_sizes_of_an_attribute_that_is_not_there() -> None:
    policy = sf.Policy(rules={"0.weight": "f@tp c", "1.weight": "c f@tp"}, local_sizes={"0": {"out_featuers": "f@tp"}})
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    with pytest.raises(sf.ShardError, match=r"local_sizes\['0'\] names 'out_featuers', and no module has that"):
        sf.plan(model, sf.MeshSpec(fsdp=1, tp=2), policy, example=torch.ones(2, 4))


def test_padded_keys_that_are_not_repeated_are_an_error() -> None:
    """By shapes alone every rank has a query and a key: padding, where the query is of another rank's key."""
    fields = {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 24}
    model = replace(FAMILIES["Llama"], fields=FAMILIES["Llama"].fields | fields).make()
    policy = sf.policies.from_transformers(model) | sf.Policy(pad={"heads": 4, "kv": 4})
    without = sf.Policy(**{name: getattr(policy, name) for name in policy.given if name != "local_sizes"})
    with pytest.raises(sf.ShardError, match="not repeated as on one rank"):
        sf.plan(model, sf.MeshSpec(fsdp=1, tp=4), without, example=torch.zeros(2, 8, dtype=torch.long))
