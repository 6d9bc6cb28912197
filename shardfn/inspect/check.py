"""`simulate`: all ranks of a mesh in this process; `check`: a sharded step there, against one on one rank."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardfn._torch import part_of_rank, pytree, simulated, simulated_ranks
from shardfn.layout import Grid, MeshSpec, Policy, Roles, axes_of, grid_of, index_along, replace_units
from shardfn.notation import ShardError
from shardfn.optim import adamw
from shardfn.params import gather, local_batch, shard
from shardfn.trace import ReachableState
from shardfn.transforms import ByFormulas, value_and_grad

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_DRAWING = (*_DROPOUTS, nn.RReLU, nn.MultiheadAttention, nn.RNNBase)
_WITHOUT_DROPS: dict[Any, Callable[..., Any]] = {
    F.dropout: lambda input, **others: input,
    F.scaled_dot_product_attention: lambda dropout_p=0.0, **given: F.scaled_dot_product_attention(**given),
}
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of norms
_SHOWN = 8  # problems in a printed report


@contextmanager
def simulate(**axes: int) -> Iterator[DeviceMesh]:
    """Within it this process is all ranks of a mesh: the real program, in a notebook or a test, without torchrun.

    Tensors made within hold one value for each rank, and every operation is done for each; collectives exchange
    between them. Tensors from outside are the same on all ranks. It is for seeing and testing, not for speed: CPU only,
    one operation after another.

        >>> import torch, shardfn as sf
        >>> from torch import nn
        >>> model = nn.Linear(8, 4)
        >>> with sf.simulate(fsdp=2, tp=2) as mesh:
        ...     params = sf.shard(model, mesh, sf.Policy(rules={"weight": "o@tp c@fsdp"}))
        ...     x = sf.data.local_batch(torch.ones(4, 8), mesh)
        ...     loss, grads = sf.value_and_grad(lambda p, x: sf.apply(model, p, x).sum())(params, x)
        ...     whole = sf.gather(grads)
        >>> whole["bias"].reconcile()
        tensor([2., 2., 2., 2.])

    Args:
        axes: axis name -> size, outermost first.

    Yields:
        the mesh. `sf.data.local_batch` gives each rank its part of a batch. A tensor that is the same on all ranks (a
        loss, what `gather` returns) becomes an ordinary one by `.reconcile()`, `float()` or `.tolist()`.

    Raises:
        ShardError: inside another simulation.
        TypeError: a size is not a whole number, or there is no axis.

    Communication: none between processes.
    """
    sizes = axes_of(MeshSpec(**axes))
    if simulated():
        raise ShardError("simulate: a simulation goes on already")
    with simulated_ranks(prod(sizes.values())):
        yield init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


@dataclass(frozen=True)
class Report:
    """What `check` found; true when sharded and unsharded are equal.

    `module` is the first module whose output differs, in the order of the forward; with equal outputs the one, nearest
    to the loss, whose gradient does. None when it is the loss itself, or nothing.

        >>> import shardfn as sf
        >>> report = sf.Report(problems=("the output of 'down' is the first that differs",), module="down")
        >>> print(report)
        check: not equal to one rank
          the output of 'down' is the first that differs
        >>> bool(report), bool(sf.Report())
        (False, True)

    Args:
        problems: what differs, in words; empty when nothing does.
        module: its path.
        loss: that of the simulated mesh.
        expected_loss: that of one rank.
        checked: what was compared.
    """

    problems: tuple[str, ...] = ()
    module: str | None = None
    loss: float = float("nan")
    expected_loss: float = float("nan")
    checked: tuple[str, ...] = field(default=(), repr=False)

    @property
    def ok(self) -> bool:
        """Whether everything is equal."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.ok:
            return f"check: equal to one rank: {', '.join(self.checked)}"
        more = len(self.problems) - _SHOWN
        listed = [*self.problems[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]
        return "\n".join(["check: not equal to one rank", *(f"  {problem}" for problem in listed)])


def check(
    model: nn.Module,
    mesh_spec: MeshSpec | DeviceMesh,
    policy: Policy,
    loss_fn: Callable[..., Any],
    batch: Any,
    *,
    tolerance: float | None = None,
) -> Report:
    """Compare one step on a simulated mesh with the same step on one rank: loss, every gradient, and an AdamW update.

    Takes no processes and no GPU, and finds what is wrong in rules, models and losses before either is booked: sizes
    that only fit the whole model, sums that are missing, losses that are averaged twice.

        >>> import torch, shardfn as sf
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        >>> rules = {"0.weight": "ff@tp c@fsdp", "0.bias": "ff@tp", "2.weight": "c@fsdp ff@tp"}
        >>> mesh = sf.MeshSpec(fsdp=2, tp=2)
        >>> loss_fn = lambda params, x: sf.apply(model, params, x).square().mean()
        >>> print(sf.check(model, mesh, sf.Policy(rules=rules), loss_fn, torch.randn(4, 8)))
        check: equal to one rank: loss, 4 gradients, 4 updated parameters
        >>> twice = lambda params, x: loss_fn(params, x) / params.mesh.size(0)
        >>> sf.check(model, mesh, sf.Policy(rules=rules), twice, torch.randn(4, 8)).ok
        False

    Args:
        model: with values, on the CPU; small sizes check the same code as large ones.
        mesh_spec: the mesh to simulate.
        policy: its precisions are not used: everything is computed in the model's own dtypes.
        loss_fn: as in `value_and_grad`; `loss_fn(params, *batch)`.
        batch: of all data ranks; a tuple or a list when there are several arguments.
        tolerance: largest relative error of a norm; default 1e-8 in float64, 1e-4 in float32, 1e-2 in float16, 5e-2 in
            bfloat16; of the coarsest dtype.

    Returns:
        what differs, and the first module to blame. Dropout is off meanwhile.

    Raises:
        ShardError: the model has no values, or a simulation goes on already. What one rank raises is raised; what
            only the mesh raises is in the report.

    Communication: none.
    """
    _require_values(model)
    sizes = axes_of(mesh_spec)
    plain = _in_own_dtypes(policy, model)
    args = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    if tolerance is None:
        tolerance = max((_TOLERANCE.get(p.dtype, 1e-4) for p in model.parameters()), default=1e-4)
    with _without_dropout(model):
        try:
            with simulate(**dict.fromkeys(sizes, 1)) as one:
                wanted = _step(model, one, plain, loss_fn, args)
        except ShardError as error:  # a rule that is wrong on any mesh
            return Report((f"{type(error).__name__}: {error}",), _named_module(model, str(error)))
        try:
            with simulate(**sizes) as mesh:
                computed = _step(model, mesh, plain, loss_fn, args)
                grid = grid_of(mesh, computed.roles.storage)
        except Exception as error:
            return Report((f"{type(error).__name__}: {error}",), _named_module(model, str(error)))
    return _compared(computed, wanted, grid, tolerance)


def _in_own_dtypes(policy: Policy, model: nn.Module) -> Policy:
    """The policy without its precisions."""
    policy = replace_units(policy, dict(model.named_modules()))
    units = policy.units
    if isinstance(units, Mapping):
        units = {unit: {k: v for k, v in settings.items() if k == "regather"} for unit, settings in units.items()}
    return replace(policy, units=units, compute_dtype=None, reduce_dtype=None, output_dtype=None, offload=None)


def _require_values(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"check: expected an nn.Module, got {type(model).__name__}")
    if simulated():
        raise ShardError("check: a simulation goes on already; check makes its own")
    if any(p.is_meta for p in model.parameters()):
        raise ShardError("check: the model is on the meta device and has no values to compare")


@dataclass
class _Step:
    """What a step computes."""

    outputs: list[tuple[str, list[Tensor]]]  # of modules, in the order in which they end
    loss: Tensor
    grads: dict[str, Tensor]
    updated: dict[str, Tensor]
    roles: Roles  # of the mesh axes
    draws: bool  # random numbers


def _step(model: nn.Module, mesh: DeviceMesh, policy: Policy, loss_fn: Callable[..., Any], args: Any) -> _Step:
    params = shard(model, mesh, policy)
    outputs: list[tuple[str, list[Tensor]]] = []
    before = torch.get_rng_state()
    with ReachableState(model).undone(()), _noting_outputs(model, outputs):  # a cache, say, is of simulated ranks
        loss, grads = value_and_grad(loss_fn)(params, *local_batch(args, mesh, policy))
    draws = not torch.equal(before, torch.get_rng_state())
    whole = gather(grads)
    optimizer = adamw(1e-2, eps=1e-2)
    updated = gather(optimizer.step(params, grads, optimizer.init(params))[0])
    return _Step(outputs, loss, whole, updated, params.plan.roles, draws)


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Within it dropout does nothing: it would draw other numbers on a mesh."""
    with ReachableState(model).undone(()), ByFormulas(_WITHOUT_DROPS):
        for module in model.modules():
            if isinstance(module, _DRAWING):
                module.training = False
        yield


@contextmanager
def _noting_outputs(model: nn.Module, outputs: list[tuple[str, list[Tensor]]]) -> Iterator[None]:
    """Within it every module's output is noted."""

    def note(path: str, _module: nn.Module, _args: Any, output: Any) -> None:
        leaves = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and type(x) is not nn.Parameter]
        tensors = [x.detach() for x in leaves if x.is_floating_point()]
        if not any(x.is_meta for x in tensors):  # a shape-only trace comes first
            outputs.append((path, tensors))

    with ExitStack() as stack:
        for path, module in model.named_modules():
            stack.enter_context(module.register_forward_hook(partial(note, path)))
        yield


