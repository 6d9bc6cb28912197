"""`torch.distributed.fsdp.sharded_grad_scaler`: torch's own scaler, which works on shards as they are. Layer 6."""

from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as ShardedGradScaler
