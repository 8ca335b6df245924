"""Starts programs as a user would, reads their output, and leaves none of them behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests import proc, warm_python

SCRIPTS = Path(__file__).parent / "launch" / "scripts"
_ROOT = Path(__file__).parents[1]
#: Variables from which a program would conclude that another launcher has started it.
_FOREIGN = ("SLURM_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMP_NUM_THREADS")


def own_environment() -> dict[str, str]:
    """The environment of this process, in which pytest removes a variable while threads read it."""
    found = {name: os.environ.get(name) for name in list(os.environ)}
    return {name: value for name, value in found.items() if value is not None}


class Program:
    """One command and all the processes that come of it.

    Args:
        command: A file in ``SCRIPTS`` or the name of a program in ``tests/programs.py``, and its
            arguments; or a whole command with ``raw``.
        environment: Variables to add.
        raw: True if the command is complete.
        before: A command to run it under, such as ``ip netns exec``.
        terminal: A descriptor for stdin, stdout and stderr, instead of pipes.
        pass_fds: Descriptors that it inherits.
        folder: Where it runs, if not in the current folder.
        fresh: True if Python itself has to be started, and is not forked from one that has
            imported torch; what needs that by its other arguments does so anyway.
    """

    def __init__(
        self,
        *command: str,
        environment: dict[str, str] | None = None,
        raw: bool = False,
        before: tuple[str, ...] = (),
        terminal: int | None = None,
        pass_fds: tuple[int, ...] = (),
        folder: Path | None = None,
        fresh: bool = False,
    ) -> None:
        mark = uuid.uuid4().hex
        self._mark = f"{warm_python.MARK}={mark}"
        clean = {k: v for k, v in own_environment().items() if not k.startswith(_FOREIGN)}
        clean["PYTHONPATH"] = str(_ROOT)
        added = {**(environment or {}), warm_python.MARK: mark}
        if not raw:
            command = (sys.executable, *python_words(*command))
        self.output: list[str] = []
        self.errors: list[str] = []
        self._readers: list[threading.Thread] = []
        streams = [terminal] * 3 if terminal is not None else [None, *self._pipes()]
        plain = not before and not pass_fds and terminal is None and command[0] == sys.executable
        if plain and not fresh and warm_python.serves(command[1:], added):
            place = folder or Path.cwd()
            self.process: Any = warm_python.start(command[1:], clean, added, place, 0, *streams[1:])
        else:
            self.process = subprocess.Popen(
                [*before, *command],
                stdin=streams[0],
                stdout=streams[1],
                stderr=streams[2],
                env={**clean, **added},
                cwd=folder,
                start_new_session=True,
                pass_fds=pass_fds,
            )
        if terminal is None:
            for descriptor in streams[1:]:
                os.close(descriptor)

    def _pipes(self) -> Iterator[int]:
        """Pipes for stdout and stderr, which are read from here on."""
        for lines in (self.output, self.errors):
            ours, theirs = os.pipe()
            reader = threading.Thread(target=self._read_lines, args=(ours, lines), daemon=True)
            reader.start()
            self._readers.append(reader)
            yield theirs

    @staticmethod
    def _read_lines(descriptor: int, lines: list[str]) -> None:
        with open(descriptor) as pipe:
            lines.extend(pipe)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        for pid in self.alive():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()

    def alive(self) -> list[int]:
        """The processes that come of this command and still run, itself included."""
        return proc.marked(self._mark)

    def pids(self, world_size: int, seconds: float = 60.0) -> list[int]:
        """The processes of the ranks, once each has printed ``rank R pid P``."""

        def printed() -> dict[int, int]:
            words = [line.split() for line in self.output if " pid " in line]
            return {int(w[1]): int(w[3]) for w in words}

        until(lambda: len(printed()) == world_size or self.process.poll() is not None, seconds)
        assert len(printed()) == world_size, self.text()
        return [printed()[rank] for rank in range(world_size)]

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
        """Its whole output so far."""
        return "".join([*self.output, "--- errors\n", *self.errors])

    def said(self) -> str:
        """Its standard error, without the line that describes the launch."""
        lines = [line for line in self.errors if ", gloo on cpu" not in line]
        return "".join(line for line in lines if "torch/distributed/run.py" not in line)


def run_python(*words: str, folder: Path, seconds: float = 120.0, **environment: str) -> Program:
    """Runs Python with these words to its end; what it has started has ended too."""
    with Program(
        sys.executable, *words, raw=True, folder=folder, environment=environment
    ) as program:
        program.code(seconds)
        return program


def python_words(name: str, *arguments: str) -> tuple[str, ...]:
    """What ``python`` or ``torchrun`` is given to run a script or one of ``tests/programs.py``."""
    start = (str(SCRIPTS / name),) if name.endswith(".py") else ("-m", "tests.programs", name)
    return (*start, *arguments)


def bound(seconds: float) -> float:
    """A limit in seconds, longer where the machine is busy."""
    return seconds * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def until(condition: Callable[[], bool], seconds: float) -> None:
    """Waits for a condition."""
    deadline = time.monotonic() + bound(seconds)
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.02)


def slurm_step(rank: int, job: str) -> dict[str, str]:
    """The environment of one of two tasks that srun has started on this host."""
    return {
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_NNODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_JOB_NODELIST": "localhost",
    }


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
