"""`torch.distributed.fsdp.sharded_grad_scaler`: torch's scaler, for gradients that are DTensors. Layer 6."""

from collections import defaultdict

import torch
from torch import Tensor
from torch.distributed.fsdp import sharded_grad_scaler

from shardfn._torch import unscale_, unwrap_local


class ShardedGradScaler(sharded_grad_scaler.ShardedGradScaler):
    """torch's `ShardedGradScaler`, which looks at this rank's parts, and then asks the other ranks, as it always does.

    >>> from shardfn.compat.fsdp1.sharded_grad_scaler import ShardedGradScaler
    >>> ShardedGradScaler(device="cpu", init_scale=8.0).get_scale()
    8.0
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True
    ) -> dict[torch.device, Tensor]:
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    grad = unwrap_local(parameter.grad)
                    kinds[grad.device, grad.dtype].append(grad)
        found = {found_inf.device: found_inf}
        for (device, dtype), grads in kinds.items():
            if dtype == torch.float16 and not allow_fp16:
                raise ValueError("Attempting to unscale FP16 gradients.")
            found.setdefault(device, found_inf.to(device))
            unscale_(grads, found[device], inv_scale.to(device))
        return found
