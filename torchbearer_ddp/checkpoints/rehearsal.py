"""What is only made when the other callbacks start, made beforehand to see what it can take back.

A file is chosen before any callback has started, so that all of them see the run that continues. By
then a scheduler does not exist, and a metric has not all of its attributes. A state that these
would refuse later is found here, while an older file can still be used.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections import defaultdict
from functools import partial
from typing import Any

import torch
import torchbearer
from torch.optim import lr_scheduler
from torchbearer.callbacks.torch_scheduler import TorchScheduler

from torchbearer_ddp.checkpoints import contents, metric_state
from torchbearer_ddp.group import layouts


def check_schedulers(state: Any, payload: dict[str, Any]) -> None:
    """Loads what was saved of schedulers into schedulers of an optimizer that nothing uses.

    Raises:
        CheckpointError: If something does not fit, or is missing.
    """
    section = payload[contents.SECTION]
    callbacks = contents.named_callbacks(state[torchbearer.CALLBACK_LIST])
    names = [n for n in callbacks if isinstance(callbacks[n], TorchScheduler)]
    if not names or not isinstance(state[torchbearer.OPTIMIZER], torch.optim.Optimizer):
        return
    optimizer = _unused(state[torchbearer.OPTIMIZER])
    for name in names:
        scheduler = _built(callbacks[name], optimizer, state[torchbearer.EPOCH])
        if scheduler is not None and name in section["callbacks"]:
            contents.load_scheduler(scheduler, section["schedulers"].get(name), name)
            contents.fitting(partial(try_step, scheduler), f"scheduler of {name}")
    if contents.OPTIMIZER in payload:  # schedulers have settings in its groups
        contents.fitting(
            lambda: layouts.check_optimizer(payload[contents.OPTIMIZER], optimizer.param_groups),
            contents.OPTIMIZER,
        )


def check_metrics(state: Any, saved: dict[str, dict[str, Any]]) -> None:
    """Checks the saved states of metrics against metrics that are as at the start of an epoch.

    Raises:
        Unexpected: If one does not fit.
    """
    metrics = state[torchbearer.METRIC_LIST]
    with contextlib.suppress(Exception):  # one may need what only the start of a callback makes
        metrics.train()
        metrics.reset(state)  # as torchbearer does before an epoch, so it may be done once more
    metric_state.check_names(metrics, saved)
    if not metric_state.changes(metrics, saved):  # others are not put back
        metric_state.check(metrics, saved)


def _built(callback: TorchScheduler, optimizer: Any, epoch: int) -> Any:
    """The scheduler that a callback makes at its start; None if that fails, as it then will."""
    made = copy.copy(callback)
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        TorchScheduler.on_start(made, {torchbearer.OPTIMIZER: optimizer, torchbearer.EPOCH: epoch})
        return made._scheduler
    return None


def try_step(scheduler: Any) -> None:
    """Takes a step with a scheduler that nothing uses; what torch raises is the error.

    A function of the user's own may fail after the last step that it was written for.
    """
    parts = [scheduler, *getattr(scheduler, "_schedulers", ())]
    if all(_is_of_torch_alone(each) for each in parts):
        values = [0.0] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                scheduler.step(*values)
            except ValueError as error:  # of a schedule that has come to its end
                if not str(error).startswith("Tried to step"):
                    raise


def _is_of_torch_alone(scheduler: Any) -> bool:
    has_function = isinstance(scheduler, lr_scheduler.LambdaLR | lr_scheduler.MultiplicativeLR)
    has_function |= getattr(scheduler, "_scale_fn_custom", None) is not None
    return type(scheduler).__module__ == lr_scheduler.__name__ and not has_function


def _unused(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer with the same settings, which can be changed without an effect on this one."""
    made: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(made).update(vars(optimizer), state=defaultdict(dict))
    made.param_groups = [
        {key: value.clone() if torch.is_tensor(value) else value for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    return made
