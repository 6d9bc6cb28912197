"""What a plan needs to know about a model, as plain data; its modules; declared forwards.

A plan must be comparable, picklable and free of tensors, so the `nn.Module` itself never gets into it: names, shapes,
dtypes, ties and module kinds do.

`init` fills shallow copies of modules, of the same class and attributes, with tensors and children of their own: so
the caller's model is never changed, and an exception leaves nothing bound.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import is_lazy

from shardfn._torch import children_of, convolves_plainly, parameters_of, set_tables
from shardfn.notation import ShardError, see

OWN = "_shardfn_"  # attributes that begin so are this library's
WRAPPED = f"{OWN}wrapped_module"
REPLACED = f"{OWN}replaced"  # on a parameter whose place a shard took: its name
CLASS = f"{OWN}class"  # on a module whose class was replaced by one that shards: the class of its model
Forward = TypeVar("Forward", bound=Callable[..., Any])
LIKE_LISTS = (nn.ModuleList, nn.Sequential)
# On a module that holds shards: attribute -> how the parameter was placed before, None for a plain tensor. Not on the
# parameter: `module.to()` and `.half()` swap DTensors with new ones, and their attributes go with the old ones.
PLACED = f"{OWN}placed"
Placed = tuple[tuple[str, int | None], ...]
OUT_DIM = {"linear": 0, "transposed linear": 1}  # by the kind of a module, which dim of its weight makes its outputs
# The same of every kind whose bias lies along one dim of its weight.
BIAS_DIM = OUT_DIM | dict.fromkeys(("convolution", "batch norm", "group norm", "instance norm"), 0)
BIAS_DIM |= {"transposed convolution": 1}
_TRANSPOSED = ("transformers.pytorch_utils.Conv1D",)  # linears whose weight is [in, out]


@dataclass(frozen=True)
class ParamInfo:
    """One parameter: its canonical name (the first of its names), shape, dtype and its other names."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    aliases: tuple[str, ...] = ()
    # a DTensor before it is sharded, as `parallelize_module` makes them: (mesh axis, the dim it splits), None for whole
    placed: Placed | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that the model has for it."""
        return (self.name, *self.aliases)


@dataclass(frozen=True)
class ModuleInfo:
    """One module: its path, its class and base classes, and the parameters that it owns directly."""

    name: str
    classes: tuple[str, ...]  # qualified names, most derived first
    params: tuple[tuple[str, str], ...]  # (attribute, canonical parameter name)
    kind: str = "other"  # "linear", "embedding", "convolution".. when the forward is a known one, see `kind_of`
    list_of: str | None = None  # for a list of like modules that own parameters: their class
    forward: str = ""  # the class whose forward it has; none when it has one of its own


@dataclass(frozen=True)
class ModelInfo:
    """A model as plain data. `modules` is empty when a mapping of tensors was described."""

    params: tuple[ParamInfo, ...]
    modules: tuple[ModuleInfo, ...]
    ignored: tuple[str, ...] = ()  # parameters that are left out, by all of their names

    def module(self, path: str) -> ModuleInfo | None:
        """The module at a path."""
        return next((module for module in self.modules if module.name == path), None)


def may_be_differentiated(x: object) -> TypeGuard[Tensor]:
    """Whether it is a tensor of real or complex numbers, which has derivatives."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def has_derivatives(dtype: torch.dtype) -> bool:
    """Whether numbers of a dtype are real or complex."""
    return dtype.is_floating_point or dtype.is_complex


def class_name(cls: type) -> str:
    """The qualified name by which classes are compared, so that a plan pickles without importing them."""
    return f"{cls.__module__}.{cls.__qualname__}"


