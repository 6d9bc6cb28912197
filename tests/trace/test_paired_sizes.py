"""Sizes that are one number on a rank and another one in one process, in every way that Python has to ask for them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

import shardfn as sf
from shardfn.trace.paired_sizes import Sides, Size, SizesDiffer

RULES = {"up.weight": "f@tp c", "down.weight": "c f@tp"}


class Two(nn.Module):
    """8 features, 16 hidden ones; `between` is given these, of which each of two ranks has 8."""

    def __init__(self, between: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(8, 16), nn.Linear(16, 8), between
        self.cache: dict[Any, Any] = {}

    def forward(self, x: Tensor) -> Any:
        return self.down(self.between(self, torch.tanh(self.up(x))))


def _planned(between: Callable[[Any, Tensor], Any]) -> sf.Plan:
    example = torch.randn(4, 8)
    return sf.plan(Two(between), sf.MeshSpec(fsdp=1, tp=2), sf.Policy(rules=RULES), example=example)


def _known_kind(m: Any, h: Tensor) -> Tensor:
    n = h.shape[-1]
    if not isinstance(n, int):
        raise TypeError(n)
    return h.view(4, n // 2, 2).flatten(1)


def _in_words(m: Any, h: Tensor) -> Tensor:
    m.said = len(f"{h.shape[-1]:d} of {h.shape[-1]}") * 0
    return h


def _what_it_divides(m: Any, h: Tensor) -> Tensor:
    times, rest = divmod(32, h.shape[-1])  # 32 = 4 * 8 + 0, and 2 * 16 + 0
    return h.view(4, 32 // times - rest)


def _said_and_written(m: Any, h: Tensor) -> Tensor:
    assert h.shape[-1] > 0 and f"{h.shape}", "an assertion that holds"
    h = h * torch.ones(())
    h += 1
    assert int(h.shape[-1]) in (8, 16)
    return h


def _either_way(m: Any, h: Tensor) -> Tensor:
    return h.clone() if h.shape[-1] > 8 else h


def _written_or_not(m: Any, h: Tensor) -> Tensor:
    h = h.clone()
    return h.add_(1).add_(-1) if h.shape[-1] > 8 else h


def _written_before(m: Any, h: Tensor) -> Tensor:
    h = h.clone()
    other = h * 2
    if h.shape[-1] > 8:
        h.add_(1)
        other = h * 2
    else:
        h.add_(1)
    return other


def _drawn_before(m: Any, h: Tensor) -> Tensor:
    if h.shape[-1] > 8:
        torch.rand(3)
    return h * torch.rand(())


def _one_by_one(m: Any, h: Tensor) -> Tensor:
    return torch.cat([part * 2 for part in h.split(2, -1)], -1)


def _quotient(m: Any, h: Tensor) -> Tensor:
    groups, rest = divmod(h.shape[-1], 4)
    return h.unflatten(-1, (groups, 4)).flatten(1) if not rest else h


def _bits(m: Any, h: Tensor) -> Tensor:
    n = h.shape[-1]
    made = [(n >> 1) << 1, n & ~0, n | 0, 0 | n, n ^ 0, (1 ^ n) - 1, n]
    return torch.stack([h.view(4, size) for size in made]).sum(0)


def _arranged(m: Any, h: Tensor) -> Tensor:
    return rearrange(rearrange(h, "b (h d) -> b h d", d=4), "b h d -> b (h d)")


def _grouped(m: Any, h: Tensor) -> Tensor:
    return F.group_norm(h, h.shape[-1] // 4)


def _halves(m: Any, h: Tensor) -> Tensor:
    a, b = h.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a, b], -1).flatten(1)


def _turned(m: Any, h: Tensor) -> Tensor:
    return h.unflatten(-1, (-1, 8)).transpose(0, 1).contiguous().transpose(0, 1).flatten(1)


@pytest.mark.parametrize(
    "between",
    [
        _known_kind,
        _what_it_divides,
        _in_words,
        _said_and_written,
        _either_way,
        _quotient,
        _bits,
        _arranged,
        _grouped,
        _halves,
        _turned,
    ],
)
def test_what_comes_out_alike_is_planned(between: Callable[[Any, Tensor], Any]) -> None:
    _planned(between)


def _as_key(m: Any, h: Tensor) -> Tensor:
    return m.cache.setdefault(h.shape[-1], h)


def _as_number_key(m: Any, h: Tensor) -> Tensor:
    return h * {8: 2.0, 16: 3.0}[int(h.shape[-1])]


def _scaled(m: Any, h: Tensor) -> Tensor:
    return h * h.shape[-1]


def _by_its_root(m: Any, h: Tensor) -> Tensor:
    return h * float(h.shape[-1]) ** -0.5


def _in_a_text(m: Any, h: Tensor) -> Tensor:
    return h if f"{h.shape[-1]}" == "16" else -h


def _through_numbers(m: Any, h: Tensor) -> Tensor:
    return h * torch.tensor([h.shape[-1]], device=h.device)


def _chunks(m: Any, h: Tensor) -> Tensor:
    return torch.cat([part * at for at, part in enumerate(h.chunk(h.shape[-1] // 4, -1))], -1)


def _if_contiguous(m: Any, h: Tensor) -> Tensor:
    turned = h.view(4, -1, 8).transpose(0, 1)  # of one rank [1, 4, 8], which is contiguous
    return h if turned.is_contiguous() else -h


def _in_memory(m: Any, h: Tensor) -> Tensor:
    held = torch.zeros(2)
    held[torch.tensor(h.shape[-1]) // 16] = 7.0
    return h + held[1]


def _read_again(m: Any, h: Tensor) -> Tensor:
    held = torch.zeros(2)
    seen = held.numpy()
    held[0] = h.shape[-1]
    return h + float(seen[0])


# What is made of a number that is another one on a rank: the call that makes it is given that of one process.
AMENDED: list[Callable[..., Any]] = [
    _scaled,
    _through_numbers,
    _in_memory,
    lambda m, h: h + torch.tensor(h.shape[-1]),
    lambda m, h: h * h.new_tensor([h.shape[-1]]),
    lambda m, h: h + (torch.tensor(h.shape[-1]) // 8).tolist(),
    lambda m, h: h + float((torch.tensor([h.shape[-1]]) // 8).numpy()[0]),
    lambda m, h: h if torch.equal(torch.tensor([h.shape[-1]]) // 8, torch.tensor([2])) else h.sin(),
]


@pytest.mark.everyday(4)
@pytest.mark.parametrize("between", AMENDED)
def test_numbers_are_those_of_one_process(between: Callable[[Any, Tensor], Any]) -> None:
    model, mesh = Two(between).double(), sf.MeshSpec(fsdp=1, tp=2)

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return sf.apply(model, params, x).square().mean()

    assert sf.check(model, mesh, sf.Policy(rules=RULES), loss_fn, torch.randn(4, 8, dtype=torch.float64)).ok


REFUSED: dict[Callable[..., Any], str] = {
    _as_key: "is no key: write int",
    _as_number_key: "decides by 8, which is 16",
    _by_its_root: "decides by 8.0|decides by 8",
    _in_a_text: "decides by 8, which is 16",
    _chunks: "results here and|values are made here|sizes",
    _read_again: "writes a value|given numbers|copy_|fill_",
    _if_contiguous: "decides by True, which is False",
    _written_or_not: "decides by False, which is True",
    _written_before: "decides by False, which is True",
    _drawn_before: "decides by False, which is True",
}


@pytest.mark.parametrize("between", REFUSED)
def test_what_does_not_is_refused(between: Callable[[Any, Tensor], Any]) -> None:
    with pytest.raises(sf.ShardError, match=REFUSED[between]):
        _planned(between)


def test_what_torch_makes_of_two_sizes_comes_from_both() -> None:
    up, down = Size(2, 4, frozenset({"module up"})), Size(3, 6, frozenset({"module down"}))
    made = up.node.mul(down.node)
    assert (made.rank, made.one, made.sources) == (6, 24, {"module up", "module down"})


def test_torch_is_told_that_sizes_differ_in_general() -> None:
    sides, size = Sides(), Size(2, 4)
    sides.in_torch = "view"
    with sides.run():
        assert size.node.eq(4).guard_bool("", 0) is False  # in one process they happen to be equal
        assert size.node.ne(2).guard_bool("", 0) is True
        with pytest.raises(SizesDiffer):
            size.node.lt(3).guard_bool("", 0)
