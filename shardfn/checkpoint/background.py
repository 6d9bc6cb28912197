"""Saves that go on in the background: `save(..., async_=True)` copies what there is, and returns.

    save       ranks agree, the tree is copied to memory that two processes share (`StagingSink`)     the caller waits
    a thread   a process writes that memory to a file and hashes it; outcomes are exchanged; the first rank commits

Ranks exchange over a process group of its own, so that their collectives and those of the training do not meet. One
save is under way at a time. What went wrong is raised by `wait`, by the next save or load, or when the process ends.
"""

import atexit
import json
import mmap
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from threading import RLock, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardfn import _torch
from shardfn.checkpoint import block_writer
from shardfn.checkpoint.hashed_files import write_hashed
from shardfn.checkpoint.manifest import HashedFile
from shardfn.checkpoint.storages import AnyPlace, LocalDirectory, Storage
from shardfn.comm import outcome_of, raise_failure
from shardfn.notation import ShardError


class Saving:
    """A save that goes on in the background, by `save(..., async_=True)`.

    >>> import tempfile, torch, shardfn as sf
    >>> saving = sf.checkpoint.save(tempfile.mkdtemp() + "/step-1", {"x": torch.ones(2)}, async_=True)
    >>> path = saving.wait()
    >>> saving.done(), sf.checkpoint.load(path, {"x": torch.empty(2)})
    (True, {'x': tensor([1., 1.])})
    """

    def __init__(self, path: AnyPlace, work: Callable[[], None]) -> None:
        self.path = path
        self._work = work
        self._problem: Exception | None = ShardError("it has not come to its end in this process")
        self._told = False
        self._thread = Thread(target=self._run, daemon=True)
        if _is_running():
            self._thread.start()
        else:  # no thread can begin any more, and nobody would wait for it
            self._run()

    def _run(self) -> None:
        try:
            self._work()
            self._problem = None
        except BaseException as error:  # a thread that ends so would say nothing
            self._problem = error if isinstance(error, Exception) else ShardError(f"checkpoint.save: {error!r}")

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> Any:
        """Wait for its end; returns the path.

        Raises:
            Exception: what `save` raises, on every rank.
        """
        _, self._told = self.untold, True
        if self._problem is not None:
            raise self._problem
        return self.path

    @property
    def untold(self) -> Exception | None:
        """What went wrong, once it has ended and unless `wait` has said so."""
        if self._thread.ident is not None:
            self._thread.join()
        return None if self._told else self._problem


