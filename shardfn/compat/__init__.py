"""The class APIs that people have scripts for, on shardfn: change one import, keep the script.

fsdp1       `torch.distributed.fsdp.FullyShardedDataParallel`, and everything else in that package and its modules
fsdp2       `torch.distributed.fsdp.fully_shard`, and what belongs to it
hfai        `hfai.distributed.fsdp` and `haiscale.fsdp`
megatron    `megatron.core.distributed.TorchFullyShardedDataParallel`

common      what they share: modules that shard in place, meshes

A forward goes through `__call__` of a class, `common.sharded_module.run`, `stateful.ModuleShards.run` and
`transforms.apply` to `engine.Session`. Not here: shards of a module, see `stateful`. Nothing else in shardfn imports
this package. It replaces classes of torch, so it may use their private names.
"""
