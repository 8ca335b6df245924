"""Turns a test body into one that runs on several real ranks.

Example: ::

    @ranks(2)
    def test_everybody_is_here():
        assert collectives.all_gather(collectives.rank(), 'ranks') == [0, 1]

The ranks are forked from a server that has imported torch already (a launch takes a tenth of a
second), meet in a store that the test process holds on a free loopback port, and are ended at the
deadline, whatever they do. Fixtures are passed on to every rank, so they must be plain values.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import popen_forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle

import tests.stand_ins.nccl  # noqa: F401 (every rank knows its backend)
from torchbearer_ddp.data import randomness
from torchbearer_ddp.group import membership, rendezvous, stop_request
from torchbearer_ddp.group.join import join, leave
from torchbearer_ddp.group.membership import Member

_context = multiprocessing.get_context("forkserver")
# The first optimizer of a process imports torch._dynamo, which takes longer than most tests.
_context.set_forkserver_preload(
    ["torch", "torch._dynamo", "torchbearer", "torchbearer_ddp", "tests.ranks", "tests.programs"]
)


class _ExitCode(popen_forkserver.Popen):
    """The end of a process, for threads: each start polls all others, and it can be read once."""

    _reading = threading.Lock()

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if flag != os.WNOHANG:
            wait([self.sentinel])
        with self._reading:
            return super().poll()


class Process(_context.Process):
    """A forked process that one thread may wait for while others start theirs."""

    _Popen = staticmethod(_ExitCode)


#: How long the others may take after one has failed, and a rank to end after its result.
_GRACE_SECONDS = 20.0
#: What a pool sends to ranks that are to end.
_END = b"end"


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
    backend: str = "gloo",
) -> list[Any]:
    """Runs a function on every rank and returns what they returned, by rank."""
    store = rendezvous.serve_store("127.0.0.1", 0, group_timeout)
    payload = cloudpickle.dumps((body, args, kwargs or {}))
    processes, pipes = [], []
    for rank in range(world_size):
        receiver, sender = _context.Pipe(duplex=False)
        member = Member(
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            local_world_size=world_size,
            timeout=group_timeout,
            seed=seed,
            backend=backend,
        )
        process = Process(
            target=_rank_main, args=(payload, member, store.port, sender), name=f"rank {rank}"
        )
        process.start()
        sender.close()
        processes.append(process)
        pipes.append(receiver)
    try:
        return _collect(pipes, time.monotonic() + timeout, timeout)
    finally:
        for process in processes:
            process.join(0 if sys.exc_info()[0] else _GRACE_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()


class RankPool:
    """Ranks that run one function after another, which saves a launch for each.

    After a function has failed, or has left the group broken, the next one gets new ranks.

    Args:
        world_size: The number of ranks.
        prepare: Called on every rank before each function.
        group_timeout: The timeout of the group that the ranks join.
        backend: The backend of that group.
        device: ``cpu``, or ``cuda`` for a GPU of its own for each rank.
    """

    def __init__(
        self,
        world_size: int,
        prepare: Callable[[], None] = lambda: None,
        *,
        group_timeout: float = 30.0,
        backend: str = "gloo",
        device: str = "cpu",
    ) -> None:
        self._backend = backend
        self._world_size = world_size
        self._prepare = prepare
        self._device = device
        self._group_timeout = group_timeout
        self._store: Any = None
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        body: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout: float = 60.0,
    ) -> list[Any]:
        """Runs a function on every rank and returns what they returned, by rank."""
        if not self._pipes:
            self._start()
        payload = cloudpickle.dumps((self._prepare, body, args, kwargs or {}))
        try:
            for pipe in self._pipes:
                pipe.send_bytes(payload)
            found = _collect(self._pipes, time.monotonic() + timeout, timeout)
        except BaseException:
            self.close(seconds=0)
            raise
        if any(broken for _, broken in found):
            self.close()
        return [result for result, _ in found]

    def close(self, seconds: float = _GRACE_SECONDS) -> None:
        """Ends the ranks, which have so many seconds for it."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # a rank that has ended
                # To close it is not enough: a process that was forked from this one, as the pool of
                # torch's compiler is, has it too.
                pipe.send_bytes(_END)
            pipe.close()
        for process in self._processes:
            process.join(seconds)
            if process.is_alive():
                process.kill()
                process.join()
        self._store, self._processes, self._pipes = None, [], []

    def _start(self) -> None:
        self._store = rendezvous.serve_store("127.0.0.1", 0, self._group_timeout)
        for rank in range(self._world_size):
            ours, theirs = _context.Pipe()
            member = Member(
                rank,
                self._world_size,
                rank,
                self._world_size,
                device=self._device,
                backend=self._backend,
                timeout=self._group_timeout,
                seed=0,
            )
            process = Process(
                target=_serve, args=(member, self._store.port, theirs), name=f"rank {rank}"
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def as_a_user_s() -> None:
    """Workers of loaders start here as in ranks of users.

    A process of the tests' fork server would start a fork server of its own for them, which imports
    torch: 2.3 s of a core in each rank.
    """
    multiprocessing.set_start_method(None, force=True)


def _serve(member: Member, port: int, pipe: Connection) -> None:
    try:
        as_a_user_s()
        seed = join(member, "127.0.0.1", port)
        group = membership.current()
        assert group is not None
        with contextlib.suppress(EOFError):  # the pool is closed
            while (payload := pipe.recv_bytes()) != _END:
                prepare, body, args, kwargs = cloudpickle.loads(payload)
                group.past_first_step = False
                group.runs = 0
                stop_request.reset()
                randomness.seed_all(seed)
                prepare()
                result = body(*args, **kwargs)
                pipe.send((True, cloudpickle.dumps((result, group.broken))))
        leave()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        pipe.close()
        os._exit(1)


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
                succeeded, value = False, "the process ended without a word"
            (results if succeeded else errors)[rank] = value
        if errors:
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    if errors:
        raise AssertionError("\n".join(f"rank {r} failed:\n{e}" for r, e in errors.items()))
    return [cloudpickle.loads(results[rank]) for rank in range(len(pipes))]


def _rank_main(payload: bytes, member: Member, port: int, pipe: Connection) -> None:
    try:
        as_a_user_s()
        randomness.seed_all(join(member, "127.0.0.1", port))
        body, args, kwargs = cloudpickle.loads(payload)
        result = cloudpickle.dumps(body(*args, **kwargs))
        leave()
        pipe.send((True, result))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        pipe.close()
        os._exit(1)
