"""Choose a launcher, run the ranks, collect their results."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from torchbearer_ddp import process_group, rendezvous, signals, waiting, worker
from torchbearer_ddp.arguments import Plan, make_plan, merge, read_flags, read_options
from torchbearer_ddp.errors import DistributedError, LaunchError
from torchbearer_ddp.supervision import Supervisor

#: Tells the runs of one process apart where they share a store.
_runs = itertools.count()
#: How long a launcher tries to tell the store of another host why its rank died.
_WORD_SECONDS = 2.0
#: Marks an error with how this process ends if nobody catches it. A hook that held the error would
#: keep its traceback, and the store of the failed run in it, for as long as the process lives.
_ENDING = "_torchbearer_ddp_ending"
#: How much later than its cause a failure is dated that only follows from it.
_FOLLOWS_SECONDS = 2


def run_distributed(
    worker_fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    options: argparse.Namespace | None = None,
    **overrides: Any,
) -> list[Any]:
    """Starts the ranks, runs the worker on each, and returns the results.

    Who is to be started is read, in this order, from the arguments and flags, from torchrun's
    environment, from the environment of a Slurm step; otherwise it is this process alone.

    Example: ::

        >>> from torchbearer_ddp import rank, run_distributed
        >>> run_distributed(lambda x: x + rank(), args=(10,), nproc_per_node=2)
        [10, 11]

    Args:
        worker_fn: The function to run; lambdas, closures and functions of a script or notebook
            work as well.
        args: Its arguments.
        kwargs: Its keyword arguments.
        options: What a parser with :func:`add_arguments` parsed; without it the known flags are
            read from ``sys.argv``.
        overrides: Values that win over flags: ``launcher``, ``nproc_per_node``, ``nnodes``,
            ``node_rank``, ``world_size``, ``rank``, ``host``, ``port``, ``backend``, ``device``,
            ``timeout``, ``seed``, ``grace``, ``debug``, ``slurm``.

    Returns:
        The results of the ranks that this call started, in the order of their ranks.

    Raises:
        ValueError: If arguments or flags do not fit together.
        LaunchError: If the ranks could not be started, or did not find each other.
        WorkerError: If a rank failed; its message is the first cause.
        SystemExit: If a signal stopped the ranks; the code is 128 and the signal's number.
    """
    if worker.inside():
        raise LaunchError(
            "run_distributed was called inside a worker that run_distributed itself has started. "
            "Call it once, outside of the worker."
        )
    try:
        plan = _plan(options, overrides)
    except (ValueError, LaunchError) as error:
        _show_only_the_message(error, 2)
        raise
    task = (worker_fn, tuple(args), kwargs or {})
    if plan.launcher == "slurm":
        return _submit(plan, task)
    if plan.first_rank == 0:
        print(plan.describe(_threads(plan)), file=sys.stderr, flush=True)
    if plan.launcher != "spawn":
        return [_run_here(plan, task)]
    try:
        return _spawn(plan, task)
    except DistributedError as error:
        _show_only_the_message(error, 1)
        raise


def _plan(options: argparse.Namespace | None, overrides: dict[str, Any]) -> Plan:
    if options is None:
        submits = overrides.get("launcher") == "slurm"
        flags = read_flags(sys.argv[1:], slurm=submits)
    else:
        flags = read_options(options)
    plan = make_plan(merge(flags, overrides), os.environ, torch.cuda.device_count())
    return dataclasses.replace(plan, prefix=f"{plan.prefix}/{next(_runs)}")


def _submit(plan: Plan, task: tuple[Any, ...]) -> list[Any]:
    """Submits the ranks and waits for them; submitit is only imported if it is used."""
    from torchbearer_ddp import slurm

    worker_fn, args, kwargs = task
    try:
        return slurm.submit_and_follow(worker_fn, args, kwargs, plan)
    except ValueError as error:
        _show_only_the_message(error, 2)
        raise
    except DistributedError as error:
        _show_only_the_message(error, 1)
        raise


def _threads(plan: Plan) -> int:
    """The CPU threads of each rank: the user's choice, or an equal share of the cores."""
    if plan.world_size == 1 and plan.launcher != "spawn":
        return torch.get_num_threads()
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    if chosen.isdigit():
        return int(chosen)
    return max(1, process_group.usable_cores() // max(1, plan.local_world_size))


def _spawn(plan: Plan, task: tuple[Any, ...]) -> list[Any]:
    """Starts the ranks of this host, which meet in a store that this process holds or reaches."""
    base = None
    if plan.serve:
        base = rendezvous.serve_store(plan.host, plan.port, plan.timeout)
        plan = dataclasses.replace(plan, port=base.port)
    if plan.seed is None:
        # The seed that the script has set, if it has, is the one that a single process would use.
        plan = dataclasses.replace(plan, seed=torch.initial_seed())

    def tell_the_others(rank: int, text: str) -> None:
        with contextlib.suppress(LaunchError):  # the store's host is gone, and so are its ranks
            store = base or rendezvous.connect(plan.host, plan.port, _WORD_SECONDS)
            waiting.leave_word(rendezvous.run_store(store, plan.prefix), rank, text)

    threads = None if "OMP_NUM_THREADS" in os.environ else _threads(plan)
    seconds = rendezvous.ABANDON_SECONDS
    try:
        results = Supervisor(plan, threads, tell_the_others).run(task)
        seconds = rendezvous.LEAVE_SECONDS
        return results
    finally:
        if base is not None and plan.world_size > plan.local_world_size:
            store = rendezvous.run_store(base, plan.prefix)
            rendezvous.await_departures(store, plan.world_size, seconds)


def _run_here(plan: Plan, task: tuple[Any, ...]) -> Any:
    """Runs the one rank that this process is."""
    try:
        result = worker.run_rank(plan, 0, *task)
    except KeyboardInterrupt:
        if plan.world_size == 1:
            raise
        raise SystemExit(128 + signal.SIGINT) from None
    except SystemExit as error:
        if plan.world_size > 1 and error.code and not signals.received():
            text = worker.explain(error, plan.first_rank)
            sys.stderr.write(f"torchbearer_ddp: {text}\n")  # Python itself says nothing of it
            _tell_torchrun(plan, error, text)
        raise
    except Exception as error:
        if plan.world_size > 1:
            rank = plan.first_rank
            _show_only_the_message(error, 1, worker.headline(error, rank), certainly=True)
            _tell_torchrun(plan, error, worker.explain(error, rank))
        raise
    if signum := signals.received():
        raise SystemExit(128 + signum)
    return result


def _tell_torchrun(plan: Plan, error: BaseException, text: str) -> None:
    """Leaves the failure where torchrun looks for it, so that its summary names the first cause.

    Args:
        plan: The plan of this rank.
        error: What this rank raised.
        text: What happened.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if plan.launcher != "torchrun" or not path:
        return
    # It takes the earliest failure for the cause and counts whole seconds: what only follows from
    # another failure must not be as early.
    when = int(time.time()) + (_FOLLOWS_SECONDS if getattr(error, "secondary", False) else 0)
    details = {"py_callstack": text, "timestamp": str(when)}
    report = {"message": {"message": text, "extraInfo": details}}
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps(report))


def _show_only_the_message(
    error: Exception, exitcode: int, text: str | None = None, *, certainly: bool = False
) -> None:
    """If nobody catches this error, the terminal shows what the user has to know and no more.

    The traceback of this process would bury the cause, which is another rank's or in the flags.

    Args:
        error: The error that is about to be raised.
        exitcode: The exit code of the process, if the error is not caught.
        text: What to show, if not the error's own message; the traceback of a user's error follows.
        certainly: True to skip what could hang: the end of a group with pending messages.
    """
    setattr(error, _ENDING, (exitcode, text or str(error), certainly))
    previous = sys.excepthook
    if hasattr(previous, _ENDING):
        return

    def hook(kind: type[BaseException], found: BaseException, trace: TracebackType | None) -> None:
        if not hasattr(found, _ENDING):
            previous(kind, found, trace)
            return
        code, shown, at_once = getattr(found, _ENDING)
        sys.stderr.write(f"torchbearer_ddp: {shown}\n")  # one write: ranks may share a terminal
        if not isinstance(found, DistributedError) and code != 2:
            own = worker.users_part(trace)
            previous(kind, found.with_traceback(own), own)
        if at_once:
            worker.exit_now(code)
        raise SystemExit(code)

    setattr(hook, _ENDING, True)
    sys.excepthook = hook
