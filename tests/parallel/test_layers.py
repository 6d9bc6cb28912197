"""Layers of torch besides linears and tables with split weights, held against the same model on one rank."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from shardfn._torch import pytree
from shardfn.testing import assert_parity, on_meshes

MESHES = ({"fsdp": 2, "tp": 2}, {"fsdp": 1, "tp": 4})
DOUBLE = torch.float64


def _draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Case:
    """A model, rules for it, and the shape of its input."""

    make: Callable[[], nn.Module]
    rules: dict[str, str]
    shape: tuple[int, ...]
    sizes: dict[str, int] = field(default_factory=dict)
    local_sizes: dict[str, dict[str, str]] = field(default_factory=dict)
    acts: dict[str, str] = field(default_factory=dict)

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make().double()

    @property
    def policy(self) -> sf.Policy:
        return sf.Policy(rules=self.rules, sizes=self.sizes, local_sizes=self.local_sizes, acts=self.acts)


def _leaves(out: Any) -> list[Tensor]:
    return [x for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor)]


def _loss(out: Any) -> Tensor:
    return torch.stack([(x.square() + x).mean() for x in _leaves(out)]).sum()


def _agree(mesh: DeviceMesh, case: Case, *inputs: Tensor, **kwargs: Any) -> sf.Params:
    """Loss and all gradients are those of one rank; statistics of a batch norm are those of a data rank's samples."""
    model, reference = case.model(), case.model()
    params = sf.shard(model, mesh, case.policy)
    batch = inputs or (_draw(*case.shape),)
    local, local_kwargs = sf.data.local_batch((batch, kwargs), mesh)
    loss, grads = sf.value_and_grad(lambda p: _loss(sf.apply(model, p, *local, **local_kwargs)))(params)
    ranks = mesh.size(0)
    losses = []
    for rank in range(ranks):
        piece = {key: _piece(x, ranks, rank) for key, x in kwargs.items()}
        losses.append(_loss(reference(*(_piece(x, ranks, rank) for x in batch), **piece)))
    expected = torch.stack(losses).mean()
    expected.backward()
    wanted = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in reference.named_parameters()}
    assert_parity({"loss": loss}, {"loss": expected.detach()}, tol=1e-9)
    assert_parity(sf.gather(grads), wanted, tol=1e-9)
    named = dict(reference.named_buffers())
    assert params.buffers.keys() == named.keys()
    if ranks == 1 and named:
        assert_parity(dict(params.buffers), named, tol=1e-9)
    return params


def _piece(x: Any, ranks: int, rank: int) -> Any:
    return x.chunk(ranks)[rank] if isinstance(x, Tensor) else x


