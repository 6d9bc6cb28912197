"""The class APIs that people have scripts for, on shardfn's engine: change one import, keep the script.

fsdp1       `torch.distributed.fsdp.FullyShardedDataParallel`, and everything else in that package and its modules
fsdp2       `torch.distributed.fsdp.fully_shard`, and what belongs to it
hfai        `hfai.distributed.fsdp` and `haiscale.fsdp`
megatron    `megatron.core.distributed.TorchFullyShardedDataParallel`

common      what they share: modules that shard in place, meshes

Not here: the engine; they are written on `stateful`. Nothing else in shardfn imports this package. It replaces
classes of torch, so it may use their private names.
"""
