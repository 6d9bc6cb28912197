"""The values that a tree begins with: those of a model, of one rank, or what `init` puts into meta tensors.

What `init` does is in `meta_init.py`. Values in files come from `checkpoint/safetensors.py`.
"""

import hashlib
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardfn import _torch, layout
from shardfn.comm import VALUES, agree, agree_on, empty_shards, failing_together, leaf_spec, whole
from shardfn.layout import Grid, Layout, Plan, Policy, named_buffers, named_parameters, own_parts, plan, to_leaves
from shardfn.notation import ShardError, see
from shardfn.params.meta_init import ALIKE, Init, initialized
from shardfn.params.tree import Params


class Origin(NamedTuple):
    """Where whole values come from: a model, what `init` puts into its meta tensors, the rank `src`.

    `later`: some of them come some other way, or some other time.
    """

    model: nn.Module | Mapping[str, Tensor]
    init: Init | None = None
    src: int | None = None
    later: bool = False

    def facts(self, alike: bool, held: Container[str] = ()) -> list[str]:
        """What the ranks must have in common besides the plan: the collectives they will issue, and their values."""
        buffers = named_buffers(self.model)
        lines = [f"buffer '{name}' {tuple(x.shape)} {x.dtype}" for name, x in buffers.items()]
        lines += [f"src={self.src}", "an init function" if self.init is not None else "no init function"]
        for name, x in named_parameters(self.model).items() if isinstance(self.model, nn.Module) else ():
            if _torch.has_gradient_hooks(x) and not isinstance(x, DTensor):
                why = f"shard: '{name}' has hooks for its gradient, which its shards would be without"
                raise ShardError(f"{why}. Register them later, for backward(), or map gradients, by sf.tree.map")
        if alike and self.src is None:
            for name, x in (named_parameters(self.model) | buffers).items():
                if name not in held and not isinstance(x, DTensor) and not x.is_meta:
                    lines.append(f"{VALUES} '{name}' {sampled(x)}")
        return lines


def shard_own(origin: Origin, mesh: DeviceMesh, policy: Policy | Plan, alike: bool = False) -> Params:
    """`shard` for ranks that may have other values, of which each keeps its own part, unless they must be `alike`.

    Of an origin with `later`, what is on the meta device stays there, as shards that are filled some other time.
    """
    if isinstance(policy, Plan) and isinstance(origin.model, Mapping):
        origin = origin._replace(model=_tied_as_in(policy, origin.model))
    plan_, grid, seed = agreed_plan(origin, mesh, policy, lambda _: origin.facts(alike))
    tree = NewTree(plan_, mesh, grid, empty_shards(plan_, grid), {})
    tree.fill(origin, seed)
    return tree.wrapped()


