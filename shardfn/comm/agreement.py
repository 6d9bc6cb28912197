"""Ranks tell each other what they are about to do, before they do it.

An error on one rank only is a hang on the others. Whatever a rank alone can see (its own model, policy, batch) is
exchanged once, and every rank raises when one of them has to.
"""

import hashlib
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardfn import _torch
from shardfn._torch import bytes_of, gather_bytes, is_of_peers, part_of_rank, pytree, simulated
from shardfn.comm.journal import journal_of, note, raise_explained
from shardfn.comm.raw_collectives import gather_flat
from shardfn.layout import Grid, Plan, axes_of, require_member
from shardfn.notation import ShardError

_SAMPLED_CALLS = 50
VALUES = "values of"  # how a fact about values begins


def agree(mesh: DeviceMesh, plan: Plan | Exception, facts: Sequence[str] = (), verb: str = "shard") -> int:
    """Check that all ranks of the mesh made the same plan; returns the torch seed of the first one.

    `facts` are further lines that must be equal, such as `"src=0"`; `verb` is the name of the function in messages.

    Raises:
        ShardError: plans differ, or another rank failed; this rank's own exception when it failed itself.
    """
    problem = plan if isinstance(plan, Exception) else None
    named = isinstance(mesh, DeviceMesh) and mesh.mesh_dim_names is not None
    if problem is not None and (not named or simulated() or mesh.get_coordinate() is None):
        raise problem  # nobody to tell it
    require_member(mesh)
    if simulated():  # one process, which cannot disagree with itself
        return part_of_rank(torch.initial_seed(), 0)
    where = f"mesh {axes_of(mesh)} on {mesh.device_type} over ranks {mesh.mesh.tolist()}"
    note(mesh, verb)
    lines = [] if isinstance(plan, Exception) else [plan.digest, where, *facts]
    rows = exchange_numbers(mesh, [digest(lines), problem is not None, torch.initial_seed() - 2**63])
    if len({digest for digest, _, _ in rows}) > 1 or any(failed for _, failed, _ in rows):
        described = [] if isinstance(plan, Exception) else [where, *_lines(plan), *facts]
        difference = _first_difference(_told(mesh, problem, verb, described))
        seeds = ". Call torch.manual_seed before making the model, or pass src=0." * (f"has {VALUES}" in difference)
        raise ShardError(f"{verb}: ranks have different models or policies: {difference}{seeds}")
    return rows[0][2] + 2**63


def agree_on(mesh: DeviceMesh, verb: str, facts: Sequence[str], number: int = 0, instead: str = "") -> int:
    """Check that all ranks of the mesh have the same facts; returns the number of the first one.

    Raises:
        ShardError: two ranks have other facts.
    """
    note(mesh, verb)
    rows = _numbers(mesh, [digest(facts), number])
    if (rows[:, 0] != rows[0, 0]).any():
        raise ShardError(f"{verb}: ranks differ: {_first_difference(_told(mesh, None, verb, facts))}{instead}")
    return int(rows[0, 1])


