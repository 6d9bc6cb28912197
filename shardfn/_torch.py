"""The only file that touches private or version-dependent torch names.

Everything here is resolved once, at import, and used elsewhere under one name.
"""

import math
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cache, partial
from itertools import accumulate
from operator import attrgetter, eq, is_, methodcaller
from typing import Any
from unittest.mock import patch
from warnings import catch_warnings, simplefilter

import torch
import torch._C._functorch as functorch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter, temporarily_clear_interpreter_stack
from torch._functorch.utils import enable_single_level_autograd_function
from torch._subclasses import fake_tensor
from torch.autograd import forward_ad
from torch.distributed import _local_tensor
from torch.distributed._local_tensor import LocalIntNode, LocalTensor, LocalTensorMode, enabled_local_tensor_mode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.wrap import _recursive_wrap
from torch.distributed.tensor import DTensor, Placement, Replicate, _api
from torch.distributed.tensor._api import _FromTorchTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils import _python_dispatch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["DTensorSpec", "TorchDispatchMode", "pytree"]

# torch 2.13 renamed these two; the old names warn on every call, the new ones are absent before.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_to_all_single: Callable[..., Any] = dist.all_to_all_single

# A store for a world of one; exported by torch.distributed, but not declared.
HashStore: Callable[[], Any] = dist.__dict__["HashStore"]

# Whether a compiled all-to-all has a gradient; in torch 2.11 that is zero, without an error.
COMPILES_EXCHANGES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)

# What torch imports at the first backward or DTensor operation: 1.3 s in every process that did not import it before.
LAZY_MODULES = ("torch._dynamo",)


def materialized(x: torch.Tensor) -> torch.Tensor:
    """x with memory behind it: forward mode hands over ZeroTensors, which a collective cannot read or fill."""
    return x.clone() if not torch.compiler.is_compiling() and x._is_zerotensor() else x


def traces_first_order() -> bool:
    """Whether the graph being traced is at most one `func.grad` deep. Answered while tracing, a constant of the graph.

    In a graph (torch 2.13) the tangent of an `autograd.Function` without `jvp` is zero, `vmap` runs its collective on
    an undefined value, and its second derivative is that of a constant: all without an error.
    """
    return kinds_of_transforms() in ((), ("Grad",))


# What `torch.compiler.assume_constant_result` does, without the 0.7 s that importing Dynamo takes.
traces_first_order.__dict__["_dynamo_marked_constant"] = True


# DTensor from a local tensor without a check or a collective: 125 us for 50 leaves against 1 382 us for `from_local`.
# `from_local` also infers a wrong global shape for uneven shards. Checked with 2.11 and 2.13.


def dtensor_spec(mesh: DeviceMesh, placed: Sequence[Placement], size: Sequence[int], dtype: torch.dtype) -> DTensorSpec:
    """The metadata of a contiguous DTensor of a global size."""
    steps = list(accumulate([max(length, 1) for length in size[:0:-1]], operator.mul, initial=1))
    strides = tuple(reversed(steps[: len(size)]))
    return DTensorSpec(mesh, tuple(placed), tensor_meta=TensorMeta(torch.Size(size), strides, dtype))


def wrap_local(local: Tensor, spec: DTensorSpec, requires_grad: bool = False, kind: type[DTensor] = DTensor) -> DTensor:
    """A DTensor, or one of the class `kind`, around this rank's part; no copy, no communication, outside autograd."""
    meta = spec.tensor_meta
    assert meta is not None
    if local.dtype != meta.dtype:
        spec = dtensor_spec(spec.mesh, spec.placements, meta.shape, local.dtype)
    return DTensor.__new__(kind, local, spec, requires_grad=requires_grad)  # its __init__ does nothing, in 1.3 us


def unwrap_local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, no autograd; 1 us against 232 us for `to_local`; a plain tensor is its own."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


# Mesh, placements, global shape and dtype of a DTensor.
spec_of: Callable[[Any], DTensorSpec] = attrgetter("_spec")
# What a `CustomPolicy` of FSDP1 was made with.
function_of_custom: Callable[[Any], Callable[[Any], Any]] = attrgetter("_lambda_fn")


def wrapped_by(policy: Callable[..., Any], root: nn.Module) -> list[nn.Module]:
    """The modules in `root` that FSDP1 wraps when its `auto_wrap_policy` is a function; they stay as they are."""
    found: list[nn.Module] = []

    def note(module: nn.Module, **overrides: Any) -> nn.Module:
        found.append(module)
        return module

    _recursive_wrap(root, policy, note, set(), set(), only_wrap_children=True)
    return found


