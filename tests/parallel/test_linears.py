"""Modules that compute with split parameters in their own forwards, within a model whose activations are shared."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import parametrizations, parametrize

import shardfn as sf
from shardfn.parallel import wiring
from shardfn.testing import assert_parity, count_collectives, on_meshes
from shardfn.trace.interpreter import Interpreter
from shardfn.trace.traced_axes import TracedAxes

MESHES = ({"fsdp": 2, "tp": 2}, {"fsdp": 1, "tp": 4})
SPLIT = {"{q,k,v}": "c@fsdp heads@tp d", "o": "heads@tp d c@fsdp", "up": "c@fsdp ff@tp", "down": "ff@tp c@fsdp"}


class Block(nn.Module):
    """The parameters of attention with 4 heads of 2, and of two layers of 16; [b, s, 8] -> [b, s, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(8, 4, 2) / 3) for _ in range(3))
        self.o = nn.Parameter(torch.randn(4, 2, 8) / 3)
        self.up, self.down = nn.Parameter(torch.randn(8, 16) / 3), nn.Parameter(torch.randn(16, 8) / 3)


class Reader(nn.Module):
    """A block that reads the weight of its child."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.linear.weight.T) @ self.linear.weight


class Model(nn.Module):
    """Blocks in a residual stream."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(8, 8), nn.ModuleList([block(), block()]), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def _attention(m: Any, x: Tensor) -> Tensor:
    q, k, v = (torch.einsum("bsc,chd->bhsd", x, w) for w in (m.q, m.k, m.v))
    scores = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
    return torch.einsum("bhij,bhjd,hdc->bic", scores, v, m.o)


def _heads_in_the_middle(m: Any, x: Tensor) -> Tensor:
    q, k, v = (torch.einsum("bsc,chd->bshd", x, w) for w in (m.q, m.k, m.v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k).softmax(-1)
    return torch.einsum("bihd,hdc->bic", torch.einsum("bhij,bjhd->bihd", scores, v), m.o)


def _two_layers(m: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ m.up) @ m.down


def _in_parallel(m: Any, x: Tensor) -> Tensor:
    return _attention(m, x) + _two_layers(m, x)


def _masked(m: Any, x: Tensor) -> Tensor:
    q, k, v = (torch.einsum("bsc,chd->bhsd", x, w) for w in (m.q, m.k, m.v))
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
    mask = mask[None, None].repeat(x.shape[0], q.shape[1], 1, 1)
    scores = (q @ k.transpose(-1, -2)).masked_fill(~mask, -1e30).softmax(-1)
    return torch.einsum("bhsd,hdc->bsc", scores @ v, m.o)


def _one_by_one(m: Any, x: Tensor) -> Tensor:
    x = x + _attention(m, x)
    return _two_layers(m, x)


class Own(nn.Module):
    """Parameters by name, each [n, m]."""

    scale: nn.Parameter
    up: nn.Parameter
    down: nn.Parameter
    w: nn.Parameter

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / 3))


class Mixed(nn.Module):
    """A block of a linear, and of a parameter that reads what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Parameter(torch.randn(16, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x)) @ self.down


class Up(Own):
    """One half of a block."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.w)


