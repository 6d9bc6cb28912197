"""Forwards that a shape-only trace has to compare with one on whole values: each was a wrong number once."""

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import shardfn as sf
from shardfn.testing import assert_parity, on_meshes

RULES = {"up.weight": "f@tp c", "down.weight": "c f@tp", "fused.weight": "(3 f@tp) c"}
RAW = {"into": "f@tp c", "out": "c f@tp"}


class Parts(nn.Module):
    """What the forwards below put together; 16 hidden features."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.up, self.down, self.fused = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 48)
        self.seen: list[Any] = []
        self.width: Any = 0
        self.gains = nn.ParameterList(torch.full([1], number) for number in (2.0, 3.0))
        self.tables = {True: torch.ones(8), False: torch.zeros(8)}
        self.register_buffer("ones", torch.ones(8))
        self.register_buffer("zeros", torch.zeros(8))


def _added_when_alike(m: Any, x: Tensor) -> Tensor:
    h, wide = m.up(x), x.repeat(1, 2)
    return m.down(h + wide if h.shape == wide.shape else h)


def _only_small(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    return m.down(torch.tanh(h) if h.shape[-1] < 16 else h)


def _only_large(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    return m.down(torch.tanh(h) if h.shape[-1] >= 16 else h)


def _shared_only_large(m: Any, x: Tensor) -> Tensor:
    y, h = m.enter(x), m.up(x)
    return m.down(h) + (y.sin() if h.shape[-1] >= 16 else y)


def _module_only_large(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    return m.down(h) + (m.enter(x) if h.shape[-1] >= 16 else x)


def _after_many(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    for _ in range(20 if h.shape[-1] >= 16 else 0):
        x = x.sin()
    return m.down(h / h.shape[-1]) + x


def _as_tensor(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    return m.down(h / torch.as_tensor(float(h.shape[-1]), device=h.device, dtype=h.dtype))


def _words(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    return m.down(F.gelu(h, approximate="tanh" if h.shape[-1] > 8 else "none"))


def _cut_from_a_number(m: Any, x: Tensor) -> Tensor:
    y = m.fused(x)
    q, _, v = y.chunk(3, -1)
    return m.down(q * y[..., 16 : 16 + q.shape[-1]] + v)


def _cast_here(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    return m.down((h.half() if h.shape[-1] < 16 else h).float())


def _structure(m: Any, x: Tensor) -> Any:
    h = m.up(x)
    return (m.down(h), None) if h.shape[-1] < 16 else (m.down(h),)


def _number_returned(m: Any, x: Tensor) -> Any:
    h = m.up(x)
    return m.down(h), h.shape[-1]


def _number_kept(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    m.width = h.shape[-1]
    return m.down(h)


def _number_in_a_list(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    m.seen.append(h.shape[-1])
    return m.down(h)


def _another_view(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    memory = x.new_zeros(x.shape[0], 1)
    view = memory.view(-1)
    memory.copy_(h.detach().abs().amax(-1, keepdim=True))
    return m.down(h) * view.unsqueeze(-1)


def _by_chance(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    return m.down(h) if torch.rand([]) < 0.5 else m.down(h.sin())


def _by_a_chance_that_was_moved(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    return m.down(h) if torch.rand([]) - 0.5 < 0 else m.down(h.sin())


def _shared_value_kept(m: Any, x: Tensor) -> Tensor:
    """A loss made of what is kept would have a part of its gradient."""
    y = m.enter(x)
    m.seen = y * 2
    return m.down(m.up(x) * y.mean(-1, keepdim=True))


def _large(h: Tensor) -> bool:
    """Whether all of the hidden features are here."""
    return h.shape[-1] >= 16


def _picked(m: Any, x: Tensor) -> Tensor:
    y, z, h = m.enter(x), m.other(x), m.up(x)
    return m.down(h) + torch.sin(y if _large(h) else z)


def _picked_among_parts(m: Any, x: Tensor) -> Tensor:
    h, g = m.up(x), m.up(m.enter(x))
    return m.down(h * g + torch.sin(h if _large(h) else g))


def _picked_view(m: Any, x: Tensor) -> Tensor:
    y, z, h = m.enter(x).view(2, 2, 8), m.other(x).view(2, 2, 8), m.up(x)
    return m.down(h) + torch.sin((y if _large(h) else z).reshape(4, 8))


def _picked_detached(m: Any, x: Tensor) -> Tensor:
    y, z, h = m.enter(x), m.other(x), m.up(x)
    return m.down(h) + y * z + (y.detach() if _large(h) else z.detach())


def _swapped(m: Any, x: Tensor) -> Tensor:
    y, z, h = m.enter(x), m.other(x), m.up(x)
    return m.down(h) + (y - z if _large(h) else z - y)


def _half_picked(m: Any, x: Tensor) -> Tensor:
    (a, b), h = m.enter(x).chunk(2, -1), m.up(x)
    return m.down(h) + torch.sin(a if _large(h) else b).repeat(1, 2)


def _written_from_another(m: Any, x: Tensor) -> Tensor:
    y, z, h, out = m.enter(x), m.other(x), m.up(x), x.new_zeros(4, 8)
    out.copy_(y if _large(h) else z)
    return m.down(h) + out


def _written_to_another(m: Any, x: Tensor) -> Tensor:
    y, z, h = m.enter(x) * 1, m.other(x) * 1, m.up(x)
    (y if _large(h) else z).add_(1)
    return m.down(h) + y * z


def _written_and_then_picked(m: Any, x: Tensor) -> Tensor:
    y, z, h = m.enter(x) * 1, m.other(x) * 1, m.up(x)
    y.view(-1).add_(1)
    return m.down(h) + torch.sin(y if _large(h) else z)


def _module_of_another(m: Any, x: Tensor) -> Tensor:
    y, h = m.enter(x), m.up(x)
    return m.down(h) + m.other(y if _large(h) else x) + y


def _module_of_another_part(m: Any, x: Tensor) -> Tensor:
    h, g = m.up(x), m.up(m.enter(x))
    return m.down(h * g) + m.down(h if _large(h) else g)


def _modules_in_turn(m: Any, x: Tensor) -> Tensor:
    outs, h = [m.enter(x), m.other(x)], m.up(x)
    for y in outs if _large(h) else outs[::-1]:
        x = x * 2 + y
    return m.down(h) + x


def _recomputed(m: Any, x: Tensor) -> Tensor:
    y, z, h = m.enter(x), m.other(x), m.up(x)
    return m.down(h) + checkpoint(torch.sin, y if _large(h) else z, use_reentrant=False)


def _other_weight(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    return m.down(h) * (m.enter.bias if _large(h) else m.other.bias)


def _other_buffer(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    return m.down(h) * (m.ones if _large(h) else m.zeros)


def _other_input(m: Any, x: Tensor, z: Tensor) -> Tensor:
    h = m.up(x)
    return m.down(h) * (x if _large(h) else z)


def _another_returned(m: Any, x: Tensor) -> Any:
    y, z, h = m.enter(x), m.other(x), m.up(x)
    return m.down(h) + y + z, [y if _large(h) else z]


def _another_kept(m: Any, x: Tensor) -> Tensor:
    y, z, h = m.enter(x), m.other(x), m.up(x)
    m.width = (y if _large(h) else z).detach()
    return m.down(h) + y + z


def _another_in_a_list(m: Any, x: Tensor) -> Tensor:
    y, z, h = m.enter(x), m.other(x), m.up(x)
    m.seen.append((y if _large(h) else z).detach())
    return m.down(h) + y + z


def _constant_of_another_maker(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    scale = torch.ones(8, device=x.device) if _large(h) else torch.arange(8, device=x.device)
    return m.down(h) + x * scale


def _constant_changed_here(m: Any, x: Tensor) -> Tensor:
    h, mask = m.up(x), torch.ones(8, 8, device=x.device)
    return m.down(h) + x @ (mask if _large(h) else mask.tril())


def _constant_filled_here(m: Any, x: Tensor) -> Tensor:
    h, scale = m.up(x), torch.zeros(8, device=x.device)
    if _large(h):
        scale[:4].fill_(1)
    return m.down(h) + m.enter(x) * scale


def _another_weight(m: Any, x: Tensor) -> Tensor:
    """Both are shared values that meet a split one, and so come through a `pvary`."""
    h = m.up(x)
    return m.down(h * (m.gains[0] if _large(h) else m.gains[1]) + (h * m.gains[0]) * (h * m.gains[1]))


def _other_numbers(m: Any, x: Tensor) -> Tensor:
    h, two, three = m.up(x), *(torch.full((8,), number, device=x.device) for number in (2.0, 3.0))
    return m.down(h) + m.enter(x) * (two if _large(h) else three)


def _other_argument(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    return m.down(h) + (m.enter(x).clamp(min=0.5) if _large(h) else m.enter(x).clamp(max=0.5))


def _no_weight(m: Any, x: Tensor) -> Tensor:
    h, y = m.up(x), m.enter(x)
    return m.down(h) + F.layer_norm(y, (8,), m.enter.bias if _large(h) else None)


def _value_for_a_constant(m: Any, x: Tensor) -> Tensor:
    h, y, ones = m.up(x), m.enter(x), torch.ones(4, 8, device=x.device)
    return m.down(h) + torch.sin(ones if _large(h) else y)


def _other_table(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    return m.down(h) + m.enter(x) * m.tables[_large(h)].to(x.device)


def _nothing_returned(m: Any, x: Tensor) -> Any:
    h, y = m.up(x), m.enter(x)
    return m.down(h) + y, y if _large(h) else None


def _other_dtype_returned(m: Any, x: Tensor) -> Any:
    h, mask = m.up(x), torch.ones(8, device=x.device)
    return m.down(h), mask.to(torch.float64) if _large(h) else mask


def _constant_returned(m: Any, x: Tensor) -> Any:
    h, mask = m.up(x), torch.ones(8, 8, device=x.device)
    return m.down(h), mask if _large(h) else mask.tril()


def _constant_in_a_loop(m: Any, x: Tensor) -> Tensor:
    h, scale = m.up(x), torch.zeros(8, device=x.device)
    for _ in range(2 if _large(h) else 3):
        scale = scale + 1
    return m.down(h) + x * scale


def _standing(m: Any, x: Tensor) -> Tensor:
    """The same values as a column and as a row: what is made of either with a square has one shape."""
    y, h, square = m.enter.bias * 2, m.up(x), m.other.weight * 2
    return m.down(h) + x @ (square * (y.view(8, 1) if _large(h) else y.view(1, 8)))


def _kept_when_small(m: Any, x: Tensor) -> Tensor:
    y, h = m.enter(x), m.up(x)
    if not _large(h):
        m.width = y.detach()
    return m.down(h) + y


def _listed_when_large(m: Any, x: Tensor) -> Tensor:
    y, h = m.enter(x), m.up(x)
    if _large(h):
        m.seen.append(y.detach())
    return m.down(h) + y


def _word_kept(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    m.width = "wide" if _large(h) else "narrow"
    return m.down(h)


def _fraction_kept(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    m.width = 0.25 if _large(h) else 0.5
    return m.down(h)


def _word_listed(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    m.seen.append("wide" if _large(h) else "narrow")
    return m.down(h)


def _answer_listed(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    m.seen.append(_large(h))
    return m.down(h)


def _buffer_changed_when_small(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    if not _large(h):
        m.ones.add_(1)
    return m.down(h)


def _another_buffer_changed(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    (m.ones if _large(h) else m.zeros).add_(1)
    return m.down(h)


def _written_by_its_data(m: Any, x: Tensor) -> Tensor:
    h, scale = m.up(x), x.new_zeros(4, 1)
    scale.data.copy_(h.detach().abs().amax(-1, keepdim=True))
    return m.down(h) * scale


def _read_by_a_detached_view(m: Any, x: Tensor) -> Tensor:
    h, scale = m.up(x), x.new_zeros(4, 1)
    seen = scale.detach()
    scale.copy_(h.detach().abs().amax(-1, keepdim=True))
    return m.down(h) * seen


def _many_numbers(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    return m.down(h) / torch.tensor([float(h.shape[-1])] * 8192, device=x.device)[:8]


def _strided_from_its_width(m: Any, x: Tensor) -> Tensor:
    h, y = m.up(x), m.enter(x)
    return m.down(h)[:, :4] + y.as_strided((4, 4), (8, 1), h.shape[-1] // 8)


def _view_of_what_is_filled(m: Any, x: Tensor) -> Tensor:
    h, scale = m.up(x), torch.zeros(8, device=x.device)
    seen = scale.view(2, 4)
    if not _large(h):
        scale.add_(1)
    return m.down(h) + m.enter(x) * seen.view(8)


def _filled_by_its_data(m: Any, x: Tensor) -> Tensor:
    h, scale = m.up(x), torch.zeros(8, device=x.device)
    if not _large(h):
        scale.data.fill_(1)
    return m.down(h) + m.enter(x) * scale


def _without_its_graph(m: Any, x: Tensor) -> Tensor:
    y, h = m.enter(x), m.up(x)
    return m.down(h) + (y if _large(h) else y.detach())


def _without_gradients(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    with torch.set_grad_enabled(_large(h)):
        y = m.enter(x).sin()
    return m.down(h) + y


def _other_rows(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    return m.down(h) + m.enter(x)[[0, 1, 2, 3] if _large(h) else [3, 2, 1, 0]]


def _rows_or_columns(m: Any, x: Tensor) -> Tensor:
    h, bias = m.up(x), m.enter.bias
    return m.down(h) + x @ (bias.view(8, 1) if _large(h) else bias.view(1, 8)).expand(8, 8)


def _constant_rows_or_columns(m: Any, x: Tensor) -> Tensor:
    h, line = m.up(x), torch.arange(8, device=x.device, dtype=x.dtype)
    return m.down(h) + x @ (line.view(8, 1) if _large(h) else line.view(1, 8)).expand(8, 8)


def _after_a_loss_of_no_use(m: Any, x: Tensor) -> Tensor:
    y, z, h = m.enter(x), m.other(x), m.up(x)
    h.softmax(-1).sin()
    return m.down(h) + torch.sin(y if _large(h) else z)


def _less_after_a_loss_of_no_use(m: Any, x: Tensor) -> Tensor:
    y, h = m.enter(x), m.up(x)
    h.softmax(-1).sin()
    return m.down(h) + (y.sin() if _large(h) else y)


DECIDES = r"\(\S*test_forwards.py:\d+\) decides by \S+, which is \S+ on one rank"
REFUSED: dict[Callable[..., Any], str] = {
    _view_of_what_is_filled: DECIDES,
    _filled_by_its_data: DECIDES,
    _without_its_graph: DECIDES,
    _without_gradients: DECIDES,
    _other_rows: DECIDES,
    _rows_or_columns: DECIDES,
    _constant_rows_or_columns: DECIDES,
    _after_a_loss_of_no_use: DECIDES,
    _less_after_a_loss_of_no_use: DECIDES,
    _written_by_its_data: "another view of its memory was written",
    _read_by_a_detached_view: "another view of its memory was written",
    _many_numbers: DECIDES,
    _added_when_alike: DECIDES,
    _only_small: DECIDES,
    _only_large: DECIDES,
    _shared_only_large: DECIDES,
    _module_only_large: DECIDES,
    _after_many: DECIDES,
    _as_tensor: DECIDES,
    _words: DECIDES,
    _cut_from_a_number: "slice is given numbers made of this rank's sizes",
    _cast_here: DECIDES,
    _structure: DECIDES,
    _number_returned: "8 leaves the forward, which is 16 on one rank",
    _number_kept: "8 leaves the forward, which is 16 on one rank",
    _number_in_a_list: "8 leaves the forward, which is 16 on one rank",
    _another_view: "another view of its memory was written",
    _by_chance: "decides by a random value",
    _by_a_chance_that_was_moved: "decides by a random value",
    _shared_value_kept: "use in shares is kept, where",
    _picked: DECIDES,
    _picked_among_parts: DECIDES,
    _picked_view: DECIDES,
    _picked_detached: DECIDES,
    _swapped: DECIDES,
    _half_picked: DECIDES,
    _written_from_another: DECIDES,
    _written_to_another: DECIDES,
    _written_and_then_picked: DECIDES,
    _module_of_another: DECIDES,
    _module_of_another_part: DECIDES,
    _modules_in_turn: DECIDES,
    _recomputed: DECIDES,
    _other_weight: DECIDES,
    _other_buffer: DECIDES,
    _other_input: DECIDES,
    _another_returned: DECIDES,
    _another_kept: DECIDES,
    _word_kept: DECIDES,
    _fraction_kept: DECIDES,
    _word_listed: DECIDES,
    _answer_listed: DECIDES,
    _another_in_a_list: DECIDES,
    _constant_of_another_maker: DECIDES,
    _constant_changed_here: DECIDES,
    _other_numbers: DECIDES,
    _other_argument: DECIDES,
    _no_weight: DECIDES,
    _value_for_a_constant: DECIDES,
    _other_table: DECIDES,
    _nothing_returned: DECIDES,
    _other_dtype_returned: DECIDES,
    _constant_filled_here: DECIDES,
    _another_weight: DECIDES,
    _constant_in_a_loop: DECIDES,
    _standing: DECIDES,
    _kept_when_small: DECIDES,
    _listed_when_large: DECIDES,
    _buffer_changed_when_small: DECIDES,
    _another_buffer_changed: DECIDES,
    _constant_returned: DECIDES,
}


def _planned(forward: Callable[..., Any], rules: dict[str, str] = RULES, base: type[nn.Module] = Parts) -> sf.Plan:
    kind = type("Way", (base,), {"forward": forward})
    used = {name: rule for name, rule in rules.items() if name != "fused.weight" or forward is _cut_from_a_number}
    example = tuple(torch.randn(4, 8) for _ in range(2 if forward is _other_input else 1))
    return sf.plan(kind(), sf.MeshSpec(fsdp=1, tp=2), sf.Policy(rules=used), example=example)


@pytest.mark.everyday(16)
@pytest.mark.parametrize("forward", REFUSED, ids=lambda fn: fn.__name__.strip("_"))
def test_another_way_with_the_sizes_of_a_rank_is_refused(forward: Callable[..., Any]) -> None:
    with pytest.raises(sf.ShardError, match=REFUSED[forward]):
        _planned(forward)


class Raw(nn.Module):
    """Weights that its forward reads itself; the product of both is a pending sum."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(8, 16))


