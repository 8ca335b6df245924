"""A process that torchrun or srun has started joins its group when its first Trial is built.

A script that calls ``run_distributed`` joins there. Without that call the callbacks ask for a group
(:func:`torchbearer_ddp.group.membership.ensure_joined`), and the process leaves it when it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import util
from multiprocessing.process import parent_process
from types import TracebackType
from typing import Any

from torchbearer_ddp import log
from torchbearer_ddp.data import randomness
from torchbearer_ddp.errors import LaunchError
from torchbearer_ddp.group import (
    agreement,
    collectives,
    failures,
    launcher,
    membership,
    stop_request,
    waiting,
)
from torchbearer_ddp.group.join import join, join_single, leave
from torchbearer_ddp.launch import environments, signals
from torchbearer_ddp.launch import rank as rank_process
from torchbearer_ddp.launch.announcement import announce
from torchbearer_ddp.launch.devices import visible_devices
from torchbearer_ddp.launch.ending import end_rank_with, exit_with_message, how_to_continue
from torchbearer_ddp.launch.plan import Plan
from torchbearer_ddp.launch.planner import make_plan
from torchbearer_ddp.log import logger

#: What each generator is called in a message.
_GENERATORS = {"python": "Python's random", "numpy": "numpy", "torch": "torch"}


def _is_started_rank() -> bool:
    """True if torchrun or srun has started this process; False in a loader's worker."""
    started = environments.in_torchrun(os.environ) or environments.in_slurm_step(os.environ)
    return started and parent_process() is None


def join_by_itself() -> None:
    """Joins the group of this process, if it was started as one rank of several.

    Raises:
        LaunchError: If the environment is incomplete, or other ranks are missing at the timeout.
    """
    if not _is_started_rank():
        return
    try:
        plan = make_plan({}, os.environ, *visible_devices())
    except (ValueError, LaunchError) as error:
        exit_with_message(error, 2)
        raise
    announce(plan)
    if plan.member.world_size == 1:
        join_single(plan.member)
        return
    plan = dataclasses.replace(plan, prefix=f"{plan.prefix}/itself")
    # Never closed: signals are handled until the process ends.
    _Process.resources.enter_context(rank_process.prepared(plan, plan.member))
    before, _Process.pid = sys.excepthook, os.getpid()
    try:
        join(plan.member, plan.host, plan.ports, serve=plan.serve, prefix=plan.prefix)
    except Exception as error:
        end_rank_with(plan, error)
        raise
    _end_with_errors(plan, before)
    rank_process.script_is_a_rank("srun" if plan.launcher == "srun" else "torchrun")
    atexit.register(_leave_at_exit)
    _share_streams()


class _Process:
    """What lasts until this process ends."""

    resources = contextlib.ExitStack()
    #: The process that has joined: one that it forks inherits its handlers, but is not the rank.
    pid: int | None = None
    #: The signal that has stopped this rank, once it has left its group.
    signum: int | None = None


def _leave_at_exit() -> None:
    if os.getpid() == _Process.pid:
        _Process.signum = signum = stop_request.received()
        if signum and (saved := how_to_continue(launcher.newest_checkpoint())):
            log.announce(f"stopped by {signal.Signals(signum).name}{saved}")
        leave("ended")


@atexit.register
def _exit_with_signal() -> None:
    """Makes the exit code of a rank that a signal has stopped say so.

    Registered when this module is imported, so that it is called after the handlers of the script.
    """
    if _Process.signum:
        # Those that were registered before this one.
        util._exit_function()  # type: ignore[attr-defined]
        logging.shutdown()
        stop_request.end(128 + _Process.signum)


def _end_with_errors(plan: Plan, before: Callable[..., Any]) -> None:
    """Makes an error that the script does not catch end the other ranks too, with this cause.

    ``before`` shows it: the hook that was there before init_process_group, which sets one that
    keeps back what is written until all is written.
    """

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.excepthook = before
        if os.getpid() != _Process.pid:
            before(kind, error, trace)
            return
        signals.hold_back()
        rank_process.fail(error)
        if isinstance(error, KeyboardInterrupt):
            failures.exit_now(128 + (stop_request.received() or signal.SIGINT))
        end_rank_with(plan, error)
        sys.excepthook(kind, error, trace)

    sys.excepthook = hook


def report_errors() -> None:
    """Makes an uncaught error known to the other ranks of a group that the user has made."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        group = membership.current()
        if group is not None and group.pid == os.getpid():  # one that it has forked is no rank
            waiting.report_failure(group, error)
        previous(kind, error, trace)

    sys.excepthook = hook


# Random generators.


def _fingerprints() -> dict[str, str]:
    """A fingerprint of the state of each random generator."""
    state = randomness.rng_state()
    return {name: agreement.digest(state[name]) for name in _GENERATORS}


#: At the import, to find out what has been drawn from since.
_at_import = _fingerprints() if _is_started_rank() else {}


def _share_streams() -> None:
    """Continues on all ranks with rank zero's generators, as a single process would.

    What the script has drawn before is not known; if it differs between the ranks, a line says so.
    """
    now = _fingerprints()
    drawn = {name: [each, each != _at_import.get(name)] for name, each in now.items()}
    known = collectives.all_gather(drawn, "the random generators")
    differing = [
        words
        for name, words in _GENERATORS.items()
        if len({each[name][0] for each in known}) > 1 and any(each[name][1] for each in known)
    ]
    if differing and collectives.is_rank_zero():
        logger.warning(
            f"each rank has drawn other random numbers so far ({', '.join(differing)}): a random "
            "split or order that the script has made differs between ranks. Seed the generators at "
            "the start of the script, for example with torch.manual_seed(0), or start it with "
            "python -m torchbearer_ddp run"
        )
    state = {name: each for name, each in randomness.rng_state().items() if name in _GENERATORS}
    randomness.set_rng_state(collectives.broadcast(state, "the random generators of rank zero"))
