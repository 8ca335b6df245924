"""Starts the ranks of this host, watches them, and finds the first cause of a failure."""

from __future__ import annotations

import functools
import selectors
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import cloudpickle

from torchbearer_ddp.errors import LaunchError
from torchbearer_ddp.group import failures
from torchbearer_ddp.group.stop_request import ECHO_SECONDS
from torchbearer_ddp.launch import forked_rank, starting
from torchbearer_ddp.launch.ending import how_to_continue
from torchbearer_ddp.launch.meeting import Meeting
from torchbearer_ddp.launch.messages import Messages
from torchbearer_ddp.launch.notebook import is_notebook
from torchbearer_ddp.launch.output import Output, is_captured
from torchbearer_ddp.launch.plan import Plan
from torchbearer_ddp.launch.restarts import Failure
from torchbearer_ddp.launch.signals import from_slurm
from torchbearer_ddp.launch.started_rank import StartedRank
from torchbearer_ddp.launch.streams import RankStream
from torchbearer_ddp.launch.worker import Task
from torchbearer_ddp.log import logger

_TICK_SECONDS = 0.05
#: While nobody reads what is shown.
_FULL_SECONDS = 0.01
#: After a failure the others have this long to notice and to report what they know.
_NOTICE_SECONDS = 3.0
#: Between two ranks that write their stacks into one terminal.
_STACK_SECONDS = 0.05
#: If the ranks have not stopped so long after a signal, a line says what is waited for.
_QUIET_SECONDS = 5.0
#: How long the last lines may take after a signal.
_LAST_SECONDS = 2.0