OF_SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "pad": lambda y: F.pad(y, (0, 1), value=1.0),
    "long": lambda y: y.long().to(y.dtype),
    "floor": lambda y: torch.div(y, 3, rounding_mode="floor"),
    "fill": lambda y: y.new_zeros(3).fill_(y.sum()),
    "max_pool": lambda y: F.max_pool2d(y.view(1, 1, *y.shape), 2),
    "glu": lambda y: F.glu(y, -1),
}


def test_a_number_of_one_process_is_given_where_only_that_fits() -> None:
    model, x = type("Way", (Parts,), {"forward": _strided_from_its_width})(), torch.randn(4, 8)
    with sf.simulate(fsdp=1, tp=2) as mesh:
        rules = {name: rule for name, rule in RULES.items() if name != "fused.weight"}
        out = sf.apply(model, sf.shard(model, mesh, sf.Policy(rules=rules)), x)
        assert_parity({"out": out}, {"out": model(x).detach()}, tol=1e-5)


@pytest.mark.parametrize("name", OF_SUMS)
def test_what_is_not_linear_needs_a_sum_that_is_whole(name: str) -> None:
    """Where calls may be amended it is added up for them; in a graph they may not, nor may one that writes."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return OF_SUMS[name](F.linear(torch.tanh(F.linear(x, m.into)), m.out))

    model, x = type("Way", (Raw,), {"forward": forward})(), torch.randn(4, 8)
    for policy in [sf.Policy(rules=RAW, compile=True)] + [sf.Policy(rules=RAW)] * (name == "fill"):
        with pytest.raises(sf.ShardError, match=r"of a sum that is still pending|around a sum|differs between ranks"):
            sf.plan(model, sf.MeshSpec(fsdp=1, tp=2), policy, example=x)
    with sf.simulate(fsdp=1, tp=2) as mesh:
        if name != "fill":
            out = sf.apply(model, sf.shard(model, mesh, sf.Policy(rules=RAW)), x)
            assert_parity({"out": out}, {"out": model(x).detach()}, tol=1e-5)


def _tiled(k: Tensor, times: int) -> Tensor:
    return k.repeat(1, times, 1, 1)


def _joined(k: Tensor, times: int) -> Tensor:
    return torch.cat([k] * times, 1)


def _expanded(k: Tensor, times: int) -> Tensor:
    b, kv, s, d = k.shape
    return k if times == 1 else k[:, None].expand(b, times, kv, s, d).reshape(b, times * kv, s, d)


def _in_place(k: Tensor, times: int) -> Tensor:
    b, kv, s, d = k.shape
    return k if times == 1 else k[:, :, None].expand(b, kv, times, s, d).reshape(b, times * kv, s, d)


class Grouped(nn.Module):
    """Two queries to a key head, which `repeat` gives to them."""

    def __init__(self, repeat: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.o = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(16, 8)
        self.repeat = repeat

    def forward(self, x: Tensor) -> Tensor:
        q, k = (y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in (self.q(x), self.k(x)))
        k = self.repeat(k, q.shape[1] // k.shape[1])
        out = (q @ k.transpose(-1, -2)).softmax(-1) @ k
        return self.o(out.transpose(1, 2).flatten(2))


GROUPED = {"q.weight": "(heads@tp d) c", "k.weight": "(kv@tp? d) c", "o.weight": "c (heads@tp d)"}
SIZES = {"heads": 4, "kv": 2}


@pytest.mark.parametrize("repeat", [_tiled, _joined, _expanded])
def test_keys_in_another_order_than_their_queries_are_refused(repeat: Callable[..., Tensor]) -> None:
    policy = sf.Policy(rules=GROUPED, sizes=SIZES)
    with pytest.raises(sf.ShardError):
        sf.plan(Grouped(repeat), sf.MeshSpec(fsdp=1, tp=4), policy, example=torch.randn(2, 3, 8))


def _assert_same(mesh: DeviceMesh, model: nn.Module, policy: sf.Policy, x: Tensor, steps: int = 1) -> None:
    """Loss and gradients of `steps` calls equal those of one rank."""
    model.double()
    params, local = sf.shard(model, mesh, policy), sf.data.local_batch(x, mesh)
    for _ in range(steps):
        loss, grads = sf.value_and_grad(lambda p: sf.apply(model, p, local).square().mean())(params)
        model.zero_grad()
        expected = model(x).square().mean()
        expected.backward()
        assert_parity({"loss": loss}, {"loss": expected.detach()})
        wanted = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
        assert_parity(sf.gather(grads), wanted)


@on_meshes({"fsdp": 1, "tp": 4})
def test_keys_in_the_order_of_their_queries(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    _assert_same(mesh, Grouped(_in_place), sf.Policy(rules=GROUPED, sizes=SIZES), x)


def _towers(m: Any, x: Tensor) -> Tensor:
    """`up` is called with a value that varies, since its mean meets split values, and with one that does not."""
    seen, other = m.enter(x), m.other(x)
    return m.down(torch.tanh(m.up(seen)) * seen.mean(-1, keepdim=True) + m.up(other))


def _towers_in_turn(m: Any, x: Tensor) -> Tensor:
    seen, other = m.enter(x), m.other(x)
    return m.down(torch.sin(m.up(other)) + torch.tanh(m.up(seen)) * seen.mean(-1, keepdim=True))


def _into_rows(m: Any, x: Tensor) -> Tensor:
    """The same of a row-parallel linear, which takes its part of whole inputs."""
    seen, other = m.enter(x), m.other(x)
    h = torch.tanh(m.up(seen)) * seen.mean(-1, keepdim=True)
    return m.down(h) + m.down(seen.repeat(1, 2)) + m.down(other.repeat(1, 2))


def _assigned(m: Any, x: Tensor) -> Tensor:
    """What a module keeps says nothing of the outputs."""
    m.seen = (m.enter.weight * 2).detach()
    return m.down(m.up(x) * m.enter.weight.mean())


def _listed(m: Any, x: Tensor) -> Tensor:
    """A list that grows with each call, and that shape-only traces must not lengthen."""
    h = m.up(m.enter(x))
    m.seen.append(1.0)
    return m.down(h) / len(m.seen)


def _in_turn(m: Any, x: Tensor) -> Tensor:
    """Names of values change, which does not change the values."""
    y, z = m.enter(x), m.other(x)
    y, z = z, y if x.shape[-1] == 8 else x
    return m.down(torch.sin(m.up(y))) - z if z is not None else y


def _gathered_in_a_list(m: Any, x: Tensor) -> Any:
    values = [x]
    for module in (m.enter, m.other, m.enter):
        values.append(module(values[-1]) + values[0])
    return m.down(m.up(torch.stack(values).sum(0))) + values[1] - values[-1]


def _written(m: Any, x: Tensor) -> Tensor:
    """What is written into views, and summed up in place."""
    y, out = m.enter(x), torch.zeros_like(x)
    y = y * 2
    view = y.view(-1)
    view += 1
    out[:, :4], out[:, 4:] = y[:, 4:], m.other(x)[:, :4]
    for module in (m.enter, m.other):
        out += module(x)
        out.mul_(2)
    return m.down(F.relu_(m.up(out))) + view.view(y.shape)


def _no_numbers(m: Any, x: Tensor) -> Any:
    """NaN is not itself, and yet the same in both runs."""
    nan, y = float("nan"), m.enter(x)
    m.width = nan
    return m.down(m.up(x)) + torch.full_like(y, nan).nan_to_num(1.0) + y.masked_fill(x > 9, nan)


def _of_one_shape(m: Any, x: Tensor) -> Tensor:
    """Of what it is given only the shape counts."""
    y, z, h = m.enter(x), m.other(x), m.up(x)
    return m.down(h) + torch.zeros_like(y if _large(h) else z) + y - (z if _large(h) else y).new_ones(8)


def _through_views(m: Any, x: Tensor) -> Tensor:
    y, h = m.enter(x), m.up(x)
    turned = h.unflatten(-1, (-1, 4)).transpose(0, 1).contiguous().transpose(0, 1).flatten(1)
    return m.down(turned) + y.view(-1, 1, 8).transpose(0, 1).reshape(y.shape) + y


def _with_constants(m: Any, x: Tensor) -> Tensor:
    """As long as this rank's part, or as all of it."""
    h, mask = m.up(x), torch.ones(8, 8, device=x.device, dtype=x.dtype).tril()
    ones = torch.ones(h.shape[-1], device=x.device, dtype=x.dtype)
    m.zeros = m.zeros + 1
    return m.down(h * ones) + m.enter(x) @ mask * m.zeros + m.ones


