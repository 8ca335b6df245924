"""Averaged gradients, and the step at which all ranks stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torchbearer

from torchbearer_ddp.callbacks.callback_order import FIRST, LAST, OrderedCallback
from torchbearer_ddp.data import randomness
from torchbearer_ddp.data.batch import batch_size
from torchbearer_ddp.errors import DesyncError
from torchbearer_ddp.gradients.accumulation import Accumulation
from torchbearer_ddp.gradients.header import MAX_WISHES, RankReport, StepSummary
from torchbearer_ddp.gradients.model_reducer import ModelReducer
from torchbearer_ddp.gradients.reducer import Options, Reducer, Timing
from torchbearer_ddp.gradients.transports.torch_dist import HALVES
from torchbearer_ddp.group import collectives, membership, stop_request, unsynchronised


@dataclass
class _Step:
    """What is known of the running step.

    Attributes:
        ran_backward: True once on_backward was called.
        agreed: What the last exchange has agreed; a single rank agrees with itself.
    """

    ran_backward: bool = False
    agreed: RankReport | StepSummary = field(default_factory=RankReport)


class SyncGradients(OrderedCallback):
    """Averages the gradients over all ranks after every backward, and agrees on when to stop.

    A stop that any callback asks for on any rank travels with the next gradient, so all ranks
    leave the loop at the same step: the one after the request, or the end of the epoch.

    Afterwards each ``grad`` is a view into a bucket that the next step overwrites: clone what you
    keep.

    Example: ::

        >>> from torchbearer import Trial
        >>> from torchbearer_ddp import SyncGradients
        >>> trial = Trial(None, callbacks=[SyncGradients(weighted=True)])

    Args:
        weighted: Average by batch size instead of equally, for batches that differ between ranks.
        transport: ``auto``, ``gloo``, ``nccl``, ``shm`` or ``hierarchical``.
        bucket_mb: The size of a bucket in MiB; None for what suits the transport (25 for NCCL, else
            4).
        compress: ``'bf16'`` or ``'fp16'``: numbers travel between hosts in half precision, half the
            bytes. They are still added in single precision, and rounded twice; the rounding error
            is not carried over to the next step (no error feedback). Ranks of
            one host share memory, where there is nothing to save.
        accumulate: Exchange gradients and step every so many batches, on their average: what one
            step with so many times the batch would do. The rest of an epoch makes a smaller one.

    State Requirements:
        - :attr:`torchbearer.state.MODEL`: The model whose gradients are averaged
        - :attr:`torchbearer.state.OPTIMIZER`: What else it trains is averaged too
        - :attr:`torchbearer.state.X`: Its first dimension is the batch size
        - :attr:`torchbearer.state.STOP_TRAINING`: Becomes the same on every rank
    """

    # First in on_backward: a callback that clips must see the average. Last where others may ask to
    # stop: only then is it known whether they do.
    order: ClassVar[Mapping[str, int]] = {
        "on_start": FIRST,
        "on_sample": FIRST,
        "on_criterion": LAST,
        "on_backward": FIRST,
        "on_step_training": LAST,
        "on_end_training": LAST + 1,
        "on_checkpoint": LAST + 1,
    }

    def __init__(
        self,
        *,
        weighted: bool = False,
        transport: str = "auto",
        bucket_mb: float | None = None,
        compress: str | None = None,
        accumulate: int = 1,
    ) -> None:
        super().__init__()
        if bucket_mb is not None and bucket_mb <= 0:
            raise ValueError(f"bucket_mb is {bucket_mb}: a bucket must have a size above 0.")
        if compress is not None and compress not in HALVES:
            raise ValueError(
                f"compress is {compress!r}: it is one of {', '.join(map(repr, HALVES))}, or None."
            )
        bucket_bytes = None if bucket_mb is None else int(bucket_mb * 2**20)
        self._reduction = ModelReducer(Options(transport, weighted, bucket_bytes, compress))
        self._accumulation = Accumulation(accumulate)
        self._polls: list[Callable[[], bool]] = []
        self._asks_to_stop = False
        self._step = _Step()

    def on_start(self, state: Any) -> None:
        """Before anything is drawn for training: from here on each rank has its own noise."""
        unsynchronised.begin_averaging(self)
        group = membership.current()
        if group is not None and group.member.world_size > 1 and not group.rng_diverged:
            randomness.diverge_streams(group.member.rank)
            group.rng_diverged = True

    def on_start_training(self, state: Any) -> None:
        """In each epoch anew: layers may have been added, moved or replaced in between."""
        self._asks_to_stop, self._step = False, _Step()
        if collectives.world_size() > 1:
            self._reduction.track(state[torchbearer.MODEL], state[torchbearer.OPTIMIZER])

    def on_sample(self, state: Any) -> None:
        """The first hook of a step, in which nothing is agreed yet."""
        self._step = _Step()

    def on_criterion(self, state: Any) -> None:
        """Right before backward: from here on a full bucket may travel while backward runs."""
        self._accumulation.restore()
        if self.reducer is not None and not self._accumulation.goes_on(state):
            self.reducer.begin(batch_size(state))

    def on_backward(self, state: Any) -> None:
        """Right after backward: the gradients are complete and no callback has used them yet."""
        self._step.ran_backward = True
        if self._accumulation.hold(state):
            return
        report, group = self._report(state), membership.current()
        if group is None or group.member.world_size == 1:
            self._step.agreed = report
            return
        summary = self._step.agreed = self._reduction.reduce(group, report)
        if _closure_decides(state):
            # Every rank must come to the same decision on how often to call the closure.
            with torch.no_grad():
                state[torchbearer.LOSS].fill_(summary.loss)

    def on_step_training(self, state: Any) -> None:
        """After every callback that may ask to stop at this step."""
        if collectives.world_size() == 1:
            if stop_request.requested():
                state[torchbearer.STOP_TRAINING] = True
            return
        if not self._step.ran_backward:
            raise DesyncError(
                "This step ended without on_backward being called, so the gradients were not "
                "averaged. A custom closure must call "
                "state[torchbearer.CALLBACK_LIST].on_backward(state) after backward."
            )
        self._asks_to_stop = self._asks_to_stop or bool(state[torchbearer.STOP_TRAINING])
        # The other ranks do not know of a new request yet: all leave the loop at the next exchange.
        state[torchbearer.STOP_TRAINING] = self._step.agreed.stop
        self._note_signal()

    def on_end_training(self, state: Any) -> None:
        """A request made at the last step or since has no gradient to travel with."""
        self._agree(state, "a stop at the end of training")

    def on_checkpoint(self, state: Any) -> None:
        """The last hook before torchbearer reads the flag at the end of an epoch."""
        self._agree(state, "a stop at the end of an epoch")

    def on_end(self, state: Any) -> None:
        """Releases the buckets: the gradients stay valid, in memory of their own."""
        self._reduction.close()
        stop_request.stop_polling()
        unsynchronised.end_averaging(self)

    def register_wish(self, poll: Callable[[], bool]) -> int:
        """Lets every exchange of gradients carry one more yes or no from each rank to all.

        Every rank must register the same wishes in the same order, at any time before the exchange
        that is to carry them.

        Args:
            poll: Called on this rank right before each exchange: True if it wishes so now.

        Returns:
            The number of the wish, for :meth:`granted`.
        """
        if len(self._polls) == MAX_WISHES:
            raise ValueError(
                f"register_wish was called {MAX_WISHES} times before: the header has no room for "
                "more. Register each wish once."
            )
        self._polls.append(poll)
        return len(self._polls) - 1

    def granted(self, wish: int) -> bool:
        """True on all ranks alike if any rank had this wish at the last exchange of this step.

        A batch whose gradients are held has no exchange, and grants nothing.

        Args:
            wish: What :meth:`register_wish` returned.
        """
        return bool(self._step.agreed.wishes >> wish & 1)

    @property
    def stop_signal(self) -> int:
        """The signal for which all ranks stop, as last agreed at this step or after it; or 0."""
        return self._step.agreed.signal

    @property
    def holds_gradients(self) -> bool:
        """True while gradients of some batches wait for those of the next ones."""
        return self._accumulation.holds_gradients

    @property
    def timing(self) -> Timing:
        """Where the time of the last step went."""
        return self.reducer.timing if self.reducer else Timing()

    @property
    def reducer(self) -> Reducer | None:
        """What averages the gradients; None before the first exchange of a run and after it."""
        return self._reduction.reducer

    def _report(self, state: Any) -> RankReport:
        """What this rank reports to the others at this step."""
        signal = stop_request.requested() or 0
        report = RankReport(stop=self._asks_to_stop or signal > 0, signal=signal)
        report.wishes = sum(1 << number for number, poll in enumerate(self._polls) if poll())
        if collectives.world_size() > 1:
            report.batch_size = batch_size(state)
            if _closure_decides(state):
                report.loss = float(state[torchbearer.LOSS].detach())
        return report

    def _agree(self, state: Any, name: str) -> None:
        """Agrees on a stop where no gradient can carry the request."""
        if collectives.world_size() == 1:
            return
        signal = stop_request.requested() or 0
        asks = self._asks_to_stop or bool(state[torchbearer.STOP_TRAINING]) or signal > 0
        everyone = collectives.all_gather((asks, signal), name)
        stop, signal = any(ask for ask, _ in everyone), max(number for _, number in everyone)
        self._step.agreed = RankReport(stop=stop, signal=signal)
        self._asks_to_stop = state[torchbearer.STOP_TRAINING] = stop
        self._note_signal()

    def _note_signal(self) -> None:
        """Lets this rank stop for the same signal as the others."""
        if self._step.agreed.signal:
            stop_request.request(self._step.agreed.signal)


def _closure_decides(state: Any) -> bool:
    """LBFGS uses the loss to decide how often to call the closure."""
    return isinstance(state[torchbearer.OPTIMIZER], torch.optim.LBFGS)