class Down(Own):
    """The other half."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


class Halves(nn.Module):
    """A block of two modules, the sum of the second of which it returns as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Up(w=(8, 16)), Down(w=(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


class Normed(Own):
    """A norm by hand, with a scale of its own: gradients go to the scale and to the input."""

    def __init__(self) -> None:
        super().__init__(scale=(8,), up=(8, 16), down=(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.scale
        return torch.tanh(x @ self.up) @ self.down


class Nested(Own):
    """Another block first; both read the input."""

    def __init__(self) -> None:
        super().__init__(up=(8, 16), down=(16, 8))
        self.inner = Normed()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh((x + self.inner(x)) @ self.up) @ self.down


class Gated(Own):
    """A linear of its own that all ranks have whole, beside another reader of the input."""

    def __init__(self) -> None:
        super().__init__(up=(8, 16), down=(16, 8))
        self.gate = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.up * self.gate(x)) @ self.down


class Across(nn.Module):
    """What a whole linear makes, used in shares."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.up, self.down = nn.Linear(8, 1), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.enter(x))


class Scaled(Own):
    """A value that is made of two parameters, used in shares."""

    def __init__(self) -> None:
        super().__init__(up=(8, 16), down=(16, 8), w=(1,), scale=(1,))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.up * (self.w * self.scale)) @ self.down


class After(nn.Module):
    """A value that is used in shares after another block has read it."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.inner = nn.Linear(8, 8), Normed()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(x)
        return self.inner(y) + self.down(self.up(x) * y.mean(-1, keepdim=True))


class Called(Own):
    """A linear that is called with a value used in shares, and with one that is not."""

    def __init__(self) -> None:
        super().__init__(up=(8, 16), down=(16, 8), w=(1, 1, 8))
        self.gate = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.up * self.gate(x) * self.gate(self.w)) @ self.down


class InADict(nn.Module):
    """Parameters in containers of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.named = nn.ParameterDict({"up": torch.randn(8, 16) / 3})
        self.listed = nn.ParameterList([torch.randn(16, 8) / 3])

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.named["up"]) @ self.listed[0]


INTO, OUT = "c@fsdp ff@tp", "ff@tp c@fsdp"
BLOCKS: dict[type[nn.Module], dict[str, str]] = {
    Mixed: {"up.weight": OUT, "down": OUT},
    Halves: {"up.w": INTO, "down.w": OUT},
    Normed: {"up": INTO, "down": OUT},
    Nested: {"{up,inner.up}": INTO, "{down,inner.down}": OUT},
    Called: {"up": INTO, "down": OUT},
    Gated: {"up": INTO, "down": OUT},
    After: {"inner.up": INTO, "inner.down": OUT, "up.weight": OUT, "down.weight": INTO},
    Scaled: {"up": INTO, "down": OUT},
    Across: {"up.weight": OUT, "down.weight": INTO},
    InADict: {"named.up": INTO, "listed.0": OUT},
    Reader: {"linear.weight": OUT},
}


def _model(forward: Callable[[Any, Tensor], Tensor]) -> tuple[Model, sf.Policy]:
    """A model of blocks with a forward, and rules that split them."""
    torch.manual_seed(3)
    model = Model(type("Way", (Block,), {"forward": forward})).double()
    return model, sf.Policy(rules={f"blocks.*.{name}": rule for name, rule in SPLIT.items()})


def _require_parity(model: nn.Module, policy: sf.Policy, mesh: DeviceMesh) -> None:
    """Outputs, and gradients of parameters and of inputs, are those of one rank."""
    x = torch.randn(4, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    whole = model(x)
    *wanted, of_x = torch.autograd.grad(whole.square().mean(), [*model.parameters(), x], materialize_grads=True)
    params = sf.shard(model, mesh, policy)
    local, out, into = (part.detach() for part in sf.data.local_batch((x, whole, of_x), mesh))
    local.requires_grad_()
    grads = sf.grad(lambda p: sf.apply(model, p, local).square().mean())(params)
    assert_parity(sf.gather(grads), dict(zip(dict(model.named_parameters()), wanted, strict=True)), tol=1e-11)
    assert_parity(sf.apply(model, params, local), out, tol=1e-11)
    (mine,) = torch.autograd.grad(sf.apply(model, params, local).square().mean(), local)
    assert_parity(mine, into * x.shape[0] / local.shape[0], tol=1e-11)


@pytest.mark.everyday(3)
@pytest.mark.parametrize("forward", [_attention, _heads_in_the_middle, _two_layers, _in_parallel, _masked])
@on_meshes(*MESHES)
def test_blocks_are_as_on_one_rank(mesh: DeviceMesh, forward: Callable[[Any, Tensor], Tensor]) -> None:
    _require_parity(*_model(forward), mesh)


@pytest.mark.parametrize("forward", [_in_parallel, _masked])
@on_meshes(*MESHES)
def test_a_block_alone_is_as_on_one_rank(mesh: DeviceMesh, forward: Callable[[Any, Tensor], Tensor]) -> None:
    """The inputs of `apply` enter it."""
    torch.manual_seed(3)
    block = type("Way", (Block,), {"forward": forward})().double()
    _require_parity(block, sf.Policy(rules=SPLIT), mesh)


@pytest.mark.everyday(4)
@pytest.mark.parametrize("block", BLOCKS)
@on_meshes(*MESHES)
def test_blocks_of_other_kinds_are_as_on_one_rank(mesh: DeviceMesh, block: type[nn.Module]) -> None:
    torch.manual_seed(3)
    policy = sf.Policy(rules={f"blocks.*.{name}": rule for name, rule in BLOCKS[block].items()})
    _require_parity(Model(block).double(), policy, mesh)


def _of_its_bias(linear: nn.Linear) -> nn.Module:
    return parametrize.register_parametrization(linear, "bias", nn.Tanh())


PARAMETRIZED: list[Callable[[nn.Linear], Any]] = [
    parametrizations.weight_norm,
    parametrizations.orthogonal,
    parametrizations.spectral_norm,
    _of_its_bias,
]


@pytest.mark.parametrize("made", PARAMETRIZED)
@on_meshes({"fsdp": 2, "tp": 2})
def test_linears_whose_weights_are_made_of_others_stay_as_they_are(
    mesh: DeviceMesh, made: Callable[[nn.Linear], nn.Module]
) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    made(next(linear for linear in model if isinstance(linear, nn.Linear)))
    _require_parity(model.eval(), sf.Policy(rules={"2.weight": "f@tp _", "4.weight": "_ f@tp"}), mesh)


class Noting(Own):
    """A block that writes into what it is given, and asks which tensor that is."""

    def __init__(self) -> None:
        super().__init__(up=(8, 16), down=(16, 8))

    def forward(self, x: Tensor, notes: dict[str, Any], context: Tensor) -> Tensor:
        notes[f"call {len(notes)}"] = x.shape
        return torch.tanh(x @ self.up) @ self.down * (2 if context is x else 3)


@on_meshes({"fsdp": 1, "tp": 2})
def test_a_block_may_write_into_what_it_is_given(mesh: DeviceMesh) -> None:
    torch.manual_seed(3)
    block, notes = Noting().double(), dict[str, Any]()
    x, context = torch.randn(4, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    params = sf.shard(block, mesh, sf.Policy(rules={"up": INTO, "down": OUT}))
    assert_parity(sf.apply(block, params, x, notes, context), block(x, {}, context), tol=1e-11)
    assert notes == {"call 0": x.shape}
    assert_parity(sf.apply(block, params, x, notes, x), block(x, {}, x), tol=1e-11)


@on_meshes({"fsdp": 1, "tp": 2})
def test_a_block_costs_an_all_reduce_each_way(mesh: DeviceMesh) -> None:
    """Also with two readers of its input."""
    model, policy = _model(_in_parallel)
    params, x = sf.shard(model, mesh, policy), torch.randn(2, 5, 8, dtype=torch.float64)
    step = sf.value_and_grad(lambda p: sf.apply(model, p, x).square().mean())
    step(params)
    with count_collectives() as counts:
        step(params)
    assert counts.all_reduce == 2 * len(model.blocks)


def test_an_input_is_a_source_within_its_module_only() -> None:
    variance = Interpreter({"tp": 2})
    axes = TracedAxes(sf.MeshSpec(tp=2), {"tp": 2}, {"tp": 0}, variance)
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    axes.note_source(x, "module first")
    axes.note_source(y, "module keys")
    with axes.seen_from({"input 0 of block": x, "input 1 of block": y, "input 2 of block": 3}, {"module keys"}):
        assert (variance.tag(x).source, variance.tag(y).source) == ("input 0 of block", "module keys")
    assert variance.tag(x).source == "module first"


def test_what_a_pvary_does_not_mend_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs end when nothing is new, and then nothing may be left."""
    monkeypatch.setattr(wiring, "_changing", lambda inputs, output: lambda forward: forward)
    policy = sf.Policy(rules={"up.weight": OUT, "down.weight": INTO}, compile=True)  # whose calls are not amended
    with pytest.raises(sf.ShardError, match="module enter meets values that are split over 'tp'"):
        sf.plan(Across(), sf.MeshSpec(fsdp=1, tp=2), policy, example=torch.randn(2, 5, 8))


class Hooked(Own):
    """A block that has a look at the gradient of its input."""

    def __init__(self) -> None:
        super().__init__(up=(8, 16), down=(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        x.register_hook(lambda grad: grad.clamp(max=1.0))
        return torch.tanh(x @ self.up) @ self.down


def test_a_hook_on_an_input_used_in_shares_is_an_error() -> None:
    policy = sf.Policy(rules={"blocks.*.up": INTO, "blocks.*.down": OUT}, compile=True)
    with pytest.raises(sf.ShardError, match=r"in 'blocks\.0': a hook on a value that ranks of .tp. use in shares"):
        sf.plan(Model(Hooked), sf.MeshSpec(fsdp=1, tp=2), policy, example=torch.randn(2, 5, 8))


def test_a_sum_in_the_middle_of_a_compiled_block_is_an_error() -> None:
    model, policy = _model(_one_by_one)
    with pytest.raises(sf.ShardError) as caught:
        example = torch.randn(2, 5, 8, dtype=torch.float64)
        sf.plan(model, sf.MeshSpec(fsdp=1, tp=2), policy | sf.Policy(compile=True), example=example)
    assert "add of a sum that is still pending (in 'blocks.0')" in str(caught.value)
    assert "a module of its own, or write sf.collectives.psum(x, mesh, axis)" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 3


class Scores(nn.Module):
    """Attention that scales the queries of each head; [b, heads, s, d] of them, and keys that groups of heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        k = k[:, :, None].expand(-1, -1, q.shape[1] // k.shape[1], -1, -1).flatten(1, 2)
        return (q * self.scale[:, None, None] @ k.transpose(-1, -2)).softmax(-1) @ k


class Grouped(nn.Module):
    """A block with 4 heads of queries and 2 of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o, self.scores = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 8), Scores()

    def forward(self, x: Tensor) -> Tensor:
        q, k = (linear(x).unflatten(-1, (-1, 2)).transpose(1, 2) for linear in (self.q, self.k))
        return self.o(self.scores(q, k).transpose(1, 2).flatten(2))


@on_meshes(*MESHES)
def test_keys_of_a_group_may_enter_a_module(mesh: DeviceMesh) -> None:
    torch.manual_seed(3)
    rules = {"q.weight": "(h@tp d) c", "k.weight": "(kv@tp? d) c", "o.weight": "c (h@tp d)", "scores.scale": "h@tp"}
    policy = sf.Policy(rules={f"blocks.*.{name}": rule for name, rule in rules.items()}, sizes={"d": 2})
    _require_parity(Model(Grouped).double(), policy, mesh)


class Table(nn.Embedding):
    """A lookup of one's own in its table, and one in another table."""

    lookup: Any

    def __init__(self) -> None:
        super().__init__(16, 8)
        self.places = nn.Parameter(torch.randn(16, 8))

    def forward(self, input: Tensor) -> Tensor:
        return self.lookup(input)


ROWS, COLUMNS = "v@tp c@fsdp", "v@fsdp c@tp"
# What a subclass does, and the rules of its table with which that is served.
LOOKUPS: list[tuple[Callable[[Any, Any], Tensor], tuple[str, ...]]] = [
    (lambda m, ids: nn.Embedding.forward(m, (ids + 2) % 16) * m.embedding_dim**0.5, (ROWS, COLUMNS)),
    (lambda m, ids: nn.Embedding.forward(m, ids) * m.weight.shape[1] ** 0.5, (ROWS,)),
    (lambda m, ids: nn.Embedding.forward(m, ids) / m.weight.shape[0], (ROWS, COLUMNS)),
    (lambda m, ids: F.embedding(ids.clamp(max=len(m.weight) - 1), m.weight), (COLUMNS,)),
    (lambda m, ids: F.embedding(ids, F.normalize(m.weight, dim=-1)), ()),
    (lambda m, ids: nn.Embedding.forward(m, ids) * m.weight.norm(), ()),
    (lambda m, ids: F.embedding(ids, m.weight.detach()), ()),
    (lambda m, ids: F.embedding(ids, m.weight, padding_idx=3), ()),
    (lambda m, ids: F.embedding(ids, m.places) + F.embedding(ids, m.weight), (ROWS, COLUMNS)),
    (lambda m, ids: nn.Embedding.forward(m, ids) @ m.weight.T @ m.weight, (ROWS,)),
]


@pytest.mark.everyday(4)
@pytest.mark.parametrize("rule", [ROWS, COLUMNS])
@pytest.mark.parametrize("at", range(len(LOOKUPS)))
def test_a_lookup_of_ones_own_is_that_of_one_process(at: int, rule: str) -> None:
    lookup, served = LOOKUPS[at]
    torch.manual_seed(0)
    model = nn.Sequential(type("Own", (Table,), {"lookup": lookup})(), nn.Linear(8, 4)).double()
    ids, mesh = torch.randint(16, (4, 5)), sf.MeshSpec(fsdp=1, tp=2)

    def checked(policy: sf.Policy) -> Any:
        return sf.check(model, mesh, policy, lambda p, x: sf.apply(model, p, x).square().mean(), ids)

    policy = sf.Policy(rules={"0.weight": rule})
    if rule in served:
        result = checked(policy)
    else:
        with pytest.raises(sf.ShardError) as caught:
            sf.plan(model, mesh, policy, example=ids)
        written = re.search(r"Write policy \| (sf\.Policy\(.*?\)), with which", str(caught.value))
        assert written is not None, caught.value
        result = checked(policy | eval(written[1]))
    assert result.ok, result


class _Experts(nn.Module):
    """All experts for all samples, whose weights two axes split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 6) / 3), nn.Parameter(torch.randn(4, 6, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bef,efc->bec", torch.einsum("bc,ecf->bef", x, self.up).tanh(), self.down).sum(1)


def test_a_view_of_dims_that_two_axes_split() -> None:
    torch.manual_seed(0)
    model, policy = _Experts().double(), sf.Policy(rules={"up": "e@ep c f@tp", "down": "e@ep f@tp c"})
    x = torch.randn(3, 8, dtype=torch.float64)
    mesh = sf.MeshSpec(fsdp=1, ep=2, tp=2)
    result = sf.check(model, mesh, policy, lambda p, x: sf.apply(model, p, x).square().mean(), x)
    assert result.ok, result
