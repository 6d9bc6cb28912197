"""The import switch: in a script that nobody changed, the classes that this package has are ours.

Into torch's own modules it puts our names, so that every way to import them finds ours, also in libraries that are
imported later. torch's parts that know the classes are imported before, and keep those that they know. hfai's,
haiscale's and Megatron's modules need not be installed: where an import asks for one of `DOORS`, it gets our names.
"""

import importlib
import sys
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from multiprocessing import spawn
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch.distributed

from shardfn.compat import fsdp1, fsdp2, hfai, megatron
from shardfn.compat.fsdp1 import _runtime_utils, sharded_grad_scaler, wrap

# Modules of torch that look at the classes when they are imported: to them ours are modules like any other.
_KNOW_THE_CLASSES = "checkpoint checkpoint.state_dict fsdp._wrap_utils fsdp._optim_utils optim pipelining".split()
_KNOW_THE_CLASSES += "algorithms._optimizer_overlap.optimizer_overlap _composable.replicate".split()
_KNOW_THE_CLASSES = [f"torch.distributed.{name}" for name in _KNOW_THE_CLASSES]
_FSDP1 = ("FullyShardedDataParallel",)
_FSDP2 = ("fully_shard", "FSDPModule", "register_fsdp_forward_method", "share_comm_ctx")
# Module of torch -> ours, and the names that torch's gets of it.
_PUT: Mapping[str, tuple[ModuleType, tuple[str, ...]]] = {
    "torch.distributed.fsdp": (fsdp1, (*_FSDP1, *_FSDP2)),
    "torch.distributed.fsdp.fully_sharded_data_parallel": (fsdp1, _FSDP1),
    "torch.distributed.fsdp._fully_shard": (fsdp2, _FSDP2),
    "torch.distributed.fsdp._fully_shard._fully_shard": (fsdp2, _FSDP2),
    "torch.distributed._composable.fsdp": (fsdp2, _FSDP2),
    "torch.distributed._composable.fsdp.fully_shard": (fsdp2, _FSDP2[:3]),
    "torch.distributed.fsdp.wrap": (wrap, ("default_auto_wrap_policy", "ConfigAutoWrap", "ParamExecOrderWrapPolicy")),
    "torch.distributed.fsdp.sharded_grad_scaler": (sharded_grad_scaler, ("ShardedGradScaler",)),
    "torch.distributed.fsdp._runtime_utils": (_runtime_utils, ("_lazy_init",)),
}
# Modules of other packages -> ours, whose names they have, also where the packages are installed.
_INSIDE = {"": hfai, ".warp": hfai.warp, ".wrap": hfai.wrap}
DOORS = {f"{at}{name}": ours for at in ("hfai.distributed.fsdp", "haiscale.fsdp") for name, ours in _INSIDE.items()}
DOORS |= {"megatron.core.distributed.torch_fully_sharded_data_parallel": megatron}
# What holds them where nothing is installed, and the names in it.
_PACKAGES: dict[str, Mapping[str, Any]] = {name: {} for name in ("hfai", "haiscale", "megatron", "megatron.core")}
_PACKAGES["hfai.distributed"] = {"__getattr__": partial(getattr, torch.distributed)}
_PACKAGES["megatron.core.distributed"] = {"TorchFullyShardedDataParallel": megatron.TorchFullyShardedDataParallel}
_patches = ExitStack()  # of names, while the switch is on
_preparation_data_before = spawn.get_preparation_data


def on() -> None:
    """From here on imports find our names; a second call changes nothing."""
    if _OURS in sys.meta_path:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of modules that nobody asked for
        for name in (*_KNOW_THE_CLASSES, *_PUT):  # before the first name changes
            importlib.import_module(name)
    if too_early := _taken():
        why = f"the script has imported names before the switch was on, which stay torch's: {', '.join(too_early)}"
        warnings.warn(f"shardfn.compat: {why}. Import shardfn.compat.auto first", stacklevel=3)
    for theirs, (ours, names) in _PUT.items():
        module = importlib.import_module(theirs)
        for name in names:
            _patches.enter_context(patch.object(module, name, getattr(ours, name), create=True))
    sys.meta_path.insert(0, _OURS)
    sys.meta_path.append(_AROUND)
    _patches.enter_context(patch.object(spawn, "get_preparation_data", _preparation_data))
    _forget()


def _taken() -> list[str]:
    """The names under which the script has torch's classes already."""
    theirs = importlib.import_module("torch.distributed.fsdp")
    classes = (theirs.FullyShardedDataParallel, theirs.fully_shard)
    return [name for name, value in vars(sys.modules["__main__"]).items() if any(value is one for one in classes)]


class _OnInAChild:
    """Unpickled in a process that this one spawns, before its script: turns the switch on there."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return importlib.import_module, ("shardfn.compat.auto",)


def _preparation_data(name: str) -> dict[str, Any]:
    """What a spawned process is told before it imports the script."""
    return {**_preparation_data_before(name), "shardfn": _OnInAChild()}


def off() -> None:
    """As before `on`."""
    _patches.close()
    for finder in (_OURS, _AROUND):
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
    _forget()


def _forget() -> None:
    """Doors that were imported before are imported again."""
    for name in DOORS:
        sys.modules.pop(name, None)
    for name in _PACKAGES:
        if getattr(sys.modules.get(name), "__loader__", None) is _AROUND:
            del sys.modules[name]


class _Modules(MetaPathFinder, Loader):
    """Finds modules that are nowhere else, and fills them with names."""

    def __init__(self, contents: Mapping[str, Mapping[str, Any]]) -> None:
        """`contents`: full name of a module -> the names in it."""
        self._contents = contents

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The module of this name, if it is one of them."""
        return ModuleSpec(fullname, self, is_package=True) if fullname in self._contents else None

    def exec_module(self, module: ModuleType) -> None:
        """Give it its names."""
        vars(module).update(self._contents[module.__name__])


def _public(module: ModuleType) -> dict[str, Any]:
    """What is in a module of ours, or what it asks another one for."""
    return {name: x for name, x in vars(module).items() if name == "__getattr__" or not name.startswith("__")}


_OURS = _Modules({name: _public(ours) for name, ours in DOORS.items()})  # asked before anybody else
_AROUND = _Modules(_PACKAGES)  # asked where nobody else knows
