"""Random models, rules and meshes for the laws: drawn by hypothesis in the parent, sent to ranks in batches.

A `Case` is plain data. A rule is drawn together with the shape that it fits: every size has a name made of it (`n6`),
so that names agree over a model by construction.
"""

import math
import re
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import shardfn as sf
from shardfn._torch import unwrap_local
from shardfn.layout.mesh import roles
from shardfn.layout.policy import BATCH_AXES
from shardfn.testing import run

FLOATS = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
INTS = ("uint8", "int8", "int16", "int32", "int64")
OTHERS = ("bool", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
DTYPES = (*FLOATS, *COMPLEX, *INTS, *OTHERS)
MESHES: dict[int, tuple[tuple[tuple[str, int], ...], ...]] = {
    1: ((("fsdp", 1),), (("tp", 1),), (("fsdp", 1), ("tp", 1))),
    2: ((("fsdp", 2),), (("tp", 2),), (("fsdp", 2), ("tp", 1)), (("dp", 1), ("tp", 2)), (("replicate", 2),)),
    3: ((("fsdp", 3),), (("tp", 3),), (("fsdp", 3), ("tp", 1)), (("tp", 3), ("dp", 1))),
    4: (
        (("fsdp", 4),),
        (("tp", 4),),
        (("fsdp", 2), ("tp", 2)),
        (("tp", 2), ("fsdp", 2)),
        (("dp", 2), ("tp", 2)),
        (("replicate", 2), ("fsdp", 2)),
        (("dp_shard", 2), ("fsdp", 2)),
        (("tp", 2), ("cp", 2)),
        (("fsdp", 4), ("tp", 1)),
        (("fsdp", 1), ("tp", 4)),
    ),
}
# Drawing a whole case takes long and many choices; that is what is wanted. tests/conftest.py says how many examples.
ANY_COST = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)
PROPERTY = settings(derandomize=True, database=None, deadline=None, suppress_health_check=ANY_COST)
Axes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Layouts:
    """A mesh and the arguments of a policy; `rules[i]` is None where the default applies."""

    axes: Axes
    rules: tuple[str | None, ...]
    pad: int
    default: Literal["auto", "replicate"]
    min_size: int

    def policy(self) -> sf.Policy:
        return sf.Policy(
            rules={f"t{i}": rule for i, rule in enumerate(self.rules) if rule is not None},
            sizes={f"{kind}{size}": size for kind in "np" for size in range(10)},
            pad={f"p{size}": self.pad for size in range(10)},
            default=self.default,
            min_size=self.min_size,
            compute={"**": whole_forward} if any(self.rules) else {},
        )

    def mesh(self) -> DeviceMesh:
        return mesh_of(self.axes)


@dataclass(frozen=True)
class Case:
    """Tensors `t0`, `t1`... and layouts for them."""

    seed: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    layouts: tuple[Layouts, ...]
    module: bool
    tied: bool
    strided: bool = False  # no tensor of more than one element is contiguous
    trains: bool = True

    @property
    def ranks(self) -> int:
        return math.prod(size for _, size in self.layouts[0].axes)

    def tensors(self) -> dict[str, Tensor]:
        """Random bits of every dtype, NaN and infinity included; the same on every rank."""
        generator = torch.Generator().manual_seed(self.seed)
        out = {}
        for i, (shape, name) in enumerate(zip(self.shapes, self.dtypes, strict=True)):
            dtype = getattr(torch, name)
            count = math.prod(shape) * dtype.itemsize
            data = torch.randint(0, 2 if name == "bool" else 256, (count,), dtype=torch.uint8, generator=generator)
            whole = data.view(dtype).reshape(shape)
            out[f"t{i}"] = _odd_view(whole) if self.strided else whole
        return out

    def whole_numbers(self, seed: int) -> dict[str, Tensor]:
        """Values whose sums are exact in every dtype."""
        generator = torch.Generator().manual_seed(1000 * self.seed + seed)
        shapes = zip(self.shapes, self.dtypes, strict=True)
        drawn = [torch.randint(0, 5, shape, generator=generator).to(getattr(torch, dtype)) for shape, dtype in shapes]
        return {f"t{i}": x for i, x in enumerate(drawn)}

    def model(self) -> nn.Module | dict[str, Tensor]:
        """A module with a tied parameter, or a mapping."""
        tensors = self.tensors()
        trained = {name for name, x in tensors.items() if self.trains and (x.is_floating_point() or x.is_complex())}
        if not self.module:
            return {name: x.requires_grad_(name in trained) for name, x in tensors.items()}
        model = nn.Module()
        for name, tensor in tensors.items():
            model.register_parameter(name, nn.Parameter(tensor, requires_grad=name in trained))
        if self.tied:
            model.register_module("child", nn.Module())
            model.get_submodule("child").register_parameter("again", model.get_parameter("t0"))
        return model