def _recomputed_alike(m: Any, x: Tensor) -> Tensor:
    y = checkpoint(m.enter, x, use_reentrant=False)
    return m.down(m.up(y)) + checkpoint(lambda z: m.other(z).sin(), y, use_reentrant=False)


def _tied(m: Any, x: Tensor) -> Tensor:
    m.seen = F.linear(m.enter(x), m.other.weight.t()).detach()
    return F.linear(m.down(m.up(x)), m.enter.weight) + m.seen


def _written_before_and_after(m: Any, x: Tensor) -> Tensor:
    """Views of one memory, rows in lists, detached values and losses of no use, alike on one rank."""
    y, h, scale = m.enter(x), m.up(x), torch.zeros(8, device=x.device, dtype=x.dtype)
    seen = scale.view(2, 4)
    scale.data.fill_(2)
    scale[[1, 3]] = 3
    seen[0].add_(1)
    h.softmax(-1).sin()
    with torch.no_grad():
        shift = y.mean(-1, keepdim=True)
    turned = y[:, [7, 6, 5, 4, 3, 2, 1, 0]] * seen.view(8)
    return m.down(h) + turned + y.detach().detach() - shift + m.enter.bias.expand(y.shape)


EQUAL = [
    _written_before_and_after,
    _towers,
    _towers_in_turn,
    _into_rows,
    _assigned,
    _in_turn,
    _gathered_in_a_list,
    _written,
    _through_views,
]
EQUAL += [_with_constants, _recomputed_alike, _tied, _of_one_shape, _no_numbers]