class SharedMemory:
    """Memory of this process that one it begins can read; pinned where there is a GPU."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):  # on Linux; not counted with /dev/shm, which is small in containers
            self.descriptor = os.memfd_create("shardfn")
        else:
            self.descriptor, name = tempfile.mkstemp()
            os.unlink(name)
        self.bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    @torch.inference_mode(False)
    def fit(self, nbytes: int) -> Tensor:
        """At least so many bytes of it; what was there is lost if it grows."""
        if self.bytes.numel() < nbytes:
            self._pin(self.bytes, False)
            self.bytes = self.bytes[:0]
            os.ftruncate(self.descriptor, nbytes)
            larger = torch.frombuffer(mmap.mmap(self.descriptor, nbytes), dtype=torch.uint8)
            self._pin(larger, True)
            self.bytes = larger
        return self.bytes

    def _pin(self, memory: Tensor, pinned: bool) -> None:
        if torch.cuda.is_available() and memory.numel():
            cuda: Any = torch.cuda.cudart()
            at, size = memory.data_ptr(), memory.numel()
            torch.cuda.check_error(cuda.cudaHostRegister(at, size, 1) if pinned else cuda.cudaHostUnregister(at))


class StagingSink:
    """Copies the bytes of a file to memory."""

    def __init__(self, memory: Tensor) -> None:
        self._memory, self._bytes, self.size = memory, memory.numpy().data, 0
        self._devices = set[torch.device]()

    def write(self, data: bytes | memoryview) -> None:
        """Bytes that are in memory."""
        self._bytes[self.size : self.size + len(data)] = data
        self.size += len(data)

    def write_numbers(self, x: Tensor) -> None:
        """Those of a tensor; one of a GPU is there after `staged`."""
        numbers = _torch.bytes_of(x)
        self._devices.add(x.device)
        self._memory[self.size : self.size + len(numbers)].copy_(numbers, non_blocking=True)
        self.size += len(numbers)

    def staged(self) -> Tensor:
        """All that was written."""
        for device in self._devices - {torch.device("cpu")}:
            torch.cuda.current_stream(device).synchronize()
        return self._memory[: self.size]


class Background:
    """What a process needs for its saves in the background."""

    def __init__(self) -> None:
        os.register_at_fork(after_in_child=self._forget)
        self._begin()

    def _begin(self) -> None:
        self._lock = RLock()
        self._writer: Any = None
        self._exchange: tuple[Any, Any] = None, None  # the process group of all ranks, and one beside it
        self._latest: Saving | None = None
        self._failed = self._is_saving = False

    def _forget(self) -> None:
        """What a process has begun is not its child's."""
        for pipe in (self._writer.stdin, self._writer.stdout) if self._writer is not None else ():
            with open(os.devnull, "r+b") as nothing:
                os.dup2(nothing.fileno(), pipe.fileno())
        if (memory := vars(self).pop("memory", None)) is not None:
            os.close(memory.descriptor)
        self._begin()

    @cached_property
    def memory(self) -> SharedMemory:
        """Where what is to be written is copied to."""
        if _is_running():
            vars(threading)["_register_atexit"](self._end)  # before executors end, which a `Storage` may have
            atexit.register(self._exit)
        return SharedMemory()

    @contextmanager
    def alone(self, within: bool = False) -> Iterator[None]:
        """No other thread is here, nor a handler of a signal, which would share the memory.

        Args:
            within: whether it may be within another such `with` of this thread.
        """
        with self._lock:
            if (was := self._is_saving) and not within:
                why = "this thread is in the middle of a save, as when a signal's handler saves"
                raise ShardError(f"checkpoint.save: {why}; set a flag in it, and save between two steps")
            self._is_saving = True
            try:
                yield
            finally:
                self._is_saving = was

    def has_lost(self) -> bool:
        """Whether an exchange went wrong, after which gloo serves no other one."""
        return self._exchange[0] is None

    def meet(self, name: str, anew: bool) -> None:
        """Have a process group for the exchange; all ranks call it, with one name, and say alike if it must be new."""
        world = dist.group.WORLD if dist.is_initialized() else None
        if self._exchange[0] is not world or self._exchange[1] is None or anew:
            self._exchange = world, None if world is None else _torch.apart_from(world, name)

    def begin(self, path: AnyPlace, work: Callable[[], None]) -> Saving:
        """Do that; nothing else goes on."""
        saving = self._latest = Saving(path, work)
        if not _is_running():  # nobody would wait for it any more
            self.settle()
        return saving

    def settle(self) -> None:
        """Wait for the save that goes on.

        Raises:
            Exception: what went wrong with it, if nobody has heard of it.
        """
        if (saving := self._latest) is None:
            return
        problem, self._latest = saving.untold, None  # not before: others that ask wait, too
        if problem is not None:
            raise ShardError(f"the save of '{saving.path}' in the background failed: {problem}") from problem

    def exchanged(self, work: Callable[[], Any]) -> list[Any]:
        """What that gives on every rank, on the first one; all raise if it fails on one."""
        group, problem, result = self._exchange[1], None, None
        try:
            result = work()
        except BaseException as error:  # the others wait for it
            problem = error if isinstance(error, Exception) else ShardError(f"checkpoint.save: {error!r}")
        outcome = outcome_of(problem, 0 if group is None else group.rank())
        if group is None:
            everyone = [pickle.dumps((outcome, result))]
        else:
            try:
                everyone = _torch.gather_bytes(group, pickle.dumps((outcome, result)), problem is not None)
            except RuntimeError as error:
                self._exchange = None, None
                raise ShardError(f"checkpoint.save: another rank has ended, or does not answer: {error}") from error
        gathered = [pickle.loads(data) for data in everyone]
        raise_failure("checkpoint.save", problem, [outcome for outcome, _ in gathered])
        return [result for _, result in gathered]

    def write(self, storage: Storage, name: str, data: Tensor) -> HashedFile:
        """Write a file of memory that was filled: by a process of its own, if it is one of this host."""
        if isinstance(storage, LocalDirectory):
            return self._written_apart(storage.path / name, len(data))
        return write_hashed(storage, name, lambda sink: sink.write(data.numpy().data))

    def _written_apart(self, path: Path, size: int) -> HashedFile:
        if self._writer is None or self._writer.poll() is not None:
            self.end_writer()
            script = [sys.executable, "-I", "-S", block_writer.__file__, str(self.memory.descriptor)]
            pipe, shared = subprocess.PIPE, (self.memory.descriptor,)
            # A session of its own: an interrupt from a keyboard ends the training, which may want to save.
            self._writer = subprocess.Popen(script, stdin=pipe, stdout=pipe, pass_fds=shared, start_new_session=True)
        line = b""
        with suppress(BrokenPipeError):
            self._writer.stdin.write(json.dumps({"path": str(path), "size": size}).encode() + b"\n")
            self._writer.stdin.flush()
            line = self._writer.stdout.readline()
        if not line:
            raise ShardError(f"the process that writes has ended, with status {self.end_writer()}")
        answer = json.loads(line)
        if "error" in answer:
            raise OSError(*answer["error"])
        return HashedFile(answer["size"], tuple(answer["sha256"]))

    def end_writer(self) -> int | None:
        """End the process that writes; returns its status."""
        writer, self._writer = self._writer, None
        if writer is None:
            return None
        with suppress(BrokenPipeError), writer.stdin, writer.stdout:
            pass
        return writer.wait()

    def _end(self) -> None:
        """At the end of the process: a save comes to its end, and one that failed is heard of."""
        try:
            self.settle()
            self.end_writer()
        except Exception:
            traceback.print_exc()
            self._failed = True

    def _exit(self) -> None:
        """An exception would leave the exit status at 0."""
        if self._failed:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


def _is_running() -> bool:
    """Whether the program goes on, rather than its handlers of `atexit`."""
    return threading.main_thread().is_alive()


BACKGROUND = Background()  # of this process
