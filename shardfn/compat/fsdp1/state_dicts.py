"""State dicts in three flavours: full, sharded, local; `summon_full_params`, whole parameters in place.

    FULL       whole tensors on every rank, or on the first; a collective        loads whole tensors
    SHARDED    `DTensor`s, for torch.distributed.checkpoint; no communication    loads DTensors of any layout
    LOCAL      this rank's parts as plain tensors; no communication              loads those of this rank

Keys are the model's own names in all of them. They are collected by `nn.Module.state_dict`, so that hooks of the user's
modules, wrappers for activation checkpointing and extra state work as ever, and only then turned into a flavour.

torch's own FSDP1 writes `ShardedTensor`s, and flat parameters in its LOCAL flavour, which load too. A flat parameter is
all parameters of one instance, end to end in the order of its modules.
"""

import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.fsdp import OptimStateDictConfig, StateDictConfig, StateDictSettings, StateDictType
from torch.distributed.fsdp._common_utils import TrainingState
from torch.distributed.tensor import DTensor

from shardfn._torch import unwrap_local, with_local
from shardfn.compat.common import CopiesIntoShards, current_shards, laid_out, own_modules, whole_of
from shardfn.compat.fsdp1.instance import Instance, as_before, state_dict_settings
from shardfn.context import having, holding
from shardfn.layout import WRAPPED, unwrapped
from shardfn.notation import ShardError
from shardfn.params import Params, sharding, state_dicts
from shardfn.stateful import require_no_gradients, whole_in_place

_DEPRECATED = (
    "FSDP.state_dict_type() and FSDP.set_state_dict_type() are being deprecated. Please use APIs, get_state_dict() and "
    "set_state_dict(), which can support different parallelisms, FSDP1, FSDP2, DDP."
)
_FLAT = "_flat_param"
_ALIGNED = 16  # bytes, of each parameter in a flat one with `use_orig_params`
_collecting: ContextVar[bool] = ContextVar("collecting", default=False)  # an outer instance collects, or loads


