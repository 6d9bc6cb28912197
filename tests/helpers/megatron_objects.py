"""What stands for Megatron-core's classes in tests: it is not installed."""

from typing import ClassVar

import torch
from torch import Tensor, nn


class TransformerLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class ColumnParallelLinear(nn.Linear):
    def get_extra_state(self) -> None:
        return None

    def set_extra_state(self, state: object) -> None: ...


class Special(nn.Linear): ...


class Model(nn.Module):
    _fsdp_modules: ClassVar = [Special]

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(TransformerLayer() for _ in range(2))
        self.special = Special(6, 6)
        self.output_layer = ColumnParallelLinear(6, 4)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.output_layer(self.special(x)) * scale


WRAP: set[type[nn.Module]] = {TransformerLayer, ColumnParallelLinear}
