"""The exchanges of a training step: after each backward pass, and before any optimizer's step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torchbearer

from torchbearer_ddp.gradients.accumulation import Accumulation, closure_decides
from torchbearer_ddp.gradients.averager import Averager
from torchbearer_ddp.gradients.header import RankReport, StepSummary
from torchbearer_ddp.gradients.loss_verdicts import LossVerdicts
from torchbearer_ddp.gradients.optimizer_steps import OptimizerSteps
from torchbearer_ddp.gradients.weights import Average, counts_nothing
from torchbearer_ddp.gradients.wishes import Wishes
from torchbearer_ddp.group import collectives, membership, stop_request, trained
from torchbearer_ddp.group.membership import Group

_NOTHING = RankReport()
#: The exchanges of the runs under way, the innermost last: a callback may run another Trial.
_running: list[StepExchange] = []


@dataclass
class Step:
    """What is known of the running step.

    Attributes:
        backwards: How many backward passes the running call of the closure has made.
        counts: How the gradients of the next backward pass count, and what its loss divides by;
            None before it is known.
        agreed: What the last exchange has agreed; a single rank agrees with itself.
    """

    backwards: int = 0
    counts: tuple[Average, float] | None = None
    agreed: RankReport | StepSummary = field(default_factory=lambda: _NOTHING)


class StepExchange:
    """Decides at each moment of a step what is averaged, and how.

    Attributes:
        averager: Averages what is new.
        accumulation: Holds gradients of several batches.
        losses: What is known of the losses.
        wishes: What else every exchange carries.
        step: The running step.
        asks_to_stop: True if this rank asks all ranks to stop.
        group: The group of a run with several ranks that is under way; else None.
    """

    def __init__(
        self, averager: Averager, accumulation: Accumulation, losses: LossVerdicts
    ) -> None:
        self.averager = averager
        self.accumulation = accumulation
        self.losses = losses
        self.wishes = Wishes()
        self.step = Step()
        self.asks_to_stop = False
        self.group: Group | None = None
        self._state: Any = None
        #: The loss of the last exchange, as the closure has it, and that of all ranks together.
        self._shared_loss: tuple[Any, Any] = (None, None)
        self._optimizer_steps = OptimizerSteps(self._before_closure, self._before_update)

    @property
    def is_under_way(self) -> bool:
        """True from the start of a run of several ranks, or with ``accumulate``, to its end."""
        return self._state is not None

    def begin(self, state: Any) -> None:
        """Begins a run or an epoch: what is trained may have changed."""
        self.step = Step()
        group = membership.current()
        self.group = group if group is not None and group.member.world_size > 1 else None
        if self.group is not None or self.accumulation.is_used:
            self._state = state
            self._optimizer_steps.watch()
            if self not in _running:
                _running.append(self)
        if self.group is not None:
            loader = state.get(torchbearer.GENERATOR)
            self.averager.expected = float(getattr(loader, "batch_size", None) or 0)
            self.averager.track(state)

    def begin_step(self) -> None:
        """Begins a step, in which nothing is agreed yet."""
        self.step = Step()
        self.losses.early_total.begin(self._state)
        if self._state is not None:
            self.accumulation.begin_step(self._state)
        self._begin_averaging()

    def _begin_averaging(self) -> None:
        self.averager.begin_step(sums=self.losses.kind() in (None, "sum"))

    def end(self) -> None:
        """Ends what a run has changed for the whole process; gradients get memory of their own."""
        self._optimizer_steps.close()
        if self in _running:
            _running.remove(self)
        self.averager.rest(self.group)
        self.averager.regular = 0.0
        self.accumulation.clear()
        self._state = self.group = None
        self._shared_loss = None, None

    def before_backward(self, state: Any) -> None:
        """From here on a full bucket may travel while backward runs."""
        average, weight = self._begin_backward(state)
        if self.accumulation.is_used:
            # Gradients of several batches are not complete before they are divided, and those of a
            # batch that counts nothing are taken away again.
            is_held = self.accumulation.holds_gradients or self.accumulation.goes_on(state)
            if is_held or counts_nothing(average, weight):
                return
        self.averager.begin(average, weight)

    def after_backward(self, state: Any, loss: Any) -> Any:
        """Averages the gradients, or holds them for a later batch; returns the loss of all."""
        average, total = self._hold(state)
        return loss if total is None else self._exchange(state, average, total, loss)

    def _hold(self, state: Any) -> tuple[Average, float | None]:
        """Ends a backward pass: how its gradients count, and by what, unless they wait."""
        average, weight = self._prepare(state)
        self.step.backwards += 1
        self.step.counts = None
        return average, self.accumulation.hold(state, average, weight)

    def check(self, state: Any) -> None:
        """Refuses what does not go together; with an exchange at every step there is nothing."""

    def after_step(self, state: Any) -> None:
        """Comes after the optimizer's step and after every callback that may ask to stop."""

    def settle(self, state: Any) -> None:
        """Makes the replicas equal where ranks step by themselves; here they are equal."""

    def align(self, state: Any) -> None:
        """Does so where ranks may have ended at different steps; collective."""

    def local_states(self) -> dict[str, Any]:
        """What each rank has for itself in a checkpoint: nothing, all ranks are at one place."""
        return {}

    def _begin_backward(self, state: Any) -> tuple[Average, float]:
        """How the gradients of the coming backward pass count."""
        if self.step.counts is not None:  # a closure tries again, perhaps with a smaller batch
            weight = self.losses.weight(state, self.step.backwards)
            self.step.counts = self.step.counts[0], weight
        return self._prepare(state)

    def _prepare(self, state: Any) -> tuple[Average, float]:
        """How the gradients of the coming or the last backward pass count."""
        counts = self.step.counts
        if counts is None:
            if self.group is None and not self.accumulation.is_used:
                return Average.EQUAL, 1.0
            number = self.step.backwards
            self.losses.find(state, number)
            counts = self.losses.average(number), self.losses.weight(state, number)
            self.step.counts = counts
        return counts

    def _before_closure(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer may call its closure more than once for one batch."""
        if not self.step.backwards:  # its first call
            return
        if self._is_in_charge and optimizer is self._state.get(torchbearer.OPTIMIZER):
            self.step.backwards = 0

    def _before_update(self, optimizer: torch.optim.Optimizer, result: Any) -> Any:
        """Averages what an optimizer is about to use and no hook has averaged yet."""
        if not self._is_in_charge:
            return result
        state = self._state
        is_main = optimizer is state.get(torchbearer.OPTIMIZER)
        if is_main and not self.step.backwards:
            result = self._end_closure(optimizer, result)
        if self.group is None:
            return result
        if self.averager.needs_average(optimizer, is_main=is_main):
            if is_main:
                number = max(0, self.step.backwards - 1)
                average, weight = self.losses.average(number), self.losses.weight(state, number)
            else:
                name = self.averager.name_of(optimizer)
                average, weight = self.losses.of_another_optimizer(state, name)
            result = self._exchange(state, average, weight, result, optimizer)
        self.averager.check_mixed(optimizer)
        if result is not None and closure_decides(optimizer):
            own, agreed = self._shared_loss
            if result is own:
                return agreed
            if result is not agreed:
                return self._share(state, result)
        return result

    def _end_closure(self, optimizer: torch.optim.Optimizer, result: Any) -> Any:
        """Ends the backward pass of a closure that has not called on_backward, or made none."""
        state = self._state
        if not optimizer.param_groups:
            return result
        if not self._has_gradient(optimizer):  # it has skipped this batch
            if self.step.counts is None:  # else it has called on_criterion, which has asked
                self.losses.find(state, 0, is_skipped=True)
            self.step.counts = self.losses.average(0), 0.0
            self.accumulation.drop_old(trained.parameters_of(optimizer))
        return self.after_backward(state, result)

    @property
    def _is_in_charge(self) -> bool:
        """True during a run of this Trial, but not while another one runs inside of it."""
        return self._state is not None and bool(_running) and _running[-1] is self

    def _has_gradient(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if the batch has made gradients of what an optimizer trains."""
        own = trained.parameters_of(optimizer)
        if self.group is None or self.accumulation.is_used:
            return self.accumulation.has_new_gradient(own)
        return self.averager.has_new_gradient(frozenset(map(id, own)))

    def _share(self, state: Any, result: Any) -> Any:
        """Gives every rank one loss, where a closure has returned another than the state holds."""
        mine = _number(result), self.losses.weight(state, 0)
        everyone = collectives.all_gather(mine, "the loss of a closure")
        values, weights = zip(*everyone, strict=True)
        agreed = self.averager.combine(self.losses.average(0), values, weights)
        return _like(result, agreed)

    def _exchange(
        self,
        state: Any,
        average: Average,
        weight: float,
        loss: Any,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> Any:
        """Averages new gradients, and agrees on what the header carries; returns the loss."""
        report, group = self._report(state, weight), self.group
        if group is None:
            self.step.agreed = report
            return loss
        # Every rank must come to the same decision on how often to call the closure.
        stepping = optimizer or state.get(torchbearer.OPTIMIZER)
        decides = loss is not None and closure_decides(stepping)
        if decides:
            report.loss = _number(loss)
        summary = self.step.agreed = self.averager.reduce(group, report, average, optimizer)
        if not decides:
            return loss
        # Not in place: the metrics add up what each rank has.
        agreed = _like(loss, self.averager.combine(average, summary.losses, summary.weights))
        self._shared_loss = loss, agreed
        return agreed

    def _report(self, state: Any, weight: float) -> RankReport:
        """What this rank reports to the others at this step."""
        signal = stop_request.requested() or 0
        return RankReport(
            weight=weight,
            stop=self.asks_to_stop or signal > 0,
            signal=signal,
            batch=state.get(torchbearer.BATCH) or 0,
            wishes=self.wishes.bits(),
        )


def _like(loss: Any, value: float) -> Any:
    """A loss of another value, as a tensor if it is one."""
    return torch.full_like(loss.detach(), value) if torch.is_tensor(loss) else value


def _number(loss: Any) -> float:
    """The value of a loss; torch warns of a tensor that is still part of a graph."""
    return float(loss.detach() if torch.is_tensor(loss) else loss)
