"""``run_distributed``: chooses a launcher, runs the ranks and collects their results."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchbearer_ddp import log
from torchbearer_ddp.data import randomness
from torchbearer_ddp.errors import DistributedError, LaunchError
from torchbearer_ddp.group import (
    collectives,
    launcher,
    membership,
    rendezvous,
    stop_request,
)
from torchbearer_ddp.launch import output
from torchbearer_ddp.launch import rank as rank_process
from torchbearer_ddp.launch.announcement import announce, threads_of
from torchbearer_ddp.launch.bound_methods import run_elsewhere
from torchbearer_ddp.launch.devices import visible_devices
from torchbearer_ddp.launch.ending import (
    end_rank_with,
    exit_with_message,
    has_started_ranks,
    how_to_continue,
)
from torchbearer_ddp.launch.flags import merge, read_flags, read_options
from torchbearer_ddp.launch.main_module import check_launch
from torchbearer_ddp.launch.meeting import Meeting
from torchbearer_ddp.launch.notebook import is_notebook
from torchbearer_ddp.launch.plan import Plan
from torchbearer_ddp.launch.planner import make_plan
from torchbearer_ddp.launch.restarts import Restarts
from torchbearer_ddp.launch.settings import PLACEMENT_FLAGS, SUPERVISED_FLAGS, Settings
from torchbearer_ddp.launch.submission import submit_and_follow
from torchbearer_ddp.launch.supervisor import Supervisor
from torchbearer_ddp.launch.token import new_token
from torchbearer_ddp.launch.worker import Task

#: Separates the runs of one process that share a store.
_runs = itertools.count()


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
            work as well. After a method of a Trial, such as ``trial.run``, the Trial here has the
            model, the optimizer and the history of rank zero.
        args: Its arguments.
        kwargs: Its keyword arguments.
        options: What a parser with :func:`add_arguments` parsed; without it the known flags are
            read from ``sys.argv``.
        overrides: Values that take precedence over flags: ``launcher``, ``nproc_per_node``,
            ``nnodes``, ``node_rank``, ``world_size``, ``rank``, ``host``, ``port``, ``backend``,
            ``device``, ``timeout``, ``seed``, ``grace``, ``debug``, ``log_dir``, ``tee``,
            ``quiet_ranks``, ``max_restarts``, ``debug_rank``, ``slurm``.

    Returns:
        The results of the ranks that this call started, in the order of their ranks.

    Raises:
        ValueError: If arguments or flags do not fit together.
        LaunchError: If the ranks could not be started, or did not find each other.
        WorkerError: If a rank failed; its message is the first cause.
        SystemExit: If a signal stopped the ranks; the code is 128 plus the signal's number.
    """
    check_launch("run_distributed")
    if rank_process.is_inside_worker():
        raise LaunchError(
            "run_distributed was called inside a worker that run_distributed itself has started. "
            "Call it once, outside of the worker."
        )
    task = (worker_fn, tuple(args), kwargs or {})
    if started_by := rank_process.script_started_by():
        return [_run_in_script(started_by, _settings(options, overrides), task)]
    membership.settle()
    plan = _plan(_settings(options, overrides))
    if plan.launcher not in ("slurm", "spawn"):
        return [_run_here(plan, task)]
    try:
        run = submit_and_follow if plan.launcher == "slurm" else _spawn
        return run_elsewhere(task, functools.partial(run, plan))
    except (ValueError, DistributedError) as error:
        exit_with_message(error, 2 if isinstance(error, ValueError) else 1)
        raise


def _settings(options: argparse.Namespace | None, overrides: dict[str, Any]) -> Settings:
    """The flags and keyword arguments; a mistake in them ends a script with exit code 2."""
    try:
        if options is None:
            flags = read_flags(sys.argv[1:], slurm=overrides.get("launcher") == "slurm")
        else:
            flags = read_options(options)
        return merge(flags, overrides)
    except ValueError as error:
        exit_with_message(error, 2)
        raise


