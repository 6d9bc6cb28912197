"""What `init` puts into tensors on the meta device: module by module, the same values on every mesh.

init       is called with a copy of each module that owns meta tensors, which are blank there
blank      memory on the mesh's device: NaN, or zeros where a dtype has none
lost       what `init` does beside filling them: no tree would have it, so that it is refused
"""

import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardfn import _torch, layout
from shardfn.comm import digest
from shardfn.layout import named_parameters
from shardfn.notation import ShardError

Init: TypeAlias = Callable[[Any], Any]  # fills the meta tensors of the module that it is given
ALIKE = "init must fill tensors alike on all ranks: draw from torch's generator, which has a seed for each module"
_WHOLE = "A function of the whole model needs it whole: make it on rank 0, on the meta device elsewhere, and pass src=0"
_FILLING = ("init_weights", "reset_parameters", "_reset_parameters")  # methods that may fill modules below
_PLAIN = (bool, int, float, str, type(None), torch.Size, torch.dtype)  # attributes that are equal when their values are


def initialized(
    model: nn.Module, init: Init, seed: int, device: torch.device, buffers: dict[str, Tensor], held: Container[str]
) -> Iterator[tuple[str, Tensor]]:
    """(first name, full tensor) of every meta parameter that is not `held`; replaces meta tensors in `buffers`.

    Values of the tensors in `held`, by first names, come from elsewhere: modules without others are left out.

    `init` is called on a copy of each module that owns meta tensors; a method of a module, such as `_init_weights` of
    transformers, on one of every module. The caller cuts its shard from what is yielded and lets go, so that one
    module's tensors at a time are whole.

    Raises:
        ShardError: `init` left a tensor unfilled, or did what would be lost.
    """
    named = (*named_parameters(model).items(), *buffers.items())
    first_names = {id(tensor): names[0] for tensor, names in layout.by_all_names(named)}
    wanted = {_address(x): name for name, x in named if x.is_meta and first_names[id(x)] not in held}
    everywhere = isinstance(getattr(init, "__self__", None), nn.Module)
    for path, module in model.named_modules():
        owns, has = (
            any(x.is_meta and _address(x) in wanted for x in (*module.parameters(below), *module.buffers(below)))
            for below in (False, True)
        )
        if has and not owns and not everywhere:
            _warn_of_unasked(module, path)
        if owns or (has and everywhere):
            with _Writes() as writes, _children_as_they_are(module, path):
                filled = _filled(module, path, init, digest([f"{seed}:{path}"]), device, writes.into)
            if elsewhere := sorted(wanted[at] for at in writes.into & wanted.keys()):
                raise _lost(module, path, f"filled {elsewhere[0]!r}, which is another module's")
            for name, buffer in tuple(buffers.items()):
                buffers[name] = filled.get(id(buffer), buffer)  # under all of its names
            for tensor in module.parameters(recurse=False):
                name = first_names[id(tensor)]
                if name.rpartition(".")[0] == path and id(tensor) in filled and name not in held:
                    yield name, filled.pop(id(tensor))
            filled = {}  # or this module would still be whole while the next one is filled


def _warn_of_unasked(module: nn.Module, path: str) -> None:
    """Say that a module which may initialise those below it is not asked to."""
    if (name := next((name for name in _FILLING if hasattr(type(module), name)), None)) is not None:
        why = (
            f"init is not called with {path or 'the model'}, a {type(module).__name__}, which has no tensors of its own"
        )
        warnings.warn(f"shard: {why}: what its {name}() does to modules below it is not done. {_WHOLE}", stacklevel=2)


