"""`jit`: a whole step as one graph.

    first call     flatten -> record on tensors without values -> graph -> compile -> run
    later calls    flatten -> the same kinds of inputs as before? -> run

The step runs once, on fake tensors, as it would in any loop: units gather and gather again, gradients are reduced,
optimizers write in place. What is recorded is what it did to tensors; Python is gone afterwards.
"""

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardfn import _torch
from shardfn.context import RECORDING, Recording, holding, is_asked_for
from shardfn.layout import Plan
from shardfn.notation import ShardError
from shardfn.parallel import SplitLogits
from shardfn.params import Params, is_tree
from shardfn.random import stream
from shardfn.trace import all_in
from shardfn.transforms.unsupported_calls import LIBRARIES


def jit(step: Callable[..., Any], *, backend: str | Callable[..., Any] = "inductor") -> Callable[..., Any]:
    """The step as one compiled graph, collectives and optimizer included.

    `step(params, state, *batch)` is ordinary code on trees of shards. Its first call records what it does to tensors;
    later ones with inputs of the same kinds run the graph only. As with `jax.jit`, Python runs while recording and
    never again: a number that is no tensor, a random number of Python's or a `print` is a constant of the graph.
    Tensors that the step reads from elsewhere are inputs, whose values are looked up at each call.

        >>> import torch, shardfn as sf
        >>> from torch import nn
        >>> model = nn.Linear(4, 1)
        >>> params = sf.shard(model, sf.make_mesh("cpu", fsdp=1), sf.Policy())
        >>> def step(params, x):
        ...     loss, grads = sf.value_and_grad(lambda p: sf.apply(model, p, x).square().mean())(params)
        ...     return sf.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss
        >>> fast = sf.jit(step, backend="aot_eager")
        >>> params, first = fast(params, torch.ones(3, 4))
        >>> params, second = fast(params, torch.ones(3, 4))
        >>> bool(second < first)
        True

    Args:
        step: the function. Inputs and outputs are any pytrees of trees, tensors and constants; inputs may be changed in
            place, as `Optimizer.step` does.
        backend: what compiles the graph, as in `torch.compile`: `"inductor"`, `"aot_eager"` (runs it as it is), or a
            function `(graph, inputs) -> callable`.

    Returns:
        a function like `step`. Another kind of input (shape, dtype, plan, constant, `train()` or `eval()`) makes
        another graph.

    Raises:
        ShardError: the step depends on the value of a tensor (`if loss > 1`, `loss.item()`, `x[mask]`), with the line;
            its result would still have to be differentiated; it is called inside a transform.

    Communication: what the step does, as operations of the graph, in the same order on every rank.
    """
    graphs: list[_Graph] = []

    @wraps(step)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _torch.simulated():
            raise ShardError("jit: a simulation has no memory that a graph could use; call the step itself")
        if _torch.in_transform():
            raise ShardError("jit: a compiled step inside a transform; transform inside of the step instead")
        if is_asked_for():
            why = "a compiled step has no derivative, and is in a function that is differentiated"
            raise ShardError(f"jit: {why}. Call the step itself there, and put jit around the whole")
        arguments = _flatten((args, kwargs))
        graph = next((known for known in graphs if known.fits(arguments)), None)
        if graph is None:
            graph = _recorded_step(step, arguments, backend)
            graphs.append(graph)
        return graph.run(arguments)

    return call


@dataclass(frozen=True)
class _Leaf:
    """A tensor: a DTensor when there is a spec, split logits when there is an `origin`, too."""

    spec: _torch.DTensorSpec | None
    origin: Callable[[], str] | None = field(default=None, compare=False)

    def around(self, local: Tensor) -> Tensor:
        """What `local` is a part of."""
        if self.spec is None or self.origin is None:
            return local if self.spec is None else _torch.wrap_local(local, self.spec)
        (placement,) = self.spec.placements
        assert isinstance(placement, Shard)
        return SplitLogits.of(local, self.spec.mesh, placement.dim, self.origin)


@dataclass(frozen=True)
class _Constant:
    """What is no tensor; 1, 1.0 and True are three of them."""

    key: tuple[type, Any]
    value: Any = field(compare=False)


