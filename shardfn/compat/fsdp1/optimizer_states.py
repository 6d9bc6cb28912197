"""Optimizer state dicts: by name and whole or sharded, and back, under torch's names old and new.

optimizer.state_dict()        ids -> DTensors           ->  optim_state_dict           names -> whole or DTensors
names -> whole or DTensors    optim_state_dict_to_load  ->  optimizer.load_state_dict  ids -> DTensors
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.fsdp._optim_utils import _get_param_id_to_param_from_optim_input
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardfn._torch import pytree
from shardfn.comm import buckets
from shardfn.compat.common import laid_out, whole_of
from shardfn.compat.fsdp1.instance import Instance
from shardfn.compat.fsdp1.state_dicts import on_host
from shardfn.layout import mesh
from shardfn.notation import ShardError, did_you_mean
from shardfn.params import initialize

_OptimInput = Iterable[Any] | None
_warn_legacy = partial(TorchFSDP._warn_legacy_optim_state_dict, stacklevel=2)


class OptimizerStates:
    """The part of the class that is about optimizer states; everything is static."""

    # torch's own: it takes any module whose parameters have their own names, and warns in its words
    rekey_optim_state_dict = staticmethod(TorchFSDP.rekey_optim_state_dict)
    _is_using_optim_input = staticmethod(TorchFSDP._is_using_optim_input)
    _warn_optim_input = staticmethod(TorchFSDP._warn_optim_input)

    @staticmethod
    def optim_state_dict(
        model: nn.Module, optim: Optimizer, optim_state_dict: dict[str, Any] | None = None, group: Any = None
    ) -> dict[str, Any]:
        """The optimizer's state by parameter names, in the flavour of `state_dict_type`.

        Args:
            model: the instance, or a module that holds some.
            optim: the optimizer of its parameters.
            optim_state_dict: default `optim.state_dict()`.
            group: not needed: the mesh of the model is used.

        Returns:
            `{"state": {name: {...}}, "param_groups": [{"params": [names], ...}]}`; `{}` on other ranks than the first
            with `rank0_only`.

        Communication: FULL: one all-gather a state tensor.
        """
        first = _first(model)
        full, first_only = _flavour(first)
        host = bool(first.state_dicts.optim_state_dict_config.offload_to_cpu)
        state = optim.state_dict() if optim_state_dict is None else optim_state_dict
        return _by_name(model, _params_of(optim), state, full, first_only, host)

    optim_state_dict_post_hook = optim_state_dict  # as torch 2.0 named it for hooks

    @staticmethod
    def optim_state_dict_to_load(
        model: Any,
        optim: Any,
        optim_state_dict: Any,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """What `optim.load_state_dict` takes, from what `optim_state_dict` made, here or by torch's class.

        The order of torch 2.0, `(optim_state_dict, model, optim)`, is told apart by type.

        Args:
            model: the instance, or a module that holds some.
            optim: the optimizer of its parameters.
            optim_state_dict: by names; of any number of ranks when it is whole.
            is_named_optimizer: whether the optimizer's own keys are names.
            load_directly: whether to load it too.
            group: not needed: the mesh of the model is used.

        Raises:
            ValueError: it is no optimizer state dict.
            ShardError: it has names that the model does not have.

        Communication: none; with `rank0_only`, one broadcast a state tensor.
        """
        if isinstance(optim, nn.Module):
            model, optim, optim_state_dict = optim, optim_state_dict, model
        first = _first(model)
        _, first_only = _flavour(first)
        state = _from_first(optim_state_dict, first) if first_only else optim_state_dict
        to_load = _to_load(model, _params_of(optim), state, optim, is_named_optimizer)
        if load_directly:
            optim.load_state_dict(to_load)
        return to_load

    @staticmethod
    def load_optim_state_dict_pre_hook(model: nn.Module, optim: Any, optim_state_dict: Any, group: Any = None) -> Any:
        """`optim_state_dict_to_load` as torch 2.0 named it for hooks."""
        return OptimizerStates.optim_state_dict_to_load(model, optim, optim_state_dict, group=group)

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module, optim: Optimizer, optim_input: _OptimInput = None, rank0_only: bool = True, group: Any = None
    ) -> dict[str, Any]:
        """The whole state by names on the first rank, in host memory; torch 1.12's name."""
        _warn_legacy("full_optim_state_dict", "optim_state_dict")
        params = _params_given(model, optim, optim_input)
        return _by_name(model, params, optim.state_dict(), True, rank0_only, True)

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: Optimizer, optim_input: Any = None, group: Any = None
    ) -> dict[str, Any]:
        """The sharded state by names; torch 1.13's name."""
        _warn_legacy("sharded_optim_state_dict", "optim_state_dict")
        is_input = optim_input is not None and not isinstance(optim_input, dist.ProcessGroup)
        params = _params_given(model, optim, optim_input if is_input else None)
        return _by_name(model, params, optim.state_dict(), False, False, False)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: _OptimInput = None,
        optim: Optimizer | None = None,
    ) -> dict[str, Any]:
        """What `optim.load_state_dict` takes, from a whole state by names that every rank has; torch 1.12's name."""
        _warn_legacy("shard_full_optim_state_dict", "optim_state_dict_to_load")
        return _to_load(model, _params_given(model, optim, optim_input), full_optim_state_dict, optim)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: Any = None, optim_input: Any = None
    ) -> dict[str, Any]:
        """What `optim.load_state_dict` takes, from a sharded state by names; torch 1.13's name."""
        _warn_legacy("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
        if optim is not None and not isinstance(optim, Optimizer):  # torch 1.13 had the input third
            optim, optim_input = (optim_input if isinstance(optim_input, Optimizer) else None), optim
        return _to_load(model, _params_given(model, optim, optim_input), sharded_optim_state_dict, optim)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: _OptimInput = None,
        optim: Optimizer | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """What `optim.load_state_dict` takes, from a whole state by names of the first rank; torch 1.12's name."""
        _warn_legacy("scatter_full_optim_state_dict", "optim_state_dict_to_load")
        params = _params_given(model, optim, optim_input)
        return _to_load(model, params, _from_first(full_optim_state_dict or {}, _first(model)), optim)


def _first(model: nn.Module) -> Instance:
    first = next((record for _, _, record in Instance.all_in(model)), None)
    if first is None:
        raise ShardError(f"optimizer states: {type(model).__name__} holds no FullyShardedDataParallel")
    return first


def _flavour(record: Instance) -> tuple[bool, bool]:
    """Whether optimizer states are whole, and then only on the first rank."""
    full = record.state_dicts.state_dict_type == StateDictType.FULL_STATE_DICT
    return full, full and bool(getattr(record.state_dicts.optim_state_dict_config, "rank0_only", False))


def _params_of(optim: Optimizer) -> list[Tensor]:
    return [parameter for group in optim.param_groups for parameter in group["params"]]


def _params_given(model: nn.Module, optim: Any, optim_input: Any) -> list[Tensor]:
    """The parameters of an optimizer in its order: from itself, from what it was made of, or all of the model."""
    TorchFSDP._warn_optim_input(optim_input, stacklevel=3)
    if TorchFSDP._is_using_optim_input(optim_input, optim):
        return [*_get_param_id_to_param_from_optim_input(model, optim_input).values()]
    return _params_of(optim)


def _names(model: nn.Module) -> dict[int, str]:
    """id of a parameter -> its first name, without what wrappers add."""
    return {id(parameter): clean_tensor_name(name) for name, parameter in model.named_parameters()}


def _by_name(
    model: nn.Module, params: list[Tensor], state: Mapping[str, Any], full: bool, first_only: bool, host: bool
) -> dict[str, Any]:
    """A state dict with ids for keys as one with names, whole or sharded."""
    names = _names(model)
    if unknown := [index for index, p in enumerate(params) if id(p) not in names]:
        why = f"{len(unknown)} of the optimizer's parameters are not the model's, the first is number {unknown[0]}"
        raise ShardError(f"optimizer states: {why}; make the optimizer from the wrapped model's parameters()")
    key_to_name: dict[Any, str] = {index: names[id(p)] for index, p in enumerate(params)}
    keep = not first_only or dist.get_rank() == _first(model).first_rank
    states: dict[Any, Any] = {}
    for key, values in state["state"].items():
        slots = {what: _taken(value, full, host) for what, value in values.items()}
        if keep:
            states[key_to_name.get(key, key)] = slots
    if not keep:
        return {}
    groups = _regrouped(state, lambda keys: [key_to_name.get(key, key) for key in keys])
    return {"state": states, "param_groups": groups}


def _regrouped(state: Mapping[str, Any], parameters: Callable[[list[Any]], list[Any]]) -> list[dict[str, Any]]:
    """Copies of the groups of a state dict, with other keys for their parameters."""
    groups = copy.deepcopy(state.get("param_groups", []))
    return [{**group, "params": parameters(group["params"])} for group in groups]


def _taken(value: Any, full: bool, host: bool) -> Any:
    """One value of a state as it is saved."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, DTensor) and full:
        whole = buckets.whole(value)
        return whole.cpu() if host else whole
    return on_host(value.detach(), host)


def _to_load(
    model: nn.Module, params: list[Tensor], state: Mapping[str, Any], optim: Any, named: bool = False
) -> dict[str, Any]:
    """A state dict with names for keys as one with ids; its tensors get the layouts of their parameters."""
    _first(model)  # raises where nothing is wrapped
    if "state" not in state:
        raise ValueError('`optim_state_dict` must have the keys "state"to be a valid optimizer state dict')
    names = _names(model)
    parameters = {clean_tensor_name(n): p for n, p in model.named_parameters(remove_duplicate=False)}
    ids: dict[int, Any] = {id(p): names[id(p)] if named else index for index, p in enumerate(params)}
    if unknown := [key for key in state["state"] if isinstance(key, str) and key not in parameters]:
        why = f"optimizer states: {len(unknown)} names are not in the model"
        raise ShardError(f"{why}, the first is {unknown[0]!r}{did_you_mean(unknown[0], parameters)}")
    states: dict[Any, Any] = {}
    for key, values in state["state"].items():
        parameter = parameters.get(key)
        if parameter is None:
            states[key] = values
        elif id(parameter) in ids:
            like = optim.state.get(parameter, {}) if optim is not None else {}
            slots = {what: _laid_out(value, parameter, like.get(what)) for what, value in values.items()}
            states[ids[id(parameter)]] = slots
    numbers = {name: ids[id(p)] for name, p in parameters.items() if id(p) in ids}
    groups = _regrouped(state, lambda names: sorted(numbers[name] for name in names if name in numbers))
    return {"state": states, "param_groups": groups}


def _laid_out(value: Any, parameter: Tensor, like: Any) -> Any:
    """A copy of one value of a state with the layout of its parameter, or of what the optimizer has there."""
    value = whole_of(value)
    if not isinstance(value, Tensor):
        return value
    model_of = parameter if tuple(value.shape) == tuple(parameter.shape) and value.dim() else like
    if isinstance(parameter, DTensor) and isinstance(model_of, DTensor):
        value = laid_out(value, model_of)
    return value.clone()


def _from_first(state: Mapping[str, Any], record: Instance) -> dict[str, Any]:
    """The state dict of the first rank of the mesh, on all of them."""
    described = None
    if dist.get_rank() == record.first_rank:
        described = pytree.tree_map_only(Tensor, lambda x: torch.empty_like(x, device="meta"), dict(state))
    box: list[Any] = [described]
    for group in record.mesh.get_all_groups():
        dist.broadcast_object_list(box, group=group, group_src=0, device=record.device)
    grid = mesh.grid_of(record.mesh, record.mesh.mesh_dim_names or ())

    def sent(x: Tensor) -> Tensor:
        value = initialize.from_src(x, record.first_rank, grid)
        return value if value.dim() else value.cpu()

    return pytree.tree_map_only(Tensor, sent, box[0] if described is None else dict(state))
