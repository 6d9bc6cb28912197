"""Every family of transformers with a tensor-parallel plan, on 2 x 2 ranks, against the model on one rank.

    python tests/slow/sweep.py                       # all of them, some minutes
    python tests/slow/sweep.py llama deepseek_v3     # these
    python tests/slow/sweep.py --table               # and the table of docs/howto/transformers.md at the end
    python tests/slow/sweep.py --mesh fsdp=1,tp=4    # on other ranks
    python tests/slow/sweep.py --sequence            # with activations split along the sequence

A model is *served* when loss, outputs and every gradient are those of one rank, to 1e-9 in float64. It is *refused*
with a ShardError, whose reason is one of `REASONS`. Anything else is a fault of this library: *wrong* numbers, or a
*crash*.
"""

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import argparse
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import tiny_configs
import torch
from families import InDouble
from torch import Tensor, nn
from trials import found_of

import shardfn as sf
from shardfn._torch import pytree
from shardfn.parallel.wiring import boundaries
from shardfn.testing import RankError, run

MESH = {"fsdp": 2, "tp": 2}
TOLERANCE = 1e-9
VERDICTS = ("served", "refused", "wrong", "crashed")
SECONDS = 120.0  # for one model; a hang counts as a crash

# What a refusal may say, by the text of its error; the first that is found counts.
REASONS = {
    "a style that is not known here": r"style '\w+' is (not known here|for linears)",
    "sizes that do not divide, or clash": r"^plan: |has \d+ parts by '",
    "a forward that reads values which depend on weights": r"on whole weights, failed in|made of floats are not known",
    "a size that is not taken from the tensors": "that one rank has over",
    "a part that cannot be told": r"cannot be told which part|\(lost\)|already split over|in pieces",
    "a shared value that meets a split one": r"gradients would be partial sums|is the same on all ranks of",
}


@dataclass(frozen=True)
class Result:
    """What became of one model type: `verdict` is served, refused, wrong or crashed."""

    model_type: str
    verdict: str
    reason: str = ""  # of a refusal: a key of REASONS
    detail: str = ""
    split: float = 0.0  # the share of the weights that is split over tp; of blocks whose positions are, with --sequence
    seconds: float = 0.0


def names(chosen: Sequence[str] = ()) -> list[str]:
    """The model types that have a model."""
    return [name for name in chosen or tiny_configs.names() if name not in tiny_configs.NO_MODEL]


def reason_of(message: str) -> str:
    """The reason of a refusal, empty when it is none of `REASONS`."""
    return next((reason for reason, text in REASONS.items() if re.search(text, message, re.MULTILINE)), "")


def sweep(chosen: Iterable[str], mesh: Mapping[str, int] = MESH, sequence: bool = False) -> Iterator[Result]:
    """Try one model type after the other on one pool of ranks."""
    for name in chosen:
        start = time.perf_counter()
        try:
            ranks = run(compared, name, dict(mesh), sequence, ranks=prod(mesh.values()), timeout=SECONDS)
            result = max(ranks, key=lambda result: VERDICTS.index(result.verdict))
        except RankError as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            result = Result(name, "crashed", detail=" | ".join(lines[-3:])[:400])
        yield replace(result, seconds=time.perf_counter() - start)


def compared(name: str, axes: Mapping[str, int], sequence: bool = False) -> Result:
    """One model type on this rank: sharded and on one rank. Collective."""
    warnings.simplefilter("ignore")
    try:
        return _compared(name, axes, sequence)
    except Exception as error:  # an error on some ranks only is a hang on the others, which the time limit ends
        return Result(name, "crashed", detail=f"{type(error).__name__}: {error}")


def _compared(name: str, axes: Mapping[str, int], sequence: bool) -> Result:
    mesh = sf.make_mesh("cpu", **axes)
    model = tiny_configs.make(name).double().eval()
    inputs, ids = tiny_configs.batch(name)
    local, local_ids = sf.data.local_batch((inputs, ids), mesh)
    with InDouble():
        expected = _whole(name, model, inputs, ids, local)
        try:
            params = sf.shard(model, mesh, sf.policies.from_transformers(model, sequence_parallel=sequence))
            found = _sharded(name, model, params, local, local_ids)
        except sf.ShardError as error:
            return Result(name, "refused", reason_of(str(error)), str(error))
    first = sorted(expected, key=lambda key: not key.startswith(("loss", "output")))
    wrong = [text for key in first if (text := _difference(key, found.get(key), expected[key]))]
    verdict = "wrong" if wrong else "served"
    split = _share_of_blocks(model, params.plan) if sequence else _share(params.plan)
    return Result(name, verdict, detail="; ".join(wrong[:4]), split=split)


