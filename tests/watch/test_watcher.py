"""Ranks that watch one another. What becomes of 34 ways to go apart is in tests/slow/test_divergence.py."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drawing import untyped
from launched import Launched
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from shardfn._torch import last_calls, longest_timeout
from shardfn.comm.journal import JOURNALS, journal_of, keep_journal
from shardfn.testing import on_meshes, run, run_raises
from shardfn.watch.stops import TERMINATED


def _counts(mesh: DeviceMesh) -> dict[str, int]:
    journal = journal_of(mesh)
    assert journal is not None
    return {key: line.count for key, line in journal.lines.items()}


@on_meshes({"fsdp": 2, "tp": 2})
def test_a_loop_is_watched_until_it_ends(mesh: DeviceMesh) -> None:
    params = sf.shard(nn.Linear(4, 4), mesh, sf.Policy())
    with sf.collectives.watch(mesh):
        before = _counts(mesh)
        sf.value_and_grad(lambda p, x: sf.apply(nn.Linear(4, 4), p, x).sum())(params, torch.ones(2, 4))
        after = _counts(mesh)
        assert sum(after.values()) > sum(before.values())
        journal = journal_of(mesh)
        assert journal is not None
        did = [text for line in journal.lines.values() for _, _, text in line.recent]
        assert "gather '(root)'" in did
        assert any(text.startswith("reduce ") for text in did)
        sf.collectives.psum(torch.ones(2), mesh, "tp")
        along = next(key for key in after if " tp " in key)
        assert _counts(mesh)[along] == after[along] + 1
    gc.collect()
    assert mesh not in JOURNALS


@on_meshes({"fsdp": 2, "tp": 2})
def test_transforms_are_watched(mesh: DeviceMesh) -> None:
    """Inputs that a transform has wrapped are compared as what they are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    params = sf.shard(model, mesh, sf.Policy(rules={"0.weight": "f@tp c", "2.weight": "c f@tp"}))
    (x,) = sf.data.local_batch((torch.randn(4, 4),), mesh)

    def loss(p: sf.Params, x: torch.Tensor) -> torch.Tensor:
        return sf.apply(model, p, x).square().mean()

    def found() -> list[dict[str, torch.Tensor]]:
        each = sf.vmap(sf.grad(loss), in_dims=(None, 0))(params, x[:, None])
        product = sf.hvp(loss, (params, x), sf.tree.map(torch.ones_like, params))
        penalty = sf.grad(lambda p: sf.optim.global_norm(sf.grad(loss)(p, x)))(params)
        _, pull = sf.vjp(loss, params, x)
        return [sf.gather(tree) for tree in (each, product, penalty, pull(torch.tensor(1.0))[0])]

    alone = found()
    with sf.collectives.watch(mesh):
        before = _counts(mesh)
        for tree, wanted in zip(found(), alone, strict=True):
            assert all(torch.equal(tree[name], x) for name, x in wanted.items())
        assert sum(_counts(mesh).values()) > sum(before.values())


@on_meshes({"fsdp": 2})
def test_a_trainer_is_watched_as_long_as_it_lives(mesh: DeviceMesh) -> None:
    trainer = sf.Trainer(nn.Linear(4, 4), mesh)
    assert mesh in JOURNALS
    trainer(torch.ones(2, 4)).sum().backward()
    assert _counts(mesh)
    del trainer
    gc.collect()
    assert mesh not in JOURNALS


def _waits_after_a_scatter() -> bool:
    """Calls whose sizes differ from rank to rank: one is over, in the other some wait."""
    mesh = sf.make_mesh("cpu", fsdp=3)
    rank, out = dist.get_rank(), torch.empty(2)
    with sf.collectives.watch(mesh):
        dist.scatter(out, [torch.full((2,), float(to)) for to in range(3)] if rank == 0 else None, src=0)
        lengths = [1, 1, 1] if rank else [2, 1, 1]
        received = torch.empty(4 if rank == 0 else 3)
        theirs = [2, 1, 1] if rank == 0 else [1, 1, 1]
        if rank == 2:
            time.sleep(5)
        dist.all_to_all_single(received, torch.ones(sum(lengths)), theirs, lengths)
    return bool((out == rank).all())


@pytest.mark.slow
def test_sizes_that_differ_in_calls_of_torch_are_no_reason() -> None:
    assert all(run(_waits_after_a_scatter, ranks=3))


@on_meshes({"fsdp": 2})
def test_an_owner_that_is_gone_takes_no_later_journal_with_it(mesh: DeviceMesh) -> None:
    trainer = sf.Trainer(nn.Linear(4, 4), mesh)
    journal = journal_of(mesh)
    assert journal is not None
    later = type(journal)({"": "of a later watcher"}, journal.watcher)
    keep_journal(mesh, later)
    del trainer
    gc.collect()
    assert journal_of(mesh) is later
    keep_journal(mesh, None)


