"""Decide, then do: what a policy means for one model on one mesh, as plain data. Layer 2.

Nothing here touches a tensor's values or a process group, so a plan for 4096 ranks is made on a laptop. The code that
moves data looks its decisions up here and never thinks.
"""

import hashlib
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import prod
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardfn.core.errors import ShardError, did_you_mean, raise_problems
from shardfn.core.layout import Layout, Leaf
from shardfn.core.mesh import MeshSpec, Roles, axes_of, roles
from shardfn.core.model import BIAS_DIM, ModelInfo, ModuleInfo, ParamInfo, class_name, describe, registered
from shardfn.core.pattern import compile_pattern, first_match, is_in, matches
from shardfn.core.policy import BATCH_AXES, Policy
from shardfn.core.spec import Block, Dim, Factor, Sizes, Spec, parse, repeated_axes, unknown_axes

# Or a function of the user's own, `reduce(flat, shard)`: of the gradients of a bucket as one flat tensor, part i for
# rank i, it fills this rank's flat shard with what counts; where nothing is split, `reduce(flat, None)` works in place.
Reduction = Literal["mean", "sum"] | Callable[[torch.Tensor, torch.Tensor | None], None]


@dataclass(frozen=True)
class Bucket:
    """Leaves of one unit that travel in one collective: gathered over the same axes, in the same dtype.

    `axes` are the data axes that split them, outermost first; gradients are also summed over the other data axes, but
    for those in `kept`.

    [Note: kept axes]
    An axis of experts splits the batch, and the weights of experts stay split over it in their computation: tokens go
    to them instead. What a rank has then is the gradient of its own experts by the losses of all ranks of that axis,
    since the way of the tokens is differentiated. So nothing is gathered or reduced over a kept axis, and the mean over
    the data ranks counts its ranks like any other's.
    """

    unit: str
    leaves: tuple[str, ...]
    axes: tuple[str, ...]
    dtype: torch.dtype
    reduce_dtype: torch.dtype | None = None  # in which gradients are reduced; None: the dtype they have
    kept: tuple[str, ...] = ()


@dataclass(frozen=True)
class Unit:
    """A module whose parameters are gathered and freed together; the root unit has the empty name."""

    name: str
    params: tuple[str, ...]
    buckets: tuple[Bucket, ...]
    regather: bool | int = True  # whether they are freed after the forward, see `Policy`
    input_dtype: torch.dtype | None = None  # to which its floating inputs are cast
    output_dtype: torch.dtype | None = None  # and its floating outputs


_Made = TypeVar("_Made")
_Sized = tuple[Factor, int, int]  # a factor of a rule, and its size without and with padding
_Rule = tuple[Spec, str]  # of one parameter, expanded and with all axes in place; and where it comes from


class Home:
    """What is kept beside a plan, and goes when that goes: of each key what was made for it, once.

    Facts that follow from the plan, the plans that are made of it, and by grid what runs of it share. It is no part of
    the plan: a plan is compared and pickled without it. Plans that differ in their reduction have one home.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], _Made]) -> _Made:
        """What `make` has made when this key was first asked for."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


class _Open:
    """Has a `__dict__` and weak references, which a class with slots has not: nothing is ever put there."""


