"""The launcher. Its status is 0, 1 after an error, 75 when SIGTERM came: start it again, and the run goes on."""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from shardfn.watch import Stopped

_SHOWN = 30  # lines of an error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run torchrun with these arguments; returns a status."""
    # Ranks that begin again would find the addresses of those before them in the launcher's store, and wait for these.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    asked = run.parse_args(None if arguments is None else [*arguments])
    if asked.no_python or asked.run_path:
        print("shardfn.run: runs a Python script or, with -m, a module; for others there is torchrun", file=sys.stderr)
        return 2
    asked.training_script_args = [*["-m"] * asked.module, asked.training_script, *asked.training_script_args]
    asked.module, asked.training_script = True, "shardfn.run.rank"
    try:
        run.run(asked)
    except ChildFailedError as error:
        # One that ended so has saved with all others; those that were not yet out may have got a signal.
        if Stopped.STATUS in {failure.exitcode for failure in error.failures.values()}:
            return Stopped.STATUS
        print(told(*first_of(error.failures)), file=sys.stderr)
        return 1
    except SignalException as error:  # ranks had half a minute to save
        return Stopped.STATUS if error.sigval == signal.SIGTERM else 128 + error.sigval
    return 0


def first_of(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The rank that failed first: whose file with the error is the oldest, since torch tells seconds only."""

    def when(rank: int) -> float:
        with suppress(OSError):
            return os.stat(failures[rank].error_file).st_mtime
        return failures[rank].timestamp

    first = min(failures, key=when)
    return first, failures[first]


def told(rank: int, failure: ProcessFailure) -> str:
    """What the first rank that failed says."""
    data = failure.error_file_data.get("message", "")
    text = data.get("extraInfo", {}).get("py_callstack") or data["message"] if isinstance(data, dict) else str(data)
    if text not in ("", "<NONE>"):  # a signal of the launcher may have come to it afterwards
        how, lines = "with an error", text.strip().splitlines()[-_SHOWN:]
    else:
        how = f"by {failure.signal_name()}" if failure.exitcode < 0 else f"with status {failure.exitcode}"
        lines = ["it has left no error"]
    return "\n".join([f"shardfn.run: rank {rank} failed first, {how}, at {failure.timestamp_isoformat()}:", *lines])


if __name__ == "__main__":
    sys.exit(main())
