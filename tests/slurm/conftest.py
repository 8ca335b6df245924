"""A real Slurm cluster on this machine: started once per test run, stopped with all its daemons."""

from __future__ import annotations

import logging
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests import proc
from tests.processes import own_environment
from tests.programs import PATIENCE, train_and_hold
from tests.requirements import needs_slurm
from torchbearer_ddp import submit_slurm

_HERE = Path(__file__).parent
_ROOT = _HERE.parent.parent
#: The controller, six nodes, the accounting.
_PORTS = 8


class Cluster:
    """The running cluster, and what only its administrator could do to it."""

    def __init__(self, state: Path, port: int) -> None:
        self.state = state
        self._port = port
        # Reads until this process closes the pipe or ends, however it ends, and then cleans up.
        self._guard = subprocess.Popen(
            ["bash", "-c", 'cat; bash "$0" "$1"; rm -rf "$1"', str(_HERE / "stop-slurm.sh"), state],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def start(self) -> None:
        """Starts what is not running."""
        done = subprocess.run(
            ["bash", str(_HERE / "start-slurm.sh"), str(self.state)],
            env={**own_environment(), "PORT": str(self._port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
        )
        if done.returncode != 0:
            pytest.fail(f"the cluster did not start: {done.stdout[-3000:]}")

    def stop(self) -> list[int]:
        """Stops the cluster; returns the daemons that are still there, which should be none."""
        files = list((self.state / "run").glob("*.pid"))
        pids = [int(path.read_text()) for path in files if not path.name.startswith("own.")]
        self._guard.communicate(timeout=PATIENCE)
        return [pid for pid in pids if proc.is_running(pid)]

    def command(self, *words: str) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout.strip()

    def state_of(self, job_id: str) -> str:
        return self.command("squeue", "-h", "-t", "all", "-j", job_id, "-o", "%T")

    def live_jobs(self, text: str) -> list[str]:
        """The jobs that wait or run and have this text in their name or folder."""
        jobs = self.command("squeue", "-h", "-t", "PENDING,RUNNING", "-o", "%i %j %Z").splitlines()
        return [job for job in jobs if text in job]

    def crash(self, node: str) -> None:
        """Takes a node away with all that runs on it, as a power cut would."""
        tasks = proc.marked(f"SLURM_CONF={self.state}/slurm.conf", f"SLURMD_NODENAME={node}")
        parents = {proc.parent(pid) for pid in tasks}
        daemons = [pid for pid in parents if proc.name(pid) == "slurmstepd"]
        slurmd = int((self.state / "run" / f"slurmd.node{node[-1]}.pid").read_text())
        for pid in (slurmd, *daemons, *tasks):
            os.kill(pid, signal.SIGKILL)
        # What the controller would find out by itself when the node has not answered for a while.
        self.command("scontrol", "update", f"nodename={node}", "state=down", "reason=crash")


def wait_until(condition: Callable[[], Any]) -> None:
    """Waits for a condition, up to the patience of these tests."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE:g} s"
        time.sleep(0.1)


class LoggedLines(logging.Handler):
    """What the package logs while this is open, in all threads."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("torchbearer_ddp").addHandler(self)
        return self.lines

    def __exit__(self, *exc: object) -> None:
        logging.getLogger("torchbearer_ddp").removeHandler(self)


def _free_ports() -> int:
    """The first of some neighbouring free ports, which another run of these tests hardly tries."""
    while True:
        first = random.SystemRandom().randrange(10000, 20000)
        sockets = []
        try:
            for port in range(first, first + _PORTS):
                sockets.append(socket.socket())
                sockets[-1].bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
        finally:
            for each in sockets:
                each.close()


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """The cluster, with this process as its login node."""
    needs_slurm()
    # A short path of its own: those of sockets are limited to about 100 characters.
    state = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    running = Cluster(state, _free_ports())
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name in [n for n in os.environ if n.startswith(("SLURM_", "SBATCH_", "SUBMITIT_"))]:
                patch.delenv(name)
            patch.setenv("SLURM_CONF", str(state / "slurm.conf"))
            patch.setenv("PYTHONPATH", str(_ROOT))
            patch.setenv("OMP_NUM_THREADS", "1")
            running.start()
            yield running
    finally:
        left = running.stop()
    assert not left, f"daemons that did not end: {left}"


@pytest.fixture(scope="package")
def uninterrupted(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Future[list[float]]]:
    """The parameters after a run on two nodes with two ranks each that nothing disturbed."""
    folder = tmp_path_factory.mktemp("uninterrupted")

    def parameters() -> list[float]:
        job = submit_slurm(
            train_and_hold,
            args=(str(folder / "checkpoints"),),
            nodes=2,
            tasks_per_node=2,
            folder=folder / "jobs",
            timeout_min=60,
            seed=7,
        )
        results = job.results()
        assert [result["rank"] for result in results] == [0, 1, 2, 3]
        assert len({result["host"] for result in results}) == 2
        assert all(result["parameters"] == results[0]["parameters"] for result in results)
        return results[0]["parameters"]

    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(parameters)
