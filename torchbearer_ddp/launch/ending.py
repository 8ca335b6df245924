"""How a process that launched a run, or is one of its ranks, ends after an error."""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import shlex
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from torchbearer_ddp.errors import DistributedError
from torchbearer_ddp.group import failures
from torchbearer_ddp.launch.plan import Plan
from torchbearer_ddp.log import logger

#: Marks an error with how this process ends if it is not caught. A hook that held the error itself
#: would keep its traceback, and the store of the failed run in it, as long as the process lives.
_ENDING = "_torchbearer_ddp_ending"
#: How much later a failure that another one caused is dated.
_FOLLOWS_SECONDS = 2


#: Where libraries are.
_STANDARD = sysconfig.get_path("stdlib")
_PACKAGES = {"site-packages", "dist-packages"}


class _Launcher:
    """Whether this process has started ranks."""

    has_started = False


def has_started_ranks() -> None:
    """From now on this process ends without collecting torch's modules, which takes a second."""
    _Launcher.has_started = True


@atexit.register
def _keep_garbage() -> None:
    """Leaves garbage to the system, but writes what is in the buffers of files among it.

    Registered when this module is imported, so that it is called after the handlers of the script.
    """
    if _Launcher.has_started and not _has_finalizers():
        with contextlib.suppress(OSError):  # shown when Python itself writes stdout
            failures.flush_files()
        gc.freeze()


def _has_finalizers() -> bool:
    """Whether a class that is not of a library has ``__del__``, which a collection would call."""
    waiting: list[type] = [object]
    seen: set[type] = set()
    while waiting:
        kind = waiting.pop()
        seen.add(kind)
        if "__del__" in vars(kind):
            file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
            if file and not file.startswith(_STANDARD) and not _PACKAGES & {*Path(file).parts}:
                return True
        below: list[type] = type.__subclasses__(kind)
        waiting += [each for each in below if each not in seen]
    return False


def how_to_continue(checkpoint: str | None, command: Sequence[str] = ()) -> str:
    """What was saved by a run that was stopped, and how to go on; empty if nothing was saved."""
    if checkpoint is None:
        return ""
    again = f"to continue: {shlex.join(command)}" if command else "the same command continues it"
    return f"; saved {checkpoint}; {again}"


def end_rank_with(plan: Plan, error: BaseException) -> None:
    """Makes this process, one rank of several, end with this error, and tells torchrun of it."""
    rank = plan.member.rank
    text = failures.explain(failures.report_of(error, rank))
    if isinstance(error, SystemExit):
        logger.error(text)  # Python itself shows nothing for sys.exit
    else:
        exit_with_message(error, 1, failures.headline(error, rank), force=True)
    _report_to_torchrun(plan, error, text)


def _report_to_torchrun(plan: Plan, error: BaseException, text: str) -> None:
    """Writes the failure where torchrun looks for it, so that its summary names the first cause."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if plan.launcher != "torchrun" or not path:
        return
    # It takes the earliest failure for the cause and counts whole seconds: what only follows from
    # another failure must not be as early.
    when = int(time.time()) + _FOLLOWS_SECONDS * failures.is_secondary(error)
    details = {"py_callstack": text, "timestamp": str(when)}
    report = {"message": {"message": text, "extraInfo": details}}
    with contextlib.suppress(OSError):
        # Whole or not at all: torchrun fails itself where it finds a part.
        part = Path(f"{path}.part")
        part.write_text(json.dumps(report))
        part.replace(path)


def exit_with_message(
    error: BaseException, exitcode: int, text: str | None = None, *, force: bool = False
) -> None:
    """Makes this process end with a message instead of a traceback, if the error is not caught.

    The traceback of this process would hide the cause, which is in another rank or in the flags.
    ``text`` replaces the error's own message; the traceback of a user's error follows it. ``force``
    ends the process without closing the group, which could hang.
    """
    setattr(error, _ENDING, (exitcode, text or str(error), force))
    previous = sys.excepthook
    if hasattr(previous, _ENDING):
        return

    def hook(kind: type[BaseException], found: BaseException, trace: TracebackType | None) -> None:
        if not hasattr(found, _ENDING):
            previous(kind, found, trace)
            return
        code, shown, at_once = getattr(found, _ENDING)
        # In place of Python's traceback, so to stderr itself; one write, as ranks share a terminal.
        sys.stderr.write(f"torchbearer_ddp: {shown}\n")
        if not isinstance(found, DistributedError) and code != 2:
            own = failures.users_frames(trace)
            previous(kind, found.with_traceback(own), own)
        if at_once:
            failures.exit_now(code)
        raise SystemExit(code)

    setattr(hook, _ENDING, True)
    sys.excepthook = hook