def _plan(settings: Settings) -> Plan:
    """The plan of this launch; a mistake in it ends a script with exit code 2."""
    try:
        plan = make_plan(settings, os.environ, *visible_devices())
        output.prepare(plan)
    except (ValueError, LaunchError) as error:
        exit_with_message(error, 2)
        raise
    ignored = [name for name in SUPERVISED_FLAGS if name in settings]
    if ignored and plan.launcher != "spawn" and plan.member.rank == 0:
        log.logger.info(
            f"{', '.join(map(settings.shown, ignored))} is for ranks that this command starts "
            f"itself (--nproc-per-node) and is ignored ({plan.reason})"
        )
    return dataclasses.replace(plan, prefix=f"{plan.prefix}/{next(_runs)}")


def _run_in_script(started_by: str, settings: Settings, task: Task) -> Any:
    """Runs the worker on the rank that the whole script is."""
    ignored = [name for name in ("launcher", *PLACEMENT_FLAGS) if name in settings]
    if ignored:
        log.announce(
            f"this script is rank {collectives.rank()} of {collectives.world_size()}, started by "
            f"{started_by}; run_distributed ignores {', '.join(map(settings.shown, ignored))}"
        )
    if "seed" in settings:
        randomness.seed_all(settings["seed"])
    return rank_process.run_worker(*task)


def _spawn(plan: Plan, task: Task) -> list[Any]:
    """Starts the ranks of this host, which meet in a store that this process holds or reaches."""
    announce(plan)
    if plan.member.world_size == plan.member.local_world_size:  # all ranks are started here
        plan = dataclasses.replace(plan, prefix=f"{plan.prefix}/{new_token()}")
    if plan.member.seed is None:
        # The seed that the script has set, if any, is the one that a single process would use.
        plan = plan.with_member(seed=torch.initial_seed())
    has_started_ranks()
    meeting = Meeting(plan)
    environment = {"OMP_NUM_THREADS": str(threads_of(plan)), **os.environ, **_place_of_user()}

    def start(number: int, variables: dict[str, str]) -> Supervisor:
        attempt = meeting.plan
        if number:
            meeting.renew()
            attempt = dataclasses.replace(meeting.plan, prefix=f"{plan.prefix}/{number}")
        return Supervisor(attempt, {**environment, **variables}, meeting)

    seconds = rendezvous.ABANDON_SECONDS
    try:
        results = Restarts(plan.max_restarts, start).run(task)
        seconds = rendezvous.LEAVE_SECONDS
        return results
    finally:
        meeting.await_departures(seconds)


def _place_of_user() -> dict[str, str]:
    """Variables that tell the ranks where their bars and their debugger can be seen."""
    if is_notebook():
        return {launcher.BARS_VARIABLE: "1"}
    with contextlib.suppress(OSError):
        if any(os.isatty(number) for number in (1, 2)):
            return {launcher.TERMINAL_VARIABLE: os.ttyname(0)}
    return {}


def _run_here(plan: Plan, task: Task) -> Any:
    """Runs the one rank that this process is."""
    announce(plan)
    alone = plan.member.world_size == 1
    try:
        result = rank_process.run_rank(plan, 0, *task)
    except KeyboardInterrupt:
        if alone:
            raise
        raise SystemExit(128 + signal.SIGINT) from None
    except (Exception, SystemExit) as error:
        stops = isinstance(error, SystemExit) and (not error.code or stop_request.received())
        if not alone and not stops:
            end_rank_with(plan, error)
        raise
    finally:
        signum = stop_request.received()
        stop_request.reset()  # a later run, or a Trial outside of a worker, starts without it
    if signum:
        # torchrun and srun have a command of their own.
        command = sys.orig_argv if plan.launcher in ("inline", "rank") else ()
        if saved := how_to_continue(launcher.newest_checkpoint(), command):
            log.announce(f"stopped by {signal.Signals(signum).name}{saved}")
        raise SystemExit(128 + signum)
    return result