def _odd_view(whole: Tensor) -> Tensor:
    """The same numbers as every second one of a transposed tensor, which is conjugated if it is complex."""
    memory = torch.empty((*reversed(whole.shape), 2), dtype=whole.dtype)
    view = memory[..., 0].permute(tuple(reversed(range(whole.dim()))))
    return view.copy_(whole.conj()).conj() if whole.is_complex() else view.copy_(whole)


def whole_forward(*args: object) -> None:
    """Stands for a parallel forward, so that any parameter may be split over a compute axis."""


@cache
def mesh_of(axes: Axes) -> DeviceMesh:
    """One mesh for all cases of a rank: process groups are expensive."""
    names, sizes = zip(*axes, strict=True)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


# Drawing


@st.composite
def factors_of(draw: st.DrawFn, size: int) -> list[int]:
    """Sizes of one to three factors whose product is `size`."""
    out = [size]
    for _ in range(draw(st.integers(0, 2))):
        last = out.pop()
        ways = [k for k in range(1, 10) if last % k == 0] if last else list(range(10))
        first = draw(st.sampled_from(ways))
        out += [first, last // first if first else draw(st.integers(0, 9))]
    return out


@st.composite
def rules(draw: st.DrawFn, shape: tuple[int, ...], axes: Axes, pad: int) -> str:
    """A valid rule for a tensor of `shape`."""
    sizes, role = dict(axes), roles([name for name, _ in axes], BATCH_AXES)
    fused = draw(st.integers(0, len(shape) - 1)) if shape and draw(st.integers(0, 3)) == 0 else None
    dims: list[list[list[int]]] = []  # dim, block, factor
    for at, size in enumerate(shape):
        parts = [size]
        if at == fused:
            first = draw(st.integers(0, size))
            parts = [first, size - first]
        simple = at != fused and draw(st.booleans())
        dims.append([[part] if simple else draw(factors_of(part)) for part in parts])
    where: dict[tuple[int, int, int], list[str]] = {}
    for axis in (*role.compute, *role.shardable):
        if dims and draw(st.integers(0, 3)):
            dim = draw(st.integers(0, len(dims) - 1))
            for b, block in enumerate(dims[dim]):
                if len(dims[dim]) == 1 or draw(st.integers(0, 3)):
                    where.setdefault((dim, b, draw(st.integers(0, len(block) - 1))), []).append(axis)
    text = []
    for d, blocks in enumerate(dims):
        parts = []
        for b, block in enumerate(blocks):
            words = []
            for f, size in enumerate(block):
                mine = where.get((d, b, f), [])
                ways = math.prod(sizes[axis] for axis in mine if axis in role.compute)
                anonymous = len(blocks) == len(block) == 1 and draw(st.integers(0, 4)) == 0
                name = "_" if anonymous else draw(st.sampled_from([f"n{size}", str(size), f"p{size}"]))
                real = -(-size // pad) * pad if name.startswith("p") else size
                optional = bool(mine) and draw(st.integers(0, 4)) == 0
                if real % ways and not optional:
                    optional = draw(st.booleans())
                    mine = mine if optional else [axis for axis in mine if axis not in role.compute]
                words.append(name + "".join(f"@{axis}" for axis in mine) + ("?" if optional else ""))
            label = f"b{b}: " if len(blocks) > 1 and draw(st.booleans()) else ""
            parts.append(label + " ".join(words))
        text.append(parts[0] if len(blocks) == len(blocks[0]) == 1 else f"({' + '.join(parts)})")
    return " ".join(text)


@st.composite
def layouts_for(draw: st.DrawFn, shapes: Sequence[tuple[int, ...]], ranks: int) -> Layouts:
    axes = draw(st.sampled_from(MESHES[ranks]))
    pad = draw(st.sampled_from([1, 2, 3, 4]))
    chosen = tuple(draw(rules(shape, axes, pad)) if draw(st.integers(0, 4)) else None for shape in shapes)
    defaults: list[Literal["auto", "replicate"]] = ["auto", "auto", "replicate"]
    default = draw(st.sampled_from(defaults))
    return Layouts(axes, chosen, pad, default, draw(st.sampled_from([0, 0, 5])))


@st.composite
def cases(draw: st.DrawFn, layouts: int = 1, dtypes: Sequence[str] = DTYPES) -> Case:
    ranks = draw(st.sampled_from([1, 2, 3, 4, 4]))
    count = draw(st.integers(1, 3))
    ndims = [draw(st.integers(0, 4)) for _ in range(count)]
    shapes = tuple(tuple(draw(st.integers(0, 9)) for _ in range(ndim)) for ndim in ndims)
    kinds = tuple(draw(st.sampled_from(list(dtypes))) for _ in range(count))
    chosen = tuple(draw(layouts_for(shapes, ranks)) for _ in range(layouts))
    flags = [draw(st.booleans()) for _ in range(4)]
    return Case(draw(st.integers(0, 10**6)), shapes, kinds, chosen, *flags)


@st.composite
def moves(draw: st.DrawFn, dtypes: Sequence[str] = DTYPES) -> tuple[Case, Case]:
    """The same tensors twice, in other layouts on as many ranks as ever."""
    before = draw(cases(dtypes=dtypes))
    after = draw(layouts_for(before.shapes, draw(st.sampled_from([1, 2, 3, 4]))))
    return before, replace(before, layouts=(after,), strided=draw(st.booleans()))


# Running


# How many examples the test that runs has had; tests/conftest.py begins at zero, and prints it.
EXAMPLES = Counter[str]()


FEW, MORE = 50, 200  # examples of a property in `make test`, in `make test-all`


def fewer_everyday(share: float, in_all: float = 1.0) -> float:
    """Shares of the examples in `make test` and in `make test-all`, else all: of a property whose cases take long."""
    most = settings().max_examples
    return share if most <= FEW else in_all if most <= MORE else 1.0


def hold_for_all(
    law: Callable[[Any], None], strategy: st.SearchStrategy[Any], share: float = 1.0, batch: int = 125
) -> None:
    """Check `law` on every rank for a share of the usual number of cases; the smallest that fails is reported."""
    cases_ = drawn_from(strategy, share)
    for start in range(0, len(cases_), batch):
        hold_on_ranks(law, cases_[start : start + batch])
        EXAMPLES["ran"] += len(cases_[start : start + batch])


def hold_in_turn(
    laws: Sequence[Callable[[Any], None]], strategy: st.SearchStrategy[Any], share: float = 1.0, batch: int = 125
) -> None:
    """Check one law after the other, each on ranks of its own: a drawn case has one `Turn` for each, in `turns`."""
    cases_ = drawn_from(strategy, share)
    for start in range(0, len(cases_), batch):
        numbered = [*enumerate(cases_[start : start + batch], start)]
        for at, law in enumerate(laws):
            hold_on_ranks(law, [Turn(number, each[at]) for number, each in numbered])
        EXAMPLES["ran"] += len(numbered)


@dataclass(frozen=True)
class Turn:
    """What one law of several has of a drawn case; its number is the same for all of them."""

    number: int
    case: Any

    @property
    def ranks(self) -> int:
        return self.case.ranks


def hold_here(law: Callable[[Any], None], strategy: st.SearchStrategy[Any], share: float = 1.0) -> None:
    """Check `law` in this process, without ranks; the smallest case that fails is reported."""

    @settings(PROPERTY, max_examples=max(1, int(share * settings().max_examples)))
    @given(strategy)
    def hold(case: Any) -> None:
        law(case)
        EXAMPLES["ran"] += 1

    hold()


def drawn_from(strategy: st.SearchStrategy[Any], share: float) -> list[Any]:
    """A share of the usual number of cases, no two of them the same."""
    examples = max(1, int(share * settings().max_examples))
    drawn: dict[Any, None] = {}

    @settings(
        max_examples=3 * examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=ANY_COST,
    )
    @given(strategy)
    def collect(case: Any) -> None:
        if len(drawn) < examples:
            drawn[case] = None

    collect()
    assert len(drawn) == examples, f"only {len(drawn)} different cases were drawn"
    return list(drawn)


def hold_on_ranks(law: Callable[[Any], None], mine: Sequence[Any]) -> None:
    """Check `law` for some cases, on as many ranks as each asks for."""
    for ranks in sorted({case.ranks for case in mine}):
        alike = [case for case in mine if case.ranks == ranks]
        failures = run(failures_on_a_rank, law, alike, ranks=ranks)
        failed = [(len(repr(case)), repr(case), text) for found in failures for case, text in found]
        assert not failed, f"{len(failed)} failures, the smallest for\n{min(failed)[1]}\n{min(failed)[2]}"


def failures_on_a_rank(law: Callable[[Any], None], batch: Sequence[Any]) -> list[tuple[Any, str]]:
    found = []
    for case in batch:
        try:
            law(case)
        except Exception:
            found.append((case, traceback.format_exc(limit=-6)))
            if case.ranks > 1:
                break  # the other ranks may wait in another collective
    return found


def errors_on_a_rank(fn: Callable[..., object], calls: Sequence[tuple[Any, ...]]) -> list[tuple[list[str], str]]:
    """The classes and the message of what `fn(*args)` raises, call by call."""
    found: list[tuple[list[str], str]] = []
    for args in calls:
        try:
            fn(*args)
            found.append((["nothing"], ""))
        except Exception as error:
            found.append(([kind.__name__ for kind in type(error).__mro__], str(error)))
    return found


def assert_all_raise(
    fn: Callable[..., object], table: Sequence[tuple[tuple[Any, ...], type[Exception], str]], ranks: int = 4
) -> list[list[str]]:
    """Every rank raises `kind` with a message that matches, for each `(args, kind, match)`; returns the messages."""
    said = run(errors_on_a_rank, fn, [args for args, _, _ in table], ranks=ranks)
    for i, (args, kind, match) in enumerate(table):
        for rank, answers in enumerate(said):
            kinds, message = answers[i]
            assert kind.__name__ in kinds, f"{args}: rank {rank} raised {kinds[0]}: {message}"
            assert re.search(match, message), f"{args}: rank {rank} said {message!r}, which does not match {match!r}"
    return [[message for _, message in answers] for answers in said]


def assert_same_bits(got: Tensor, want: Tensor, name: str = "") -> None:
    """Equal to the bit (NaN too), with equal dtype and shape."""
    assert got.dtype == want.dtype and got.shape == want.shape, (name, got.dtype, got.shape, want.dtype, want.shape)
    same = torch.equal(bits_of(got), bits_of(want))
    assert same, f"{name}: {got} instead of {want}"


def untyped(value: object) -> Any:
    """The same, for arguments that a type checker would refuse."""
    return value


def as_dtensor(tensor: Tensor) -> DTensor:
    """The same, known to be a DTensor."""
    assert isinstance(tensor, DTensor), type(tensor)
    return tensor


def bits_of(tensor: Tensor) -> Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return flat.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def assert_same_tree(got: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    """Equal names, placements, meshes, global shapes and bits."""
    assert list(got) == list(want), (list(got), list(want))
    for name, leaf in want.items():
        assert got[name].placements == leaf.placements, (name, got[name].placements, leaf.placements)
        assert got[name].device_mesh == leaf.device_mesh, (name, got[name].device_mesh, leaf.device_mesh)
        assert got[name].shape == leaf.shape, (name, got[name].shape, leaf.shape)
        assert_same_bits(unwrap_local(got[name]), unwrap_local(leaf), name)
