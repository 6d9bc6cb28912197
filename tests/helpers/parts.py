"""What a rank has of a whole tensor, by a `Part`."""

import torch
from torch import Tensor

from shardfn.layout.partition import SAME, Part

RANKS = 2


def taken(whole: Tensor, part: Part | None, rank: int, ranks: int = RANKS) -> Tensor:
    """What a rank has of a whole tensor."""
    if part is None or part == SAME:
        return whole
    pieces, start = [], 0
    rank, second = divmod(rank, part.share)
    parts = ranks // part.share
    for outer, inner in part.runs:
        run = whole.narrow(part.dim, start, outer * inner * parts).unflatten(part.dim, (outer, parts, inner))
        pieces.append(run.select(part.dim + 1, rank).flatten(part.dim, part.dim + 1))
        start += outer * inner * parts
    mine = torch.cat(pieces, part.dim)
    return mine if part.second is None else mine.chunk(part.share, part.second)[second]