def _tied_as_in(plan_: Plan, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Values by all names that a plan has for each: some may be missing, and those of a state dict are copies."""
    named: dict[str, Tensor] = {}
    for param in plan_.info.params:
        have = [values[name] for name in param.names if isinstance(values.get(name), Tensor)]
        if len({_torch.unwrap_local(x).data_ptr() for x in have}) == 1:
            named |= dict.fromkeys(param.names, have[0])
    return {**named, **{name: x for name, x in values.items() if name not in named}}


@dataclass
class NewTree:
    """This rank's part of a tree in the making: plain tensors, which are filled one by one."""

    plan: Plan
    mesh: DeviceMesh
    grid: Grid
    shards: dict[str, Tensor]
    buffers: dict[str, Tensor]

    def fill(self, origin: Origin, seed: int, held: Container[str] = ()) -> None:
        """Fill the parameters and buffers that are not `held`, by first names; one parameter at a time is whole."""
        (model, init, src, _), grid, layouts = origin, self.grid, self.plan.layouts
        named, buffers = named_parameters(model), named_buffers(model)
        done: set[str] = set()
        if init is not None and isinstance(model, nn.Module) and src is None:
            samples, blank = list[str](), [name for name, x in buffers.items() if x.is_meta]
            with failing_together(self.mesh, "shard"):
                for name, full in initialized(model, init, seed, grid.device, buffers, held):
                    done.add(name)
                    samples.append(f"{VALUES} '{name}' {sampled(full)}")
                    self.cut(layouts[name], full)
                    del full  # the next tensor is not made before this one is gone
                filled = [name for name in blank if not buffers[name].is_meta]
                samples += [f"{VALUES} '{name}' {sampled(buffers[name])}" for name in filled]
            if not _torch.simulated():
                agree_on(self.mesh, "shard: init", samples, instead=f". {ALIKE}")
        for one in layouts.values():
            if one.name not in done and one.name not in held:
                value = named[one.name]
                value = whole(value) if isinstance(value, DTensor) and not value.is_meta else value
                self.cut(one, from_src(value, src, grid))
                del value
        for name, buffer in buffers.items():
            sent = from_src(buffer, src, grid)
            own = sent if sent.is_meta else torch.empty_like(sent, device=grid.device).copy_(sent)
            self.buffers[name] = _torch.of_each_rank(own) if _torch.simulated() else own

    def cut(self, layout: Layout, full: Tensor) -> None:
        """Fill this rank's part of every leaf of a full tensor; what is on the meta device stays so."""
        if full.is_meta:
            self.shards |= {leaf.name: self.shards[leaf.name].to("meta") for leaf in layout.leaves}
            return
        parts = own_parts(layout.leaves, to_leaves(layout, full.detach()), self.grid, None)
        for leaf, part in zip(layout.leaves, parts, strict=True):
            self.shards[leaf.name].copy_(part)

    def wrapped(self) -> Params:
        """The tree."""
        _torch.draw_whole_values()  # torch.randn_like(leaf) is that of one process
        shards = ((name, self.shards[name]) for name in self.plan.leaves if name in self.shards)
        leaves = ((name, _torch.wrap_local(x, leaf_spec(self.plan, self.grid, name, x.dtype))) for name, x in shards)
        return Params(leaves, self.plan, self.mesh, self.buffers)


def agreed_plan(
    origin: Origin, mesh: DeviceMesh, policy: Policy | Plan, facts: Callable[[Plan], list[str]], verb: str = "shard"
) -> tuple[Plan, Grid, int]:
    """The plan of all ranks, where this one is, and the seed of the first; `facts` of it must be the same on all."""
    lines: list[str] = []
    try:
        plan_: Plan | Exception = _checked_plan(origin, mesh, policy)
        lines = facts(plan_)
    except Exception as error:  # the other ranks must hear of it before it is raised
        plan_ = error
    seed = agree(mesh, plan_, lines, verb)
    assert isinstance(plan_, Plan)
    return plan_, layout.grid_of(mesh, plan_.roles.storage), seed


def _checked_plan(origin: Origin, mesh: DeviceMesh, policy: Policy | Plan) -> Plan:
    if not isinstance(mesh, DeviceMesh):
        why = f"shard: expected a DeviceMesh, got {type(mesh).__name__}; a MeshSpec is for plan() only"
        raise see(TypeError(f"{why}; write shard(model, mesh, policy)"), "arguments")
    if isinstance(policy, Plan) and isinstance(origin.model, Mapping):  # which has no modules
        trains = {param.name: param.trainable for param in policy.info.params}
        params = [replace(p, trainable=trains.get(p.name, p.trainable)) for p in layout.describe(origin.model).params]
        plan_ = layout.decide(replace(policy.info, params=tuple(params)), layout.axes_of(mesh), policy.policy)
    else:
        plan_ = plan(origin.model, mesh, policy.policy if isinstance(policy, Plan) else policy)
    if isinstance(policy, Plan):
        if plan_ != policy:
            raise ShardError(f"shard: this plan was made for another model or mesh\n{policy.diff(plan_)}")
        plan_ = policy
    if plan_.policy.offload == "cpu" and mesh.device_type not in ("cpu", "cuda"):
        use = "is for CUDA devices, and means nothing on CPUs"
        raise ShardError(f"shard: Policy(offload='cpu') {use}; this mesh is of {mesh.device_type}")
    ranks = mesh.mesh.flatten().tolist()
    if origin.src is not None and origin.src not in ranks:
        raise ShardError(f"shard: src={origin.src} is not a rank of the mesh, which has {ranks}")
    if not origin.later:
        _require_values(origin, plan_)
    return plan_


def _require_values(origin: Origin, plan_: Plan) -> None:
    tensors, src = named_parameters(origin.model), origin.src
    named = {name: tensors[name] for name in plan_.layouts} | named_buffers(origin.model)
    meta = [name for name, x in named.items() if x.is_meta]
    if not meta or (src is not None and dist.get_rank() != src):
        return
    if src is not None:
        why = f"src={src} must have the values, but its {meta[0]!r} is on the meta device; fill it there, or drop src"
    elif origin.init is None:
        why = (
            f"{len(meta)} tensors are on the meta device (the first is {meta[0]!r}) and there is no init to fill them. "
            "Pass init=lambda module: module.reset_parameters(), or src=<the rank that has the values>."
        )
    elif not isinstance(origin.model, nn.Module):
        why = f"{meta[0]!r} is on the meta device; init fills modules, a mapping must hold the values"
    else:
        return
    raise ShardError(f"shard: {why}")


def sampled(tensor: Tensor) -> str:
    """A hash of some elements: tells apart models that were made from different seeds, without reading all of them."""
    digests = []
    for values in _torch.values_of(tensor.detach()):
        flat = values.reshape(-1)
        some = _torch.bytes_of(flat[:: max(1, flat.numel() // 64)].cpu())
        digests.append(hashlib.blake2b(some.numpy().tobytes(), digest_size=6).hexdigest())
    if len(set(digests)) > 1:
        raise ShardError(f"shard: simulated ranks have different values of a tensor of shape {tuple(tensor.shape)}")
    return digests[0]


def from_src(tensor: Tensor, src: int | None, grid: Grid) -> Tensor:
    """The tensor itself, or what rank `src` has: broadcast along one axis after another.

    Elsewhere only its shape and dtype count.
    """
    if src is None or not grid.exchanges:
        return _torch.part_of_rank(tensor.detach(), src or 0)
    full = torch.empty(tensor.shape, dtype=tensor.dtype, device=grid.device)
    if dist.get_rank() == src:
        full.copy_(tensor.detach())
    origin = grid.coords_of[src]
    data = full.view(-1).view(torch.uint8)
    for i, axis in enumerate(grid.sizes):
        later = list(grid.sizes)[i + 1 :]
        if data.numel() and all(grid.coords[other] == origin[other] for other in later):
            dist.broadcast(data, group=grid.groups[axis], group_src=origin[axis])
    return full
