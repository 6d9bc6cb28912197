"""What tests that run on ranks share: a folder, no warnings of torch, parameters set to zero, how buckets travel."""

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardfn.comm import packing

_WAY_OF = packing.transfer_of


@contextmanager
def folder() -> Iterator[Path]:
    """A directory that all ranks see."""
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared, src=0)
        yield Path(shared[0])
        dist.barrier()


@contextmanager
def quiet(*kinds: type[Warning]) -> Iterator[None]:
    """Without warnings of these kinds, by default those that torch's own functions raise."""
    with warnings.catch_warnings():
        for kind in kinds or (FutureWarning, UserWarning):
            warnings.simplefilter("ignore", kind)
        yield


def zeroed(model: nn.Module) -> None:
    """Set every parameter, or this rank's part of it, to zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).zero_()


def in_place(message: int | None) -> None:
    """Let all buckets travel rank to rank, alone from `message` bytes on; None brings the usual limits back."""
    packing.transfer_of = _WAY_OF if message is None else partial(_WAY_OF, total=0, message=message)
