"""Forwards that are written for one process, and split: calls of torch get what a rank has."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from families import FAMILIES
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import shardfn as sf
from shardfn.parallel import Amendment, ComputeAxes
from shardfn.testing import assert_parity, on_meshes
from shardfn.trace import ShapeTrace

MESH = sf.MeshSpec(fsdp=2, tp=2)
HEADS, WIDTH, HIDDEN = 4, 16, 32
RULES = {
    "**qkv.weight": "(3 h@tp d) c@fsdp",
    "**qkv.bias": "(3 h@tp d)",
    "**out.weight": "c@fsdp (h@tp d)",
    "**up.weight": "f@tp c@fsdp",
    "**up.bias": "f@tp",
    "**down.weight": "c@fsdp f@tp",
    "**into": "c f@tp",
    "**onto": "f@tp c",
}
POLICY = sf.Policy(rules=RULES, sizes={"h": HEADS})
OF_ATTENTION = sf.Policy(rules={name: rule for name, rule in RULES.items() if "h@tp" in rule}, sizes={"h": HEADS})

Forward = Callable[[Any, Tensor], Tensor]


class Attention(nn.Module):
    """As nanoGPT has it."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.width = HEADS, WIDTH
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).split(self.width, dim=2)
        k = k.view(b, t, self.heads, c // self.heads).transpose(1, 2)
        q = q.view(b, t, self.heads, c // self.heads).transpose(1, 2)
        v = v.view(b, t, self.heads, c // self.heads).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(b, t, c))


class Parts(nn.Module):
    """Whatever a forward may use."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.width, self.hidden = HEADS, WIDTH, HIDDEN
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.into, self.onto = (nn.Parameter(torch.randn(n, m) / 8) for n, m in ((WIDTH, HIDDEN), (HIDDEN, WIDTH)))
        self.bias, self.gate, self.scale = (nn.Parameter(torch.rand(n)) for n in (WIDTH, HIDDEN, 1))
        self.act, self.norm = nn.PReLU(HIDDEN), nn.BatchNorm1d(HIDDEN)

    def mlp(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.into) @ self.onto


def _per_head(m: Any, y: Tensor) -> Tensor:
    return y.reshape(y.shape[0], y.shape[1], m.heads, -1).transpose(1, 2)


def _attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return m.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def _by_a_helper(m: Any, x: Tensor) -> Tensor:
    return _attend(m, *(_per_head(m, y) for y in m.qkv(x).split(m.width, -1)))


def _by_a_list_of_sizes(m: Any, x: Tensor) -> Tensor:
    q, k, v = (_per_head(m, y) for y in m.qkv(x).split([m.width, WIDTH, m.width], dim=2))
    return _attend(m, q, k, v)


def _arranged(m: Any, x: Tensor) -> Tensor:
    q, k, v = rearrange(m.qkv(x), "b t (n h d) -> n b h t d", n=3, h=m.heads)
    return m.out(rearrange(F.scaled_dot_product_attention(q, k, v), "b h t d -> b t (h d)"))


def _with_slopes(m: Any, x: Tensor) -> Tensor:
    """ALiBi: a table of heads that is made of numbers."""
    q, k, v = (_per_head(m, y) for y in m.qkv(x).chunk(3, -1))
    slopes = torch.tensor([2.0**-i for i in range(m.heads)], dtype=x.dtype)
    biases = slopes[:, None, None] * torch.arange(x.shape[1], dtype=x.dtype)
    p = torch.softmax(q @ k.mT / (m.width // m.heads) ** 0.5 + biases, -1)
    return m.out((p @ v).transpose(1, 2).reshape(x.shape))


def _gated(m: Any, x: Tensor) -> Tensor:
    h = m.act(m.up(x).flatten(0, 1)).view(*x.shape[:2], -1)
    return x + m.down(h * m.gate * m.scale.exp())


def _sliced(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x)[..., : m.width], m.qkv(x)[..., m.width : 2 * m.width], m.qkv(x)[..., 2 * m.width :]
    return m.out(q * k + v)


def _twice(m: Any, x: Tensor) -> Tensor:
    for _ in range(2):
        x = x + m.mlp(x) + m.bias
    return x


def _in_double_steps(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    return m.down(torch.stack([h[..., ::2] * h[..., 1::2], h[..., ::2]], -1).flatten(-2))


def _squared(m: Any, x: Tensor) -> Tensor:
    return torch.tanh(m.mlp(x) + m.bias).square()


def _two_sums(m: Any, x: Tensor) -> Tensor:
    return m.mlp(x) * m.mlp(2 * x)


def _normed(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    return m.down(h * (h.square().sum(-1, keepdim=True) / m.hidden + 1e-6).rsqrt())


def _both_split(m: Any, x: Tensor) -> Tensor:
    return torch.where(m.up(x) > 0, m.gate, torch.linspace(0, 1, m.hidden, dtype=x.dtype)) @ m.onto


def _table(m: Any, x: Tensor) -> Tensor:
    table = torch.sin(torch.arange(m.hidden, dtype=x.dtype)).expand(x.shape[1], m.hidden)
    return m.down(m.up(x) + table)


def _filled(m: Any, x: Tensor) -> Tensor:
    h = torch.zeros(*x.shape[:2], m.hidden, dtype=x.dtype)
    return m.down(h + m.up(x))


def _compared(m: Any, x: Tensor) -> Tensor:
    """Python asks the part whether it is larger, and the split tensor of a rank is no other kind of tensor."""
    h, levels = m.up(x), torch.linspace(0, 1, m.hidden, dtype=x.dtype)
    return m.down(h * (levels < h.sigmoid()) + h * (h >= levels) + (levels == h) + (levels != h.relu()))


def _written_by_position(m: Any, x: Tensor) -> Tensor:
    """Into every position of a cache, and into one of a split value."""
    h = m.up(x)
    cache = torch.zeros_like(h)
    for i in range(x.shape[1]):
        cache[:, i] = h[:, i]
    cache[:, 0] = 0.0
    return m.down(cache)


def _hooked(m: Any, x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda grad: grad.clamp(max=0.1))
    return m.mlp(x)


def _hard_coded(m: Any, x: Tensor) -> Tensor:
    return m.down(m.up(x).view(-1, 8, 4).flatten(1).view(*x.shape[:2], 32))


def _all_picked(m: Any, x: Tensor) -> Tensor:
    out, flat = torch.zeros_like(x.flatten(0, 1)), x.flatten(0, 1)
    mask = (flat @ m.bias) > -1e9
    out[mask] += m.down(F.gelu(m.up(flat[mask])))
    return out.view_as(x)


SERVED: list[Forward] = [
    _by_a_helper,
    _by_a_list_of_sizes,
    _arranged,
    _with_slopes,
    _gated,
    _sliced,
    _twice,
    _in_double_steps,
    _squared,
    _two_sums,
    _normed,
    _both_split,
    _table,
    _filled,
    _compared,
    _written_by_position,
    _hooked,
    _hard_coded,
    _all_picked,
]


class Stack(nn.Module):
    """Two blocks between linears, so that inputs of blocks have gradients."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(WIDTH, WIDTH), nn.Sequential(kind(), kind()), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x)))


def _stack(forward: Forward) -> nn.Module:
    torch.manual_seed(0)
    return Stack(type("Block", (Parts,), {"forward": forward})).double()


def _x(requires_grad: bool = False) -> Tensor:
    return torch.randn(4, 8, WIDTH, dtype=torch.float64, requires_grad=requires_grad)


def _checked(model: nn.Module, policy: sf.Policy = POLICY) -> Any:
    return sf.check(model, MESH, policy, lambda params, x: sf.apply(model, params, x).square().mean(), _x())


@pytest.mark.everyday(3)
@pytest.mark.parametrize("forward", SERVED, ids=lambda fn: fn.__name__.strip("_"))
def test_what_is_written_for_one_process_is_as_there(forward: Forward) -> None:
    result = _checked(_stack(forward))
    assert result.ok, result


def test_attention_of_nanogpt_is_as_in_one_process() -> None:
    assert _checked(Stack(Attention).double(), OF_ATTENTION).ok


DRAWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "of its shape": lambda h, y: h + torch.randn(h.shape, dtype=h.dtype),
    "by chance": lambda h, y: h * (torch.rand(h.shape, dtype=h.dtype) < h.sigmoid()),
    "of its features": lambda h, y: h * (h > torch.randn(h.shape[-1], dtype=h.dtype)),
    "of its batch": lambda h, y: h * h.new_empty((len(h), 1, 1)).bernoulli_(0.5),
    "in the shape of a sum": lambda h, y: h * torch.randn_like(y).mean(-1, keepdim=True),
}


@pytest.mark.everyday(2)
@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_are_those_of_one_process(name: str) -> None:
    model, x = _stack(lambda m, x: m.down(DRAWS[name](m.up(x), m.mlp(x)))), _x()
    torch.manual_seed(1)
    expected = model(x)
    with sf.simulate(fsdp=1, tp=2) as mesh:
        params = sf.shard(model, mesh, POLICY)
        torch.manual_seed(1)
        assert_parity({"out": sf.apply(model, params, x)}, {"out": expected})


def test_what_is_compared_must_be_told_apart_by_size() -> None:
    model = _stack(lambda m, x: m.down(m.up(x) * (torch.linspace(0, 1, HIDDEN, dtype=x.dtype) < m.up(x).sigmoid())))
    x = torch.randn(HIDDEN, 2, WIDTH, dtype=torch.float64)  # as many samples as features
    with sf.simulate(fsdp=1, tp=2) as mesh:
        with pytest.raises(sf.ShardError, match=r"acts=\{'blocks\.\*\.up': '\.\.\. f'\}\), with which"):
            sf.apply(model, sf.shard(model, mesh, POLICY), x)


@pytest.mark.parametrize("regather", [True, False])
@on_meshes({"fsdp": 2, "tp": 2}, {"fsdp": 1, "tp": 4})
def test_ranks_get_what_one_process_gets(mesh: DeviceMesh, regather: bool) -> None:
    torch.manual_seed(0)
    model = Stack(Attention).double()
    x = _x()
    policy = OF_ATTENTION | sf.Policy(regather=regather, units="blocks.*")
    params, each = sf.shard(model, mesh, policy), len(x) // mesh["fsdp"].size()
    mine = x[each * mesh.get_local_rank("fsdp") :][:each]

    def mean_square(params: sf.Params, x: Tensor) -> Tensor:
        return sf.apply(model, params, x).square().mean()

    loss, grads = sf.value_and_grad(mean_square)(params, mine)
    again = torch.func.grad(mean_square)(params, mine)  # a unit that computes again is amended again
    expected = model(x).square().mean()
    expected.backward()
    assert_parity({"loss": loss}, {"loss": expected.detach()})
    for found in (grads, again):
        assert_parity(sf.gather(found), {name: p.grad for name, p in model.named_parameters()})


class Queries(nn.Module):
    """One key for two queries, which a rank that has one query repeats as often as one process does."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 2), nn.Linear(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (linear(x).unflatten(-1, (-1, 2)).transpose(1, 2) for linear in (self.q, self.k))
        k = k.repeat_interleave(2, 1)
        return self.o((q @ k.transpose(-1, -2) @ k).transpose(1, 2).flatten(2))


@on_meshes({"fsdp": 2, "tp": 2})
def test_a_key_is_repeated_alike_when_a_unit_computes_again(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Queries()).double(), _x()
    rules = {"0.q.weight": "(q@tp d) c@fsdp", "0.k.weight": "(k@tp? d) c@fsdp", "0.o.weight": "c@fsdp (q@tp d)"}
    params = sf.shard(model, mesh, sf.Policy(rules=rules, sizes={"d": 2}, units="0"))
    (mine,) = sf.data.local_batch((x,), mesh)
    grads = torch.func.grad(lambda p, x: sf.apply(model, p, x).square().mean())(params, mine)
    model(x).square().mean().backward()
    assert_parity(sf.gather(grads), {name: p.grad for name, p in model.named_parameters()})


class Sized(nn.Module):
    """A forward that is given a size as a number, which no guard looks at when it is large."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor, size: int) -> Tensor:
        return self.down(self.up(x).view(len(x), -1, size).cumsum(1).flatten(1).view(*x.shape[:2], -1))


def test_a_size_that_is_another_later_is_not_taken_for_the_one_before() -> None:
    torch.manual_seed(0)
    model, x = Sized().double(), _x()
    policy = sf.Policy(rules={"up.weight": "f@tp c", "up.bias": "f@tp", "down.weight": "c f@tp"})
    with sf.simulate(fsdp=1, tp=2) as mesh:
        params = sf.shard(model, mesh, policy)
        for size in (HIDDEN, HIDDEN, 2 * HIDDEN):
            try:
                assert_parity({"out": sf.apply(model, params, x, size)}, {"out": model(x, size).detach()})
            except sf.ShardError as error:
                assert size != HIDDEN, error


def test_a_number_that_no_trace_saw_is_an_error() -> None:
    axes = ComputeAxes(MESH, {"fsdp": 2, "tp": 2}, {"fsdp": 0, "tp": 0})
    amendment = Amendment("layers.0", (), 0, "tp", "divide", given=64)
    assert axes.amended(64, amendment) == 32
    with pytest.raises(sf.ShardError, match=r"in 'layers\.0', a call of torch is given the size 32, which was 64"):
        axes.amended(32, amendment)


class Cached(Attention):
    """Attention with keys and values of calls before, which it returns in a tuple, a dict or an object."""

    def forward(self, x: Tensor, past: Any = None) -> Any:
        q, k, v = (_per_head(self, y) for y in self.qkv(x).split(self.width, 2))
        if isinstance(past, tuple):
            k, v = (torch.cat([old, new], 2) for old, new in zip(past, (k, v), strict=True))
        elif past:
            k, v = torch.cat([past["k"], k], 2), torch.cat([past["v"], v], 2)
        out = _attend(self, q, k, v)
        return out, {"k": k, "v": v} if isinstance(past, dict) else (k, v)


class Kept(Attention):
    def forward(self, x: Tensor, past: Any = None) -> Any:
        q, k, v = (_per_head(self, y) for y in self.qkv(x).split(self.width, 2))
        past.k = k if past.k is None else torch.cat([past.k, k], 2)
        past.v = v if past.v is None else torch.cat([past.v, v], 2)
        return _attend(self, q, past.k, past.v), past


class Cache:
    k: Tensor | None = None
    v: Tensor | None = None


@on_meshes({"fsdp": 1, "tp": 2})
def test_caches_go_from_call_to_call(mesh: DeviceMesh) -> None:
    for kind, start in ((Cached, lambda: None), (Cached, dict), (Kept, Cache)):
        torch.manual_seed(0)
        model = kind().double()
        params, one, split = sf.shard(model, mesh, OF_ATTENTION), start(), start()
        x = _x()
        for at in range(4):
            step = x[:, at : at + 1]
            expected, one = model(step, one)
            out, split = sf.apply(model, params, step, split)
            assert_parity({"out": out}, {"out": expected.detach()})


class Mixture(nn.Module):
    """Experts written plainly: tokens by a mask, or by numbers."""

    def __init__(self, by_mask: bool) -> None:
        super().__init__()
        self.gate, self.by_mask = nn.Linear(WIDTH, 4), by_mask
        self.experts: Any = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(WIDTH, HIDDEN), "down": nn.Linear(HIDDEN, WIDTH)}) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights = self.gate(flat).softmax(-1)
        chosen, out = weights.topk(2, -1).indices, torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            if self.by_mask:
                mask = (chosen == e).any(-1)
                out[mask] += expert["down"](F.gelu(expert["up"](flat[mask]))) * weights[mask, e, None]
            else:
                rows, _ = torch.where(chosen == e)
                out.index_add_(0, rows, expert["down"](F.gelu(expert["up"](flat[rows]))) * weights[rows, e, None])
        return out.view_as(x)


