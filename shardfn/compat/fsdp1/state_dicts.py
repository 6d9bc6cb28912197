"""State dicts in three flavours: full, sharded, local. Layer 6.

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.fsdp import OptimStateDictConfig, StateDictConfig, StateDictSettings, StateDictType
from torch.distributed.tensor import DTensor

from shardfn._torch import unwrap_local, with_local
from shardfn.compat.fsdp1.instance import Instance, as_before, state_dict_settings
from shardfn.compat.loading import CopiesIntoShards, whole_of
from shardfn.compat.sharded import held_now, own_modules
from shardfn.core.checkpoint import from_state_dict
from shardfn.core.context import holding
from shardfn.core.errors import ShardError
from shardfn.core.functional import gather
from shardfn.core.model import WRAPPED, unwrapped

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
        return _set(module, state_dict_type, state_dict_config, optim_state_dict_config)

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The flavour of state dicts of all instances in a tree.

        Raises:
            AssertionError: they differ.
        """
        found = [own.state_dicts for _, _, own in Instance.all_in(module)]
        for other in found[1:]:
            if other != found[0]:
                raise AssertionError(
                    f"All FSDP modules must have the same state dict settings.Got {other} and {found[0]}."
                )
        return found[0]

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
        before = _set(module, state_dict_type, state_dict_config, optim_state_dict_config)
        try:
            yield
        finally:
            if before.state_dict_type is not None:
                _set(module, before.state_dict_type, before.state_dict_config, before.optim_state_dict_config)

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The tree's state under the model's names, in the flavour of `state_dict_type`.

        Communication: FULL: one all-gather a bucket; the others: none. Inside `summon_full_params`: none.
        """
        given = dict(zip(("destination", "prefix", "keep_vars"), args, strict=False)) | kwargs
        destination, keep_vars = given.get("destination"), bool(given.get("keep_vars", False))
        plain = type(self.__dict__[WRAPPED]).state_dict
        if _collecting.get():
            return plain(self, **given)
        with holding(_collecting, True):
            held: Any = plain(self, prefix=given.get("prefix", ""), keep_vars=True)
        made = _flavoured(self, held, keep_vars)
        if destination is None:
            return made
        destination.update(made)
        if hasattr(destination, "_metadata"):
            destination._metadata.update(getattr(made, "_metadata", {}))
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
            own = {key.removeprefix(prefix): x for key, x in state_dict.items() if key.startswith(prefix)}
            with holding(_collecting, True):
                state_dict |= {prefix + key: value for key, value in _as_shards(self, own).items()}
        type(self.__dict__[WRAPPED])._load_from_state_dict(self, state_dict, prefix, *args, **kwargs)


def _has_load_hooks(module: nn.Module) -> bool:
    """Whether names and shapes in a state dict are only known after hooks, or methods, of the user's modules."""
    theirs = nn.Module._load_from_state_dict
    found = (unwrapped(inside) for inside in module.modules())
    return any(m._load_state_dict_pre_hooks or type(m)._load_from_state_dict is not theirs for m in found)


def _set(module: nn.Module, kind: StateDictType, config: Any, optim_config: Any) -> StateDictSettings:
    now = state_dict_settings(kind)
    for name, have in (("state_dict_config", config), ("optim_state_dict_config", optim_config)):
        want = type(getattr(now, name))
        if have is not None and type(have) is not want:
            raise RuntimeError(f"Expected {name} of type {want} but got {type(have)}")
    now = StateDictSettings(kind, config or now.state_dict_config, optim_config or now.optim_state_dict_config)
    found = [own for _, _, own in Instance.all_in(module)]
    before = [own.state_dicts for own in found]
    if len({settings.state_dict_type for settings in before}) > 1:
        raise AssertionError("All FSDP modules should have the same state_dict_type.")
    for own in found:
        own.state_dicts = now
    return before[0] if before else StateDictSettings(*(None,) * 3)  # pyright: ignore