class Supervisor:
    """Runs the ranks of a plan on this host.

    Args:
        plan: The plan; the ranks connect to the store at its host and port.
        environment: The environment variables of every rank.
        meeting: Where the ranks meet. If one ends without a report, what happened to it is recorded
            there, so that ranks on other hosts learn of it.
    """

    def __init__(self, plan: Plan, environment: Mapping[str, str], meeting: Meeting) -> None:
        self._plan, self._environment, self._meeting = plan, environment, meeting
        #: Why this attempt has failed, once it has; None if it was stopping for a signal.
        self.failure: Failure | None = None
        self._output = Output(plan)
        self._messages = Messages(plan, self._output)
        self._ranks: list[StartedRank] = []
        #: Those that have ended, in that order.
        self._ended: list[StartedRank] = []
        #: Those whose error report has been acted on.
        self._handled: list[StartedRank] = []
        self._signal: int | None = None
        self._signal_at = 0.0
        #: True once the user knows that the ranks take long to stop.
        self._has_said_wait = False
        #: True after a second signal.
        self._is_urgent = False
        self._kill_at: float | None = None
        #: Until then a rank that is writing a checkpoint is left to it.
        self._write_until = 0.0

    @property
    def checkpoint(self) -> str | None:
        """The newest checkpoint that the ranks have written."""
        return self._messages.checkpoint

    @property
    def _running(self) -> list[StartedRank]:
        return [rank for rank in self._ranks if rank not in self._ended]

    def run(self, worker: Task) -> list[Any]:
        """Runs the worker (function, arguments, keyword arguments) on every rank.

        Raises:
            WorkerError: If a rank failed; it carries the first cause.
            SystemExit: If a signal stopped the ranks.
        """
        with ExitStack() as stack:
            handlers = forked_rank.handlers()
            stack.enter_context(self._signals_forwarded())
            starter = stack.enter_context(self._starter(worker, handlers))
            selector = stack.enter_context(selectors.DefaultSelector())
            stack.callback(self._close_output)  # after the ranks have ended
            for index in range(self._plan.member.local_world_size):
                try:
                    rank = self._start(index, starter)
                except LaunchError:
                    if self._signal is None:
                        raise
                    break  # the signal is why the run ends
                stack.callback(rank.close)
                selector.register(rank.reader, selectors.EVENT_READ, rank)
                for stream in rank.streams:
                    selector.register(stream.reader, selectors.EVENT_READ, stream)
                self._ranks.append(rank)
                if self._signal is not None:  # it came while the ranks were being started
                    self._end_all(self._signal, self._plan.grace)
                    break
            starter.finish()
            self._meeting.begin()
            while self._running:
                self._watch(selector)
        return self._results()

    def _starter(
        self, worker: Task, handlers: Mapping[int, Any]
    ) -> AbstractContextManager[starting.Starter]:
        own, environment = self._meeting.descriptors(), self._environment
        return starting.chosen(
            self._plan, environment, worker, own, handlers, lambda: self._signal is not None
        )

    def _start(self, index: int, starter: starting.Starter) -> StartedRank:
        number = self._plan.member.rank + index
        streams = self._output.open_for(number) if is_captured(self._plan) else ()
        with starting.refusals_explained(f"Rank {number}"):
            return StartedRank(number, functools.partial(starter.start, index), streams)

    def _read(self, selector: selectors.BaseSelector) -> None:
        """Takes what the ranks have sent and printed."""
        for key, _ in selector.select(_TICK_SECONDS):
            if isinstance(key.data, RankStream):
                if not self._output.take(key.data):
                    time.sleep(_FULL_SECONDS)  # it stays in the pipe, and the rank waits
                if not key.data.is_open:
                    selector.unregister(key.fd)
                continue
            key.data.read()
            if key.data.has_reported:
                selector.unregister(key.fd)
        for rank in self._ranks:
            self._messages.take(rank)
        self._messages.tick()
        self._output.tick()

    def _close_output(self) -> None:
        """Acts on the last messages, and shows the rest of what was printed."""
        for rank in self._ranks:
            self._messages.take(rank)
        self._messages.close()
        now = time.monotonic()
        # After a signal nobody may be left to read what is shown.
        self._output.close(
            lambda: self._signal is not None and time.monotonic() - now > _LAST_SECONDS
        )

    def _watch(self, selector: selectors.BaseSelector) -> None:
        self._read(selector)
        for rank in self._running:
            if rank.has_ended():
                self._ended.append(rank)
                if rank.is_failure and rank.distance <= 1:
                    self._output.show_kept(rank.rank)
                if rank.is_failure and rank.distance == 1:
                    self._meeting.publish_failure(self._plan.prefix, rank.rank, rank.what())
                    self._end_all(signal.SIGTERM, _NOTICE_SECONDS)
        for rank in self._ranks:
            # Act on the report itself; the reporting process may never exit.
            if rank.has_failed and rank not in self._handled:
                self._handled.append(rank)
                if not rank.ended_by_us or rank.distance == 0:
                    self._end_all(signal.SIGTERM, _NOTICE_SECONDS)
        if self._kill_at is None and all(rank.has_reported for rank in self._running):
            # All results are here; a thread that never ends must not keep the run from ending.
            self._kill_at = time.monotonic() + self._plan.grace
        self._say_wait()
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            self._kill_running()

    def _say_wait(self) -> None:
        """Tells the user, once, why a run that got a signal has not ended yet."""
        grace = self._plan.grace
        if self._signal is None or self._has_said_wait or not self._running:
            return
        if time.monotonic() - self._signal_at > min(_QUIET_SECONDS, grace / 2):
            self._has_said_wait = True
            self._output.say(
                f"{signal.Signals(self._signal).name}: {_named(self._running)} may still stop and "
                f"save, for {grace:g} s (--grace) in all; a second signal ends the run sooner"
            )

    def _kill_running(self) -> None:
        """Kills what still runs; a checkpoint that is being written has the grace time."""
        for rank in self._running:
            late = time.monotonic() > self._write_until
            if late or not failures.is_writing(rank.process.pid):
                rank.ended_by_us = True
                rank.kill()

    def _end_all(self, signum: int, seconds: float) -> None:
        """Signals every rank that has not failed, and kills what still runs after ``seconds``."""
        if self._kill_at is None:
            self._write_until = time.monotonic() + self._plan.grace
        deadline = time.monotonic() + seconds
        self._kill_at = deadline if self._kill_at is None else min(deadline, self._kill_at)
        ranks = [rank for rank in self._running if not rank.has_failed]
        if self._plan.debug:
            self._show_stacks(ranks)  # before they end
        for rank in ranks:
            rank.ended_by_us = True
            rank.send(signum)

    def _show_stacks(self, ranks: list[StartedRank]) -> None:
        for rank in ranks:
            rank.send(signal.SIGUSR1)
            time.sleep(_STACK_SECONDS)

    @contextmanager
    def _signals_forwarded(self) -> Iterator[None]:
        """Passes the launcher's signals on to the ranks; a third one kills them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def forward(signum: int, frame: Any) -> None:
            now = time.monotonic()
            if signum == signal.SIGUSR1:
                self._show_stacks(self._running)
            elif self._signal is None:
                self._signal, self._signal_at = signum, now
                self._end_all(signum, self._plan.grace)
            elif now - self._signal_at > ECHO_SECONDS:
                self._signal_at = now
                if self._is_urgent:
                    self._kill_at = self._write_until = now
                self._is_urgent = True
                for rank in self._running:
                    rank.send(signum)

        signums = [signal.SIGTERM, signal.SIGINT, *from_slurm()]
        signums += [signal.SIGUSR1] * self._plan.debug
        previous = {signum: signal.signal(signum, forward) for signum in signums}
        previous[signal.SIGWINCH] = signal.signal(
            signal.SIGWINCH, lambda signum, frame: self._output.resize()
        )
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    def _results(self) -> list[Any]:
        """The results of all ranks; raises the first cause if there is one."""
        # After a signal the ranks end one by one: that one lost another is then not a cause.
        farthest = 0 if self._signal else 3
        causes = [r for r in self._ended if r.is_failure and r.distance <= farthest]
        # Among equals the first that reported, which is not always the first to end.
        reported = {rank.rank: number for number, rank in enumerate(self._handled)}
        order = lambda r: (r.distance, reported.get(r.rank, len(reported)))  # noqa: E731
        first = min(causes, key=order, default=None)
        if first is not None and not first.signal:
            # What goes wrong while ranks stop for a signal is no reason to start them again.
            if self._signal is None and not any(
                r.signal and not r.ended_by_us for r in self._ended
            ):
                self.failure = self._failure_of(first)
            raise first.error()
        stopped = first or next((r for r in self._ended if r.signal), None)
        if self._signal is not None:
            receiver, signum = "the launcher", self._signal
        elif stopped is not None and stopped.signal:
            receiver, signum = f"rank {stopped.rank}", stopped.signal
        else:
            return [cloudpickle.loads(rank.result) for rank in self._ranks]
        command = () if is_notebook() else sys.orig_argv
        logger.warning(
            f"{receiver} got {signal.Signals(signum).name}, all ranks have ended{self._too_late()}"
            f"{how_to_continue(self.checkpoint, command)}"
        )
        raise SystemExit(128 + signum)

    def _failure_of(self, first: StartedRank) -> Failure:
        """Why this attempt has failed, by the rank that failed first."""
        # One that was killed does not say at which step, but those that noticed do.
        steps = [first.report.get("step"), *(rank.report.get("step") for rank in self._ended)]
        step = next((each for each in steps if each is not None), None)
        return Failure(first.what().splitlines()[0].partition(":")[0], step)

    def _too_late(self) -> str:
        """Which ranks the end of the grace time has ended, for the last line."""
        late = [rank for rank in self._ranks if not rank.report]
        waited = time.monotonic() - self._signal_at
        if self._signal is None or self._is_urgent or not late or waited < self._plan.grace:
            return ""
        return f"; {_named(late)} had not stopped after {self._plan.grace:g} s (--grace)"


def _named(ranks: Sequence[StartedRank]) -> str:
    """Some ranks, by their numbers."""
    numbers = ", ".join(str(rank.rank) for rank in ranks)
    return f"rank{'s' * (len(ranks) > 1)} {numbers}"
