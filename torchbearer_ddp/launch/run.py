"""``run_distributed``: chooses a launcher, runs the ranks and collects their results."""

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

from torchbearer_ddp.errors import DistributedError, LaunchError
from torchbearer_ddp.group import failures, rendezvous, stop_request, waiting
from torchbearer_ddp.group.join import cores_per_rank
from torchbearer_ddp.launch import rank as rank_process
from torchbearer_ddp.launch.flags import merge, read_flags, read_options
from torchbearer_ddp.launch.plan import Plan
from torchbearer_ddp.launch.planner import make_plan
from torchbearer_ddp.launch.submission import submit_and_follow
from torchbearer_ddp.launch.supervisor import Supervisor
from torchbearer_ddp.log import logger

#: Separates the runs of one process that share a store.
_runs = itertools.count()
#: How long a launcher tries to record in the store of another host why its rank died.
_PUBLISH_SECONDS = 2.0
#: Marks an error with how this process ends if it is not caught. A hook that held the error itself
#: would keep its traceback, and the store of the failed run in it, as long as the process lives.
_ENDING = "_torchbearer_ddp_ending"
#: How much later a failure that another one caused is dated.
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

    Which ranks to start is read from the arguments and flags, else from torchrun's environment,
    else from the environment of a Slurm step; otherwise the worker runs in this process alone.

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
        overrides: Values that take precedence over flags: ``launcher``, ``nproc_per_node``,
            ``nnodes``, ``node_rank``, ``world_size``, ``rank``, ``host``, ``port``, ``backend``,
            ``device``, ``timeout``, ``seed``, ``grace``, ``debug``, ``slurm``.

    Returns:
        The results of the ranks that this call started, in the order of their ranks.

    Raises:
        ValueError: If arguments or flags do not fit together.
        LaunchError: If the ranks could not be started, or did not find each other.
        WorkerError: If a rank failed; its message is the first cause.
        SystemExit: If a signal stopped the ranks; the code is 128 plus the signal's number.
    """
    if rank_process.is_inside_worker():
        raise LaunchError(
            "run_distributed was called inside a worker that run_distributed itself has started. "
            "Call it once, outside of the worker."
        )
    task = (worker_fn, tuple(args), kwargs or {})
    plan = _plan(options, overrides)
    if plan.launcher not in ("slurm", "spawn"):
        return [_run_here(plan, task)]
    try:
        return submit_and_follow(plan, task) if plan.launcher == "slurm" else _spawn(plan, task)
    except (ValueError, DistributedError) as error:
        exit_with_message(error, 2 if isinstance(error, ValueError) else 1)
        raise


def _plan(options: argparse.Namespace | None, overrides: dict[str, Any]) -> Plan:
    """The plan of this launch; a mistake in it ends a script with exit code 2."""
    try:
        if options is None:
            flags = read_flags(sys.argv[1:], slurm=overrides.get("launcher") == "slurm")
        else:
            flags = read_options(options)
        plan = make_plan(merge(flags, overrides), os.environ, torch.cuda.device_count())
    except (ValueError, LaunchError) as error:
        exit_with_message(error, 2)
        raise
    return dataclasses.replace(plan, prefix=f"{plan.prefix}/{next(_runs)}")


def _threads(plan: Plan) -> int:
    """The CPU threads of each rank: the user's choice, or an equal share of the cores."""
    if plan.member.world_size == 1 and plan.launcher != "spawn":
        return torch.get_num_threads()
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    return int(chosen) if chosen.isdigit() else cores_per_rank(plan.member)


