"""A warning where several ranks train and nothing averages their gradients.

torch calls a hook before every step of every optimizer. A step is as it should be while something
of this package averages gradients, in work that is local on purpose, and where the program has
exchanged data through torch.distributed since the optimizer's previous step: it then averages by
its own means, for example by DistributedDataParallel.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchbearer_ddp import checked
from torchbearer_ddp.errors import LaunchError
from torchbearer_ddp.group import local_work, membership
from torchbearer_ddp.log import logger

#: Frames of these packages are not the user's.
_LIBRARIES = ("torch", "torchbearer", "torchbearer_ddp")
_TORCHRUN = "TORCHELASTIC_RUN_ID"


class _Watch:
    """What is known of the steps in this process."""

    hook: Any = None
    warned = False
    averaging: ClassVar[WeakSet[Any]] = WeakSet()
    #: The exchanges of the program itself before the last step of each optimizer.
    exchanges: ClassVar[WeakKeyDictionary[Optimizer, int]] = WeakKeyDictionary()


def watch(*, afresh: bool = False) -> None:
    """Warns of the first step on gradients that nothing averages; ``afresh`` in a new group."""
    if afresh:
        _Watch.warned = False
        _Watch.exchanges.clear()
    if _Watch.hook is None and not _Watch.warned:
        _Watch.hook = register_optimizer_step_pre_hook(_before_step)


def watch_under_torchrun() -> None:
    """Watches a process of torchrun from the start: it may never join a group."""
    if _TORCHRUN in os.environ:
        watch()


def begin_averaging(averager: Any) -> None:
    """Says that this object averages gradients from now on."""
    _Watch.averaging.add(averager)


def end_averaging(averager: Any) -> None:
    """Says that this object averages gradients no longer."""
    _Watch.averaging.discard(averager)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if _Watch.warned or _Watch.averaging or local_work.inside() or not _trains(optimizer):
        return
    rank, world_size = _place_in_world()
    if world_size == 1 or _averages_itself(optimizer):
        return
    _Watch.warned = True  # the hook stays: torch is calling hooks, and may not lose one now
    if rank == 0:
        _warn(optimizer, world_size)


def _warn(optimizer: Optimizer, world_size: int) -> None:
    logger.warning(
        f"{_users_line()}: {type(optimizer).__name__} takes a step on the gradients of one rank. "
        f"{world_size} ranks run this script, but nothing averages their gradients: they train "
        f"{world_size} different models. Add *data_parallel() to the callbacks of the Trial; what "
        "one rank alone is to train belongs into a callback in RankZeroOnly."
    )


def _trains(optimizer: Optimizer) -> bool:
    """False for the optimizer that torchbearer uses where none is given."""
    return any(p.requires_grad for group in optimizer.param_groups for p in group["params"])


def _place_in_world() -> tuple[int, int]:
    """The rank and the number of ranks; without a group, what torchrun has told this process."""
    group = membership.current()
    if group is not None:
        return group.member.rank, group.member.world_size
    if membership.single() is None and _TORCHRUN in os.environ:
        with checked.as_error(LaunchError, after=". torchrun sets it: leave it as it is."):
            rank = checked.variable(os.environ, "RANK", 0, 0)
            return rank, checked.variable(os.environ, "WORLD_SIZE", 1, 1)
    return 0, 1


def _averages_itself(optimizer: Optimizer) -> bool:
    """True if the program exchanges data itself from one step of this optimizer to the next."""
    found = _own_exchanges()
    before = _Watch.exchanges.get(optimizer)
    _Watch.exchanges[optimizer] = found
    # What was exchanged before the first step may have been anything: the second step decides.
    return found > 0 if before is None else found > before


def _own_exchanges() -> int:
    """The number of exchanges so far through groups that are not this package's."""
    group = membership.current()
    if group is None:
        return 0
    ours = group._channels or ()
    total = 0
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    for each in groups:
        if not any(each is channel for channel in ours):
            with contextlib.suppress(RuntimeError):  # a backend that does not count
                total += int(each._get_sequence_number_for_group())
    return total


def _users_line() -> str:
    """The line of the program that led to this step."""
    frame: Any = sys._getframe()
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] not in _LIBRARIES:
            path = os.path.relpath(frame.f_code.co_filename)
            shown = frame.f_code.co_filename if path.startswith(os.pardir) else path
            return f"{shown}:{frame.f_lineno}"
        frame = frame.f_back
    return "this program"