def describe(model: nn.Module | Mapping[str, torch.Tensor]) -> ModelInfo:
    """Read a model or a mapping of tensors.

    Raises:
        TypeError: it is neither, or the mapping holds something else than tensors.
        ShardError: a parameter has no shape yet.
    """
    if isinstance(model, nn.Module):
        if lazy := next((name for name, x in named_parameters(model).items() if is_lazy(x)), None):
            instead = "Run the model once on a batch, or give its modules their sizes (nn.Linear for nn.LazyLinear)"
            raise ShardError(f"{lazy!r} is a lazy parameter, which has no shape before the first forward. {instead}")
        noted = {id(parameter): placed for parameter, placed in _noted(model)}
        return ModelInfo(_tied(named_parameters(model).items(), noted), tuple(_modules(model)))
    if not isinstance(model, Mapping):
        raise TypeError(f"expected an nn.Module or a mapping of names to tensors, got {type(model).__name__}")
    for name, value in model.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise TypeError(f"a mapping must hold tensors under names; {name!r} holds {type(value).__name__}")
    return ModelInfo(_tied(model.items(), {}), ())


def named_parameters(model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of a model, or a mapping's tensors, by every name of each."""
    return dict(model.named_parameters(remove_duplicate=False) if isinstance(model, nn.Module) else model)


def named_buffers(model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The buffers of a model by every name of each; a mapping has none."""
    return dict(model.named_buffers(remove_duplicate=False) if isinstance(model, nn.Module) else {})


def by_all_names(items: Iterable[tuple[str, Tensor]]) -> list[tuple[Tensor, tuple[str, ...]]]:
    """Each tensor object once, with every name that it has, in order."""
    by_id: dict[int, tuple[Tensor, tuple[str, ...]]] = {}
    for name, tensor in items:
        by_id[id(tensor)] = tensor, (*by_id.get(id(tensor), (tensor, ()))[1], name)
    return list(by_id.values())


def _noted(model: nn.Module) -> Iterator[tuple[Tensor | None, Placed | None]]:
    """Every parameter that is a shard by now, and its placement before; names may leave out those of wrappers."""
    for module in model.modules():
        for attribute, placed in unwrapped(module).__dict__.get(PLACED, {}).items():
            yield parameters_of(module).get(attribute), placed


def shards_in(model: nn.Module) -> set[int]:
    """The ids of the parameters that are shards by now."""
    return {id(parameter) for parameter, _ in _noted(model) if isinstance(parameter, DTensor)}


def note_shard(module: nn.Module, attribute: str, placed: Placed | None) -> None:
    """A parameter of a module is a shard from here on."""
    unwrapped(module).__dict__.setdefault(PLACED, {})[attribute] = placed


def _tied(items: Iterable[tuple[str, Tensor]], noted: Mapping[int, Placed | None]) -> tuple[ParamInfo, ...]:
    """One entry a tensor object; its later names are aliases. Of shards is `noted` how they lay before."""
    infos = []
    for tensor, (name, *aliases) in by_all_names(items):
        placed = noted[id(tensor)] if id(tensor) in noted else _placed(name, tensor)
        # A parameter says so itself; a plain tensor of a mapping (a state dict) is trainable when it can be.
        trains = tensor.requires_grad if isinstance(tensor, nn.Parameter) else may_be_differentiated(tensor)
        infos.append(ParamInfo(name, tuple(tensor.shape), tensor.dtype, trains, tuple(aliases), placed))
    return tuple(infos)


def _placed(name: str, tensor: torch.Tensor) -> Placed | None:
    """How a tensor that is no shard yet lies on a mesh; None for a plain one.

    Raises:
        ShardError: in a way that shards do not have, or on a mesh without names.
    """
    if not isinstance(tensor, DTensor):
        return None
    axes, placements = tensor.device_mesh.mesh_dim_names, tensor.placements
    if axes is None or any(type(p) is not Shard and not p.is_replicate() for p in placements):
        have = f"a DTensor with {list(placements)} on {tensor.device_mesh}"
        wanted = "Shard and Replicate only, on a mesh with axis names"
        write = "of a model that torch's own fully_shard has sharded, import that from shardfn.compat.fsdp2, too"
        raise ShardError(f"'{name}' is {have}: one that is sharded further must have {wanted}; {write}")
    return tuple((axis, p.dim if isinstance(p, Shard) else None) for axis, p in zip(axes, placements, strict=True))


def _modules(model: nn.Module) -> Iterator[ModuleInfo]:
    # By identity: wrappers for activation checkpointing leave their own name out of those of parameters.
    canonical = {id(tensor): names[0] for tensor, names in by_all_names(model.named_parameters(remove_duplicate=False))}
    for name, module in model.named_modules():
        named = module.named_parameters(recurse=False, remove_duplicate=False)
        params = tuple((attribute, canonical[id(tensor)]) for attribute, tensor in named)
        classes = tuple(map(class_name, class_of(module).__mro__))
        yield ModuleInfo(name, classes, params, kind_of(module), _list_of(module), _forward_owner(module))


def _forward_owner(module: nn.Module) -> str:
    is_patched = patched_forward(module) is not None
    return "" if is_patched else next(class_name(cls) for cls in class_of(module).__mro__ if "forward" in vars(cls))


def kind_of(module: nn.Module) -> str:
    """Which parallel forward can stand for the module's own.

    The forward must be torch's: a subclass that overrides it computes something else. `nn.MultiheadAttention` reads
    the weight of its output projection without calling it, so that projection does not count either. A weight that is
    made of others (`torch.nn.utils.parametrizations`) is no parameter of the module.
    """
    cls = class_of(module)
    names = {attribute.partition("[")[0] for attribute in dict.keys(parameters_of(unwrapped(module)))}  # also of shards
    if not (issubclass(cls, nn.MultiheadAttention) or "weight" in names) or patched_forward(module) is not None:
        return "other"
    if _forward_owner(module) in _TRANSPOSED:
        return "transposed linear"
    known = (kind for layer, kind in _LAYERS.items() if cls.forward is layer.forward and _is_plain(module))
    return next(known, "own embedding" if issubclass(cls, nn.Embedding) else "other")


_LAYERS: dict[type[nn.Module], str] = {
    nn.Linear: "linear",
    nn.Embedding: "embedding",
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), "convolution"),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), "transposed convolution"),
    nn.BatchNorm1d: "batch norm",  # the forwards of norms are those of a base class
    nn.GroupNorm: "group norm",
    nn.InstanceNorm1d: "instance norm",
    nn.MultiheadAttention: "attention",
}


def _is_plain(module: nn.Module) -> bool:
    """Whether torch's own forward of a layer computes what it does in torch, and one that can be done in parts."""
    if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        return module.groups == 1
    of_attention = isinstance(unwrapped(module), nn.modules.linear.NonDynamicallyQuantizableLinear)
    return convolves_plainly(class_of(module)) and not of_attention


def _list_of(module: nn.Module) -> str | None:
    """The one class of a list's members when they own parameters."""
    members = list(module) if isinstance(module, LIKE_LISTS) else []
    classes = {class_of(member) for member in members}
    owns = any(True for member in members for _ in member.parameters())
    return class_name(classes.pop()) if owns and len(classes) == 1 else None


# -- the modules themselves --------------------------------------------------------------------------------------------


class StandIn:
    """What this library puts in the place of a module's own forward, which is `original`; None: its class's."""

    original: Any


def patched_forward(module: nn.Module) -> Any:
    """The forward that a module itself was given, before that of its class; None without."""
    forward = unwrapped(module).__dict__.get("forward")
    return forward.original if isinstance(forward, StandIn) else forward


def unwrapped(module: nn.Module) -> nn.Module:
    """The module behind one that only stands before it, and shares its tables of children, parameters and buffers.

    The compatible classes wrap so: a tree of modules may hold such objects, names carry no prefix, and what computes is
    the module behind.
    """
    return module.__dict__.get(WRAPPED, module)


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class whose forward a module computes.

    The compatible classes stand before a module, or replace its class by one derived from it.
    """
    module = unwrapped(module)
    return module.__dict__.get(CLASS, type(module))


def submodule(module: nn.Module, path: str) -> Any:
    """The module at a path, by the tables of children: a class may have a property of a child's name."""
    for name in path.split(".") if path else ():
        child = children_of(module)[name]
        assert child is not None
        module = child
    return module


def shallow_copy(module: nn.Module, parameters: dict[str, Tensor | None], buffers: dict[str, Tensor | None]) -> Any:
    """A module of the same class that shares every attribute except parameters, buffers and the list of children.

    What this library notes on modules (`OWN`) is about them, may hold them, and would keep them alive in a copy.
    """
    module = unwrapped(module)
    copy = object.__new__(class_of(module))
    theirs = {key: value for key, value in module.__dict__.items() if not isinstance(value, StandIn)}
    copy.__dict__.update((key, value) for key, value in theirs.items() if not key.startswith(OWN))
    set_tables(copy, parameters=parameters, buffers=buffers, modules=dict(children_of(module)))
    return copy


# -- parallel forwards that are declared -------------------------------------------------------------------------------
#
# What a forward has as attributes is known of it:
#
#     keeps          the data axes over which it computes with a part of the weights
#     without_data   `shaped(module, *args)`, which stands for the module's own forward in a shape-only trace
#     calls_own      whether it calls the module's own, and does the rest within `Layouts.hidden()`

# By the name of a class, for the whole program: a library registers its modules where it defines them.
_REGISTERED: dict[str, Callable[..., Any]] = {}


def register(module_class: type[nn.Module]) -> Callable[[Forward], Forward]:
    """A decorator: the function is the parallel forward of a module class whose weights may be split.

    Without it a module of torch other than linears, embeddings, convolutions, norms of channels and
    `nn.MultiheadAttention` cannot split a weight over a compute axis, and a class of your own only where a run without
    data can follow its parts. Plans made afterwards know it, in every process. `Policy(compute={pattern: fn})` does the
    same for modules by name, and comes first.

        >>> import torch, shardfn as sf
        >>> from torch import nn
        >>> class Gain(nn.Module):
        ...     def __init__(self, size):
        ...         super().__init__()
        ...         self.gain = nn.Parameter(torch.ones(size))
        ...     def forward(self, x):
        ...         return x * self.gain
        >>> @sf.register(Gain)
        ... def split_gain(module, local, layouts, x):  # x [..., size/tp], local["gain"] [size/tp]
        ...     return x * local["gain"]
        >>> sf.plan(Gain(8), sf.MeshSpec(tp=2), sf.Policy(rules={"gain": "c@tp"})).local_shape("gain")
        (4,)

    Args:
        module_class: the class; subclasses that keep its forward are meant too.

    Returns:
        the decorator, which returns the function itself. The function is called as `fn(module, local, layouts, *args,
        **kwargs)`: `local` maps the attributes of the module's own parameters, not of its children's, to what this rank
        computes with, whole over data axes and split over compute axes, and `layouts` to their `Layout`. Collectives in
        it are those of `sf.collectives`, over `layouts.mesh`.

    Raises:
        TypeError: not a module class.

    Communication: none; what the function does.
    """
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        raise TypeError(f"register: expected a class of nn.Module, got {module_class!r}")

    def keep(function: Forward) -> Forward:
        require_forward("register", function)
        _REGISTERED[class_name(module_class)] = function
        return function

    return keep


def require_forward(where: str, function: Any) -> None:
    """Check that something can be called as a parallel forward is.

    Raises:
        TypeError: it cannot.
    """
    if not callable(function):
        raise TypeError(f"{where}: expected a function, got {function!r}")
    try:
        inspect.signature(function).bind_partial(None, None, None)
    except TypeError as error:
        why = f"{where}: it will be called as fn(module, local, layouts, *args): {error}"
        raise see(TypeError(why), "policy") from None


def registered(module: ModuleInfo) -> Callable[..., Any] | None:
    """The one of the class whose forward a module has, or of the most derived class with that very forward."""
    until = module.classes.index(module.forward) + 1 if module.forward else 0
    return next((_REGISTERED[name] for name in module.classes[:until] if name in _REGISTERED), None)


def declares(**known: Any) -> Callable[[Forward], Forward]:
    """A decorator of a parallel forward: what is known of it, see above."""

    def note(forward: Forward) -> Forward:
        vars(forward).update(known)
        return forward

    return note


def calls_own(forward: Callable[..., Any]) -> bool:
    """Whether a parallel forward, or the one that a `partial` is of, calls the module's own."""
    return getattr(getattr(forward, "func", forward), "calls_own", False)
