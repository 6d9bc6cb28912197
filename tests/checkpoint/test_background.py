"""Saves that go on in the background: what they have, and that their failures are heard of."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drawing import untyped
from ranks import folder
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from shardfn.checkpoint import background, block_writer, saves
from shardfn.checkpoint.hashed_files import HashingSink
from shardfn.testing import on_meshes, run, run_raises

STORAGE_METHODS = ("create", "put", "read", "size", "names", "remove")


@pytest.fixture(autouse=True)
def _nothing_goes_on() -> Any:
    """Each test begins and ends so."""
    background.BACKGROUND.settle()
    yield
    background.BACKGROUND.settle()


@on_meshes({"fsdp": 2, "tp": 2}, {"fsdp": 3})
def test_it_has_what_there_was_when_it_was_called(mesh: DeviceMesh) -> None:
    """Also of leaves that are small, empty, of other dtypes, and written to at once."""
    model = nn.Sequential(nn.Linear(40, 60), nn.Linear(60, 1), nn.Linear(1, 1, bias=False))
    tree = {"params": sf.shard(model, mesh, sf.Policy(), src=0), "n": 3, "x": torch.arange(3), "e": torch.empty(0, 2)}
    tree |= {"f": torch.ones(5).to(torch.float8_e4m3fn), "b": torch.tensor(True)}
    with folder() as at:
        sync = sf.checkpoint.save(at / "sync", tree)
        saving = sf.checkpoint.save(at / "async", tree, async_=True)
        want = {name: x.detach().to_local().clone() for name, x in tree["params"].items()}
        for x in (*(x.detach().to_local() for x in tree["params"].values()), tree["x"]):
            x.fill_(7)
        assert saving.wait() == at / "async" and saving.done()
        if dist.get_rank() == 0:
            sizes = [sorted(x.stat().st_size for x in path.glob("*.distcp")) for path in (sync, at / "async")]
            assert sizes[0] == sizes[1]
            sf.checkpoint.verify(at / "async")
        loaded = sf.checkpoint.load(at / "async", tree)
        assert all(loaded["params"][name].to_local().equal(x) for name, x in want.items())
        assert loaded["x"].tolist() == [0, 1, 2] and loaded["n"] == 3


@on_meshes({"fsdp": 2})
def test_one_goes_on_at_a_time(mesh: DeviceMesh) -> None:
    """The next one waits for it, and so does a load; memory for it is kept."""
    params = sf.shard(nn.Linear(300, 300), mesh, sf.Policy(), src=0)
    last: Any = None
    with folder() as at:
        for step in range(4):
            last = sf.checkpoint.save(at / f"step-{step}", {"p": params, "n": step}, async_=True)
            if step:
                assert (at / f"step-{step - 1}" / "manifest.json").exists()
        assert sf.checkpoint.load(last.path, {"p": params, "n": 0})["n"] == 3 and last.done()


def _fails(path: str, how: str) -> None:
    """The second rank cannot write."""
    mesh = sf.make_mesh("cpu", fsdp=2)
    params, writer = sf.shard(nn.Linear(30, 30), mesh, sf.Policy(), src=0), vars(background)["Background"]
    written = writer.write
    if dist.get_rank() == 1:

        def write(self: Any, *args: Any) -> Any:
            raise OSError(28, "No space left on device", "that file")

        writer.write = write
    try:
        saving = sf.checkpoint.save(path, {"p": params}, async_=True)
        if how == "wait":
            saving.wait()
        else:
            time.sleep(0.2)
            sf.checkpoint.save(f"{path}-next", {"p": params})
    finally:
        writer.write = written
        with_nothing = [x.name for x in Path(path).parent.iterdir()] if dist.get_rank() == 0 else []
        assert sf.checkpoint.save(f"{path}-after", {"p": params}, async_=True).wait() == Path(f"{path}-after")
        assert with_nothing == [], "a save that failed has left something"


@pytest.mark.parametrize("how", ["wait", "save"])
def test_what_fails_on_a_rank_is_raised_on_all(tmp_path: Path, how: str) -> None:
    errors = run_raises(Exception, _fails, str(tmp_path / "step-1"), how, match="No space left on device", ranks=2)
    assert "rank 1 of [1] failed, so no rank goes on" in errors[0]
    assert all("in the background failed" in error for error in errors) == (how == "save")


def test_a_failure_is_raised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `wait`, or by the next save or load."""
    x = {"x": torch.ones(3)}
    there = sf.checkpoint.save(tmp_path / "step-0", x)
    monkeypatch.setattr(block_writer, "__file__", str(tmp_path / "not there"))
    background.BACKGROUND.end_writer()
    for heard in (True, False):
        saving = sf.checkpoint.save(tmp_path / "step-1", x, async_=True)
        if heard:
            for _ in range(2):  # as a `finally` may ask again
                with pytest.raises(sf.ShardError, match="the process that writes has ended, with status 2"):
                    saving.wait()
        else:
            with pytest.raises(sf.ShardError, match=r"the save of '.*step-1' in the background failed: the process"):
                sf.checkpoint.load(there, x)
        assert sf.checkpoint.load(there, x)["x"].tolist() == [1, 1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["step-0"]


def test_a_writer_that_is_killed_is_an_error_and_another_one_begins(tmp_path: Path) -> None:
    x = {"x": torch.ones(3)}
    sf.checkpoint.save(tmp_path / "step-0", x, async_=True).wait()
    writer = background.BACKGROUND._writer
    writer.send_signal(signal.SIGSTOP)
    saving = sf.checkpoint.save(tmp_path / "step-1", x, async_=True)
    time.sleep(0.05)
    assert not saving.done() and sf.checkpoint.latest(tmp_path) == tmp_path / "step-0"
    writer.kill()
    with pytest.raises(sf.ShardError, match="the process that writes has ended, with status -9"):
        saving.wait()
    for step in (1, 2):
        path = tmp_path / f"step-{step}"
        assert sf.checkpoint.save(path, x, async_=True).wait() == path
        background.BACKGROUND._writer.kill()  # while it has nothing to do
        background.BACKGROUND._writer.wait()


def test_a_handler_of_a_signal_does_not_save_within_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would write to the same memory; after the save it may, and it may load."""
    put, said = saves._Save._put, list[str]()
    there = sf.checkpoint.save(tmp_path / "step-0", {"x": torch.zeros(1000)})

    def handler(*_: object) -> None:
        with pytest.raises(sf.ShardError) as error:
            sf.checkpoint.save(tmp_path / "step-2", {"x": torch.full((1000,), 2.0)}, async_=True)
        said.append(str(error.value))
        sf.checkpoint.load(there, {"x": torch.empty(1000)})

    def interrupted(self: Any, sink: Any) -> None:
        signal.raise_signal(signal.SIGUSR1)
        put(self, sink)
        signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(saves._Save, "_put", interrupted)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        path = sf.checkpoint.save(tmp_path / "step-1", {"x": torch.ones(1000)}, async_=True).wait()
    finally:
        signal.signal(signal.SIGUSR1, before)
        monkeypatch.undo()
    assert len(said) == 2 and all("in the middle of a save, as when a signal's handler saves" in x for x in said)
    assert sf.checkpoint.load(path, {"x": torch.empty(1000)})["x"].eq(1).all()
    sf.checkpoint.verify(sf.checkpoint.save(tmp_path / "step-2", {"x": torch.ones(3)}, async_=True).wait())


def test_memory_that_inference_mode_took_serves_later_saves(tmp_path: Path) -> None:
    x = {"x": torch.arange(background.BACKGROUND.memory.bytes.numel() + 10, dtype=torch.uint8)}
    with torch.inference_mode():
        sf.checkpoint.save(tmp_path / "step-1", x, async_=True).wait()
    path = sf.checkpoint.save(tmp_path / "step-2", x, async_=True).wait()
    assert sf.checkpoint.load(path, {"x": torch.empty_like(x["x"])})["x"].equal(x["x"])


_LITTLE = """
import sys, torch, shardfn as sf
mesh = sf.make_mesh("cpu", fsdp=2)
params = sf.shard(torch.nn.Linear(4, 1, bias=False), mesh, sf.Policy(rules={"weight": "a@fsdp b"}), src=0)
sf.checkpoint.save(sys.argv[1], {"p": params, "x": torch.ones(3)}, async_=True)
"""


def test_the_end_of_a_rank_that_writes_nothing_waits_too(tmp_path: Path) -> None:
    """It answers the others, which commit."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    env = os.environ | {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    command = [sys.executable, "-c", _LITTLE, str(tmp_path / "step-1")]
    ranks = [
        subprocess.Popen(command, env=env | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=600)[1].decode() for rank in ranks]
    assert not any("another rank has ended" in text for text in said), said
    sf.checkpoint.verify(tmp_path / "step-1")


_SCRIPT = """
import sys, torch, shardfn as sf
from shardfn.checkpoint import block_writer
mesh = sf.make_mesh("cpu", fsdp=1)
params = sf.shard(torch.nn.Linear(300, 300), mesh, sf.Policy())
if sys.argv[2] == "fail":
    block_writer.__file__ = "nothing.py"
sf.checkpoint.save(sys.argv[1], {"p": params}, async_=True)
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["end", "fail"])
def test_the_end_of_a_process_waits_for_it(tmp_path: Path, how: str) -> None:
    """Also without a process group; and a failure is its exit status."""
    command = [sys.executable, "-c", _SCRIPT, str(tmp_path / "step-1"), how]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert (done.returncode, (tmp_path / "step-1").exists()) == ((0, True) if how == "end" else (1, False)), done.stderr
    assert how == "end" or "in the background failed: the process that writes has ended" in done.stderr


def test_the_writer_ends_in_silence_when_nobody_hears_it(tmp_path: Path) -> None:
    """As when the process that began it was killed."""
    background.BACKGROUND.memory.fit(10)
    descriptor = background.BACKGROUND.memory.descriptor
    script, pipe = [sys.executable, "-I", "-S", block_writer.__file__, str(descriptor)], subprocess.PIPE
    writer: Any = subprocess.Popen(script, stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=(descriptor,))
    writer.stdout.close()
    _, said = writer.communicate(json.dumps({"path": str(tmp_path / "x"), "size": 10}).encode() + b"\n", timeout=60)
    assert (writer.returncode, said) == (0, b"") and (tmp_path / "x").stat().st_size == 10


def test_memory_grows(tmp_path: Path) -> None:
    for n in (10, 10**6, 10**5):
        x = {"x": torch.randn(n), "y": torch.randn(3, n).T}
        path = sf.checkpoint.save(tmp_path / f"step-{n}", x, async_=True).wait()
        loaded = sf.checkpoint.load(path, {"x": torch.empty(n), "y": torch.empty(n, 3)})
        assert all(loaded[name].equal(x[name]) for name in x)


def test_bytes_are_hashed_as_a_save_in_the_foreground_does(tmp_path: Path) -> None:
    data, sizes = os.urandom(3 * block_writer.BLOCK + 17), []
    with block_writer.DiskFile(str(tmp_path / "a")) as file:
        sink = HashingSink(file.write)
        for start in range(0, len(data), 1_000_003):
            sink.write(data[start : start + 1_000_003])
        sizes.append(sink.hashed())
    whole = HashingSink(lambda _: None)
    whole.write(data)
    assert sizes == [whole.hashed()] and (tmp_path / "a").read_bytes() == data


def _ranks_differ(path: str) -> None:
    params = sf.shard(nn.Linear(3, 3), sf.make_mesh("cpu", fsdp=2), sf.Policy(), src=0)
    sf.checkpoint.save(path, {"p": params}, async_=dist.get_rank() == 0)


def test_ranks_that_save_in_other_ways_are_an_error(tmp_path: Path) -> None:
    match = "rank 0 has async_=True; rank 1 has async_=False"
    run_raises(sf.ShardError, _ranks_differ, str(tmp_path / "step-1"), match=match, ranks=2)


def _trainer_saves(path: str) -> list[str]:
    mesh = sf.make_mesh("cpu", fsdp=2)
    model = nn.Linear(4, 2)

    def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        return sf.apply(model, params, x).square().mean()

    trainer = sf.Trainer(model, mesh, optimizer=sf.optim.adamw(0.1), loss_fn=loss_fn, src=0)
    saved = {}
    for step in range(1, 6):
        trainer.step(torch.ones(3, 4))
        saved[step] = sf.gather(trainer.params)["weight"].detach().clone()
        trainer.save(path, keep=2, keep_every=2, async_=True)
    there = trainer.load(path)
    assert sf.gather(trainer.params)["weight"].equal(saved[5]) and there.name == "step-00000005"
    return sorted(x.name for x in Path(path).iterdir())


def test_a_trainer_saves_so_too(tmp_path: Path) -> None:
    """And takes old ones away once the new one is there."""
    names = run(_trainer_saves, str(tmp_path), ranks=2)[0]
    assert names == ["step-00000002", "step-00000004", "step-00000005"]


def test_a_path_stays_where_it_was_when_the_process_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two saves, and during one."""
    x = {"x": torch.ones(3)}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        saving = sf.checkpoint.save("run/step-1", x, async_=True)
        monkeypatch.chdir(tmp_path)
        assert saving.wait() == Path("run/step-1")
        sf.checkpoint.verify(tmp_path / name / "run" / "step-1")


def test_threads_save_one_after_the_other(tmp_path: Path) -> None:
    """They share the memory from which is written."""
    done = list[Any]()

    def save(number: int) -> None:
        tree = {"x": torch.full((3_000_000,), float(number))}
        done.append((number, sf.checkpoint.save(tmp_path / f"step-{number}", tree, async_=True).wait()))

    threads = [threading.Thread(target=save, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 4
    for number, path in done:
        read = sf.checkpoint.load(path, {"x": torch.empty(3_000_000)})["x"]
        assert read.min() == read.max() == number


def test_a_child_has_its_own(tmp_path: Path) -> None:
    """Memory and writer of a process are not those of one that it forks."""
    x = {"x": torch.ones(3_000_000)}
    sf.checkpoint.save(tmp_path / "step-0", x, async_=True).wait()
    sf.checkpoint.save(tmp_path / "step-1", x, async_=True)
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of os.fork beside a thread
        pid = os.fork()
    if pid == 0:
        try:
            saving = sf.checkpoint.save(tmp_path / "step-2", {"x": x["x"] * 2}, async_=True)
            os._exit(0 if saving.wait() else 1)
        finally:
            os._exit(2)
    sf.checkpoint.save(tmp_path / "step-3", {"x": x["x"] * 3}, async_=True).wait()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for step, number in ((0, 1), (1, 1), (2, 2), (3, 3)):
        read = sf.checkpoint.load(tmp_path / f"step-{step}", {"x": torch.empty(3_000_000)})["x"]
        assert read.min() == read.max() == number, step


_AT_EXIT = """
import atexit, sys, torch, shardfn as sf
from concurrent.futures import ThreadPoolExecutor
how, path, x = sys.argv[1], sys.argv[2], {"x": torch.ones(3_000_000)}

class Pool(sf.checkpoint.LocalDirectory):  # as clients of object stores have one
    def create(self, name):
        file, pool = super().create(name), ThreadPoolExecutor(1)
        write = file.write
        file.write = lambda data: pool.submit(write, data).result()
        return file

class Store:
    def __init__(self, path):
        self.inner = Pool(path)
        self.inner.path.mkdir()
    def __getattr__(self, name):
        return getattr(self.inner, name)
for name in ("create", "put", "read", "size", "names", "remove"):
    setattr(Store, name, lambda self, *args, name=name: getattr(self.inner, name)(*args))

if how == "notes":
    sf.checkpoint.save(path, x, notes={"b": "a" * 9_000_000}, async_=True)
elif how == "store":
    sf.checkpoint.save(Store(path), x, async_=True)
else:
    atexit.register(lambda: sf.checkpoint.save(path, x, async_=how == "handler, async"))
"""


@pytest.mark.parametrize("how", ["notes", "store", "handler", "handler, async"])
def test_a_process_that_ends_has_saved(tmp_path: Path, how: str) -> None:
    """Whatever executors there are, which end before handlers of `atexit` are called."""
    command = [sys.executable, "-c", _AT_EXIT, how, str(tmp_path / "step-1")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    if how == "store" and sys.version_info >= (3, 12):  # which lets nobody begin a thread at the end; docs say so
        assert done.returncode == 1 and "thread at interpreter shutdown" in done.stderr
        return
    assert (done.returncode, done.stderr) == (0, "")
    sf.checkpoint.verify(tmp_path / "step-1")


def test_a_load_waits_and_so_does_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two threads, while a save is slow: the memory is not written to by the second one."""
    goes_on, wrote = threading.Event(), background.Background.write

    def slowly(self: Any, *args: Any) -> Any:
        goes_on.wait(20)
        return wrote(self, *args)

    monkeypatch.setattr(background.Background, "write", slowly)
    there = sf.checkpoint.save(tmp_path / "step-0", {"x": torch.zeros(1000)})
    first = sf.checkpoint.save(tmp_path / "step-1", {"x": torch.ones(1000)}, async_=True)
    second = list[Any]()
    load = threading.Thread(target=sf.checkpoint.load, args=(there, {"x": torch.zeros(1000)}))
    save = threading.Thread(
        target=lambda: second.append(
            sf.checkpoint.save(tmp_path / "step-2", {"x": torch.full((1000,), 2.0)}, async_=True)
        )
    )
    for thread in (load, save):
        thread.start()
        time.sleep(0.1)
    assert load.is_alive() and save.is_alive() and not first.done()
    goes_on.set()
    for thread in (load, save):
        thread.join()
    for number, saving in enumerate((first, second[0]), 1):
        read = sf.checkpoint.load(saving.wait(), {"x": torch.empty(1000)})["x"]
        assert read.min() == read.max() == number


def test_whatever_ends_a_save_is_a_failure(tmp_path: Path) -> None:
    """Also what would end a thread without a word."""

    class Ends(sf.checkpoint.LocalDirectory):
        def create(self, name: str) -> Any:
            if name.endswith(".distcp"):
                raise SystemExit(3)
            return super().create(name)

    local = Ends(tmp_path / "step-1")
    local.path.mkdir()
    store = untyped(type("Store", (), {name: getattr(local, name) for name in STORAGE_METHODS})())
    saving = sf.checkpoint.save(store, {"x": torch.ones(3)}, async_=True)
    with pytest.raises(sf.ShardError, match=r"SystemExit\(3\)"):
        saving.wait()


def test_a_child_does_not_know_how_a_save_of_its_parent_ends(tmp_path: Path) -> None:
    sf.checkpoint.save(tmp_path / "step-0", {"x": torch.ones(3)}, async_=True).wait()
    writer = background.BACKGROUND._writer
    writer.send_signal(signal.SIGSTOP)
    saving = sf.checkpoint.save(tmp_path / "step-1", {"x": torch.ones(3)}, async_=True)
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of os.fork beside a thread
        pid = os.fork()
    if pid == 0:
        try:
            saving.wait()
        except sf.ShardError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    writer.send_signal(signal.SIGCONT)
    sf.checkpoint.verify(saving.wait())


def test_a_full_disk_of_the_writer_says_so(tmp_path: Path) -> None:
    """And it serves the next save."""
    sf.checkpoint.save(tmp_path / "step-0", {"x": torch.ones(3)}, async_=True).wait()
    writer = background.BACKGROUND._writer
    limits = resource.prlimit(writer.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    with pytest.raises(OSError, match=r"File too large.*distcp"):
        sf.checkpoint.save(tmp_path / "step-1", {"x": torch.ones(1_000_000)}, async_=True).wait()
    resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, limits)
    sf.checkpoint.verify(sf.checkpoint.save(tmp_path / "step-1", {"x": torch.ones(1_000_000)}, async_=True).wait())
    assert background.BACKGROUND._writer is writer


def _exchange_breaks(path: str) -> None:
    """The group of saves in the background is lost on one rank; that of the training is not."""
    params = sf.shard(nn.Linear(30, 30), sf.make_mesh("cpu", fsdp=2), sf.Policy(), src=0)
    sf.checkpoint.save(f"{path}/step-0", {"p": params}, async_=True).wait()
    gathers = vars(background)["_torch"].gather_bytes

    def fail(*_: Any) -> Any:
        raise RuntimeError("timeout")

    vars(background)["_torch"].gather_bytes = fail
    try:
        with pytest.raises(sf.ShardError, match="another rank has ended, or does not answer: timeout"):
            sf.checkpoint.save(f"{path}/step-1", {"p": params}, async_=True).wait()
    finally:
        vars(background)["_torch"].gather_bytes = gathers
    if dist.get_rank() == 0:
        background.BACKGROUND._exchange = dist.group.WORLD, background.BACKGROUND._exchange[1]  # it has not noticed
    for step in (2, 3):
        sf.checkpoint.verify(sf.checkpoint.save(f"{path}/step-{step}", {"p": params}, async_=True).wait())
    dist.barrier()


def test_an_exchange_that_broke_is_begun_anew(tmp_path: Path) -> None:
    run(_exchange_breaks, str(tmp_path), ranks=2, timeout=60)