def _spawn(plan: Plan, task: tuple[Any, ...]) -> list[Any]:
    """Starts the ranks of this host, which meet in a store that this process holds or reaches."""
    _announce(plan)
    base = None
    if plan.serve:
        base = rendezvous.serve_store(plan.host, plan.ports[0], plan.member.timeout)
        plan = dataclasses.replace(plan, ports=(base.port,))
    if plan.member.seed is None:
        # The seed that the script has set, if any, is the one that a single process would use.
        plan = plan.with_member(seed=torch.initial_seed())

    def publish_failure(rank: int, text: str) -> None:
        with contextlib.suppress(LaunchError):  # the store's host is gone, and so are its ranks
            store = base or rendezvous.connect(plan.host, plan.ports[0], _PUBLISH_SECONDS)
            waiting.record_failure(rendezvous.run_store(store, plan.prefix), rank, text)

    threads = None if "OMP_NUM_THREADS" in os.environ else _threads(plan)
    seconds = rendezvous.ABANDON_SECONDS
    try:
        results = Supervisor(plan, threads, publish_failure).run(task)
        seconds = rendezvous.LEAVE_SECONDS
        return results
    finally:
        if base is not None and plan.member.world_size > plan.member.local_world_size:
            store = rendezvous.run_store(base, plan.prefix)
            rendezvous.await_departures(store, plan.member.world_size, seconds)


def _run_here(plan: Plan, task: tuple[Any, ...]) -> Any:
    """Runs the one rank that this process is."""
    _announce(plan)
    rank, alone = plan.member.rank, plan.member.world_size == 1
    try:
        result = rank_process.run_rank(plan, 0, *task)
    except KeyboardInterrupt:
        if alone:
            raise
        raise SystemExit(128 + signal.SIGINT) from None
    except (Exception, SystemExit) as error:
        stops = isinstance(error, SystemExit) and (not error.code or stop_request.received())
        if not alone and not stops:
            text = failures.explain(failures.report_of(error, rank))
            if isinstance(error, SystemExit):
                logger.error(text)  # Python itself shows nothing for sys.exit
            else:
                exit_with_message(error, 1, failures.headline(error, rank), force=True)
            _report_to_torchrun(plan, error, text)
        raise
    if signum := stop_request.received():
        raise SystemExit(128 + signum)
    return result


def _announce(plan: Plan) -> None:
    if plan.member.rank == 0:
        logger.info(plan.describe(_threads(plan)))


def _report_to_torchrun(plan: Plan, error: BaseException, text: str) -> None:
    """Writes the failure where torchrun looks for it, so that its summary names the first cause."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if plan.launcher != "torchrun" or not path:
        return
    # It takes the earliest failure for the cause and counts whole seconds: what only follows from
    # another failure must not be as early.
    follows = isinstance(error, DistributedError) and error.secondary
    when = int(time.time()) + _FOLLOWS_SECONDS * follows
    details = {"py_callstack": text, "timestamp": str(when)}
    report = {"message": {"message": text, "extraInfo": details}}
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps(report))


def exit_with_message(
    error: Exception, exitcode: int, text: str | None = None, *, force: bool = False
) -> None:
    """Makes this process end with a message instead of a traceback, if the error is not caught.

    The traceback of this process would hide the cause, which is in another rank or in the flags.
    ``text`` replaces the error's own message; the traceback of a user's error follows it. ``force``
    ends the process without closing the group, which could hang.
    """
    setattr(error, _ENDING, (exitcode, text or str(error), force))
    previous = sys.excepthook
    if hasattr(previous, _ENDING):
        return

    def hook(kind: type[BaseException], found: BaseException, trace: TracebackType | None) -> None:
        if not hasattr(found, _ENDING):
            previous(kind, found, trace)
            return
        code, shown, at_once = getattr(found, _ENDING)
        # In place of Python's traceback, so to stderr itself; one write, as ranks share a terminal.
        sys.stderr.write(f"torchbearer_ddp: {shown}\n")
        if not isinstance(found, DistributedError) and code != 2:
            own = failures.users_frames(trace)
            previous(kind, found.with_traceback(own), own)
        if at_once:
            failures.exit_now(code)
        raise SystemExit(code)

    setattr(hook, _ENDING, True)
    sys.excepthook = hook
