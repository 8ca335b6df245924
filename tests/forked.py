"""Scripts, and ranks that can be killed, forked from the server that has imported torch."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from tests.ranks import Process, _context, as_a_user_s
from torchbearer_ddp.data import randomness
from torchbearer_ddp.group import rendezvous
from torchbearer_ddp.group.join import join
from torchbearer_ddp.group.membership import Member


def run_script(path: Path, *arguments: str, timeout: float = 120.0) -> tuple[int | None, str]:
    """Runs a file in its own folder as ``python`` would, but with torch imported already.

    Returns:
        The exit code, None if it was still running, and what the script printed.
    """
    with tempfile.TemporaryFile("w+") as output:
        process = Process(
            target=_script_main, args=(path, arguments, reduction.DupFd(output.fileno()))
        )
        process.start()
        process.join(timeout)
        code = process.exitcode
        if code is None:
            process.kill()
            process.join()
        output.seek(0)
        return code, output.read()


def _script_main(path: Path, arguments: tuple[str, ...], output: Any) -> None:
    as_a_user_s()
    descriptor = output.detach()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(path.parent)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    torch.set_num_threads(1)
    runpy.run_path(str(path), run_name="__main__")


class Killable:
    """Ranks that report their progress and can all be killed at once.

    Args:
        body: Called on each rank with a function; what rank zero passes to it is its progress.
        world_size: The number of ranks.
    """

    def __init__(self, body: Callable[[Callable[[Any], None]], Any], world_size: int) -> None:
        self._store = rendezvous.serve_store("127.0.0.1", 0, 30)
        payload = cloudpickle.dumps(body)
        self._processes = []
        for rank in range(world_size):
            receiver, sender = _context.Pipe(duplex=False)
            member = Member(rank, world_size, rank, world_size, timeout=30, seed=0)
            process = Process(
                target=_killable_main, args=(payload, member, self._store.port, sender)
            )
            process.start()
            sender.close()
            self._processes.append(process)
            if rank == 0:
                self._progress = receiver

    def wait_for(self, reports: int) -> bool:
        """Waits for so many reports of rank zero; False if it ended before."""
        for _ in range(reports):
            if not self._progress.poll(30):
                raise AssertionError("no report within 30 s")
            try:
                report = self._progress.recv()
            except EOFError:
                return False
            if isinstance(report, str):
                raise AssertionError(report)
        return True

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        assert self._processes[0].exitcode == -signal.SIGKILL, "it ended before it was killed"


def _killable_main(payload: bytes, member: Member, port: int, pipe: Connection) -> None:
    try:
        as_a_user_s()
        randomness.seed_all(join(member, "127.0.0.1", port))
        cloudpickle.loads(payload)(pipe.send if member.rank == 0 else lambda report: None)
    except BaseException:
        if member.rank == 0:
            pipe.send(traceback.format_exc())
        os._exit(1)