def _whole(name: str, model: nn.Module, inputs: Any, ids: Tensor, local: Any) -> dict[str, Tensor]:
    """Loss, gradients, and the outputs for this rank's part of the batch, without sharding."""
    loss = tiny_configs.loss(name, model(**inputs), ids)
    loss.backward()
    named = model.named_parameters(remove_duplicate=False)
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named}
    model.zero_grad()
    with torch.no_grad():
        return found | {"loss": loss.detach()} | _outputs(model(**local))


def _sharded(name: str, model: nn.Module, params: sf.Params, local: Any, ids: Tensor) -> dict[str, Tensor]:
    def loss_fn(params: sf.Params) -> tuple[Tensor, dict[str, Tensor]]:
        out = sf.apply(model, params, **local)
        return tiny_configs.loss(name, out, ids), _outputs(out)

    (loss, outputs), grads = sf.value_and_grad(loss_fn, has_aux=True)(params)
    return sf.gather(grads) | {"loss": loss.detach()} | outputs


def _outputs(out: Any) -> dict[str, Tensor]:
    leaves = pytree.tree_leaves(dict(out) if hasattr(out, "keys") else out)
    tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
    return {f"output {at}": tensor for at, tensor in enumerate(tensors)}


def _difference(key: str, found: Tensor | None, expected: Tensor) -> str:
    """How far a value is from what it should be, empty when it is there."""
    if found is None or found.shape != expected.shape:
        return f"{key}: shape {None if found is None else tuple(found.shape)}, expected {tuple(expected.shape)}"
    if not expected.is_floating_point():
        return "" if torch.equal(found, expected) else f"{key}: other integers"
    off = ((found - expected).abs() / expected.abs().clamp(min=1)).nan_to_num(torch.inf)
    both_nan = found.isnan() & expected.isnan()
    worst = float(off.masked_fill(both_nan, 0).max()) if off.numel() else 0.0
    return f"{key}: off by {worst:.1e}" if worst > TOLERANCE else ""


def _share(plan: sf.Plan) -> float:
    sizes = [(layout, torch.Size(layout.shape).numel()) for layout in plan.layouts.values()]
    return sum(n for layout, n in sizes if "tp" in layout.axes) / sum(n for _, n in sizes)


def _share_of_blocks(model: nn.Module, plan: sf.Plan) -> float:
    """Of the blocks whose activations `Policy.acts` splits, those within which anything is."""
    found = found_of(model)
    steps = {step.path for step in found.inputs | found.outputs} | {path for path, _, _ in found.scattered}
    blocks = boundaries(plan)
    split = [
        block for block in blocks if block not in found.entries and any(f"{p}.".startswith(f"{block}.") for p in steps)
    ]
    return len(split) / len(blocks)


def table(results: Sequence[Result]) -> str:
    """What the documentation shows, as markdown."""
    counts = Counter(result.verdict for result in results)
    rows = {
        "served, 90 % and more of the weights split over `tp`": [r for r in _served(results) if r.split >= 0.9],
        "served, 50 to 90 %": [r for r in _served(results) if 0.5 <= r.split < 0.9],
        "served, less": [r for r in _served(results) if r.split < 0.5],
    }
    for reason in REASONS:
        rows[f"refused: {reason}"] = [r for r in results if r.verdict == "refused" and r.reason == reason]
    lines = [", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS), "", "| | model types |", "|---|---|"]
    lines += [
        f"| {row}: {len(found)} | {', '.join(r.model_type for r in found)} |" for row, found in rows.items() if found
    ]
    return "\n".join(lines)


def _served(results: Sequence[Result]) -> list[Result]:
    return [result for result in results if result.verdict == "served"]


def _line(result: Result) -> str:
    reason = f"{result.reason or 'no known reason'}: " if result.verdict == "refused" else ""
    detail = (reason + result.detail).replace("\n", " | ")[:300]
    return f"{result.model_type:38} {result.verdict:8} {result.split:4.0%} {result.seconds:6.1f} s  {detail}"


def _mesh(text: str) -> dict[str, int]:
    return {axis: int(size) for axis, size in (part.split("=") for part in text.split(","))}


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; 1 when anything is wrong, crashed, or refused without a reason."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model_types", nargs="*")
    parser.add_argument("--table", action="store_true", help="print the table of the documentation")
    parser.add_argument("--mesh", type=_mesh, default=MESH, help="sizes of fsdp and tp")
    parser.add_argument("--sequence", action="store_true", help="split activations along the sequence")
    args = parser.parse_args(argv)
    results: list[Result] = []
    for result in sweep(names(args.model_types), args.mesh, args.sequence):
        results.append(result)
        print(_line(result), flush=True)
    print(dict(Counter(result.verdict for result in results)))
    if args.table:
        print(table(results))
    return int(any(r.verdict in ("wrong", "crashed") or (r.verdict == "refused" and not r.reason) for r in results))


if __name__ == "__main__":
    sys.exit(main())
