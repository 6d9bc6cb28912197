"""`FullyShardedDataParallel`: FSDP1's class on shardfn.

[Note: a module that stands before another]
`FSDP(model)` is a new object, of a class that derives from FSDP1's and from the model's. It shares the model's tables
of children, parameters, buffers and hooks, and reads and writes every other attribute there, but for those that FSDP1's
class has; what the model itself has comes before what its class has, see `_OfModule`. So `fsdp.module is model`,
`isinstance(fsdp.layers[0], Block)` holds as well as `isinstance(..., FSDP)`, names carry no prefix, and torch's
`get_model_state_dict`, `get_optimizer_state_dict` and checkpoint wrappers work on it as on any module. The parameters
are `nn.Parameter(DTensor)` shards.

A forward is `apply` with the tree of all instances below: inner ones are its units, and run no code of their own.
"""

import copy
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from pickle import PicklingError
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp._wrap_utils import _auto_wrap
from torch.distributed.tensor import DTensor

from shardfn._torch import unwrap_local
from shardfn.binding import is_computing
from shardfn.compat.common import RECORD, compile_units, current_shards, meshes, run
from shardfn.compat.fsdp1 import instance
from shardfn.compat.fsdp1.instance import NOT_GIVEN, Instance, Settings
from shardfn.compat.fsdp1.optimizer_states import OptimizerStates
from shardfn.compat.fsdp1.state_dicts import OnClassOrInstance, StateDicts, summon_full_params
from shardfn.context import having, holding
from shardfn.layout import WRAPPED, unwrapped
from shardfn.notation import ShardError, see
from shardfn.stateful import refuse_held_back

_applying: ContextVar[bool] = ContextVar("applying", default=False)  # an instance around applies a function
_SHARED = frozenset(key for key, value in nn.Module().__dict__.items() if isinstance(value, dict | set))
_WALKS = ("named_", "parameters", "buffers", "modules", "children")  # how methods that go through a tree begin
_FLAT = "flat_param _flat_param _handles _all_handles _fully_sharded_module_to_handle _unshard".split()


class _Known:
    """An attribute of torch's class that the `Instance` knows."""

    def __init__(self, read: Callable[[Any], Any] | str) -> None:
        """`read` may be a field, maybe of a dataclass in another field, and can then be set."""
        self._read, self._name = (attrgetter(read), read) if isinstance(read, str) else (read, "")

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        return self if module is None else self._read(module.__dict__[RECORD])

    def __set__(self, module: nn.Module, value: Any) -> None:
        if not self._name:
            raise AttributeError("FullyShardedDataParallel: this is set by the constructor")
        record = module.__dict__[RECORD]
        name, _, inside = self._name.partition(".")
        setattr(record, name, replace(getattr(record, name), **{inside: value}) if inside else value)


