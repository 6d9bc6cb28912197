"""What a function inside a transform cannot do itself: found in its first run, and refused by name.

Collectives of `torch.distributed` have no derivative and no mapped form. Under `vmap` they give unreduced or
uninitialised data, under `jvp` a tangent of zero, under `grad` a gradient without the other ranks: all of that without
an error. And the leaves of trees are this rank's plain parts there: a sum over one, a product of matrices, a row of it
are not those of the leaf.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import cache, wraps
from inspect import currentframe, unwrap
from itertools import islice
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import CellType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from shardfn._torch import AS_TENSORS, TorchDispatchMode, in_transform, pytree
from shardfn.context import holding, losses_over
from shardfn.layout import REPLACED
from shardfn.notation import ShardError
from shardfn.params import DRAWS, Params, data_axes_of, drawn_for_parts, has_parts, watched_parts

LIBRARIES = _TORCH, _OURS = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_WATCHES: ContextVar[bool] = ContextVar("watches", default=False)
# What was watched, once, since every operation pays for it: by code, which functions made again and again share.
_WATCHED: set[tuple[Any, ...]] = set()
_ON_PARTS = frozenset(str(Path(__file__).with_name(name)) for name in ("module_call.py", "shard_map.py"))
_KEEPING = frozenset(  # what is done element by element, or is not about elements, beside torch's pointwise operations
    "radd iadd isub imul rmul rsub rdiv idiv truediv rtruediv itruediv floordiv rfloordiv rpow ipow mod rmod "
    "pos invert and or xor detach clone to type type_as float double half bfloat16 contiguous cpu cuda "
    "requires_grad zeros_like ones_like empty_like full_like stack unsqueeze dim size "
    "stride is_floating_point is_complex get set repr format register_hook retain_grad grad backward".split()
)
# What takes a dim away.
_TAKING_A_DIM = frozenset("sum mean prod amax amin logsumexp std var norm select unbind".split())


def ours_only(verb: str, func: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose first run inside a transform may use collectives of `sf.collectives` and of trees only.

    Raises:
        ShardError: in that run, another one, by the name under which it was called.
    """

    code = _codes(func)

    @wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = args, kwargs
        over = losses_over(data_axes_of(arguments) if in_transform() else ())
        if _WATCHES.get() or (key := (*code, has_parts(arguments))) in _WATCHED:
            with over:
                return func(*args, **kwargs)
        watches = holding(_WATCHES, True)
        try:
            with over, watches, watched_parts(arguments) as parts, _Refusing(verb), _OfParts(verb, parts):
                out = func(*args, **kwargs)
        except RuntimeError as error:  # some of them torch refuses itself, without their name
            frames = reversed([*walk_tb(error.__traceback__)])
            if isinstance(error, ShardError) or (name := _called_as(frames)) is None:
                raise
            raise _refused(verb, name) from error
        if code[0] is not None:
            _WATCHED.add(key)
        return out

    return call


def _codes(func: Any, depth: int = 4) -> tuple[Any, ...]:
    """The code of a function, and of the functions that it closes over."""
    func = unwrap(func) if callable(func) else func
    cells = [cell.cell_contents for cell in getattr(func, "__closure__", None) or () if cell != CellType()]
    inner = [_codes(value, depth - 1) for value in cells if depth and callable(value)]
    return getattr(func, "__code__", getattr(func, "__name__", None)), *inner


def _refused(verb: str, name: str) -> ShardError:
    why = f"{verb}: the function calls {name}, which has no derivative and no mapped form: results would be wrong"
    return ShardError(f"{why} in silence. Use sf.collectives (psum, pmean, all_gather, ...), or communicate outside")


class OutsideOfTree(TorchFunctionMode):
    """Refuses what a forward computes with tensors of the model that are not those which its modules compute with."""

    def __init__(self, model: nn.Module, params: Params) -> None:
        super().__init__()
        named, first = model.named_parameters(remove_duplicate=False), params.plan.canonical
        self._names = {id(x): first[name] for name, x in named if name in first and not isinstance(x, DTensor)}
        for name, x in model.named_buffers(remove_duplicate=False):
            now = params.buffers.get(name, x)
            if now is not x and (x.is_meta or not torch.equal(now, x.to(now.device))):
                self._names[id(x)] = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        names = [name for x in given if (name := self._names.get(id(x)) or vars(x).get(REPLACED)) is not None]
        if names and any(isinstance(x, Tensor) for x in pytree.tree_leaves(out)):
            why = "of the model as it was before it was sharded, which a list, a partial or a closure has kept"
            write = "Read it from its module in the forward, as self.weight is read, or keep it in an nn.ParameterList"
            raise ShardError(f"apply: the forward computes with '{names[0]}' {why}. {write} or nn.ParameterDict")
        return out