@on_meshes({"fsdp": 2, "tp": 2})
def test_experts_written_plainly_are_as_in_one_process(mesh: DeviceMesh) -> None:
    for by_mask in (True, False):
        torch.manual_seed(0)
        model, x = Mixture(by_mask).double(), _x()
        policy = sf.Policy(
            rules={name: rule for name, rule in RULES.items() if name[-6:] in ("weight", "p.bias") and "f@tp" in rule}
        )
        mine = x.chunk(2)[mesh.get_local_rank("fsdp")]
        step = sf.value_and_grad(lambda p, x, model=model: sf.apply(model, p, x).square().mean())
        loss, grads = step(sf.shard(model, mesh, policy), mine)
        expected = model(x).square().mean()
        expected.backward()
        assert_parity({"loss": loss}, {"loss": expected.detach()})
        assert_parity(sf.gather(grads), {name: p.grad for name, p in model.named_parameters()})


class Nested(Attention):
    """A block of which one within is of the same class, and is called by the same line."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.inner = Nested(depth - 1) if depth else None

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x) if self.inner is None else self.inner(x)
        return super().forward(x) + x / self.width


def test_modules_of_one_class_in_each_other_are_told_apart() -> None:
    torch.manual_seed(0)
    assert _checked(Stack(Nested).double(), OF_ATTENTION).ok


class Again(Attention):
    """Computes a part again in the backward, when the module is left."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, heads: int) -> Tensor:
        ctx.save_for_backward(h)
        return h.view(*h.shape[:2], heads, 4).flatten(2) ** 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return 2 * grads[0] * ctx.saved_tensors[0], None


