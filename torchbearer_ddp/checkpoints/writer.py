"""Writing in the background: training goes on meanwhile, and no file is left undone."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable

_writers: weakref.WeakSet[Writer] = weakref.WeakSet()


def finish_writing() -> None:
    """Waits until every checkpoint under way stands, for those who end the process at once.

    An ordinary exit waits by itself, since the threads are not daemons; ``os._exit`` does not.
    """
    for writer in list(_writers):
        writer.wait()


atexit.register(finish_writing)  # for those who run the exit handlers and then os._exit


class Writer:
    """Does one job at a time in a thread of its own, and keeps its error until it is asked for."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        _writers.add(self)

    @property
    def busy(self) -> bool:
        """True while a job is being done."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """True if a job has ended with an error that nobody has taken yet."""
        return not self.busy and self._error is not None

    def start(self, job: Callable[[], None]) -> None:
        """Begins a job, once the one before has ended.

        Args:
            job: What to do.
        """
        self.wait()
        begun = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(job, begun), name="torchbearer_ddp-checkpoint", daemon=False
        )
        # The thread waits at once, so that the caller goes on without waiting for python's lock.
        self._thread.start()
        begun.set()

    def wait(self) -> None:
        """Waits until nothing is under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def take_error(self) -> Exception | None:
        """The error of the last job, if it has ended with one; it is handed out once."""
        if not self.has_failed:
            return None
        error, self._error = self._error, None
        return error

    def _run(self, job: Callable[[], None], begun: threading.Event) -> None:
        begun.wait()
        try:
            job()
        except Exception as error:
            self._error = error