def _conv(kind: str, *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(getattr(nn, kind)(*args, **kwargs))


def _pair(kind: str, *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        getattr(nn, kind)(4, 8, *args, **kwargs), nn.Tanh(), getattr(nn, kind)(8, 6, *args, **kwargs)
    )


def _columns_rows(space: int, transposed: bool = False) -> dict[str, str]:
    rest = " _" * space
    first, then = ("_ ch@tp", "ch@tp _") if transposed else ("ch@tp _", "_ ch@tp")
    return {"0.weight": first + rest, "2.weight": then + rest}


CASES = {
    "conv1d": Case(_pair("Conv1d", 3, padding=1), _columns_rows(1), (4, 4, 7)),
    "conv2d": Case(_pair("Conv2d", 3, stride=2, padding=1), _columns_rows(2), (4, 4, 9, 8)),
    "conv2d over data": Case(
        _pair("Conv2d", 3), {"0.weight": "ch@tp c@fsdp _ _", "2.weight": "_@fsdp ch@tp _ _"}, (4, 4, 9, 8)
    ),
    "conv2d without a bias": Case(_pair("Conv2d", 3, bias=False), _columns_rows(2), (4, 4, 9, 8)),
    "conv2d, same": Case(_pair("Conv2d", (3, 2), padding="same", dilation=2), _columns_rows(2), (4, 4, 9, 8)),
    "conv2d, same, reflected": Case(
        _pair("Conv2d", (3, 2), padding="same", padding_mode="reflect"), _columns_rows(2), (4, 4, 9, 8)
    ),
    "conv3d": Case(_pair("Conv3d", 2), _columns_rows(3), (4, 4, 3, 4, 5)),
    "transposed": Case(_pair("ConvTranspose2d", 3, stride=2, output_padding=1), _columns_rows(2, True), (4, 4, 3, 4)),
    "columns alone": Case(_conv("Conv2d", 3, 8, 3), {"0.weight": "ch@tp _ _ _"}, (4, 3, 5, 5)),
    "rows alone": Case(_conv("Conv2d", 8, 3, 3), {"0.weight": "_ ch@tp _ _"}, (4, 8, 5, 5)),
    "depthwise alone": Case(_conv("Conv1d", 8, 8, 3, groups=8), {"0.weight": "ch@tp _ _"}, (4, 8, 5)),
    "depthwise, two each": Case(_conv("Conv1d", 8, 16, 3, groups=8), {"0.weight": "ch@tp _ _"}, (4, 8, 5)),
    "four groups": Case(_conv("Conv1d", 8, 16, 3, groups=4), {"0.weight": "ch@tp _ _"}, (4, 8, 5)),
    "depthwise between": Case(
        lambda: nn.Sequential(nn.Conv1d(3, 8, 1), nn.Conv1d(8, 8, 3, groups=8), nn.GELU(), nn.Conv1d(8, 5, 1)),
        {"0.weight": "ch@tp _ _", "1.weight": "ch@tp _ _", "3.weight": "_ ch@tp _"},
        (4, 3, 7),
    ),
    "group norm": Case(
        lambda: nn.Sequential(nn.Conv1d(3, 16, 1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv1d(16, 5, 1)),
        {"0.weight": "ch@tp _ _", "1.weight": "ch@tp", "3.weight": "_ ch@tp _"},
        (4, 3, 7),
    ),
    "batch norm": Case(
        lambda: nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 5, 1)),
        {"0.weight": "ch@tp _ _", "1.weight": "ch@tp", "3.weight": "_ ch@tp _"},
        (4, 3, 7),
    ),
    "batch norm of features": Case(
        lambda: nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5)),
        {"0.weight": "ff@tp _", "1.weight": "ff@tp", "3.weight": "_ ff@tp"},
        (8, 3),
    ),
    "batch norm of a mean": Case(
        lambda: nn.Sequential(nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8, momentum=None), nn.Conv1d(8, 5, 1)),
        {"0.weight": "ch@tp _ _", "1.weight": "ch@tp", "2.weight": "_ ch@tp _"},
        (4, 3, 7),
    ),
    "norms alone": Case(
        lambda: nn.Sequential(nn.GroupNorm(4, 8), nn.BatchNorm1d(8), nn.InstanceNorm1d(8, affine=True)),
        {"{0,1,2}.weight": "ch@tp"},
        (4, 8, 5),
    ),
    "norms without weights": Case(
        lambda: nn.Sequential(
            nn.Conv1d(3, 8, 1),
            nn.BatchNorm1d(8, affine=False, track_running_stats=False),
            nn.InstanceNorm1d(8),
            nn.Conv1d(8, 5, 1),
        ),
        {"0.weight": "ch@tp _ _", "3.weight": "_ ch@tp _"},
        (4, 3, 5),
        local_sizes={"2": {"num_features": "ch@tp"}},
    ),
    "instance norm": Case(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.InstanceNorm2d(8, affine=True), nn.Conv2d(8, 5, 1)),
        {"0.weight": "ch@tp _ _ _", "1.weight": "ch@tp", "2.weight": "_ ch@tp _ _"},
        (4, 3, 5, 4),
    ),
}


@pytest.mark.everyday(8)
@pytest.mark.parametrize("name", CASES)
@on_meshes(*MESHES)
def test_a_layer_is_as_on_one_rank(mesh: DeviceMesh, name: str) -> None:
    _agree(mesh, CASES[name])


HEADS = {"in_proj_weight": "(3 heads@tp d) _", "out_proj.weight": "_ (heads@tp d)"}
APART = {f"{x}_proj_weight": "(heads@tp d) _" for x in "qkv"}


def _attends(rules: dict[str, str] = HEADS, **kwargs: Any) -> Case:
    kwargs = {"batch_first": True} | kwargs
    return Case(lambda: nn.MultiheadAttention(16, 4, **kwargs), rules, (), {"heads": 4})