@pytest.mark.everyday(11)
@pytest.mark.parametrize("forward", EQUAL, ids=lambda fn: fn.__name__)
@on_meshes({"fsdp": 2, "tp": 2})
def test_equal_to_one_rank(mesh: DeviceMesh, forward: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = type("Way", (Parts,), {"forward": forward})()
    _assert_same(mesh, model, _of(RULES), torch.randn(4, 8, dtype=torch.float64), steps=2)


def _of(rules: dict[str, str]) -> sf.Policy:
    return sf.Policy(rules={name: rule for name, rule in rules.items() if name != "fused.weight"})


@on_meshes({"fsdp": 1, "tp": 2})
def test_runs_without_data_leave_lists_and_random_numbers_as_they_were(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = type("Way", (Parts,), {"forward": _listed})()
    params = sf.shard(model, mesh, _of(RULES))
    before = torch.get_rng_state()
    sf.apply(model, params, torch.randn(4, 8, generator=torch.Generator().manual_seed(1)))
    assert model.seen == [1.0]
    assert torch.equal(before, torch.get_rng_state())

    def drawn(m: Any, x: Tensor) -> Tensor:
        return m.down(m.up(x) * torch.rand([]) * random.random())

    model = type("Way", (Parts,), {"forward": drawn})()
    params, x = sf.shard(model, mesh, _of(RULES)), torch.ones(4, 8)
    torch.manual_seed(3)
    random.seed(3)
    mine = sf.apply(model, params, x)
    torch.manual_seed(3)
    random.seed(3)
    torch.testing.assert_close(mine, model(x))


class Store:
    """What collects outputs, and counts them."""

    __slots__ = ("__count", "outs")

    def __init__(self, outs: list[Tensor]) -> None:
        self.outs, self.__count = outs, 0

    def add(self, out: Tensor) -> None:
        self.outs.append(out)
        self.__count += 1

    @property
    def count(self) -> int:
        return self.__count

    def all(self) -> list[Tensor]:
        assert self.count == len(self.outs)
        return self.outs


KEPT: dict[int, Tensor] = {}


def _kept_elsewhere(m: Any, x: Tensor, given: list[Any], store: Store) -> Tensor:
    out = m.down(torch.tanh(m.up(x)))
    given.append(out)
    for place in (m.store, m.stores[0], store):
        place.add(out)
    KEPT[len(KEPT)] = out
    return out


@on_meshes({"fsdp": 1, "tp": 2}, {"fsdp": 2, "tp": 1})
def test_runs_without_data_leave_what_is_elsewhere_as_it_was(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    KEPT.clear()
    model: Any = type("Way", (Parts,), {"forward": _kept_elsewhere})()
    model.store, model.stores, store = Store([]), [Store([])], Store([])
    given, hooked, rows = list[Tensor](), dict[str, deque[Tensor]](), 0

    def hook(module: nn.Module, args: Any, out: Tensor) -> None:
        nonlocal rows
        rows += out.shape[0]
        hooked.setdefault("outs", deque()).append(out)

    model.down.register_forward_hook(hook)
    model.up.register_forward_hook(partial(lambda held, *_: held.add(_[2]), by_hook := Store([])))
    params = sf.shard(model, mesh, _of(RULES))
    outs = [sf.apply(model, params, torch.full((4, 8), float(at)), given, store) for at in range(3)]
    for kept in (given, store.all(), model.store.all(), model.stores[0].all(), hooked["outs"], KEPT.values()):
        assert len(kept) == 3 and all(x is out for x, out in zip(kept, outs, strict=True))
    assert (rows, by_hook.count, [x.is_meta for x in by_hook.outs]) == (12, 3, [False] * 3)


class TwoUses(nn.Module):
    """A module whose output is a pending sum in one call, and whole in another."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = type("Way", (Raw,), {"forward": self._raw})()

    @staticmethod
    def _raw(m: Any, x: Tensor, uses: bool) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, m.into)), m.out) if uses else x * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.raw(x, True) + self.raw(x, False)


def test_a_sum_in_one_call_only_is_refused() -> None:
    policy = sf.Policy(rules={f"raw.{name}": rule for name, rule in RAW.items()})
    with pytest.raises(sf.ShardError, match="is a sum over 'tp' that is still pending in one call"):
        sf.plan(TwoUses(), sf.MeshSpec(fsdp=1, tp=2), policy, example=torch.randn(4, 8))


class TwoKinds(TwoUses):
    """A module whose output is a pending sum in one call, and cannot be told in another."""

    @staticmethod
    def _raw(m: Any, x: Tensor, uses: bool) -> Tensor:
        h = F.linear(x, m.into)
        return F.linear(h, m.out) if uses else F.linear(h.softmax(-1), m.out)


def test_a_sum_in_one_call_and_a_loss_in_another_are_refused() -> None:
    policy = sf.Policy(rules={f"raw.{name}": rule for name, rule in RAW.items()})
    with pytest.raises(sf.ShardError, match="in another one it cannot be told: _softmax along"):
        sf.plan(TwoKinds(), sf.MeshSpec(fsdp=1, tp=2), policy, example=torch.randn(4, 8))


class Tables(nn.Module):
    """A table whose ids, and attention whose masks, are made of parts."""

    def __init__(self, forward_of: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.table, self.attention = nn.Linear(8, 16), nn.Embedding(16, 8), nn.MultiheadAttention(8, 2)
        self.forward_of = forward_of

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_of(self, x) + self.table(x[:, 0].long())


def _ids_of_parts(m: Any, x: Tensor) -> Tensor:
    return m.table(m.up(x).argmax(-1))


def _ids_that_are_parts(m: Any, x: Tensor) -> Tensor:
    return m.table(m.up(x).long()).sum()


def _mask_of_parts(m: Any, x: Tensor) -> Tensor:
    hidden = m.up(x).softmax(-1)[:, 0] > 0.5
    return m.attention(x[:, None], x[:, None], x[:, None], key_padding_mask=hidden[None])[0][:, 0]


@pytest.mark.parametrize(
    ("forward", "why"),
    [(_ids_of_parts, "its ids .* argmax"), (_ids_that_are_parts, "its ids"), (_mask_of_parts, "its masks .* _softmax")],
)
def test_ids_and_masks_that_are_made_of_parts_are_refused(forward: Callable[[Any, Tensor], Tensor], why: str) -> None:
    rules = {"up.weight": "f@tp c", "table.weight": "v@tp c"}
    rules |= {"attention.in_proj_weight": "(3 h@tp d) c", "attention.out_proj.weight": "c (h@tp d)"}
    with pytest.raises(sf.ShardError, match=f"{why}.* differ over 'tp'|{why.split(' .*')[0]} differ over 'tp'"):
        sf.plan(
            Tables(forward), sf.MeshSpec(fsdp=1, tp=2), sf.Policy(rules=rules, sizes={"h": 2}), example=torch.rand(4, 8)
        )


def test_a_collective_by_hand_tells_nothing_of_what_was_lost() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        mesh = sf.MeshSpec(fsdp=1, tp=2)
        return m.other(sf.collectives.psum(m.up(x).softmax(-1).sum(-1, keepdim=True), mesh, "tp").expand(4, 8))

    with pytest.raises(sf.ShardError, match="_softmax along dim 1"):
        _planned(forward, rules={"up.weight": "f@tp c"})


@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_a_chance_of_none_or_all_decides_nothing(chance: float) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.down(m.up(x)) if torch.rand([]) < chance else m.down(m.up(x).sin())

    assert _planned(partial(forward)).activation_bytes


class Steps(nn.Module):
    """A child that returns what it is given, one that makes the same value anew, and one that returns both."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = Parts()
        self.same, self.anew = nn.Identity(), type("Anew", (nn.Module,), {"forward": lambda _, x: x * 1})()
        self.both = type("Both", (nn.Module,), {"forward": lambda _, x: (x, x * 1)})()

    def forward(self, x: Tensor) -> Tensor:
        y = self.parts.enter(x)
        a, b = self.same(y), self.anew(y)
        c, d = self.both(a)
        return self.parts.down(self.parts.up(b)) - c + d.sin() - self.anew(a - b).cos() + y


FORWARDS: dict[str, Callable[..., Any]] = {
    "same": lambda own, local, layouts, x: x * 1,
    "anew": lambda own, local, layouts, x: x,
    "both": lambda own, local, layouts, x: (x + 0, x),
}


@pytest.mark.parametrize("names", [[], ["same"], ["anew"], ["both"], list(FORWARDS)], ids=len)
def test_other_forwards_may_return_their_inputs_or_not(names: list[str]) -> None:
    rules = {f"parts.{name}": rule for name, rule in _of(RULES).rules.items()}
    policy = sf.Policy(rules=rules, compute={name: FORWARDS[name] for name in names})
    sf.plan(Steps(), sf.MeshSpec(fsdp=1, tp=2), policy, example=torch.randn(4, 8))


class Flat(nn.Module):
    """A block, and what is made of its output."""

    def __init__(self, after: Any) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.block(x))


@on_meshes({"fsdp": 1, "tp": 2})
def test_split_positions_of_samples_in_one_dim_leave_in_order(mesh: DeviceMesh) -> None:
    model, x = Flat(lambda y: y.flatten(0, 1)).double(), torch.randn(2, 4, 8, dtype=torch.float64)
    rules = {"block.0.weight": "f@tp c", "block.1.weight": "c f@tp"}
    params = sf.shard(model, mesh, sf.Policy(rules=rules, acts={"block": "b s@tp c"}))
    assert_parity(sf.apply(model, params, x), model(x))


@pytest.mark.parametrize(("rule", "after"), [("(2 f@tp) c", lambda y: y), ("f@tp c", lambda y: y.flatten(1))])
def test_outputs_of_which_a_rank_has_several_pieces_do_not_stay_split(
    rule: str, after: Callable[[Tensor], Tensor]
) -> None:
    policy = sf.Policy(rules={"block.1.weight": rule}, acts={"block.1": "... f@tp"})
    with pytest.raises(sf.ShardError, match="leaves its output split over 'tp', and what is made of it"):
        sf.plan(Flat(after), sf.MeshSpec(fsdp=1, tp=2), policy, example=torch.rand(2, 4, 8))


PIECES: list[Callable[[Tensor], Any]] = [
    lambda h: h.unbind(-1),
    lambda h: h.chunk(16, -1),
    lambda h: h.split(1, -1),
    lambda h: [*h.mT[0]],
    lambda h: h.unsafe_chunk(16, -1),
]


@pytest.mark.parametrize("pieces", PIECES)
def test_pieces_of_what_is_split_are_counted_as_in_one_process(pieces: Callable[[Tensor], Any]) -> None:
    policy = sf.Policy(rules={"block.0.weight": "f@tp c", "block.1.weight": "c f@tp"})

    class Counts(Flat):
        def forward(self, x: Tensor) -> Tensor:
            h = self.block[0](x)
            return self.block[1](h) * (len(pieces(h)) if self.after is None else 1 + 0 * len(pieces(h)[:1]))

    mesh, x = sf.MeshSpec(fsdp=1, tp=2), torch.rand(2, 4, 8)
    sf.plan(Counts(abs), mesh, policy, example=x)
    with pytest.raises(sf.ShardError, match="decides by 8, which is 16 on one rank"):
        sf.plan(Counts(None), mesh, policy, example=x)
