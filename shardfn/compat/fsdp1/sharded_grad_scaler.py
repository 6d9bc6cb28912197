"""`torch.distributed.fsdp.sharded_grad_scaler`: torch's scaler, for gradients that are DTensors."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import sharded_grad_scaler

from shardfn._torch import unwrap_local


class ShardedGradScaler(sharded_grad_scaler.ShardedGradScaler):
    """torch's `ShardedGradScaler`, which looks at this rank's parts, and then asks the other ranks, as it always does.

    >>> from shardfn.compat.fsdp1.sharded_grad_scaler import ShardedGradScaler
    >>> ShardedGradScaler(device="cpu", init_scale=8.0).get_scale()
    8.0
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True
    ) -> dict[torch.device, Tensor]:
        params = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        shards = [SimpleNamespace(grad=unwrap_local(p.grad)) for p in params]
        parts: Any = SimpleNamespace(param_groups=[{"params": shards}])
        return super()._unscale_grads_(parts, inv_scale, found_inf, allow_fp16)