def _compared(computed: _Step, wanted: _Step, grid: Grid, tolerance: float) -> Report:
    problems: list[str] = []
    close = partial(agrees, tolerance=tolerance)
    ours = [float(part_of_rank(computed.loss, rank)) for rank in grid.ranks]
    theirs = float(part_of_rank(wanted.loss, 0))
    equal_loss = all(close(torch.tensor(x), torch.tensor(theirs), 0.0) for x in ours)
    module = _first_different(computed, wanted, grid, close)
    if module is not None:
        ends = [path for path, _ in wanted.outputs]
        last = ends[ends.index(module) - 1] if module in ends[1:] else None
        before = f"; '{last}' agrees, so look at its rule, and at the code from there on" if last else ""
        problems.append(f"the output of '{module or '(root)'}' is the first that differs{before}")
    if not equal_loss:
        problems.append(_loss_problem(ours[0], theirs, grid, computed.roles.data, module is None))
    wrong = _different(computed.grads, wanted.grads, grid, close)
    problems += [f"the gradient of '{name}' differs by {error:.1e} of its norm{some}" for name, error, some in wrong]
    if not problems:
        late = _different(computed.updated, wanted.updated, grid, close)
        problems += [f"'{name}' differs by {error:.1e} of its norm after an update" for name, error, _ in late]
    if len(problems) == (module is not None):  # outputs of modules that nothing depends on
        problems, module = [], None
    if module is None and equal_loss and wrong:
        ends = {path: i for i, (path, _) in enumerate(wanted.outputs)}
        owners = [name.rpartition(".")[0] for name, _, _ in wrong]
        module = max(owners, key=lambda owner: ends.get(owner, -1))
        where = f"going back from the loss, '{module or '(root)'}' is the first to differ"
        problems.insert(0, f"outputs are equal; {where}")
    if problems and wanted.draws:
        problems.append("the step draws random numbers (F.dropout, torch.rand), of which each rank has its own")
    counts = f"{len(wanted.grads)} gradients", f"{len(wanted.updated)} updated parameters"
    return Report(tuple(problems), module, ours[0], theirs, ("loss", *counts))


