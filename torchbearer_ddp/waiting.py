"""Waiting for other ranks: bounded, and able to say who is missing and why.

Every exchange between ranks has a number, the same on every rank as long as they are in step. A
rank that waits longer than a second posts its number and what it waits for on a board in the
store. If another rank has the same number but waits for something else, the ranks have parted
ways: whoever sees it first writes the verdict, and every rank raises that same error. At the
timeout, the ranks that have not posted are the ones that did not answer; one that is behind but
goes on posting waits for somebody itself.
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

# torch.distributed has these names as well, but its types do not say so.
from torch._C._distributed_c10d import Store

from torchbearer_ddp import debug
from torchbearer_ddp.errors import DesyncError, DistributedError, LaunchError, PeerLost
from torchbearer_ddp.process_group import FIRST_STEP_TIMEOUTS, Group
from torchbearer_ddp.rendezvous import in_background, in_time, is_gone

_T = TypeVar("_T")

#: How long a wait goes on before it looks around; short against any timeout, long against a step.
POLL_SECONDS = 1.0
#: How long the cause of a broken connection may take to appear in the store.
_CAUSE_SECONDS = 1.5
_CAUSE_POLL_SECONDS = 0.1
#: How long the store may take to answer; torch would wait for ever where the network is cut.
_STORE_SECONDS = 2.0


class Wait:
    """One wait for the other ranks.

    Args:
        group: The group whose ranks are waited for.
        activity: What is exchanged, in words: the same on every rank that is in step.
    """

    def __init__(self, group: Group, activity: str) -> None:
        group.sequence += 1
        debug.note_exchange(activity)
        self._group = group
        self._sequence = group.sequence
        self._activity = activity
        self._started = time.monotonic()
        self._looks = 0
        #: What each rank that is behind posted last, and when that was new.
        self._behind: dict[int, tuple[bytes, float]] = {}

    def poll(self) -> None:
        """Looks around; to be called about every :data:`POLL_SECONDS` of waiting.

        Raises:
            PeerLost: If another rank has failed, or did not answer within the timeout.
            DesyncError: If another rank waits for something else.
        """
        deadline = max(time.monotonic(), self._started + self.timeout) + _STORE_SECONDS
        try:
            in_time(self._look_around, deadline, "the store does not answer")
        except DistributedError as error:
            self._group.broken = True
            debug.report("a wait failed")
            if not isinstance(error, LaunchError):
                raise
            raise self._lost_store(ended=error.__cause__ is not None) from error

    def _lost_store(self, *, ended: bool) -> PeerLost:
        holder, waiter = self._names([0]), f"rank {self._group.member.rank}"
        return PeerLost(
            f"Rank {holder} has ended, or the launcher there: the store that it held is gone "
            f"while {waiter} waited for {self._activity}. Look at its output for the cause."
            if ended
            else f"Rank {holder} did not answer within {self.timeout:g} s: it, or the launcher "
            f"there, holds the store that {waiter} needs while it waits for {self._activity}. It "
            "is frozen, or the network is cut: look at its output.",
            rank=0,
            host=self._group.hosts[0],
        )

    def _look_around(self) -> None:
        self._post()
        self._raise_verdict()
        posts = self._posts()
        if any(self._parted(post) for post in posts.values()):
            self._judge(DesyncError, self._parted_message(posts))
        if time.monotonic() - self._started > self.timeout:
            self._judge(PeerLost, self._silent_message(posts))

    @property
    def timeout(self) -> float:
        """Seconds this wait may take."""
        return self._group.member.timeout * (1 if self._group.warm else FIRST_STEP_TIMEOUTS)

    def broken(self, error: Exception, lost: int | None = None) -> DistributedError:
        """The error to raise when the transport fails: the other rank's own cause, if it left one.

        Args:
            error: What the transport said.
            lost: The rank that is gone, where the transport knows.
        """
        self._group.broken = True
        deadline = time.monotonic() + _CAUSE_SECONDS + _STORE_SECONDS
        silent: list[int] = []
        try:
            silent = in_time(self._await_cause, deadline, "the store does not answer")
        except DistributedError as known:
            if not isinstance(known, LaunchError):
                return known
            if self._group.member.rank != 0:
                silent = [0]  # it, or the launcher there, held the store
        if lost is not None:
            silent = [lost]
        suspects = f"rank {self._names(silent)}" if silent else "another rank"
        return PeerLost(
            f"No word from {suspects} any more: it was killed, its host is down, or the network is "
            f"cut. Look at that rank's output. ({self._me()} lost contact during {self._activity}; "
            f"the transport said: {str(error).splitlines()[0][:200]})",
            rank=silent[0] if silent else None,
            host=self._group.hosts[silent[0]] if silent else None,
        )

    def _await_cause(self) -> list[int]:
        """Raises the cause as soon as it is known, else returns the ranks that gave no word."""
        deadline = time.monotonic() + _CAUSE_SECONDS
        silent: list[int] = []
        while time.monotonic() < deadline:
            # First of all: a process that dies closes its connections one by one, and if it held
            # the store, that one is not to be asked any more.
            time.sleep(_CAUSE_POLL_SECONDS)
            self._post()
            self._raise_verdict()
            posts = self._posts()
            silent = [r for r in range(self._group.member.world_size) if r not in posts]
        return silent

    # The board.

    def _post(self) -> None:
        if is_gone(self._group.store):
            raise ConnectionResetError
        self._looks += 1
        entry = {"sequence": self._sequence, "activity": self._activity, "look": self._looks}
        self._group.store.set(f"board/{self._group.member.rank}", json.dumps(entry))

    def _posts(self) -> dict[int, dict[str, Any]]:
        """Who waits, for this exchange, a later one, or still for an earlier one."""
        store, posts = self._group.store, {}
        for rank in range(self._group.member.world_size):
            if store.check([f"board/{rank}"]):
                post = store.get(f"board/{rank}")
                entry = json.loads(post)
                if entry["sequence"] >= self._sequence or self._is_new(rank, post):
                    posts[rank] = entry
        return posts

    def _is_new(self, rank: int, post: bytes) -> bool:
        """True if a rank has posted again since this wait began, and not long ago."""
        now = time.monotonic()
        before, since = self._behind.get(rank, (post, -math.inf))
        if post != before:
            since = now
        self._behind[rank] = post, since
        return now - since < 3 * POLL_SECONDS

    def _parted(self, post: dict[str, Any]) -> bool:
        return bool(post["sequence"] == self._sequence and post["activity"] != self._activity)

    def _parted_message(self, posts: dict[int, dict[str, Any]]) -> str:
        return (
            f"The ranks have parted ways, each waits for something else: {_waits(posts)}. Every "
            "rank must take the same steps: look for a loop, a stop or a callback that only some "
            "ranks have."
        )

    def _silent_message(self, posts: dict[int, dict[str, Any]]) -> str:
        silent = [r for r in range(self._group.member.world_size) if r not in posts]
        if not silent:
            return (
                f"Every rank still waits after {self.timeout:g} s: {_waits(posts)}. What one of "
                "them sent has not reached the other: look at the network between their hosts."
            )
        return (
            f"Rank {self._names(silent)} did not answer within {self.timeout:g} s while the others "
            f"waited for {self._activity}. It is frozen, overloaded or stuck: look at its output, "
            "or give more time with --timeout."
        )

    # The verdict: the first one written is the one that every rank raises.

    def _judge(self, kind: type[DistributedError], message: str) -> None:
        verdict = json.dumps({"kind": kind.__name__, "message": message})
        self._group.store.compare_set("verdict", "", verdict)
        self._raise_verdict()

    def _raise_verdict(self) -> None:
        store = self._group.store
        if store.check(["failure"]):
            failure = json.loads(store.get("failure"))
            mark = f"(Rank {self._group.member.rank} only stopped with it.)"
            # On its own host the rank itself shows the traceback, and once is enough.
            trace = failure["trace"] if failure["host"] != socket.gethostname() else ""
            raise PeerLost(
                f"Rank {failure['rank']} on {failure['host']} {failure['what']} {mark}"
                + (f"\n\n{trace}" if trace else ""),
                rank=failure["rank"],
                host=failure["host"],
            )
        if store.check(["verdict"]):
            verdict = json.loads(store.get("verdict"))
            kind = {"DesyncError": DesyncError, "PeerLost": PeerLost}[verdict["kind"]]
            raise kind(verdict["message"])

    def _me(self) -> str:
        return f"Rank {self._group.member.rank} on {socket.gethostname()}"

    def _names(self, ranks: list[int]) -> str:
        return ", ".join(f"{r} on {self._group.hosts[r]}" for r in ranks) or "?"


def _waits(posts: dict[int, dict[str, Any]]) -> str:
    return "; ".join(f"rank {r}: {post['activity']}" for r, post in sorted(posts.items()))


def wait_for(work: Any, wait: Wait) -> None:
    """Waits for a work of torch.distributed.

    Args:
        work: What ``async_op=True`` gave.
        wait: The wait it belongs to.
    """
    interval = datetime.timedelta(seconds=min(POLL_SECONDS, wait.timeout))
    while True:
        try:
            work.wait(interval)
            return
        except RuntimeError as error:
            if work.is_completed():  # it failed, and did not only take longer than the interval
                raise wait.broken(error) from error
        wait.poll()


def complete(action: Callable[[], _T], wait: Wait) -> _T:
    """Runs an action that waits for other ranks in a way of its own.

    Args:
        action: What is run, in another thread; it is left alone if the wait ends first.
        wait: The wait it belongs to.
    """
    future = in_background(action)
    while not futures.wait([future], min(POLL_SECONDS, wait.timeout)).done:
        wait.poll()
    try:
        return future.result()
    except RuntimeError as error:
        raise wait.broken(error) from error


def report_failure(group: Group, error: BaseException, what: str, trace: str) -> None:
    """Leaves this rank's failure in the store, where the others find why their waits broke.

    Args:
        group: The group this rank belongs to.
        error: What this rank raised.
        what: What happened, in words that follow the rank's name.
        trace: The traceback.
    """
    if isinstance(error, DistributedError) and error.secondary:
        return
    leave_word(group.store, group.member.rank, what, trace)


def leave_word(store: Store, rank: int, what: str, trace: str = "") -> None:
    """Says in the store why a rank of this host failed; the first word there counts.

    Args:
        store: The run's part of the store.
        rank: The rank that failed.
        what: What happened, in words that follow the rank's name.
        trace: Its traceback, if it has one.
    """
    report = {"rank": rank, "host": socket.gethostname(), "what": what, "trace": trace}

    def leave() -> None:
        if not is_gone(store):
            store.compare_set("failure", "", json.dumps(report))

    with contextlib.suppress(LaunchError):  # the store may have gone first, or be out of reach
        in_time(leave, time.monotonic() + _STORE_SECONDS, "the store does not answer")