@contextmanager
def failing_together(mesh: DeviceMesh, verb: str) -> Iterator[None]:
    """When what is done within fails on a rank, all raise at its end: that error, or that another rank has one.

    Communication: one small all-gather over the mesh; an exchange of messages when there is a problem.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    if simulated() or mesh.size() == 1:
        if problem is not None:
            raise problem
    else:
        note(mesh, verb)
        if _numbers(mesh, [problem is not None]).any():
            _told(mesh, problem, verb)


@contextmanager
def called_by_all(call: str) -> Iterator[None]:
    """What is said of collectives when other ranks have ended, or the timeout of the group is over."""
    try:
        yield
    except RuntimeError as error:
        if not is_of_peers(error):
            raise
        raise ShardError(
            f"{call}: other ranks have ended, or wait in something else. All ranks call it, also those that do not use "
            "what it returns; write it before, not inside of, `if rank == 0:`"
        ) from error


Told = Sequence[tuple[int, Sequence[str]]]  # the number of a rank, and lines that describe what it has


def _told(mesh: DeviceMesh, problem: Exception | None, verb: str, lines: Sequence[str] = ()) -> Told:
    """What every rank says of itself, with its number.

    Raises:
        ShardError: another rank has a problem; this rank's own problem when it has one.
    """
    answers = exchange_objects(mesh, (outcome_of(problem, dist.get_rank()), lines))
    raise_failure(verb, problem, [outcome for outcome, _ in answers])
    return [(rank, lines) for (rank, *_), lines in answers]


# The number of a rank, what went wrong there, and as what others raise it.
Outcome = tuple[int, str | None, type[ShardError]]


def outcome_of(problem: Exception | None, rank: int) -> Outcome:
    """What a rank tells the others."""
    kind = type(problem) if isinstance(problem, ShardError) else ShardError
    why = None if problem is None else f"{type(problem).__name__}: {problem}"
    return rank, why, kind


def raise_failure(verb: str, problem: Exception | None, outcomes: Sequence[Outcome]) -> None:
    """Raise if a rank has failed: this one's own problem, or what another one says."""
    if problem is not None:
        raise problem
    if failed := {rank: (kind, why) for rank, why, kind in outcomes if why}:
        first, (kind, why) = next(iter(failed.items()))
        raise kind(f"{verb}: rank {first} of {[*failed]} failed, so no rank goes on: {why}")


def exchange_numbers(mesh: DeviceMesh, numbers: Sequence[int]) -> list[list[int]]:
    """The int64 numbers of all ranks of the mesh, in mesh order. One collective."""
    return _numbers(mesh, numbers).tolist()


def _numbers(mesh: DeviceMesh, numbers: Sequence[int]) -> Tensor:
    """`[W, n]`: the numbers of all ranks; there may be thousands."""
    rows, order = torch.tensor([[*numbers]], dtype=torch.int64, device=mesh.device_type), mesh.mesh.flatten()
    try:
        for group in _groups(mesh):
            rows = gather_flat(rows.view(-1), group).view(-1, len(numbers))
    except RuntimeError as error:
        raise_explained(mesh, error)
    return rows.cpu()[order] if mesh.size() == dist.get_world_size() else rows.cpu()


def exchange_objects(mesh: DeviceMesh, value: Any) -> list[Any]:
    """The objects of all ranks of the mesh, in mesh order."""
    values = [value]
    for group in _groups(mesh):
        gathered: list[Any] = [None] * group.size()
        dist.all_gather_object(gathered, values, group=group)
        values = [item for part in gathered for item in part]
    is_world = mesh.size() == dist.get_world_size()
    return [values[rank] for rank in mesh.mesh.flatten().tolist()] if is_world else values


