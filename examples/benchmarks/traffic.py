"""What one step sends, against the least that the plan allows: collectives issued and bytes received.

    python examples/benchmarks/traffic.py

Counted by `shardfn.testing.count_collectives` in forward and backward of a small decoder on two ranks, once the first
calls with their extra checks are over. The least is one gather of every bucket in the forward, one more of every bucket
but the root's in the backward, one reduction of every bucket, and one all-reduce of the loss.
"""

import argparse
from collections.abc import Sequence
from functools import partial

from contenders import make_batch, make_model
from measure import Cases, cases_or_worker, job_of, launch, parse
from results import Row
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from shardfn.testing import Collectives, count_collectives

SIZES = {"width": 128, "layers": 4, "vocab": 256, "head": 32, "tokens": 8, "warmup": 3}
RANKS = 2
# Width of the model -> what is compared: small buckets take one collective each, large ones may go from rank to rank.
FIGURES = {128: ("collectives", "bytes"), 512: ("bytes",)}
UNITS = {"collectives": ("collectives in a step", "", 1), "bytes": ("bytes received in a step", "MB", 1e6)}


def cases(quick: bool) -> Cases:
    """What to run, by name; as fast as it gets already."""
    return {f"bytes, width {width}": partial(run_count, width) for width in FIGURES}


def run_count(width: int) -> list[Row]:
    """A row for each figure that is compared at this width."""
    found = launch(__file__, RANKS, SIZES | {"width": width})
    rows = []
    for key in FIGURES[width]:
        what, unit, scale = UNITS[key]
        ours, least = ([found[name] / scale] for name in (key, f"least {key}"))
        what = f"{what}, {RANKS} ranks, width {width}"
        rows.append(Row(what=what, peer="least", unit=unit, ours=ours, theirs=least, bar=1.0))
    return rows


def measure(args: argparse.Namespace, mesh: DeviceMesh) -> dict[str, float]:
    """What a step issued and received, and the least of both."""
    job = job_of(args)
    model = make_model(job)
    params = sf.shard(model, mesh, sf.Policy())
    step = sf.value_and_grad(lambda p, x: sf.cross_entropy(sf.apply(model, p, x), x))
    for number in range(args.warmup):
        step(params, make_batch(job, number, mesh))
    with count_collectives() as counts:
        step(params, make_batch(job, args.warmup, mesh))
    buckets = [unit.name for unit in params.plan.units for _ in unit.buckets]
    loss_bytes = 4
    return {
        "collectives": counts.total,
        "least collectives": 2 * len(buckets) + len([unit for unit in buckets if unit]) + 1,
        "bytes": received_bytes(counts, mesh.size()),
        "least bytes": params.plan.comm_bytes + 2 * (mesh.size() - 1) / mesh.size() * loss_bytes,
    }


def received_bytes(counts: Collectives, ranks: int) -> float:
    """Bytes that each rank receives, from those that it offers: `counts` has the sizes of input tensors."""
    part = (ranks - 1) / ranks
    weights = {"all_gather": ranks - 1, "reduce_scatter": part, "all_to_all": part, "all_reduce": 2 * part}
    weights |= {"send": 0, "receive": 1}
    return sum(weights[kind] * size for kind, size in counts.bytes_of.items() if size)


def read_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options and their defaults."""
    return parse(__doc__, argv, **SIZES)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the case, or be its worker."""
    cases_or_worker(read_options(argv), cases, measure)


if __name__ == "__main__":
    main()
