"""How the doctor's ranks work together: rank zero asks, every rank answers, all through the store.

No process group is needed: what would keep one from being formed is what the doctor looks for. A
rank that does not answer in its time is passed over from then on.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from torchbearer_ddp import checked
from torchbearer_ddp.errors import LaunchError
from torchbearer_ddp.group import posts, rendezvous, roll_call
from torchbearer_ddp.launch.plan import Plan

#: A store of torch, which only the layer below names.
Store = Any
Task = list[Any]
Work = Callable[..., Any]
#: The task after which a rank ends.
END = "end"
_POLL_SECONDS = 0.02
#: With many ranks the store would be busy with their questions.
_MANY_RANKS = 64
_SLOW_POLL_SECONDS = 0.2
#: What every rank registers: what it has found of its host.
_ENTRY = checked.record({"host": checked.text(), "pid": checked.whole(0)})


def meet(plan: Plan) -> Store:
    """The store of the ranks of a plan, whose rank zero holds it unless its launcher does.

    Raises:
        LaunchError: If it cannot be opened, or is not found within the timeout.
    """
    find = rendezvous.serve if plan.serve else rendezvous.find
    base = find(plan.host, plan.ports, plan.prefix, plan.member.timeout)
    return rendezvous.run_store(base, f"{plan.prefix}/doctor")


class Answering:
    """Does what rank zero asks for, until it says that this is the end.

    Args:
        store: The store, over a connection of its own.
        rank: This rank.
        work: What can be asked for, by name.
        pause: Seconds between two looks into the store.
    """

    def __init__(self, store: Store, rank: int, work: Mapping[str, Work], pause: float) -> None:
        self._store, self._rank, self._work, self._pause = store, rank, work, pause
        #: When the store has answered last.
        self.contact = time.monotonic()

    def run(self) -> Any:
        """Answers until the end; returns what rank zero says then."""
        number = 0
        while True:
            name, *arguments = self._await(f"task/{self._rank}/{number}")
            if name == END:
                self._store.add("left", 1)
                return arguments[0]
            try:
                answer = self._work[name](*arguments)
            except Exception as error:  # whatever it is, rank zero reports it
                answer = {"failed": f"{type(error).__name__}: {error}"}
            self._store.set(f"answer/{self._rank}/{number}", json.dumps(answer))
            number += 1

    def _await(self, key: str) -> Task:
        while not self._store.check([key]):
            self.contact = time.monotonic()
            time.sleep(self._pause)
        self.contact = time.monotonic()
        task: Task = posts.parse(self._store.get(key) or b"[]", key, _task)
        return task


def _task(value: Any, where: str) -> Any:
    """A list that begins with the name of what is asked for."""
    checked.items(checked.anything)(value, where)
    checked.text()(value[0] if value else None, f"{where}[0]")
    return value


def register(store: Store, rank: int, found: Mapping[str, Any]) -> None:
    """Tells rank zero that this rank is here, and what it has found.

    Raises:
        LaunchError: If another process has this rank.
    """
    if taken := roll_call.register(store, rank, found, _ENTRY):
        raise LaunchError(taken)


def pause_of(world_size: int) -> float:
    """Seconds between two looks into the store, longer if many ranks look."""
    return _POLL_SECONDS if world_size <= _MANY_RANKS else _SLOW_POLL_SECONDS


class Asking:
    """Rank zero's side: who is here, and what they answer.

    Args:
        store: The store.
        world_size: The number of ranks that should come.
        deadline: When no more is asked.
    """

    def __init__(self, store: Store, world_size: int, deadline: float) -> None:
        self._store, self._world_size, self.deadline = store, world_size, deadline
        self._asked: dict[int, int] = {}
        #: What each rank has said when it came.
        self.here: dict[int, dict[str, Any]] = {}
        #: Ranks that did not answer, and what they were asked for.
        self.lost: dict[int, str] = {}

    def gather(self, deadline: float) -> None:
        """Waits for the ranks until all are here, or until the deadline."""
        while len(self.here) < self._world_size:
            for rank in range(self._world_size):
                if rank not in self.here and (
                    info := roll_call.registration(self._store, rank, _ENTRY)
                ):
                    self.here[rank] = info
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_SECONDS)

    @property
    def answering(self) -> list[int]:
        """The ranks that are here and have answered so far."""
        return [rank for rank in sorted(self.here) if rank not in self.lost]

    def ask(self, tasks: Mapping[int, Task], seconds: float) -> dict[int, Any]:
        """The answers of some ranks, each to its task, as far as they come in time."""
        tasks = {rank: task for rank, task in tasks.items() if rank in self.answering}
        numbers = {rank: self._asked.get(rank, 0) for rank in tasks}
        for rank, task in tasks.items():
            self._asked[rank] = numbers[rank] + 1
            self._store.set(f"task/{rank}/{numbers[rank]}", json.dumps(task))
        answers: dict[int, Any] = {}
        deadline = min(time.monotonic() + seconds, self.deadline)
        while len(answers) < len(tasks):
            for rank in [each for each in tasks if each not in answers]:
                key = f"answer/{rank}/{numbers[rank]}"
                if self._store.check([key]):
                    answers[rank] = posts.parse(self._store.get(key), key, checked.anything)
            if time.monotonic() > deadline:
                self.lost |= {r: str(tasks[r][0]) for r in tasks if r not in answers}
                break
            time.sleep(_POLL_SECONDS / 4)
        return answers

    def end(self, verdict: Any) -> None:
        """Tells every rank that this is the end, and waits for a moment until they know."""
        for rank in self.answering:
            self._store.set(f"task/{rank}/{self._asked.get(rank, 0)}", json.dumps([END, verdict]))
        with contextlib.suppress(RuntimeError):
            count = len(self.answering)
            rendezvous.await_count(self._store, "left", count, rendezvous.LEAVE_SECONDS)
