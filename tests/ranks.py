"""Runs a test body on several real ranks.

Example: ::

    @ranks(2)
    def test_every_rank_has_joined():
        assert collectives.all_gather(collectives.rank(), 'ranks') == [0, 1]

The ranks are forked from a server that has imported torch already (a launch takes a tenth of a
second), meet in a store that the test process holds on a free loopback port, and are ended at the
deadline, whatever they do. Fixtures are passed on to every rank, so they must be plain values.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from torchbearer_ddp.data import randomness
from torchbearer_ddp.group import rendezvous
from torchbearer_ddp.group.join import join, leave
from torchbearer_ddp.group.membership import Member

_context = multiprocessing.get_context("forkserver")
# The first optimizer of a process imports torch._dynamo, which takes longer than most tests.
_context.set_forkserver_preload(
    ["torch", "torch._dynamo", "torchbearer", "torchbearer_ddp", "tests.ranks", "tests.programs"]
)
#: How long the others may take after one has failed, and a rank to end after its result.
_GRACE_SECONDS = 20.0


def ranks(
    world_size: int, *, timeout: float = 60.0, group_timeout: float = 30.0
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Runs the decorated test on every one of ``world_size`` ranks.

    Args:
        world_size: The number of ranks.
        timeout: Seconds until the test has failed.
        group_timeout: The timeout of the group that the ranks join.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(*args: Any, **kwargs: Any) -> None:
            run_ranks(body, world_size, args, kwargs, timeout=timeout, group_timeout=group_timeout)

        return test

    return decorate


def run_ranks(
    body: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    timeout: float = 60.0,
    group_timeout: float = 30.0,
    seed: int | None = 0,
) -> list[Any]:
    """Runs a function on every rank and returns what they returned, by rank."""
    store = rendezvous.serve_store("127.0.0.1", 0, group_timeout)
    payload = cloudpickle.dumps((body, args, kwargs or {}))
    processes, pipes = _start(_rank_main, payload, world_size, store.port, group_timeout, seed)
    try:
        return _collect(pipes, time.monotonic() + timeout, timeout)
    finally:
        for process in processes:
            process.join(0 if sys.exc_info()[0] else _GRACE_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()


def run_script(path: Path, *arguments: str, timeout: float = 120.0) -> tuple[int | None, str]:
    """Runs a file as ``python`` would, in a forked process and the file's folder.

    Returns:
        The exit code, None if it was still running, and what the script printed.
    """
    with tempfile.TemporaryFile("w+") as output:
        process = _context.Process(
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
    descriptor = output.detach()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(path.parent)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    torch.set_num_threads(1)
    runpy.run_path(str(path), run_name="__main__")


def _start(
    main: Callable[[bytes, Member, int, Connection], None],
    payload: bytes,
    world_size: int,
    port: int,
    timeout: float,
    seed: int | None,
) -> tuple[list[Any], list[Connection]]:
    """Forks the ranks, each with one end of a pipe; the other ends are returned with them."""
    processes, pipes = [], []
    for rank in range(world_size):
        receiver, sender = _context.Pipe(duplex=False)
        member = Member(
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            local_world_size=world_size,
            timeout=timeout,
            seed=seed,
        )
        process = _context.Process(
            target=main, args=(payload, member, port, sender), name=f"rank {rank}"
        )
        process.start()
        sender.close()
        processes.append(process)
        pipes.append(receiver)
    return processes, pipes


def _collect(pipes: list[Connection], deadline: float, timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    while len(results) + len(errors) < len(pipes):
        open_pipes = {p: r for r, p in enumerate(pipes) if r not in results and r not in errors}
        ready = wait(list(open_pipes), max(0.0, deadline - time.monotonic()))
        if not ready:
            silent = sorted(open_pipes.values())
            text = "\n".join(f"rank {r}:\n{e}" for r, e in errors.items())
            raise AssertionError(f"ranks {silent} did not end within {timeout:g} s\n{text}")
        for pipe in ready:
            rank = open_pipes[pipe]
            try:
                succeeded, value = pipe.recv()
            except EOFError:
                succeeded, value = False, "the process ended without a result"
            (results if succeeded else errors)[rank] = value
        if errors:
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    if errors:
        raise AssertionError("\n".join(f"rank {r} failed:\n{e}" for r, e in errors.items()))
    return [cloudpickle.loads(results[rank]) for rank in range(len(pipes))]


def _rank_main(payload: bytes, member: Member, port: int, pipe: Connection) -> None:
    try:
        randomness.seed_all(join(member, "127.0.0.1", port))
        body, args, kwargs = cloudpickle.loads(payload)
        result = cloudpickle.dumps(body(*args, **kwargs))
        leave()
        pipe.send((True, result))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        pipe.close()
        os._exit(1)


class Killable:
    """Ranks that report their progress and can all be killed at once.

    Args:
        body: Called on each rank with a function; what rank zero passes to it is its progress.
        world_size: The number of ranks.
    """

    def __init__(self, body: Callable[[Callable[[Any], None]], Any], world_size: int) -> None:
        self._store = rendezvous.serve_store("127.0.0.1", 0, 30)
        payload = cloudpickle.dumps(body)
        self._processes, pipes = _start(
            _killable_main, payload, world_size, self._store.port, 30, 0
        )
        self._progress = pipes[0]

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
        randomness.seed_all(join(member, "127.0.0.1", port))
        cloudpickle.loads(payload)(pipe.send if member.rank == 0 else lambda report: None)
    except BaseException:
        if member.rank == 0:
            pipe.send(traceback.format_exc())
        os._exit(1)
