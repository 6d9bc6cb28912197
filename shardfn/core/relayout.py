"""`reshard` on one tensor: the collectives that two rules imply. Layer 3.

"b s@tp c -> b s c@tp"    all-to-all          "b s c +tp -> b s c"     psum
"b s@tp c -> b s c"       all-gather          "b s c +tp -> b s@tp c"  psum_scatter
"b s c -> b s@tp c"       slice
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardfn.core.collectives import all_gather, all_gather_invariant, all_to_all, psum, psum_scatter, shard_slice
from shardfn.core.errors import ShardError
from shardfn.core.mesh import axes_of
from shardfn.core.policy import is_batch_axis
from shardfn.core.spec import Spec, parse, unknown_axes


@dataclass(frozen=True)
class Step:
    """One collective: what it does in words, and the function."""

    name: str
    run: Callable[[Tensor], Tensor]


def relayout(x: object, rule: str, mesh: DeviceMesh | None) -> Tensor:
    """This rank's part of `x` after the change that `"left -> right"` names."""
    if not isinstance(x, Tensor) or isinstance(x, DTensor):
        raise TypeError(f"reshard: with a string, x is one plain local tensor, not {type(x).__name__}")
    if mesh is None:
        raise TypeError("reshard: with a string, pass the mesh too: reshard(x, 'b s@tp -> b s', mesh)")
    left, right = _sides(rule, mesh, x.dim())
    for step in steps(left, right, mesh):
        x = step.run(x)
    return x


def _sides(rule: str, mesh: DeviceMesh, ndim: int) -> tuple[Spec, Spec]:
    halves = rule.split("->")
    if len(halves) != 2:
        raise ShardError(f"reshard: {rule!r} needs one '->' between the two layouts")
    cut = len(halves[0])
    left, right = (parse(rule, span).expand(ndim) for span in ((0, cut), (cut + 2, len(rule))))
    names = [[[factor.name for factor in dim.factors] for dim in side.dims] for side in (left, right)]
    if names[0] != names[1]:
        raise ShardError(f"reshard: {rule!r} changes names; both sides name the same dims in the same order")
    axes = axes_of(mesh)
    for side in (left, right):
        for dim in side.dims:
            for i, factor in enumerate(dim.factors):
                if factor.axes and (i or len(dim.blocks) > 1):
                    raise ShardError(
                        f"reshard: only the outermost factor of a dim can be split here\n{side.caret(factor.span)}"
                    )
        if unknown := unknown_axes(side, axes):
            raise ShardError(f"reshard: {unknown[0]}")
    return left, right


def steps(left: Spec, right: Spec, mesh: DeviceMesh) -> list[Step]:
    """The collectives from one layout to another: sums first, then moves, gathers (innermost first) and slices."""
    have, want = _axes(left), _axes(right)
    new_sums = [axis for axis in right.partial if axis not in left.partial]
    if new_sums:
        raise ShardError(
            f"reshard: a value cannot become a pending sum (+{new_sums[0]})\n{right.caret(right.partial_span)}"
        )
    out: list[Step] = []
    for axis in (axis for axis in left.partial if axis not in right.partial):
        dim = next((d for d, axes in enumerate(want) if axis in axes), None)
        if dim is not None and want[dim] == [*have[dim], axis]:
            out.append(_step("psum_scatter", psum_scatter, mesh, axis, dim))
            have[dim].append(axis)
        else:
            out.append(_step("psum", psum, mesh, axis))
    out += _moved(have, want, mesh)
    for dim, axes in enumerate(have):
        while axes != want[dim][: len(axes)]:
            out.append(_gather(mesh, axes.pop(), dim))
    for dim, axes in enumerate(have):
        for axis in want[dim][len(axes) :]:
            out.append(_step("slice", shard_slice, mesh, axis, dim))
    return out


def _axes(spec: Spec) -> list[list[str]]:
    return [[axis for factor in dim.factors for axis in factor.axes] for dim in spec.dims]


def _moved(have: list[list[str]], want: list[list[str]], mesh: DeviceMesh) -> list[Step]:
    """All-to-alls for axes that leave the end of one dim for the end of another; `have` follows."""
    out = []
    for i, axes in enumerate(have):
        for j, target in enumerate(want):
            if i != j and axes and target == [*have[j], axes[-1]]:
                axis = axes.pop()
                have[j].append(axis)
                out.append(_step("all_to_all", all_to_all, mesh, axis, j, i))
    return out


def _gather(mesh: DeviceMesh, axis: str, dim: int) -> Step:
    """Ranks of a data axis go on with losses of their own, so cotangents are summed; those of a compute axis agree."""
    gather = all_gather if is_batch_axis(axis) else all_gather_invariant
    return _step("all_gather", gather, mesh, axis, dim)


def _step(name: str, collective: Callable[..., Tensor], mesh: DeviceMesh, axis: str, *dims: int) -> Step:
    return Step(f"{name}({axis})", lambda x: collective(x, mesh, axis, *dims))