def move_to_mesh(tensor: DTensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    """Have a DTensor, the same object, say that its local part lies so on another mesh."""
    meta = tensor._spec.tensor_meta
    assert meta is not None
    tensor._spec = dtensor_spec(mesh, placements, meta.shape, meta.dtype)


def with_local(like: Tensor, local: Tensor) -> Tensor:
    """`local` with the mesh, placements and global shape of `like`; a plain `local` when `like` is plain."""
    return wrap_local(local, like._spec) if isinstance(like, DTensor) else local


innermost_transform: Callable[[], Any] = functorch.peek_interpreter_stack  # of `torch.func`; None outside of all


def in_transform() -> bool:
    """Whether a `torch.func` transform is active; saved-tensor hooks are forbidden there."""
    return functorch.peek_interpreter_stack() is not None


# What a tree of the upper part of a structure says of each leaf; None when it is no such tree.
one_for_each: Callable[[Any, pytree.TreeSpec], list[Any] | None] = pytree._broadcast_to_and_flatten


def from_outside(x: Tensor) -> bool:
    """Whether x belongs to a transform that is not running at this point."""
    return functorch.maybe_get_level(x) > len(functorch.get_interpreter_stack() or ())


def differentiated_in_vmap(tensors: Iterable[Tensor]) -> bool:
    """Whether a `grad` inside a `vmap` differentiates with respect to one of the tensors."""
    stack = functorch.get_interpreter_stack() or []
    first = next((level.level() for level in stack if level.key() == functorch.TransformType.Vmap), None)
    grads = {level.level() for level in stack if level.key() == functorch.TransformType.Grad}
    return first is not None and any((at := functorch.maybe_get_level(x)) > first and at in grads for x in tensors)


def differentiated_in_transform(x: Tensor) -> bool:
    """Whether an active transform differentiates with respect to what x is made of."""
    if functorch.is_functorch_wrapped_tensor(x) and forward_ad.unpack_dual(x).tangent is not None:
        return True
    while functorch.is_functorch_wrapped_tensor(x):
        if x.requires_grad:
            return True
        x = functorch.get_unwrapped(x)
    return False


def innermost_value(x: Tensor) -> Tensor:
    """The tensor that transforms wrap, with all mapped dims and no derivative."""
    while functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return x


def values_of(x: Tensor) -> list[Tensor]:
    """The same; of simulated ranks, each one's."""
    x = innermost_value(x)
    return [x._local_tensors[rank] for rank in sorted(x._ranks)] if isinstance(x, LocalTensor) else [x]


# Zeros without memory, which forward mode makes, crash an operation that a dispatch mode hands on (torch 2.13).
AS_TENSORS: dict[Any, Any] = {torch.ops.aten._efficientzerotensor.default: torch.ops.aten.zeros.default}


@cache
def prepare_forward_mode() -> None:
    """Have torch load what its forward mode needs, which warns of `torch.jit.script` that it uses itself."""
    with catch_warnings():
        simplefilter("ignore", DeprecationWarning)
        torch.autograd.forward_ad._maybe_load_decompositions()


def refuse_forward_mode(of_dtensors: Callable[[], Exception]) -> None:
    """Have `torch.func.jvp` of a DTensor, which torch refuses without a reason, raise this."""
    handlers = DTensor._op_dispatcher._custom_op_handlers

    def refuse(*_: Any) -> Any:
        raise of_dtensors()

    handlers.setdefault(torch.ops.aten._has_same_storage_numel.default, refuse)


@cache
def checkpoint_nothing_in_transforms() -> None:
    """Have `torch.utils.checkpoint` only call its function inside a transform, where torch forbids its hooks."""
    module = torch.utils.checkpoint
    autograd: Any = vars(torch._C)["_autograd"]
    generator = module._checkpoint_without_reentrant_generator

    def plain_in_transforms(*args: Any, **kwargs: Any) -> Any:
        forbidden = autograd._saved_tensors_hooks_get_disabled_error_message()
        if in_transform() or forbidden is not None:  # the second in a run without data, outside of transforms
            yield
        else:
            yield from generator(*args, **kwargs)

    module._checkpoint_without_reentrant_generator = plain_in_transforms


def unsplit_classes(model: Any) -> Collection[str] | None:
    """The classes of a transformers model, or class of them, whose modules stay in one piece; None for another one."""
    return (model._no_split_modules or ()) if hasattr(model, "_no_split_modules") else None


def init_of(model: Any) -> Callable[[Any], Any] | None:
    """How a transformers model initializes one of its modules; None for another model."""
    return getattr(model, "_init_weights", None)


def names_left_out(model: Any, when: str) -> Collection[str]:
    """Names that a transformers model does without: `"load_missing"`, `"load_unexpected"` (patterns) or `"save"`."""
    return getattr(model, f"_keys_to_ignore_on_{when}", None) or ()


def holds_data(x: Any) -> bool:
    """Whether it is a tensor with values of its own: it is no transform's, no recording's and no simulation's."""
    return type(x) in (Tensor, torch.nn.Parameter) and not functorch.is_functorch_wrapped_tensor(x)


def convolves_plainly(cls: Any) -> bool:
    """Whether a class, if it is a convolution of torch, has its inner forward, too."""
    kinds = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
    return all(cls._conv_forward is kind._conv_forward for kind in kinds if issubclass(cls, kind))


# What a convolution whose padding is not of zeros pads before and after each dim, the last one first.
padding_widths: Callable[[Any], list[int]] = attrgetter("_reversed_padding_repeated_twice")


def base_name(operation: Any) -> str:
    """The name of an operation without namespace and overload: `"add_"` of `aten.add_.Tensor`."""
    return operation._schema.name.rpartition("::")[2]


def named_arguments(operation: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """What an operation is given, by the names of its arguments."""
    names = [argument.name for argument in operation._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def without_writing(func: Any, change: Callable[[Any], Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """What an operator is given, with a change of all but the tensors that it writes to."""
    named = {argument.name: argument for argument in func._schema.arguments}

    def changed(argument: Any, value: Any) -> Any:
        written = argument.alias_info is not None and argument.alias_info.is_write
        return value if written else pytree.tree_map(change, value)

    places = zip(named.values(), args, strict=False)
    return tuple(changed(*each) for each in places), {key: changed(named[key], value) for key, value in kwargs.items()}


is_mutable: Callable[[Any], bool] = attrgetter("_schema.is_mutable")  # whether an operation writes one of its arguments


def is_traced() -> bool:
    """Whether operations are recorded into a graph by `make_fx`, as `torch.func.linearize` does."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def seen_by_dynamo() -> bool:
    """Whether Dynamo traces this call, or looks at the calls that are made here: in a frame that it gave up, say."""
    return torch.compiler.is_compiling() or eval_frame.get_eval_frame_callback() is not None


def has_no_memory() -> bool:
    """Whether new tensors stand for values that a graph will compute; see `sf.jit`."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def record(fn: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Any, dict[int, Tensor]]:
    """The operations of `fn(*inputs)` as a `torch.fx.GraphModule`, found without computing anything.

    Tensors from elsewhere are attributes of it, as fake ones; the second result has the real ones by identity of these.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    # Not `tracing_mode="fake"`, which makes a symbol of every value that Python asks for.
    with torch.random.fork_rng(devices=()), fake_tensor.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        watch = _Recorder(mode)

        def run(*given: Tensor) -> Any:
            with watch:
                return fn(*given)

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


def storage_key(x: Tensor) -> int:
    """The same number for tensors of one storage, and another one for every other storage in use."""
    storage = x.untyped_storage()
    return storage._cdata if isinstance(x, fake_tensor.FakeTensor) else storage.data_ptr()


# No mode sees operations within.
outside_dispatch: Callable[[], AbstractContextManager[Any]] = _python_dispatch._disable_current_modes
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack  # how many see operations here


def in_selective_checkpoint() -> bool:
    """Whether a selective checkpoint keeps what operations give here, or looks for it: it counts them."""
    kinds = torch.utils.checkpoint._CachingTorchDispatchMode, torch.utils.checkpoint._CachedTorchDispatchMode
    return any(isinstance(mode, kinds) for mode in _python_dispatch._get_current_dispatch_mode_stack())


outside_functions: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunction  # no mode sees functions
function_modes: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack  # which see functions here


# What calls something with the gradient of a tensor.
HOOKING = (Tensor.register_hook, Tensor.retain_grad)


def has_hooks(x: Tensor) -> bool:
    """Whether something is called with the gradient of a tensor, or of outputs of the module that made it."""
    return bool(x._backward_hooks) or _function_of(x) is BackwardHookFunction


def users_backward(x: Tensor) -> type | None:
    """The `autograd.Function` of the user's that made x."""
    function = _function_of(x)
    module = function.__module__ if function is not None else ""
    ours = module.partition(".")[0] == __name__.partition(".")[0]
    torchs = module.startswith("torch.") and not module.startswith("torch._library.")  # which wraps the user's
    return None if ours or torchs else function


def _function_of(x: Tensor) -> type | None:
    return getattr(x.grad_fn, "_forward_cls", None)


def blank_gradients(x: Tensor) -> list[Tensor]:
    """Gradients without data of all that the `autograd.Function` made that made x."""
    node: Any = x.grad_fn
    return [torch.empty(tuple(y.shape), dtype=y.dtype, device="meta") for y in node._input_metadata]


def ran_backward(x: Tensor, grads: Sequence[Tensor]) -> Any:
    """What the backward of the `autograd.Function` that made x makes of gradients; hooks are not called."""
    node: Any = x.grad_fn
    return node.apply(*grads)


class _FromLocal(_FromTorchTensor):
    """`DTensor.from_local`, of whose backward torch (2.13) cuts the graph where it moves data."""

    @staticmethod
    def backward(ctx: Any, grad_output: Any) -> Any:
        if grad_output is None or not torch.is_grad_enabled():
            return _FromTorchTensor.backward(ctx, grad_output)
        wanted = getattr(ctx, "grad_placements", None)
        if wanted is None:
            name = "forward_input_placements" if hasattr(ctx, "forward_input_placements") else "previous_placement"
            wanted = [Replicate() if placement.is_partial() else placement for placement in getattr(ctx, name)]
        found = grad_output.redistribute(grad_output.device_mesh, wanted).to_local()
        return found, *[None] * (len(ctx.needs_input_grad) - 1)


def differentiates_from_local() -> None:
    """From now on gradients of gradients by inputs of `parallelize_module`'s modules are those of one process.

    Needless when `torch.distributed.tensor._api._FromTorchTensor.backward` has a graph, too.
    """
    _api._FromTorchTensor = _FromLocal


def storage_number(x: Tensor) -> int:
    """The number of a storage, with or without memory; another one may have it when this one is gone."""
    return x.untyped_storage()._cdata


# Whether a tensor is one around others, without memory of its own: a DTensor, or what a collective is to fill.
wraps: Callable[[Tensor], bool] = _python_dispatch.is_traceable_wrapper_subclass


# Collectives as operations of a graph: what is started here is there after `waited`.


def gathering(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[n] -> [W*n]`: an all-gather."""
    return torch.ops._c10d_functional.all_gather_into_tensor(x, group.size(), group.group_name)


def scattering_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[W*n] -> [n]`: a reduce-scatter."""
    return torch.ops._c10d_functional.reduce_scatter_tensor(x, "sum", group.size(), group.group_name)


def summing(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """An all-reduce."""
    return torch.ops._c10d_functional.all_reduce(x, "sum", group.group_name)


def exchanging(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[W*n] -> [W*n]`: an all-to-all of equal parts."""
    parts = [x.numel() // group.size()] * group.size()
    return torch.ops._c10d_functional.all_to_all_single(x, parts, parts, group.group_name)


waited: Callable[[Tensor], Tensor] = torch.ops._c10d_functional.wait_tensor  # the result of a collective


# All ranks of a mesh in one process, by `LocalTensorMode` of torch, which is private.


class _AsOneRank(TorchDispatchMode):
    """What torch's mode for simulated ranks (2.13) leaves open.

    Each rank draws the same from a `Generator`, as ranks do that have one each. A number that ranks have each their own
    of is that number, also where all tensors are from outside; the mode would take a placeholder. Zeros of forward mode
    have memory: a kernel that gets one without, in a tensor of many ranks, reads where there is nothing. Scripts of
    torch, which are its forward mode of some operations, get the size of a tensor.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = AS_TENSORS.get(func, func)
        if func is torch.ops.aten.size.default:
            return list(args[0].shape)
        kwargs = kwargs or {}
        generator: torch.Generator | None = kwargs.get("generator")
        flat, structure = pytree.tree_flatten((args, kwargs))
        if generator is None and not self._only_numbers_differ(flat):
            return func(*args, **kwargs)
        changes = isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable
        if changes and generator is None:
            raise RuntimeError(
                f"{func}: ranks would write different values into one tensor from outside of the simulation, or a "
                "copy of one; compute a new tensor instead, such as x + n"
            )
        before = None if generator is None else generator.get_state()

        def on_one(_: int, own: list[Any]) -> list[Tensor]:
            if generator is not None and before is not None:
                generator.set_state(before)
            own_args, own_kwargs = pytree.tree_unflatten(own, structure)
            out = func(*own_args, **own_kwargs)
            return [out] if isinstance(out, Tensor) else list(out)

        out = on_each_rank(on_one, flat)
        return args[0] if changes else out[0] if len(out) == 1 else out

    @staticmethod
    def _only_numbers_differ(values: list[Any]) -> bool:
        """Whether there are plain tensors, and of what ranks have each their own of only numbers."""
        if not any(isinstance(x, torch.SymInt) and isinstance(x.node, LocalIntNode) for x in values):
            return False
        tensors = [x for x in values if isinstance(x, Tensor)]
        return bool(tensors) and not any(isinstance(x, LocalTensor) for x in tensors)


@contextmanager
def _states_of_ranks() -> Iterator[None]:
    """Within it `get_rng_state` keeps those of all simulated ranks with what it returns, and `set_rng_state` sets them.

    Torch's mode (2.13) sets them at every operation to what it knows: what a checkpoint sets would have no effect.
    """
    get, put = torch.get_rng_state, torch.set_rng_state
    collect, spread = _local_tensor._collect_accelerator_rng_states, _local_tensor._set_accelerator_rng_states

    def states() -> dict[int, Any]:
        mode = enabled_local_tensor_mode()
        return {} if mode is None else mode._per_rank_rng_states

    def get_all() -> Tensor:
        state = get()
        vars(state)["of_ranks"] = dict(states())
        return state

    def put_all(state: Tensor) -> None:
        put(state)
        found = states()
        found.update(vars(state).get("of_ranks") or dict.fromkeys(found, (state, {})))

    def put_one(cpu: Tensor, others: dict[int, Tensor]) -> None:
        put(cpu)
        spread(others)

    with (
        patch.multiple(torch, get_rng_state=get_all, set_rng_state=put_all),
        patch.multiple(torch.random, get_rng_state=get_all, set_rng_state=put_all),
        patch.multiple(_local_tensor, _get_rng_state=lambda: (get(), collect()), _set_rng_state=put_one),
    ):
        yield


@contextmanager
def simulated_ranks(count: int) -> Iterator[None]:
    """Within it this process is `count` ranks, which have the default process group to themselves."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    c10d = dist.distributed_c10d
    outer, hook, made = c10d._world.default_pg, sys.excepthook, c10d._world.group_count
    tables = {name: getattr(c10d, name) for name in _GROUP_TABLES}
    copies: Any = {name: {k: v[:] if isinstance(v, list) else v for k, v in tables[name].items()} for name in tables}
    with patch.multiple(c10d, **copies):  # names of groups stay unique
        c10d._update_default_pg(None)
        try:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
            sys.excepthook = hook
            with LocalTensorMode(count), _states_of_ranks(), _AsOneRank():
                yield
        finally:
            for group, name in c10d._pg_names.items():
                if group not in tables["_pg_names"]:
                    c10d.__dict__["_unregister_process_group"](name)
            c10d._update_default_pg(outer)
            c10d._world.group_count = made  # the next group has the same name on ranks that have not simulated
            sys.excepthook = hook


_GROUP_TABLES = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag")


def simulated() -> bool:
    """Whether tensors hold the values of all ranks; see `sf.simulate`."""
    return enabled_local_tensor_mode() is not None


def on_each_rank(fn: Callable[[int, list[Any]], Sequence[Tensor]], values: Sequence[Any]) -> list[Tensor]:
    """`fn(rank, its values)` for every simulated rank; each result holds what all of them got. Outside autograd."""
    mode = enabled_local_tensor_mode()
    assert mode is not None
    with mode.disable():
        found = {rank: fn(rank, [part_of_rank(x, rank) for x in values]) for rank in sorted(mode.ranks)}
        return [LocalTensor(dict(zip(found, same, strict=True))) for same in zip(*found.values(), strict=True)]


def of_each_rank(x: Tensor) -> Tensor:
    """A tensor from outside of the simulation as one of all ranks, differentiable."""
    held = x if not functorch.is_functorch_wrapped_tensor(x) else values_of(x)[0]
    return x if isinstance(held, LocalTensor) or x.is_meta else torch.where(torch.ones((), dtype=torch.bool), x, x)


def part_of_rank(x: Any, rank: int) -> Any:
    """What one simulated rank has of a tensor or a number; what is not told apart by rank is the same on all."""
    if isinstance(x, torch.SymInt):
        return x.node._local_ints[rank] if isinstance(x.node, LocalIntNode) else x.node.maybe_as_int()
    return x._local_tensors[rank] if isinstance(x, LocalTensor) else x


def pull_back(pull: Any, cotangents: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What a function that `torch.func.vjp` made says of cotangents; without grad mode, too, for the sake of `jvp`.

    Some backward formulas have a form of their own for when nobody differentiates them, which has no forward mode.
    """
    return pull(cotangents, create_graph="Jvp" in kinds_of_transforms() or torch.is_grad_enabled())


class Level:
    """The innermost transform of `torch.func`, for an operation that says itself what it is there and below."""

    def __init__(self, interpreter: Any) -> None:
        self._interpreter, self._number = interpreter, interpreter.level()
        self.forward_mode = interpreter.key() == functorch.TransformType.Jvp
        self.reverse_mode = interpreter.key() == functorch.TransformType.Grad

    def below(self) -> AbstractContextManager[Any]:
        """Within it, the transform around this one is the innermost."""
        return self._interpreter.lower()

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Value and tangent of a tensor, as they are below; None where it has no tangent."""
        primal, tangent = forward_ad.unpack_dual(x)
        return self._inside(primal), None if tangent is None else materialized(self._inside(tangent))

    def tracked(
        self, function: type[torch.autograd.Function], below: Callable[..., Any], fn: Any, inputs: Sequence[Tensor]
    ) -> Any:
        """`below(fn, *inputs)` without this transform, of which `function` says how it is differentiated."""

        def wrapped(x: Tensor) -> Tensor:
            return functorch._wrap_for_grad(x, self._number)

        def forward(fn: Any, *operands: Tensor) -> Any:
            lowered = [self._inside(x) for x in operands]
            with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), self._interpreter.lower():
                outputs = below(fn, *lowered)
            return tuple(map(wrapped, outputs))

        methods = {name: staticmethod(getattr(function, name)) for name in ("setup_context", "backward")}
        methods["forward"] = staticmethod(forward)
        once: Any = type(function.__name__, (torch.autograd.function._SingleLevelFunction,), methods)
        # One that only transforms around this one differentiate would be asked here for what it is in forward mode.
        lifted = [x if functorch.maybe_get_level(x) == self._number else wrapped(x) for x in inputs]
        with enable_single_level_autograd_function():
            return once.apply(fn, *lifted)

    def _inside(self, x: Tensor) -> Tensor:
        return functorch._unwrap_for_grad(x, self._number)


def innermost() -> Level | None:
    """The innermost transform, if there is one."""
    return Level(retrieve_current_functorch_interpreter()) if in_transform() else None


def kinds_of_transforms() -> tuple[str, ...]:
    """Of the active ones, outermost first."""
    return tuple(level.key().name for level in functorch.get_interpreter_stack() or ())


def vmap_depth() -> int:
    """How many `vmap`s are active."""
    return kinds_of_transforms().count("Vmap")


def outside_transforms() -> AbstractContextManager[Any]:
    """Within it no `torch.func` transform is active, for work on tensors that none of them has to do with."""
    return temporarily_clear_interpreter_stack() if in_transform() else nullcontext()


# The tables of what an nn.Module owns directly, also as absent (None): what `torch.func.functional_call` swaps too,
# without a public way to reach them.

parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")


def set_tables(module: nn.Module, **tables: dict[str, Any]) -> None:
    """Replace `parameters`, `buffers` or `modules` of a module, without the checks of its attributes."""
    module.__dict__.update({f"_{name}": table for name, table in tables.items()})


Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


def compiler_of(module: nn.Module) -> Compiler | None:
    """What compiles a function as `module.compile(...)` was told to compile the module; None without that call."""
    compiled: Any = module._compiled_call_impl
    if compiled is None:
        return None
    return compiled.get_compiler_config.__closure__[0].cell_contents  # the context that `torch.compile` made


def compiler_of_wrapped(module: nn.Module) -> Compiler | None:
    """The same for the module in what `torch.compile(module, ...)` returned."""
    dynamo = sys.modules.get("torch._dynamo")  # without the 0.7 s that importing it takes
    wrapper: Any = module if dynamo is not None and isinstance(module, dynamo.OptimizedModule) else None
    return None if wrapper is None else wrapper.dynamo_ctx


def call_wrapped(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the module in what `torch.compile(module)` returned, not its graph."""
    return module._orig_mod(*args, **kwargs)


_READERS: list[Callable[[Any, str], None]] = []  # who wants to know, in any thread


@contextmanager
def attributes_read(note: Callable[[Any, str], None]) -> Iterator[None]:
    """Within it `note(module, name)` is called before an attribute of any module is read."""

    def read(module: Any, name: str) -> Any:
        for reader in _READERS:
            reader(module, name)
        return object.__getattribute__(module, name)

    _READERS.append(note)
    nn.Module.__getattribute__ = read
    try:
        yield
    finally:
        _READERS.remove(note)
        if not _READERS and "__getattribute__" in nn.Module.__dict__:
            del nn.Module.__getattribute__


call_uncompiled: Callable[[nn.Module], Callable[..., Any]] = attrgetter("_call_impl")  # which `compile()` compiles


def left_by_dynamo(function: Any) -> Any:
    """A decorator: Dynamo ends its graph at the function, and begins others in what that calls.

    `torch.compiler.disable(recursive=False)` does the same, and imports Dynamo, which takes 0.7 s.
    """
    action = eval_frame._FrameAction
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT))
    vars(function)["_torchdynamo_disable"] = True
    return function


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether hooks run around the forward of a module or in its backward."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(map(bool, hooks))


def forward_hooks(model: nn.Module) -> list[dict[int, Any]]:
    """The tables of hooks around the forward of each module, and of all modules, which fill later."""
    own = [hooks for m in model.modules() for hooks in (m._forward_pre_hooks, m._forward_hooks)]
    return [*own, torch.nn.modules.module._global_forward_pre_hooks, torch.nn.modules.module._global_forward_hooks]


def refresh_flat_weights(rnn: nn.RNNBase, plain: bool = False) -> None:
    """RNNs read their weights from a list made when they were built; make it from their attributes.

    `plain`: from what their table of parameters holds as a dict, whatever its class says.
    """
    read = partial(dict.get, rnn._parameters) if plain else partial(getattr, rnn)
    rnn._flat_weights = [read(name) for name in rnn._flat_weights_names]


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place; not counted for one made under `torch.inference_mode()`."""
    return 0 if tensor.is_inference() else tensor._version


# `version_of` of a tensor that autograd saves, which is none of inference mode.
version_of_saved: Callable[[Tensor], int] = attrgetter("_version")


def call_parameters(tensors: Iterable[Tensor]) -> None:
    """Let `isinstance(x, nn.Parameter)` hold of tensors that stand for parameters."""
    for tensor in tensors:
        tensor._is_param = True


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """`version_of` of each."""
    try:
        return list(map(version_of_saved, tensors))
    except RuntimeError:  # one is of inference mode
        return list(map(version_of, tensors))


IncompatibleKeys = nn.modules.module._IncompatibleKeys


def foreach(operation: str) -> Callable[..., Any]:
    """The fused form of an operation over lists of tensors, `foreach("add_")`: what torch's own optimizers call."""
    return getattr(torch, f"_foreach_{operation}")


copy_each = foreach("copy_")  # (into, from_)
# chunk_cat(tensors, dim, W, out=[W, n]): each tensor cut into W on a dim, the i-th parts of all side by side in row i.
chunk_cat: Callable[..., Any] = torch.__dict__["_chunk_cat"]


base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")  # the tensor that a view belongs to


# How many tensors and handles refer to the storage with an address, see `address_of`.
storage_uses: Callable[[int], int] = torch._C._storage_Use_Count
address_of: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")


# A number of the backward under way in this thread, larger than those of all that began before; -1 when there is none.
backward_id: Callable[[], int] = torch._C._current_graph_task_id


# Run a callback when the backward that is running now has visited its whole graph.
after_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback


def accumulates(node: Any) -> bool:
    """Whether the backward under way only adds a gradient for `node` to the `.grad` of a leaf."""
    if type(node).__name__ != "AccumulateGrad":
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # autograd.grad collects it
        return False


node_that_runs: Callable[[], Any] = torch._C._current_autograd_node  # of the backward in this thread; None outside
number_of: Callable[[Any], int] = methodcaller("_sequence_nr")  # of a node: how many this thread had made before it
made_before: Callable[[], int] = attrgetter("_C._autograd._get_sequence_nr")(torch)
metadata_of: Callable[[Any], dict[Any, Any]] = attrgetter("metadata")  # a dict that lives as long as a node of a graph


def out_of_inference_mode() -> AbstractContextManager[Any]:
    """Tensors made within are ordinary ones, which may be written later; gradients are recorded as before."""
    return _out_of_inference_mode() if torch.is_inference_mode_enabled() else nullcontext()


@contextmanager
def _out_of_inference_mode() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def grad_dtypes_of(leaves: Iterable[Tensor]) -> list[torch.dtype]:
    """The dtypes of the gradients of leaves, which may be set to others than the leaves' own."""
    return [(leaf.grad_dtype if leaf.is_leaf else None) or leaf.dtype for leaf in leaves]


def has_gradient_hooks(leaf: Tensor) -> bool:
    """Whether hooks of a leaf wait for its gradient."""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


def group_of(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A new process group that only its members make, all of them at the same point.

    Torch names such a group after how many the process is in, which is not the same on all members: a name of which one
    waits in vain for the other. Ours counts those of these ranks, which each member has made.
    """
    count = _groups_made[tuple(ranks)] = _groups_made.get(tuple(ranks), 0) + 1
    name = f"shardfn:{'_'.join(map(str, ranks))}:{count}"
    with patch.object(dist.distributed_c10d, "_process_group_name", lambda *args, **kwargs: name):
        made: Any = dist.new_group(list(ranks), use_local_synchronization=True)
    return made


# The process group with a `group_name`.
group_named: Callable[[str], dist.ProcessGroup] = dist.distributed_c10d.__dict__["_resolve_process_group"]
_groups_made: dict[tuple[int, ...], int] = {}  # ranks -> how often this process has made a group of them


# The key-value store through which the ranks of the default process group met.
default_store: Callable[[], Any] = dist.distributed_c10d._get_default_store


# Many leaves at a time: `map` in C takes 30 ns a leaf.

_local_of = attrgetter("_local_tensor")
_dtype_of: Callable[[Any], torch.dtype] = attrgetter("_local_tensor.dtype")
_shape_of = attrgetter("shape")
_layout_of = attrgetter("mesh", "placements", "tensor_meta.shape")


def unwrap_locals(tensors: Sequence[Tensor]) -> list[Tensor]:
    """`unwrap_local` of each."""
    return list(map(_local_of, tensors)) if set(map(type, tensors)) == {DTensor} else list(map(unwrap_local, tensors))


def fresh_leaves(leaves: Sequence[DTensor], ask: Collection[bool]) -> list[DTensor]:
    """New DTensors over the same local parts, outside autograd; whether each asks for a gradient."""
    new, locals_ = DTensor.__new__, map(Tensor.detach, map(_local_of, leaves))
    rows = zip(locals_, map(spec_of, leaves), ask, strict=True)
    return [new(DTensor, local, spec, requires_grad=asks) for local, spec, asks in rows]


def with_locals(likes: Sequence[Tensor], locals_: Sequence[Tensor]) -> list[Tensor]:
    """`with_local` of each pair; the dtypes are those of `likes`."""
    if set(map(type, likes)) != {DTensor}:
        return list(map(with_local, likes, locals_))
    new, specs = DTensor.__new__, map(spec_of, likes)
    return [new(DTensor, local, spec, requires_grad=False) for local, spec in zip(locals_, specs, strict=True)]


def dtypes_of(tensors: Collection[Tensor]) -> list[torch.dtype]:
    """The dtype of each; twice as fast as asking when all are DTensors."""
    return list(map(_dtype_of, tensors)) if set(map(type, tensors)) == {DTensor} else [x.dtype for x in tensors]


def same_layouts(these: Sequence[Tensor], those: Sequence[Any]) -> bool:
    """Whether tensors are alike pair by pair: DTensors of one layout and shape, or plain tensors of one shape."""
    kinds = {*map(type, these), *map(type, those)}
    if kinds == {DTensor}:
        ours, theirs = list(map(spec_of, these)), list(map(spec_of, those))
        return all(map(is_, ours, theirs)) or all(map(eq, map(_layout_of, ours), map(_layout_of, theirs)))
    return kinds <= {Tensor, nn.Parameter} and all(map(eq, map(_shape_of, these), map(_shape_of, those)))


def fused(rule: str) -> Callable[..., None]:
    """The kernel of torch's optimizers that updates a list of tensors of one device in place, `fused("adamw")`.

    With the functions of `torch.optim`, that need a counter per parameter, small parameters take twice as long.
    """
    return getattr(torch, f"_fused_{rule}_")


# Make a blank tensor one over a storage: (blank, storage, where it begins there, shape, strides).
set_storage: Callable[..., Tensor] = Tensor.set_


def tensor_over(address: int, numel: int, like: Tensor) -> Tensor:
    """A flat tensor over memory that others own, with dtype and device of `like`; they must outlive its use."""
    storage: Any = torch._C._construct_storage_from_data_pointer(address, like.device, numel * like.element_size())
    return set_storage(like.new_empty(0), storage, 0, (numel,))


def close_connections(group: dist.ProcessGroup, rank: int, device: torch.device) -> None:
    """Make every call of the group fail on all its ranks, those that wait in one included.

    gloo has no `abort` that reaches its peers, but closes a connection on which a wait ran out of time.
    """
    if device.type != "cpu":
        group.abort()
        return
    for peer in range(group.size()):
        if peer != rank:
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, 2**31 - 1).wait(timedelta(milliseconds=1))


# Numbers that an operator takes for sizes and that hold two; torch asks their nodes, in C++ and in `torch.SymInt`.


class Node:
    """What torch asks of the node of a `SymInt`, `SymFloat` or `SymBool`, for a number that is two.

    A result of what torch computes with is another node. What it decides by, `decided` says.
    """

    def __init__(self, rank: Any, one: Any) -> None:
        self.rank, self.one = rank, one

    def decided(self, in_general: Any = None) -> Any:
        """The number that counts; there may be one that is right in general."""
        raise NotImplementedError

    def made(self, rank: Any, one: Any, *others: Any) -> "Node":
        """What is made of this and other nodes."""
        raise NotImplementedError

    in_general: bool | None = None  # of a comparison, what holds but in special cases

    def wrap_int(self, number: Any) -> "Node":
        return self.made(number, number)

    def is_contiguous(self, sizes: Any, strides: Any) -> "Node":
        def row_major(world: str) -> bool:
            lengths, steps = ([_of(n, world) for n in numbers] for numbers in (sizes, strides))
            pairs = enumerate(zip(lengths, steps, strict=True))
            return 0 in lengths or all(n == 1 or step == math.prod(lengths[i + 1 :]) for i, (n, step) in pairs)

        return self.made(row_major("rank"), row_major("one"))

    def sym_sum(self, terms: Any) -> "Node":
        return self.made(*(sum(_of(getattr(x, "node", x), world) for x in terms) for world in ("rank", "one")))

    wrap_float = wrap_bool = wrap_int
    is_non_overlapping_and_dense = is_contiguous

    hint = property(attrgetter("rank"))


# What other methods answer, whatever else they are given.
_ANSWERS: dict[str, Callable[[Node], Any]] = {
    "is_int": lambda node: type(node.rank) is int,
    "is_float": lambda node: type(node.rank) is float,
    "is_bool": lambda node: type(node.rank) is bool,
    "is_constant": lambda node: node.rank == node.one,
    "maybe_as_int maybe_as_float maybe_as_bool constant_int constant_bool": lambda node: (
        node.rank if node.rank == node.one else None
    ),
    "guard_int guard_float expect_true require_hint bool_ int_": lambda node: node.decided(),
    "guard_bool": lambda node: node.decided(node.in_general),
    "guard_or_false statically_known_true": lambda node: node.decided(False),
    "guard_or_true": lambda node: node.decided(True),
    "guard_size_oblivious": lambda node: node.decided(node.one),  # as if neither 0 nor 1, which one process tells
    "clone sym_int trunc floor ceil round": lambda node: node,
    "is_non_overlapping_and_dense_indicator": lambda node: node.made(1, 1),
    "is_channels_last_contiguous_2d is_channels_last_contiguous_3d": lambda node: node.made(False, False),
    "is_channels_last_strides_2d is_channels_last_strides_3d": lambda node: node.made(False, False),
    "is_symbolic has_hint expect_size": lambda node: True,
    "is_nested_int": lambda node: False,
    "nested_int singleton_int nested_int_coeff": lambda node: None,
    "str _graph_repr": lambda node: repr(node.rank),
}


def _answers(answer: Callable[[Node], Any]) -> Any:
    return lambda node, *_: answer(node)


for _names, _answer in _ANSWERS.items():
    for _name in _names.split():
        setattr(Node, _name, _answers(_answer))


def _of(number: Any, world: str) -> Any:
    return getattr(number, world) if isinstance(number, Node) else number


def _in_both(function: Callable[..., Any]) -> Any:
    def method(self: Node, *others: Any) -> Node:
        rank, one = (function(*(_of(x, world) for x in (self, *others))) for world in ("rank", "one"))
        made = self.made(rank, one, *others)
        made.in_general = {operator.eq: False, operator.ne: True}.get(function)
        return made

    return method


_SAME_NAMES = "add sub mul mod floordiv truediv pow neg eq ne lt le gt ge"
_ON_NUMBERS = {name: getattr(operator, name) for name in _SAME_NAMES.split()}
_ON_NUMBERS |= {"int_floordiv": operator.floordiv, "int_truediv": operator.truediv, "float_truediv": operator.truediv}
_ON_NUMBERS |= {"pow_by_natural": operator.pow, "float_pow": operator.pow, "sym_min": min, "sym_max": max, "abs": abs}
_ON_NUMBERS |= {"and_": lambda a, b: a and b, "or_": lambda a, b: a or b, "sym_not": operator.not_}
_ON_NUMBERS |= {"sym_and": lambda a, b: a and b, "sym_or": lambda a, b: a or b, "sym_float": float}
_ON_NUMBERS |= {"sym_sqrt": math.sqrt, "is_integer": lambda a: float(a).is_integer()}
for _name, _function in _ON_NUMBERS.items():
    setattr(Node, _name, _in_both(_function))


# Of a tensor subclass: functions of torch take it as they take others.
plainly: Any = torch._C._disabled_torch_function_impl


symbol: Callable[[Node], Any] = torch.SymInt  # an integer of which an operator sees the node


def wrapper(cls: Any, sizes: Sequence[Any], strides: Sequence[Any], like: Tensor) -> Any:
    """A tensor of a class around others, with these sizes and strides, on the device and in the dtype of `like`."""
    policy = "strides"  # or torch keeps what it was told once of its memory
    return Tensor._make_wrapper_subclass(
        cls, sizes, strides=strides, dtype=like.dtype, device=like.device, dispatch_sizes_strides_policy=policy
    )


_aten = torch.ops.aten
PLAIN = {_aten.size.default, _aten.stride.default}  # of which C++ wants numbers
# How a tensor lies in memory, as torch asks a wrapper.
OF_MEMORY: dict[Any, Callable[..., Any]] = {
    _aten.is_contiguous.default: Tensor.is_contiguous,
    _aten.is_contiguous.memory_format: lambda x, layout: x.is_contiguous(memory_format=layout),
    _aten.sym_is_contiguous.default: lambda x, layout=torch.contiguous_format: x.is_contiguous(memory_format=layout),
    _aten.is_non_overlapping_and_dense.default: lambda x: x.is_contiguous() or x.t().is_contiguous(),
    _aten.is_strides_like_format.default: _aten.is_strides_like_format.default,
    _aten.size.default: lambda x: list(x.shape),
    _aten.stride.default: lambda x: list(x.stride()),
    _aten.sym_stride.default: lambda x: list(x.stride()),
}
