"""The order of the tests, and checks that they leave nothing behind."""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest

from tests import proc, warm_python

pytest_plugins = ["tests.concurrency"]

#: Cheap ones first, so that a simple mistake is found at once; those that mostly wait not last,
#: where nothing else would use the cores.
_ORDER = (
    "data", "metrics", "group", "scale", "gradients", "transports", "checkpoints", "fuzz",
    "callbacks", "tests", "slurm", "launch", "faults", "commands", "projects", "pairs", "gpu",
)  # fmt: skip
_MARK = "TORCHBEARER_DDP_TEST_RUN"
_shared_before = pytest.StashKey[set[str]]()
_GRACE_SECONDS = 15.0
_SEGMENTS = ("torchbearer_ddp", "torch_", "sem.", "psm_")
_VARIABLES = (
    "CUDA_", "GLOO_", "LOCAL_", "MASTER_", "NCCL_", "OMP_", "RANK", "SLURM", "SUBMITIT",
    "TORCHBEARER_DDP", "TORCHELASTIC", "WORLD_SIZE",
)  # fmt: skip


def pytest_configure() -> None:
    # In the background of a script Ctrl-C is ignored, and what the tests start would inherit that.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Shares out files, whose tests use the same ranks; all tests of Slurm use one cluster."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return "tests/slurm" if path.startswith("tests/slurm/") else path

    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _ORDER.index(item.path.parent.name))


@pytest.fixture(scope="session", autouse=True)
def _no_process_stays_behind() -> Iterator[None]:
    """After the last test no process of the run is left."""
    os.environ[_MARK] = uuid.uuid4().hex
    if "tests.ranks" in sys.modules:
        # Here, where Python finds these tests: packages have folders of that name too, and before
        # Python 3.11 the server looks in the folder in which a test happens to start it.
        forkserver.ensure_running()
    yield
    warm_python.close()
    deadline = time.monotonic() + _GRACE_SECONDS
    while (left := _left_behind(os.environ[_MARK])) and time.monotonic() < deadline:
        time.sleep(0.1)
    del os.environ[_MARK]
    assert not left, f"processes are left behind: {left}"


def _shares_tests(config: pytest.Config) -> bool:
    """True in a process that runs some of the tests for another one."""
    return hasattr(config, "workerinput")


def pytest_sessionstart(session: pytest.Session) -> None:
    session.stash[_shared_before] = _shared_memory()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """After the last test no shared memory is left; what runs beside this one may have some."""
    if _shares_tests(session.config):
        return
    new, deadline = _shared_memory() - session.stash[_shared_before], time.monotonic()
    while (new := _unused(new & _shared_memory())) and time.monotonic() < deadline + _GRACE_SECONDS:
        time.sleep(0.1)
    assert not new, f"shared memory is left behind: {new}"


@pytest.fixture(autouse=True)
def _environment_stays_as_it_is() -> Iterator[None]:
    before = _environment()
    yield
    changed = {k for k in before.keys() | _environment() if before.get(k) != _environment().get(k)}
    assert not changed, f"the test has changed the environment: {changed}"


def _environment() -> dict[str, str]:
    """What launchers and ranks read; packages set others of their own when they are imported."""
    return {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}


def _shared_memory() -> set[str]:
    """Segments and semaphores of ours, torch's and Python's; other programs have their own."""
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(_SEGMENTS)}


def _unused(names: set[str]) -> set[str]:
    """Those that no process uses: another program on this machine may have made some since."""
    return {name for name in names if not proc.is_mapped_by_any(name)}


def _left_behind(mark: str) -> dict[int, str]:
    """The processes of this test run, but for this one and the servers that it keeps."""
    servers = {
        os.getpid(),
        forkserver._forkserver._forkserver_pid,
        resource_tracker._resource_tracker._pid,
    }
    pids = set(proc.marked(f"{_MARK}={mark}")) - servers
    return {pid: line[:200] for pid in pids if (line := proc.command(pid))}
