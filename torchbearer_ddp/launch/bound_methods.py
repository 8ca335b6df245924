"""A bound method as worker, such as ``trial.run``: ranks of their own have a copy of its object."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torchbearer

from torchbearer_ddp.group import collectives
from torchbearer_ddp.group.stop_request import CUT_SHORT
from torchbearer_ddp.launch.worker import Task
from torchbearer_ddp.log import logger

#: What comes back as it is.
_PLAIN = (torchbearer.HISTORY, CUT_SHORT)


def owner_of(worker_fn: Callable[..., Any]) -> Any:
    """The object that a bound method, or a partial of one, belongs to; else None."""
    while isinstance(worker_fn, functools.partial):
        worker_fn = worker_fn.func
    owner = getattr(worker_fn, "__self__", None)
    return None if isinstance(owner, type | ModuleType) else owner


def warn_of_copy(worker_fn: Callable[..., Any]) -> None:
    """Says that what a bound method changes stays in the ranks, if the worker is one."""
    if (owner := owner_of(worker_fn)) is not None:
        name = type(owner).__qualname__
        logger.warning(
            f"the worker is a method of a {name}: each rank works on a copy of it, and what it "
            "changes there stays in the rank. Return what is needed here"
        )


def run_elsewhere(task: Task, run: Callable[[Task], list[Any]]) -> list[Any]:
    """Runs the worker in other processes and brings back what it has done to a Trial of ours."""
    trial = owner_of(task[0])
    if not isinstance(trial, torchbearer.Trial):
        warn_of_copy(task[0])
        return run(task)
    # Of a rank that has called sys.exit(0) nothing comes back.
    found = [each or (None, None) for each in run((_TrialWorker(task[0]), *task[1:]))]
    for _, state in found:
        if state is not None:
            _load(trial, state)
            break
    return [result for result, _ in found]


class _TrialWorker:
    """Calls a Trial's method; the first rank of each host also returns what the Trial holds then.

    The ranks' models and optimizers are equal, and rank zero is the first of its host.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self.__name__ = getattr(method, "__name__", "trial")

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any] | None]:
        result = self._method(*args, **kwargs)
        return result, _save(owner_of(self._method)) if collectives.local_rank() == 0 else None


def _save(trial: torchbearer.Trial) -> dict[str, Any]:
    """The history, how a run has ended, and the state of every module and optimizer, by its key."""
    kinds = (torch.nn.Module, torch.optim.Optimizer)
    trained = {key: each for key, each in trial.state.items() if isinstance(each, kinds)}
    states = {str(key): each.state_dict() for key, each in trained.items()}
    plain = {str(key): trial.state[key] for key in _PLAIN if key in trial.state}
    return {"plain": plain, "states": states}


def _load(trial: torchbearer.Trial, saved: dict[str, Any]) -> None:
    for key in _PLAIN:
        if str(key) in saved["plain"]:
            trial.state[key] = saved["plain"][str(key)]
    for key, each in trial.state.items():
        if str(key) in saved["states"]:
            each.load_state_dict(saved["states"][str(key)])