def kind_wanted(own: Instance) -> StateDictType:
    """The flavour for the caller: torch's `get_model_state_dict` and its like want shards, whatever was chosen."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in (__name__, "torch.nn.modules.module"):
        frame = frame.f_back
    if frame is not None and frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
        return StateDictType.SHARDED_STATE_DICT
    if own.settings.shards:
        return own.state_dicts.state_dict_type
    warnings.warn("When using ``NO_SHARD`` for ``ShardingStrategy``, full_state_dict will be returned.", stacklevel=4)
    return StateDictType.FULL_STATE_DICT


def _flavoured(module: Any, state: Any, keep_vars: bool) -> Any:
    """The values of a collected state dict in the flavour that is wanted."""
    own, held = Instance.of(module), held_now(module)
    kind, config = kind_wanted(own), own.state_dicts.state_dict_config
    if kind == StateDictType.LOCAL_STATE_DICT and own.given_mesh:
        raise RuntimeError(
            "Found state_dict_type LOCAL_STATE_DICT. DeviceMesh is not compatible with LOCAL_STATE_DICT. Please set "
            "state_dict_type to SHARDED_STATE_DICT to get DTensor state_dict."
        )
    host = bool(getattr(config, "offload_to_cpu", False))
    names = {id(leaf): name for name, leaf in held.leaves().items()}
    on_first = kind == StateDictType.FULL_STATE_DICT and bool(getattr(config, "rank0_only", False))
    full = {}
    if kind == StateDictType.FULL_STATE_DICT and any(id(value) in names for value in state.values()):
        full = gather(held.params(module), to="rank0" if on_first else "cpu" if host else "all")
    if on_first and dist.get_rank() != own.first_rank:
        return OrderedDict()
    for key, value in state.items():
        name = names.get(id(value))
        if name is not None and kind == StateDictType.FULL_STATE_DICT:
            state[key] = full[name].detach().to("cpu" if host else own.device)
        elif name is not None and kind == StateDictType.LOCAL_STATE_DICT:
            state[key] = unwrap_local(value).detach().clone()
        elif isinstance(value, Tensor):
            state[key] = value if keep_vars else on_host(as_before(value).detach(), host)
    return state


def on_host(value: Tensor, host: bool) -> Tensor:
    """A copy on the host, also of what is there already: what is saved must not change any more."""
    if not host:
        return value
    if isinstance(value, DTensor):
        local = unwrap_local(value)
        return with_local(value, local.clone()) if local.device.type == "cpu" else value.cpu()
    return value.detach().to("cpu", copy=True)


def _as_shards(module: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict in which every value for a shard is a DTensor of its layout.

    Raises:
        RuntimeError: a value of another flavour, or shape.
    """
    own, held = Instance.of(module), held_now(module)
    kind = kind_wanted(own)
    with holding(_collecting, True):
        template: dict[str, Any] = type(module.__dict__[WRAPPED]).state_dict(module, keep_vars=True)
    names = {id(leaf): name for name, leaf in held.leaves().items()}
    params = held.params(module)
    problems: list[str] = []
    flat = any(key.rpartition(".")[2] == _FLAT for key in state)
    found: dict[str, Any] = OrderedDict(_without_flat_parameters(module, state) if flat else state)
    for key, leaf in template.items():
        value, foreign = found.get(key), flat or isinstance(found.get(key), ShardedTensor)
        if id(leaf) not in names or not isinstance(value, Tensor):
            continue
        value = whole_of(value)
        problem = _misfit(key, leaf, value, StateDictType.FULL_STATE_DICT if foreign else kind)
        if problem is not None:
            problems.append(problem)
        elif kind == StateDictType.LOCAL_STATE_DICT and not foreign and not isinstance(value, DTensor):
            found[key] = with_local(leaf, value.to(unwrap_local(leaf)))
        else:
            name = names[id(leaf)]
            found[key] = from_state_dict(params.like({name: leaf}), {name: value})[name]
    if problems:
        listed = "\n\t".join(problems)
        raise RuntimeError(f"Error(s) in loading state_dict for {type(module).__name__}:\n\t{listed}")
    if hasattr(state, "_metadata"):
        vars(found)["_metadata"] = state._metadata  # pyright: ignore
    return found


def _without_flat_parameters(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with whole tensors under the model's names in the place of flat parameters.

    Raises:
        ShardError: a flat parameter of an instance that the model does not have, or of another size.
    """
    found = dict(state)
    prefixes = {f"{name}." if name else "": inside for name, inside, _ in Instance.all_in(module)}
    for key in [key for key in state if key.rpartition(".")[2] == _FLAT]:
        prefix = key.removesuffix(_FLAT)
        if prefix not in prefixes:
            raise ShardError(f"load_state_dict: {key!r} is of an instance that this model does not have; wrap it alike")
        flat = whole_of(found.pop(key))
        found |= {prefix + name: part for name, part in _unflattened(key, flat, prefixes[prefix]).items()}
    return found


def _unflattened(key: str, flat: Tensor, module: nn.Module) -> dict[str, Tensor]:
    own: dict[int, tuple[str, Tensor]] = {}
    for path, inside in own_modules(module):
        for name, parameter in inside.named_parameters(recurse=False):
            own.setdefault(id(parameter), (f"{path}.{name}" if path else name, parameter))
    sizes = [parameter.numel() for _, parameter in own.values()]
    step = 1 if sum(sizes) == flat.numel() else max(1, _ALIGNED // flat.element_size())
    found: dict[str, Tensor] = {}
    start = 0
    for name, parameter in own.values():
        start = -(-start // step) * step
        found[name] = flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    if start > flat.numel():
        raise ShardError(f"load_state_dict: {key!r} has {flat.numel()} elements, this model's instance has {start}")
    return found


def _misfit(key: str, leaf: Tensor, value: Tensor, kind: StateDictType) -> str | None:
    """Why a value cannot be loaded under a flavour."""
    local = kind == StateDictType.LOCAL_STATE_DICT and not isinstance(value, DTensor)
    want = tuple(unwrap_local(leaf).shape) if local else tuple(leaf.shape)
    have = tuple(value.shape)
    if have == want and (isinstance(value, DTensor) or kind != StateDictType.SHARDED_STATE_DICT):
        return None
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
    return f"{key} is a whole tensor, and the state_dict_type is {kind}: load it under StateDictType.FULL_STATE_DICT"


@contextmanager
def _undone_on_error(module: nn.Module) -> Iterator[None]:
    """What an error leaves half done is undone."""
    held: list[Tensor] = [*module.parameters(), *module.buffers()]
    before = [(unwrap_local(x), unwrap_local(x).detach().clone()) for x in held if not x.is_meta]
    try:
        yield
    except Exception:
        with torch.no_grad():
            for value, was in before:
                value.copy_(was)
        raise
