"""`sf.check` on programs that are right, and on programs with one deliberate mistake each, which it names."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from models import Attention, Decoder, decoder, policy, token_loss, tokens
from torch import Tensor, nn

import shardfn as sf
from shardfn.inspect.check import check
from shardfn.layout.model_info import register

MESH = sf.MeshSpec(fsdp=2, tp=2)
MLP_RULES = {"up.weight": "ff@tp c@fsdp", "up.bias": "ff@tp", "down.weight": "c@fsdp ff@tp"}


class MLP(nn.Module):
    """Two linears, and what a test puts between and around them."""

    def __init__(self, between: Callable[[Tensor], Tensor] = F.silu, wide: int = 1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8 * wide)
        self.down = nn.Linear(8, 6)
        self.between = between
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(self.between(self.up(self.norm(x)))))


class Registered(nn.Linear):
    """A module of the user's, with a forward of its own on a mesh."""


class ForgetfulLinear(nn.Linear):
    """Another one, whose forward forgets a sum."""


@register(Registered)
def _registered(module: nn.Module, params: Mapping[str, Tensor], layout: Any, x: Tensor) -> Tensor:
    return _row_parallel(module, params, layout, x)


@register(ForgetfulLinear)
def _forgetful(module: nn.Module, params: Mapping[str, Tensor], layout: Any, x: Tensor) -> Tensor:
    return F.linear(x, params["weight"], params["bias"])


def _row_parallel(module: nn.Module, params: Mapping[str, Tensor], layout: Any, x: Tensor) -> Tensor:
    return sf.collectives.psum(F.linear(x, params["weight"]), layout.mesh, "tp") + params["bias"]


def _bias_before_the_sum(module: nn.Module, params: Mapping[str, Tensor], layout: Any, x: Tensor) -> Tensor:
    return sf.collectives.psum(F.linear(x, params["weight"], params["bias"]), layout.mesh, "tp")


def _no_sum(module: nn.Module, params: Mapping[str, Tensor], layout: Any, x: Tensor) -> Tensor:
    return F.linear(x, params["weight"], params["bias"])


def _no_pvary(module: nn.Module, params: Mapping[str, Tensor], layout: Any, x: Tensor) -> Tensor:
    return F.linear(x, params["weight"], params["bias"])


def _column_parallel(module: nn.Module, params: Mapping[str, Tensor], layout: Any, x: Tensor) -> Tensor:
    return F.linear(sf.collectives.pvary(x, layout.mesh, "tp"), params["weight"], params["bias"])


def _summed_twice(module: nn.Module, params: Mapping[str, Tensor], layout: Any, x: Tensor) -> Tensor:
    return sf.collectives.psum(_row_parallel(module, params, layout, x), layout.mesh, "tp")


def _with_last(module: nn.Linear) -> MLP:
    model = MLP()
    model.down = module
    return model


