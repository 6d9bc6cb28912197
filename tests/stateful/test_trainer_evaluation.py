"""`Trainer.evaluate_all` is the mean over all samples, or tokens, of all ranks."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shardfn as sf
from shardfn.testing import assert_close, on_meshes

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)).double()
Y = torch.where(torch.arange(24) % 5 == 0, -100, torch.arange(24) % 3)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()


@on_meshes({"fsdp": 2, "tp": 2}, {"replicate": 2, "fsdp": 2})
def test_tokens_count_once_however_batches_are_cut(mesh: DeviceMesh) -> None:
    model = _model()
    expected = nn.functional.cross_entropy(model.eval()(X), Y, ignore_index=-100).detach()

    def loss_fn(params: sf.Params, x: Tensor, y: Tensor) -> sf.data.Mean:
        total = nn.functional.cross_entropy(sf.apply(model, params, x), y, ignore_index=-100, reduction="sum")
        return sf.data.Mean(total, (y != -100).sum())

    trainer = sf.Trainer(model.train(), mesh, loss_fn=loss_fn)
    index, count = sf.data.rank(mesh)
    data = TensorDataset(X, Y)
    sampler = DistributedSampler(data, num_replicas=count, rank=index, shuffle=False)
    for size in (1, 5, 12):
        out = trainer.evaluate_all(DataLoader(data, batch_size=size, sampler=sampler))
        assert_close(out["loss"], expected, rtol=1e-12, atol=1e-12)
        assert out["batches"] == -(-len(sampler) // size)
        assert out["tokens"] == 24
    assert trainer.training


@on_meshes({"fsdp": 2})
def test_plain_losses_count_by_samples(mesh: DeviceMesh) -> None:
    model = _model().eval()
    expected = model(X).square().mean().detach()
    trainer = sf.Trainer(model, mesh, loss_fn=lambda params, x: sf.apply(model, params, x).square().mean())
    mine = X.chunk(2)[mesh.get_rank()]
    out = trainer.evaluate_all(mine.split(5))  # 5, 5 and 2: tensors are batches by themselves
    assert_close(out["loss"], expected, rtol=1e-12, atol=1e-12)
    assert out["loss"].dtype == torch.float64 and out["batches"] == 3


def test_an_iterator_that_is_over_says_so() -> None:
    model = nn.Linear(2, 1)
    mesh = sf.make_mesh("cpu", fsdp=1)
    trainer = sf.Trainer(model, mesh, loss_fn=lambda params, x: sf.apply(model, params, x).mean())
    batches = iter([torch.ones(2, 2)])
    assert trainer.evaluate_all(batches)["batches"] == 1
    with pytest.raises(sf.ShardError, match="no batch; an iterator can be gone through once only"):
        trainer.evaluate_all(batches)
