"""Steps that each rank makes by itself, and the average of what came of them.

Between two averages nothing is exchanged. At the end of a window of steps, and of an epoch, the
parameters and the tensors of the optimizers' states are averaged. They travel as gradients do: one
header, buckets, the same transports.
"""

from __future__ import annotations

from typing import Any

import torch
import torchbearer

from torchbearer_ddp.gradients.accumulation import Accumulation, closure_decides
from torchbearer_ddp.gradients.averager import Averager
from torchbearer_ddp.gradients.exchange import Options
from torchbearer_ddp.gradients.loss_verdicts import LossVerdicts
from torchbearer_ddp.gradients.replica_average import ReplicaAverage, ReplicaPlace
from torchbearer_ddp.gradients.step_exchange import StepExchange
from torchbearer_ddp.gradients.transports.compression import Compression
from torchbearer_ddp.gradients.weights import Average
from torchbearer_ddp.group import collectives, trained


class LocalExchange(StepExchange):
    """Lets every rank step on its own gradients, and averages the replicas every so many steps.

    Args:
        averager: Knows what is left to each rank.
        accumulation: Holds gradients of several batches.
        losses: What is known of the losses.
        every: The number of steps from one average to the next.
        options: How the average travels.
    """

    def __init__(
        self,
        averager: Averager,
        accumulation: Accumulation,
        losses: LossVerdicts,
        every: int,
        options: Options,
    ) -> None:
        super().__init__(averager, accumulation, losses)
        self.window = LocalWindow()
        self._every = every * accumulation.batches
        self._replicas = ReplicaAverage(options, averager.skip)

    def check(self, state: Any) -> None:
        """Refuses what cannot be averaged."""
        for name, optimizer in trained.optimizers(state).items():
            if closure_decides(optimizer):
                raise ValueError(
                    f"every does not work with LBFGS ({name}): the directions that it remembers on "
                    "each rank have no average. Use every=1, or another optimizer."
                )
        if trained.averaged_by_torch(state):
            raise ValueError(
                "every is above 1, but the model is wrapped in DistributedDataParallel, which "
                "averages the gradients of every step. Give the Trial the model itself."
            )

    def before_backward(self, state: Any) -> None:
        """Nothing travels during backward."""
        self._begin_backward(state)

    def _begin_averaging(self) -> None:
        """No gradients are averaged."""

    def after_backward(self, state: Any, loss: Any) -> Any:
        """Counts the samples, and holds gradients for a later batch."""
        average, total = self._hold(state)
        if total is not None:
            self.window.weight += total
            self.window.average = average.value
        return loss

    def after_step(self, state: Any) -> None:
        """Averages at the end of a window, after every callback that may ask to stop."""
        # Every batch counts, also one that this rank alone has skipped: all ranks must settle.
        self.window.steps += 1
        batch = state[torchbearer.BATCH] + 1
        if batch % self._every == 0 or batch == state[torchbearer.STEPS]:
            self.settle(state)

    def settle(self, state: Any) -> None:
        """Averages what the steps since the last average have made; collective."""
        if collectives.world_size() == 1 or not self.window.steps:
            return
        if self.group is None:  # after a run that ended early
            super().begin(state)
        assert self.group is not None
        report = self._report(state, self.window.weight)
        average = Average(self.window.average)
        if average is Average.SUM:  # of steps, not of samples: each rank's are as good
            average = Average.EQUAL
        self.step.agreed = self._replicas.reduce(self.group, state, report, average)
        self.window.clear()

    def align(self, state: Any) -> None:
        """Averages where any rank has made steps: ranks may have failed at different batches."""
        mine = self.window.steps, self.window.average
        everyone = collectives.all_gather(mine, "the steps since the last average")
        if any(steps for steps, _ in everyone):
            counted = [average for _, average in everyone if average != Average.EQUAL.value]
            self.window.steps = max(steps for steps, _ in everyone)
            self.window.average = counted[0] if counted else Average.EQUAL.value
            self.settle(state)

    def local_states(self) -> dict[str, Any]:
        """Where this rank is between two averages, and what its steps have changed so far."""
        return {"window": self.window, "replicas": ReplicaPlace(self._replicas, self._state)}

    def end(self) -> None:
        """Ends what a run has changed for the whole process."""
        self._replicas.rest(self.group)
        super().end()

    def _has_gradient(self, optimizer: torch.optim.Optimizer) -> bool:
        return self.accumulation.has_new_gradient(trained.parameters_of(optimizer))

    def _before_update(self, optimizer: torch.optim.Optimizer, result: Any) -> Any:
        """Notes what an optimizer is about to change."""
        if not self._is_in_charge:
            return result
        if optimizer is self._state.get(torchbearer.OPTIMIZER) and not self.step.backwards:
            result = self._end_closure(optimizer, result)
        changed = (p for p in trained.parameters_of(optimizer) if p.grad is not None)
        self._replicas.changed.update(map(id, changed))
        return result


def check_every(every: int, compression: Compression) -> None:
    """Refuses a number of local steps that is none, or that does not go with other options."""
    if every < 1:
        raise ValueError(f"every is {every}: give the number of steps of each rank, at least 1.")
    if every > 1 and compression.describe() is not None:
        raise ValueError(
            f"every is {every} and gradients travel as {compression.describe()}: local steps "
            "exchange no gradients, but parameters, which must arrive exactly. Give one of the two."
        )


class LocalWindow:
    """The batches since the last average, and what this rank's weigh; part of a checkpoint."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begins a window."""
        self.steps = 0
        #: What the losses of its batches divide by together, and how they count.
        self.weight = 0.0
        self.average = Average.EQUAL.value

    def state_dict(self) -> dict[str, Any]:
        """The place in the window."""
        return {"steps": self.steps, "weight": self.weight, "average": self.average}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave."""
        self.steps, self.weight = int(saved["steps"]), float(saved["weight"])
        self.average = saved["average"]
