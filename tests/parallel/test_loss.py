"""`cross_entropy` against torch's, whole and split: values, derivatives, transforms, graphs, memory, communication."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from models import decoder, policy, tokens
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardfn as sf
from shardfn.parallel import loss as loss_module
from shardfn.parallel.loss import SplitLogits
from shardfn.testing import assert_parity, assert_trees_close, count_collectives, on_meshes

SPLITS = ({"fsdp": 1, "tp": 2}, {"fsdp": 1, "tp": 4}, {"fsdp": 2, "tp": 2})


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pieces that cut even these logits. Ranks have processes of their own, see `_cutting`."""
    monkeypatch.setattr(loss_module, "_LEAST", 20)
    yield


class _Cutting:
    """The same on a rank."""

    def __enter__(self) -> None:
        self.least = loss_module.__dict__["_LEAST"]
        loss_module.__dict__["_LEAST"] = 20

    def __exit__(self, *_: Any) -> None:
        loss_module.__dict__["_LEAST"] = self.least


def _reference(
    logits: Tensor, targets: Tensor, reduction: str = "mean", smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """By torch, on whole float32 logits, or float64 ones."""
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    flat, flat_targets = wide.reshape(-1, wide.shape[-1]), targets.reshape(-1).long()
    losses = F.cross_entropy(flat, flat_targets, reduction="none", label_smoothing=smoothing)
    losses = losses + z_loss * torch.logsumexp(flat, -1).square().masked_fill(flat_targets == -100, 0)
    if reduction == "none":
        return losses.view(targets.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / (flat_targets != -100).sum()


def _drawn(*shape: int, vocab: int = 24, ignored: float = 0.2, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(*shape, vocab, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocab, shape, generator=generator)
    return logits, targets.masked_fill(torch.rand(shape, generator=generator) < ignored, -100)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "both": {"label_smoothing": 0.3, "z_loss": 1e-3},
}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))


def _as_reference(options: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix("label_"): value for name, value in options.items()}


# -- one rank ---------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    shape=st.lists(st.sampled_from([0, 1, 3, 17]), max_size=3),
    vocab=st.sampled_from([1, 3, 17, 40]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    options=st.sampled_from(list(OPTIONS.values())),
    index_dtype=st.sampled_from([torch.int64, torch.int32]),
)
def test_whole_logits(
    shape: list[int],
    vocab: int,
    dtype: torch.dtype,
    ignored: float,
    reduction: str,
    options: dict[str, Any],
    index_dtype: torch.dtype,
) -> None:
    logits, targets = _drawn(*shape, vocab=vocab, ignored=ignored)
    mine, theirs = (logits.to(dtype).requires_grad_() for _ in range(2))
    found = sf.cross_entropy(mine, targets.to(index_dtype), reduction=reduction, **options)
    expected = _reference(theirs, targets, reduction, **_as_reference(options))
    assert found.dtype == expected.dtype and found.shape == expected.shape
    torch.testing.assert_close(found, expected, equal_nan=True)
    weights = torch.linspace(-1, 2, found.numel(), dtype=found.dtype).view(found.shape)
    (grad,) = torch.autograd.grad(found, mine, weights)
    (expected_grad,) = torch.autograd.grad(expected, theirs, weights)
    assert grad.dtype == dtype
    torch.testing.assert_close(grad, expected_grad, equal_nan=True)


def test_a_mean_over_no_target_is_nan_and_a_sum_zero() -> None:
    logits, targets = _drawn(3, 4, ignored=1.1)
    assert sf.cross_entropy(logits, targets).isnan()
    assert sf.cross_entropy(logits, targets, reduction="sum") == 0


def test_logits_of_any_strides() -> None:
    logits, targets = _drawn(6, 7)
    for view in (logits[:, :-1], logits.transpose(0, 1), logits[::2, 1:, ::3], logits[:1].expand(4, -1, -1)):
        ids = targets.new_ones(view.shape[:-1])
        mine, theirs = (logits.clone().requires_grad_() for _ in range(2))
        own, other = (torch.as_strided(x, view.shape, view.stride(), view.storage_offset()) for x in (mine, theirs))
        found, expected = sf.cross_entropy(own, ids), _reference(other, ids)
        torch.testing.assert_close(found, expected)
        found.backward()
        expected.backward()
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_large_logits_lose_nothing() -> None:
    logits = torch.tensor([[3e4, 3e4 - 9, 0.0], [-3e4, -3e4 - 9, -6e4]])
    targets = torch.tensor([0, 0])
    torch.testing.assert_close(
        sf.cross_entropy(logits, targets), _reference(logits.double(), targets).float(), rtol=0, atol=1e-6
    )