class _Refusing(TorchDispatchMode):
    def __init__(self, verb: str) -> None:
        super().__init__()
        self._verb = verb

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _NAMESPACES and (name := _called_as(islice(walk_stack(currentframe()), 1, None))):
            raise _refused(self._verb, name)
        return AS_TENSORS.get(func, func)(*args, **(kwargs or {}))


class _OfParts(TorchFunctionMode):
    """Refuses what is not done element by element with parts of leaves."""

    def __init__(self, verb: str, parts: Any) -> None:
        super().__init__()
        self._verb, self._parts = verb, parts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = [x for x in pytree.tree_leaves((args, kwargs or {})) if isinstance(x, Tensor) and x in self._parts]
        if not operands or _is_ours():
            return func(*args, **(kwargs or {}))
        name, part = getattr(func, "__name__", "").strip("_"), self._parts[operands[0]]
        if name in DRAWS:
            raise ShardError(f"{self._verb}: {drawn_for_parts(name, part.leaf)}")
        keeps = name in _KEEPING or _is_pointwise(name) or (name == "getitem" and _adds_dims(args[1]))
        if not keeps and not (part.members and _is_over_members(name, args, kwargs or {})):
            why = f"{name} of {part.leaf!r} would be that of this rank's part, all that a leaf is inside a transform"
            instead = f"sf.tree.dot or sf.optim.global_norm of trees, or the whole sf.gather(params)[{part.leaf!r}]"
            raise ShardError(f"{self._verb}: {why}. Use {instead}")
        out = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(out):
            if isinstance(x, Tensor):
                self._parts[x] = part._replace(members=part.members and keeps and x.dim() == operands[0].dim())
        return out


def _is_over_members(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation takes away the first dim of its argument alone."""
    if name == "getitem":
        first, *rest = args[1] if isinstance(args[1], tuple) else (args[1],)
        return isinstance(first, int) and _adds_dims(tuple(rest))
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0 if name == "unbind" else None)
    return name in _TAKING_A_DIM and dim in (0, (0,), [0])


def _is_ours() -> bool:
    """Whether code of this library does the operation that is under way, or what is within `apply` or a `shard_map`."""
    innermost = True
    for frame, _ in islice(walk_stack(currentframe()), 2, None):
        file = frame.f_code.co_filename
        if file.startswith(_TORCH) or frame.f_code.co_name == "__torch_function__":
            continue
        if file == __file__:  # the function that is watched
            return False
        if file in _ON_PARTS or (innermost and file.startswith(_OURS)):
            return True
        innermost = False
    return False


@cache
def _is_pointwise(name: str) -> bool:
    op = getattr(torch.ops.aten, name, None)
    return op is not None and any(torch.Tag.pointwise in getattr(op, each).tags for each in op.overloads())


def _adds_dims(index: Any) -> bool:
    """Whether an index takes everything."""
    return all(at is None or at is ... or at == slice(None) for at in (index if isinstance(index, tuple) else (index,)))


def _called_as(frames: Iterable[tuple[FrameType, int]]) -> str | None:
    """The function of torch.distributed that code outside of torch called, innermost frame first; None for our code."""
    name = None
    for frame, _ in frames:
        file = frame.f_code.co_filename
        if frame.f_code.co_name == "__torch_function__":  # a mode that hands on what others call
            continue
        if not file.startswith(_TORCH):
            return None if file.startswith(_OURS) else name
        if f"{_TORCH}/distributed/" in file and frame.f_code.co_name != "wrapper":
            module = str(frame.f_globals.get("__name__", "torch.distributed"))
            name = f"{module.replace('.distributed_c10d', '')}.{frame.f_code.co_name}"
    return None
