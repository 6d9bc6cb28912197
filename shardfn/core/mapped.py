"""Plans of trees inside a transform: plain leaves, dims that `vmap` takes away, axes that have no part there. Layer 2.

What `sf.vmap` maps over lies on mesh axes: samples on the data axes, members of an ensemble on the axis that splits
their dim. Those axes have no part in the mapped function, which sees one sample or one member: nothing is gathered or
reduced over them. A tree that comes out has the mapped dim in front again, split over them.

    outside   w [out@tp, in@fsdp]        x [b@fsdp, c]
    inside    w [out@tp, in]             x [c]            `without(fsdp)`
    outside   d w [b@fsdp, out@tp, in]                    `stacked(b, fsdp)`
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial

from shardfn.core.layout import Layout
from shardfn.core.plan import Bucket, Plan
from shardfn.core.underway import holding

_AXES: ContextVar[frozenset[str]] = ContextVar("axes", default=frozenset())


def mapped_axes() -> frozenset[str]:
    """The mesh axes over which samples or members lie that the `vmap`s around map over."""
    return _AXES.get()


def mapped_over(axes: Iterable[str]) -> AbstractContextManager[None]:
    """Within it a function runs on one of what lies on `axes`."""
    return holding(_AXES, _AXES.get() | set(axes))


def inside(plan: Plan, vmaps: int) -> Plan:
    """The plan of the same tree with plain leaves, in a transform with `vmaps` mapped dims around it."""
    return plan if plan.vmaps == vmaps else _kept(plan, ("inside", vmaps), lambda: replace(plan, vmaps=vmaps))


def outside(plan: Plan) -> Plan:
    """The plan of the same tree with DTensors as leaves."""
    return plan if plan.vmaps is None else _kept(plan, ("outside",), lambda: replace(plan, vmaps=None))


def without(plan: Plan, axes: Sequence[str]) -> Plan:
    """The plan of the same leaves made whole over data axes, which have no part from there on."""
    if not axes:
        return plan
    return _kept(plan, ("without", *axes), lambda: _changed(plan, lambda x: x.without(axes), plan.roles.without(axes)))


def member(plan: Plan, axes: Sequence[str]) -> Plan:
    """The plan of one member of a tree that is stacked along its first dim, which `axes` split."""
    return _kept(plan, ("member", *axes), lambda: _changed(plan, Layout.member, plan.roles.without(axes)))


def has_members(plan: Plan) -> bool:
    """Whether it is of trees that are stacked along a first dim, which no axis splits."""
    leaves = [leaf for layout in plan.layouts.values() for leaf in layout.leaves]
    return all(leaf.splits[:1] == ((),) and leaf.merges[0] == 1 for leaf in leaves)


def members_of(plan: Plan) -> int | None:
    """How many trees of the model are stacked along a first dim; None for a tree as it was made."""
    if not plan.info.params:
        return None
    param = plan.info.params[0]
    shape = plan.layouts[param.name].shape
    return shape[0] if len(shape) > len(param.shape) else None


def stacked(plan: Plan, size: int, axes: Sequence[str]) -> Plan:
    """The plan of many such trees stacked along a new first dim of `size`, which `axes` split."""
    add = partial(Layout.stacked, size=size, axes=axes)
    back = plan.roles.whole()
    rest = tuple(axis for axis in plan.roles.absent if axis not in axes)
    return _kept(plan, ("stacked", size, *axes), lambda: _changed(plan, add, back.without(rest) if rest else back))


def _changed(plan: Plan, change: Callable[[Layout], Layout], roles: object) -> Plan:
    layouts = {name: change(layout) for name, layout in plan.layouts.items()}
    leaves = {leaf.name: leaf for layout in layouts.values() for leaf in layout.leaves}
    data = [axis for axis in plan.roles.storage if axis not in plan.roles.compute]

    def moved(bucket: Bucket) -> Bucket:
        # The leaves of a bucket are split over the same axes, also after a change that is the same for all.
        split = leaves[bucket.leaves[0]].axes
        kept = tuple(axis for axis in bucket.kept if axis in split)
        return replace(bucket, axes=tuple(axis for axis in data if axis in split and axis not in kept), kept=kept)

    units = tuple(replace(unit, buckets=tuple(map(moved, unit.buckets))) for unit in plan.units)
    return replace(plan, layouts=layouts, units=units, roles=roles)


def _kept(plan: Plan, key: Hashable, make: Callable[[], Plan]) -> Plan:
    """Made once and kept with the plan: what was computed for its collectives is found again in the next step."""
    return plan.home.once(("mapped", plan.reduction, key), make)
