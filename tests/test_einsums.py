"""`einsum` in operations that do not depend on sizes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardfn._torch import TorchDispatchMode, base_name
from shardfn.core.engine.einsums import einsum

SIZES = {"a": 2, "b": 3, "c": 4, "d": 5, "h": 1, "k": 1}
EQUATIONS = (
    "ab,bc->ac ab,bc ab,cb->ca ab,ab-> ab,ab->ab a,b->ab ahb,hbc->hac abc,abd->abcd ahd,ad->ha hk,hk->kh ab->ba ab->a "
    "abc->ca ab,bc,cd->ad ab,bc,ad->acd ahb,ahc,hcd->abd ab,cd->ac aa->a aab,b->a a...b,b->a... ,a->a"
)


def _operands(equation: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    terms = equation.split("->")[0].replace("...", "cd").split(",")
    return [torch.randn([SIZES[label] for label in term], generator=generator, dtype=torch.float64) for term in terms]


@pytest.mark.parametrize("equation", EQUATIONS.split())
def test_is_what_torch_computes(equation: str) -> None:
    operands = _operands(equation)
    torch.testing.assert_close(einsum(equation, *operands), torch.einsum(equation, *operands))
    torch.testing.assert_close(einsum(equation, operands), torch.einsum(equation, *operands))


def test_other_ways_to_call_it() -> None:
    x, y = _operands("ab,bc")
    torch.testing.assert_close(einsum(x, [0, 1], y, [1, 2], [0, 2]), x @ y)
    torch.testing.assert_close(einsum(" a b , b c -> a c ", x, y), x @ y)
    torch.testing.assert_close(einsum("ab,bc->ac", x[:, :1], y), x[:, :1].expand_as(x) @ y)  # a size of 1 is repeated


@pytest.mark.parametrize("equation", ["ab,bc->ax", "ab,bc->aac", "ab,b->a", "ab->ab"])
def test_what_is_wrong_is_an_error_of_torch(equation: str) -> None:
    operands = _operands("ab,bc")
    with pytest.raises(RuntimeError, match="einsum"):
        einsum(equation, *operands)


class _Names(TorchDispatchMode):
    """The operations that are done."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.done.append(base_name(func).removeprefix("_unsafe_"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("equation", ["bhid,bhjd->bhij", "bihd,bjhd->bhij", "bhij,bhjd,hdc->bic"])
def test_operations_are_the_same_for_one_head(equation: str) -> None:
    done = []
    for heads in (1, 3):
        sizes = {"b": 2, "h": heads, "i": 4, "j": 4, "d": 5, "c": 6}
        operands = [torch.randn([sizes[at] for at in term]) for term in equation.split("->")[0].split(",")]
        with _Names() as names:
            einsum(equation, *operands)
        done.append([name for name in names.done if name != "clone"])
    assert done[0] == done[1]