ATTENTIONS: dict[str, tuple[Case, dict[str, Any]]] = {
    "plain": (_attends(), {}),
    "over data": (_attends({"in_proj_weight": "(3 heads@tp d) c@fsdp", "out_proj.weight": "c@fsdp (heads@tp d)"}), {}),
    "without weights": (_attends(), {"need_weights": False}),
    "weights of all heads": (_attends(), {"average_attn_weights": False}),
    "without a bias": (_attends(bias=False), {"need_weights": False}),
    "a mask that hides": (_attends(), {"attn_mask": lambda: torch.ones(5, 5).triu(1).bool()}),
    "a causal mask": (
        _attends(),
        {
            "attn_mask": lambda: nn.Transformer.generate_square_subsequent_mask(5).double(),
            "is_causal": True,
            "need_weights": False,
        },
    ),
    "padding": (_attends(), {"key_padding_mask": lambda: torch.arange(5) >= torch.tensor([[5], [3], [4], [2]])}),
    "padding and a mask": (
        _attends(),
        {
            "key_padding_mask": lambda: torch.arange(5) >= torch.tensor([[5], [3], [4], [2]]),
            "attn_mask": lambda: torch.ones(5, 5).triu(1).bool(),
            "need_weights": False,
        },
    ),
}


@pytest.mark.everyday(6)
@pytest.mark.parametrize("name", ATTENTIONS)
@on_meshes(*MESHES)
def test_attention_is_as_on_one_rank(mesh: DeviceMesh, name: str) -> None:
    case, given = ATTENTIONS[name]
    made: dict[str, Any] = {key: value() if callable(value) else value for key, value in given.items()}
    mask = made.pop("attn_mask", torch.empty(0))
    x = _draw(4, 5, 16)

    class Masked(nn.Module):
        """A mask [t, s] is no part of a batch."""

        def __init__(self) -> None:
            super().__init__()
            self.attn = case.make()

        def forward(self, x: Tensor, **kwargs: Any) -> Any:
            return self.attn(x, x, x, attn_mask=mask.to(x.device) if len(mask) else None, **kwargs)

    rules = {f"attn.{path}": rule for path, rule in case.rules.items()}
    _agree(mesh, Case(Masked, rules, (), case.sizes), x, **made)


class Crossed(nn.Module):
    """Keys and values of other widths, sequence first, a mask of each head that has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 4, kdim=6, vdim=10)
        self.bias = nn.Parameter(torch.randn(4, 5, 7))
        self.shared = nn.Parameter(torch.randn(5, 7))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        out, weights = self.attn(q, k, v, attn_mask=self.bias.repeat(q.shape[1], 1, 1), need_weights=True)
        again, _ = self.attn(out, k, v, attn_mask=self.shared, need_weights=False)
        return again.transpose(0, 1), weights


@on_meshes(*MESHES)
def test_attention_to_others(mesh: DeviceMesh) -> None:
    rules = {f"attn.{path}": rule for path, rule in APART.items()}
    rules |= {"attn.in_proj_bias": "(3 heads@tp d)", "attn.out_proj.weight": "_ (heads@tp d)"}
    case = Case(Crossed, rules, (), {"heads": 4})
    _agree(mesh, case, _draw(4, 5, 16), _draw(4, 7, 6, seed=2), _draw(4, 7, 10, seed=3))


@on_meshes(*MESHES)
def test_attention_without_a_batch(mesh: DeviceMesh) -> None:
    case, x = _attends(batch_first=False), _draw(5, 16)
    model = case.model()
    params = sf.shard(model, mesh, case.policy)
    for mine, wanted in zip(sf.apply(model, params, x, x, x), model(x, x, x), strict=True):
        torch.testing.assert_close(mine, wanted)


class Classifier(nn.Module):
    """A small CNN: a stem, a residual block of depthwise convolutions, a head on flattened channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.deep, self.group = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.GroupNorm(4, 8)
        self.down = nn.Conv2d(8, 6, 1)
        self.up, self.head = nn.Conv2d(6, 8, 1), nn.Linear(8 * 4, 5)
        self.scale = nn.Parameter(torch.full((8, 1, 1), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.norm(self.stem(x))), 2)
        x = x + self.scale * torch.relu(self.group(self.deep(x)))
        x = self.down(x)
        x = nn.functional.adaptive_avg_pool2d(torch.relu(self.up(x)), 2)
        return self.head(x.flatten(1))


CNN = Case(
    Classifier,
    {
        "{stem,deep,up}.weight": "ch@tp _ _ _",
        "{norm,group}.weight": "ch@tp",
        "scale": "ch@tp _ _",
        "down.weight": "_ ch@tp _ _",
        "head.weight": "_ (ch@tp p)",
    },
    (4, 3, 8, 8),
)