class _ManyHeads(Attention):
    """Counts its heads as the configuration says."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (rearrange(w(x), "b s (h d) -> b h s d", h=4) for w in (self.wq, self.wk, self.wv))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(rearrange(mixed, "b h s d -> b s (h d)"))


def _with_attention(kind: type[Attention]) -> Decoder:
    model = decoder(layers=1)
    model.layers[0].attn = kind(10, 4, 4, 3).double()
    return model


def _mean(model: nn.Module) -> Callable[..., Tensor]:
    return lambda p, x: sf.apply(model, p, x).square().mean()


def _sine(model: nn.Module) -> Callable[..., Tensor]:
    return lambda p, x: sf.apply(model, p, x).sin().mean()


def _tokens(model: nn.Module) -> Callable[..., Tensor]:
    return lambda p, x, y: token_loss(sf.apply(model, p, x), y)


def _halves(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
Case = tuple[nn.Module, sf.Policy, Any, Any, str]  # model, policy, loss of the model, batch, what the report says


def _mlp(
    says: str = "", loss: Any = _mean, between: Any = F.silu, rules: Any = (), wide: int = 1, **fields: Any
) -> Case:
    torch.manual_seed(2)
    return MLP(between, wide), sf.Policy(rules={**MLP_RULES, **dict(rules)}, **fields), loss, X, says


def _decoder(says: str = "", rules: Any = (), loss: Any = _tokens, model: Any = None, **fields: Any) -> Case:
    chosen = sf.Policy(**fields) | policy() if not rules else policy() | sf.Policy(rules=dict(rules), **fields)
    return model or decoder(kv=2), chosen, loss, tokens(), says


def _divided(by: Callable[[sf.Params], Any]) -> Callable[..., Any]:
    return lambda model: lambda p, x: _mean(model)(p, x) / by(p)


def _added(model: nn.Module) -> Any:
    return lambda p, x: sf.apply(model, p, x).square().sum()


def _over_all_samples(model: nn.Module) -> Any:
    return lambda p, x: sf.apply(model, p, x).square().mean(-1).sum() / len(X)


def _of_tp_ranks(model: nn.Module) -> Any:
    everyone = sf.Policy(batch=["fsdp", "tp"])
    return lambda p, x: _mean(model)(p, sf.data.local_batch(x, p.mesh, everyone))


def _times_the_mean_output(model: nn.Module) -> Any:
    def loss(p: sf.Params, x: Tensor) -> Tensor:
        out = sf.apply(model, p, x)
        return out.square().mean() * out.mean()

    return loss


def _summed_over_tp(model: nn.Module) -> Any:
    return lambda p, x: sf.collectives.psum(_mean(model)(p, x), p.mesh, "tp")


def _losses_summed_over_tp(model: nn.Module) -> Any:
    return lambda p, x: sf.collectives.psum(_mean(model)(p, x).expand(2), p.mesh, "tp").mean()


_BOTH_HALVES = {"up.weight": "both@tp c@fsdp", "up.bias": "both@tp"}
_EACH_HALF = {"up.weight": "(2 ff@tp) c@fsdp", "up.bias": "(2 ff@tp)"}
_NOTHING_SPLIT = {"up.weight": "ff@fsdp c", "up.bias": "ff", "down.weight": "c ff@fsdp"}


def _frozen() -> Case:
    case = _mlp()
    case[0].get_parameter("up.weight").requires_grad_(False)
    return case


BROKEN: dict[str, Callable[[], Case]] = {
    "hard-coded heads": lambda: _decoder("'layers.0.attn'", model=_with_attention(_ManyHeads)),
    "no row-parallel sum": lambda: _mlp("'down'", compute={"down": _no_sum}),
    "no sum in a registered module": lambda: (_with_last(ForgetfulLinear(8, 6)), *_mlp("'down'")[1:]),
    "bias before the sum": lambda: _mlp("'down'", compute={"down": _bias_before_the_sum}),
    "a sum too many": lambda: _mlp("'down'", compute={"down": _summed_twice}),
    "heads split inside": lambda: _decoder("layers.0.attn", rules={"layers.*.attn.wq.weight": "(heads d@tp) c@fsdp"}),
    "a size that is another": lambda: _mlp("up.weight", sizes={"ff": 9}),
    "halves of split halves": lambda: _mlp("'down'", between=_halves, wide=2, rules=_BOTH_HALVES),
    "softmax over a split dim": lambda: _mlp("'down'", between=lambda x: x.softmax(-1)),
    "mean over a split dim": lambda: _mlp("'down'", between=lambda x: x - x.mean(-1, keepdim=True)),
    "statistics of the batch": lambda: _mlp("", between=lambda x: x - x.mean(0)),
    "divided by the data ranks": lambda: _mlp("divided twice", loss=_divided(lambda p: p.mesh.size(0))),
    "divided by all ranks": lambda: _mlp("the loss function", loss=_divided(lambda _: dist.get_world_size())),
    "a mean over all samples": lambda: _mlp("divided twice", loss=_over_all_samples),
    "a sum over samples": lambda: _mlp("a sum over samples", loss=_added),
    "summed over tp": lambda: _mlp("the loss is whole over 'tp' already", loss=_summed_over_tp),
    "losses summed over tp": lambda: _mlp("summed over ranks", loss=_losses_summed_over_tp),
    "a product of means": lambda: _mlp("the loss function", loss=_times_the_mean_output),
    "another batch on each tp rank": lambda: _mlp("inputs differ between ranks along 'tp'", loss=_of_tp_ranks),
    "a rule for nothing": lambda: _mlp("wpu.weight", rules={"wpu.weight": "ff@tp c"}),
}


@pytest.mark.everyday(4)
@pytest.mark.parametrize("name", BROKEN)
def test_a_mistake_is_found_and_named(name: str) -> None:
    model, chosen, loss, batch, says = BROKEN[name]()
    report = check(model, MESH, chosen, loss(model), batch)
    assert not report.ok
    assert not report
    assert says in str(report), report


@pytest.mark.everyday(1)
@pytest.mark.parametrize("rules", [{"layers.*.gate.weight": "ff c@fsdp"}, {"layers.*.attn.wv.weight": "(kv d) c@fsdp"}])
def test_whole_values_beside_split_ones_are_right(rules: dict[str, str]) -> None:
    model, chosen, loss, batch, _ = _decoder(rules=rules)
    assert check(model, MESH, chosen, loss(model), batch).ok


class _Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(6, 4, 3, padding=1)
        self.rnn = nn.LSTM(4, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(self.conv(x[:, :, None].expand(-1, -1, 3)).transpose(1, 2))[0]


def _weighted(model: nn.Module) -> Any:
    def loss(p: sf.Params, x: Tensor) -> Any:
        counts = (x[:, 0] > 0).double()
        return sf.data.Mean((sf.apply(model, p, x).square().mean(-1) * counts).sum(), counts.sum())

    return loss


def _with_penalty(model: nn.Module) -> Any:
    return lambda p, x: _mean(model)(p, x) + 0.1 * sf.tree.dot(p, p)


def _by_vocabulary(model: nn.Module) -> Any:
    return lambda p, x, y: sf.cross_entropy(sf.apply(model, p, x), y)


class _Cached(nn.Module):
    """Fills a cache at its first call, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.cache, self.caches = nn.Linear(X.shape[-1], 4).to(X.dtype), None, {}

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = self.caches["x"] = torch.arange(4.0, dtype=X.dtype)
        return self.linear(x) * self.cache * self.caches["x"]


