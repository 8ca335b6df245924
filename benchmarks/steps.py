"""One training step in each of the ways that are compared."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torchbearer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchbearer.callbacks import Callback

from benchmarks.models import Case
from torchbearer_ddp import world_size
from torchbearer_ddp.callbacks.gradients import SyncGradients
from torchbearer_ddp.callbacks.model import SyncModel
from torchbearer_ddp.gradients.exchange import Options, Trained
from torchbearer_ddp.gradients.header import RankReport
from torchbearer_ddp.gradients.reducer import Reducer
from torchbearer_ddp.gradients.weights import Average
from torchbearer_ddp.group import membership

Steps = Callable[[int], float]
"""Runs so many steps and returns the seconds they took."""

DDP = {
    "DDP": {},
    "DDP, bucket views": {"gradient_as_bucket_view": True},
    "DDP, static graph": {"static_graph": True},
}
LOCAL = "no exchange"
PER_PARAMETER = "per parameter"


def ways(transports: list[str], compress: list[str]) -> list[str]:
    """The names of all the ways, ours by the name of the transport."""
    ours = [f"ours, {t}" for t in transports]
    halves = [f"ours, {transports[-1]}, {half}" for half in compress]
    return [LOCAL, PER_PARAMETER, *DDP, *ours, *halves]


def now() -> float:
    """The time, once a GPU has done what it was given."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def in_a_loop(way: str, case: Case) -> Steps:
    """A plain training loop."""
    model, optimizer, x, y = _prepare(case)
    if way in DDP:
        model = DistributedDataParallel(model, **DDP[way])
    average, begin = _averaging(way, model)

    def run(steps: int) -> float:
        started = now()
        for _ in range(steps):
            optimizer.zero_grad()
            loss = case.criterion(model(x), y)
            begin()
            loss.backward()
            average()
            optimizer.step()
        return now() - started

    return run


def in_a_trial(way: str, case: Case) -> Steps:
    """The same inside a torchbearer Trial, as users of DDP or of our callbacks write it."""
    model, optimizer, x, y = _prepare(case)
    clock = Clock()
    callbacks: list[Any] = [clock]
    if way in DDP:
        model = DistributedDataParallel(model, **DDP[way])
    elif way == PER_PARAMETER:
        callbacks.append(torchbearer.callbacks.on_backward(lambda _: _per_parameter(model)))
    elif way != LOCAL:
        callbacks += [SyncModel(check=0), SyncGradients(**_options(way))]
    trial = torchbearer.Trial(model, optimizer, case.criterion, ["loss"], callbacks, verbose=0)
    trial.to(case.device)

    def load(state: Any) -> None:
        state[torchbearer.X], state[torchbearer.Y_TRUE] = x, y

    def run(steps: int) -> float:
        trial.with_loader(load).for_train_steps(steps + Clock.WARM_UP)
        trial.state[torchbearer.HISTORY].clear()
        trial.run(1)
        return clock.seconds

    return run


class Clock(Callback):
    """Times the steps of an epoch, without what a run does before and after them.

    The first steps are not counted: in them ranks compare what they train, and make buckets, once
    in a run, which here is a few steps long and elsewhere hours.
    """

    WARM_UP = 2
    seconds = 0.0

    def on_step_training(self, state: Any) -> None:
        batch = state[torchbearer.BATCH] + 1
        if batch == self.WARM_UP:
            self._started = now()
        elif batch == state[torchbearer.STEPS]:  # a GPU must not be waited for at every step
            self.seconds = now() - self._started


def _prepare(case: Case) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = case.build().to(case.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = case.batch()
    return model, optimizer, x.to(case.device), y.to(case.device)


def _averaging(way: str, model: nn.Module) -> tuple[Callable[[], None], Callable[[], None]]:
    """What is to be done after backward, and before it."""
    if way == LOCAL or way in DDP:
        return _nothing, _nothing
    if way == PER_PARAMETER:
        return lambda: _per_parameter(model), _nothing
    group = membership.current()
    if group is None:
        return _nothing, _nothing
    in_order = list(model.parameters())[::-1]  # as their gradients appear
    reducer = Reducer(group, [Trained(each) for each in in_order], Options(**_options(way)))

    def average() -> None:
        reducer.reduce(RankReport(0))

    return average, lambda: reducer.begin(Average.WEIGHTED, 1.0)


def _nothing() -> None:
    pass


def _per_parameter(model: nn.Module) -> None:
    """As in torchbearer's note on distributed training."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size()


def _options(way: str) -> dict[str, Any]:
    _, transport, *half = way.split(", ")
    return {"transport": transport, "compress": half[0] if half else None}
