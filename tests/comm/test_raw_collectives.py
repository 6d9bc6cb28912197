"""Sums over ranks as other backends than gloo take them, with what torch calls for them in its place."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardfn.comm import raw_collectives
from shardfn.comm.flat_memory import FreshBuffers
from shardfn.comm.raw_collectives import AsyncCollective, scatter_sum_steps


class _Done:
    def wait(self) -> None:
        pass


@pytest.mark.parametrize(("dtype", "wide"), [(torch.float32, torch.float32), (torch.int16, torch.int32)])
def test_a_backend_adds_up_in_a_dtype_that_is_wide_enough(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, wide: torch.dtype
) -> None:
    def scatter(out: Tensor, flat: Tensor, group: Any, async_op: bool) -> _Done:
        assert out.dtype == flat.dtype == wide and async_op
        out.copy_(flat.view(3, -1).sum(0))
        return _Done()

    monkeypatch.setattr(raw_collectives, "backend_of", lambda group, device: "nccl")
    monkeypatch.setattr(raw_collectives._torch, "reduce_scatter_single", scatter)
    parts, fresh = torch.arange(12.0).view(3, 4).to(dtype), FreshBuffers(torch.device("cpu"))
    group: Any = object()
    (total,) = AsyncCollective(scatter_sum_steps(parts, group, fresh, fresh)).finish()
    assert total.dtype == wide and total.tolist() == [12.0, 15.0, 18.0, 21.0]