class _Writes(_torch.TorchDispatchMode):
    """Within it the storages that are written into are noted: those of a module, and of others on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.into: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _torch.is_mutable(func):
            written = (*args[:1], (kwargs or {}).get("out"))
            self.into.update(_address(x) for x in _torch.pytree.tree_leaves(written) if isinstance(x, Tensor))
        return func(*args, **(kwargs or {}))


def _address(x: Tensor) -> int:
    return _torch.address_of(x.untyped_storage())


@contextmanager
def _children_as_they_are(module: nn.Module, path: str) -> Iterator[None]:
    """Within it `init` may give new tensors to that module alone, not to modules below it."""
    below = [(name, *_tables(child)) for name, child in module.named_modules(prefix=path) if child is not module]
    before = [[dict(table) for table in tables] for _, *tables in below]
    yield
    for (name, *tables), olds in zip(below, before, strict=True):
        for table, old in zip(tables, olds, strict=True):
            if changed := _changed(old, table):
                table.clear()
                table.update(old)
                raise _lost(module, path, f"filled '{name}.{changed[0]}', which is another module's")


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return [key for key in {**old, **new} if old.get(key) is not new.get(key)]


def _lost(module: nn.Module, path: str, what: str) -> ShardError:
    how = "init fills the parameters and buffers of one module at a time, in a copy, and anything else is lost"
    return ShardError(f"shard: init of {path or 'the model'}, a {type(module).__name__}, {what}: {how}.\n{_WHOLE}")


def _tables(module: nn.Module) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    return module.__dict__["_parameters"], module.__dict__["_buffers"]


def _filled(
    module: nn.Module, path: str, init: Init, seed: int, device: torch.device, written: Container[int]
) -> dict[int, Tensor]:
    """id of a meta tensor that `module` owns -> what `init` puts in its place; `written`: storages, as they are."""
    tables = _tables(module)
    # What a module leaves out (a bias that is None) stays out.
    blanks = [{name: None if x is None else _blank(x, device) for name, x in tensors.items()} for tensors in tables]
    copy = layout.shallow_copy(module, *map(dict, blanks))
    before = dict(copy.__dict__)
    devices = [device.index or 0] if device.type != "cpu" else []
    with torch.no_grad(), torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(seed)
        try:
            init(copy)
        except Exception as error:
            whose = f"{path or 'the model'}, a {type(copy).__name__}"
            error.add_note(f"in init of {whose}: it is called with each module that has tensors of its own. {_WHOLE}")
            raise
    _require_nothing_else(module, path, copy, before)
    filled: dict[int, Tensor] = {}
    for tensors, blank in zip(tables, blanks, strict=True):
        for attribute, meta in tensors.items():
            if meta is not None and meta.is_meta and id(meta) not in filled:
                name, value = f"{path}.{attribute}".removeprefix("."), getattr(copy, attribute)
                untouched = value is blank[attribute] and _address(value) not in written
                # Zeros that nobody has written are left over, where no number says so.
                zeros = untouched and value.numel() > 0 and not _torch.bytes_of(value).any()
                filled[id(meta)] = _checked(name, None if zeros else value, meta)
    return filled


def _require_nothing_else(module: nn.Module, path: str, copy: Any, before: Mapping[str, Any]) -> None:
    """Check that a module has the tensors, children and attributes that it had before `init`.

    Raises:
        ShardError: it has others.
    """
    for name in _changed(module.__dict__["_modules"], copy.__dict__["_modules"]):
        raise _lost(module, path, f"filled {f'{path}.{name}'.removeprefix('.')!r}, which is another module's")
    had, has = (
        {name: x for table in _tables(one) for name, x in table.items() if x is not None} for one in (module, copy)
    )
    names: dict[int, str] = {}
    for name, x in has.items():
        other = names.setdefault(id(x), name)
        if name not in had:
            raise _lost(module, path, f"gave it {name!r}, which it does not have")
        if isinstance(x, nn.Parameter) and x.requires_grad != had[name].requires_grad:
            raise _lost(module, path, f"changed requires_grad of {name!r}")
        if had[other] is not had[name]:
            raise _lost(module, path, f"tied {other!r} and {name!r}")
    for key in _changed(before, copy.__dict__):
        if not key.startswith("_") and not _says_the_same(before.get(key), copy.__dict__.get(key)):
            raise _lost(module, path, f"set its attribute {key!r}")


def _says_the_same(old: Any, new: Any) -> bool:
    """Whether two attributes are equal, as far as that can be told without asking what they are."""
    if type(old) is not type(new):
        return False
    if isinstance(old, list | tuple):
        return len(old) == len(new) and all(map(_says_the_same, old, new))
    return old is new or (type(old) in _PLAIN and old == new)


def _blank(tensor: Tensor, device: torch.device) -> Tensor:
    """Memory for a meta tensor, filled with NaN so that what stays unfilled is noticed; other tensors are copied."""
    if tensor.is_meta or isinstance(tensor, DTensor):
        like = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") if isinstance(tensor, DTensor) else tensor
        blank = torch.full_like(like, float("nan") if layout.may_be_differentiated(like) else 0, device=device)
    else:
        blank = tensor.detach().to(device, copy=True)
    if isinstance(tensor, nn.Parameter):
        blank = nn.Parameter(blank, tensor.requires_grad)
        vars(blank).update({key: value for key, value in vars(tensor).items() if not key.startswith("_")})
    return blank


def _checked(name: str, tensor: Tensor | None, meta: Tensor) -> Tensor:
    """What `init` made of a meta tensor, if it is one that can stand for it."""
    if tensor is None or tensor.is_meta or (layout.may_be_differentiated(tensor) and bool(tensor.isnan().any())):
        raise ShardError(f"shard: init left '{name}' unfilled; it must fill every tensor of the module it is given")
    if tensor.shape != meta.shape or tensor.dtype != meta.dtype:
        was, now = (f"{tuple(x.shape)} {x.dtype}" for x in (meta, tensor))
        raise ShardError(f"shard: init replaced '{name}', {was}, by a tensor {now}; it must keep shapes and dtypes")
    return tensor.detach()
