"""The first lines of a started rank; run as a file, so that nothing is imported before them.

The rank must end with its launcher, also while torch is still being imported, and must find modules
where the launcher does.
"""

import sys

if __name__ == "__main__":
    del sys.path[0]  # this package's own folder, whose modules are not to be imported from here

import ctypes
import json
import os
import signal
import time
from typing import Any

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.002
#: Takes the place of a rank's number: the process forks the ranks.
SERVER = -1


def die_with(parent: int) -> None:
    """Asks the kernel to send this process SIGKILL when the launcher ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the launcher ended before that call
        os._exit(1)


def adopted_by(server: int, launcher: int) -> None:
    """Waits until the server that has forked this process has ended, and the launcher has it."""
    while os.getppid() == server:
        time.sleep(_POLL_SECONDS)
    die_with(launcher)


def read_task(descriptor: int) -> tuple[dict[str, Any], bytes]:
    """Reads the launcher's file: a line of JSON, then the pickled worker.

    All ranks share the file's position, so each reads from the start without moving it.
    """
    content, size = b"", os.fstat(descriptor).st_size
    while len(content) < size:
        content += os.pread(descriptor, size - len(content), len(content))
    os.close(descriptor)
    head, _, payload = content.partition(b"\n")
    return json.loads(head), payload


if __name__ == "__main__":
    index, parent, task, reports, captured = map(int, sys.argv[1:])
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the worker runs: no traceback
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.set_inheritable(reports, False)
    if captured:
        # Lines arrive as they are printed, and the last ones of a rank that dies are not lost.
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    head, payload = read_task(task)
    if head["plan"]["debug"]:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until the worker runs
    sys.path[:], sys.argv[:] = head["path"], head["argv"]
    from torchbearer_ddp.launch.plan import Plan

    plan = Plan.from_fields(head["plan"])
    if index == SERVER:
        from torchbearer_ddp.launch.fork_server import serve

        server = os.getpid()
        serve(plan, payload, reports, lambda: adopted_by(server, parent))
    else:
        from torchbearer_ddp.launch.rank import main
        from torchbearer_ddp.launch.worker import unpack

        main(index, plan, lambda: unpack(payload), reports, captured=captured > 0)
