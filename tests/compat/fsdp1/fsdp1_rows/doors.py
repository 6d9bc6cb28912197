"""Section 1.7. Modules to import from."""

import importlib
from functools import partial
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)

from fsdp1_rows.common import Block, Net, batch, first_rank, gradients, loss_of, mine, row, trained, values, wrapped
from shardfn.compat import fsdp1, fsdp2
from shardfn.compat.fsdp1 import FullyShardedDataParallel as FSDP
from shardfn.compat.fsdp1.sharded_grad_scaler import ShardedGradScaler
from shardfn.testing import assert_trees_close


def same_names(door: str, theirs: str, names: list[str]) -> None:
    ours, torchs = importlib.import_module(f"shardfn.compat.fsdp1{door}"), importlib.import_module(theirs)
    for name in names:
        if name == "FullyShardedDataParallel":
            assert getattr(ours, name) is FSDP
        else:
            assert getattr(ours, name) is getattr(torchs, name), name


FSDP2 = ["CPUOffloadPolicy", "DataParallelMeshDims", "FSDPModule", "fully_shard", "MixedPrecisionPolicy"]
FSDP2 += ["OffloadPolicy", "register_fsdp_forward_method", "UnshardHandle", "share_comm_ctx"]


@row("1.7", "torch.distributed.fsdp")
def opens_the_main_door() -> None:
    """All of FSDP1's names in `__all__`; only the class is ours."""
    same_names("", "torch.distributed.fsdp", [name for name in torch_fsdp.__all__ if name not in FSDP2])


@row("1.7", "torch.distributed.fsdp: FSDP2's names")
def opens_the_main_door_for_fsdp2() -> None:
    """FSDP2's names are there too, for scripts that import both from one place."""
    for name in FSDP2:
        assert getattr(fsdp1, name) is getattr(fsdp2, name), name


@row("1.7", "torch.distributed.fsdp: FlatParameter")
def has_no_flat_parameter() -> None:
    """torch's own, for `isinstance`, which is False of every parameter here."""
    assert fsdp1.FlatParameter is torch_fsdp.FlatParameter
    assert not any(isinstance(parameter, fsdp1.FlatParameter) for parameter in FSDP(Net()).parameters())


@row("1.7", ".fully_sharded_data_parallel")
def opens_the_class_door() -> None:
    """The same classes."""
    names = [name for name in torch_fsdp.__all__ if name not in FSDP2]
    same_names(".fully_sharded_data_parallel", "torch.distributed.fsdp.fully_sharded_data_parallel", names)


@row("1.7", ".wrap")
def opens_the_wrap_door() -> None:
    """torch's own policies."""
    theirs = importlib.import_module("torch.distributed.fsdp.wrap")
    names = [*theirs.__all__, "_or_policy", "_module_wrap_policy", "_recursive_wrap", "_wrap", "_ConfigAutoWrap"]
    same_names(".wrap", "torch.distributed.fsdp.wrap", names)


@row("1.7", ".api")
def opens_the_api_door() -> None:
    """torch's own enums and config classes."""
    theirs = importlib.import_module("torch.distributed.fsdp.api")
    same_names(".api", "torch.distributed.fsdp.api", list(theirs.__all__))


@row("1.7", ".sharded_grad_scaler")
def opens_the_scaler_door() -> None:
    """The scaler works on the shards: a step, and an overflow on one rank that all ranks skip."""
    fsdp = wrapped()
    optimizer, scaler = torch.optim.SGD(fsdp.parameters(), 0.1), ShardedGradScaler(device="cpu", init_scale=8.0)
    before = values(fsdp)
    scaler.scale(loss_of(fsdp, mine(batch()))).backward()
    scaler.step(optimizer)
    scaler.update()
    plain = Net()
    loss_of(plain, batch()).backward()
    want = {n: before[n] - 0.1 * g for n, g in gradients(plain).items()}
    assert_trees_close(values(fsdp), want, rtol=1e-4, atol=1e-6)
    before = values(fsdp)
    optimizer.zero_grad()
    scaler.scale(loss_of(fsdp, mine(batch()))).backward()
    if first_rank():
        fsdp.emb.weight.grad.to_local().fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert_trees_close(values(fsdp), before, rtol=0, atol=0)
    assert scaler.get_scale() == 4.0


@row("1.7", "checkpoint_wrapper")
def works_with_checkpoint_wrappers() -> None:
    """torch's wrappers for activation checkpointing inside or outside of units; names stay clean."""
    check = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    fsdp = wrapped()
    apply_activation_checkpointing(fsdp, checkpoint_wrapper_fn=check, check_fn=lambda m: isinstance(m, Block))
    trains_with_clean_names(fsdp)
    model = Net()
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=check, check_fn=lambda m: isinstance(m, Block))
    trains_with_clean_names(wrapped(model))
    model = Net()
    model.layers[0] = offload_wrapper(model.layers[0])
    trains_with_clean_names(wrapped(model))


def trains_with_clean_names(fsdp: Any) -> None:
    plain = Net()
    trained(fsdp, plain)
    state = fsdp.state_dict()
    assert list(state) == list(plain.state_dict())
    assert_trees_close(dict(state), dict(plain.state_dict()), rtol=1e-4, atol=1e-5)
