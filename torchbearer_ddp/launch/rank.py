"""What a rank does: join the group, run the worker, leave, and report to the launcher."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import process
from typing import Any, NoReturn

from torchbearer_ddp import log
from torchbearer_ddp.data import randomness
from torchbearer_ddp.errors import WorkerError
from torchbearer_ddp.group import debug, failures, launcher, membership, stop_request, waiting
from torchbearer_ddp.group.join import abandon, join, join_single, leave
from torchbearer_ddp.group.membership import Member
from torchbearer_ddp.launch import debugger, pickling, signals
from torchbearer_ddp.launch.devices import visible_devices
from torchbearer_ddp.launch.plan import Plan
from torchbearer_ddp.launch.planner import make_plan
from torchbearer_ddp.launch.worker import Task, unpack

#: How long the signal of a child's end may take after its pipe was closed.
_SIGNAL_SECONDS = 0.5


class _Running(threading.local):
    """What this thread runs."""

    worker = False


_running = _Running()


def is_inside_worker() -> bool:
    """True while this thread runs a worker."""
    return _running.worker


class _Script:
    """Whether the script itself is a rank: it joined by itself, or ``run`` has started it."""

    started_by: str | None = None


def script_started_by() -> str | None:
    """What has made the whole script a rank, or None if it is not one."""
    return _Script.started_by


def script_is_a_rank(started_by: str) -> None:
    """From now on the script itself is a rank, and ``run_distributed`` runs the worker on it."""
    _Script.started_by, _running.worker = started_by, False


def run_worker(worker_fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls the worker; meanwhile ``run_distributed`` must not be called."""
    _running.worker = True
    try:
        return worker_fn(*args, **kwargs)
    finally:
        _running.worker = False


def run_rank(
    plan: Plan, index: int, worker_fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """Runs the worker in this process, as the ``index``-th rank of the plan."""
    member = plan.member_at(index)
    with prepared(plan, member):
        try:
            join_group(plan, member)
            result = run_worker(worker_fn, args, kwargs)
        except BaseException as error:
            if isinstance(error, SystemExit) and not error.code:
                leave()  # sys.exit(0): an early end, not a failure
                raise
            if member.world_size > 1:
                signals.hold_back()
            cause = _awaited_cause(error)
            with _no_news_of_children():
                fail(cause)
            if cause is not error:
                raise cause from error
            raise
        leave()
        return result


def _awaited_cause(error: BaseException) -> BaseException:
    """The error of torch's DataLoader if a worker of it has died, where only its pipe was noticed.

    The pipe of a process is closed before its parent gets the signal of its end, and only then
    torch raises, from the handler of the signal.
    """
    # Not active_children(), which would take the worker's exit code away from torch.
    if isinstance(error, ConnectionError | EOFError) and process._children:  # type: ignore[attr-defined]
        try:
            time.sleep(_SIGNAL_SECONDS)
        except RuntimeError as cause:
            return cause
    return error


@contextlib.contextmanager
def _no_news_of_children() -> Iterator[None]:
    """Keeps the handler of a child's end, which may raise, from breaking into a report."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)


def fail(error: BaseException) -> None:
    """Tells the other ranks of this one's failure, and leaves them."""
    if group := membership.current():
        waiting.report_failure(group, error)
    # Without destroy_process_group, which could hang and hide the cause.
    abandon()


@contextlib.contextmanager
def prepared(plan: Plan, member: Member) -> Iterator[None]:
    """What a rank needs besides its group: signals, crash reports, its number in the log."""
    membership.settle()
    log.set_rank(member.rank)
    alone = plan.launcher == "inline"
    if not alone:
        _show_crashes()
    with contextlib.ExitStack() as stack:
        stack.enter_context(signals.handled(plan.grace, *signals.from_slurm()))
        if plan.debug:
            stack.enter_context(debug.reporting(member.rank))
        if not alone:
            stack.enter_context(debugger.offered(member.rank, plan.debug_rank))
        yield


def join_group(plan: Plan, member: Member) -> None:
    """Joins the group, and seeds the random generators alike on every rank."""
    if member.world_size == 1:
        seed = join_single(member)
    else:
        # The launcher holds the store of ranks that it has started, and has opened its port before.
        is_open = plan.serve and plan.launcher == "spawn"
        where = (plan.host, plan.ports)
        serve = plan.serve and not is_open
        seed = join(member, *where, serve=serve, is_open=is_open, prefix=plan.prefix)
    if seed is not None:
        randomness.seed_all(seed)


def _show_crashes() -> None:
    """Makes a crash in native code write the line of Python that it happened in to stderr."""
    if not faulthandler.is_enabled():
        faulthandler.enable(debug.STDERR)


def main(
    index: int, plan: Plan, load: Callable[[], Task], reports: int, *, captured: bool
) -> NoReturn:
    """Runs a started rank to its end, and writes its report to the descriptor ``reports``.

    ``load`` runs the script's module level, if that was not done, and returns the worker.
    """
    rank = plan.member_at(index).rank
    membership.settle()
    launcher.connect(reports)
    if captured:
        _tell_warnings()
    try:
        if plan.member.seed is not None:
            randomness.seed_all(plan.member.seed)  # for the script's module level
        body = _pickled_result(run_rank(plan, index, *load()), rank)
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            body = pickling.dumps(None)
        else:
            with _no_news_of_children():
                report = failures.report_of(error, rank)
                # Not the last message: a checkpoint may still be written in the background.
                launcher.tell(**report)
            # Exit handlers still run, but not the destructors of a group with pending messages.
            failures.exit_now(report["exitcode"])
    signum = stop_request.received()
    launcher.report({"kind": "result", "signal": signum, "bytes": len(body)}, body)
    failures.exit_normally(128 + signum if signum else 0)


def _tell_warnings() -> None:
    """Leaves it to the launcher to show warnings: those of all ranks are shown once."""
    show = warnings.showwarning

    def tell(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: Any = None,
        line: str | None = None,
    ) -> None:
        text = warnings.formatwarning(message, category, filename, lineno, line)
        if file is not None or not launcher.tell("warning", text=text):
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = tell


def run_slurm_rank(settings: Mapping[str, Any], payload: bytes, token: str) -> Any:
    """Runs this process, a task of a Slurm step, as the rank that its environment names."""
    plan = make_plan({**settings, "launcher": "srun"}, os.environ, *visible_devices())
    plan = dataclasses.replace(plan, prefix=f"{plan.prefix}/{token}")
    membership.settle()
    return pickling.on_cpu(run_rank(plan, 0, *unpack(payload)))


def _pickled_result(result: Any, rank: int) -> bytes:
    try:
        return pickling.dumps(result)
    except Exception as error:
        kind = f"{type(result).__module__}.{type(result).__qualname__}"
        raise WorkerError(
            f"Rank {rank} returned a {kind}, which cannot be sent to the launcher ({error}). "
            "Return plain data, such as numbers, lists or tensors.",
            rank=rank,
        ) from error
