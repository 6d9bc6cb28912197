"""What scripts do with `p` and `p.grad` of FSDP1: as one process has it, or an error that says what to write."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardfn as sf
from shardfn.compat.fsdp1 import FullyShardedDataParallel
from shardfn.testing import run

# Lines of a script: `ps` are the parameters, `gs` their gradients, `saved` and `ema` copies of both made before.
VALUES = {
    "norm of all": "nn.utils.clip_grad_norm_(ps, 0.1)",
    "norm without clipping": "nn.utils.get_total_norm(gs)",
    "norm by squares": "sum(g.pow(2).sum() for g in gs).sqrt()",
    "norm of norms": "torch.stack([g.norm() for g in gs]).norm()",
    "norm of norms by foreach": "torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gs)))",
    "norm of one vector": "torch.cat([g.flatten() for g in gs]).norm()",
    "norm of parameters": "nn.utils.parameters_to_vector(ps).norm()",
    "largest gradient": "torch.stack([g.abs().max() for g in gs]).max()",
    "gradients in one vector": "torch.cat([g.view(-1) for g in gs])",
    "any NaN": "any(torch.isnan(g).any() for g in gs)",
    "all finite": "all(g.isfinite().all() for g in gs)",
    "sums finite": "torch.isfinite(torch.stack([g.sum() for g in gs])).all().item()",
    "clipped by value": "nn.utils.clip_grad_value_(ps, 0.1)",
    "numbers": "sum(p.numel() for p in ps)",
    "numbers that train": "sum(p.numel() for p in ps if p.requires_grad)",
    "bytes": "sum(p.numel() * p.element_size() for p in ps)",
    "shapes": "[tuple(p.shape) for p in ps]",
    "equal to a copy": "all(torch.equal(g, s) for g, s in zip(gs, saved))",
    "close to a copy": "all(torch.isclose(g, s).all() for g, s in zip(gs, saved))",
    "an element": "ps[0][0, 0].item()",
    "a histogram": "torch.histc(ps[0].detach(), 4)",
    "widened": "[g.float().double() for g in gs]",
}
STATEMENTS = {
    "average by data": "for e, p in zip(ema, ps): e.mul_(0.9).add_(p.data, alpha=0.1)",
    "average by lerp": "for e, p in zip(ema, ps): e.lerp_(p.detach(), 0.1)",
    "average by foreach": "torch._foreach_mul_(ema, 0.9); torch._foreach_add_(ema, [p.data for p in ps], alpha=0.1)",
    "step by data": "for p in ps: p.data.add_(p.grad, alpha=-0.1)",
    "step by subtraction": "for p in ps: p.data.sub_(0.1 * p.grad)",
    "step of an Adam": "for p, e in zip(ps, ema): p.data.addcdiv_(p.grad, e.abs().addcmul_(p.grad, p.grad).sqrt() + 1)",
    "decay": "for p in ps: p.data.mul_(0.99)",
    "clamped": "for p in ps: p.data.clamp_(-0.1, 0.1)",
    "copied from a copy": "for p, s in zip(ps, saved): p.data.copy_(s)",
    "filled": "for p in ps: p.data.fill_(0.1)",
    "scaled": "for p in ps: p.grad.mul_(0.5)",
    "divided by a tensor": "for p in ps: p.grad.div_(torch.tensor(2.0))",
    "zeroed": "for p in ps: p.grad.zero_()",
    "none": "for p in ps: p.grad = None",
    "replaced": "for p in ps: p.grad = p.grad.clone() * 2",
    "masked": "for p in ps: p.grad.masked_fill_(p.abs() < 0.1, 0)",
    "by where": "for p in ps: p.grad = torch.where(p.grad.abs() > 1, 0.0, p.grad)",
    "signed": "for p in ps: p.data.add_(p.grad.sign(), alpha=-0.01)",
    "frozen": "for p in ps[:2]: p.requires_grad_(False)",
}
REFUSED = {
    "sum over ranks": ("dist.all_reduce(sum(g.pow(2).sum() for g in gs))", r"Write x = x.full_tensor\(\) instead"),
    "sum on one rank": ("dist.reduce(gs[0].sum(), 0)", r"Write x = x.full_tensor\(\) instead"),
    "gradients over ranks": ("for p in ps: dist.all_reduce(p.grad)", r"or leave it out, where that is reduced"),
    "from the first rank": ("for p in ps: dist.broadcast(p.data, 0)", r"or leave it out, where that is reduced"),
    "norms of all ranks": ("dist.all_gather([torch.zeros(())] * 2, gs[0].norm())", r"x.full_tensor\(\)"),
}


def _whole(value: Any) -> Any:
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return [_whole(x) for x in value] if isinstance(value, list | tuple) else value


def _after(model: nn.Module, do: Callable[[dict[str, Any]], Any]) -> list[Any]:
    """What a line gives, and what parameters, gradients and copies are after it."""
    model(torch.linspace(-1, 1, 8).view(2, 4)).square().sum().backward()
    ps = list(model.parameters())
    gs = [p.grad for p in ps]
    names = {
        "ps": ps,
        "gs": gs,
        "saved": [g.clone() for g in gs if g is not None],
        "ema": [p.detach().clone() for p in ps],
    }
    value = do({"torch": torch, "nn": nn, "dist": dist, **names})
    state = [p.detach() for p in ps], [p.grad for p in ps], names["ema"], [p.requires_grad for p in ps]
    return _whole([value, *state])


def _models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    wrapped = FullyShardedDataParallel(copy.deepcopy(model), device_id=torch.device("cpu"), use_orig_params=True)
    return wrapped, model


def _lines_are_as_in_one_process() -> list[str]:
    problems: list[str] = []
    lines: dict[str, Callable[[dict[str, Any]], Any]] = {}
    for name, line in VALUES.items():
        lines[name] = lambda names, line=line: eval(line, names)
    for name, line in STATEMENTS.items():
        lines[name] = lambda names, line=line: exec(line, names)
    for name, do in lines.items():
        ours, one = (_after(model, do) for model in _models())
        try:
            torch.testing.assert_close(ours, one)
        except AssertionError as error:
            problems.append(f"{name}: {error}")
    return problems


def _says_what_to_write() -> None:
    for name, (line, why) in REFUSED.items():
        wrapped, _ = _models()
        with pytest.raises(sf.ShardError, match=why):
            _after(wrapped, lambda names, line=line: exec(line, names))
        assert name


def _instead_of_a_sum_over_ranks() -> tuple[Tensor, Tensor]:
    line = "sum(g.pow(2).sum() for g in gs)"
    ours, one = (_after(model, lambda names: eval(line, names))[0] for model in _models())
    return ours, one


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_lines_are_as_in_one_process() -> None:
    assert len(VALUES) + len(STATEMENTS) >= 40
    with warnings.catch_warnings():
        assert run(_lines_are_as_in_one_process, ranks=2) == [[], []]


def test_what_is_refused_says_what_to_write() -> None:
    run(_says_what_to_write, ranks=2)
    for ours, one in run(_instead_of_a_sum_over_ranks, ranks=2):
        torch.testing.assert_close(ours, one)