def _groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Over which all ranks of a mesh exchange, one after the other.

    Those of a mesh of all ranks over all of them at once, so that ranks with different meshes meet; others along one
    axis after another.
    """
    if mesh.size() == dist.get_world_size():
        return [dist.group.WORLD or mesh.get_group(0)]
    return [mesh.get_group(axis) for axis in reversed(axes_of(mesh))]


def gather_objects(mesh: DeviceMesh, value: Any) -> list[Any]:
    """Those of all ranks, on the first one; the mesh is of all ranks."""
    return [pickle.loads(data) for data in gather_bytes(dist.group.WORLD, pickle.dumps(value), device=mesh.device_type)]


def digest(lines: Sequence[str]) -> int:
    """A hash of lines of text that is the same on all ranks."""
    return int.from_bytes(hashlib.sha256("\n".join(lines).encode(errors="surrogatepass")).digest()[:7], "little")


def _lines(plan: Plan) -> list[str]:
    names = ("regather", "compute_dtype", "reduce_dtype", "output_dtype", "cast_inputs", "offload")
    settings = [f"{name}={getattr(plan.policy, name)}" for name in names]
    settings += [f"acts[{pattern!r}]={rule!r}" for pattern, rule in plan.policy.acts.items()]
    settings += [f"compute for {name!r}" for name in (*plan.policy.compute, *plan.forwards)]
    params = [
        f"parameter '{x.name}' {x.shape} {x.dtype}, rule '{x.rule}', stored as {[leaf.shape for leaf in x.leaves]}"
        f"{'' if x.trainable else ', frozen'}{f', also {list(x.aliases)}' if x.aliases else ''}"
        for x in plan.layouts.values()
    ]
    return [*params, *settings, *map(str, plan.units)]


def _first_difference(described: Told) -> str:
    base_rank, base = described[0]
    for rank, lines in described[1:]:
        for mine, theirs in zip([*base, "nothing"], [*lines, "nothing"], strict=False):
            if mine != theirs:
                return f"rank {base_rank} has {mine}; rank {rank} has {theirs}"
    return "their settings differ"


SAME_SAMPLES = (
    ". They work on the same samples and draw the same numbers: load inputs and targets by sf.data.rank(mesh), which "
    "counts data axes only, write torch.manual_seed(seed + sf.data.rank(mesh)[0]) instead of seed + rank, and make the "
    "same calls on all ranks, not on the first one alone"
)


def check_batch(grid: Grid, compute: Sequence[str], batch: Any, problem: str | None) -> None:
    """Compare a batch over the compute axes, and problems over all of them; every rank raises or none does.

    Ranks along a compute axis work on the same samples; with different ones the gradients are silently wrong.

    Raises:
        ShardError: the batches differ, or this or another rank has a problem.
    """
    rows = [] if grid.pure else exchange_numbers(grid.mesh, [_fingerprint(batch), problem is not None])
    if problem is not None:
        raise ShardError(problem)
    if bad := sum(failed for _, failed in rows):
        raise ShardError(f"apply: {bad} other ranks cannot use their inputs; their messages say why")
    prints = [fingerprint for fingerprint, _ in rows]
    if grid.pure and not simulated():  # recorded ones have no values
        return
    if grid.pure:  # one process has the batches of all ranks
        parts = (pytree.tree_map(partial(part_of_rank, rank=rank), batch) for rank in grid.ranks)
        prints = [*map(_fingerprint, parts)]
    for axis in compute:
        of_group: dict[Any, int] = {}
        groups = (tuple((grid.coords_of[rank] | {axis: 0}).items()) for rank in grid.ranks)
        if any(of_group.setdefault(group, x) != x for group, x in zip(groups, prints, strict=True)):
            raise ShardError(f"apply: the inputs differ between ranks along '{axis}'{SAME_SAMPLES}")


def note_batch(grid: Grid, compute: Sequence[str], batch: Any, call: int) -> None:
    """Write down what the ranks along a compute axis have to have alike, if somebody watches.

    A sample of the values of each call; of those on an accelerator, which has to wait for it, of every 50th.
    """
    journal = journal_of(grid.mesh) if compute and not grid.pure else None
    if journal is not None and (grid.device.type == "cpu" or call % _SAMPLED_CALLS == 0):
        mark = f"compute with inputs {_fingerprint(batch, most=4096):x}"
        for axis in compute:
            journal.note(mark, axis)


def _fingerprint(batch: Any, most: int | None = None) -> int:
    """A hash of the bytes of every tensor in a batch, or of so many of its numbers."""
    hasher = hashlib.blake2b(digest_size=7)
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and not leaf.is_meta and not isinstance(leaf, DTensor):
            hasher.update(repr((tuple(leaf.shape), leaf.dtype)).encode())
            if most is not None and leaf.numel() > most:
                leaf = leaf.reshape(-1)[:: leaf.numel() // most]
            with _torch.outside_transforms():  # which have wrapped it, or would
                leaf = _torch.innermost_value(leaf).detach().cpu().contiguous()
                hasher.update(bytes_of(leaf).numpy().tobytes())
        elif isinstance(leaf, bool | int | float | str | None):
            hasher.update(repr(leaf).encode())
    return int.from_bytes(hasher.digest(), "little")


def _generators(device: torch.device) -> list[Any]:
    return [torch] if device.type == "cpu" else [torch, torch.get_device_module(device)]


def random_states(device: torch.device) -> list[Tensor]:
    """Where torch's generators are, that of the CPU and that of the device."""
    return [module.get_rng_state() for module in _generators(device)]