class _OfModule:
    """An attribute of the model's class: one that the module itself has comes before it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner, name

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        wrapped = None if module is None else module.__dict__.get(WRAPPED)
        if wrapped is not None and self._name in wrapped.__dict__:
            return wrapped.__dict__[self._name]
        return getattr(super(self._owner, owner if module is None else module), self._name)


@functools.cache
def _class_before(fsdp: type, model: type) -> Any:
    """The class of an instance of `fsdp` that stands before a `model`."""
    bases = (fsdp,) if issubclass(fsdp, model) else (fsdp, model)
    namespace: dict[str, Any] = {name: getattr(fsdp, name) for name in ("__module__", "__qualname__", "__doc__")}
    mine = frozenset(chain.from_iterable(vars(cls) for cls in fsdp.__mro__ if cls not in model.__mro__))
    for name, value in _attributes(model).items():
        if name not in mine and not hasattr(type(value), "__set__"):
            kept = isinstance(value, functools.cached_property)  # by the module itself
            namespace[name] = property(attrgetter(f"_fsdp_wrapped_module.{name}")) if kept else _OfModule()
    return type(model)(fsdp.__name__, bases, namespace | {"_stands_for": fsdp, "_own_names": mine | {"forward"}})


def _attributes(model: type) -> dict[str, Any]:
    """What the classes of a model define, but for special methods and what torch reads of every module in a step."""
    attributes: dict[str, Any] = {}
    for cls in reversed(model.__mro__[:-1]):
        left_out = ("_", *_WALKS) if cls is nn.Module else "__"
        attributes |= {name: value for name, value in vars(cls).items() if not name.startswith(left_out)}
    return attributes


class FullyShardedDataParallel(OptimizerStates, StateDicts, nn.Module):
    """FSDP1's class, on shardfn: change the import, keep the script.

    Every argument of torch 1.11 to 2.13 is taken, in the order of any of them. Where torch's class needs an accelerator
    this one does not. docs/howto/from-fsdp1.md lists what each argument and method does here.

        >>> import torch, shardfn as sf
        >>> from torch import nn
        >>> from shardfn.compat.fsdp1 import FullyShardedDataParallel as FSDP, ShardingStrategy
        >>> mesh = sf.make_mesh("cpu", fsdp=1)  # or torch.distributed.init_process_group(...)
        >>> model = FSDP(nn.Linear(4, 2), sharding_strategy=ShardingStrategy.NO_SHARD)
        >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> optimizer.step()
        >>> with FSDP.summon_full_params(model):
        ...     model.bias.shape
        torch.Size([2])

    Args:
        module: what to wrap; parameters become shards in place, and `module` itself stays `fsdp.module`.
        process_group: the ranks; a pair `(shard, replicate)` for hybrid strategies. Default: all ranks.
        sharding_strategy: default FULL_SHARD; NO_SHARD when there is one rank.
        cpu_offload: `CPUOffload(True)` keeps shards, gradients and optimizer states on the host.
        auto_wrap_policy: which modules become units.
        backward_prefetch: no effect: the engine looks one unit ahead.
        mixed_precision: dtypes.
        ignored_modules: modules to leave alone.
        param_init_fn: fills meta tensors, called a module; else `reset_parameters()` is.
        device_id: where to compute.
        sync_module_states: whether the first rank's values count.
        forward_prefetch: no effect.
        limit_all_gathers: no effect.
        use_orig_params: what it changes here is in docs/howto/from-fsdp1.md.
        ignored_states: modules or parameters to leave alone.
        device_mesh: instead of `process_group`; two dims for hybrid strategies.
        ignored_parameters: the name of torch 2.0 for `ignored_states`.
        fsdp_auto_wrap_policy: the name of torch 1.11 for `auto_wrap_policy`.

    Raises:
        ValueError, TypeError, RuntimeError: as torch's class does, with its words.
        ShardError: what cannot be honoured, with what to do instead.

    Communication: one small object exchange; with `sync_module_states`, one broadcast a parameter.
    """

    _is_fsdp_managed_module = True
    _own_names: ClassVar[frozenset[str]]  # what is set on the object itself

    rank = _Known(lambda own: own.mesh.get_local_rank("fsdp"))
    world_size = _Known(lambda own: own.mesh.get_group("fsdp").size())
    process_group = _Known(lambda own: own.mesh.get_group("fsdp"))
    compute_device = _Known(lambda own: own.device)
    sharding_strategy = _Known(lambda own: own.settings.sharding_strategy)
    mixed_precision = _Known(lambda own: own.settings.mixed_precision)
    cpu_offload = _Known(lambda own: own.settings.cpu_offload)
    limit_all_gathers = _Known(lambda own: own.settings.limit_all_gathers)
    backward_prefetch = _Known(lambda own: own.settings.backward_prefetch)
    forward_prefetch = _Known(lambda own: own.settings.forward_prefetch)
    _comm_hook = _Known(lambda own: getattr(own.reduction, "hook", None))
    _comm_hook_state = _Known(lambda own: getattr(own.reduction, "state", None))
    _use_orig_params = _Known(lambda own: own.settings.use_orig_params)
    _device_mesh = _Known(lambda own: own.mesh)
    _inter_node_pg = _Known(lambda own: own.mesh.get_group("replicate"))
    _handle = _Known(lambda own: None)  # as torch's class has it where nothing is flat
    training_state = _Known("training_state")
    _is_root = _Known("is_root")
    _sync_gradients = _Known("syncs")
    _state_dict_type = _Known("state_dicts.state_dict_type")
    _state_dict_config = _Known("state_dicts.state_dict_config")
    _optim_state_dict_config = _Known("state_dicts.optim_state_dict_config")

    def __new__(cls, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(module, nn.Module):
            raise TypeError(f"FullyShardedDataParallel: expected an nn.Module, got {type(module).__name__}")
        if Instance.has_sharded(module):
            raise ShardError("FullyShardedDataParallel: this module is wrapped already; use it as it is")
        return object.__new__(_class_before(getattr(cls, "_stands_for", cls), type(unwrapped(module))))

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = NOT_GIVEN,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Any = None,
        device_mesh: DeviceMesh | None = None,
        *,
        ignored_parameters: Iterable[nn.Parameter] | None = None,
        fsdp_auto_wrap_policy: Any = None,
    ) -> None:
        moved = instance.told_apart(sharding_strategy, cpu_offload, auto_wrap_policy, backward_prefetch)
        policy = instance.the_policy(moved.pop("auto_wrap_policy", None), fsdp_auto_wrap_policy)
        if not isinstance(mixed_precision, MixedPrecision | None):
            why = f"FullyShardedDataParallel: mixed_precision={mixed_precision!r} is no MixedPrecision"
            raise see(TypeError(f"{why}, as MixedPrecision(param_dtype=torch.bfloat16) is"), "classes")
        settings = Settings(
            **moved,
            mixed_precision=mixed_precision or MixedPrecision(),
            param_init_fn=param_init_fn,
            device_id=device_id,
            sync_module_states=sync_module_states,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
            use_orig_params=use_orig_params,
        )
        modules, parameters = instance.ignored_in(module, ignored_modules, ignored_states, ignored_parameters)
        meshes.check_groups(process_group, device_mesh, settings.sharding_strategy, policy is not None)
        device = meshes.compute_device(module, set(map(id, parameters)), device_id)
        inside = [inner.placed for _, _, inner in Instance.all_in(module)]
        placed = meshes.placed_mesh("FullyShardedDataParallel", module, set(map(id, parameters)), device_mesh, inside)
        mesh = meshes.mesh_of_ranks(process_group, device_mesh, settings.sharding_strategy, device.type, placed)
        _warn_of_containers(module)
        settings = instance.clamped(settings, mesh)
        record = Instance(
            settings=settings,
            mesh=mesh,
            data=tuple(axis for axis in meshes.OWN_AXES if axis in (mesh.mesh_dim_names or ())),
            device=device,
            offload=settings.cpu_offload.offload_params,
            ignored_modules=modules,
            ignored_params=parameters,
            given_mesh=device_mesh is not None,
            placed=placed,
        )
        self._begin(module, record)
        if policy is not None:
            self._wrap_inside(policy, mixed_precision)
        record.shard(self)

    def _begin(self, module: nn.Module, record: Instance) -> None:
        """Stand before a module: see [Note: a module that stands before another]."""
        module = unwrapped(module)
        self.__dict__.update({key: table for key, table in module.__dict__.items() if key in _SHARED})
        self.__dict__[WRAPPED] = module
        self.__dict__[RECORD] = record
        for name, _, inner in Instance.all_in(self):
            inner.inner |= bool(name)

    def _wrap_inside(self, policy: Any, mixed: MixedPrecision | None) -> None:
        """Wrap the modules that the policy chooses; their parameters are sharded together with those of this one.

        Torch's own algorithm chooses, with our class in the place of its.

        Raises:
            ValueError: something in it is wrapped already; frozen and trainable parameters in one unit.
        """
        for name, _, _ in Instance.all_in(self.module):
            why = "FSDP auto wrapping requires modules to not already have FSDP"
            raise ValueError(f"{why} applied but found {name} in\n{self.module}")
        record = self.__dict__[RECORD]
        kwargs = vars(record.settings) | {"mixed_precision": mixed}

        def wrap(module: nn.Module, **options: Any) -> nn.Module:
            unit = type(self).__new__(type(self), module)
            inner = instance.clamped(instance.settings_of(options), record.mesh, quiet=True)
            _warn_of_containers(module)
            unit._begin(module, replace(record, settings=inner, offload=inner.cpu_offload.offload_params, inner=True))
            return unit

        try:
            _auto_wrap(self.module, policy, record.ignored_modules, set(record.ignored_params), kwargs, wrap)
        finally:
            for inside in self.module.modules():
                inside.__dict__.pop("_wrap_overrides", None)

    # -- as a module --------------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The wrapped module; inside a wrapper for activation checkpointing, the one that it wraps."""
        module = self.__dict__[WRAPPED]
        return module._checkpoint_wrapped_module if isinstance(module, ActivationWrapper) else module

    @property
    def _fsdp_wrapped_module(self) -> nn.Module:
        return self.__dict__[WRAPPED]

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters that no instance inside has; torch's class has flat ones in the place of these."""
        inner = {id(p) for name, inside, _ in Instance.all_in(self) if name for p in inside.parameters()}
        return [p for p in self.parameters() if id(p) not in inner]

    _has_params: Any = property(lambda self: bool(self.params))

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """The parameters that have a gradient."""
        return [parameter for parameter in self.parameters() if parameter.grad is not None]

    def __getattr__(self, name: str) -> Any:
        if name in _FLAT:
            why = f"FullyShardedDataParallel has no '{name}' here: no parameter is flat, each is a DTensor of its own"
            instead = "named_parameters(), p.to_local() for this rank's part, or summon_full_params() for whole ones"
            raise AttributeError(f"{why}. Use {instead}.")
        return getattr(self.__dict__[WRAPPED], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self)._own_names:
            object.__setattr__(self, name, value)
            return
        if name in self.__dict__:
            self.__dict__[name] = value
        setattr(self.__dict__[WRAPPED], name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            del self.__dict__[name]
        else:
            delattr(self.__dict__[WRAPPED], name)

    def __getitem__(self, key: Any) -> Any:
        return self.__dict__[WRAPPED][key]

    def __repr__(self) -> str:
        inside = repr(self.__dict__[WRAPPED]).replace("\n", "\n  ")
        return f"{type(self).__name__}(\n  (_fsdp_wrapped_module): {inside}\n)"

    def __eq__(self, other: object) -> bool:
        """An instance and its module are one key: dicts and sets of modules were made before some were wrapped."""
        return isinstance(other, nn.Module) and unwrapped(self) is unwrapped(other)

    def __ne__(self, other: object) -> bool:
        """Whether it is another object: Lightning asks whether a module has been wrapped."""
        return self is not other

    def __hash__(self) -> int:
        return hash(self.__dict__[WRAPPED])

    def __reduce_ex__(self, protocol: Any) -> Any:
        why = f"{type(self).__name__} cannot be pickled: its parameters are parts of this rank"
        raise PicklingError(f"{why}. Save state_dict(), and wrap the model again where it is loaded.")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = type(self).__new__(type(self), self.__dict__[WRAPPED])
        memo[id(self)] = copied
        copied._begin(_copied(self.__dict__[WRAPPED], memo), self.__dict__[RECORD].copied(memo))
        return copied

    # -- what training loops call -------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module with whole weights, which are gathered just in time; see `shardfn.apply`.

        Its hooks are shared, and run around the module itself.
        """
        if "forward" in self.__dict__:  # one that somebody has put around this class's
            return super().__call__(*args, **kwargs)
        return run(self, "__call__", args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The same without hooks."""
        return run(self, "forward", args, kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """`torch.compile` the forward of every unit; gathers stay outside of the graphs."""
        compile_units(self, *args, **kwargs)

    def check_is_root(self) -> bool:
        """Whether no other instance holds this one."""
        current_shards(self)
        return not self.__dict__[RECORD].inner

    def _require_idle_root(self, words: str) -> None:
        if not self.check_is_root():
            raise RuntimeError(words)
        self.__dict__[RECORD].require_idle()

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[Any]:
        """Every instance in a tree, itself included, in the order of `modules()`.

        Args:
            module: any module.
            root_only: only those that no other instance holds.
        """
        return [inside for _, inside, record in Instance.all_in(module) if not (root_only and record.inner)]

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        """`nn.Module.apply` with whole parameters; what `fn` changes is kept.

        Raises:
            ValueError: inside `summon_full_params`.
        """
        if _applying.get() or is_computing(self):
            return nn.Module.apply(self, fn)
        self.__dict__[RECORD].require_idle()
        with holding(_applying, True), summon_full_params(self):
            return nn.Module.apply(self, fn)

    summon_full_params = OnClassOrInstance(summon_full_params)

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it, backwards add up gradients on each rank; the first one after it reduces them.

        Raises:
            RuntimeError: on an inner instance.
            ValueError: inside `summon_full_params`.
        """
        why = "`no_sync()` on inner FSDP instances is not supported. Please call `no_sync()` on root FSDP module."
        self._require_idle_root(why)
        return having(*(record for _, _, record in Instance.all_in(self)), syncs=False)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float | int, norm_type: float | int = 2.0) -> Tensor:
        """Scale all gradients, of ignored parameters too, in place to a total norm of at most `max_norm`.

        A gradient that several ranks have whole counts once.

        Args:
            max_norm: the largest norm.
            norm_type: p of the p-norm; `float("inf")` for the largest element.

        Returns:
            the norm before, a scalar in the widest dtype of the gradients.

        Raises:
            RuntimeError: on an inner instance.

        Communication: one small all-reduce an axis that splits any parameter.
        """
        self._require_idle_root("`clip_grad_norm_()` should only be called on the root FSDP instance")
        record, p = self.__dict__[RECORD], float(norm_type)
        grads: list[Any] = [parameter.grad for parameter in self.params_with_grad]
        refuse_held_back("clip_grad_norm_", grads)
        wide = torch.float64 if any(x.dtype == torch.float64 for x in self.parameters()) else torch.float32
        plan = current_shards(self).plan
        split = {axis for _, leaf in plan.leaves.values() for axis in leaf.axes}
        axes = [axis for axis, size in plan.axes.items() if axis in split and size > 1]  # alike on every rank
        first_along = [axis for axis in axes if record.mesh.get_local_rank(axis) == 0]
        whole: list[Tensor] = []
        # what this rank adds to the sum over `axes`: along those that do not split a gradient, the first rank does
        parts: list[Tensor] = []
        for grad in grads:
            over = _axes_of(grad).intersection(axes)
            if not over:
                whole.append(unwrap_local(grad))
            elif over.union(first_along).issuperset(axes):
                parts.append(unwrap_local(grad))
        total = _sum_of_powers(parts, p, wide, record.device)
        for axis in axes:
            kind = dist.ReduceOp.MAX if p == math.inf else dist.ReduceOp.SUM
            dist.all_reduce(total, kind, record.mesh.get_group(axis))
        both = torch.stack([total, _sum_of_powers(whole, p, wide, record.device)])
        total = both.max() if p == math.inf else both.sum() ** (1 / p)
        total = total.cpu() if record.offload else total
        if not grads:
            warnings.warn(
                f"Called FSDP.clip_grad_norm_() on rank {dist.get_rank()} with no gradients -- returning the total "
                f"norm in the default dtype {total.dtype}",
                stacklevel=3,
            )
            return total
        factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
        for grad in map(unwrap_local, grads):
            grad.mul_(factor.to(grad.device, grad.dtype))
        return total.to(functools.reduce(torch.promote_types, [grad.dtype for grad in grads]))

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let `hook` reduce gradients.

        Args:
            state: its first argument.
            hook: `hook(state, grad)` under NO_SHARD, else `hook(state, full_grad, own_shard)` that fills `own_shard`;
                both are flat.

        Raises:
            AssertionError: on an inner instance, twice, or for a hybrid strategy, with the words of torch.
            ValueError: it is no function.
        """
        if self.__dict__[RECORD].inner:
            raise AssertionError("register_comm_hook can only be called on a root instance.")
        records = [record for _, _, record in Instance.all_in(self)]
        for record in records:
            strategy = record.settings.sharding_strategy
            if strategy in meshes.HYBRID:
                raise AssertionError(f"Communication hook is not supported for hybrid strategies: {strategy}")
            if record.reduction != "mean":
                raise AssertionError("A communication hook is already registered")
        if not callable(hook):
            raise ValueError(f"The communication hook must be callable but got {hook}")
        for record in records:
            record.reduction = _Hook(state, hook)


class _Hook:
    """A communication hook as a reduction of the engine's."""

    def __init__(self, state: object, hook: Callable[..., Any]) -> None:
        self.state, self.hook = state, hook

    def __call__(self, flat: Tensor, shard: Tensor | None) -> None:
        _ = self.hook(self.state, flat) if shard is None else self.hook(self.state, flat, shard)


def _axes_of(grad: Tensor) -> set[str]:
    """The axes that split a gradient."""
    if not isinstance(grad, DTensor):
        return set()
    named = zip(grad.device_mesh.mesh_dim_names or (), grad.placements, strict=True)
    return {axis for axis, placement in named if placement.is_shard()}


def _sum_of_powers(tensors: Sequence[Tensor], p: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The p-th power of the norm, or for the largest element that itself."""
    norms = [torch.linalg.vector_norm(x, p, dtype=dtype).to(device) for x in tensors if x.numel()]
    if not norms:
        return torch.zeros((), dtype=dtype, device=device)
    stacked = torch.stack(norms)
    return stacked.max() if p == math.inf else (stacked**p).sum()


def _copied(module: nn.Module, memo: dict[int, Any]) -> Any:
    """A deep copy of a wrapped module, whose parameters are DTensors; what stands before it is copied by its own."""
    for parameter in module.parameters():
        if id(parameter) not in memo:
            memo[id(parameter)] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            vars(memo[id(parameter)]).update(vars(parameter))
    return copy.deepcopy(module, memo)


def _warn_of_containers(module: nn.Module) -> None:
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        why = f"FSDP will not all-gather parameters for containers that do not implement forward: {module}"
        warnings.warn(why, stacklevel=3)
