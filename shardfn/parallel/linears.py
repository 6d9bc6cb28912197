"""Parallel forwards derived from the rules of a module's weights.

A weight W of a linear is [out, in]. A compute axis on an out factor makes it column-parallel, on an in factor
row-parallel; on the vocab factor of an embedding the lookup is masked. [Note: where a pvary goes] is in
`trace/interpreter.py`.

    column   x [.., in]     -> pvary (once a tensor) -> x @ W.T + b            -> [.., out@tp]
    row      x [.., in@tp]  -> x @ W.T -> psum -> + b                          -> [.., out]
    lookup   ids [..]       -> masked rows of W [vocab@tp, c] -> psum          -> [.., c]
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any, NoReturn, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardfn._torch import has_no_memory, outside_transforms, simulated, values_of
from shardfn.binding import Forward, weight_now
from shardfn.layout import BIAS_DIM, OUT_DIM, Layout, ModuleInfo, Part, Plan, calls_own, class_of, index_along, part_for
from shardfn.notation import ShardError, did_you_mean, parse
from shardfn.parallel.compute_axes import ComputeAxes


def splits(plan: Plan, module: ModuleInfo) -> bool:
    """Whether a rule splits a parameter of a module over a compute axis of several ranks."""
    return any(plan.compute_axes(plan.layouts[name]) for _, name in module.params)


def weight_parts(plan: Plan, layout: Layout) -> dict[str, Part]:
    """By axis, which part of a weight a module computes with."""
    return {axis: part_for(layout, axis, plan.axes, plan.roles.compute) for axis in plan.compute_axes(layout)}


@dataclass(frozen=True)
class Layer:
    """A module, and what its parallel forward is made of."""

    module: ModuleInfo
    plan: Plan
    axes: ComputeAxes

    @property
    def name(self) -> str:
        """Its path."""
        return self.module.name

    @cached_property
    def gathers(self) -> bool:
        """Whether its output is gathered: where it leaves `apply`, or as "b s c" in `Policy.acts` has it whole."""
        return self.name in self.axes.adjust.gather or _asked_of(self.plan, self.module) == ()

    def sides(self) -> tuple[list[str], list[str]]:
        """The axes on the out dim and on the in dim of its weight."""
        layout, out = self.layout("weight"), BIAS_DIM[self.module.kind]
        return self.plan.compute_axes(layout, out), self.plan.compute_axes(layout, 1 - out)

    def path(self, attribute: str) -> str:
        """The path of one of its attributes."""
        return f"{self.name}.{attribute}" if self.name else attribute

    def layout(self, attribute: str) -> Layout:
        """That of one of its parameters, or of a child's: "out_proj.weight"."""
        return self.plan.layout_of(self.path(attribute))

    def local(self, attribute: str) -> Tensor | None:
        """A parameter, whole over data axes; None when the module has none."""
        name = self.plan.canonical.get(self.path(attribute))
        return None if name is None else weight_now(name)

    def parts(self, attribute: str) -> dict[str, Part]:
        """By axis, which part of a parameter a rank has."""
        return weight_parts(self.plan, self.layout(attribute))

    def ways(self, split: Sequence[str]) -> int:
        """How many ranks some axes have."""
        return prod(self.plan.axes[axis] for axis in split)

    def entered(self, x: Tensor, split: Sequence[str], of: str = "") -> Tensor:
        """An input that all ranks have, of which each uses all for its own part of the output."""
        for axis in split:
            x = self.axes.entered(x, axis, f"{self.name}{of}")
        return x

    def own_part(self, x: Tensor, wanted: Mapping[str, Part], of: str = "") -> Tensor:
        """This rank's part of an input, of one that may be whole."""
        for axis, part in wanted.items():
            x = self.axes.own_part(x, axis, f"{self.name}{of}", part)
        return x

    def total(self, y: Tensor, rows: Sequence[str]) -> Tensor:
        """The sum over `rows` of what ranks made of their parts: whole, or this rank's part of a dim that scatters."""
        for axis in rows:
            y = self.axes.total(y, axis, self.name)
        return y

    def made(self, y: Tensor, split: Sequence[str], dim: int, parts: Mapping[str, Part]) -> Tensor:
        """The output, of which `split` axes split dim `dim`: gathered where that is asked for."""
        y = self.axes.note_source(y, f"module {self.name}", self.name if split else None)
        for axis in reversed(split) if self.gathers else ():
            y = self.axes.join(y, axis, dim, parts[axis].runs)
        extent = self.layout("weight").shape[BIAS_DIM[self.module.kind]] if split and self.gathers else y.shape[dim]
        if y.shape[dim] != extent:
            with self.axes.hidden():
                y = y.narrow(dim, 0, extent)  # without padding
        return y

    def refuse(self, why: str) -> ShardError:
        """An error that names the module and its rule."""
        rule = next(f"{a} '{self.plan.layouts[n].rule}'" for a, n in self.module.params)
        cls = self.module.classes[0].rpartition(".")[2]
        return ShardError(f"apply: {cls} {self.name!r} is split by {rule}: {why}")


_Value = TypeVar("_Value")