def set_random_states(device: torch.device, states: Sequence[Tensor]) -> None:
    """Put torch's generators there."""
    for module, state in zip(_generators(device), states, strict=True):
        module.set_rng_state(state)


def require_same_draws(since: Sequence[Tensor], grid: Grid, axes: Sequence[str]) -> None:
    """Check that ranks along axes draw alike, if torch's generators have been used `since` they were there.

    Raises:
        ShardError: they were elsewhere on another rank.
    """
    mark = _mark_of_draws(since, grid)
    what = "apply: the forward draws random numbers (as dropout does), and the state of torch's generator"
    require_same(what, mark, grid, axes, instead=SAME_SAMPLES)


def note_draws(since: Sequence[Tensor], grid: Grid, axes: Sequence[str]) -> None:
    """The same, written down for who watches."""
    mark = f"draw random numbers from {_mark_of_draws(since, grid):x}"
    for axis in axes:
        note(grid.mesh, mark, axis)


def _mark_of_draws(since: Sequence[Tensor], grid: Grid) -> int:
    drawn = not all(map(torch.equal, since, random_states(grid.device)))
    return drawn * _fingerprint(since)


@contextmanager
def random_numbers_of_first(grid: Grid, axes: Sequence[str]) -> Iterator[None]:
    """Within it torch's generators are those of the first rank along `axes`.

    Afterwards a rank whose numbers were others has its own again.
    """
    if grid.pure or not axes:
        yield
        return
    modules, states = _generators(grid.device), random_states(grid.device)
    for module, state in zip(modules, states, strict=True):
        first = state.to(grid.device)
        for axis in axes:
            first = gather_flat(first, grid.groups[axis])[: state.numel()]
        module.set_rng_state(first.to(state.device))
    differ = [not torch.equal(module.get_rng_state(), state) for module, state in zip(modules, states, strict=True)]
    try:
        yield
    finally:
        for module, state, differs in zip(modules, states, differ, strict=True):
            if differs:
                module.set_rng_state(state)


def require_same(
    what: str, number: float | Tensor, grid: Grid, axes: Sequence[str], tolerance: float = 0, instead: str = ""
) -> None:
    """Compare a number over axes, with a relative tolerance; every rank raises or none does.

    Raises:
        ShardError: it differs.
    """
    row = torch.as_tensor(number, device=grid.device).detach().view(1)
    for axis in axes:
        row = gather_flat(row, grid.groups[axis])
    if (apart := row.double()).max() - apart.min() > tolerance * (apart.abs().max() + tolerance):
        raise ShardError(f"{what} differs between ranks along {', '.join(axes)}: {row.tolist()}{instead}")


def compare_gradients(output: Any, grid: Grid, axes: Sequence[str]) -> None:
    """In the backward of a loss of one's own its gradients of whole outputs are compared over axes, as inputs are."""

    def compare(grad: Tensor) -> None:
        columns = grad.detach().reshape(-1, grad.shape[-1] if grad.dim() else 1).sum(0, dtype=torch.float64)
        number = (columns * torch.arange(len(columns), device=grad.device).cos()).sum()
        require_same("backward: the gradient of what the model returns", number, grid, axes, 1e-3, SAME_SAMPLES)

    for x in pytree.tree_leaves(output):
        if type(x) is Tensor and x.requires_grad and x.is_floating_point():
            x.register_hook(compare)


def wrong_inputs(batch: Any, device: torch.device, dtensors: bool = False) -> str | None:
    """Why the inputs of `apply` cannot be used on this rank; whether `dtensors` may be among them."""
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        if not isinstance(leaf, Tensor):
            continue
        name = pytree.keystr(path[1:])  # path[0] tells positional arguments from others
        if isinstance(leaf, DTensor) and not dtensors:
            part = "this data rank's part of a batch: pass x.to_local(), or of a tree the leaf sf.gather(tree)[name]"
            return f"apply: input {name} is a DTensor; inputs are plain tensors, {part}"
        if leaf.device.type != device.type and (leaf.dim() or leaf.is_meta):
            why = f"apply: input {name} is on '{leaf.device}', the parameters are on '{device}'"
            return f"{why}; move it with .to('{device.type}')"
    return None
