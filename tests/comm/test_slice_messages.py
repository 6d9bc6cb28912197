"""`comm/slice_messages.py`: what is sent arrives in its place, in parcels of any size, with views of any kind."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardfn.comm import slice_messages
from shardfn.comm.slice_messages import Shipment, exchange_slices
from shardfn.testing import count_collectives, run

DTYPES = (torch.uint8, torch.complex128, torch.float16, torch.float32, torch.float8_e5m2, torch.int64, torch.bool)


def value(source: int, target: int, number: int) -> Tensor:
    """What one rank has for another, in a view that is not contiguous."""
    x = torch.arange(30).view(5, 6) + 7 * source + 3 * target + number
    return x.to(torch.float32).to(DTYPES[number % len(DTYPES)])[:, ::2]


def all_to_all_on_a_rank(parcel: int, ranks: int) -> dict[str, int]:
    patch, me = pytest.MonkeyPatch(), dist.get_rank()
    patch.setattr(slice_messages, "PARCEL", parcel)
    # To itself nothing; between some nothing either, and not as much each way.
    pairs = [(a, b, n) for a in range(ranks) for b in range(ranks) if a != b and (a + b) % 3 for n in range(a + 3 * b)]
    places = {(a, n): torch.empty_like(value(a, me, n), dtype=torch.float64) for a, b, n in pairs if b == me}
    sends = [Shipment(b, value(a, b, n), travels(a, b, n)) for a, b, n in pairs if a == me]
    receives = [Shipment(a, places[a, n], travels(a, b, n)) for a, b, n in pairs if b == me]
    with count_collectives() as counts:
        exchange_slices(sends, receives, range(ranks), torch.device("cpu"))
    patch.undo()
    for (a, n), got in places.items():
        assert got.equal(value(a, me, n).to(travels(a, me, n)).double()), (a, n)
    assert counts.bytes_of.get("receive", 0) == sum(x.nbytes for x in receives)
    return counts.as_dict()


def travels(source: int, target: int, number: int) -> torch.dtype:
    dtype = DTYPES[number % len(DTYPES)]
    return torch.float32 if dtype.is_complex else dtype


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("parcel", [1, 16, 40, 2**22])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_slice_arrives(parcel: int, ranks: int) -> None:
    found: Any = run(all_to_all_on_a_rank, parcel, ranks, ranks=ranks)
    total = sum(map(Counter, found), Counter())
    assert total["send"] == total["receive"] and total.keys() == {"send", "receive"}
    pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b and (a + b) % 3 and a + 3 * b]
    assert parcel < 2**22 or total["send"] == len(pairs), "what fits goes in one message"