@on_meshes(*MESHES)
def test_a_cnn_is_as_on_one_rank(mesh: DeviceMesh) -> None:
    _agree(mesh, CNN)


@on_meshes(*MESHES)
def test_running_statistics_serve_an_evaluation(mesh: DeviceMesh) -> None:
    model, reference = CNN.model(), CNN.model()
    params = sf.shard(model, mesh, CNN.policy)
    for step in range(3):
        x = _draw(*CNN.shape, seed=step)
        sf.apply(model, params, x)
        reference(x)
    assert_parity(dict(params.buffers), dict(reference.named_buffers()), tol=1e-9)
    x = _draw(*CNN.shape, seed=9)
    torch.testing.assert_close(sf.apply(model.eval(), params, x), reference.eval()(x))


class Encoder(nn.Module):
    """torch's own encoder on tokens, with learned positions."""

    def __init__(self, norm_first: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout, batch_first=True, norm_first=norm_first)
        self.tokens, self.places = nn.Embedding(20, 16), nn.Embedding(9, 16)
        self.first = nn.Parameter(torch.randn(1, 1, 16))
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)
        self.head = nn.Linear(16, 20)

    def forward(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        x = torch.cat([self.first.expand(len(ids), -1, -1), x], 1)
        return self.head(self.encoder(x, src_key_padding_mask=padding))


ENCODER_RULES = {
    "tokens.weight": "vocab@tp _",
    "places.weight": "_ c@tp",
    "*.self_attn.in_proj_weight": "(3 heads@tp d) c@fsdp",
    "*.self_attn.out_proj.weight": "c@fsdp (heads@tp d)",
    "*.linear1.weight": "ff@tp c@fsdp",
    "*.linear2.weight": "c@fsdp ff@tp",
    "head.weight": "vocab@tp _",
}
ENCODER_RULES = {key.replace("*", "encoder.layers.*"): rule for key, rule in ENCODER_RULES.items()}


@pytest.mark.everyday(1)
@pytest.mark.parametrize("norm_first", [False, True])
@on_meshes(*MESHES)
def test_an_encoder_is_as_on_one_rank(mesh: DeviceMesh, norm_first: bool) -> None:
    case = Case(lambda: Encoder(norm_first), ENCODER_RULES, (), {"heads": 4})
    ids = torch.arange(24).view(4, 6) % 20
    padding = torch.arange(7) >= torch.tensor([[7], [5], [6], [3]])
    _agree(mesh, case, ids)
    _agree(mesh, case, ids, padding=padding)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("norm_first", [False, True])
@on_meshes(*MESHES)
def test_an_encoder_with_split_sequences(mesh: DeviceMesh, norm_first: bool) -> None:
    acts = {"encoder.layers.*": "b s@tp c"}
    case = Case(lambda: Encoder(norm_first), ENCODER_RULES, (), {"heads": 4}, acts=acts)
    _agree(mesh, case, torch.arange(28).view(4, 7) % 20)


@on_meshes(*MESHES, {"fsdp": 2, "tp": 1})
def test_an_encoder_evaluates_without_gradients(mesh: DeviceMesh) -> None:
    """Where torch would hand all weights of a layer to one fused operation, and make nested tensors; in each call."""
    case = Case(Encoder, ENCODER_RULES, (), {"heads": 4})
    model, ids = case.model().eval(), torch.arange(24).view(4, 6) % 20
    normed = case.model().eval()
    normed.encoder.norm = nn.LayerNorm(16, dtype=torch.float64)
    with torch.no_grad():  # or twice would be once
        normed.encoder.norm.weight.copy_(torch.linspace(0.5, 2, 16))
        normed.encoder.norm.bias.copy_(torch.linspace(-1, 1, 16))
    at_end = torch.arange(7) >= torch.tensor([[7], [5], [6], [3]])
    for padding in (None, at_end, at_end.flip(0, 1), torch.zeros(at_end.shape).masked_fill(at_end, -torch.inf)):
        for one, grad in product((model, normed), (False, True)):
            params = sf.shard(one, mesh, case.policy)
            with torch.set_grad_enabled(grad), warnings.catch_warnings(action="ignore"):  # of torch's nested tensors
                for _ in range(3):
                    torch.testing.assert_close(sf.apply(one, params, ids, padding), one(ids, padding))
    assert torch.backends.mha.get_fastpath_enabled()


class Translator(nn.Module):
    """torch's own encoder and decoder layers, with masks, on a batch whose place they may not share."""

    def __init__(self, norm_first: bool, batch_first: bool, dropout: float = 0.0) -> None:
        super().__init__()
        how: dict[str, Any] = {"norm_first": norm_first, "batch_first": batch_first}
        self.reads = nn.TransformerEncoderLayer(16, 4, 24, dropout, activation="gelu", **how)
        self.writes = nn.ModuleList(nn.TransformerDecoderLayer(16, 4, 24, dropout, **how) for _ in range(2))
        self.turned = not batch_first

    def forward(self, source: Tensor, target: Tensor, padding: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=target.dtype)
        if self.turned:
            source, target = source.transpose(0, 1), target.transpose(0, 1)
        memory = self.reads(source, src_key_padding_mask=padding)
        hides = {"tgt_mask": mask.to(target.device), "memory_key_padding_mask": padding}
        for layer in self.writes:
            target = layer(target, memory, **hides)
        return target.transpose(0, 1) if self.turned else target


TRANSLATOR_RULES = {
    "**.*attn.in_proj_weight": "(3 heads@tp d) c@fsdp",
    "**.*attn.out_proj.weight": "c@fsdp (heads@tp d)",
    "**.linear1.weight": "ff@tp c@fsdp",
    "**.linear2.weight": "c@fsdp ff@tp",
}
SENTENCES = _draw(4, 6, 16), _draw(4, 5, 16, seed=2), torch.arange(6) >= torch.tensor([[6], [4], [5], [3]])


@pytest.mark.everyday(1)
@pytest.mark.one_mesh
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@on_meshes(*MESHES)
def test_layers_of_a_transformer_are_as_on_one_rank(mesh: DeviceMesh, norm_first: bool, batch_first: bool) -> None:
    case = Case(lambda: Translator(norm_first, batch_first), TRANSLATOR_RULES, (), {"heads": 4})
    params = _agree(mesh, case, *SENTENCES)
    local = params.plan.local_shape("writes.1.multihead_attn.in_proj_weight")
    assert local == (3, 4 // mesh["tp"].size(), 4, 16 // mesh["fsdp"].size())
    model = case.model().eval()
    with torch.no_grad():
        torch.testing.assert_close(sf.apply(model, params, *SENTENCES), model(*SENTENCES))


# -- parameters that a forward uses itself ----------------------------------------------------------------------------


class Biased(nn.Module):
    """Heads with a table of relative positions, a gate of each head, and a scale of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.table = nn.Parameter(torch.randn(4, 9))
        self.gate = nn.Parameter(torch.randn(4))
        self.layer_scale = nn.Parameter(torch.full((16,), 0.2))
        self.positions = nn.Parameter(torch.randn(1, 5, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, 4)).permute(2, 0, 3, 1, 4)
        steps = torch.arange(5, device=x.device)
        bias = self.table[:, steps[:, None] - steps + 4]  # [heads, s, s]
        weights = (q @ k.transpose(-1, -2) + bias).softmax(-1) * self.gate.sigmoid().view(-1, 1, 1)
        return x + self.layer_scale * self.out((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("rules", [{"table": "heads@tp _", "gate": "heads@tp"}, {"table": "heads@tp _@fsdp"}])
@on_meshes(*MESHES)
def test_parameters_used_directly(mesh: DeviceMesh, rules: dict[str, str]) -> None:
    rules = {"qkv.weight": "(3 heads@tp d) _", "out.weight": "_ (heads@tp d)", "gate": "heads@tp"} | rules
    _agree(mesh, Case(Biased, rules, (4, 5, 16), {"heads": 4}))


class PatchedPositions(nn.Module):
    """Patches by a convolution whose channels are split, and positions split with them."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, stride=4)
        self.positions = nn.Parameter(torch.randn(1, 4, 16))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.patch(x).flatten(2).transpose(1, 2) + self.positions)).mean(1)


