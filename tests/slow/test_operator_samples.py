"""Random programs of torch's own samples of operators, on parts: each rank has what is said that it has.

A program begins with tensors of which a rank has a part, or a summand, and does what `torch.testing` knows as samples
of operators, in place and not, with whatever it has made. It needs no process: two runs stand for two ranks. What is
refused is left out, and so is what computes with random numbers, other precisions, or results that are one of several.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from parts import RANKS, taken
from torch import Tensor
from torch.testing._internal.opinfo import core

from shardfn import ShardError
from shardfn._torch import pytree
from shardfn.comm.collective_autograd import watched
from shardfn.layout.partition import SUM, Part, Tag, even
from shardfn.parallel import Adjustments
from shardfn.trace.function_mode import PairedFunctionMode
from shardfn.trace.interpreter import Interpreter
from shardfn.trace.paired_sizes import Paired, local_of

LEFT_OUT = (
    "rand bernoulli dropout multinomial normal empty rrelu uniform cauchy exponential geometric half bfloat16 "
    "float svd eig qr lstsq pinv lobpcg householder ormqr geqrf cholesky lu ldl pca sparse stft item jiterator "
    "resize set_ solve inv det matrix_rank cond segment embedding_bag ctc masked. signal special polygamma "
    "unique hist bucketize searchsorted masked_select nonzero argwhere equal allclose scaled_dot pixel "
    "grid_sample max_unpool fractional multi_head nested meshgrid complex polar imag real angle fft conj cfloat "
    "cdouble view_as batch_norm indices_backward"
).split()
SHAPES = (((4, 4), (4, 4), (4,)), ((4, 4, 4), (4, 4, 4)), ((4, 4), (4,), (4, 4, 4)), ((2, 3, 4, 4), (2, 3, 4, 4)))
Kind = tuple[tuple[int, ...], torch.dtype]
Parts = Sequence[Part | None]


class Sample(NamedTuple):
    """An operator, and arguments of it."""

    name: str
    fn: Callable[..., Any]
    leaves: list[Any]
    structure: Any

    def made(self, registers: Sequence[Tensor], picks: Sequence[int]) -> list[Tensor]:
        """The results, with registers in place of the tensors."""
        picked = iter(picks)
        given = [registers[next(picked)] if isinstance(x, Tensor) else x for x in self.leaves]
        input, args, kwargs = pytree.tree_unflatten(given, self.structure)
        return [x for x in pytree.tree_leaves(self.fn(input, *args, **kwargs)) if isinstance(x, Tensor)][:3]


Program = list[tuple[Sample, tuple[int, ...]]]


def _kind(x: Tensor) -> Kind:
    return tuple(x.shape), x.dtype


@cache
def samples() -> dict[Kind, list[list[Sample]]]:
    """By the kind of each tensor that they take, those of each operator; sizes are even, so that they split."""
    core.S, core.M, core.L, core.XS = 4, 6, 8, 2
    from torch.testing._internal.common_methods_invocations import op_db

    found: dict[Kind, dict[str, list[Sample]]] = {}
    for op in op_db:
        if torch.float64 not in op.dtypes or any(name in op.name for name in LEFT_OUT):
            continue
        try:
            some = list(islice(op.sample_inputs("cpu", torch.float64), 60))
        except (RuntimeError, IndexError):  # of other sizes than those it was written for
            continue
        for one in Random(op.name).sample(some, min(12, len(some))):
            leaves, structure = pytree.tree_flatten((one.input, one.args, one.kwargs))
            tensors = [x for x in leaves if isinstance(x, Tensor)]
            if sum(x.numel() for x in tensors) <= 400:
                for fn in filter(None, (op.op, op.inplace_variant)):
                    for kind in dict.fromkeys(map(_kind, tensors)):
                        sample = Sample(op.name, fn, leaves, structure)
                        found.setdefault(kind, {}).setdefault(op.name, []).append(sample)
    return {kind: list(by_name.values()) for kind, by_name in found.items()}


def _part(x: Tensor, draw: Random) -> Part | None:
    ways: list[Part] = [SUM]
    for dim, size in enumerate(x.shape):
        ways += [even(dim, size // RANKS)] * (size % RANKS == 0) + [Part("split", dim, ((2, 1),))] * (size == 4)
    return draw.choice(ways) if draw.random() < 0.75 else None


def _own(x: Tensor, part: Part | None, rank: int) -> Tensor:
    return x * (0.25 if rank else 0.75) if part == SUM else taken(x, part, rank).clone()


def on_rank(
    start: Sequence[Tensor], parts: Parts, program: Program, rank: int
) -> tuple[list[Tensor], list[Any]] | None:
    """What a rank makes, and what is said of each; None where that is refused, or another run would do otherwise."""
    run = Interpreter({"tp": RANKS})
    with run.sides.run():
        registers: list[Tensor] = []
        for x, part in zip(start, parts, strict=True):
            own = _own(x, part, rank)
            registers.append(own if own.shape == x.shape else Paired(own, x.clone()))
            run.mark(registers[-1], Tag({"tp": part} if part is not None else {}))
        with run, PairedFunctionMode(run), watched(run.note_collective):
            for sample, picks in program:
                try:
                    registers += sample.made(registers, picks)
                except (ShardError, RuntimeError, IndexError, ValueError, TypeError, AssertionError):
                    return None
                if run.problems or run.found != Adjustments() or run.sides.decided:
                    return None
        return [local_of(x) for x in registers], [run.tag(x).parts.get("tp") for x in registers]


def in_one(start: Sequence[Tensor], program: Program) -> list[Tensor]:
    registers = [x.clone() for x in start]
    for sample, picks in program:
        registers += sample.made(registers, picks)
    return registers


def drawn(seed: int) -> tuple[list[Tensor], Parts, Program]:
    """A program of up to four operators, each of which is served."""
    draw = Random(seed)
    torch.manual_seed(seed)
    start = [torch.randn(*shape, dtype=torch.float64) for shape in draw.choice(SHAPES)]
    parts, program = [_part(x, draw) for x in start], Program()
    for _ in range(14):
        registers = in_one(start, program)
        known = samples().get(_kind(draw.choice(registers[-5:])))
        if known is None or len(program) == 4:
            continue
        sample = draw.choice(draw.choice(known))
        like = [
            [i for i, r in enumerate(registers) if _kind(r) == _kind(x)] for x in sample.leaves if isinstance(x, Tensor)
        ]
        if not all(like):
            continue
        longer = [*program, (sample, tuple(draw.choice(some[-4:]) for some in like))]
        try:
            made = in_one(start, longer)
        except (RuntimeError, IndexError, ValueError, TypeError):
            continue
        finite = all(bool(x.isfinite().all()) and x.numel() < 2000 for x in made if x.is_floating_point())
        if finite and (told := on_rank(start, parts, longer, 0)) is not None:
            lost = all(part is not None and part.kind == "lost" for part in told[1][len(registers) :])
            program = longer if not lost or draw.random() < 0.1 else program
    return start, parts, program


def wrong(seed: int) -> str | None:
    """What is not as it is said, in a program."""
    start, parts, program = drawn(seed)
    ranks = [on_rank(start, parts, program, rank) for rank in range(RANKS)]
    expected = in_one(start, program)
    text = f"seed {seed}: {[(tuple(x.shape), part) for x, part in zip(start, parts, strict=True)]}, then " + ", ".join(
        f"{sample.name}{picks}" for sample, picks in program
    )
    for at, one in enumerate(expected):
        if any(rank is None or len(rank[0]) != len(expected) for rank in ranks):
            return f"{text}: not the same on both ranks"
        values, (said, other) = zip(*((rank[0][at], rank[1][at]) for rank in ranks if rank is not None), strict=True)
        if said is not None and said.kind == "lost" and other is not None and other.kind == "lost":
            continue
        if said != other:
            return f"{text}: of result {at} {said} is said on one rank, {other} on the other"
        if said == SUM:
            values, said = (values[0] + values[1],), None
        for rank, value in enumerate(values if one.numel() else ()):
            mine = taken(one, said, rank)
            if value.shape != mine.shape or not torch.allclose(value, mine, rtol=1e-7, atol=1e-9, equal_nan=True):
                return f"{text}: result {at} is not {said or 'that of one process'}"
    return None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seeds", [range(200), range(200, 400)], ids=str)
def test_ranks_have_what_is_said(seeds: range) -> None:
    found = [text for seed in seeds if (text := wrong(seed)) is not None]
    assert not found, "\n".join(found)