class StateDicts:
    """The part of the class that is about state dicts."""

    __dict__: dict[str, Any]

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Choose the flavour of state dicts of all instances in a tree.

        Returns:
            what it was before.

        Raises:
            RuntimeError: a config of another flavour.
            AssertionError: instances with different flavours.
        """
        warnings.warn(_DEPRECATED, FutureWarning, stacklevel=2)
        records, settings = _chosen(module, state_dict_type, state_dict_config, optim_state_dict_config)
        before = records[0].state_dicts if records else StateDictSettings(*(None,) * 3)  # pyright: ignore
        for record in records:
            record.state_dicts = settings
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The flavour of state dicts of all instances in a tree.

        Raises:
            AssertionError: they differ.
        """
        settings = [record.state_dicts for _, _, record in Instance.all_in(module)]
        for other in settings[1:]:
            if other != settings[0]:
                why = f"All FSDP modules must have the same state dict settings.Got {other} and {settings[0]}."
                raise AssertionError(why)
        return settings[0]

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """`set_state_dict_type` for a while."""
        warnings.warn(_DEPRECATED, FutureWarning, stacklevel=3)
        records, settings = _chosen(module, state_dict_type, state_dict_config, optim_state_dict_config)
        with having(*records, state_dicts=settings):
            yield

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The tree's state under the model's names, in the flavour of `state_dict_type`.

        Communication: FULL: one all-gather a bucket; the others: none. Inside `summon_full_params`: none.
        """
        arguments = dict(zip(("destination", "prefix", "keep_vars"), args, strict=False)) | kwargs
        destination, keep_vars = arguments.get("destination"), bool(arguments.get("keep_vars", False))
        plain = type(self.__dict__[WRAPPED]).state_dict
        if _collecting.get():
            return plain(self, **arguments)
        with holding(_collecting, True):
            shards: Any = plain(self, prefix=arguments.get("prefix", ""), keep_vars=True)
        state = _flavoured(self, shards, keep_vars)
        if destination is None:
            return state
        destination.update(state)
        if hasattr(destination, "_metadata"):
            destination._metadata.update(getattr(state, "_metadata", {}))
        return destination

    def load_state_dict(self: Any, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copy in a state dict of the flavour of `state_dict_type`; on an error nothing is changed.

        Args:
            state_dict: what `state_dict()` made, here or by torch's class, on any number of ranks.
            strict: whether missing and unexpected names are an error.
            assign: not available: the parameters stay the same objects.

        Raises:
            RuntimeError: with the words of torch, the names and shapes that do not fit; another flavour.
            ShardError: `assign`.
        """
        if assign:
            raise ShardError("load_state_dict(assign=True) would replace the shards; leave it out")
        plain = type(self.__dict__[WRAPPED]).load_state_dict
        if _collecting.get():
            return plain(self, state_dict, strict=strict)
        renamed = _has_load_hooks(self) and kind_wanted(Instance.of(self)) != StateDictType.LOCAL_STATE_DICT
        converted = state_dict if renamed else _as_shards(self, state_dict)
        with holding(_collecting, True), _undone_on_error(self), CopiesIntoShards():
            return plain(self, converted, strict=strict)

    def _load_from_state_dict(self: Any, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """What `load_state_dict` of a module around calls: the values for this tree become shards first."""
        if not _collecting.get():
            state = {key.removeprefix(prefix): x for key, x in state_dict.items() if key.startswith(prefix)}
            with holding(_collecting, True):
                state_dict |= {prefix + key: value for key, value in _as_shards(self, state).items()}
        type(self.__dict__[WRAPPED])._load_from_state_dict(self, state_dict, prefix, *args, **kwargs)


def _has_load_hooks(module: nn.Module) -> bool:
    """Whether names and shapes in a state dict are only known after hooks, or methods, of the user's modules."""
    theirs = nn.Module._load_from_state_dict
    modules = (unwrapped(inside) for inside in module.modules())
    return any(m._load_state_dict_pre_hooks or type(m)._load_from_state_dict is not theirs for m in modules)


def _chosen(
    module: nn.Module, kind: StateDictType, config: Any, optim_config: Any
) -> tuple[list[Instance], StateDictSettings]:
    """The instances in a tree, and the settings of state dicts for all of them, checked."""
    now = state_dict_settings(kind)
    for name, have in (("state_dict_config", config), ("optim_state_dict_config", optim_config)):
        want = type(getattr(now, name))
        if have is not None and type(have) is not want:
            raise RuntimeError(f"Expected {name} of type {want} but got {type(have)}")
    now = StateDictSettings(kind, config or now.state_dict_config, optim_config or now.optim_state_dict_config)
    records = [record for _, _, record in Instance.all_in(module)]
    if len({record.state_dicts.state_dict_type for record in records}) > 1:
        raise AssertionError("All FSDP modules should have the same state_dict_type.")
    return records, now


def kind_wanted(record: Instance) -> StateDictType:
    """The flavour for the caller: torch's `get_model_state_dict` and its like want shards, whatever was chosen."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in (__name__, "torch.nn.modules.module"):
        frame = frame.f_back
    if frame is not None and frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
        return StateDictType.SHARDED_STATE_DICT
    if record.settings.shards:
        return record.state_dicts.state_dict_type
    warnings.warn("When using ``NO_SHARD`` for ``ShardingStrategy``, full_state_dict will be returned.", stacklevel=4)
    return StateDictType.FULL_STATE_DICT


def _flavoured(module: Any, state: Any, keep_vars: bool) -> Any:
    """The values of a collected state dict in the flavour that is wanted."""
    record, held = Instance.of(module), current_shards(module)
    kind, config = kind_wanted(record), record.state_dicts.state_dict_config
    if kind == StateDictType.LOCAL_STATE_DICT and record.given_mesh:
        why = "Found state_dict_type LOCAL_STATE_DICT. DeviceMesh is not compatible with LOCAL_STATE_DICT"
        raise RuntimeError(f"{why}. Please set state_dict_type to SHARDED_STATE_DICT to get DTensor state_dict.")
    host = bool(getattr(config, "offload_to_cpu", False))
    names = {id(leaf): name for name, leaf in held.leaves().items()}
    on_first = kind == StateDictType.FULL_STATE_DICT and bool(getattr(config, "rank0_only", False))
    full = {}
    if kind == StateDictType.FULL_STATE_DICT and any(id(value) in names for value in state.values()):
        full = sharding.gather(held.params(), to="rank0" if on_first else "cpu" if host else "all")
    if on_first and dist.get_rank() != record.first_rank:
        return OrderedDict()
    for key, value in state.items():
        name = names.get(id(value))
        if name is not None and kind == StateDictType.FULL_STATE_DICT:
            state[key] = full[name].detach().to("cpu" if host else record.device)
        elif name is not None and kind == StateDictType.LOCAL_STATE_DICT:
            local = unwrap_local(value).detach()
            state[key] = local if record.settings.use_orig_params else local.clone()  # torch's is written through
        elif isinstance(value, Tensor):
            kept = value if name is None or host else with_local(value, unwrap_local(value).clone())
            state[key] = value if keep_vars else on_host(as_before(kept).detach(), host)
    return state


def on_host(value: Tensor, host: bool) -> Tensor:
    """A copy on the host, also of what is there already: what is saved must not change any more."""
    return with_local(value, unwrap_local(value).to("cpu", copy=True)) if host else value


def _as_shards(module: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict in which every value for a shard is a DTensor of its layout.

    Raises:
        RuntimeError: a value of another flavour, or shape.
    """
    kind = kind_wanted(Instance.of(module))
    with holding(_collecting, True):
        template: dict[str, Any] = type(module.__dict__[WRAPPED]).state_dict(module, keep_vars=True)
    shards = set(map(id, current_shards(module).leaves().values()))
    problems: list[str] = []
    flat = [key for key in state if key.rpartition(".")[2] == _FLAT]
    new_state: dict[str, Any] = OrderedDict(state)
    _unflatten(module, new_state, flat)
    for key, leaf in template.items():
        value, foreign = new_state.get(key), flat or isinstance(new_state.get(key), ShardedTensor)
        if id(leaf) not in shards or not isinstance(value, Tensor):
            continue
        value = whole_of(value)
        problem = _misfit(key, leaf, value, StateDictType.FULL_STATE_DICT if foreign else kind)
        if problem is not None:
            problems.append(problem)
        elif kind == StateDictType.LOCAL_STATE_DICT and not foreign and not isinstance(value, DTensor):
            new_state[key] = with_local(leaf, value.to(unwrap_local(leaf)))
        else:
            new_state[key] = laid_out(value, leaf, repr(key))
    if problems:
        listed = "\n\t".join(problems)
        raise RuntimeError(f"Error(s) in loading state_dict for {type(module).__name__}:\n\t{listed}")
    if hasattr(state, "_metadata"):
        vars(new_state)["_metadata"] = state._metadata  # pyright: ignore
    return new_state


def _unflatten(module: nn.Module, state: dict[str, Any], flat: list[str]) -> None:
    """Put whole tensors under the model's names into a state dict, in the place of flat parameters.

    Raises:
        ShardError: a flat parameter of an instance that the model does not have, or of another size.
    """
    prefixes = {f"{name}." if name else "": inside for name, inside, _ in Instance.all_in(module)}
    for key in flat:
        prefix = key.removesuffix(_FLAT)
        if prefix not in prefixes:
            raise ShardError(f"load_state_dict: {key!r} is of an instance that this model does not have; wrap it alike")
        parts = _parts_of_flat(key, whole_of(state.pop(key)), prefixes[prefix])
        state |= {prefix + name: part for name, part in parts.items()}


def _parts_of_flat(key: str, flat: Tensor, module: nn.Module) -> dict[str, Tensor]:
    params: dict[int, tuple[str, Tensor]] = {}
    for path, owner in own_modules(module):
        for name, parameter in owner.named_parameters(recurse=False):
            params.setdefault(id(parameter), (f"{path}.{name}" if path else name, parameter))
    sizes = [parameter.numel() for _, parameter in params.values()]
    step = 1 if sum(sizes) == flat.numel() else max(1, _ALIGNED // flat.element_size())
    parts: dict[str, Tensor] = {}
    start = 0
    for name, parameter in params.values():
        start = -(-start // step) * step
        parts[name] = flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    if start > flat.numel():
        raise ShardError(f"load_state_dict: {key!r} has {flat.numel()} elements, this model's instance has {start}")
    return parts


def _misfit(key: str, leaf: Tensor, value: Tensor, kind: StateDictType) -> str | None:
    """Why a value cannot be loaded under a flavour."""
    local = kind == StateDictType.LOCAL_STATE_DICT and not isinstance(value, DTensor)
    have, want = tuple(value.shape), tuple((unwrap_local(leaf) if local else leaf).shape)
    if have != want:
        hint = ""
        if not local and have == tuple(unwrap_local(leaf).shape):
            hint = " It has the shape of this rank's part: load it under StateDictType.LOCAL_STATE_DICT."
        elif local and have == tuple(leaf.shape):
            hint = " It is whole: load it under StateDictType.FULL_STATE_DICT."
        return (
            f"size mismatch for {key}: copying a param with shape torch.Size({list(have)}) from checkpoint, the shape "
            f"in current model is torch.Size({list(want)}).{hint}"
        )
    if isinstance(value, DTensor) or kind != StateDictType.SHARDED_STATE_DICT:
        return None
    return f"{key} is a whole tensor, and the state_dict_type is {kind}: load it under StateDictType.FULL_STATE_DICT"


@contextmanager
def _undone_on_error(module: nn.Module) -> Iterator[None]:
    """What an error leaves half done is undone."""
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    before = [(unwrap_local(x), unwrap_local(x).detach().clone()) for x in tensors if not x.is_meta]
    try:
        yield
    except Exception:
        with torch.no_grad():
            for value, was in before:
                value.copy_(was)
        raise


# ---------------------------------------------------------------------------------------------------------------------
# Whole, ordinary parameters in the places of shards, for a while


class OnClassOrInstance:
    """A static method that also takes the instance it is called on for its module, as hfai's scripts do."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, module: nn.Module | None, owner: type) -> Callable[..., Any]:
        if module is None:
            return self._function

        def call(*args: Any, **kwargs: Any) -> Any:
            named = "module" in kwargs or (args and isinstance(args[0], nn.Module))
            return self._function(*args, **kwargs) if named else self._function(module, *args, **kwargs)

        return call


@contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Within it, `named_parameters()` of the instances in `module` are whole and ordinary.

    A forward inside computes with them; with `rank0_only` it computes with the shards, on all ranks.

    Args:
        module: an instance, or a module that holds some.
        recurse: whether inner instances take part.
        writeback: whether changes count; under NO_SHARD they always do.
        rank0_only: whether only the first rank gets them.
        offload_to_cpu: whether they are on the host.
        with_grads: whether `.grad` is whole too.

    Raises:
        NotImplementedError: combinations that torch refuses, with its words.
        AssertionError: inside another one.

    Communication: one all-gather a bucket on entry.
    """
    instances = [(inside, record) for _, inside, record in Instance.all_in(module, recurse)]
    for _, record in instances:
        orig = record.settings.use_orig_params
        if with_grads and (offload_to_cpu or not orig):
            why = f"with_grads=True, use_orig_params={orig}, offload_to_cpu={offload_to_cpu} is not supported yet"
            raise NotImplementedError(why)
        if offload_to_cpu and not record.settings.shards:
            raise NotImplementedError("offload_to_cpu=True and NO_SHARD is not supported yet")
        if writeback and rank0_only:
            raise NotImplementedError("writeback=True and rank0_only=True is not supported yet")
        if record.training_state == TrainingState.SUMMON_FULL_PARAMS:
            raise AssertionError("Cannot manually unshard parameters when already unsharding parameters")
    if offload_to_cpu and not rank0_only and instances:
        warnings.warn(
            "offload_to_cpu=True and rank0_only=False may result in theunsharded parameters being redundantly copied "
            "to CPU memory for GPUs sharing the same CPU memory, which risks CPU OOM. We recommend using "
            "offload_to_cpu=True with rank0_only=True.",
            stacklevel=3,
        )
    inner = {id(inside) for outer, _ in instances for name, inside, _ in Instance.all_in(outer) if name}
    to = "cpu" if offload_to_cpu else "all"
    with ExitStack() as stack:
        for inside, _ in instances:
            if id(inside) not in inner:
                stack.enter_context(_whole_parameters(inside, recurse, writeback, rank0_only, to, with_grads))
        yield


@contextmanager
def _whole_parameters(
    module: nn.Module, recurse: bool, writeback: bool, rank0_only: bool, to: Any, with_grads: bool
) -> Iterator[None]:
    """Whole parameters in an instance, and with `recurse` in those inside it."""
    held = current_shards(module)
    params = held.params()
    tree = params.like((name, x) for name, x in params.items() if recurse or not held.plan.leaves[name][0].unit)
    full = _full(tree, to)
    gradients = ((name, leaf.grad) for name, leaf in tree.items() if leaf.grad is not None)
    grads = _full(tree.like(gradients), to) if with_grads else {}
    here = not rank0_only or dist.get_rank() == Instance.of(module).first_rank
    records = [record for _, _, record in Instance.all_in(module, recurse)]
    with having(*records, training_state=TrainingState.SUMMON_FULL_PARAMS, is_whole=not rank0_only):
        with whole_in_place(module, full if here else {}, held) as whole:
            for name, grad in grads.items():
                if name in whole:
                    whole[name].grad = grad
            yield
        require_no_gradients({} if with_grads else whole)
        # what is not split at all is changed in any case, as in torch
        kept = {name: p for name, p in whole.items() if writeback or not held.plan.layouts[name].axes}
        held.copy_in(state_dicts.from_state_dict(tree, {name: p.detach() for name, p in kept.items()}))
        if with_grads:
            now = {name: p.grad.detach() for name, p in kept.items() if p.grad is not None}
            for name, grad in state_dicts.from_state_dict(tree, now).items():
                if tree[name].grad is None:
                    tree[name].grad = grad
                else:
                    unwrap_local(tree[name].grad).copy_(unwrap_local(grad))


def _full(tree: Params, to: Any) -> dict[str, Tensor]:
    """Whole values of canonical names, which nobody else has."""
    whole = sharding.gather(tree, to=to) if tree else {}
    return {name: whole[name].detach() for name in tree.plan.layouts if name in whole}
