"""Waiting for other ranks: never longer than the timeout, with an error that names the cause.

Each exchange has a sequence number, equal on all ranks while they are in step. A rank that has
waited longer than ``POLL_SECONDS`` publishes its number and activity to the store. Ranks with the
same number and different activities are out of step (``DesyncError``). A rank that has published
nothing by the timeout is unresponsive (``PeerLost``); one that keeps publishing an older number is
itself waiting and is not blamed. The first conclusion is recorded in the store and raised by every
rank.

Only a few ranks, the judges, read what all have published, each with one request; the others read
conclusions. If no judge has come to one some time after the timeout, every rank reads for itself.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import socket
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any, TypeVar

import torch
import torch.distributed as dist

# torch.distributed exports these names as well, but its type hints lack them.
from torch._C._distributed_c10d import Store

from torchbearer_ddp import checked
from torchbearer_ddp.errors import DesyncError, DistributedError, LaunchError, PeerLost
from torchbearer_ddp.group import board, debug, debugging, failures, posts
from torchbearer_ddp.group.bounded import in_background, in_time
from torchbearer_ddp.group.membership import FIRST_STEP_TIMEOUTS, Group
from torchbearer_ddp.group.place import users_place
from torchbearer_ddp.group.rendezvous import farewells, is_gone

_T = TypeVar("_T")

#: How long a wait lasts before it reads the store: shorter than any timeout, longer than a step.
POLL_SECONDS = 1.0
#: How long the cause of a broken connection may take to appear in the store.
_CAUSE_SECONDS = 1.5
_CAUSE_POLL_SECONDS = 0.1
#: How long the store may take to answer; torch would wait forever if the network is cut.
_STORE_SECONDS = 2.0
#: How long a device is left alone between two looks at what it has done.
_SHORTEST_SECONDS, _LONGEST_SECONDS = 20e-6, 1e-3
_NO_ANSWER = "the store does not answer"
#: A rank that is no judge reads the board itself if after so many looks no judge has concluded.
_JUDGES_LOOKS = 3
_LOST = checked.items(checked.whole(0))


class Wait:
    """One wait for the other ranks.

    Args:
        group: The group to wait for.
        activity: What is exchanged, for messages: equal on every rank that is in step.

    Attributes:
        sequence: The number of the exchange.
    """

    def __init__(self, group: Group, activity: str) -> None:
        group.sequence += 1
        debug.note_exchange(activity)
        self._group = group
        self.sequence = group.sequence
        self.activity = activity
        self._started = time.monotonic()
        self._polls = 0
        self._last_poll = self._last_answer = -math.inf
        self._pace = board.pace(group.member.rank, group.member.world_size)
        #: Where the user's code waits, see :func:`users_place`.
        self._place = ""
        #: The last entry of each rank that is behind, and when that entry was new.
        self._behind: dict[int, tuple[dict[str, Any], float]] = {}

    @property
    def timeout(self) -> float:
        """Seconds this wait may take."""
        factor = 1 if self._group.past_first_step else FIRST_STEP_TIMEOUTS
        return self._group.member.timeout * factor

    def poll(self) -> None:
        """Publishes this wait and reads those of other ranks; call it every :data:`POLL_SECONDS`.

        Raises:
            PeerLost: If another rank has failed, or is unresponsive at the timeout.
            DesyncError: If another rank waits for something else.
        """
        now = time.monotonic()
        must_conclude = self._pace.is_judge and now - self._started > self.timeout
        if max(POLL_SECONDS, now - self._last_poll) < self._pace.pause and not must_conclude:
            return  # many ranks: the store could not answer all of them every second
        self._last_poll = now
        deadline = max(now, self._started + self.timeout) + _STORE_SECONDS + self._pace.grace
        self._place = users_place()
        try:
            self._ask(self._compare_with_others, deadline)
        except DistributedError as error:
            self._group.broken = True
            debug.report("a wait failed")
            if isinstance(error, LaunchError):
                raise self._store_lost(ended=error.__cause__ is not None) from error
            raise

    def connection_error(self, error: Exception, lost: int | None = None) -> DistributedError:
        """The error to raise when the transport fails: the failed rank's own, if it recorded one.

        One of this rank's device, such as a failed assertion there, or of its loader is the first
        cause itself.

        ``lost`` is the rank that has ended, if the transport knows it.
        """
        self._group.broken = True
        if isinstance(error, torch.AcceleratorError) or failures.tells_of_a_dead_worker(error):
            raise error
        self._place = users_place()
        longer = self._pace.pause + self._pace.grace
        deadline = time.monotonic() + _CAUSE_SECONDS + _STORE_SECONDS + longer
        try:
            silent = self._ask(self._await_cause, deadline)
        except LaunchError:
            # Rank 0, or the launcher on its host, held the store.
            silent = [0] if self._group.member.rank != 0 else []
        except DistributedError as known:
            return known
        if lost is not None:
            silent = [lost]
        suspects = f"rank {self._names(silent)}" if silent else "another rank"
        return PeerLost(
            f"Lost connection to {suspects}. It was killed, its host went down, or the network "
            f"failed. See that rank's output. (Rank {self._group.member.rank} on "
            f"{socket.gethostname()} lost contact during {self.activity}; the transport reported: "
            f"{str(error).splitlines()[0][:200]})",
            rank=silent[0] if silent else None,
            host=self._group.hosts[silent[0]] if silent else None,
        )

    def _ask(self, action: Callable[[], _T], deadline: float) -> _T:
        """Runs what asks the store; one that answers is not lost, however slow it is."""
        late = lambda: self._last_answer + _STORE_SECONDS + self._pace.grace  # noqa: E731
        return in_time(action, deadline, _NO_ANSWER, extended=late)

    def _answered(self) -> None:
        self._last_answer = time.monotonic()

    def _store_lost(self, *, ended: bool) -> PeerLost:
        holder, waiter = self._names([0]), f"rank {self._group.member.rank}"
        return PeerLost(
            f"Rank {holder} or its launcher has ended: the store that it held is gone while "
            f"{waiter} waited for {self.activity}. See its output for the cause."
            if ended
            else f"Rank {holder} did not answer within {self.timeout:g} s: it or its launcher "
            f"holds the store that {waiter} needs while it waits for {self.activity}. It is "
            "frozen, or the network is cut. See its output.",
            rank=0,
            host=self._group.hosts[0],
        )

    def _compare_with_others(self) -> None:
        self._publish()
        self._raise_conclusion()
        if debugging.holder.found(self._group.store, self._group.member.rank):
            self._started = time.monotonic()
            return
        late = time.monotonic() - self._started - self.timeout
        if not self._pace.is_judge and late < _JUDGES_LOOKS * max(self._pace.pause, POLL_SECONDS):
            return
        entries = self._entries()
        if any(self._is_out_of_step(entry) for entry in entries.values()):
            self._record_conclusion(DesyncError, board.out_of_step(entries))
        if late > 0:
            self._record_conclusion(PeerLost, self._unresponsive_message(entries))

    def _await_cause(self) -> list[int]:
        """Raises the cause as soon as it is recorded, else returns the silent ranks."""
        deadline = time.monotonic() + _CAUSE_SECONDS + self._pace.pause
        entries: dict[int, dict[str, Any]] = {}
        while time.monotonic() < deadline:
            # Sleep first: a process that ends closes its connections one by one, and if it held
            # the store, the store must not be used any more.
            time.sleep(max(_CAUSE_POLL_SECONDS, self._pace.pause / 4))
            self._publish()
            self._raise_conclusion()
            if self._pace.is_judge:
                entries = self._entries()
        store, everyone = self._group.store, range(self._group.member.world_size)
        if len(everyone) <= board.JUDGES:
            return [rank for rank in everyone if rank not in entries]
        # Of many ranks the first to find out tells the others.
        if (found := posts.read(store, "lost", _LOST)) is None:
            entries = self._entries()
            silent = [rank for rank in everyone if rank not in entries]
            found = posts.first(store, "lost", silent, _LOST)
        return [rank for rank in found if rank in everyone]

    # What each waiting rank publishes.

    def _publish(self) -> None:
        if is_gone(self._group.store):
            raise ConnectionResetError
        self._polls += 1
        entry = {"sequence": self.sequence, "activity": self.activity, "poll": self._polls}
        self._group.store.set(f"waiting/{self._group.member.rank}", json.dumps(entry))

    def _entries(self) -> dict[int, dict[str, Any]]:
        """The entries of ranks that wait, for this exchange, a later or an earlier one."""
        return {
            rank: entry
            for rank, entry in board.read(self._group, self._answered).items()
            if entry["sequence"] >= self.sequence or self._is_recent(rank, entry)
        }

    def _is_recent(self, rank: int, entry: dict[str, Any]) -> bool:
        """True if a rank has published something new during this wait, and recently."""
        now = time.monotonic()
        before, since = self._behind.get(rank, (entry, -math.inf))
        self._behind[rank] = entry, now if entry != before else since
        return now - self._behind[rank][1] < 3 * max(self._pace.pause, POLL_SECONDS)

    def _is_out_of_step(self, entry: dict[str, Any]) -> bool:
        return bool(entry["sequence"] == self.sequence and entry["activity"] != self.activity)

    def _unresponsive_message(self, entries: dict[int, dict[str, Any]]) -> str:
        silent = [r for r in range(self._group.member.world_size) if r not in entries]
        if not silent:
            return (
                f"Every rank still waits after {self.timeout:g} s: {board.activities(entries)}. "
                "What one of them sent has not reached the other. Check the network between them."
            )
        return (
            f"Rank {self._names(silent)} did not answer within {self.timeout:g} s while the others "
            f"waited for {self.activity}. It is frozen, overloaded or stuck. See its output, or "
            "allow more time with --timeout."
        )

    # The conclusion: the first one recorded is the one that every rank raises.

    def _record_conclusion(self, kind: type[DistributedError], message: str) -> None:
        conclusion = json.dumps({"kind": kind.__name__, "message": message})
        self._group.store.compare_set("conclusion", "", conclusion)
        self._raise_conclusion()

    def _raise_conclusion(self) -> None:
        board.raise_recorded(self._group, self._answered)
        if self._pace.is_judge or self._polls > _JUDGES_LOOKS:
            self._raise_if_left()
            self._answered()

    def _raise_if_left(self) -> None:
        """Raises if a rank that this exchange needs has left the group."""
        left = sorted(farewells(self._group.store), key=lambda each: int(each["rank"]))
        gone = {each["rank"]: each["why"] for each in left if each["sequence"] < self.sequence}
        if gone:
            ranks, why = ", ".join(map(str, gone)), next(iter(gone.values()))
            place = self._place or self.activity
            message = (
                f"Rank {ranks} has already {why} while rank {self._group.member.rank} is in "
                f"{place}. Call it on every rank."
            )
            self._record_conclusion(DesyncError, message)

    def _names(self, ranks: list[int]) -> str:
        return board.names(ranks, self._group.hosts)


#: Waits for a work object of torch.distributed.
Waiter = Callable[[Any, Wait], None]


def waiter(channel: Any) -> Waiter:
    """How to wait for what a channel does: only gloo survives a wait with a timeout."""
    return wait_for if dist.get_backend(channel) == "gloo" else poll_for


def wait_for(work: Any, wait: Wait) -> None:
    """Waits for a work object of gloo, as ``async_op=True`` returns."""
    interval = datetime.timedelta(seconds=min(POLL_SECONDS, wait.timeout))
    while True:
        try:
            work.wait(interval)
            return
        except RuntimeError as error:
            if work.is_completed():  # it failed, and did not only take longer than the interval
                raise wait.connection_error(error) from error
        wait.poll()


def poll_for(work: Any, wait: Wait) -> None:
    """Waits for a work object of any backend.

    With a timeout NCCL's ``wait`` would abort the communicator; without one it returns before the
    GPU is done, and the next copy to the host would block, for ever if a rank is dead.
    """
    try:
        poll_until(work.is_completed, wait)
        work.wait()  # orders the streams, and raises if it failed
    except DistributedError:
        raise
    except RuntimeError as error:
        raise wait.connection_error(error) from error


def poll_until(is_done: Callable[[], bool], wait: Wait) -> None:
    """Waits until something is done on the device; looks after the other ranks meanwhile."""
    interval, look = _SHORTEST_SECONDS, time.monotonic() + min(POLL_SECONDS, wait.timeout)
    while not is_done():
        time.sleep(interval)
        interval = min(1.5 * interval, _LONGEST_SECONDS)
        if time.monotonic() > look:
            wait.poll()
            look = time.monotonic() + min(POLL_SECONDS, wait.timeout)


def complete(action: Callable[[], _T], wait: Wait) -> _T:
    """Runs a blocking action in another thread, which is left running if the wait fails first."""
    future = in_background(action)
    while not futures.wait([future], min(POLL_SECONDS, wait.timeout)).done:
        wait.poll()
    try:
        return future.result()
    except RuntimeError as error:
        raise wait.connection_error(error) from error


def report_failure(group: Group, error: BaseException) -> None:
    """Records this rank's failure in the store, unless another rank's failure has caused it."""
    if not failures.is_secondary(error):
        trace = failures.users_traceback(error)
        record_failure(group.store, group.member.rank, failures.summary(error), trace)


def record_failure(store: Store, rank: int, what: str, trace: str = "") -> None:
    """Records in the store why a rank of this host failed; only the first record is kept."""
    report = {"rank": rank, "host": socket.gethostname(), "what": what, "trace": trace}

    def record() -> None:
        if not is_gone(store):
            store.compare_set("failure", "", json.dumps(report))

    with contextlib.suppress(LaunchError):  # the store may be closed or unreachable
        in_time(record, time.monotonic() + _STORE_SECONDS, _NO_ANSWER)