@dataclass
class _Flat:
    """A pytree as tensors and the rest. A tensor that occurs twice is there once; `places` says where each one goes."""

    tensors: list[Tensor]
    places: list[int]
    parts: list[_Leaf | _Constant]
    structure: _torch.pytree.TreeSpec  # of trees of shards and what is beside them
    inner: _torch.pytree.TreeSpec  # of these, a tree of shards as its leaves and its buffers
    layouts: list[tuple[Plan, DeviceMesh] | None]  # of each, if it is a tree
    trees: list[Params]

    def kind(self) -> tuple[Any, ...]:
        """What a graph depends on, the state around it included."""
        about = [(x.shape, x.stride(), x.dtype, x.device) for x in self.tensors], _overlaps(self.tensors)
        casts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
        around = torch.is_grad_enabled(), stream() is None, casts
        return self.structure, self.inner, self.places, about, self.parts, self.layouts, around

    def rebuilt(self, tensors: Sequence[Tensor]) -> tuple[Any, list[Params]]:
        """The pytree with other tensors; the trees in it."""
        values = iter([tensors[i] for i in self.places])
        leaves = [x.value if isinstance(x, _Constant) else x.around(next(values)) for x in self.parts]
        pairs = zip(_torch.pytree.tree_unflatten(leaves, self.inner), self.layouts, strict=True)
        nodes = [x if layout is None else Params(x[0], *layout, x[1]) for x, layout in pairs]
        return _torch.pytree.tree_unflatten(nodes, self.structure), [x for x in nodes if isinstance(x, Params)]


