"""How a rank's failure is described, and how the process of a rank ends."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import operator
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from torch.utils.data._utils import signal_handling

from torchbearer_ddp import checked
from torchbearer_ddp.errors import DistributedError, LaunchError, WorkerError
from torchbearer_ddp.group import debug, stop_request

#: What others read of a report.
REPORT = {
    "rank": checked.whole(0),
    "host": checked.text(),
    "what": checked.text(),
    "message": checked.text(),
    "exitcode": checked.whole(),
    "cause": checked.optional(checked.whole(0)),
    "cause_host": checked.optional(checked.text()),
}
#: How long exit handlers and buffers of a failed rank may take.
_EXIT_SECONDS = 2.0
#: How long a file that is being written may take after that, as after a signal.
_WRITE_SECONDS = 30.0
_POLL_SECONDS = 0.05
#: The names of files that are being written begin like this.
TEMPORARY_PREFIX = ".tmp-"
_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
#: Python's own exit code where what was printed could not be written.
_FLUSH_FAILED = 120
#: Frames of these layers come before the user's function in a traceback.
_LAUNCHING = ("torchbearer_ddp.launch.", "torchbearer_ddp.slurm.")


def exit_now(code: int) -> NoReturn:
    """Ends this process after its exit handlers; a group with pending messages can hang an exit."""
    late = threading.Timer(_EXIT_SECONDS, _end_after_writing, (code,))
    late.daemon = True
    late.start()
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    stop_request.end(code)


def _end_after_writing(code: int) -> None:
    deadline = time.monotonic() + _WRITE_SECONDS
    while is_writing(os.getpid()) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    os._exit(code)


def is_writing(pid: int) -> bool:
    """Whether a process has a checkpoint open that is not whole yet; read from the kernel."""
    with contextlib.suppress(OSError):  # the process is gone
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed meanwhile
                if descriptor.readlink().name.startswith(f"{TEMPORARY_PREFIX}{pid}-"):
                    return True
    return False


def exit_normally(code: int) -> NoReturn:
    """Ends this process as Python does, but keeps torch's modules: to unload them takes seconds."""
    threading._shutdown()  # type: ignore[attr-defined]  # joins threads, concurrent.futures' too
    atexit._run_exitfuncs()
    try:
        flush_files()
    except OSError:
        traceback.print_exc()
        code = _FLUSH_FAILED
    stop_request.end(code)


#: Files that were open before this process was forked, which is then not searched for them.
_inherited_files: list[Any] = []


def open_files() -> list[Any]:
    """stdout, stderr, and other files with buffers that were not closed."""
    found = [each for each in gc.get_objects() if type(each) in _BUFFERED]
    return [file for file in _inherited_files + found if _is_open(file)]


def _is_open(file: Any) -> bool:
    try:
        return not file.closed
    except ValueError:  # its buffer was detached, as scripts do to give stdout another encoding
        return False


def flush_files() -> None:
    """Writes what is in the buffers of files that were not closed.

    Raises:
        OSError: The first, after all files were tried.
    """
    failed = []
    for file in open_files():
        try:
            file.flush()
        except OSError as error:
            failed.append(error)
    if failed:
        raise failed[0]


def inherit(files: list[Any]) -> None:
    """In a forked child: leaves what it has inherited, but for open files, to the parent.

    Garbage collections would look at every object, which copies the memory that both share.
    """
    _inherited_files[:] = files
    gc.freeze()


def tells_of_a_dead_worker(error: BaseException) -> bool:
    """True if torch's DataLoader raised it, from the signal of a worker's end, during the wait."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and frames[-1][0].f_code.co_filename == signal_handling.__file__


def is_secondary(error: BaseException) -> bool:
    """True if it follows from the failure of another rank, also where a script has wrapped it."""
    found: BaseException | None = error
    seen: set[int] = set()
    while found is not None and id(found) not in seen:
        if isinstance(found, DistributedError) and found.secondary:
            return True
        seen.add(id(found))
        found = found.__cause__ or found.__context__
    return False


def report_of(error: BaseException, rank: int) -> dict[str, Any]:
    """What other processes need to know of a rank's failure, as plain data."""
    signum = _stop_signal(error)
    return {
        "kind": "error",
        "rank": rank,
        "host": socket.gethostname(),
        # These messages are complete; where in our code they were raised does not help.
        "message": str(error) if isinstance(error, LaunchError | WorkerError) else "",
        "what": "\n\n".join(filter(None, (summary(error), users_traceback(error)))),
        "exitcode": signum + 128 if signum else _exit_code(error),
        "signal": signum,
        "step": debug.last_step(),
        "launch": isinstance(error, LaunchError),
        "secondary": is_secondary(error),
        "cause": error.rank if isinstance(error, WorkerError) else None,
        "cause_host": error.host if isinstance(error, WorkerError) else None,
    }


def _exit_code(error: BaseException) -> int:
    """The code that sys.exit was given if it is one, also as a whole number of NumPy, else 1."""
    code: Any = error.code if isinstance(error, SystemExit) else None
    try:
        code = int(operator.index(code))
    except TypeError:  # a text, which Python prints, or a number with a fraction
        return 1
    return code if 0 < code < 256 else 1


def explain(report: Mapping[str, Any]) -> str:
    """What happened to a rank, with its traceback if that helps."""
    message = report.get("message") or f"Rank {report['rank']} on {report['host']} {report['what']}"
    return str(message)


def worker_error(report: Mapping[str, Any], note: str = "") -> WorkerError:
    """The error that the process which waits for a rank raises for its failure."""
    return WorkerError(
        explain(report).rstrip() + note,
        rank=report["rank"] if report.get("cause") is None else report["cause"],
        host=report.get("cause_host") or report["host"],
        exitcode=report["exitcode"],
    )


def headline(error: BaseException, rank: int) -> str:
    """What happened to a rank, in one line."""
    if isinstance(error, DistributedError):
        return str(error)
    return f"Rank {rank} on {socket.gethostname()} {summary(error)}"


def summary(error: BaseException) -> str:
    """What happened, in words that follow the rank's name."""
    if signum := _stop_signal(error):
        return f"was asked to stop ({signal.Signals(signum).name})."
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r})"
    return f"raised {''.join(traceback.format_exception_only(error)).strip()}"


def users_traceback(error: BaseException) -> str:
    """The traceback from the user's function on; empty after a request to stop."""
    if _stop_signal(error):
        return ""
    frames = users_frames(error.__traceback__)
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()


def users_frames(trace: TracebackType | None) -> TracebackType | None:
    """The frames from the user's function on, without the launching layers that called it."""
    frames = trace
    for launching in (False, True):
        while frames and _is_launching(frames) is launching:
            frames = frames.tb_next
    return frames or trace


def _is_launching(frames: TracebackType) -> bool:
    return str(frames.tb_frame.f_globals.get("__name__", "")).startswith(_LAUNCHING)


def _stop_signal(error: BaseException) -> int | None:
    return stop_request.received() if isinstance(error, KeyboardInterrupt | SystemExit) else None
