"""Writing in the background: training goes on meanwhile, and no file is left unfinished."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

_writers: weakref.WeakSet[Writer] = weakref.WeakSet()


def finish_writing() -> None:
    """Waits until every checkpoint under way is written, for programs that call ``os._exit``.

    An ordinary exit waits by itself, as executors do; ``os._exit`` does not.
    """
    for writer in list(_writers):
        writer.wait()


atexit.register(finish_writing)  # for programs that run the exit handlers and then os._exit


def end_idle_threads() -> None:
    """Waits as above, and ends the threads of runs that this thread has made: they have failed."""
    finish_writing()
    for writer in list(_writers):
        if writer.user == threading.get_ident():
            writer.close()


class Writer:
    """Does one job at a time in a thread of its own, and keeps its error until it is taken.

    The thread stays for the next job: starting one costs more than copying a small model. It ends
    with :meth:`close`; a later job starts another.

    Attributes:
        user: The thread that gives the jobs.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self.user = threading.get_ident()
        self._job: Future[None] | None = None
        #: The process that has begun the job: ranks may be forked after this was made.
        self._process = 0
        _writers.add(self)

    @property
    def has_failed(self) -> bool:
        """True if a job has ended with an error that was not taken yet."""
        return self._job is not None and self._job.done() and self._job.exception() is not None

    def start(self, job: Callable[[], None]) -> None:
        """Begins a job, once the one before has ended."""
        self.wait()
        self.user = threading.get_ident()
        if self._executor is None or os.getpid() != self._process:  # or this rank was forked since
            prefix = "torchbearer_ddp-checkpoint"
            self._executor = ThreadPoolExecutor(1, thread_name_prefix=prefix)
        self._job, self._process = self._executor.submit(job), os.getpid()

    def close(self) -> None:
        """Ends the thread, once the job is done; its error can still be taken."""
        self.wait()
        if self._executor is not None and os.getpid() == self._process:
            self._executor.shutdown()
            self._executor = None

    def wait(self) -> None:
        """Waits until nothing is under way."""
        # In a forked child (a worker of a DataLoader) there is no thread, and nothing to wait for.
        if self._job is not None and os.getpid() == self._process:
            wait([self._job])

    def take_error(self) -> BaseException | None:
        """The error of the last job, if it has ended with one; it is handed out once."""
        if self._job is None or not self.has_failed:
            return None
        error, self._job = self._job.exception(), None
        return error