def _overlaps(tensors: Sequence[Tensor]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Pairs of tensors that are the same memory, and pairs that share a part: writing one changes the other."""
    spans = sorted(
        (start, start + x.element_size() * (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))), i)
        for i, x in enumerate(tensors)
        if x.numel() and x.layout is torch.strided and (start := x.data_ptr())
    )
    pairs, partial = list[tuple[int, int]](), list[tuple[int, int]]()
    last, owner = 0, -1
    for start, end, i in spans:
        if start < last:
            x, y = tensors[owner], tensors[i]
            same = (x.data_ptr(), x.shape, x.stride()) == (y.data_ptr(), y.shape, y.stride())
            (pairs if same else partial).append((owner, i))
        if end > last:
            last, owner = end, i
    return pairs, partial


def _constant(value: Any) -> _Constant:
    try:
        hash(value)
    except TypeError:
        why = f"an argument or a result of type {type(value).__name__} may change, and a graph would not know"
        raise ShardError(f"jit: {why}; pass tensors, numbers or frozen dataclasses of them") from None
    return _Constant((type(value), value.hex() if isinstance(value, float) else value), value)  # -0.0 is not 0.0


def _flatten(tree: Any) -> _Flat:
    nodes, structure = _torch.pytree.tree_flatten(tree, is_leaf=is_tree)
    leaves, inner = _torch.pytree.tree_flatten([(dict(x), x.buffers) if isinstance(x, Params) else x for x in nodes])
    layouts = [(x.plan, x.mesh) if isinstance(x, Params) else None for x in nodes]
    flat = _Flat([], [], [], structure, inner, layouts, [x for x in nodes if isinstance(x, Params)])
    index: dict[int, int] = {}
    for x in leaves:
        if not isinstance(x, Tensor):
            flat.parts.append(_constant(x))
            continue
        local = _torch.unwrap_local(x)
        place = index.setdefault(id(local), len(index))
        if place == len(flat.tensors):
            flat.tensors.append(local)
        flat.places.append(place)
        origin = x.origin if isinstance(x, SplitLogits) else None
        flat.parts.append(_Leaf(_torch.spec_of(x) if isinstance(x, DTensor) else None, origin))
    return flat


@dataclass
class _Graph:
    """A step for one kind of inputs."""

    kind: tuple[Any, ...]
    modes: list[tuple[nn.Module, bool]]  # of every module that it ran, whether it trains
    compiled: Callable[..., Any]
    constants: list[Tensor]  # tensors from elsewhere
    numbers: list[tuple[Callable[[Tensor], Any], int, Tensor]]  # some of them, see `Recording`
    result: _Flat
    sources: list[int]  # where each tensor of the result is among inputs and outputs, one after the other
    buffers: list[tuple[int, str, int | None]]  # of trees that are given, changed: (tree, name, where it is, or gone)

    def fits(self, arguments: _Flat) -> bool:
        """Whether it is the graph of these inputs."""
        return arguments.kind() == self.kind and all(module.training == mode for module, mode in self.modes)

    def run(self, arguments: _Flat) -> Any:
        """The step."""
        for fn, of, value in self.numbers:
            value.fill_(fn(arguments.tensors[of]))
        with torch.no_grad():
            outputs = self.compiled(*arguments.tensors, *self.constants)
        tensors = [*arguments.tensors, *outputs]
        for tree, name, source in self.buffers:
            if source is None:
                arguments.trees[tree].buffers.pop(name, None)
            else:
                arguments.trees[tree].buffers[name] = tensors[source]
        return self.result.rebuilt([tensors[source] for source in self.sources])[0]


def _recorded_step(step: Callable[..., Any], arguments: _Flat, backend: str | Callable[..., Any]) -> _Graph:
    traced: list[Any] = []
    _, partial = _overlaps(arguments.tensors)

    def run(*tensors: Tensor) -> list[Tensor]:
        (args, kwargs), trees = arguments.rebuilt(tensors)
        sharing = [(x, _torch.version_of(x)) for pair in partial for x in map(tensors.__getitem__, pair)]
        before = [dict(tree.buffers) for tree in trees]
        recording = Recording({id(x): i for i, x in enumerate(tensors)})
        with holding(RECORDING, recording):
            result = _flatten(step(*args, **kwargs))
        if (name := _left_in(step)) is not None:
            why = f"jit: the step has put something into '{name}', where the graph puts nothing when it runs"
            raise ShardError(f"{why}. Return it, and pass it to the next call: params, state = step(params, state, x)")
        written = next((x for x, version in sharing if _torch.version_of(x) != version), None)
        if written is not None:
            why = f"jit: the step writes a tensor of shape {tuple(written.shape)}, which shares a part of its memory"
            raise ShardError(f"{why} with another one: this would change too, in no graph; pass a clone")
        if any(x.requires_grad for x in result.tensors):
            raise ShardError("jit: a result of the step requires a gradient; detach it, or put value_and_grad inside")
        index = dict(recording.inputs)
        outputs: list[Tensor] = []

        def source(x: Tensor) -> int:
            if id(x) not in index:
                index[id(x)] = len(tensors) + len(outputs)
                outputs.append(x)
            return index[id(x)]

        sources = [source(x) for x in result.tensors]
        buffers = [
            (i, name, source(tree.buffers[name]) if name in tree.buffers else None)
            for i, (tree, had) in enumerate(zip(trees, before, strict=True))
            for name in had.keys() | tree.buffers.keys()
            if tree.buffers.get(name) is not had.get(name)
        ]
        traced[:] = [recording, result, sources, buffers]
        return outputs

    try:
        graph, real = _torch.record(run, [x.detach() for x in arguments.tensors])
    except Exception as error:
        if _torch.asks_for_values(error):
            raise ShardError(_needs_values(error)) from error
        raise
    recording, result, sources, buffers = traced
    constants = _lift_constants(graph, real)
    inputs = [*arguments.tensors, *constants]
    compiler = _torch.backend_for_graphs(backend) if isinstance(backend, str) else backend
    with torch.no_grad():
        compiled = compiler(graph, inputs)
    modes = [(module, module.training) for model in recording.models for module in model.modules()]
    result = replace(result, tensors=[], trees=[])
    return _Graph(arguments.kind(), modes, compiled, constants, recording.numbers, result, sources, buffers)


def _left_in(step: Callable[..., Any]) -> str | None:
    """The variable around a step in which it has left a tensor without values, if there is one."""
    with suppress(TypeError, ValueError):  # it is no function of Python's, or a variable is not there yet
        around = inspect.getclosurevars(step)
        for name, value in {**around.nonlocals, **around.globals}.items():
            tensors = (_torch.unwrap_local(x) for x in all_in(value) if isinstance(x, Tensor))
            if any(isinstance(x, _torch.FakeTensor) for x in tensors):
                return name
    return None


def _lift_constants(graph: fx.GraphModule, real: Mapping[int, Tensor]) -> list[Tensor]:
    """Make the tensors that a graph holds, or the `real` ones behind them, inputs of it, after the others."""
    attributes = [node for node in graph.graph.nodes if node.op == "get_attr"]
    holds = [node for node in attributes if isinstance(getattr(graph, str(node.target), None), Tensor)]
    first = next(node for node in graph.graph.nodes if node.op != "placeholder")
    inputs: dict[int, tuple[Tensor, fx.Node]] = {}  # by identity: what one name writes is read under another
    for node in holds:
        attribute = getattr(graph, str(node.target))
        value = real.get(id(attribute), attribute)
        if id(value) not in inputs:
            with graph.graph.inserting_before(first):
                inputs[id(value)] = value, graph.graph.placeholder(f"constant_{len(inputs)}")
        node.replace_all_uses_with(inputs[id(value)][1])
    graph.graph.eliminate_dead_code()
    for name in {str(node.target) for node in holds}:
        delattr(graph, name)
    graph.recompile()
    return [value for value, _ in inputs.values()]


def _needs_values(error: BaseException) -> str:
    """Which line asked for the value of a tensor."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
    where = user_frames[-1] if user_frames else frames[-1]
    experts = any(frame.filename == str(Path(__file__).parents[1] / "parallel" / "experts.py") for frame in frames)
    return (
        f"jit: {Path(where.filename).name}:{where.lineno} `{where.line}` needs the value of a tensor, which there is "
        "none of while the step is recorded. Use torch.where instead of if, masks instead of x[mask], return tensors "
        "instead of numbers, or do it outside of the step."
        + (" Experts that pick their tokens need a function of sorted ones: Experts(grouped=...)." if experts else "")
    )