def _attention() -> nn.Module:
    return nn.TransformerEncoderLayer(X.shape[-1], 1, 16, dropout=0.2, batch_first=True).to(X.dtype)


CORRECT: dict[str, Callable[[], Case]] = {
    "decoder": _decoder,
    "kept weights": lambda: _decoder(regather=False),
    "one unit": lambda: _decoder(units=[]),
    "key heads that do not divide": lambda: _decoder(model=decoder(kv=1)),
    "four key heads": lambda: _decoder(model=decoder(kv=4)),
    "sf.cross_entropy": lambda: _decoder(loss=_by_vocabulary),
    "split logits": lambda: _decoder(loss=_by_vocabulary, acts={"head": "b s vocab@tp"}),
    "a forgotten pvary, which is added": lambda: _mlp(compute={"up": _no_pvary, "down": _row_parallel}),
    "fully sharded": lambda: (decoder(), sf.policies.fsdp(), _tokens, tokens(), ""),
    "replicated": lambda: (decoder(), sf.policies.ddp(), _tokens, tokens(), ""),
    "kept until backward": lambda: (decoder(), sf.policies.zero2(), _tokens, tokens(), ""),
    "mixed precision": lambda: _decoder(compute_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "mlp": _mlp,
    "dropout": _mlp,
    "nothing split over tp": lambda: _mlp(rules=_NOTHING_SPLIT),
    "a frozen weight": _frozen,
    "whole halves": lambda: _mlp(between=_halves, wide=2, rules=_EACH_HALF),
    "an own forward": lambda: _mlp(compute={"down": _row_parallel, "up": _column_parallel}),
    "a registered module": lambda: (_with_last(Registered(8, 6)), *_mlp()[1:]),
    "an exact mean": lambda: _mlp(loss=_weighted),
    "a penalty on the weights": lambda: _mlp(loss=_with_penalty),
    "a cache in an attribute": lambda: (_Cached(), sf.Policy(), _mean, X, ""),
    "bfloat16": lambda: (_mlp()[0].bfloat16(), *_mlp()[1:3], X.bfloat16(), ""),
    "dropout of attention": lambda: (_attention(), sf.Policy(), _sine, X[:, None], ""),
    "convolution and recurrence": lambda: (_Conv(), sf.Policy(), _mean, X, ""),
}


@pytest.mark.everyday(1)
@pytest.mark.sample(13)
@pytest.mark.parametrize("name", CORRECT)
def test_what_is_right_passes(name: str) -> None:
    model, chosen, loss, batch, _ = CORRECT[name]()
    report = check(model, MESH, chosen, loss(model), batch)
    assert report.ok, report
    assert report.loss == pytest.approx(report.expected_loss)
    assert str(report).startswith("check: equal to one rank")
    assert getattr(model, "cache", None) is None and not getattr(model, "caches", {}), "nothing of the simulation stays"


def test_a_step_that_draws_says_so() -> None:
    model, chosen, loss, batch, _ = _mlp(between=lambda x: x * torch.rand(x.shape))
    assert "the step draws random numbers" in check(model, MESH, chosen, loss(model), batch).problems[-1]
    model, chosen, loss, batch, _ = _mlp(between=lambda x: x.softmax(-1))
    assert "random" not in str(check(model, MESH, chosen, loss(model), batch))


def test_what_cannot_be_checked() -> None:
    with pytest.raises(TypeError, match="got dict"):
        check(cast(Any, {}), MESH, sf.Policy(), lambda p, x: x, X)
    with torch.device("meta"):
        model = MLP()
    with pytest.raises(sf.ShardError, match="no values"):
        check(model, MESH, sf.Policy(), _mean(model), X)
    broken = MLP(lambda x: x @ x.new_zeros(3, 3))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):  # it does not run on one rank either
        check(broken, MESH, sf.Policy(), _mean(broken), X)


