"""What goes on around an operation: modes, graphs that are traced, arguments by name."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.fx.experimental import _config
from torch.utils import _python_dispatch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardfn._torch.memory import holds_data
from shardfn._torch.transforms import has_no_memory, simulated

# What torch imports at the first backward or DTensor operation, 1.3 s in every process that did not import it before,
# and at the first derivative in forward mode, 0.1 s.
LAZY_MODULES = ("torch._dynamo", "torch._decomp.decompositions_for_jvp")


# What a tree of the upper part of a structure says of each leaf; None when it is no such tree.
one_for_each: Callable[[Any, pytree.TreeSpec], list[Any] | None] = pytree._broadcast_to_and_flatten


def base_name(operation: Any) -> str:
    """The name of an operation without namespace and overload: `"add_"` of `aten.add_.Tensor`."""
    return operation._schema.name.rpartition("::")[2]


def named_arguments(operation: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """What an operation is given, by the names of its arguments."""
    return dict(zip([argument.name for argument in operation._schema.arguments], args, strict=False)) | kwargs


def masks_pick_all() -> AbstractContextManager[None]:
    """Within it a mask on the meta device picks everything, where only values tell how much that is."""
    config: Any = _config
    return config.patch(meta_nonzero_assume_all_nonzero=True)


def without_writing(func: Any, change: Callable[[Any], Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """What an operator is given, with a change of all but the tensors that it writes to."""
    named = {argument.name: argument for argument in func._schema.arguments}

    def changed(argument: Any, value: Any) -> Any:
        written = argument.alias_info is not None and argument.alias_info.is_write
        return value if written else pytree.tree_map(change, value)

    places = zip(named.values(), args, strict=False)
    return tuple(changed(*each) for each in places), {key: changed(named[key], value) for key, value in kwargs.items()}


is_mutable: Callable[[Any], bool] = attrgetter("_schema.is_mutable")  # whether an operation writes one of its arguments


def record(fn: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Any, dict[int, Tensor]]:
    """The operations of `fn(*inputs)` as a `torch.fx.GraphModule`, found without computing anything.

    Tensors from elsewhere are attributes of it, as fake ones; the second result has the real ones by identity of these.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    # Not `tracing_mode="fake"`, which makes a symbol of every value that Python asks for.
    with torch.random.fork_rng(devices=()), fake_tensor.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        watch = _Recorder(mode)

        def run(*tensors: Tensor) -> Any:
            with watch:
                return fn(*tensors)

        graph = make_fx(run, _allow_non_fake_inputs=True)(*map(mode.from_tensor, inputs))
    return graph, watch.real


class _Recorder(TorchDispatchMode):
    """What recording alone gets wrong.

    Real tensors, from elsewhere: operations on nothing else would be done at once, and not be part of the graph. Here
    they are fake ones, too. Nor have they values.

    Random numbers: what a recomputation draws again is what was drawn, not new numbers. A recomputation sets the state
    of torch's generator to what it was. Recording leaves it alone, so that here every operation that draws takes one
    real number, and the state before it tells which one it is.
    """

    def __init__(self, mode: fake_tensor.FakeTensorMode) -> None:
        super().__init__()
        self.real: dict[int, Tensor] = {}  # by the identity of its fake one
        self._mode = mode
        self._fakes: dict[int, Tensor] = {}  # by the identity of the real one
        self._drawn: dict[tuple[Any, bytes], Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(map(holds_data, pytree.tree_leaves((args, kwargs)))):
            return self._noting_draws(func, args, kwargs or {})
        args, kwargs = pytree.tree_map_only(Tensor, self._as_fake, (args, kwargs or {}))
        out = self._noting_draws(func, args, kwargs)
        return pytree.tree_map_only(Tensor, lambda x: self.real.get(id(x), x), out)

    def _as_fake(self, x: Tensor) -> Tensor:
        if not holds_data(x):
            return x
        if id(x) not in self._fakes:
            with outside_dispatch():  # of a view the base comes first, which is none of the step's operations
                fake = self._fakes[id(x)] = self._mode.from_tensor(x)
            self.real[id(fake)] = x
        return self._fakes[id(x)]

    def _noting_draws(self, func: Any, args: Any, kwargs: Any) -> Any:
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()) or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        with outside_dispatch():
            key = func, torch.get_rng_state().numpy().tobytes()
            torch.rand(())
        changes = func._schema.is_mutable
        if key in self._drawn:
            again = pytree.tree_map_only(Tensor, torch.clone, self._drawn[key])
            return args[0].copy_(again) if changes else again
        out = func(*args, **kwargs)
        self._drawn[key] = pytree.tree_map_only(Tensor, torch.clone, out)  # unused ones leave the graph
        return out


def outside_modes() -> AbstractContextManager[Any]:
    """Within it, operations are neither recorded nor done for simulated ranks; other modes are off, too."""
    return outside_dispatch() if has_no_memory() or simulated() else nullcontext()


def asks_for_values(error: Exception) -> bool:
    """Whether a recorded operation failed since Python wants a value, or a shape depends on one."""
    kinds = fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException
    of_memory = "is not supported for tensor subclasses", "Cannot access data pointer", "FakeTensor.__format__"
    return isinstance(error, kinds) or any(why in str(error) for why in of_memory)


def backend_for_graphs(name: str) -> Callable[..., Any]:
    """What `torch.compile(backend=name)` hands a graph and its inputs to."""
    from torch._dynamo import lookup_backend

    return lookup_backend(name)


# No mode sees operations within.
outside_dispatch: Callable[[], AbstractContextManager[Any]] = _python_dispatch._disable_current_modes
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack  # how many see operations here


outside_functions: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunction  # no mode sees functions
function_modes: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack  # which see functions here


# Torch draws the parts of a DTensor from the generator of their device, each from where it is: on CPUs the parts of all
# ranks would be alike. Checked with 2.11 and 2.13; `loss_parallel` of torch uses the same table.
_HANDLERS: dict[Any, Callable[..., Any]] = DTensor._op_dispatcher._custom_op_handlers
_DRAWS = tuple(
    getattr(getattr(torch.ops.aten, name), overload)
    for names, overloads in {
        "uniform_ normal_ exponential_ cauchy_ log_normal_ geometric_ random_ rand_like randn_like": "default",
        "bernoulli_": "float",
        "bernoulli": "default",
        "random_": "from to",
        "randint_like": "default low_dtype",
    }.items()
    for name in names.split()
    for overload in overloads.split()
)


def draw_whole_values() -> None:
    """From now on `uniform_`, `randn_like` and others of a DTensor on CPUs draw it whole, and each rank takes its part.

    Ranks whose generators are at the same place then have the values of one process.
    """
    _HANDLERS.update(dict.fromkeys(_DRAWS, _draw))


def _draw(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *how = args
    if tensor._local_tensor.device.type == "cpu" and not any(placement.is_partial() for placement in tensor.placements):
        takes_values = operation is torch.ops.aten.bernoulli.default
        whole = tensor.full_tensor() if takes_values else torch.empty(tensor.shape, dtype=tensor.dtype)
        full = operation(whole, *how, **kwargs)
        part = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)
        if not operation._schema.is_mutable:
            return part
        tensor._local_tensor.copy_(part._local_tensor)
        return tensor
    handler = _HANDLERS.pop(operation)
    try:
        return operation(*args, **kwargs)
    finally:
        _HANDLERS[operation] = handler