def _loss_problem(ours: float, theirs: float, grid: Grid, data: Sequence[str], modules_agree: bool) -> str:
    text = f"the loss is {ours:.6g}, on one rank {theirs:.6g}"
    ranks = prod(grid.sizes[axis] for axis in data)
    if modules_agree and theirs and ranks > 1:
        for factor, why in ((1 / ranks, "divided twice, or a sum over samples"), (ranks, "summed over ranks")):
            if abs(ours / theirs - factor) < 1e-3 * factor:
                seems = f"it seems to be {why}; a loss is the mean over this rank's samples"
                return f"{text}, {factor:g} times as much: {seems}"
    return text + (": all modules agree, so that it is the loss function" if modules_agree else "")


def _different(
    computed: dict[str, Tensor], wanted: dict[str, Tensor], grid: Grid, close: Callable[..., bool]
) -> list[tuple[str, float, str]]:
    """What differs on any rank: (name, relative error, on which ranks if not on all)."""
    total = torch.stack([part_of_rank(x, 0).double().norm() for x in wanted.values()]).norm().item()
    wrong = []
    for name, expected in wanted.items():
        right = part_of_rank(expected, 0)
        bad = [rank for rank in grid.ranks if not close(part_of_rank(computed[name], rank), right, 1e-3 * total)]
        if bad:
            value = part_of_rank(computed[name], bad[0])
            error = ((value - right).double().norm() / max(right.double().norm().item(), 1e-30)).item()
            wrong.append((name, error, f", on ranks {bad}" if len(bad) < len(grid.ranks) else ""))
    return wrong