class _ByAttribute(dict[str, _Value]):
    """By attribute, what the module of a parallel forward owns itself; another key is an error that says so."""

    layer: Layer

    def __missing__(self, key: str) -> NoReturn:
        plan, module = self.layer.plan, self.layer.module
        path = self.layer.path(key)
        owned = [attribute for attribute, _ in module.params]
        remedy = did_you_mean(key, owned)
        if path in plan.canonical:
            child, inner = path.rpartition(".")[0], key.rpartition(".")[0]
            remedy = (
                f". '{path}' is owned by {child!r}: call that child, module.{inner}(x), which computes with its part "
                f"by itself, or give it a forward of its own: Policy(compute={{{child!r}: fn}})."
            )
        why = f"apply: the parallel forward of {module.name or '(the model)'!r} asks for {key!r}, and a module is given"
        raise ShardError(f"{why} the weights that it owns itself: {', '.join(map(repr, owned)) or 'none'}{remedy}")


class Layouts(_ByAttribute[Layout]):
    """How the weights of a module lie, by attribute, the `mesh` for collectives, and the `axes` that split any.

    Operations within `hidden()` have no counterpart in the module's own forward. `require(x, axis, part)` has a run
    without data check which part x is; `entered(x, axis, at)` is the at-th argument as a varying value, which it may
    have been before.
    """

    def __init__(self, layer: Layer) -> None:
        plan, axes = layer.plan, layer.axes
        super().__init__({attribute: plan.layouts[name] for attribute, name in layer.module.params})
        split = {axis for layout in self.values() for axis in plan.compute_axes(layout)}
        self.layer, self.axes = layer, tuple(axis for axis in plan.roles.compute if axis in split)
        self.mesh, self.hidden, self.note_part = axes.mesh, axes.hidden, axes.note_part
        self.require, self.received = axes.require, axes.received

    def entered(self, x: Tensor, axis: str, at: int) -> Tensor:
        """An argument, varying over an axis."""
        return self.layer.axes.entered(x, axis, f"{self.layer.name}, argument {at}")


def others_forwards(plan: Plan) -> set[str]:
    """The modules whose forward is not their own."""
    declared = {path for path, forward in plan.forwards.items() if not calls_own(forward)}
    derived = (m for m in plan.info.modules if m.kind in FORWARDS or (m.kind != "other" and splits(plan, m)))
    return declared | {module.name for module in derived}


def custom_forward(layer: Layer, fn: Forward) -> Forward:
    """A declared parallel forward, as the forward of a module."""
    layouts = Layouts(layer)

    def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        local = _ByAttribute({attribute: weight_now(layout.name) for attribute, layout in layouts.items()})
        local.layer = layer
        return fn(module, local, layouts, *args, **kwargs)

    return forward


def _linear(layer: Layer) -> Forward:
    """Column-parallel, row-parallel or both, by the axes on the out and in dims of the weight."""
    layout, parts, (columns, rows) = layer.layout("weight"), layer.parts("weight"), layer.sides()
    out, axes = OUT_DIM[layer.module.kind], layer.axes

    def forward(module: nn.Module, x: Tensor) -> Any:
        w, bias = weight_now(layout.name), layer.local("bias")
        w = w if out == 0 else w.t()  # [out/columns, in/rows]
        x = layer.own_part(x, {axis: parts[axis].at(x.dim() - 1) for axis in rows})
        y = layer.total(F.linear(layer.entered(x, columns), w, None if rows else bias), rows)
        if rows and bias is not None:
            y = y + bias  # after the sum, or it would count once a rank
        for axis in columns if axes.follows else ():  # what the last dim is: a size of 1 would leave that open
            axes.note_part(y, axis, parts[axis].at(y.dim() - 1))
        return layer.made(y, columns, -1, parts)

    return forward


def kept_by_acts(plan: Plan) -> set[str]:
    """The column-parallel linears whose output `Policy.acts` leaves split over the compute axes of their weight.

    Raises:
        ShardError: an entry names other axes than the weight's, or the dim is padded.
    """
    names = set()
    for module in plan.info.modules:
        if module.kind not in OUT_DIM or not (last := _asked_of(plan, module)):
            continue
        layout = plan.weight_of(module)
        if not (columns := plan.compute_axes(layout, OUT_DIM[module.kind])):
            continue
        if list(last) != columns or len(columns) != 1:
            why = f"apply: Policy.acts asks for {module.name!r} split over {', '.join(last)}"
            raise ShardError(f"{why}, whose last dim is split over {', '.join(columns)}")
        if layout.leaves[0].shape[0] != layout.leaves[0].extent[0]:
            raise ShardError(_padded_logits(plan, module.name, layout, columns[0]))
        names.add(module.name)
    return names