@on_meshes(*MESHES)
def test_positions_that_are_split(mesh: DeviceMesh) -> None:
    rules = {"patch.weight": "c@tp _ _ _", "positions": "_ _ c@tp", "head.weight": "_ c@tp"}
    _agree(mesh, Case(PatchedPositions, rules, (4, 3, 8, 8)))


# -- dropout ----------------------------------------------------------------------------------------------------------


@on_meshes({"fsdp": 2, "tp": 2})
def test_dropout_modules_of_an_encoder_drop_as_on_one_rank(mesh: DeviceMesh) -> None:
    case, ids = Case(lambda: Encoder(dropout=0.3), ENCODER_RULES, (), {"heads": 4}), torch.arange(24).view(4, 6) % 20
    model = case.model()
    torch.manual_seed(torch.distributed.get_rank())
    found = []
    for policy, sizes in ((case.policy, mesh), (sf.Policy(), sf.make_mesh("cpu", fsdp=4))):
        params, local = sf.shard(model, sizes, policy), sf.data.local_batch((ids,), sizes)
        with sf.data.dropout_seed(3):
            loss, grads = sf.value_and_grad(lambda p, x: _loss(sf.apply(model, p, x)))(params, *local)
        found.append({"loss": loss} | sf.gather(grads))
    assert_parity(*found, tol=1e-9)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("batch_first", [False, True])
