"""`fully_shard` and `FSDPModule`, FSDP2 on shardfn; what a call of it was asked, and knows.

[Note: a class swapped in place]
`fully_shard(module)` gives a module a class that derives from `FSDPModule` and from its own, as torch's does, and makes
its parameters `nn.Parameter(DTensor)` shards under the same names. The class only overrides `__call__`, which runs the
module by `apply` with the tree of all groups below; inner groups are its units. Copies that the engine makes are of the
model's own class (`CLASS` in `layout/model_info.py`).
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, UnshardHandle
from torch.distributed.fsdp._fully_shard._fsdp_init import _validate_module, _verify_managed_param
from torch.distributed.fsdp._fully_shard._fully_shard import _unimplemented_deepcopy
from torch.distributed.tensor import DTensor, Shard

from shardfn._torch import move_to_mesh, unwrap_local
from shardfn.binding import module_tables
from shardfn.compat.common import meshes, sharded_module
from shardfn.layout import CLASS, device_of, exactly, shards_in
from shardfn.notation import ShardError
from shardfn.params import initialize, is_sum, sharding
from shardfn.stateful import REPLACED, whole_in_place

Modules = TypeVar("Modules", bound=nn.Module | list[nn.Module])


@dataclass(eq=False, kw_only=True)
class Group(sharded_module.Sharded):
    """One call of `fully_shard`: what it was asked, and how things stand; all its modules know it.

    Axes of the mesh that are not `data` are those of DTensors that `parallelize_module` made.
    """

    verb = "fully_shard"

    precision: MixedPrecisionPolicy
    reshard: bool | int | None  # after the forward; None: unless it is the root
    dims: dict[int, int] = field(default_factory=dict)  # id of a parameter that is no shard yet -> the dim to split
    unsharded: ExitStack | None = None  # puts the shards back that whole weights have taken the places of

    def shard(self, module: nn.Module) -> None:
        """Shard what is in what it is to hold, is not ignored, and no group in it has sharded before.

        Raises:
            ValueError: scalar parameters; parameters that are shared with modules sharded before.
            ShardError: as `shard`.
        """
        left = shards_in(module) | {id(p) for p in self.ignored_params} | sharded_module.ignored_in(module, Group)
        for name, parameter in module.named_parameters():
            if id(parameter) in left:
                continue
            _verify_managed_param(name, parameter)
            if REPLACED in vars(parameter):
                raise ValueError(
                    f"Parameter '{name}' is shared with a parameter already managed by another FSDP group. For "
                    "shared/tied parameters, use fully_shard([module_a, module_b]) to place them in the same FSDP "
                    "group."
                )
        sharded_module.spread_inside(module, self)
        for _, inside, inner in Group.all_in(module):
            if inner.mesh != self.mesh and inner.placed is None and inner.mesh.mesh.equal(self.mesh.mesh):
                _move((p for p in _dtensors(inside) if p.device_mesh == inner.mesh), self.mesh)
                inner.mesh, inner.data = self.mesh, self.data  # the same ranks by other axis names
                inner.version += 1
        # DTensors on the whole mesh, maybe by other axis names than those of the data axes here
        placed = self.placed or self.mesh
        renamed = [p for p in _dtensors(module) if id(p) not in left] if placed.ndim >= self.mesh.ndim else []
        _move(renamed, self.mesh)
        try:
            sharded_module.put_shards(self, module, initialize.Origin(module, later=True))
        except Exception:
            _move(renamed, placed)
            raise

    def put_back(self) -> None:
        if self.unsharded is not None:
            unsharded, self.unsharded = self.unsharded, None
            unsharded.close()

    def begin(self, module: nn.Module, tree: sharded_module.Tree) -> None:
        """The first forward decides who is the root: the module that it goes through.

        Raises:
            RuntimeError: a module inside was a root before, or has no memory yet, with the words of torch.
        """
        for group in tree.units.values():
            group.put_back()
        if self.is_root is not None:
            return
        if meta := [name for name, parameter in module.named_parameters() if unwrap_local(parameter).is_meta]:
            why = "FSDP parameters should be materialized from meta device before training, but the following were"
            raise RuntimeError(f"{why} still on meta device: {meta}. Call module.to_empty(device=...), and fill them")
        for name, group in tree.units.items():
            if group.is_root:  # this one is not
                why = f"FSDP state has already been lazily initialized for {name}\nFSDP requires"
                raise RuntimeError(f"{why} running forward through the root module first")
        for group in tree.units.values():
            group.is_root = group is self

    def unit_settings(self, exact: bool) -> dict[str, Any]:
        return {"regather": self.reshard if self.reshard is not None else True, **self._precision()}

    def root_settings(self, exact: bool) -> dict[str, Any]:
        return self._precision() | ({"units": {"": {"regather": self.reshard}}} if self.reshard else {})

    def _precision(self) -> dict[str, Any]:
        return {
            "compute_dtype": self.precision.param_dtype,
            "reduce_dtype": self.precision.reduce_dtype,
            "output_dtype": self.precision.output_dtype,
            "cast_inputs": self.precision.cast_forward_inputs and self.precision.param_dtype is not None,
        }

    def rules(self, module: nn.Module, named: Mapping[str, Tensor]) -> dict[str, str]:
        """Where the last data axis splits: dim 0, or what `shard_placement_fn` said."""
        shards = shards_in(module)
        rules = {exactly(name): self._rule(p, id(p) in shards) for name, p in named.items()}
        return {name: rule for name, rule in rules.items() if rule is not None}

    def _rule(self, parameter: Tensor, is_shard: bool) -> str | None:
        axis, dim = self.data[-1], self.dims.get(id(parameter), 0)
        names = parameter.device_mesh.mesh_dim_names or () if isinstance(parameter, DTensor) and is_shard else ()
        if isinstance(parameter, DTensor) and axis in names:
            placement = parameter.placements[names.index(axis)]
            dim = placement.dim if isinstance(placement, Shard) else 0
        if dim == 0 and parameter.dim() and parameter.numel() and parameter.shape[0] % self.mesh.size() == 0:
            return None
        return " ".join(f"{size}@{axis}" if i == dim else str(size) for i, size in enumerate(parameter.shape))


def _dtensors(module: nn.Module) -> list[DTensor]:
    return [parameter for parameter in module.parameters() if isinstance(parameter, DTensor)]


def _move(parameters: Iterable[DTensor], mesh: DeviceMesh) -> None:
    for parameter in parameters:
        move_to_mesh(parameter, mesh, parameter.placements)


def fully_shard(
    module: Modules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - frozen, as in torch
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Modules:
    """Shard the parameters of a module in place, as torch's `fully_shard` does: from the inside out.

        >>> import torch, shardfn as sf
        >>> from torch import nn
        >>> from shardfn.compat.fsdp2 import FSDPModule, fully_shard
        >>> mesh = sf.make_mesh("cpu", fsdp=1)  # or init_device_mesh("cpu", (1,))
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        >>> for layer in model:
        ...     _ = fully_shard(layer, mesh=mesh)
        >>> fully_shard(model, mesh=mesh) is model and isinstance(model, FSDPModule)
        True
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> model[0].weight.grad.placements
        (Shard(dim=0),)

    Args:
        module: or a list of modules, which are sharded together.
        mesh: 1-D shards; 2-D is `(replicate, shard)`. Default: all ranks.
        reshard_after_forward: whether weights are freed after the forward, or over how many ranks they then stay split;
            None: unless this is the root.
        shard_placement_fn: parameter -> `Shard(dim)`, or None for dim 0.
        mp_policy: dtypes.
        offload_policy: `CPUOffloadPolicy()` keeps shards, gradients and optimizer states on the host.
        ignored_params: parameters to leave alone.
        dp_mesh_dims: which axes of `mesh` are the data ranks'.

    Returns:
        the same object or objects; they are instances of `FSDPModule` now.

    Raises:
        ValueError, AssertionError: as torch's function does, with its words.
        TypeError: an argument of another kind.
        ShardError: what cannot be honoured, with what to do instead.

    Communication: one small object exchange.
    """
    modules = _checked(module)
    data = meshes.data_mesh(mesh, dp_mesh_dims)
    _check_reshard(reshard_after_forward, data.size(data.ndim - 1))
    ignored = list(ignored_params or ())
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(f"fully_shard: mp_policy={mp_policy!r} is no MixedPrecisionPolicy")
    if not isinstance(offload_policy, OffloadPolicy | None):  # verl passes None
        raise TypeError(f"fully_shard: offload_policy={offload_policy!r} is no OffloadPolicy")
    for value in ignored:
        if not isinstance(value, nn.Parameter):
            raise TypeError(f"fully_shard: ignored_params has {value!r}, which is no parameter")
    tree = modules[0] if len(modules) == 1 else nn.ModuleList(modules)  # one module that holds them all
    leave = {id(p) for p in ignored} | sharded_module.ignored_in(tree, Group)
    for _, _, inner in Group.all_in(tree):
        inner.put_back()
    placed = meshes.placed_mesh("fully_shard", tree, leave, data, (inner.placed for _, _, inner in Group.all_in(tree)))
    whole, names = data, tuple(data.mesh_dim_names or ())
    if placed is not None and dp_mesh_dims is not None and placed == mesh:
        _require_whole(tree, leave, dp_mesh_dims)
        whole, names = meshes.whole_mesh(placed, dp_mesh_dims)
    elif placed is not None:
        whole = meshes.across("fully_shard", data, names, placed)
    record = Group(
        mesh=whole,
        data=names,
        device=device_of(data.device_type),
        precision=mp_policy,
        offload=isinstance(offload_policy, CPUOffloadPolicy),
        reshard=reshard_after_forward,
        ignored_params=ignored,
        dims=_dims(tree, shard_placement_fn, data.size(data.ndim - 1), leave | shards_in(tree)),
        placed=placed,
    )
    record.shard(tree)
    together = sharded_module.StayTogether(modules)
    for one in modules:
        one.register_load_state_dict_pre_hook(together.before)
        one.register_load_state_dict_post_hook(together.after)
        one.__dict__[sharded_module.RECORD] = record
        one.__dict__[CLASS] = type(one)
        one.__class__ = _class_for(type(one))
    return module


vars(fully_shard)["state"] = lambda module: module.__dict__.get(sharded_module.RECORD)  # None: it is not sharded


def _check_reshard(value: bool | int | None, ranks: int) -> None:
    """Refuse what is no group size, with the words of torch.

    Raises:
        ValueError: it is not.
    """
    if value is None or isinstance(value, bool):
        return
    if not isinstance(value, int):
        why = f"reshard_after_forward should be a bool or an int representing the group size to reshard to, not {value}"
        raise ValueError(why)
    if value < 1 or value > ranks or ranks % value:
        raise ValueError(f"If passing reshard_after_forward as an int, it should be a factor of {ranks}, not {value}")


def _checked(given: Any) -> tuple[nn.Module, ...]:
    """What to shard together: of the modules that are given those that no other one holds, each once.

    Raises:
        ValueError, AssertionError, TypeError: it cannot be, with the words of torch where it has some.
    """
    modules = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not modules:
        raise ValueError("fully_shard: an empty list of modules")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"fully_shard: expected an nn.Module, or a list of them, got {type(module).__name__}")
        _validate_module(module, "fully_shard")
        if Group.has_sharded(module):
            why = "Each distinct composable distributed API can only be applied to a module once"
            raise AssertionError(f"{why}. fully_shard has already been applied to the following module:\n{module}")
    inside = {id(child) for module in modules for child in module.modules() if child is not module}
    return tuple({id(module): module for module in modules if id(module) not in inside}.values())


def _dims(module: nn.Module, fn: Callable[[nn.Parameter], Any] | None, ranks: int, leave: set[int]) -> dict[int, int]:
    """The dim of each parameter that `shard_placement_fn` wants split, by id.

    Raises:
        ValueError: it is no `Shard`, or splits unevenly.
        ShardError: it asks for a mesh of a parameter's own.
    """
    dims: dict[int, int] = {}
    for name, parameter in module.named_parameters():
        placement = fn(parameter) if fn is not None and id(parameter) not in leave else None
        if placement is None:
            continue
        if not isinstance(placement, Shard):
            if hasattr(placement, "mesh_info"):
                why = f"shard_placement_fn gives {name!r} a mesh of its own"
                raise ShardError(f"fully_shard: {why}; shard its module over that mesh, as a model of its own")
            raise ValueError(f"fully_shard: shard_placement_fn returned {placement!r} for {name!r}, not Shard or None")
        dim = placement.dim + parameter.dim() if placement.dim < 0 else placement.dim
        if not 0 <= dim < parameter.dim():
            raise ValueError(f"fully_shard: {name!r} of shape {tuple(parameter.shape)} has no dim {placement.dim}")
        if dim and parameter.shape[dim] % ranks:
            why = f"FSDP does not support uneven sharding on dim {dim}: {tuple(parameter.shape)} (world size: {ranks})"
            raise NotImplementedError(why)
        dims[id(parameter)] = dim
    return dims


def _require_whole(module: nn.Module, leave: set[int], dims: Any) -> None:
    """Parameters that are DTensors on the whole mesh must be whole over its data dims.

    Raises:
        ValueError: with the words of torch.
    """
    done = leave | shards_in(module)
    for parameter in (p for p in _dtensors(module) if id(p) not in done):
        names = list(parameter.device_mesh.mesh_dim_names or ())
        for kind, name in [("shard", n) for n in dims.shard_names] + [("replicate", n) for n in dims.replicate_names]:
            placement = parameter.placements[names.index(name)]
            if not placement.is_replicate():
                why = f"Expected Replicate() on DP {kind} dim '{name}' (index {names.index(name)}) but got {placement}"
                raise ValueError(why)


@functools.cache
def _class_for(cls: Any) -> Any:
    return type(cls)(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__deepcopy__": _unimplemented_deepcopy})


class FSDPModule(nn.Module):
    """A module that `fully_shard` has sharded; its class is also that of its model."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Of the model's class: what `nn.Sequential` makes when it is sliced is not sharded by itself."""
        model: Any = cls.__mro__[cls.__mro__.index(FSDPModule) + 1]
        module: Any = object.__new__(model)
        module.__init__(*args, **kwargs)
        return module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model with whole weights, which are gathered just in time; see `shardfn.apply`."""
        return sharded_module.run(self, "__call__", args, kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """`torch.compile` the forward of every group that holds no other; gathers stay outside of the graphs."""
        if len(list(Group.all_in(self))) > 1:
            sharded_module.compile_units(self, *args, **kwargs)
        else:
            super().compile(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As of any module; whole tensors are cut into this rank's parts."""
        with sharded_module.CopiesIntoShards():
            return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.reshard()
        with sharded_module.FillsBlanks() as blanks:
            out = super()._apply(*args, **kwargs)
        if blanks.made:
            sharded_module.note_blanks(Group.of(self), self)
        return out

    # -- whole weights ------------------------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Put whole weights, in the dtype that computes, in the place of this module's own shards; not recursive.

        They stay there until `reshard()` or the next forward, which gathers for itself.

        Communication: one all-gather.
        """
        record = Group.of(self)
        if record.unsharded is None and not module_tables.is_computing(self):
            held = sharded_module.current_shards(self)
            params, root, dtypes = held.params(), held.plan.units[0], held.plan.compute_dtypes
            names = root.params if root.name == "" else ()
            full = sharding.gather(params.like((name, params[name]) for name in names))
            values = {name: x.detach().to(dtypes[name]) for name, x in full.items()}
            record.unsharded = ExitStack()
            record.unsharded.enter_context(whole_in_place(self, values, held))
        return UnshardHandle() if async_op else None

    def reshard(self) -> None:
        """Put the shards back; not recursive. In a forward, weights go when their unit ends."""
        Group.of(self).put_back()

    # -- gradients ----------------------------------------------------------------------------------------------------

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backwards reduce gradients; without, they stay on each rank until one does."""
        for _, _, record in Group.all_in(self, recurse):
            record.syncs = record.all_reduces = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether gradients are reduced over the axis that replicates; else they stay on each rank until they are."""
        for _, _, record in Group.all_in(self, recurse):
            record.all_reduces = requires_all_reduce

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide sums of gradients by this, instead of by the number of data ranks."""
        record = Group.of(self)
        record.scale = prod(record.mesh.get_group(axis).size() for axis in record.data) / factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def reset_iter_state(self) -> None:
        """After an exception: forget gradients that were not reduced. The engine needs no other reset.

        Raises:
            RuntimeError: this is not the root.
        """
        if Group.of(self).is_root is False:
            raise RuntimeError("reset_iter_state must be called on the root FSDP module")
        self.reshard()
        for parameter in self.parameters():
            if is_sum(parameter.grad):
                parameter.grad = None

    # -- when weights are freed ---------------------------------------------------------------------------------------

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether weights are freed after the forward.

        Raises:
            ValueError: it is no bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")
        for _, _, record in Group.all_in(self, recurse):
            record.reshard = reshard_after_forward
            record.version += 1

    # -- what has no effect: the engine decides by itself -------------------------------------------------------------

    def set_modules_to_forward_prefetch(self, modules: "list[FSDPModule]") -> None:
        """No effect: the engine fetches the next unit while the present one computes.

        Raises:
            ValueError: something else than an `FSDPModule`.
        """
        _require_sharded(modules)

    def set_modules_to_backward_prefetch(self, modules: "list[FSDPModule]") -> None:
        """No effect, as in the forward."""
        _require_sharded(modules)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """No effect: every backward waits for its reductions."""

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """No effect: weights are freed after their backward."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """No effect: weights are gathered again when the backward asks for them, else not at all."""

    def set_post_optim_event(self, event: Any) -> None:
        """No effect: gathers wait for what was written before."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """No effect: gradients are summed and then divided."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """No effect: buffers come from the engine's pool."""

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """No effect: buffers come from the engine's pool."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """No effect: weights that a used unit leaves out get zeros. All ranks call the same units."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """No effect: the engine bounds what is in the air.

        Raises:
            TypeError, ValueError: it is no number of buffers.
        """
        if not isinstance(max_input_buffers, int) or isinstance(max_input_buffers, bool):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """No effect: one process group an axis."""

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """No effect."""

    # -- what cannot be ------------------------------------------------------------------------------------------------

    def set_custom_all_gather(self, comm: Any) -> None:
        """Refused.

        Raises:
            ShardError: always.
        """
        raise ShardError("FSDPModule.set_custom_all_gather: gathers are the engine's own; use torch's fully_shard")

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Refused.

        Raises:
            ShardError: always.
        """
        why = "FSDPModule.set_custom_reduce_scatter: reductions are the engine's own"
        raise ShardError(f"{why}; use torch's fully_shard, or plan.with_reduction(fn) with shardfn's functions")

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        """Refused.

        Raises:
            ShardError: always.
        """
        why = "FSDPModule.set_all_reduce_hook: reductions are the engine's own; look at gradients after the backward"
        raise ShardError(f"{why}, or register_post_accumulate_grad_hook on parameters")

    def _get_fsdp_state(self) -> Group:
        return Group.of(self)


def _require_sharded(modules: Iterable[Any]) -> None:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Have another method than `forward` run with whole weights; does nothing for a module that is not sharded.

    Raises:
        ValueError: there is no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")

    @functools.wraps(getattr(type(module), method_name))
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return sharded_module.run(self, method_name, args, kwargs)

    now: Any = type(module)
    module.__class__ = type(now)(now.__name__, (now,), {method_name: method})


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """No effect: models take turns by themselves.

    Raises:
        ValueError: something else than an `FSDPModule`.
    """
    for module in modules:
        if not Group.has_sharded(module):
            raise ValueError(f"Expects list of FSDPModules but got {module}")