@pytest.mark.parametrize(
    "kind", [Again, type("Own", (Parts,), {"forward": lambda m, x: m.out(Square.apply(m.qkv(x)[..., :16], m.heads))})]
)
def test_what_runs_once_more_is_not_amended(kind: type[nn.Module]) -> None:
    with pytest.raises(sf.ShardError, match=r"with the sizes that one rank has|a size is taken from elsewhere"):
        sf.plan(Stack(kind).double(), MESH, OF_ATTENTION if kind is Again else POLICY, example=_x())


def test_a_graph_is_not_amended() -> None:
    for policy in (OF_ATTENTION | sf.Policy(compile=True), OF_ATTENTION):
        model = Stack(Attention).double()
        if policy is OF_ATTENTION:
            model.blocks[1].compile(backend="eager")
        with pytest.raises(sf.ShardError, match="local_sizes"):
            sf.plan(model, MESH, policy, example=_x())


@on_meshes({"fsdp": 1, "tp": 2})
def test_what_is_compiled_later_is_an_error(mesh: DeviceMesh) -> None:
    model = Stack(Attention).double()
    params = sf.shard(model, mesh, OF_ATTENTION)
    sf.apply(model, params, _x())
    model.blocks[1].compile(backend="eager")
    with pytest.raises(sf.ShardError, match=r"'blocks\.1' is compiled"):
        sf.apply(model, params, _x())


