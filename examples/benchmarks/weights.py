"""Peak resident memory of `load_safetensors` and `save_safetensors`, against shards and the largest parameter.

    python examples/benchmarks/weights.py               # every case, two to four minutes

One set of processes writes files; others, which never had anything else, read them into shards and write them again,
and both times the files must be equal to the byte. A rank's figure is the highest resident memory that Linux saw
(`VmHWM`) in either, less what was resident before, after the same with a tiny model; a case's figure is that of its
largest rank. Beside it stands what the shards of a rank take and the largest parameter, whole.
"""

import argparse
import gc
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import RULES, fill_, make_model
from measure import Cases, cases_or_worker, job_of, launch, parse
from memory import status_bytes
from results import Row
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf

SIZES = {"width": 768, "layers": 6, "vocab": 32000, "meta": True}  # 92M parameters, of which the table has 25M
BAR = 1.10
MESHES = ("fsdp=2,tp=2", "fsdp=4,tp=1", "fsdp=1,tp=4")


def cases(quick: bool) -> Cases:
    """What to run, by name."""
    return {
        f"weights, {mesh}": partial(run_case, mesh, quick) for mesh in ("fsdp=2,tp=2", "fsdp=4,tp=1", "fsdp=1,tp=4")
    }


def run_case(mesh: str, quick: bool) -> list[Row]:
    """A row for reading and one for writing."""
    options: dict[str, Any] = SIZES | ({"width": 128, "layers": 2, "head": 32, "vocab": 256} if quick else {})
    with tempfile.TemporaryDirectory() as folder:
        options |= {"mesh": mesh, "folder": folder}
        launch(__file__, 4, options | {"part": "make"})
        found = launch(__file__, 4, options | {"part": "measure"})
        files = sorted(Path(folder, "made").iterdir())
        for file in files:
            if file.read_bytes() != Path(folder, "again", file.name).read_bytes():
                raise AssertionError(f"{file.name} is not what it was")
    return [
        Row(
            what=f"{verb} {sum(found['leaves']) / 1e6:.0f} MB of safetensors, {mesh}",
            peer="shards and largest parameter",
            unit="MB",
            ours=[found[verb] / 1e6],
            theirs=[(found["resting"] + max(found["leaves"])) / 1e6],
            bar=BAR,
        )
        for verb in ("load", "save")
    ]


def measure(args: argparse.Namespace, mesh: DeviceMesh) -> dict[str, Any]:
    """Write files, or bytes that reading and writing them take at their peaks on the rank that takes most."""
    job, folder = job_of(args), Path(args.folder)
    policy = sf.Policy(rules=RULES, sizes={"d": job.head})
    if args.part == "make":
        model = make_model(job)
        sf.checkpoint.save_safetensors(
            folder / "made", model, sf.shard(model, mesh, policy, init=fill_), max_shard_size="99MB"
        )
        return {}
    tiny = make_model(replace(job, width=4 * job.head, layers=1, vocab=64))
    sf.checkpoint.save_safetensors(folder / "tiny", tiny, sf.shard(tiny, mesh, policy, init=fill_))
    sf.checkpoint.load_safetensors(folder / "tiny", tiny, mesh, policy)
    model = make_model(job)
    before = _start()
    params = sf.checkpoint.load_safetensors(folder / "made", model, mesh, policy)
    load = status_bytes("VmHWM") - before
    _start()
    sf.checkpoint.save_safetensors(folder / "again", model, params, max_shard_size="99MB")
    peaks = torch.tensor([load, status_bytes("VmHWM") - before])
    dist.all_reduce(peaks, dist.ReduceOp.MAX)
    leaves = [layout.numel * layout.dtype.itemsize for layout in params.plan.layouts.values()]
    resting = sum(leaf.to_local().nbytes for leaf in params.values())
    return {"load": int(peaks[0]), "save": int(peaks[1]), "leaves": leaves, "resting": resting}


def _start() -> int:
    """Bytes that are resident now, from which the next peak is counted."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def main(argv: Sequence[str] | None = None) -> None:
    """Run every case, or be the worker of one."""
    cases_or_worker(parse(__doc__, argv, **SIZES, folder="", part="measure"), cases, measure)


if __name__ == "__main__":
    main()
