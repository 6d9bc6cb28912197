"""Small all-reduces on gloo, as messages from every rank to every other one.

[Note: small collectives]
Gloo runs a collective in a thread of its own, and an all-reduce takes 2 (W - 1) turns there, one after the other. While
all cores compute, each turn waits for one of them to be free: in the step of a Llama on 2 x 2 an all-reduce of 128 KiB
over two ranks took 2.6 ms after the last of them had come, and 1.4 ms as messages, which are sent by the thread that
calls and take one turn. With nothing else to do 32 KiB take 1.2 and 0.4 ms over two ranks, 2.6 and 0.6 ms over four.
What a rank sends grows from 2 (W - 1) / W times the tensor to W - 1 times, so that large tensors are left to gloo.
So are gathers and all-to-alls, which gloo sends in fewer turns: as messages they took longer (docs/design.md).

It is one operator, so that whoever counts or traces operations sees the collective and not its messages. It takes the
name of a group, `sum_(x, group.group_name)`.
"""

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from shardfn._torch import group_named, has_no_memory

_LARGEST = 2**21  # bytes that a rank sends; gloo is as fast above
_TAG = 2**30  # of messages; others of a group have small ones
CALLS: Counter[str] = Counter()  # by group


def serves(x: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether to do it here, where a rank sends all of x to every other one; the same answer on all ranks."""
    if torch.compiler.is_compiling() or has_no_memory() or x.device.type != "cpu":
        return False  # before its size is asked for, which in a graph may be a symbol
    sent = (group.size() - 1) * x.nbytes
    return 0 < sent <= _LARGEST and "cpu:gloo" in dist.get_backend_config(group)


def _all_reduce_(x: Tensor, name: str) -> None:
    """`sum_`: overwrites a contiguous x with its sum over ranks, added up in rank order, 16-bit floats in float32."""
    group = group_named(name)
    CALLS[name] += 1
    rows, others = [torch.empty_like(x) for _ in range(group.size())], [*range(group.size())]
    rows[others.pop(group.rank())] = x
    works = [group.recv([rows[rank]], rank, _TAG) for rank in others]
    works += [group.send([x], rank, _TAG) for rank in others]
    for work in works:
        work.wait()
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    total = torch.add(rows[0].to(wide), rows[1])
    for row in rows[2:]:
        total.add_(row)
    x.copy_(total)


_operators = torch.library.Library("shardfn", "FRAGMENT")
_operators.impl(_operators.define("all_reduce_(Tensor(a!) x, str group) -> ()"), _all_reduce_, "CPU")

sum_ = torch.ops.shardfn.all_reduce_