def _written(m: Any, x: Tensor) -> Tensor:
    table = x.new_zeros(HIDDEN)
    table += m.up(x)[0, 0]
    return m.down(m.up(x) + table)


def _rectified(m: Any, x: Tensor) -> Tensor:
    y = m.mlp(x)
    F.relu(y, inplace=True)
    return y


def _marked(m: Any, x: Tensor) -> Tensor:
    h, marks = m.up(x), torch.zeros(5, dtype=torch.bool)
    marks[h.shape[-1] // 8] = True
    return m.down(-h if bool(marks[2]) else h)


@pytest.mark.parametrize(
    "forward", [_written, _rectified, _marked, lambda m, x: m.down(m.norm(m.up(x).flatten(0, 1))).view(x.shape)]
)
def test_what_a_call_writes_is_not_a_copy(forward: Forward) -> None:
    with pytest.raises(sf.ShardError):
        sf.plan(_stack(forward), MESH, POLICY, example=_x())


@torch.library.custom_op("shardfn_tests::into", mutates_args=("out",))
def into(x: Tensor, out: Tensor) -> None:
    """Sums from the left on."""
    out.copy_(x.cumsum(-1))


@into.register_fake
def _(x: Tensor, out: Tensor) -> None:
    if x.shape != out.shape:
        raise ValueError(f"{x.shape} is not {out.shape}")


@pytest.mark.parametrize(("width", "why"), [(None, "written with values that are split"), (HIDDEN, "sizes that one")])
def test_what_an_unknown_operation_writes_is_not_taken_for_a_part(width: int | None, why: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.up(x)
        sums = torch.zeros_like(h) if width is None else x.new_zeros(*x.shape[:-1], width)
        into(h.detach() * 1, sums)
        return m.down(h * sums)

    kind = type("Own", (Parts,), {"forward": forward})
    with pytest.raises(sf.ShardError, match=why):
        sf.plan(Stack(kind).double(), MESH, POLICY, example=_x())


def test_a_number_that_is_known_is_not_written_twice() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h, numbers = m.up(x), torch.arange(2)
        numbers *= h.shape[-1]
        return m.down(h) * numbers.sum()

    kind = type("Own", (Parts,), {"forward": forward})
    with pytest.raises(sf.ShardError, match="made of this rank's sizes"):
        sf.plan(Stack(kind).double(), MESH, POLICY, example=_x())


def test_a_key_for_several_queries_is_a_ranks_own_rather_than_amended() -> None:
    fields = {"num_attention_heads": 4, "num_key_value_heads": 1}
    model: Any = replace(FAMILIES["Llama"], fields=FAMILIES["Llama"].fields | fields).make()
    policy = sf.policies.from_transformers(model)
    without = sf.Policy(**{name: getattr(policy, name) for name in policy.given if name != "local_sizes"})
    plan = sf.plan(model, MESH, without)
    calls = [("", (torch.zeros(2, 8, dtype=torch.long),), {})]
    buffers = dict(model.named_buffers())
    assert not ShapeTrace(model, plan, MESH, buffers, "forward", calls).adjustments().amended


class Fixed(nn.Module):
    """A function of itself, with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.onto, self.into = (nn.Parameter(torch.randn(n, m) / 4) for n, m in ((HIDDEN, WIDTH), (WIDTH, HIDDEN)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.onto)) @ self.into.t()


class Solved(nn.Module):
    """A deep equilibrium: iterations that autograd does not see, and one that it does."""

    def __init__(self, start: Callable[[Tensor], Tensor], steps: int) -> None:
        super().__init__()
        self.first, self.fixed, self.start, self.steps = nn.Linear(WIDTH, WIDTH), Fixed(), start, steps

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        z = self.start(x)
        with torch.no_grad():
            for _ in range(self.steps):
                with torch.enable_grad():
                    pass
                z = self.fixed(z) + x
        return self.fixed(z) + x


@pytest.mark.parametrize("start", [torch.zeros_like, torch.Tensor.detach, lambda x: x.new_zeros(x.shape)])
@pytest.mark.parametrize("steps", [1, 3])
def test_values_that_autograd_does_not_see_ask_for_no_gradient(start: Callable[[Tensor], Tensor], steps: int) -> None:
    torch.manual_seed(0)
    model, x = Solved(start, steps).double(), torch.randn(4, WIDTH, dtype=torch.float64)
    rules = {"fixed.onto": "f@tp c", "fixed.into": "c f@tp"}
    _as_in_one_process(model, x, sf.Policy(rules=rules))


WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "a mask": lambda h, x: h.masked_fill_(torch.arange(HIDDEN) < 4, 0.0),
    "a sum": lambda h, x: h.add_(x.repeat(1, 2)),
    "a factor": lambda h, x: h.mul_(2.0),
    "a column": lambda h, x: h[:, 0].zero_(),
}


class Written(nn.Module):
    """What is written into an output, in place."""

    def __init__(self, write: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.up, self.down, self.write = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), write

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        self.write(h, x)
        return self.down(h)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("what", WRITES)
def test_whole_values_are_written_into_split_and_into_gathered_ones(what: str, gathered: bool) -> None:
    torch.manual_seed(0)
    model, x = Written(WRITES[what]).double(), torch.randn(4, WIDTH, dtype=torch.float64)
    rules = {"up.weight": "f@tp c", "down.weight": "c f@tp"}
    chosen = sf.Policy(rules=rules, acts={"up": "... f"} if gathered else {})
    if what == "a column" and not gathered:
        with pytest.raises(sf.ShardError, match=r"acts=\{'up': '\.\.\. f'\}\), with which this run goes to its end"):
            _as_in_one_process(model, x, chosen)
    else:
        _as_in_one_process(model, x, chosen)


def _as_in_one_process(model: nn.Module, x: Tensor, chosen: sf.Policy) -> None:
    with sf.simulate(fsdp=1, tp=2) as mesh:
        params = sf.shard(model, mesh, chosen)
        loss, grads = sf.value_and_grad(lambda p, x: sf.apply(model, p, x).square().mean())(params, x)
        whole: dict[str, Any] = {**sf.gather(grads), "loss": loss}
        found = {name: value.reconcile() for name, value in whole.items()}
    expected = model(x).square().mean()
    expected.backward()
    assert_parity(found, {**{n: p.grad for n, p in model.named_parameters()}, "loss": expected.detach()}, tol=1e-12)
