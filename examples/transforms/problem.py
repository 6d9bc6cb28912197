"""What the examples of transforms share: a small net, its rules, and data with a known answer."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf

RULES = {"0.weight": "ff@tp c@fsdp", "2.weight": "_@fsdp ff@tp"}


def make_net(seed: int = 0) -> nn.Module:
    """6 -> 16 -> 1, the same on every rank."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def make_data(samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """x [samples, 6] and y [samples, 1], the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, dtype=torch.float64, generator=generator)
    return x, torch.sin(x[:, :1] + x[:, 1:2] * (1 + seed))


def make_mesh() -> DeviceMesh:
    """Two ranks of tensor parallelism when there are any, the others for data."""
    ranks = sf.make_mesh("cpu", fsdp=-1).size()
    return sf.make_mesh("cpu", fsdp=-1, tp=2 if ranks % 2 == 0 else 1)
