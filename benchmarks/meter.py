"""Runs a command, and prints what all of its processes took together, as JSON.

    python -m benchmarks.meter [--memory] COMMAND...

It is a process of its own: what the kernel has counted for its children is then the command's.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

#: How long a command may take, and how long processes that it leaves behind may.
LONGEST_SECONDS, LEFT_SECONDS = 900, 10
_SAMPLE_SECONDS = 0.05
_PR_SET_CHILD_SUBREAPER = 36


class Memory(threading.Thread):
    """Looks at the memory of all descendants again and again, and keeps the highest sum.

    What processes share is counted once; pages of files, such as torch's libraries, are not.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(_SAMPLE_SECONDS):
            self.peak = max(self.peak, sum(map(own_bytes, _descendants(os.getpid()))))

    def stop(self) -> None:
        self._over.set()
        self.join()


def _descendants(ancestor: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for each in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((each / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended
        children.setdefault(parent, []).append(int(each.name))
    found = list(children.get(ancestor, []))
    for each in found:  # grows while it is read
        found += children.get(each, [])
    return found


def own_bytes(process: int) -> int:
    """The memory of a process without pages of files, of what it shares its part."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    kinds = ("Pss_Anon:", "Pss_Shmem:")
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(kinds))


def _written_bytes() -> int:
    """What this process and the children that it has waited for have written to files."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("write_bytes")).split()[1])


def run(command: list[str], memory: bool) -> dict[str, float]:
    """What a command took; it must succeed."""
    # Whatever the command leaves behind becomes a child of this process, and is counted.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    sampler = Memory()
    if memory:
        sampler.start()
    before = _written_bytes()
    started = time.time()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        _, errors = process.communicate(timeout=LONGEST_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    wall = time.time() - started
    if process.returncode:
        raise RuntimeError(f"{command} ended with {process.returncode}:\n{errors.decode()}")
    _wait_for_the_rest(time.time() + LEFT_SECONDS)
    if memory:
        sampler.stop()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "started": started,
        "wall": wall,
        "processor": used.ru_utime + used.ru_stime,
        "written": _written_bytes() - before,
        **({"memory": sampler.peak} if memory else {}),
    }


def _wait_for_the_rest(deadline: float) -> None:
    while True:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not ended:
            if time.time() > deadline:
                raise RuntimeError(f"processes are left: {_descendants(os.getpid())}")
            time.sleep(0.01)


if __name__ == "__main__":
    words = sys.argv[1:]
    with_memory = words[0] == "--memory"
    print(json.dumps(run(words[with_memory:], with_memory)))