@dataclass(frozen=True, eq=False, slots=True)
class Plan(_Open):
    """The layout of every parameter, the units and their buckets. Made by `plan`; compared by content.

    >>> import shardfn as sf
    >>> from torch import nn
    >>> p = sf.plan(nn.Linear(8, 6), sf.MeshSpec(fsdp=2), sf.Policy())
    >>> p.bytes_per_rank
    108
    >>> print(p.explain("weight"))
    weight (6, 8) float32: 6@fsdp 8, by default 'auto'
      local (3, 8), 96 bytes per rank
      forward: all_gather over fsdp; backward: reduce_scatter over fsdp
    """

    axes: dict[str, int]
    roles: Roles
    layouts: dict[str, Layout]
    units: tuple[Unit, ...]
    policy: Policy
    info: ModelInfo = field(repr=False)
    activation_bytes: int = 0  # received by each rank in a step over the compute axes, when an example was given
    reduction: "Reduction | None" = "mean"  # what the backward of a gather does with pending gradients
    local_sizes: dict[str, dict[str, int]] = field(default_factory=dict)  # module -> attribute -> its size on a rank
    forwards: dict[str, Callable[..., Any]] = field(default_factory=dict)  # module -> its parallel forward, declared
    vmaps: int | None = None  # of a tree inside a transform, whose leaves are plain: how many `vmap`s are around it
    # What follows from these, as every call needs it.
    leaves: dict[str, tuple[Layout, Leaf]] = field(init=False, repr=False)  # stored name -> the layout it is of, itself
    canonical: dict[str, str] = field(init=False, repr=False)  # any name of a parameter -> its canonical one
    compute_dtypes: dict[str, torch.dtype] = field(init=False, repr=False)  # in which parameters are gathered and used
    acts: dict[str, str] = field(init=False, repr=False)  # module -> the entry of `Policy.acts` about its output
    splits_compute: bool = field(init=False, repr=False)  # some parameter, over a compute axis of several ranks
    placed_axes: frozenset[str] = field(init=False, repr=False)  # over which modules compute with DTensors
    home: Home = field(init=False, repr=False)

    def __post_init__(self) -> None:
        layouts = self.layouts.values()
        dtypes = {leaf: bucket.dtype for unit in self.units for bucket in unit.buckets for leaf in bucket.leaves}
        derived = {
            "leaves": {leaf.name: (layout, leaf) for layout in layouts for leaf in layout.leaves},
            "canonical": {name: layout.name for layout in layouts for name in layout.names},
            "compute_dtypes": {layout.name: dtypes[layout.leaves[0].name] for layout in layouts},
            "acts": _first_matches(self.policy.acts, self.info),
            "splits_compute": any(map(self.compute_axes, layouts)),
            "placed_axes": frozenset(axis for layout in layouts for axis, _ in layout.placed or ()),
            "home": Home(),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def layout_of(self, name: str) -> Layout:
        """The layout of a parameter, by any of its names."""
        return self.layouts[self.canonical[name]]

    def weight_of(self, module: ModuleInfo) -> Layout:
        """The layout of the weight of a module."""
        return self.layouts[dict(module.params)["weight"]]

    def compute_axes(self, layout: Layout, dim: int | None = None) -> list[str]:
        """The compute axes of several ranks by which a rule splits a parameter, or one of its dims; outermost first.

        None for a parameter that is a DTensor over them: its modules know what to do.
        """
        found = layout.axes if dim is None else layout.model_axes(dim)
        several = (axis for axis in self.roles.compute if axis in found and self.axes[axis] > 1)
        return [] if layout.placed is not None else list(several)

    def gathered_axes(self, layout: Layout) -> list[str]:
        """The data axes over which modules compute with a whole parameter."""
        return [axis for axis in self.roles.data if axis not in layout.kept]

    @property
    def key(self) -> tuple[Any, ...]:
        """What two equal plans have in common."""
        return self.home.once("key", self._key)

    def _key(self) -> tuple[Any, ...]:
        p = self.policy
        settings = (p.regather, p.compute_dtype, p.reduce_dtype, p.output_dtype, p.cast_inputs, p.offload)
        return (
            tuple(self.axes.items()),
            self.roles,
            tuple(
                (n, x.aliases, x.shape, x.dtype, x.trainable, x.leaves, x.block_dim, x.placed, x.kept)
                for n, x in self.layouts.items()
            ),
            self.units,
            settings,
            tuple(p.acts.items()),
            tuple((name, _function_name(fn)) for name, fn in self.forwards.items()),
            tuple((name, tuple(sizes.items())) for name, sizes in self.local_sizes.items()),
            self.vmaps,
        )

    @property
    def digest(self) -> str:
        """A hash of the content, equal on all ranks that made the same plan."""
        return self.home.once("digest", lambda: hashlib.sha256(repr(self.key).encode()).hexdigest())

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Plan) and self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.digest)

    def with_reduction(self, reduction: "Reduction | None") -> "Plan":
        """The same plan with another reduction in the backward; equal to this one, and made once."""
        if reduction == self.reduction:
            return self
        self.home.once(("reduction", self.reduction), lambda: self)
        return self.home.once(("reduction", reduction), lambda: self._reducing(reduction))

    def _reducing(self, reduction: "Reduction | None") -> "Plan":
        other = replace(self, reduction=reduction)
        object.__setattr__(other, "home", self.home)
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        """What it is made of: its home holds process groups."""
        return Plan, tuple(getattr(self, f.name) for f in fields(self) if f.init)

    def bucket_of(self, leaf: str) -> Bucket:
        """The bucket in which a stored leaf travels."""
        return next(bucket for unit in self.units for bucket in unit.buckets if leaf in bucket.leaves)

    def buckets_in(self, dtypes: Mapping[str, torch.dtype]) -> Iterator[Bucket]:
        """The buckets of some leaves, which travel in these dtypes; those of several dtypes apart."""
        for bucket in (bucket for unit in self.units for bucket in unit.buckets):
            names = [name for name in bucket.leaves if name in dtypes]
            for dtype in dict.fromkeys(dtypes[name] for name in names):
                yield replace(bucket, leaves=tuple(name for name in names if dtypes[name] == dtype), dtype=dtype)

    def local_shape(self, leaf: str, coords: Mapping[str, int] | None = None) -> tuple[int, ...]:
        """Shape of a stored leaf on the rank at `coords` (default: the first rank, which holds the most)."""
        return self.leaves[leaf][1].local_shape(self.axes, coords or dict.fromkeys(self.axes, 0))

    @property
    def bytes_per_rank(self) -> int:
        """Bytes of shards on the first rank, which holds the most."""
        return sum(prod(self.local_shape(name)) * layout.dtype.itemsize for name, (layout, _) in self.leaves.items())

    @property
    def comm_bytes(self) -> int:
        """Bytes of weights and gradients that each rank receives in one step of forward and backward.

        An all-gather or reduce-scatter of shards of n bytes over W ranks counts (W - 1) n, an all-reduce of n bytes
        2 (W - 1) / W n. Activations count when the plan was made with an `example`: they depend on the batch. Tokens
        that go to experts on other ranks count as if none of them stayed, see `sf.policies.Experts`.
        """
        return self.activation_bytes + sum(received for _, received in self._traffic())

    @property
    def data_collectives(self) -> int:
        """Gathers of weights and reductions of gradients in one step; on gloo a large one is many messages instead."""
        return sum(collectives for collectives, _ in self._traffic())

    def _traffic(self) -> Iterator[tuple[int, int]]:
        """Of each bucket, how many collectives there are in one step, and how many bytes a rank receives in them."""
        for unit, bucket in [(own, bucket) for own in self.units for bucket in own.buckets]:
            several = [axis for axis in self.roles.data if self.axes[axis] > 1 and axis not in bucket.kept]
            split = [axis for axis in bucket.axes if axis in several]
            kept = self.kept_over(unit) if unit.regather else 1  # None: all of it is gathered again
            again = {None: len(split), 1: 0}.get(kept, min(len(split), 1))
            trains, received = False, 0
            for name in bucket.leaves:
                layout, size = self.leaves[name][0], prod(self.local_shape(name))
                item = (bucket.reduce_dtype or bucket.dtype).itemsize if layout.trainable else 0
                for axis in several:
                    if axis not in split:
                        received += 2 * (self.axes[axis] - 1) * size * item // self.axes[axis]
                for axis in reversed(split):
                    gathers = bucket.dtype.itemsize * (2 if kept is None else 1)
                    received += (self.axes[axis] - 1) * size * (gathers + item)
                    size *= self.axes[axis]
                received += (size - size // (kept or 1)) * bucket.dtype.itemsize
                trains = trains or layout.trainable
            yield len(split) + again + (len(several) if trains else 0), received

    @property
    def keep_axis(self) -> str | None:
        """The data axis whose neighbours share what `Policy(regather=n)` keeps: the innermost of several ranks."""
        return _innermost(self.roles.data, self.axes)

    def kept_over(self, unit: Unit) -> int | None:
        """Over how many ranks a unit stays split between forward and backward; None when it is freed, or kept."""
        count = unit.regather
        whole = isinstance(count, bool) or self.keep_axis is None or count >= self.axes[self.keep_axis]
        return None if whole else int(count)

    def explain(self, name: str) -> str:
        """Where the layout of one parameter comes from and what it costs.

        Raises:
            KeyError: there is no such parameter.
        """
        if name not in self.canonical:
            raise KeyError(f"explain: the model has no parameter '{name}'{did_you_mean(name, self.canonical)}")
        layout = self.layout_of(name)
        lines = [f"{name} {layout.shape} {_dtype(layout.dtype)}: {layout.rule}, by {layout.source}"]
        for leaf in layout.leaves:
            shape = self.local_shape(leaf.name)
            stored = "" if layout.plain else f"stored as {leaf.name} {leaf.shape}, "
            lines.append(f"  {stored}local {shape}, {prod(shape) * layout.dtype.itemsize} bytes per rank")
        several = [a for a in self.gathered_axes(layout) if self.axes[a] > 1]
        data = [a for a in layout.axes if a in several]
        rest = [a for a in several if a not in layout.axes]
        forward = f"all_gather over {', '.join(data)}" if data else "nothing"
        moves = (("reduce_scatter", data), ("all_reduce", rest)) if layout.trainable else ()
        backward = ", ".join(f"{verb} over {', '.join(axes)}" for verb, axes in moves if axes) or "nothing"
        lines.append(f"  forward: {forward}; backward: {backward}")
        if kept := [axis for axis in layout.kept if self.axes[axis] > 1]:
            lines.append(f"  used as split over {', '.join(kept)}: what it computes with comes from all ranks there")
        return "\n".join(lines)

    def assert_sharded(self, fraction: float = 0.98) -> None:
        """Check that at least `fraction` of all elements are in parameters that some axis of several ranks splits.

        Raises:
            ShardError: naming the largest parameters that are not.
        """
        total = sum(layout.numel for layout in self.layouts.values())
        wanted = [a for a in (*self.roles.compute, *self.roles.shardable) if self.axes[a] > 1]
        whole = [x for x in self.layouts.values() if not any(axis in x.axes for axis in wanted) and wanted]
        missing = sum(layout.numel for layout in whole)
        if total and 1 - missing / total < fraction:
            names = ", ".join(x.name for x in sorted(whole, key=lambda x: -x.numel)[:3])
            raise ShardError(
                f"only {1 - missing / total:.1%} of the elements are sharded, {fraction:.1%} wanted; whole: {names}"
            )

    def diff(self, other: "Plan") -> str:
        """The parameters whose layout differs between two plans, one line each, and the change in bytes."""
        lines = []
        for name in dict.fromkeys((*self.layouts, *other.layouts)):
            mine, theirs = (str(p.layouts[name].rule) if name in p.layouts else "absent" for p in (self, other))
            if mine == theirs:  # the same words may stand for other sizes
                mine, theirs = (_described(p.layouts[name]) for p in (self, other))
            if mine != theirs:
                lines.append(f"{name}: {mine} -> {theirs}")
        lines.append(f"bytes per rank: {self.bytes_per_rank} -> {other.bytes_per_rank}")
        lines.append(f"bytes received per step: {self.comm_bytes} -> {other.comm_bytes}")
        return "\n".join(lines)

    def __str__(self) -> str:
        rows = [("parameter", "shape", "rule", "local", "bytes/rank", "unit")]
        for layout in self.layouts.values():
            shapes = [self.local_shape(leaf.name) for leaf in layout.leaves]
            size = sum(prod(shape) for shape in shapes) * layout.dtype.itemsize
            local = " + ".join(str(list(shape)) for shape in shapes)
            rule, unit = str(layout.rule) or "(scalar)", layout.unit or "(root)"
            rows.append((layout.name, str(list(layout.shape)), rule, local, f"{size:,}", unit))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        table = "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.axes.items())
        alone = len(self.units) == 1 and not self.units[0].name
        units = "1 unit, the whole model at once" if alone else f"{len(self.units)} units"
        return (
            f"{table}\nmesh {mesh}; {self.bytes_per_rank:,} bytes of shards per rank; {units}; "
            f"{self.data_collectives} collectives over data axes and {self.comm_bytes:,} bytes received per step"
        )

    # -- plans of trees inside a transform -----------------------------------------------------------------------------

    def in_vmaps(self, vmaps: int | None) -> "Plan":
        """That of the same tree with plain leaves, inside `vmaps` mapped dims; None: with DTensors, in no transform."""
        return self if self.vmaps == vmaps else self._once(("vmaps", vmaps), lambda: replace(self, vmaps=vmaps))

    def without(self, axes: Sequence[str]) -> "Plan":
        """That of the same leaves made whole over data axes, which have no part from there on."""
        roles = self.roles.without(axes)
        return self._once(("without", *axes), lambda: self._changed(lambda x: x.without(axes), roles)) if axes else self

    def member(self, axes: Sequence[str]) -> "Plan":
        """That of one member of a tree that is stacked along its first dim, which `axes` split."""
        return self._once(("member", *axes), lambda: self._changed(Layout.member, self.roles.without(axes)))

    def stacked(self, size: int, axes: Sequence[str]) -> "Plan":
        """That of many such trees stacked along a new first dim of `size`, which `axes` split."""
        roles = self.roles.whole().without([axis for axis in self.roles.absent if axis not in axes])
        return self._once(("stacked", size, *axes), lambda: self._changed(lambda x: x.stacked(size, axes), roles))

    @property
    def has_members(self) -> bool:
        """Whether it is of trees that are stacked along a first dim, which no axis splits."""
        return all(leaf.splits[:1] == ((),) and leaf.merges[0] == 1 for _, leaf in self.leaves.values())

    @property
    def members(self) -> int | None:
        """How many trees of the model are stacked along a first dim; None for a tree as it was made."""
        if not self.info.params:
            return None
        first = self.info.params[0]
        shape = self.layouts[first.name].shape
        return shape[0] if len(shape) > len(first.shape) else None

    def _changed(self, change: Callable[[Layout], Layout], roles: Roles) -> "Plan":
        layouts = {name: change(layout) for name, layout in self.layouts.items()}
        leaves = {leaf.name: leaf for layout in layouts.values() for leaf in layout.leaves}
        data = [axis for axis in self.roles.storage if axis not in self.roles.compute]

        def moved(bucket: Bucket) -> Bucket:
            # The leaves of a bucket are split over the same axes, also after a change that is the same for all.
            split = leaves[bucket.leaves[0]].axes
            kept = tuple(axis for axis in bucket.kept if axis in split)
            return replace(bucket, axes=tuple(axis for axis in data if axis in split and axis not in kept), kept=kept)

        units = tuple(replace(unit, buckets=tuple(map(moved, unit.buckets))) for unit in self.units)
        return replace(self, layouts=layouts, units=units, roles=roles)

    def _once(self, key: Hashable, make: Callable[[], "Plan"]) -> "Plan":
        """Made once and kept: what was computed for its collectives is found again in the next step."""
        return self.home.once(("changed", self.reduction, key), make)


def plan(model: nn.Module | Mapping[str, torch.Tensor], mesh: DeviceMesh | MeshSpec, policy: Policy) -> Plan:
    """What `policy` means for `model` on `mesh`; needs no process group, and the model may be on the meta device.

        >>> import shardfn as sf
        >>> from torch import nn
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
        >>> p = sf.plan(model, sf.MeshSpec(fsdp=16, tp=4), sf.Policy(rules={"0.weight": "ff@tp c@fsdp"}))
        >>> p.layouts["0.weight"].leaves[0].local_shape(p.axes, {"fsdp": 0, "tp": 0})
        (64, 4)

    Args:
        model: a module, or a mapping of names to tensors.
        mesh: a `DeviceMesh` with axis names, or a `MeshSpec`.
        policy: rules, units, precision.

    Returns:
        plain data; `print` shows it as a table.

    Raises:
        ShardError: listing every problem at once: unknown axes, rules that match nothing, dims that do not divide,
            sizes that clash, modules that cannot compute with split parameters.
        TypeError: `model`, `mesh` or `policy` is something else.
        ValueError: the mesh has no axis names.
    """
    if not isinstance(policy, Policy):
        raise TypeError(f"plan: expected a Policy, got {type(policy).__name__}")
    axes = axes_of(mesh)
    info = describe(model)
    modules = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
    return decide(info, axes, replace_units(policy, modules))


def replace_units(policy: Policy, modules: Mapping[str, nn.Module]) -> Policy:
    """Resolve a `callable(name, module)` in `Policy.units` to module names, and classes to their names."""
    units = policy.units
    if isinstance(units, type):
        units = (units,)
    if callable(units):
        answers = {name: units(name, module) for name, module in modules.items()}
        own = {name: answer if isinstance(answer, Mapping) else {} for name, answer in answers.items() if answer}
        return replace(policy, units=own)
    if isinstance(units, str):
        return policy
    if isinstance(units, Mapping):
        return replace(policy, units={_unit_pattern(unit): given for unit, given in units.items()})
    if not isinstance(units, Sequence | set | frozenset):
        raise TypeError(f"Policy(units={units!r}): 'auto', patterns, classes, or a callable(name, module)")
    return replace(policy, units=tuple(map(_unit_pattern, units)))


def _unit_pattern(unit: Any) -> Any:
    return f"class:{class_name(unit)}" if isinstance(unit, type) else unit


@dataclass(frozen=True)
class _Draft:
    """A plan in the making: what it is made of, and what is wrong with that so far."""

    info: ModelInfo
    axes: dict[str, int]
    role: Roles
    policy: Policy
    sizes: Sizes
    problems: list[str]

    def splitting(self, axes: Iterable[str]) -> list[str]:
        """Those that are compute axes of several ranks."""
        return [axis for axis in axes if axis in self.role.compute and self.axes[axis] > 1]

    def ways(self, factor: Factor) -> int:
        """How many parts a rule asks for."""
        return prod(self.axes.get(axis, 1) for axis in factor.axes)

    def padded(self, factor: Factor, size: int) -> int:
        """The size of a factor with the padding that the policy asks for."""
        multiple = self.policy.pad.get(factor.name, 1)
        return -(-size // multiple) * multiple

    def names(self, kind: str) -> list[str]:
        """Of all modules, or by every name of all parameters."""
        if kind == "module":
            return [module.name for module in self.info.modules]
        return [name for param in self.info.params for name in param.names]

    def check_patterns(self, where: str, patterns: Iterable[str], kind: Literal["module", "parameter"]) -> None:
        """Note the patterns that match no module, or no parameter."""
        names = self.names(kind)
        for pattern in patterns:
            if not any(matches(pattern, name) for name in names):
                self.note_unmatched(where, pattern, kind)

    def note_unmatched(self, where: str, pattern: str, kind: Literal["module", "parameter"]) -> None:
        """Note that a pattern matches nothing."""
        names = [name for name in self.names(kind) if name]
        hint = did_you_mean(pattern, names) or "."
        few = f" The model has {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}." if names else ""
        self.problems.append(f"{where} {pattern!r} matches no {kind}{hint}{few}")


def decide(info: ModelInfo, axes: dict[str, int], policy: Policy) -> Plan:
    """`plan` on a model that is already described."""
    draft = _Draft(info, axes, roles(list(axes), policy.batch), policy, Sizes(policy.sizes), [])
    draft = replace(draft, info=_without_ignored(draft))
    info, role, problems = draft.info, draft.role, draft.problems
    forwards, rules = _forwards(info, policy), _rules(draft)
    for param in info.params:
        if param.name in rules:
            draft.sizes.add(param.name, rules[param.name][0], param.shape)
    for tensor, problem in draft.sizes.solve():
        rules.pop(tensor, None)  # its layout cannot be decided; the others are still checked
        problems.append(problem)
    unit_names = _unit_names(draft)
    owners, kept = _owners(info, unit_names), _kept_axes(draft, rules, forwards)
    layouts: dict[str, Layout] = {}
    for param in info.params:
        if param.name in rules:
            stays = kept.get(param.name, ())
            made = _layout(replace(draft, role=role.keeping(stays)), param, *rules[param.name])
            stays = tuple(axis for axis in stays if axis in made.axes)  # a `?` may have made it whole
            layouts[param.name] = replace(made, unit=owners[param.name], kept=stays)
    problems += _uncomputable(draft, layouts, forwards)
    local_sizes = _local_sizes(draft, rules)
    _check_settings(draft)
    raise_problems("plan", problems)
    units = _units(draft, layouts, unit_names)
    forwards = {path: fn for path, fn in forwards.items() if not _computes_whole(path, layouts, draft)}
    return Plan(axes, role, layouts, units, policy, info, local_sizes=local_sizes, forwards=forwards)


def _forwards(info: ModelInfo, policy: Policy) -> dict[str, Callable[..., Any]]:
    """Module -> its parallel forward, that the policy has for it or else its class."""
    named = {path: policy.compute[pattern] for path, pattern in _first_matches(policy.compute, info).items()}
    return {module.name: fn for module in info.modules if (fn := registered(module)) is not None} | named


def _first_matches(patterns: Mapping[str, object], info: ModelInfo) -> dict[str, str]:
    """Module -> the first pattern that matches its name."""
    found = {module.name: first_match(patterns, [module.name]) for module in info.modules if patterns}
    return {path: pattern for path, pattern in found.items() if pattern is not None}


def _computes_whole(module: str, layouts: Mapping[str, Layout], draft: _Draft) -> bool:
    """Whether a module that the policy does not name has parameters, of which no compute axis splits any."""
    below = [layout for name, layout in layouts.items() if is_in(name, module)]
    whole = below and not any(axis in layout.axes for layout in below for axis in draft.role.compute)
    return bool(whole) and first_match(draft.policy.compute, [module]) is None


def _kept_axes(
    draft: _Draft, rules: Mapping[str, _Rule], forwards: Mapping[str, Callable[..., Any]]
) -> dict[str, tuple[str, ...]]:
    """Parameter -> the data axes that split it in its computation too, as the parallel forward of its module asks."""
    found: dict[str, tuple[str, ...]] = {}
    role, problems = draft.role, draft.problems
    for module in draft.info.modules:
        asked = getattr(forwards.get(module.name), "keeps", ())
        for _, name in module.params:
            named = name in rules and not rules[name][1].startswith("default")
            factors = rules[name][0].factors if named else ()
            kept = tuple(axis for axis in role.data if axis in asked and any(axis in f.axes for f in factors))
            if found.setdefault(name, kept) != kept:
                problems.append(f"{name}: one tensor of several modules, of which only some compute with a part of it")
            problems += [
                f"{name}: its module computes with a part over '{axis}', which '{factor}' must be split over first"
                for factor in factors
                for axis in kept
                if axis in factor.axes and any(a in role.data for a in factor.axes[: factor.axes.index(axis)])
            ]
    splits = any(draft.axes[axis] > 1 for kept in found.values() for axis in kept)
    if splits and any(type(count) is int for count in _regathers(draft.policy)):
        problems.append(
            "Policy(regather=n): weights of experts differ between neighbouring ranks, which keep parts for each "
            "other; use True or False"
        )
    return found


def _regathers(policy: Policy) -> list[bool | int]:
    """`regather` of the policy, and of the units that have one of their own."""
    own = policy.units.values() if isinstance(policy.units, Mapping) else ()
    return [policy.regather, *(settings["regather"] for settings in own if "regather" in settings)]


def _local_sizes(draft: _Draft, rules: Mapping[str, _Rule]) -> dict[str, dict[str, int]]:
    """Module -> attribute -> the size that one rank has; what the rules split has been checked with them."""
    found: dict[str, dict[str, int]] = {}
    given, compute = draft.policy.local_sizes, draft.role.compute
    factors = [factor for spec, _ in rules.values() for factor in spec.factors if not factor.optional]
    split = {(factor.name, tuple(axis for axis in factor.axes if axis in compute)) for factor in factors}
    draft.check_patterns("Policy.local_sizes:", given, "module")
    for pattern, attribute, text in ((p, name, text) for p, texts in given.items() for name, text in texts.items()):
        try:
            size = _local_size(draft, text, split)
        except ShardError as error:
            draft.problems.append(f"Policy.local_sizes[{pattern!r}][{attribute!r}]: {error}")
            continue
        for module in draft.info.modules:
            if size is not None and matches(pattern, module.name):
                found.setdefault(module.name, {}).setdefault(attribute, size)  # the first match wins
    return found


def _local_size(draft: _Draft, text: str, split: Collection[tuple[str, tuple[str, ...]]]) -> int | None:
    """A product or a ratio of two; None when it does not divide, which the rules that split it alike say too."""
    terms = _terms(text)
    for factor in (factor for spec in terms for factor in spec.factors):
        size = _padded_size(draft, factor)
        if size is not None and size % draft.ways(factor) and (factor.name, factor.axes) in split:
            return None
    local = [_local_product(draft, spec) for spec in terms]
    if len(local) == 1:
        return local[0]
    if pair := _paired(terms):
        _check_pair(draft, *pair)
    if local[0] % local[1]:
        raise ShardError(f"{' / '.join(map(str, local))} is no whole number")
    return local[0] // local[1]


def _terms(text: str) -> list[Spec]:
    """Both sides of a ratio, or one product."""
    cut = f"{text}/".index("/")
    return [parse(text, span) for span in [(0, cut), (cut + 1, len(text))][: 1 + text.count("/")]]


def _paired(terms: Sequence[Spec]) -> tuple[Factor, Factor] | None:
    """The factors of a ratio such as `heads@tp / kv@tp?`: so many of the first belong to each of the second."""
    factors = [spec.factors for spec in terms]
    return (factors[0][0], factors[1][0]) if [len(term) for term in factors] == [1, 1] else None


def _check_pair(draft: _Draft, over: Factor, under: Factor) -> None:
    """Padding comes last, so that only equal ratios leave each group on the rank of what it belongs to.

    Raises:
        ShardError: on some rank groups would meet what belongs to others.
    """
    many, few = (draft.sizes.known[factor.name] for factor in (over, under))
    stored = [_padded_size(draft, factor) or 0 for factor in (over, under)]
    ways = draft.ways(under)
    if stored[1] % ways == 0:
        fits = stored[0] * few == many * stored[1] or stored == [many, few]
    else:  # ranks share one, which is stored without padding
        fits = few == 1 or (stored[0] == many and ways % few == 0)
    if not fits:
        said = [
            f"{factor.name}={size}" + (f" padded to {padded}" if padded != size else "")
            for factor, size, padded in zip((over, under), (many, few), stored, strict=True)
        ]
        raise ShardError(
            f"{said[0]} and {said[1]} over {ways} ranks: on some rank {over.name} would meet {under.name} of others. "
            f"Write Policy(pad={_padding(draft, under, ways)})."
        )


def _padding(draft: _Draft, factor: Factor, ways: int) -> dict[str, int]:
    """What to pad so that a factor divides; a ratio in `Policy.local_sizes` pads what belongs together alike."""
    for text in (text for given in draft.policy.local_sizes.values() for text in given.values()):
        try:
            pair = _paired(_terms(text))
        except ShardError:
            continue  # reported with its entry
        if pair is None or factor.name not in (pair[0].name, pair[1].name):
            continue
        over, under = pair
        many, few = (draft.sizes.known.get(each.name, 0) for each in pair)
        if few == 1 and under.optional:
            return {over.name: ways}  # all ranks share it
        if few and many % few == 0:
            return {over.name: many // few * ways, under.name: ways}
    return {factor.name: ways}


def _padded_size(draft: _Draft, factor: Factor) -> int | None:
    """The size of a named or numbered factor as it is stored, unpadded on one rank; None when no rule has the name."""
    size = draft.sizes.get(factor.name)
    return size if size is None or draft.ways(factor) == 1 else draft.padded(factor, size)


def _local_product(draft: _Draft, spec: Spec) -> int:
    """The product of factors, each divided by the axes that split it; those with `?` have one element at least."""
    total = 1
    for factor in spec.factors:
        size = _padded_size(draft, factor)
        if size is None:
            raise ShardError(f"no rule has a dim named '{factor.name}'\n{spec.caret(factor.span)}")
        if unknown := unknown_axes(spec, draft.axes):
            raise ShardError(unknown[0])
        ways = draft.ways(factor)
        if size % ways and not factor.optional:
            why = f"{factor.name}={size} does not divide, {size} % {ways} = {size % ways}"
            raise ShardError(f"{why}\n{spec.caret(factor.span)}")
        total *= max(1, size // ways) if factor.optional else size // ways
    return total


def _without_ignored(draft: _Draft) -> ModelInfo:
    """The model without the parameters that `Policy.ignore` names."""
    info, patterns = draft.info, draft.policy.ignore
    if not patterns:
        return info
    draft.check_patterns("Policy.ignore:", patterns, "parameter")
    out = [p for p in info.params if any(matches(pattern, n) for pattern in patterns for n in p.names)]
    ignored = {param.name for param in out}

    def kept(module: ModuleInfo) -> ModuleInfo:
        params = tuple((attribute, name) for attribute, name in module.params if name not in ignored)
        gone = dict(module.params).get("weight") in ignored  # what has no weight here computes as it is
        return replace(module, params=params, kind="other" if gone else module.kind)

    modules = tuple(map(kept, info.modules))
    params = tuple(param for param in info.params if param.name not in ignored)
    return replace(info, params=params, modules=modules, ignored=tuple(name for param in out for name in param.names))


def _rules(draft: _Draft) -> dict[str, _Rule]:
    """Parameter -> its rule."""
    found: dict[str, _Rule] = {}
    policy, problems = draft.policy, draft.problems
    lacking: dict[tuple[str, ...], list[str]] = {}  # axes that the mesh has not -> parameters with them in their rules
    for pattern in policy.rules:
        try:
            compile_pattern(pattern)
        except ShardError as error:
            problems.append(str(error))
    if problems:
        return found
    for param in draft.info.params:
        problems += _conflicts(param, policy)
        try:
            rule = _rule(draft, param)
        except ShardError as error:
            problems.append(f"{param.name} {param.shape}: {error}")
            continue
        wrong = _axis_problems(draft, rule[0])
        unknown = tuple(sorted({axis for factor in rule[0].factors for axis in factor.axes} - draft.axes.keys()))
        lacking.setdefault(unknown, []).append(param.name)
        if not unknown or len(lacking[unknown]) == 1:
            problems += [f"{param.name}: {why}" for why in wrong]
        if not wrong:
            found[param.name] = rule
    problems += [
        f"the rules of {len(names) - 1} more parameters name '{', '.join(unknown)}', too. "
        "from_transformers and from_parallelize_plan are told the names of axes by axis= and data_axis="
        for unknown, names in lacking.items()
        if unknown and len(names) > 1
    ]
    found |= _bias_rules(draft, found)
    draft.check_patterns("rule", policy.rules, "parameter")
    return found


def _rule(draft: _Draft, param: ParamInfo) -> _Rule:
    """The rule of a parameter by the first pattern that matches one of its names, or by default."""
    pattern = first_match(draft.policy.rules, param.names)
    if pattern is None:
        spec, source = _default(draft, param)
    else:
        spec = _with_logical_axes(parse(draft.policy.rules[pattern]), draft.policy).expand(len(param.shape))
        source = f"rule {pattern!r}"
    return (spec, source) if param.placed is None else _where_placed(draft, param, spec, source)


def _where_placed(draft: _Draft, param: ParamInfo, spec: Spec, source: str) -> _Rule:
    """A rule with the splits that a DTensor has already, which are those over compute axes."""
    dims, role = list(spec.dims), draft.role
    if compute := [axis for factor in spec.factors for axis in factor.axes if axis in role.compute]:
        raise ShardError(f"the rule '{spec}' splits it over '{compute[0]}', but it is a DTensor split by itself")
    for axis, dim in reversed(param.placed or ()):
        if axis in role.data and dim is None:
            continue  # its modules compute with DTensors on the whole mesh
        if axis not in role.compute:
            why = "splits the batch" if axis in draft.axes else f"is no axis of the mesh {draft.axes}"
            raise ShardError(
                f"it is a DTensor over '{axis}', which {why}. Shard over the whole mesh, with that axis by its name, "
                "such as sf.make_mesh(fsdp=2, tp=2) whose mesh['tp'] parallelize_module was given"
            )
        if dim is not None:
            over = prod(draft.axes[a] for a, d in param.placed or () if d == dim)
            if param.shape[dim] % over:
                raise ShardError(
                    f"it is a DTensor whose dim {dim} is split unevenly, {param.shape[dim]} % {over} = "
                    f"{param.shape[dim] % over}; let parallelize_module leave it whole"
                )
            outer, *others = dims[dim].factors
            split = replace(outer, axes=(axis, *outer.axes))
            dims[dim] = Dim((Block((split, *others)),))
    placed = replace(spec, dims=tuple(dims))
    return parse(str(placed)), f"{source}, on a DTensor"


def _conflicts(param: ParamInfo, policy: Policy) -> list[str]:
    """A tied parameter whose names match rules that differ."""
    chosen = {name: policy.rules[p] for name in param.names if (p := first_match(policy.rules, [name])) is not None}
    if len(set(chosen.values())) < 2:
        return []
    said = ", ".join(f"{name!r} has {rule!r}" for name, rule in chosen.items())
    return [f"{param.name}: one tensor under several names needs one rule, but {said}"]


def _bias_rules(draft: _Draft, found: Mapping[str, _Rule]) -> dict[str, _Rule]:
    """The bias of a linear whose weight splits its outputs over a compute axis is split alike, if no rule says how."""
    derived: dict[str, _Rule] = {}
    default, role = draft.policy.default, draft.role
    placed = {param.name for param in draft.info.params if param.placed is not None}
    for module in draft.info.modules if default != "error" else ():
        names = dict(module.params)
        fused = "in_proj_" if module.kind == "attention" else ""
        weight, bias = names.get(f"{fused}weight", ""), names.get(f"{fused}bias", "")
        at = 0 if fused else BIAS_DIM.get(module.kind)
        if at is None or weight not in found or bias not in found or weight in placed or bias in placed:
            continue
        dim = found[weight][0].dims[at]
        splits = {axis for factor in dim.factors for axis in factor.axes}
        if not splits.intersection(role.compute) or not found[bias][1].startswith("default"):
            continue
        (factor, *others), words = dim.factors, str(dim)
        # A `?` would then ask about more axes than the weight's does.
        if default == "auto" and not others and not factor.optional and not splits.intersection(role.data):
            words = str(replace(factor, axes=(*factor.axes, *role.shardable)))
        derived[bias] = (parse(words), f"the rule of '{weight}'")
    return derived


def _with_logical_axes(spec: Spec, policy: Policy) -> Spec:
    """Put the axes of `Policy.axes` on the factors that have none of their own."""

    def split(factor: Factor) -> Factor:
        axes = policy.axes.get(factor.name, ())
        return factor if factor.axes else replace(factor, axes=(axes,) if isinstance(axes, str) else tuple(axes))

    if not policy.axes:
        return spec
    out = spec.with_factors(split)
    for problem in repeated_axes(out):
        raise ShardError(problem)
    return out


def _default(draft: _Draft, param: ParamInfo) -> _Rule:
    """The rule of a parameter that no pattern matches; sizes stand as numbers."""
    policy, split = draft.policy, draft.role.shardable
    if policy.default == "error":
        raise ShardError("no rule matches it, and Policy(default='error') asks for one; add a rule, '...' replicates")
    words = [str(size) for size in param.shape]
    numel = prod(param.shape)
    if policy.default == "auto" and param.shape and numel and numel >= policy.min_size:
        ways = prod(draft.axes[axis] for axis in split)
        even = [dim for dim, size in enumerate(param.shape) if size % ways == 0]
        largest = sorted(range(len(param.shape)), key=lambda dim: -param.shape[dim])
        dim = 0 if 0 in even else next((d for d in largest if d in even), largest[0])
        words[dim] = "@".join((words[dim], *split))
    return parse(" ".join(words)), f"default {policy.default!r}"


def _axis_problems(draft: _Draft, spec: Spec) -> list[str]:
    """Axes that the mesh lacks, that may not split weights, or that nest the wrong way round."""
    role, problems = draft.role, unknown_axes(spec, draft.axes)
    if spec.partial:
        problems.append(
            f"a parameter cannot be a pending sum (+{','.join(spec.partial)})\n{spec.caret(spec.partial_span)}"
        )
    for factor in spec.factors:
        marked = spec.caret(factor.span)
        problems += [
            f"weights never shard over '{axis}', which only splits the batch; leave '@{axis}' out\n{marked}"
            for axis in factor.axes
            if axis in role.data and axis not in role.shardable
        ]
        ordered = sorted((axis for axis in factor.axes if axis in draft.axes), key=role.storage.index)
        if len(ordered) == len(factor.axes) and ordered != list(factor.axes):
            right = "@".join((factor.name, *ordered))
            why = f"axes nest compute axes first, then data axes, each in the mesh's order; write '{right}'"
            problems.append(f"{why}\n{marked}")
    return problems


def _layout(draft: _Draft, param: ParamInfo, spec: Spec, source: str) -> Layout:
    """The layout of one parameter, from its rule and the solved sizes."""
    true = draft.sizes.of(param.name, spec)
    padded = [draft.padded(factor, size) for factor, size in zip(spec.factors, true, strict=True)]
    sizes = iter(padded)
    rule = spec.with_factors(lambda factor: _resolve(draft, param, spec, factor, next(sizes)))
    dims = rule.grouped(zip(rule.factors, true, padded, strict=True))
    fused = next((at for at, dim in enumerate(dims) if len(dim) > 1), 0)
    parts = rule.dims[fused].blocks if dims else ()
    names = [f"{param.name}[{part.label or i}]" for i, part in enumerate(parts)] if len(parts) > 1 else [param.name]
    leaves = tuple(
        _leaf(draft, name, rule, [dim[i if at == fused else 0] for at, dim in enumerate(dims)])
        for i, name in enumerate(names)
    )
    shared = _shared(draft, spec, rule, true)
    return Layout(**vars(param), rule=rule, source=source, leaves=leaves, block_dim=fused, shared=shared)


def _shared(draft: _Draft, spec: Spec, rule: Spec, sizes: Sequence[int]) -> tuple[tuple[str, int], ...]:
    """(axis, parts) of every compute axis that a `?` on the outermost factor of dim 0 was denied."""
    if not rule.dims or len(rule.dims[0].blocks) > 1:
        return ()
    asked, given = spec.factors[0], rule.factors[0]
    denied = [axis for axis in draft.splitting(asked.axes) if axis not in given.axes]
    return tuple((axis, sizes[0]) for axis in denied if asked.optional)


def _resolve(draft: _Draft, param: ParamInfo, spec: Spec, factor: Factor, size: int) -> Factor:
    """A factor of a rule with its `?` decided; what is split must divide."""
    compute = [axis for axis in factor.axes if axis in draft.role.compute]
    ways = prod(draft.axes[axis] for axis in (factor.axes if factor.optional else compute))
    if size % ways == 0:
        return factor
    if factor.optional:
        return replace(factor, axes=(), optional=False)
    over = " x ".join(f"{axis}={draft.axes[axis]}" for axis in compute)
    remedies = [] if _counted(factor, draft.policy) else [f"'{factor}?' to replicate it when it does not divide"]
    if factor.literal is None and factor.name != "_":
        remedies.append(f"Policy(pad={_padding(draft, factor, ways)})")
    at = next(at for at, dim in enumerate(spec.dims) if any(each is factor for each in dim.factors))
    draft.problems.append(
        f"{param.name!r} has shape {param.shape}; rule '{spec.source}' splits dim {at} ({factor.name}={size}) over "
        f"{over}, {size} % {ways} = {size % ways}.\n{spec.caret(factor.span)}\n    Write {', or '.join(remedies)}."
    )
    return replace(factor, axes=())


def _counted(factor: Factor, policy: Policy) -> bool:
    """Whether `Policy.local_sizes` has a module compute with the part of a factor."""
    texts = (text for given in policy.local_sizes.values() for text in given.values())
    return any(re.search(rf"\b{factor.name}\s*@[\s\w@]*(?!\s*\?)", text) for text in texts)


def _leaf(draft: _Draft, name: str, rule: Spec, blocks: Sequence[Sequence[_Sized]]) -> Leaf:
    """The stored leaf that is made of one block of each dim."""
    stored: list[_Sized] = []
    merges: list[int] = []
    for block in blocks:
        dims = block
        if _flat(draft, block):
            (outer, true, padded), *inner = block
            size = prod(true for _, true, _ in inner)
            dims = [(outer, true * size, padded * size)]
        stored += dims
        merges.append(len(dims))
    factors = (tuple(factor for factor, _, _ in block) for block in blocks)
    own = tuple(replace(dim, blocks=(Block(each),)) for dim, each in zip(rule.dims, factors, strict=True))
    return Leaf(
        name,
        shape=tuple(size for _, _, size in stored),
        extent=tuple(true for _, true, _ in stored),
        splits=tuple(factor.axes for factor, _, _ in stored),
        merges=tuple(merges),
        rule=replace(rule, dims=own),
    )


def _flat(draft: _Draft, block: Sequence[_Sized]) -> bool:
    """Whether a plain split of the whole dim cuts only between whole outermost factors."""
    (outer, _, padded), *inner = block
    if any(factor.axes or true != stored for factor, true, stored in inner):
        return False
    return not inner or padded % draft.ways(outer) == 0


def _unit_names(draft: _Draft) -> list[str]:
    """Names of the modules that `Policy.units` asks for, in the model's order."""
    modules, units = draft.info.modules, draft.policy.units
    if not modules:
        return []
    if units == "auto":
        return _auto_units(modules)
    wanted = (units,) if isinstance(units, str) else tuple(units)
    for pattern in wanted:
        if not any(_is_unit(pattern, module) for module in modules):
            draft.note_unmatched("Policy.units:", pattern, "module")
    return [m.name for m in modules if m.name and any(_is_unit(pattern, m) for pattern in wanted)]


def _is_unit(pattern: str, module: ModuleInfo) -> bool:
    if pattern.startswith("class:"):
        return pattern.removeprefix("class:") in module.classes
    return matches(pattern, module.name)


def _auto_units(modules: Sequence[ModuleInfo]) -> list[str]:
    """Members of the outermost lists of like modules.

    Lists inside a unit (experts, branches) do not make units of their own: a rank that skips one of them would leave
    the others waiting in its all-gather.
    """
    units: list[str] = []
    lists = {m.name for m in modules if m.list_of}
    for name in (module.name for module in modules if module.name):
        parent, _, leaf = name.rpartition(".")
        if parent in lists and leaf.isdecimal() and not any(is_in(name, unit) for unit in units):
            units.append(name)
    return units


def _owners(info: ModelInfo, units: Sequence[str]) -> dict[str, str]:
    """Parameter -> the deepest unit that holds all of its names; the root unit when there is none."""
    return {
        param.name: max((u for u in units if all(is_in(name, u) for name in param.names)), key=len, default="")
        for param in info.params
    }


def _units(draft: _Draft, layouts: Mapping[str, Layout], names: Sequence[str]) -> tuple[Unit, ...]:
    """The root unit first, then the others in the model's order, but none without parameters that casts nothing."""
    members: dict[str, list[Layout]] = {name: [] for name in ("", *names)}
    for layout in layouts.values():
        members[layout.unit].append(layout)
    modules = {module.name: module for module in draft.info.modules}
    found = (_unit(draft, name, own, modules.get(name)) for name, own in members.items())
    return tuple(unit for unit in found if unit.params or (unit.name and (unit.input_dtype or unit.output_dtype)))


def _unit(draft: _Draft, name: str, own: Sequence[Layout], module: ModuleInfo | None) -> Unit:
    settings = _own_settings(draft.policy, module)
    there = replace(draft.policy, **{"output_dtype": None} | settings)
    buckets = _buckets(name, own, draft.role, there)
    # The inputs of the whole model are cast already: only a unit that differs does it again. Without a dtype to compute
    # in, of the policy or its own, inputs stay as they are.
    casts = there.cast_inputs and ("cast_inputs" in settings or "compute_dtype" in settings)
    casts = casts and not (there.compute_dtype is None and draft.policy.compute_dtype is None)
    dtypes = {bucket.dtype for bucket in buckets if bucket.dtype.is_floating_point}
    if not own and there.compute_dtype is not None:
        dtypes = {there.compute_dtype}
    given = dtypes.pop() if casts and len(dtypes) == 1 else None
    params = tuple(layout.name for layout in own)
    regather = there.regather if name else settings.get("regather", False)
    return Unit(name, params, buckets, regather, given, there.output_dtype if name else None)


def _own_settings(policy: Policy, unit: ModuleInfo | None) -> dict[str, Any]:
    """The settings that one unit has of its own; for the root unit those under the name ''."""
    if unit is None or not isinstance(policy.units, Mapping):
        return {}
    if not unit.name:
        return dict(policy.units.get("", {}))
    found: dict[str, Any] = {}
    for pattern, settings in policy.units.items():
        found |= settings if _is_unit(pattern, unit) else {}
    return found


def _buckets(unit: str, layouts: Sequence[Layout], role: Roles, policy: Policy) -> tuple[Bucket, ...]:
    groups: dict[tuple[tuple[str, ...], tuple[str, ...], torch.dtype], list[Leaf]] = {}
    for layout in layouts:
        cast = policy.compute_dtype if layout.dtype.is_floating_point else None
        for leaf in layout.leaves:
            axes = tuple(axis for axis in role.data if axis in leaf.axes and axis not in layout.kept)
            groups.setdefault((axes, layout.kept, cast or layout.dtype), []).append(leaf)
    names = {key: tuple(leaf.name for leaf in sorted(leaves, key=_travels_late)) for key, leaves in groups.items()}
    return tuple(
        Bucket(unit, own, axes, dtype, policy.reduce_dtype, kept) for (axes, kept, dtype), own in names.items()
    )


def _travels_late(leaf: Leaf) -> tuple[bool, int]:
    """Sorts a bucket: leaves that may travel straight into their place come first, large ones before small ones."""
    return not leaf.splits or not leaf.splits[0], -prod(leaf.shape)


_HOLDERS = {f"torch.nn.modules.container.Parameter{what}" for what in ("List", "Dict")}


def _uncomputable(draft: _Draft, layouts: Mapping[str, Layout], forwards: Collection[str]) -> list[str]:
    """Modules that own a parameter split over a compute axis without a forward that can work with its part."""
    problems, read_by = [], set[str]()  # modules whose weights are read by the one that they are in
    for module in draft.info.modules:
        names = {attr: name for attr, name in module.params if name in layouts and layouts[name].placed is None}
        own_forward = module.name in forwards
        if module.kind == "attention" and not own_forward:
            read_by.add(_out_proj(module))
            problems += _unlike_heads(draft, module, layouts)
        bias, weight = (layouts.get(names.get(attribute, "")) for attribute in ("bias", "weight"))
        if module.kind in BIAS_DIM and bias is not None and weight is not None:
            dims = ((bias, 0), (weight, BIAS_DIM[module.kind]))
            have, want = (draft.splitting(layout.model_axes(dim)) for layout, dim in dims)
            if have != want:
                problems.append(
                    f"{bias.name}: rule '{bias.rule}' must split it over the compute axes of the outputs of "
                    f"'{weight.name}' ('{weight.rule}'): {', '.join(want) or 'none'}"
                )
        if module.kind != "other" or own_forward or module.name in read_by or module.classes[0] in _HOLDERS:
            continue  # a holder has no forward
        if not module.classes[0].startswith("torch.nn."):
            continue  # a forward of the user's: the run without data tells whether it can work with parts
        for attribute, layout in ((attribute, layouts[name]) for attribute, name in names.items()):
            if split := draft.splitting(layout.axes):
                where = f"{module.classes[0].rpartition('.')[2]} {module.name or '(the model)'!r}"
                problems.append(
                    f"{layout.name}: rule '{layout.rule}' splits it over {', '.join(split)}, but {where} uses its "
                    f"'{attribute}' in a forward of its own.\n    Take '@{split[0]}' out of the rule, use nn.Linear or "
                    "nn.Embedding there, or give the module a parallel forward: "
                    f"Policy(compute={{{module.name!r}: fn}}), or @sf.register for its class."
                )
    return problems


def _out_proj(attention: ModuleInfo) -> str:
    return f"{attention.name}.out_proj" if attention.name else "out_proj"


def _unlike_heads(draft: _Draft, module: ModuleInfo, layouts: Mapping[str, Layout]) -> list[str]:
    """`nn.MultiheadAttention` whose weights before and after the heads are not split over the same compute axes."""
    after = draft.info.module(_out_proj(module))
    names = dict(module.params) | {f"out_proj.{key}": name for key, name in (after.params if after else ())}
    found = {attribute: layouts[name] for attribute, name in names.items() if name in layouts}
    complete = len(found) == len(names) and "out_proj.weight" in found  # and no part of a model
    if not complete or any(layout.placed is not None for layout in found.values()):
        return []
    splits = {
        attribute: [draft.splitting(layout.model_axes(dim)) for dim in range(len(layout.shape))]
        for attribute, layout in found.items()
    }
    wanted = splits["out_proj.weight"][1]
    alike = {
        attribute: [wanted if dim == _DIM_OF_HEADS.get(attribute, 0) else [] for dim in range(len(dims))]
        for attribute, dims in splits.items()
    }
    if splits == alike:
        return []
    axis = next(axis for dims in splits.values() for split in dims for axis in split)
    rules = ", ".join(f"{attribute} '{layout.rule}'" for attribute, layout in found.items())
    return [
        f"{module.name or '(the model)'}: MultiheadAttention computes with whole heads when all of its weights are "
        f"split between them; here {rules}.\n    Write in_proj_weight '(3 heads@{axis} d) _', in_proj_bias "
        f"'(3 heads@{axis} d)' and out_proj.weight '_ (heads@{axis} d)'; of another kdim or vdim q_proj_weight, "
        f"k_proj_weight and v_proj_weight '(heads@{axis} d) _'."
    ]


# Of a weight of `nn.MultiheadAttention`, if not the first; its own keys and values are [1, 1, c], and have none.
_DIM_OF_HEADS = {"out_proj.weight": 1, "out_proj.bias": None, "bias_k": None, "bias_v": None}


def _check_names(draft: _Draft) -> None:
    """Names in `sizes`, `pad` and `axes` that look like those of the rules misspelt; axes that the mesh does not have.

    Further names are fine: a policy may serve several models.
    """
    policy, axes, problems = draft.policy, draft.axes, draft.problems
    factors: set[str] = set()
    for rule in policy.rules.values():
        try:
            factors |= {factor.name for factor in parse(rule).factors}
        except (ShardError, TypeError):
            return  # reported with its rule
    for field_name in ("sizes", "pad", "axes"):
        for name in getattr(policy, field_name):
            typo = next(iter(get_close_matches(name, sorted(factors - {name}), 1, 0.8)), None)
            if name not in factors and typo and _letters(typo) != _letters(name):
                problems.append(f"Policy.{field_name}: no rule has a dim named '{name}'; did you mean '{typo}'?")
    for name, split in policy.axes.items():
        for axis in (split,) if isinstance(split, str) else split:
            if axis not in axes:
                problems.append(f"Policy.axes[{name!r}]: unknown mesh axis '{axis}'{did_you_mean(axis, axes) or '.'}")
    if policy.batch != BATCH_AXES:
        usual = BATCH_AXES if set(BATCH_AXES) <= set(policy.batch) else ()  # of which a mesh has some
        for pattern in (pattern for pattern in policy.batch if pattern not in usual):
            if not any(fnmatchcase(axis, pattern) for axis in axes):
                hint = did_you_mean(pattern, axes) or "."
                problems.append(f"Policy.batch: the mesh {axes} has no axis '{pattern}'{hint}")


def _letters(name: str) -> str:
    return "".join(c for c in name if not c.isdigit())


def _check_settings(draft: _Draft) -> None:
    """Settings that do not fit the mesh or the model."""
    _check_names(draft)
    axes, policy, problems = draft.axes, draft.policy, draft.problems
    axis = _innermost(draft.role.data, axes)
    for count in dict.fromkeys(_regathers(policy)):
        if count and not isinstance(count, bool) and axis is not None and axes[axis] % count:
            problems.append(
                f"Policy(regather={count}): a part over {count} ranks is kept, which must divide "
                f"{axis}={axes[axis]}, {axes[axis]} % {count} = {axes[axis] % count}"
            )
    for kind in ("acts", "compute") if draft.info.modules else ():
        draft.check_patterns(f"Policy.{kind}:", getattr(policy, kind), "module")
    for pattern, rule in policy.acts.items():
        try:
            unknown = unknown_axes(parse(rule), axes)
        except ShardError as error:
            unknown = [str(error)]
        problems += [f"Policy.acts[{pattern!r}]: {problem}" for problem in unknown]


def _innermost(data: Sequence[str], axes: Mapping[str, int]) -> str | None:
    """The last data axis of several ranks."""
    return next((axis for axis in reversed(data) if axes[axis] > 1), None)


def _described(layout: Layout) -> str:
    stored = " + ".join(str(leaf.shape) for leaf in layout.leaves)
    trains = "trainable" if layout.trainable else "frozen"
    return f"{layout.rule} {layout.shape} {_dtype(layout.dtype)}, stored as {stored}, {trains}"


def _function_name(fn: Callable[..., Any]) -> str:
    """A name that is equal on all ranks; `repr` would hold an address."""
    inner = getattr(fn, "func", fn)  # of functools.partial
    return getattr(inner, "__qualname__", class_name(type(inner)))


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
