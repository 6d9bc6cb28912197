"""`optim/norms.py`: the norm of a tree in any layout against numpy's, in float64."""

import numpy as np
import pytest
import torch
from drawing import DTYPES, FLOATS, Case, cases, fewer_everyday, hold_for_all
from torch import Tensor

import shardfn as sf

SCALES = (0.0, 1e-3, 1.0, 300.0)
ODD = (float("nan"), float("inf"), -float("inf"))


def numbers_of(case: Case) -> dict[str, Tensor]:
    """Of ordinary size, all of one scale; of one case in eight the first number of a tensor is none."""
    generator = torch.Generator().manual_seed(case.seed)
    out = {}
    for i, (shape, name) in enumerate(zip(case.shapes, case.dtypes, strict=True)):
        values = torch.randn(shape, dtype=torch.float64, generator=generator) * SCALES[case.seed % len(SCALES)]
        if case.seed % 8 == 5 and values.numel() and name in FLOATS:
            values.view(-1)[0] = ODD[case.seed % 3]
        dtype = getattr(torch, name)
        out[f"t{i}"] = values.mul(1 - 2j).to(dtype) if dtype.is_complex else values.to(dtype)
    return out


def norm_equals_numpys(case: Case) -> None:
    layouts, values = case.layouts[0], numbers_of(case)
    counted = [x for x in values.values() if x.is_floating_point() or x.is_complex()]
    flat = [x.to(torch.complex128 if x.is_complex() else torch.float64).numpy().ravel() for x in counted]
    want = float(np.linalg.norm(np.concatenate(flat))) if flat else 0.0
    double = any(x.dtype in (torch.float64, torch.complex128) for x in counted)
    params = sf.shard(values, layouts.mesh(), layouts.policy())
    whole = sf.gather(params)
    for tree in (params, {"a": [*params.values()]}, whole):
        norm = sf.optim.global_norm(tree)
        assert norm.dtype == (torch.float64 if double else torch.float32) and norm.shape == ()
        close = torch.tensor(want, dtype=torch.float64)
        torch.testing.assert_close(norm.double(), close, rtol=1e-13 if double else 1e-6, atol=0, equal_nan=True)


@pytest.mark.law("P7")
def test_norm_equals_numpys() -> None:
    hold_for_all(norm_equals_numpys, cases(dtypes=DTYPES), fewer_everyday(0.5))
