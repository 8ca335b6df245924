"""``--max-restarts``: after a failure the ranks of this host start again, from their checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torchbearer_ddp.errors import WorkerError
from torchbearer_ddp.group import launcher
from torchbearer_ddp.log import logger

#: A failure that comes back so often at the same step will come back again.
_SAME_FAILURES = 3


@dataclass(frozen=True)
class Failure:
    """Why an attempt failed.

    Attributes:
        kind: What happened to the first rank that failed, in a few words.
        step: The training step, from 1; None if there was none yet.
    """

    kind: str
    step: int | None

    @property
    def place(self) -> str:
        """When it happened."""
        return "before the first step" if self.step is None else f"at step {self.step}"


class Attempt(Protocol):
    """One start of the ranks; see :class:`torchbearer_ddp.launch.supervisor.Supervisor`."""

    failure: Failure | None

    @property
    def checkpoint(self) -> str | None:
        """The newest checkpoint that was written."""

    def run(self, worker: Any) -> list[Any]:
        """Runs the worker on every rank."""


class Restarts:
    """Starts the ranks until they succeed, or until it is no use.

    Args:
        most: How often the ranks start again at most.
        start: Makes the attempt of this number, from 0, with these additional variables.
    """

    def __init__(self, most: int, start: Callable[[int, dict[str, str]], Attempt]) -> None:
        self._most, self._start = most, start
        self._failures: list[Failure] = []
        self._lines: list[str] = []
        self._checkpoint: str | None = None

    def run(self, worker: Any) -> list[Any]:
        """The results of the attempt that succeeds.

        Raises:
            WorkerError: The first cause of the last attempt, with one line on each attempt.
        """
        while True:
            number = len(self._failures)
            variables = {launcher.RESTARTS_VARIABLE: str(number)} if number else {}
            if self._checkpoint is not None:
                variables[launcher.RESUME_VARIABLE] = "1"
            attempt = self._start(number, variables)
            try:
                return attempt.run(worker)
            except WorkerError as error:
                if attempt.failure is None or not self._most:
                    raise
                self._checkpoint = attempt.checkpoint or self._checkpoint
                self._note(attempt.failure, error)
                if (why := self._why_not_again()) is not None:
                    raise self._summary(error, why) from error

    def _note(self, failure: Failure, error: WorkerError) -> None:
        self._failures.append(failure)
        text = str(error)
        self._lines.append(f"{failure.place}: {text.splitlines()[0]}")
        if len(self._failures) > self._most or self._why_not_again():
            return
        source = "from the beginning: no checkpoint was saved"
        if self._checkpoint is not None:
            source = f"from {self._checkpoint}"
        logger.warning(
            f"attempt {len(self._failures)} failed {failure.place}. {text}\n"
            f"The ranks start again {source} (restart {len(self._failures)} of at most "
            f"{self._most})"
        )

    def _why_not_again(self) -> str | None:
        """Why there is no further attempt, or None."""
        failure, times = Counter(self._failures).most_common(1)[0]
        if times >= _SAME_FAILURES:
            return (
                f"It fails {failure.place} each time, so the ranks do not start again. "
                "Correct the cause."
            )
        if len(self._failures) > self._most:
            return f"--max-restarts is {self._most}: the ranks do not start again."
        return None

    def _summary(self, error: WorkerError, why: str) -> WorkerError:
        lines = [f"  attempt {n}: {line}" for n, line in enumerate(self._lines, 1)]
        return WorkerError(
            "\n".join([str(error), "", *lines, why]),
            rank=error.rank,
            host=error.host,
            exitcode=error.exitcode,
        )
