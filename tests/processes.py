"""Starts test programs as a user would, reads what they say, and leaves none of them behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

SCRIPTS = Path(__file__).parent / "launch" / "scripts"
_ROOT = Path(__file__).parents[1]
_MARK = "TORCHBEARER_DDP_TEST"
#: What would make a test's programs believe that something else has started them.
_FOREIGN = ("SLURM_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMP_NUM_THREADS")


class Program:
    """One command and all the processes that come of it.

    Args:
        command: The script in ``scripts`` and its arguments, or a whole command with ``raw``.
        environment: Variables to add.
        raw: True if the command is complete.
        before: A command to run it under, such as ``ip netns exec``.
    """

    def __init__(
        self,
        *command: str,
        environment: dict[str, str] | None = None,
        raw: bool = False,
        before: tuple[str, ...] = (),
    ) -> None:
        self._mark = uuid.uuid4().hex
        clean = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
        if not raw:
            command = (sys.executable, str(SCRIPTS / command[0]), *command[1:])
        self.process = subprocess.Popen(
            [*before, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**clean, "PYTHONPATH": str(_ROOT), _MARK: self._mark, **(environment or {})},
            start_new_session=True,
        )
        self.output: list[str] = []
        self.errors: list[str] = []
        self._readers = [
            threading.Thread(target=lambda pipe=pipe, lines=lines: lines.extend(pipe), daemon=True)
            for pipe, lines in (
                (self._lines(self.process.stdout), self.output),
                (self._lines(self.process.stderr), self.errors),
            )
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _lines(pipe):
        yield from pipe

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exc: object) -> None:
        for pid in [self.process.pid, *self.alive()]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()

    def alive(self) -> list[int]:
        """The processes that come of this command and still run, itself included."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes()
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if self._mark.encode() in environment and state != "Z":
                found.append(int(folder.name))
        return found

    def pids(self, world_size: int, seconds: float = 60.0) -> list[int]:
        """The processes of the ranks, once each has printed ``rank R pid P``."""

        def said() -> dict[int, int]:
            words = [line.split() for line in self.output if " pid " in line]
            return {int(w[1]): int(w[3]) for w in words}

        until(lambda: len(said()) == world_size or self.process.poll() is not None, seconds)
        assert len(said()) == world_size, self.text()
        return [said()[rank] for rank in range(world_size)]

    def code(self, seconds: float = 60.0) -> int:
        """Its exit code, once it and all that it has started have ended."""
        try:
            self.process.wait(bound(seconds))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds:g} s\n{self.text()}") from None
        for reader in self._readers:
            reader.join(5)
        return self.process.returncode

    def text(self) -> str:
        """All that it has said so far."""
        return "".join([*self.output, "--- errors\n", *self.errors])

    def said(self) -> str:
        """What it said on the error channel, without the line that says what was detected."""
        lines = [line for line in self.errors if ", gloo on cpu" not in line]
        return "".join(line for line in lines if "torch/distributed/run.py" not in line)


def bound(seconds: float) -> float:
    """Seconds that a promise may take: longer where other work has taken the cores."""
    return seconds * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def until(condition: Callable[[], bool], seconds: float) -> None:
    """Waits for a condition."""
    deadline = time.monotonic() + bound(seconds)
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.02)


def free_port(address: str = "127.0.0.1") -> int:
    """A port that was free a moment ago, below the range that systems hand out by themselves."""
    for _ in range(1000):
        port = 15000 + uuid.uuid4().int % 5000
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")
