"""What has been decided about one model on one mesh, as plain data: layouts, units and buckets.

Nothing here touches a tensor's values or a process group. The code that moves data looks its decisions up here and
never thinks; `planning.py` makes them.
"""

import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Any, Literal, TypeVar

import torch

from shardfn.layout.layout import Layout, Leaf
from shardfn.layout.mesh import Roles
from shardfn.layout.model_info import ModelInfo, ModuleInfo, class_name
from shardfn.layout.policy import Policy, first_match
from shardfn.notation import ShardError, Spec, did_you_mean, in_one, parse, without_numbers

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


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Plan:
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
            "acts": first_matches(self.policy.acts, self.info),
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

    def given_rule(self, layout: Layout) -> Spec:
        """The rule of a parameter as the policy has it, or as it was decided, for all of its dims."""
        pattern = first_match(self.policy.rules, layout.names)
        return parse(str(layout.rule) if pattern is None else self.policy.rules[pattern]).expand(len(layout.shape))

    def compute_axes(self, layout: Layout, dim: int | None = None) -> list[str]:
        """The compute axes of several ranks by which a rule splits a parameter, or one of its dims; outermost first.

        None for a parameter that is a DTensor over them: its modules know what to do.
        """
        split_over = layout.axes if dim is None else layout.model_axes(dim)
        several = (axis for axis in self.roles.compute if axis in split_over and self.axes[axis] > 1)
        return [] if layout.placed is not None else list(several)

    def gathered_axes(self, layout: Layout) -> list[str]:
        """The data axes over which modules compute with a whole parameter."""
        return [axis for axis in self.roles.data if axis not in layout.kept]

    @property
    def key(self) -> tuple[Any, ...]:
        """What two equal plans have in common."""
        return self.home.once("key", self._key)

    def _key(self) -> tuple[Any, ...]:
        p, each = self.policy, self.layouts.items()
        settings = (p.regather, p.compute_dtype, p.reduce_dtype, p.output_dtype, p.cast_inputs, p.offload)
        rows = [(n, x.aliases, x.shape, x.dtype, x.trainable, x.leaves, x.block_dim, x.placed, x.kept) for n, x in each]
        forwards = [(name, _function_name(fn)) for name, fn in self.forwards.items()]
        sizes = [(name, [*sizes.items()]) for name, sizes in self.local_sizes.items()]
        decided = ([*self.axes.items()], self.roles, rows, self.units, settings, [*p.acts.items()])
        return *decided, forwards, sizes, self.vmaps

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
        other = self.home.once(("reduction", reduction), lambda: replace(self, reduction=reduction))
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
        for unit, bucket in [(each, bucket) for each in self.units for bucket in each.buckets]:
            several = [axis for axis in self.roles.data if self.axes[axis] > 1 and axis not in bucket.kept]
            split = [axis for axis in bucket.axes if axis in several]
            kept = self.kept_over(unit) if unit.regather else 1  # None: all of it is gathered again
            again = {None: len(split), 1: 0}.get(kept, min(len(split), 1))
            trains, received = any(self.leaves[name][0].trainable for name in bucket.leaves), 0
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
            yield len(split) + again + (len(several) if trains else 0), received

    @property
    def keep_axis(self) -> str | None:
        """The data axis whose neighbours share what `Policy(regather=n)` keeps: the innermost of several ranks."""
        return innermost(self.roles.data, self.axes)

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
        share = 1 - sum(layout.numel for layout in whole) / max(total, 1)
        if total and share < fraction:
            names = ", ".join(x.name for x in sorted(whole, key=lambda x: -x.numel)[:3])
            raise ShardError(f"only {share:.1%} of the elements are sharded, {fraction:.1%} wanted; whole: {names}")

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
        for name, unit, layout, count in self._alike():
            shapes = [self.local_shape(leaf.name) for leaf in layout.leaves]
            size = f"{sum(prod(shape) for shape in shapes) * layout.dtype.itemsize:,}"
            local = " + ".join(str(list(shape)) for shape in shapes)
            size = size if count == 1 else f"{count} x {size}"
            rows.append((name, str(list(layout.shape)), str(layout.rule) or "(scalar)", local, size, unit or "(root)"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.axes.items())
        alone = len(self.units) == 1 and not self.units[0].name
        units = "1 unit, the whole model at once" if alone else f"{len(self.units)} units"
        return (
            f"{table}\nmesh {mesh}; {self.bytes_per_rank:,} bytes of shards per rank; {units}; "
            f"{self.data_collectives} collectives over data axes and {self.comm_bytes:,} bytes received per step"
        )

    def _alike(self) -> Iterator[tuple[str, str, "Layout", int]]:
        """Parameters that differ by numbers in their names alone, as one: a name, a unit, a layout, how many."""
        groups: dict[Hashable, list[Layout]] = {}
        for layout in self.layouts.values():
            leaves = tuple((leaf.shape, leaf.splits) for leaf in layout.leaves)
            names = without_numbers(layout.name), without_numbers(layout.unit)
            groups.setdefault((names, layout.shape, str(layout.rule), layout.dtype, leaves), []).append(layout)
        for group in groups.values():
            name, unit = in_one([x.name for x in group]), in_one([x.unit for x in group])
            if name is not None and unit is not None:
                yield name, unit, group[0], len(group)
            else:
                yield from ((x.name, x.unit, x, 1) for x in group)

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
        roles = replace(self.roles, absent=tuple(axis for axis in self.roles.absent if axis not in axes))
        return self._once(("stacked", size, *axes), lambda: self._changed(lambda x: x.stacked(size, axes), roles))

    @property
    def has_members(self) -> bool:
        """Whether it is of trees that are stacked along a first dim, which no axis splits."""
        return all(leaf.splits[:1] == ((),) and leaf.merges[0] == 1 for _, leaf in self.leaves.values())

    @property
    def members(self) -> int | None:
        """How many trees of the model are stacked along a first dim; None for a tree as it was made."""
        first = ((param.shape, self.layouts[param.name].shape) for param in self.info.params[:1])
        return next((stored[0] for shape, stored in first if len(stored) > len(shape)), None)

    def _changed(self, change: Callable[[Layout], Layout], roles: Roles) -> "Plan":
        layouts = {name: change(layout) for name, layout in self.layouts.items()}
        leaves = {leaf.name: leaf for layout in layouts.values() for leaf in layout.leaves}

        def moved(bucket: Bucket) -> Bucket:
            # The leaves of a bucket are split over the same axes, also after a change that is the same for all.
            split = leaves[bucket.leaves[0]].axes
            kept = tuple(axis for axis in bucket.kept if axis in split)
            return replace(bucket, axes=tuple(a for a in self.roles.batch if a in split and a not in kept), kept=kept)

        units = tuple(replace(unit, buckets=tuple(map(moved, unit.buckets))) for unit in self.units)
        return replace(self, layouts=layouts, units=units, roles=roles)

    def _once(self, key: Hashable, make: Callable[[], "Plan"]) -> "Plan":
        """Made once and kept: what was computed for its collectives is found again in the next step."""
        return self.home.once(("changed", self.reduction, key), make)


def first_matches(patterns: Mapping[str, object], info: ModelInfo) -> dict[str, str]:
    """Module -> the first pattern that matches its name."""
    firsts = {module.name: first_match(patterns, [module.name]) for module in info.modules if patterns}
    return {path: pattern for path, pattern in firsts.items() if pattern is not None}


def innermost(data: Sequence[str], axes: Mapping[str, int]) -> str | None:
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