def agrees(value: Tensor, right: Tensor, floor: float, tolerance: float) -> bool:
    """Whether a value is the right one: by the norm of their difference, relative to its norm or to `floor`."""
    return (value.double() - right.double()).norm().item() <= tolerance * max(right.double().norm().item(), floor)


def _first_different(computed: _Step, wanted: _Step, grid: Grid, close: Callable[..., bool]) -> str | None:
    """The first module that has another output than on one rank; "" is the model itself."""
    for (path, ours), (other, theirs) in zip(computed.outputs, wanted.outputs, strict=False):
        if path != other or len(ours) != len(theirs):
            return path
        pairs = zip(ours, theirs, strict=True)
        if any(_is_different(x, part_of_rank(y, 0), grid, computed.roles.data, close) for x, y in pairs):
            return path
    return None


def _is_different(x: Tensor, whole: Tensor, grid: Grid, data: Sequence[str], close: Callable[..., bool]) -> bool:
    """Whether what ranks have is neither their samples of the whole nor parts of these."""
    count = prod(grid.sizes[axis] for axis in data)
    samples: dict[int, list[Tensor]] = {}
    for rank in grid.ranks:
        index = index_along(data, grid.sizes, grid.coords_of[rank])
        samples.setdefault(index, []).append(part_of_rank(x, rank))
    split = whole.dim() and whole.shape[0] % count == 0 and samples[0][0].shape[:1] != whole.shape[:1]
    expected = whole.unflatten(0, (count, -1)) if split and count > 1 else [whole] * count
    return not all(_fits(part, parts, expected[index], close) for index, parts in samples.items() for part in parts)


def _fits(part: Tensor, parts: Sequence[Tensor], expected: Tensor, close: Callable[..., bool]) -> bool:
    """Whether a part is the samples themselves, or all parts together are, in whatever order a rule splits them."""
    if part.shape == expected.shape:
        return close(part, expected, 0.0)
    if part.dim() != expected.dim() or part.numel() * len(parts) != expected.numel():
        return True  # nothing is known about such an output
    together = torch.cat([other.reshape(-1) for other in parts])
    return close(together.sort().values, expected.reshape(-1).sort().values, 0.0)


def _named_module(model: nn.Module, text: str) -> str | None:
    """The module that a message is about: the innermost one that it names."""
    named = [path for path, _ in model.named_modules() if path and f"'{path}'" in text]
    named += [name.rpartition(".")[0] for name, _ in model.named_parameters() if f"'{name}'" in text]
    return max(named, key=len, default=None)
