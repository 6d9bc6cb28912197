"""Split logits that leave `apply`: what is done with their parts, and what is an error instead of a wrong number."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import decoder, policy, tokens
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import shardfn as sf
from shardfn.parallel.loss import SplitLogits
from shardfn.testing import assert_parity, count_collectives, on_meshes, run_raises

ON_TP = ({"fsdp": 1, "tp": 2}, {"fsdp": 1, "tp": 4})
ORIGIN = r"Policy\(acts=\{'head': 'b s vocab@tp'\}\) leaves the output of 'head' split"


def _logits(mesh: DeviceMesh) -> tuple[SplitLogits, Tensor, Tensor]:
    """Split logits of a decoder, the whole ones, and targets."""
    model = decoder()
    x, y = tokens(batch=3)
    split, whole = (
        sf.apply(model, sf.shard(model, mesh, policy(acts=acts)), x) for acts in ({"head": "b s vocab@tp"}, {})
    )
    assert isinstance(split, SplitLogits) and isinstance(split, DTensor)
    return split, whole, y


REFUSED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "F.cross_entropy": lambda x, y: F.cross_entropy(x, y),
    "F.cross_entropy, flat": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()),
    "F.cross_entropy, viewed": lambda x, y: F.cross_entropy(x.view(-1, x.shape[-1]), y.view(-1)),
    "nn.CrossEntropyLoss": lambda x, y: nn.CrossEntropyLoss()(x.float().flatten(0, 1), y.flatten()),
    "F.log_softmax": lambda x, y: F.log_softmax(x, -1).gather(-1, y.unsqueeze(-1)),
    "gather": lambda x, y: x.gather(-1, y.unsqueeze(-1)),
    "softmax": lambda x, y: x.float().softmax(-1),
    "argmax": lambda x, y: x[:, -1].argmax(-1),
    "max over another dim": lambda x, y: x.max(1),
    "sum": lambda x, y: x.sum(),
    "topk": lambda x, y: torch.topk(x, 3),
    "plus a tensor": lambda x, y: x + torch.ones(24),
    "a tensor plus": lambda x, y: torch.ones(24) + x,
    "times a parameter": lambda x, y: x * torch.tensor(2.0, requires_grad=True),
    "compared": lambda x, y: x > 0,
    "linear": lambda x, y: F.linear(x, torch.ones(4, 24)),
    "matmul": lambda x, y: torch.ones(3, 5, 5) @ x,
    "cat with whole ones": lambda x, y: torch.cat([torch.ones(3, 5, 24), x]),
    "the first classes": lambda x, y: x[..., :10],
    "one class": lambda x, y: x[:, :, 0],
    "classes by a mask": lambda x, y: x[..., torch.arange(24) > 3],
    "elements by a mask": lambda x, y: x[torch.ones(3, 5, 24, dtype=torch.bool)],
    "flatten": lambda x, y: x.flatten(),
    "flatten the last": lambda x, y: x.flatten(1),
    "view": lambda x, y: x.view(3, 5, 4, 6),
    "reshape": lambda x, y: x.reshape(-1),
    "view as of this rank": lambda x, y: x.view(-1, 12),
    "transpose": lambda x, y: x.mT,
    "permute": lambda x, y: x.permute(2, 0, 1),
    "written into": lambda x, y: x[:, :2].fill_(0),
    "as an index": lambda x, y: y[x],
    "backward": lambda x, y: x.backward(torch.ones(3, 5, 24)),
    "autograd.grad": lambda x, y: torch.autograd.grad(y.double().sum(), x),
    "numpy": lambda x, y: x.detach().numpy(),
    "tolist": lambda x, y: x.tolist(),
    "item": lambda x, y: x[0, 0].item(),
    "a copy": lambda x, y: copy.deepcopy(x),
    "an operation of aten": lambda x, y: torch.ops.aten.sum.default(x),
    "zeros like": lambda x, y: torch.zeros_like(x),
}


@pytest.mark.everyday(1)
@on_meshes(*ON_TP)
def test_what_would_be_wrong_is_an_error(mesh: DeviceMesh) -> None:
    split, _, targets = _logits(mesh)
    for name, use in REFUSED.items():
        with count_collectives() as counts:
            try:
                found = use(split, targets)
            except sf.ShardError as error:
                message = str(error)
            else:
                raise AssertionError(f"{name} gave {type(found)}")
        assert "'head': 'b s vocab@tp'" in message and "the output of 'head'" in message, (name, message)
        assert "sf.cross_entropy(logits, targets)" in message and "full_tensor()" in message, (name, message)
        assert counts.total == 0, name


ALLOWED: dict[str, Callable[[Tensor], Tensor]] = {
    "float": lambda x: x.float(),
    "to": lambda x: x.to(torch.float32),
    "half": lambda x: x.bfloat16(),
    "softcap": lambda x: 30 * torch.tanh(x / 30),
    "temperature": lambda x: (x * 0.5 - 1) / 2.0,
    "negative": lambda x: 1 - x + -x,
    "clamp": lambda x: x.clamp(min=-1, max=1),
    "guidance": lambda x: x + 2 * (x.tanh() - x),
    "in place": lambda x: x.clone().mul_(2).add_(1),
    "shifted": lambda x: x[..., :-1, :],
    "shifted and contiguous": lambda x: x[:, :-1, :].contiguous(),
    "shifted, two dims": lambda x: x[:, :-1],
    "last position": lambda x: x[:, -1],
    "one sample": lambda x: x[1],
    "a new dim": lambda x: x[None, ..., None, :],
    "samples by index": lambda x: x[torch.tensor([2, 0])],
    "positions by a mask": lambda x: x[torch.arange(15).view(3, 5) % 2 == 0],
    "samples by a mask, then positions": lambda x: x[torch.tensor([True, False, True]), 1:],
    "flat": lambda x: x.flatten(0, 1),
    "viewed": lambda x: x.view(-1, x.size(-1)),
    "reshaped": lambda x: x[:, :-1].reshape(2, 6, 24),
    "reshaped, last inferred": lambda x: x.reshape(15, -1),
    "detached": lambda x: x.detach(),
    "data": lambda x: x.data,
    "nothing": lambda x: x,
}


@pytest.mark.everyday(1)
@on_meshes(*ON_TP)
def test_what_is_right_on_parts_is_done(mesh: DeviceMesh) -> None:
    split, whole, _ = _logits(mesh)
    for name, use in ALLOWED.items():
        found, expected = use(split), use(whole)
        assert isinstance(found, SplitLogits), name
        assert (found.shape, found.dtype, found.dim()) == (expected.shape, expected.dtype, expected.dim()), name
        assert found.placements == (Shard(expected.dim() - 1),), name
        torch.testing.assert_close(found.full_tensor(), expected, msg=lambda text, name=name: f"{name}: {text}")
        targets = torch.arange(expected[..., 0].numel()).view(expected.shape[:-1]) % 24
        torch.testing.assert_close(sf.cross_entropy(found, targets), sf.cross_entropy(expected, targets))


@pytest.mark.slow
@pytest.mark.everyday(1)
@on_meshes(*ON_TP)
def test_gradients_of_what_is_done_with_parts(mesh: DeviceMesh) -> None:
    """Through slices, softcaps and dtypes, `to_local`, `full_tensor` and `redistribute`, as of whole logits."""
    model = decoder()
    x, y = tokens(batch=4)
    losses: dict[str, Callable[[Tensor], Tensor]] = {
        "next token": lambda out: sf.cross_entropy(out[:, :-1], x[:, 1:]),
        "softcap": lambda out: sf.cross_entropy(30 * torch.tanh(out / 30), y),
        "flat": lambda out: sf.cross_entropy(out.float().view(-1, 24), y.view(-1)),
        "full": lambda out: F.cross_entropy(_full(out).flatten(0, 1), y.flatten()),
        "an ordinary DTensor": lambda out: sf.cross_entropy(
            out.redistribute(placements=out.placements) if isinstance(out, DTensor) else out, y
        ),
    }
    for name, loss in losses.items():
        found = []
        for acts in ({"head": "b s vocab@tp"}, {}):
            params = sf.shard(model, mesh, policy(acts=acts))
            value, grads = sf.value_and_grad(lambda p, loss=loss: loss(sf.apply(model, p, x)))(params)
            found.append({"loss": value, **{k: g for k, g in sf.gather(grads).items() if "wk.bias" not in k}})
        assert_parity(*found, tol=1e-6 if name == "flat" else 1e-12)


def _full(out: Tensor) -> Tensor:
    return out.full_tensor() if isinstance(out, DTensor) else out


@on_meshes({"fsdp": 1, "tp": 2})
def test_what_split_logits_say(mesh: DeviceMesh) -> None:
    split, whole, _ = _logits(mesh)
    assert sf.typeof(split) == "f64[3 5 24@tp]"
    assert (split.shape, split.stride(), len(split), split.device) == (whole.shape, whole.stride(), 3, whole.device)
    assert not split.requires_grad and split.is_floating_point() and split.grad is None
    assert "DTensor" in repr(split) and "DTensor" in f"{split}"
    assert split.to_local().shape == (3, 5, 12)
    with torch.enable_grad():
        grown = SplitLogits.of(split.to_local().detach().requires_grad_() * 2, split.device_mesh, 2, split.origin)
    assert grown.requires_grad and not grown.is_leaf and grown.grad_fn is not None and not grown.detach().requires_grad


def _leaves_a_transform(kind: str) -> None:
    mesh = sf.make_mesh("cpu", fsdp=1, tp=2)
    model = decoder()
    params = sf.shard(model, mesh, policy(acts={"head": "b s vocab@tp"}))
    x, _ = tokens(batch=3)
    tangent = sf.tree.map(torch.ones_like, params)
    if kind == "vmap":
        sf.vmap(lambda p, x: sf.apply(model, p, x[None]), in_dims=(None, 0))(params, x)
    elif kind == "jvp":
        sf.jvp(lambda p: sf.apply(model, p, x), (params,), (tangent,))
    else:
        _, pull = sf.vjp(lambda p: sf.apply(model, p, x), params)
        pull(torch.ones(3, 5, 24, dtype=torch.float64))


@pytest.mark.everyday(1)
@pytest.mark.parametrize("kind", ["vmap", "jvp", "vjp"])
def test_split_logits_do_not_leave_a_transform(kind: str) -> None:
    run_raises(sf.ShardError, _leaves_a_transform, kind, match=ORIGIN, ranks=2)


@pytest.mark.slow
@on_meshes({"fsdp": 1, "tp": 2})
def test_split_logits_of_a_recorded_step(mesh: DeviceMesh) -> None:
    split, whole, _ = _logits(mesh)
    model = decoder()
    params = sf.shard(model, mesh, policy(acts={"head": "b s vocab@tp"}))
    x, _ = tokens(batch=3)
    step = sf.jit(lambda p, x: sf.apply(model, p, x), backend="aot_eager")
    for found in (step(params, x), step(params, x), sf.jit(lambda out: out * 1.0, backend="aot_eager")(split)):
        assert isinstance(found, SplitLogits)
        torch.testing.assert_close(found.full_tensor(), whole)
        with pytest.raises(sf.ShardError, match=ORIGIN):
            found.sum()


@pytest.mark.slow
@on_meshes({"fsdp": 2, "tp": 2})
def test_a_trainer_with_split_logits(mesh: DeviceMesh) -> None:
    x, _ = sf.data.local_batch(tokens(), mesh)
    losses = []
    for acts in ({"head": "b s vocab@tp"}, {}):
        trainer = sf.Trainer(decoder(), mesh, policy(acts=acts))
        optimizer, loss = torch.optim.SGD(trainer.parameters(), 0.1), torch.zeros(())
        for _ in range(3):
            loss = sf.cross_entropy(trainer(x)[:, :-1], x[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append({"loss": loss.detach()})
    assert_parity(*losses)


class _WithLoss(nn.Module):
    """Computes a loss by itself, as models of transformers do when they are given labels."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        self.emb, self.head, self.view = nn.Embedding(24, 8), nn.Linear(8, 24, bias=False), view

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.emb(ids)).float()
        return nn.CrossEntropyLoss()(logits.view(-1, 24) if self.view else logits.flatten(0, 1), labels.view(-1))


def _loss_inside(view: bool) -> None:
    mesh = sf.make_mesh("cpu", fsdp=1, tp=2)
    model, (x, y) = _WithLoss(view), tokens(batch=4)
    rules = {"head.weight": "vocab@tp c@fsdp"}
    sf.apply(model, sf.shard(model, mesh, sf.Policy(rules=rules, acts={"head": "b s vocab@tp"})), x, y)


@pytest.mark.parametrize("view", [True, False])
def test_a_loss_inside_of_the_model_is_an_error(view: bool) -> None:
    run_raises(sf.ShardError, _loss_inside, view, match=r"head: Policy\.acts leaves its output", ranks=2)