@on_meshes({"fsdp": 2, "tp": 2}, {"fsdp": 1, "tp": 4}, {"fsdp": 4, "tp": 1})
def test_attention_drops_as_on_one_rank(mesh: DeviceMesh, batch_first: bool) -> None:
    """Other scores of each head and sample, whether weights are split or whole, are returned or not."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(16, 4, dropout=0.5, batch_first=batch_first)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            x = x if batch_first else x.transpose(0, 1)
            out, weights = self.attn(x, x, x, average_attn_weights=False)
            again, _ = self.attn(x, x, x, need_weights=False)
            return *(y if batch_first else y.transpose(0, 1) for y in (out, again)), weights

    rules = {f"attn.{path}": rule for path, rule in HEADS.items()}
    case, x = Case(Attends, rules, (), {"heads": 4}), _draw(4, 5, 16)
    model = case.model()

    def step(mesh: DeviceMesh, policy: sf.Policy) -> Any:
        params, local = sf.shard(model, mesh, policy), sf.data.local_batch(x, mesh)
        with sf.data.dropout_seed(3):
            out = sf.apply(model, params, local)
        with sf.data.dropout_seed(3):
            loss, grads = sf.value_and_grad(lambda p, x: _loss(sf.apply(model, p, x)))(params, local)
        return [y.detach() for y in out], {"loss": loss} | sf.gather(grads)

    torch.manual_seed(torch.distributed.get_rank())
    with sf.simulate(fsdp=1, tp=1) as one:
        expected = pytree.tree_map(lambda y: y.reconcile(), step(one, sf.Policy()))
    for policy in (case.policy, sf.Policy()):
        found, numbers = step(mesh, policy)
        assert_parity(found, list(sf.data.local_batch(tuple(expected[0]), mesh)), tol=1e-9)
        assert_parity(numbers, expected[1], tol=1e-9)
    gone = (expected[0][2] == 0).flatten(2).double()  # [b, heads, t * s]
    assert 0.3 < float(gone.mean()) < 0.7
    assert len({tuple(head.tolist()) for sample in gone for head in sample}) == 16
    assert not torch.equal(expected[0][0], expected[0][1])


@pytest.mark.slow
@on_meshes({"fsdp": 2, "tp": 2})
def test_attention_in_transforms_and_graphs_drops_as_on_one_rank(mesh: DeviceMesh) -> None:
    case = Case(lambda: Translator(True, True, 0.3), TRANSLATOR_RULES, (), {"heads": 4})
    model = case.model()

    def step(mesh: DeviceMesh, policy: sf.Policy, how: Callable[[Any], Any]) -> Any:
        params, local = sf.shard(model, mesh, policy), sf.data.local_batch(SENTENCES, mesh)

        def seeded(p: sf.Params, seed: Tensor) -> Any:
            with sf.data.dropout_seed(seed):
                return sf.value_and_grad(lambda p: _loss(sf.apply(model, p, *local)))(p)

        loss, grads = how(seeded)(params, torch.tensor(5))
        return {"loss": loss} | sf.gather(grads)

    def as_is(fn: Any) -> Any:
        return fn

    wanted = step(sf.make_mesh("cpu", fsdp=4), sf.Policy(), as_is)
    assert_parity(step(mesh, case.policy, as_is), wanted, tol=1e-9)
    assert_parity(step(mesh, case.policy, lambda fn: sf.jit(fn, backend="eager")), wanted, tol=1e-9)

    def each(mesh: DeviceMesh, policy: sf.Policy) -> Any:
        params, local = sf.shard(model, mesh, policy), sf.data.local_batch(SENTENCES, mesh)

        def loss(p: sf.Params, *sample: Tensor) -> Tensor:
            return _loss(sf.apply(model, p, *(x[None] for x in sample)))

        with sf.data.dropout_seed(5):
            return sf.gather(sf.vmap(sf.grad(loss), in_dims=(None, 0, 0, 0))(params, *local))

    samples = each(mesh, case.policy)
    assert_parity(samples, each(sf.make_mesh("cpu", fsdp=4), sf.Policy()), tol=1e-9)
    assert_parity({name: g.mean(0) for name, g in samples.items()}, {n: wanted[n] for n in samples}, tol=1e-9)


@pytest.mark.parametrize(
    ("kwargs", "fields"), [({"add_bias_kv": True}, {}), ({"add_zero_attn": True}, {}), ({}, {"ignore": ("in_proj_*",)})]
)
@on_meshes({"fsdp": 2, "tp": 2})
def test_attention_that_is_left_to_torch_draws_from_its_generator(
    mesh: DeviceMesh, kwargs: dict[str, Any], fields: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(16, 4, dropout=0.5, batch_first=True, **kwargs).double()
    params, x = sf.shard(model, mesh, sf.Policy(**fields)), _draw(4, 5, 16)
    torch.manual_seed(1)
    expected, _ = model(x, x, x)
    torch.manual_seed(1)
    with sf.data.dropout_seed(3):
        found, _ = sf.apply(model, params, x, x, x)
    torch.testing.assert_close(found, expected)


@on_meshes({"fsdp": 1, "tp": 2})
def test_a_hint_of_a_mask_that_is_not_there_is_an_error_as_in_torch(mesh: DeviceMesh) -> None:
    case, x = _attends(), _draw(4, 5, 16)
    with pytest.raises(sf.ShardError, match=r"got is_causal=True, which says what attn_mask is, and none"):
        sf.apply(case.model(), sf.shard(case.model(), mesh, case.policy), x, x, x, is_causal=True)


@on_meshes({"fsdp": 1, "tp": 2})
def test_attention_drops_weights(mesh: DeviceMesh) -> None:
    case, x = _attends(dropout=0.5), _draw(4, 5, 16)
    model = case.model()
    params = sf.shard(model, mesh, case.policy)
    torch.manual_seed(0)
    _, weights = sf.apply(model, params, x, x, x, average_attn_weights=False)
    assert 0.35 < float((weights == 0).double().mean()) < 0.65
    _, weights = sf.apply(model.eval(), params, x, x, x, average_attn_weights=False)
    assert bool((weights != 0).all())


# -- before any process -----------------------------------------------------------------------------------------------


@pytest.mark.everyday(1)
@pytest.mark.parametrize("case", [CNN, Case(Encoder, ENCODER_RULES, (), {"heads": 4})], ids=["cnn", "encoder"])
def test_plan_and_check_know_them(case: Case) -> None:
    model = case.model()
    x = _draw(*case.shape) if case.shape else torch.arange(24).view(4, 6) % 20
    mesh = sf.MeshSpec(fsdp=1, tp=2)
    assert sf.plan(model, mesh, case.policy, example=x).activation_bytes > 0
    report = sf.check(model, mesh, case.policy, lambda p, x: _loss(sf.apply(model, p, x)), (x,))
    assert report.ok, report


GROUPS = "whole groups for each of 4 ranks, 6 % 4 = 2"
ERRORS: dict[str, tuple[Callable[[], nn.Module], dict[str, str], tuple[int, ...], str]] = {
    "groups of a norm": (lambda: nn.Sequential(nn.GroupNorm(6, 24)), {"0.weight": "ch@tp"}, (2, 24, 3), GROUPS),
    "groups of a convolution": (
        _conv("Conv1d", 12, 12, 1, groups=6),
        {"0.weight": "ch@tp _ _"},
        (2, 12, 3),
        "split between whole groups",
    ),
    "in channels of groups": (
        _conv("Conv1d", 16, 16, 1, groups=2),
        {"0.weight": "_ ch@tp _"},
        (2, 16, 3),
        "split between whole groups",
    ),
    "a kernel": (_conv("Conv1d", 4, 4, 4), {"0.weight": "_ _ k@tp"}, (2, 4, 9), "split channels only"),
    "other channels": (
        lambda: nn.Sequential(nn.Conv1d(4, 8, 1), nn.Conv1d(8, 4, 1)),
        {"0.weight": "ch@tp _ _"},
        (2, 4, 3),
        "'1'",
    ),
    "a batch norm without a rule": (
        lambda: nn.Sequential(nn.Conv1d(4, 8, 1), nn.BatchNorm1d(8), nn.Conv1d(8, 4, 1)),
        {"0.weight": "ch@tp _ _", "2.weight": "_ ch@tp _"},
        (2, 4, 3),
        "'1'",
    ),
    "a group norm without a rule": (
        lambda: nn.Sequential(nn.Conv1d(4, 8, 1), nn.GroupNorm(4, 8), nn.Conv1d(8, 4, 1)),
        {"0.weight": "ch@tp _ _", "2.weight": "_ ch@tp _"},
        (2, 4, 3),
        "'1'",
    ),
    "a group norm of all groups": (
        lambda: nn.Sequential(nn.Conv1d(4, 8, 1), nn.GroupNorm(2, 8, affine=False), nn.Conv1d(8, 4, 1)),
        {"0.weight": "ch@tp _ _", "2.weight": "_ ch@tp _"},
        (2, 4, 3),
        "'2': it cannot be told.*group_norm of 2 groups in the channels of one rank",
    ),
    "a bias alone": (_conv("Conv1d", 4, 8, 1), {"0.bias": "ch@tp"}, (2, 4, 3), "must split it over the compute axes"),
    "statistics of all ranks": (
        lambda: nn.Sequential(nn.SyncBatchNorm(8)),
        {"0.weight": "ch@tp"},
        (),
        "SyncBatchNorm '0' uses its 'weight' in a forward of its own",
    ),
    "transposed in groups": (
        _conv("ConvTranspose1d", 8, 8, 1, groups=4),
        {"0.weight": "ch@tp _ _"},
        (),
        "ConvTranspose1d '0' uses its 'weight' in a forward of its own",
    ),
    "queries alone": (
        lambda: nn.MultiheadAttention(16, 4),
        {"in_proj_weight": "(3 heads@tp d) _"},
        (),
        r"\(the model\): MultiheadAttention computes with whole heads when all",
    ),
    "the output alone": (
        lambda: nn.Sequential(nn.MultiheadAttention(16, 4)),
        {"0.out_proj.weight": "_ (heads@tp d)"},
        (),
        "0: MultiheadAttention computes with whole heads when all",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_is_not_served_is_an_error(name: str) -> None:
    make, rules, shape, match = ERRORS[name]
    policy = sf.Policy(rules=rules, sizes={"heads": 4})
    with pytest.raises(sf.ShardError, match=match):
        sf.plan(make(), sf.MeshSpec(fsdp=1, tp=4), policy, example=torch.empty(shape) if shape else None)


@pytest.mark.parametrize(
    ("rules", "kwargs", "match"),
    [
        (HEADS, {"add_zero_attn": True}, "add_zero_attn are not served"),
        (HEADS, {"add_bias_kv": True}, "add_zero_attn are not served"),
        ({"in_proj_weight": "e@tp _", "out_proj.weight": "_ c@tp"}, {}, "must have whole heads of 4"),
        (
            {"in_proj_weight": "(3 e@tp) _", "out_proj.weight": "_ e@tp"},
            {"num_heads": 2},
            "whole heads of 2, 2 % 4 = 2",
        ),
    ],
)
def test_attention_that_is_not_served(rules: dict[str, str], kwargs: dict[str, Any], match: str) -> None:
    given: dict[str, Any] = {"embed_dim": 16, "num_heads": 4} | kwargs
    model = nn.MultiheadAttention(**given)
    sizes = {"heads": 4} if "heads" in str(rules) else {}
    x = torch.empty(5, 2, 16)
    with pytest.raises(sf.ShardError, match=match):
        sf.plan(model, sf.MeshSpec(tp=4), sf.Policy(rules=rules, sizes=sizes), example=(x, x, x))


class Standardised(nn.Conv2d):
    """Its own way from the weight to the output."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight - weight.mean(), bias)


def test_a_convolution_of_ones_own_is_not_taken_for_torchs() -> None:
    plan = sf.plan(Standardised(3, 4, 1), sf.MeshSpec(tp=2), sf.Policy(rules={"weight": "ch@tp _ _ _"}))
    assert {module.kind for module in plan.info.modules} == {"other"}