def test_masked_out_classes() -> None:
    logits, targets = _drawn(5, 6, ignored=0.0)
    allowed = F.one_hot(targets, 24).bool() | (torch.arange(24) % 3 == 0)
    mine, theirs = (logits.masked_fill(~allowed, -torch.inf).requires_grad_() for _ in range(2))
    found, expected = sf.cross_entropy(mine, targets), _reference(theirs, targets)
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    torch.testing.assert_close(mine.grad, theirs.grad)


@each_option
def test_pieces_are_the_plain_operations(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is used inside transforms gives the same values, first and second derivatives."""
    logits, targets = _drawn(3, 4)
    first = torch.func.grad(lambda x: sf.cross_entropy(x, targets, **options))(logits)
    second = torch.func.hessian(lambda x: sf.cross_entropy(x, targets, **options))(logits)
    mine = logits.clone().requires_grad_()
    (grad,) = torch.autograd.grad(sf.cross_entropy(mine, targets, **options), mine)
    torch.testing.assert_close(grad, first)
    (grad,) = torch.autograd.grad(sf.cross_entropy(mine, targets, **options), mine, create_graph=True)
    torch.testing.assert_close(grad, first)
    rows = [torch.autograd.grad(g, mine, retain_graph=True)[0] for g in grad.flatten()]
    torch.testing.assert_close(torch.stack(rows).view_as(second), second)
    reference = torch.func.hessian(lambda x: _reference(x, targets, **_as_reference(options)))(logits)
    torch.testing.assert_close(second, reference)
    called = []
    monkeypatch.setattr(loss_module, "_plain_stats", lambda *args: called.append(args) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        torch.func.grad(lambda x: sf.cross_entropy(x, targets))(logits)


def test_gradient_of_a_gradient_in_bfloat16() -> None:
    logits, targets = _drawn(3, 4)
    half = logits.bfloat16().requires_grad_()
    (grad,) = torch.autograd.grad(sf.cross_entropy(half, targets), half, create_graph=True)
    (again,) = torch.autograd.grad(grad.square().sum(), half)
    wide = half.detach().float().requires_grad_()
    (expected,) = torch.autograd.grad(_reference(wide, targets), wide, create_graph=True)
    (expected,) = torch.autograd.grad(expected.square().sum(), wide)
    assert again.dtype == torch.bfloat16
    torch.testing.assert_close(again.float(), expected, rtol=2e-2, atol=1e-5)


@each_option
def test_transforms(options: dict[str, Any]) -> None:
    logits, targets = _drawn(5, 4)
    tangent = logits.cos()

    def ours(x: Tensor, y: Tensor) -> Tensor:
        return sf.cross_entropy(x, y, **options)

    def theirs(x: Tensor, y: Tensor) -> Tensor:
        return _reference(x, y, **_as_reference(options))

    def each(loss: Callable[[Tensor, Tensor], Tensor]) -> Any:
        return [
            torch.func.jvp(lambda x: loss(x, targets), (logits,), (tangent,)),
            torch.func.vmap(torch.func.grad(loss))(logits, targets),
            torch.func.jvp(torch.func.grad(lambda x: loss(x, targets)), (logits,), (tangent,)),
            torch.func.vmap(loss, in_dims=(0, None))(torch.stack([logits, tangent]), targets),
        ]

    assert_trees_close(each(ours), each(theirs))


def test_dual_numbers() -> None:
    logits, targets = _drawn(3, 4)
    with forward_ad.dual_level():
        tangents = [
            forward_ad.unpack_dual(loss(forward_ad.make_dual(logits, logits.cos()), targets)).tangent
            for loss in (sf.cross_entropy, _reference)
        ]
    torch.testing.assert_close(*tangents)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str) -> None:
    logits, targets = _drawn(3, 4)
    compiled = torch.compile(lambda x: sf.cross_entropy(x, targets, z_loss=1e-2), fullgraph=True, backend=backend)
    mine, theirs = (logits.float().requires_grad_() for _ in range(2))
    compiled(mine).backward()
    _reference(theirs, targets, z_loss=1e-2).backward()
    torch.testing.assert_close(mine.grad, theirs.grad)


def test_autocast_changes_nothing() -> None:
    logits, targets = _drawn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        half = sf.cross_entropy(logits.bfloat16(), targets)
        wide = sf.cross_entropy(logits.float(), targets)
    assert half.dtype == wide.dtype == torch.float32
    torch.testing.assert_close(wide, _reference(logits.float(), targets))
    torch.testing.assert_close(half, _reference(logits.bfloat16(), targets))


def test_autograd_keeps_the_logits_and_a_few_numbers_a_target() -> None:
    logits, targets = _drawn(8, 16, vocab=512)
    half = logits.bfloat16().requires_grad_()
    kept: dict[int, int] = {}

    def note(saved: Tensor) -> Tensor:
        if saved.untyped_storage().data_ptr() != half.untyped_storage().data_ptr():
            kept[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    with saved_tensors_hooks(note, lambda saved: saved):
        found = sf.cross_entropy(half, targets, label_smoothing=0.1, z_loss=1e-4)
    assert sum(kept.values()) <= 128 * targets.numel() < half.nbytes / 2, kept
    found.backward()


def test_errors() -> None:
    logits, targets = _drawn(3, 4, ignored=0.0)
    with pytest.raises(sf.ShardError, match=r"logits \(3, 4, 24\) need targets \(3, 4\), not \(4, 3\)"):
        sf.cross_entropy(logits, targets.T)
    with pytest.raises(sf.ShardError, match=r"targets are class indices, not torch\.float32"):
        sf.cross_entropy(logits, targets.float())
    with pytest.raises(ValueError, match="'mean', 'sum' or 'none'"):
        sf.cross_entropy(logits, targets, reduction="max")
    for wrong in (-1, 24):
        with pytest.raises(IndexError, match=r"ids from .* size 24"):
            sf.cross_entropy(logits, targets.masked_fill(targets == targets[0, 0], wrong))
    assert sf.cross_entropy(logits, targets.masked_fill(targets == targets[0, 0], 77), ignore_index=77) > 0


def test_a_compiled_loss_of_a_target_that_is_no_class_is_nan() -> None:
    logits, targets = _drawn(3, 4, ignored=0.0)
    compiled = torch.compile(sf.cross_entropy, fullgraph=True, backend="aot_eager")
    for wrong in (-1, 24):
        losses = compiled(logits, targets.index_fill(0, torch.tensor([1]), wrong), reduction="none")
        assert losses[1].isnan().all() and not losses[[0, 2]].isnan().any()


# -- split logits -----------------------------------------------------------------------------------------------------


def _split(mesh: DeviceMesh, logits: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """This rank's part, and split logits made of it."""
    own = logits.chunk(mesh["tp"].size(), -1)[mesh.get_local_rank("tp")].clone().requires_grad_()
    if kind == "DTensor":
        return own, DTensor.from_local(own, mesh["tp"], [Shard(logits.dim() - 1)])
    return own, SplitLogits.of(own, mesh["tp"], logits.dim() - 1, lambda: "a test")


@pytest.mark.everyday(3)
@pytest.mark.parametrize("kind", ["DTensor", "SplitLogits"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@on_meshes({"fsdp": 1, "tp": 2}, {"fsdp": 1, "tp": 4})
def test_split_logits(mesh: DeviceMesh, dtype: torch.dtype, kind: str) -> None:
    for seed, (shape, vocab, ignored) in enumerate([((), 4, 0), ((0,), 8, 0), ((3,), 12, 1.1), ((5, 7), 24, 0.3)]):
        logits, targets = _drawn(*shape, vocab=vocab, ignored=ignored, seed=seed)
        for options in OPTIONS.values():
            for reduction in ("mean", "sum", "none"):
                whole = logits.to(dtype).requires_grad_()
                own, split = _split(mesh, whole.detach(), kind)
                with _Cutting():
                    found = sf.cross_entropy(split, targets, reduction=reduction, **options)
                    expected = _reference(whole, targets, reduction, **_as_reference(options))
                    torch.testing.assert_close(found, expected, equal_nan=True)
                    weights = torch.linspace(-1, 2, found.numel(), dtype=found.dtype).view(found.shape)
                    (grad,) = torch.autograd.grad(found, own, weights)
                (expected_grad,) = torch.autograd.grad(expected, whole, weights)
                assert grad.dtype == dtype
                expected_grad = expected_grad.chunk(mesh["tp"].size(), -1)[mesh.get_local_rank("tp")]
                torch.testing.assert_close(grad, expected_grad, equal_nan=True)


@on_meshes({"fsdp": 1, "tp": 2})
def test_split_logits_where_one_rank_has_no_class_left(mesh: DeviceMesh) -> None:
    logits, _ = _drawn(5, 6)
    logits[..., 12:] = -torch.inf
    targets = torch.arange(30).view(5, 6) % 12
    whole = logits.requires_grad_()
    own, split = _split(mesh, whole.detach(), "SplitLogits")
    found, expected = sf.cross_entropy(split, targets), _reference(whole, targets)
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    assert whole.grad is not None
    torch.testing.assert_close(own.grad, whole.grad.chunk(2, -1)[mesh.get_local_rank("tp")])


@each_option
@on_meshes({"fsdp": 1, "tp": 4})
def test_split_logits_take_one_collective(mesh: DeviceMesh, options: dict[str, Any]) -> None:
    logits, targets = _drawn(3, 4)
    _, split = _split(mesh, logits, "SplitLogits")
    with count_collectives() as forward:
        found = sf.cross_entropy(split, targets, **options)
    assert forward.total == forward.all_gather == 1
    assert forward.bytes == targets.numel() * 8 * (4 if "label_smoothing" in options else 3)
    with count_collectives() as backward:
        found.backward()
    assert backward.total == 0


@on_meshes({"fsdp": 1, "tp": 2})
def test_wrong_targets_and_layouts_of_split_logits(mesh: DeviceMesh) -> None:
    logits, targets = _drawn(3, 4, ignored=0.0)
    _, split = _split(mesh, logits, "SplitLogits")
    with pytest.raises(IndexError, match="size 24"):
        sf.cross_entropy(split, targets.masked_fill(targets == targets[0, 0], 24))
    with pytest.raises(sf.ShardError, match="targets are plain tensors"):
        sf.cross_entropy(split, DTensor.from_local(targets, mesh["tp"], [Replicate()]))
    with pytest.raises(sf.ShardError, match="split over their last dim by one axis"):
        sf.cross_entropy(DTensor.from_local(logits, mesh["tp"], [Shard(0)]), targets.repeat(2, 1))


def _losses(mesh: DeviceMesh) -> Iterator[tuple[sf.Params, Callable[..., Tensor]]]:
    """A decoder's tree and loss, with logits that are split and with whole ones."""
    model = decoder()
    for acts in ({"head": "b s vocab@tp"}, {}):
        params = sf.shard(model, mesh, policy(acts=acts))
        yield params, lambda p, x, y: sf.cross_entropy(sf.apply(model, p, x), y, label_smoothing=0.1, z_loss=1e-2)


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "value_and_grad": lambda loss, p, x, y, t: sf.value_and_grad(loss)(p, x, y),
    "jvp": lambda loss, p, x, y, t: sf.jvp(lambda p: loss(p, x, y), (p,), (t,)),
    "vjp": lambda loss, p, x, y, t: sf.vjp(lambda p: loss(p, x, y), p)[1](torch.tensor(2.0, dtype=torch.float64)),
    "hvp": lambda loss, p, x, y, t: sf.hvp(loss, (p, x, y), t),
    "grad of a norm of a grad": lambda loss, p, x, y, t: sf.grad(lambda p: sf.tree.dot(g := sf.grad(loss)(p, x, y), g))(
        p
    ),
    "gradients by sample": lambda loss, p, x, y, t: sf.vmap(
        sf.grad(lambda p, x, y: loss(p, x[None], y[None])), in_dims=(None, 0, 0)
    )(p, x, y),
}


@pytest.mark.everyday(1)
@pytest.mark.one_mesh
@pytest.mark.parametrize("transform", list(TRANSFORMS))
@on_meshes(*SPLITS)
def test_split_logits_under_transforms(mesh: DeviceMesh, transform: str) -> None:
    x, y = sf.data.local_batch(tokens(), mesh)
    y[0, :2] = -100
    found = [
        TRANSFORMS[transform](loss, params, x, y, sf.tree.map(torch.ones_like, params))
        for params, loss in _losses(mesh)
    ]
    assert_trees_close(found[0], found[1], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@on_meshes({"fsdp": 1, "tp": 2})
def test_split_logits_in_a_recorded_step(mesh: DeviceMesh) -> None:
    x, y = tokens()
    found = []
    for params, loss in _losses(mesh):
        step = sf.value_and_grad(loss)
        found.append((step if found else sf.jit(step, backend="aot_eager"))(params, x, y))
    assert_trees_close(found[0], found[1], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@on_meshes({"fsdp": 1, "tp": 2})
def test_split_logits_compiled(mesh: DeviceMesh) -> None:
    logits, targets = _drawn(3, 4)
    whole = logits.requires_grad_()
    own, split = _split(mesh, whole.detach(), "SplitLogits")
    assert isinstance(split, SplitLogits)
    compiled = torch.compile(lambda x: sf.cross_entropy(x, targets), fullgraph=True, backend="aot_eager")
    compiled(split.redistribute(placements=split.placements)).backward()
    _reference(whole, targets).backward()
    assert whole.grad is not None
    assert_parity({"grad": own.grad}, {"grad": whole.grad.chunk(2, -1)[mesh.get_local_rank("tp")]})
    with pytest.raises(Exception, match="split logits cannot enter a compiled function"):
        compiled(split)


def test_pieces_are_no_larger_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "_LEAST", 80)
    monkeypatch.setattr(loss_module, "_PIECES", 1000)
    sizes = [torch.empty(3, 8)[at].numel() for at in loss_module._pieces((3, 8), 5)]
    assert sizes == [16, 8]  # rows of 8 targets of 5 logits