def _padded_logits(plan: Plan, module: str, layout: Layout, axis: str) -> str:
    """Why logits cannot stay split, and what to write."""
    size, stored, ranks = layout.leaves[0].extent[0], layout.leaves[0].shape[0], plan.axes[axis]
    entry = plan.acts[module]
    name = next((factor.name for factor in layout.rule.dims[0].factors if factor.name in plan.policy.pad), "_")
    remedy = f"acts={{{entry!r}: '... {name}'}}, which gathers them, or "
    if size % ranks == 0:
        remedy = f"pad={{{name!r}: {ranks}}}, since {size} % {ranks} = 0 and nothing is padded then, or {remedy[:-5]}"
    else:
        remedy += f"give the model a vocabulary that {axis}={ranks} divides, {size} % {ranks} = {size % ranks}"
    return (
        f"apply: Policy(acts={{{entry!r}: {plan.policy.acts[entry]!r}}}) leaves the output of {module!r} split, whose "
        f"{name}={size} is stored padded to {stored} by Policy(pad={{{name!r}: {plan.policy.pad.get(name)}}}). Split "
        f"logits have no padding. Write {remedy}."
    )


def _asked_of(plan: Plan, module: ModuleInfo) -> tuple[str, ...] | None:
    """The axes that `Policy.acts` wants to split the features of a module's output; None without an entry about it."""
    if module.name not in plan.acts or module.kind not in BIAS_DIM:
        return None
    features = slice(-1, None) if module.kind in OUT_DIM else slice(1, 2)
    dims = parse(plan.policy.acts[plan.acts[module.name]]).dims[features]
    return tuple(axis for dim in dims for f in dim.factors[-1:] for axis in f.axes if plan.axes[axis] > 1)


class _Lookups(TorchFunctionMode):
    """Has the lookups that one module does in its table, as `nn.Embedding` does them, done part by part."""

    def __init__(self, lookup: Forward, axes: ComputeAxes, module: nn.Embedding) -> None:
        super().__init__()
        self._lookup, self._axes, self._own = lookup, axes, module

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own, settings = self._own, kwargs or {}
        if func is not F.embedding or args[1] is not own.weight:
            return func(*args, **settings)
        if any(getattr(own, name) != value for name, value in settings.items()):
            return func(*args, **settings)
        return self._axes.on_each_side(partial(self._lookup, own), partial(func, weight=args[1], **settings), args[0])


def _own_lookup(layer: Layer) -> Forward:
    """The forward of a subclass of `nn.Embedding`, which does something with the ids or the rows."""
    lookup = _lookup(layer)

    def forward(module: nn.Embedding, /, *args: Any, **kwargs: Any) -> Any:
        with _Lookups(lookup, layer.axes, module):
            return class_of(module).forward(module, *args, **kwargs)

    return forward


def _lookup(layer: Layer) -> Forward:
    """Rows of a split table: each rank looks up the ids that it has, and the sum is the row."""
    plan, axes, name, layout = layer.plan, layer.axes, layer.name, layer.layout("weight")
    vocab, columns = plan.compute_axes(layout, 0), plan.compute_axes(layout, 1)
    asked = parse(plan.policy.acts[plan.acts[name]]).factors if name in plan.acts else ()
    joins = not set(columns) & {axis for factor in asked for axis in factor.axes}

    def forward(module: Any, ids: Tensor) -> Tensor:
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            why = f"{name!r} splits its table by '{layout.rule}'; max_norm, scale_grad_by_freq and sparse need it whole"
            raise ShardError(f"apply: {why}: rules={{{layout.name!r}: '{layout.rule.without(plan.roles.compute)}'}}")
        w = weight_now(layout.name)  # [vocab/axes, c/columns]
        require_ids(name, ids, layout.shape[0])
        for axis in vocab:
            axes.require_whole(ids, axis, "its ids")
        first = index_along(vocab, axes.sizes, axes.coords) * w.shape[0]
        here = ids - first
        elsewhere = (here < 0) | (here >= w.shape[0])
        padding = -1 if module.padding_idx is None or simulated() else module.padding_idx - first
        rows = F.embedding(here.masked_fill(elsewhere, 0), w, padding if 0 <= padding < w.shape[0] else None)
        if module.padding_idx is not None and simulated():  # where each rank has another first row
            rows = torch.where((ids == module.padding_idx).unsqueeze(-1), rows.detach(), rows)
        if vocab:
            rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0)
        rows = layer.total(rows, vocab)
        for axis in reversed(columns) if joins else ():
            rows = axes.join(rows, axis, -1)
        return axes.note_source(rows, f"module {name}")

    return forward


def require_ids(where: str, ids: Tensor, size: int, ignore: int | None = None) -> None:
    """On the CPU, as torch does there: an id that no rank has would silently be a row of zeros.

    Raises:
        IndexError: an id other than `ignore` is not from 0 to `size - 1`.
    """
    if ids.device.type != "cpu" or torch.compiler.is_compiling() or has_no_memory():
        return
    with outside_transforms():
        for values in values_of(ids):
            known = values if ignore is None else values[values != ignore]
            if known.numel() and not 0 <= int(known.min()) <= int(known.max()) < size:
                least, most = int(known.min()), int(known.max())
                raise IndexError(f"{where}: index out of range: ids from {least} to {most}, size {size}")


# By the kind of a module: what makes its parallel forward.
FORWARDS = {"linear": _linear, "transposed linear": _linear, "embedding": _lookup, "own embedding": _own_lookup}