_KEPT: list[object] = []


def _has_an_older_model() -> list[int]:
    first = sf.Trainer(nn.Linear(4, 4), sf.make_mesh("cpu", fsdp=2))
    mesh = sf.make_mesh("cpu", fsdp=1, tp=2)
    if dist.get_rank() == 0:
        _KEPT.append(first)  # as one whose garbage was not collected
    del first
    gc.collect()
    trainer = sf.Trainer(nn.Linear(4, 4), mesh)
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.1)
    for _ in range(3):
        trainer(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    time.sleep(2)  # in which ranks would find out that they have gone apart
    _KEPT.clear()
    journal = journal_of(mesh)
    assert journal is not None
    return [line.count for line in journal.lines.values()]


def test_a_rank_may_have_an_older_model_that_others_have_no_more() -> None:
    first, other = run(_has_an_older_model, ranks=2)
    assert first == other and max(first) > 3


def test_one_rank_needs_no_watch() -> None:
    mesh = sf.make_mesh("cpu", fsdp=1)
    with sf.collectives.watch(mesh):
        assert mesh not in JOURNALS


@contextmanager
def _stays_for_a_while() -> Iterator[None]:
    """After an error, as a process that handles it: else the pool may end it before it has told the others."""
    try:
        yield
    except ValueError as error:
        if not isinstance(error, sf.ShardError):
            time.sleep(4)
        raise


@_stays_for_a_while()
def _one_leaves() -> None:
    with sf.collectives.watch(sf.make_mesh("cpu", fsdp=4)):
        pass
    mesh = sf.make_mesh("cpu", fsdp=2, tp=2)  # whose coordinates count from here on
    with sf.collectives.watch(mesh):
        for step in range(1000):
            if step == 2 and dist.get_rank() == 3:
                raise ValueError("no more samples")
            sf.collectives.psum(torch.ones(2), mesh, "tp")
            sf.collectives.psum(torch.ones(2), mesh, "fsdp")


def test_all_hear_of_one_that_leaves() -> None:
    text = str(run_raises(Exception, _one_leaves, ranks=4, timeout=30))
    assert "ValueError: no more samples" in text
    assert "rank 3 (fsdp=1, tp=1) left run the loop by ValueError: no more samples, at test_watcher.py" in text


@_stays_for_a_while()
def _one_does_not_answer() -> None:
    mesh = sf.make_mesh("cpu", fsdp=2)
    with sf.collectives.watch(mesh):
        sf.collectives.asked_to_stop(mesh)
        if dist.get_rank() == 1:
            untyped(journal_of(mesh)).watcher.appointment.hear = lambda *said: None
            time.sleep(6)
            raise ValueError("no more samples")
        TERMINATED.came = True
        try:
            for _ in range(100):  # one of these calls is said to be the last
                time.sleep(0.2)
                sf.collectives.asked_to_stop(mesh)
        finally:
            TERMINATED.came = False


def test_who_waits_for_an_answer_hears_of_one_that_leaves() -> None:
    text = str(run_raises(Exception, _one_does_not_answer, ranks=2, timeout=30))
    assert "the run is over: rank 1 (fsdp=1) left run the loop by ValueError: no more samples" in text


def _one_takes_its_time(seconds: float) -> float:
    mesh = sf.make_mesh("cpu", fsdp=2)
    total = 0.0
    with sf.collectives.watch(mesh):
        for step in range(3):
            if step == 1 and dist.get_rank() == 1:
                time.sleep(seconds)
            total += float(sf.collectives.psum(torch.ones(()), mesh, "fsdp"))
    return total


def test_one_that_takes_its_time_is_waited_for() -> None:
    assert run(_one_takes_its_time, 3.0, ranks=2) == [6.0, 6.0]


def _nan_on_a_rank(nonfinite: Any) -> tuple[list[float], bool, int]:
    torch.manual_seed(0)
    mesh = sf.make_mesh("cpu", fsdp=2, tp=2)
    model = nn.Linear(4, 4)

    def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        return (sf.apply(model, params, x) * (float("nan") if is_bad() else 1.0)).square().mean()

    def is_bad() -> bool:
        return trainer.steps == 1 and dist.get_rank() == 2

    options: dict[str, Any] = {"optimizer": sf.optim.adamw(0.1), "loss_fn": loss_fn, "nonfinite": nonfinite}
    trainer = sf.Trainer(model, mesh, **options)
    losses, same = [], True
    for _ in range(3):
        before = {name: x.full_tensor() for name, x in trainer.params.items()}
        losses.append(float(trainer.step(torch.ones(2, 4))["loss"]))
        now = {name: x.full_tensor() for name, x in trainer.params.items()}
        if trainer.steps == 2:
            same = all(torch.equal(now[name], before[name]) for name in now)
    return losses, same, trainer.steps


def test_a_step_that_is_not_finite_on_one_rank_is_left_out_on_all() -> None:
    for losses, same, steps in run(_nan_on_a_rank, "skip", ranks=4):
        assert same
        assert steps == 3
        assert losses[2] < losses[0]


def test_or_an_error_on_all() -> None:
    error = run_raises(sf.ShardError, _nan_on_a_rank, "raise", ranks=4)
    assert "in step 1 the loss is not finite on ranks [2]. Nothing was updated." in str(error)


def test_or_goes_on() -> None:
    of_ranks = run(_nan_on_a_rank, None, ranks=4)
    for losses, same, _ in (of_ranks[0], of_ranks[2]):  # the ranks that share its gradients
        assert losses[2] != losses[2]
        assert not same


def test_what_to_do_is_checked() -> None:
    with pytest.raises(ValueError, match="nonfinite='ignore'"):
        sf.Trainer(nn.Linear(2, 2), sf.make_mesh("cpu", fsdp=1), nonfinite=untyped("ignore"))


@_stays_for_a_while()
def _the_store_takes_its_time() -> None:
    mesh = sf.make_mesh("cpu", fsdp=2)
    with sf.collectives.watch(mesh):
        record = untyped(journal_of(mesh)).watcher.record

        def late() -> bytes:
            del record.dumps
            raise dist.DistStoreError("wait timeout after 5000ms")

        record.dumps = late
        time.sleep(2)
        assert "dumps" not in vars(record)
        if dist.get_rank() == 1:
            raise ValueError("no more samples")
        for _ in range(1000):
            sf.collectives.psum(torch.ones(2), mesh, "fsdp")


def test_a_store_that_takes_its_time_is_asked_again() -> None:
    text = str(run_raises(Exception, _the_store_takes_its_time, ranks=2))
    assert "the run is over: rank 1 (fsdp=1) left run the loop by ValueError: no more samples" in text


_MESSAGES = """
import time, torch, torch.distributed as dist, shardfn as sf
mesh, x = sf.make_mesh("cpu", fsdp=3), torch.ones(2)
rank, some = dist.get_rank(), dist.new_group([0, 1])
with sf.collectives.watch(mesh):
    if rank > 0:
        dist.send(x, rank - 1)
    if rank < 2:
        dist.recv(x, rank + 1)
        time.sleep(4 * (rank == 1))
        dist.recv(x, 1) if rank == 0 else dist.send(x, 0)
        time.sleep(4 * (rank == 1))
        dist.all_reduce(x, group=some)
"""


@pytest.mark.slow
def test_ranks_may_send_as_many_messages_as_they_like(tmp_path: Path) -> None:
    """And the first may end, while the last waits for another one: gloo numbers messages with collectives."""
    script = tmp_path / "messages.py"
    script.write_text(_MESSAGES)
    code, output = Launched("--nproc-per-node", "3", str(script)).end()
    assert code == 0, output


def _messages_of_groups() -> list[int]:
    x, found = torch.ones(1), list[int]()
    mesh = sf.make_mesh("cpu", fsdp=2)
    with sf.collectives.watch(mesh):
        name = untyped(dist.group.WORLD).group_name
        before = last_calls()[1].get(name, 0)
        dist.all_reduce(x)
        found.append(last_calls()[1][name] - before)
        dist.send(x, 1) if dist.get_rank() == 0 else dist.recv(x, 0)
        found.append(last_calls()[1][name] - before)
        sf.collectives.psum(x, mesh, "fsdp")  # a message to and from the other rank
        found.append(last_calls()[1][name] - before)
        dist.all_reduce(x)
        found.append(last_calls()[1][name] - before)
    return found


def test_messages_of_groups_are_counted() -> None:
    assert run(_messages_of_groups, ranks=2) == [[0, 1, 3, 3]] * 2


def _one_waits_after_messages() -> None:
    mesh = sf.make_mesh("cpu", fsdp=2)
    with sf.collectives.watch(mesh):
        for _ in range(3):
            sf.collectives.psum(torch.ones(1), mesh, "fsdp")
        if dist.get_rank() == 0:
            dist.barrier()
        sf.collectives.psum(torch.ones(1), mesh, "fsdp")


def test_calls_of_torch_are_compared_where_there_were_messages() -> None:
    text = str(run_raises(Exception, _one_waits_after_messages, ranks=2, timeout=60))
    assert "the run is over: ranks [0, 1] wait for one another in different collectives" in text


def _a_group_that_waits_longer() -> None:
    before = longest_timeout()
    dist.new_group([0, 1], timeout=before + timedelta(hours=1))
    assert longest_timeout() == before + timedelta(hours=1)


def test_a_rank_waits_as_long_as_any_of_its_groups() -> None:
    run(_a_group_that_waits_longer, ranks=2)
