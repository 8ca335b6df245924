"""A real Slurm cluster on this machine: started once per test run, stopped with all its daemons."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.requirements import needs_slurm
from tests.slurm import training
from torchbearer_ddp.launch.submission import submit_slurm

_HERE = Path(__file__).parent
_ROOT = _HERE.parent.parent
#: The controller, two nodes, the accounting.
_PORTS = 4
PATIENCE = 120.0


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
            env={**os.environ, "PORT": str(self._port)},
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
        return [pid for pid in pids if _runs(pid)]

    def command(self, *words: str) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout.strip()

    def state_of(self, job_id: str) -> str:
        return self.command("squeue", "-h", "-t", "all", "-j", job_id, "-o", "%T")

    def live_jobs(self) -> str:
        """The jobs that wait or run; an earlier test's may still be completing."""
        return self.command("squeue", "-h", "-t", "PENDING,RUNNING")

    def crash(self, node: str) -> None:
        """Takes a node away with all that runs on it, as a power cut would."""
        marks = {f"SLURM_CONF={self.state}/slurm.conf".encode(), f"SLURMD_NODENAME={node}".encode()}
        tasks = [pid for pid in _pids() if marks <= set(_environment(pid).split(b"\0"))]
        daemons = {_parent(pid) for pid in tasks if _name(_parent(pid)) == "slurmstepd"}
        slurmd = int((self.state / "run" / f"slurmd.node{node[-1]}.pid").read_text())
        for pid in (slurmd, *daemons, *tasks):
            os.kill(pid, signal.SIGKILL)
        # What the controller would find out by itself when the node has not answered for a while.
        self.command("scontrol", "update", f"nodename={node}", "state=down", "reason=crash")


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().split("(", 1)[1].rsplit(")", 1)[0]


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


@pytest.fixture(scope="session")
def _running() -> Iterator[Cluster]:
    needs_slurm()
    # A short path of its own: those of sockets are limited to about 100 characters.
    state = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    cluster = Cluster(state, _free_ports())
    try:
        cluster.start()
        yield cluster
    finally:
        left = cluster.stop()
    assert not left, f"daemons that did not end: {left}"


@pytest.fixture
def cluster(_running: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster, with this process as its login node; no job of a test outlives it."""
    for name in [n for n in os.environ if n.startswith(("SLURM_", "SBATCH_", "SUBMITIT_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_CONF", str(_running.state / "slurm.conf"))
    monkeypatch.setenv("PYTHONPATH", str(_ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield _running
    _running.command("scancel", "--me")


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool]], None]:
    """Waits for a condition, with patience but not for ever."""

    def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.1)

    return wait


@pytest.fixture
def script(tmp_path: Path, cluster: Cluster) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a Python script of the text given, with flags, in a folder of its own."""
    started = []

    def start(text: str, *flags: str, merge: bool = False) -> subprocess.Popen[str]:
        path = tmp_path / "script.py"
        path.write_text(text)
        process = subprocess.Popen(
            [sys.executable, str(path), *flags],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merge else subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


_reference: list[list[float]] = []


@pytest.fixture
def uninterrupted(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The parameters after a run on two nodes with two ranks each that nothing disturbed."""
    if not _reference:
        folder = tmp_path_factory.mktemp("uninterrupted")
        job = submit_slurm(
            training.train,
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
        _reference.append(results[0]["parameters"])
    return _reference[0]