def test_a_split_table_with_a_padding_row() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 16, padding_idx=40), nn.Linear(16, 8))
    ids = torch.randint(38, 43, (8, 5))
    policy = sf.Policy(rules={"0.weight": "vocab@tp c@fsdp"})
    report = sf.check(model, sf.MeshSpec(fsdp=2, tp=2), policy, lambda p, x: sf.apply(model, p, x).square().mean(), ids)
    assert report.ok, str(report)


class _Attention(nn.Module):
    """Attention as models write it: functions that drop something while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (-1, 4)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, q, q, None, 0.5 if self.training else 0.0)
        mixed = mixed + F.scaled_dot_product_attention(q, q, q, dropout_p=0.5 if self.training else 0.0)
        return x + F.dropout(self.o(mixed.transpose(1, 2).flatten(2)), 0.5, self.training)


@pytest.mark.parametrize("acts", [{}, {"*": "b s@tp c"}], ids=["whole", "split along the sequence"])
def test_functions_drop_nothing_and_sequences_may_be_split(acts: dict[str, str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(_Attention(), _Attention())
    rules = {"*.q.weight": "(heads@tp d) c", "*.o.weight": "c (heads@tp d)"}
    policy = sf.Policy(rules=rules, acts=acts, sizes={"heads": 4})
    report = sf.check(model, MESH, policy, lambda p, x: sf.apply(model, p, x).square().mean(), torch.randn(8, 4, 16))
    assert report.ok, str(report)
