"""Ways to gather and to reduce a bucket on gloo, timed in turn: the table by which an engine chooses.

    python examples/benchmarks/collectives.py                # 2 and 4 ranks, about a minute

A bucket of float32 in eight parameters, each `[W, m]` when whole, of which rank r holds row r. A gather ends with every
parameter whole and contiguous; a reduction ends with this rank's rows of the sum. "p2p" is a send and a receive for
each other rank and parameter, straight from and into place. Milliseconds, medians; no bar.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from fake import all_gather, reduce_scatter
from measure import Cases, finish, in_turn, launch, make_mesh, parse, report
from torch import Tensor

PARAMETERS = 8
KIB = (64, 1024, 16 * 1024, 64 * 1024)  # of a whole bucket
RANKS = (2, 4)


class Bucket:
    """Tensors of one size: this rank's rows [PARAMETERS, m], whole parameters [PARAMETERS, W, m], room for messages."""

    def __init__(self, numel: int) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.others = [rank for rank in range(self.ranks) if rank != self.rank]
        m = numel // PARAMETERS // self.ranks
        self.rows = torch.arange(PARAMETERS * m, dtype=torch.float32).view(PARAMETERS, m) % 97 + self.rank
        self.whole = torch.zeros(PARAMETERS, self.ranks, m)
        self.grads = torch.arange(PARAMETERS * self.ranks * m, dtype=torch.float32).view(self.whole.shape) % 97
        self.reduced = torch.zeros(PARAMETERS, m)
        self.out, self.into = (torch.zeros(self.ranks, PARAMETERS, m) for _ in range(2))

    def copy_out(self) -> None:
        """[W, PARAMETERS, m] as received -> whole parameters."""
        for i in range(PARAMETERS):
            self.whole[i].copy_(self.into[:, i])

    def check(self, name: str) -> None:
        """Fail when an action did not leave what it should."""
        rank_of = torch.arange(self.ranks).view(1, self.ranks, 1)
        gathered = (self.rows - self.rank).unsqueeze(1) + rank_of
        if name.startswith("gather") and not torch.equal(self.whole, gathered):
            raise SystemExit(f"{name}: wrong values")
        if name.startswith("reduce") and not torch.equal(self.reduced, self.grads[:, self.rank] * self.ranks):
            raise SystemExit(f"{name}: wrong values")


def gather_flat(b: Bucket) -> None:
    """One all-gather, then a copy of every parameter to its place."""
    all_gather(b.into.view(-1), b.rows.view(-1))
    b.copy_out()


def gather_each(b: Bucket) -> None:
    """One all-gather a parameter, into its place."""
    works = [all_gather(whole.view(-1), rows, async_op=True) for whole, rows in zip(b.whole, b.rows, strict=True)]
    for work in works:
        work.wait()


def gather_all_to_all(b: Bucket) -> None:
    """An all-to-all of the shard repeated for every rank, then the same copies."""
    b.out.copy_(b.rows.expand_as(b.out))
    dist.all_to_all_single(b.into.view(-1), b.out.view(-1))
    b.copy_out()


def gather_p2p(b: Bucket) -> None:
    """Sends and receives straight into place."""
    moved(b, [(b.whole[i, other], b.rows[i], other, i) for other in b.others for i in range(PARAMETERS)])
    b.whole[:, b.rank].copy_(b.rows)


def reduce_flat(b: Bucket) -> None:
    """A copy of every parameter into one buffer, then one reduce-scatter."""
    b.out.copy_(b.grads.transpose(0, 1))
    reduce_scatter(b.reduced.view(-1), b.out.view(-1))


def reduce_all_to_all(b: Bucket) -> None:
    """The same buffer, an all-to-all, and the sum here."""
    b.out.copy_(b.grads.transpose(0, 1))
    dist.all_to_all_single(b.into.view(-1), b.out.view(-1))
    torch.sum(b.into, 0, out=b.reduced)


def reduce_p2p(b: Bucket) -> None:
    """Sends of slices of the gradients as they are, receives, and the sum here."""
    moved(b, [(b.into[other, i], b.grads[i, other], other, i) for other in b.others for i in range(PARAMETERS)])
    torch.add(b.grads[:, b.rank], b.into[b.others[0]], out=b.reduced)
    for other in b.others[1:]:
        b.reduced.add_(b.into[other])


def moved(b: Bucket, messages: Sequence[tuple[Tensor, Tensor, int, int]]) -> None:
    """Exchange messages (where to receive, what to send, with which rank, tag), all at once."""
    group = dist.group.WORLD
    assert group is not None
    works = [group.recv([into], other, tag) for into, _, other, tag in messages]
    works += [group.send([out], other, tag) for _, out, other, tag in messages]
    for work in works:
        work.wait()


WAYS: dict[str, Callable[[Bucket], None]] = {
    "gather: all-gather, copies": gather_flat,
    "gather: all-gather each": gather_each,
    "gather: all-to-all, copies": gather_all_to_all,
    "gather: p2p": gather_p2p,
    "reduce: reduce-scatter": reduce_flat,
    "reduce: all-to-all, sum": reduce_all_to_all,
    "reduce: p2p, sum": reduce_p2p,
}


def cases(quick: bool) -> Cases:
    """What to run, by name."""
    return {f"collectives, {ranks} ranks": partial(run_ranks, ranks, quick) for ranks in RANKS}


def run_ranks(ranks: int, quick: bool) -> str:
    """A table: how long every way takes for every size, the fastest way of each kind in bold."""
    sizes = KIB[:2] if quick else KIB
    found = launch(__file__, ranks, {"kib": ",".join(map(str, sizes))} | ({"rounds": 2} if quick else {}))
    medians = {(kib, way): 1e3 * statistics.median(s) for kib, of_size in found.items() for way, s in of_size.items()}
    header = [f"{ranks} ranks, ms", *(f"{kib} KiB" for kib in found)]
    lines = [header, ["---"] * len(header)]
    for way in WAYS:
        cells = []
        for kib in found:
            rivals = [medians[kib, other] for other in WAYS if other.split(":")[0] == way.split(":")[0]]
            shown = f"{medians[kib, way]:.3g}"
            cells.append(f"**{shown}**" if medians[kib, way] == min(rivals) else shown)
        lines.append([way, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def measure(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Size -> way -> seconds in every round."""
    found: dict[str, dict[str, list[float]]] = {}
    for kib in args.kib.split(","):
        bucket = Bucket(int(kib) * 256)
        for name, way in WAYS.items():
            bucket.whole.zero_()
            bucket.reduced.zero_()
            way(bucket)
            bucket.check(name)
        actions = {name: partial(_once, way, bucket) for name, way in WAYS.items()}
        found[kib] = in_turn(actions, args.rounds, args.warmup)
    return found


def _once(way: Callable[[Bucket], None], bucket: Bucket, round_: int) -> None:
    way(bucket)


def read_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options and their defaults."""
    return parse(__doc__, argv, kib=",".join(map(str, KIB)))


def main(argv: Sequence[str] | None = None) -> None:
    """Run every case, or be the worker of one."""
    args = read_options(argv)
    if not args.worker:
        report(cases(args.quick))
        return
    make_mesh("fsdp=-1")
    finish(args, measure(args))


if __name__ == "__main__":
    main()
