"""Averaged gradients, and the step at which all ranks stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torchbearer

from torchbearer_ddp.callbacks.callback_order import FIRST, LAST, OrderedCallback
from torchbearer_ddp.data.run_streams import RunStreams
from torchbearer_ddp.gradients import drift
from torchbearer_ddp.gradients.accumulation import Accumulation
from torchbearer_ddp.gradients.averager import Averager
from torchbearer_ddp.gradients.exchange import Options
from torchbearer_ddp.gradients.header import RankReport, StepSummary
from torchbearer_ddp.gradients.local_steps import LocalExchange, check_every
from torchbearer_ddp.gradients.loss_verdicts import LossVerdicts
from torchbearer_ddp.gradients.reducer import Reducer
from torchbearer_ddp.gradients.step_exchange import StepExchange
from torchbearer_ddp.gradients.stragglers import Stragglers
from torchbearer_ddp.gradients.timing import Timing
from torchbearer_ddp.gradients.transports.compression import Compression
from torchbearer_ddp.group import collectives, debug, stop_request, trained, unsynchronised
from torchbearer_ddp.log import announce


class SyncGradients(OrderedCallback):
    """Averages the gradients over all ranks after every backward, and agrees on when to stop.

    No optimizer steps on gradients that were not averaged, wherever its step is called: also a
    second optimizer in the state of the Trial, or one with which a callback trains a module. The
    average is that of one process: at the first step the criterion is evaluated on parts of the
    batch, which tells a mean over the samples from a sum, and from a mean of weighted targets.

    A stop that any callback asks for on any rank travels with the next gradient, so all ranks
    leave the loop at the same step: the one after the request, or the end of the epoch.

    Afterwards each ``grad`` is a view into a bucket that the next step overwrites: clone what you
    keep.

    Example: ::

        >>> from torchbearer import Trial
        >>> from torchbearer_ddp import SyncGradients
        >>> trial = Trial(None, callbacks=[SyncGradients(weighted=True)])

    Args:
        weighted: False to count all ranks equally. Else a rank counts by the samples (or by what
            else its loss divides by), which is exact for batches that differ between ranks.
        loss: ``'mean'``, ``'sum'`` or ``'coupled'`` (each rank has a loss of its own batch, and
            they are averaged) instead of what is found at the first step.
        weight: A function of the state: what the loss of the current batch divides by, where that
            is neither the number of samples nor the weights of the targets.
        skip: Modules and parameters that are left to each rank on purpose.
        transport: ``auto``, ``gloo``, ``nccl``, ``shm`` or ``hierarchical``.
        bucket_mb: The size of a bucket in MiB; None for what suits the transport (25 for NCCL, else
            4).
        compress: What travels between hosts instead of single precision: ``'bf16'`` or ``'fp16'``
            (half the bytes), ``'int8'`` (a quarter, with a scale for each block of numbers) or
            ``'powersgd'`` (torch's PowerSGD: a few columns of each matrix). Numbers are still added
            in single precision. Ranks of one host share memory, where there is nothing to save.
        rank: The number of columns that PowerSGD keeps, 1 if it is not given.
        error_feedback: Whether what compression loses in a step is added to the next one. None for
            what suits it: yes for ``'int8'`` and ``'powersgd'``, no for ``'bf16'`` and ``'fp16'``.
        hook: A communication hook as ``DistributedDataParallel.register_comm_hook`` takes it, for
            example torch's ``fp16_compress_hook`` or ``powerSGD_hook``, or one of your own:
            ``hook(state, bucket)`` returns a Future of the mean over all ranks.
        hook_state: What the hook is called with. It is part of the checkpoints.
        accumulate: Exchange gradients and step every so many batches, on their average: what one
            step with so many times the batch would do. The rest of an epoch makes a smaller one.
        every: Let each rank make so many steps on its own gradients, and then average parameters
            and optimizer states: fewer exchanges, but not the steps of one process. An epoch always
            ends with an average.

    State Requirements:
        - :attr:`torchbearer.state.MODEL`: The model whose gradients are averaged
        - :attr:`torchbearer.state.OPTIMIZER`: What else it trains is averaged too, like all modules
          and optimizers in the state and on callbacks
        - :attr:`torchbearer.state.X`: Its first dimension is the batch size
        - :attr:`torchbearer.state.CRITERION`: Evaluated on parts of the first batch
        - :attr:`torchbearer.state.STOP_TRAINING`: Becomes the same on every rank
    """

    only_once: ClassVar[bool] = True
    # First in on_backward: a callback that clips must see the average. Last where others may ask to
    # stop: only then is it known whether they do.
    order: ClassVar[Mapping[str, int]] = {
        "on_start": LAST + 1,
        "on_start_training": LAST,
        "on_sample": FIRST,
        "on_criterion": LAST,
        "on_backward": FIRST - 1,
        "on_step_training": LAST,
        "on_end_training": LAST + 1,
        "on_checkpoint": LAST + 1,
    }

    def __init__(
        self,
        *,
        weighted: bool | None = None,
        loss: str | None = None,
        weight: Callable[[Any], float] | None = None,
        skip: Iterable[Any] = (),
        transport: str = "auto",
        bucket_mb: float | None = None,
        compress: str | None = None,
        rank: int | None = None,
        error_feedback: bool | None = None,
        hook: Callable[[Any, Any], Any] | None = None,
        hook_state: Any = None,
        accumulate: int = 1,
        every: int = 1,
    ) -> None:
        super().__init__()
        if bucket_mb is not None and bucket_mb <= 0:
            raise ValueError(f"bucket_mb is {bucket_mb}: a bucket must have a size above 0.")
        self._compression = Compression(compress, rank, error_feedback, hook, hook_state)
        self._compression.check(transport)
        bucket_bytes = None if bucket_mb is None else int(bucket_mb * 2**20)
        self.skip = list(skip)
        for each in self.skip:
            if not isinstance(each, torch.nn.Module | torch.nn.Parameter | torch.optim.Optimizer):
                raise ValueError(
                    f"skip has {each!r}: give modules, parameters or optimizers, not their names."
                )
        self.every = every
        options = Options(transport, bucket_bytes, self._compression)
        check_every(every, self._compression)
        losses = LossVerdicts(loss, weight, weighted)
        parts = Averager(options, self.skip), Accumulation(accumulate), losses
        self._exchange: StepExchange = (
            StepExchange(*parts) if every == 1 else LocalExchange(*parts, every, options)
        )
        self._streams = RunStreams()
        self._stragglers = Stragglers(())
        self._is_entered = False
        #: True if the exchange at the end of an epoch is made by SyncModel, which has one there.
        self.stop_is_asked_elsewhere = False

    def enter(self, method: str) -> None:
        """Before anything is drawn or restored: from here on each rank has its own noise."""
        if self._is_entered:
            raise ValueError(
                "This SyncGradients belongs to a Trial that is running, and another Trial with it "
                "was started inside that run. Call data_parallel() for each Trial."
            )
        self._is_entered, self.stop_is_asked_elsewhere = True, False
        unsynchronised.begin_averaging(self)
        if method == "run":  # an evaluation shows losses as the run before it did
            self._exchange.losses.begin()
        self._streams.enter()

    def on_start(self, state: Any) -> None:
        """A callback may train something of its own before the first epoch, or in evaluate."""
        if not self._exchange.is_under_way:  # an evaluation inside of a run has its own state
            self._exchange.begin(state)
        if (group := self._exchange.group) and self._stragglers.hosts != group.hosts:
            self._stragglers = Stragglers(group.hosts)

    def on_start_training(self, state: Any) -> None:
        """In each epoch anew: layers may have been added, moved or replaced in between."""
        self._exchange.asks_to_stop = False
        self._exchange.accumulation.check(state)
        self._exchange.check(state)
        self._exchange.begin(state)

    def on_sample(self, state: Any) -> None:
        """The first hook of a step, in which nothing is agreed yet."""
        self._exchange.begin_step()

    def on_criterion(self, state: Any) -> None:
        """Right before backward: from here on a full bucket may travel while backward runs."""
        self._exchange.before_backward(state)

    def on_backward(self, state: Any) -> None:
        """Right after backward: the gradients are complete and no callback has used them yet."""
        self._exchange.after_backward(state, state.get(torchbearer.LOSS))

    def on_step_training(self, state: Any) -> None:
        """After every callback that may ask to stop at this step."""
        exchange = self._exchange
        if exchange.group is None:
            if stop_request.requested():
                state[torchbearer.STOP_TRAINING] = True
            return
        exchange.asks_to_stop |= (asks := bool(state.get(torchbearer.STOP_TRAINING)))
        exchange.after_step(state)
        stops = exchange.step.agreed.stop
        if asks != stops:
            # The others do not know of a new request yet: all leave the loop at the next exchange.
            state[torchbearer.STOP_TRAINING] = stops
        self._note_signal()
        # Before the first batch comes what is done between two epochs.
        is_later = exchange.group.member.rank == 0 and state.get(torchbearer.BATCH)
        if is_later and (times := self.times):
            sentence = self._stragglers.add(times, debug.last_step)
            if sentence is not None:
                announce(sentence)

    def on_end_training(self, state: Any) -> None:
        """A request made at the last step or since has no gradient to travel with."""
        self._exchange.settle(state)  # where there is no SyncModel
        if not self.stop_is_asked_elsewhere:
            self._agree(state, "a stop at the end of training")

    def on_checkpoint(self, state: Any) -> None:
        """The last hook before torchbearer reads the flag at the end of an epoch."""
        self._agree(state, "a stop at the end of an epoch")

    def leave(self) -> None:
        """Ends what a run has changed for the whole process; gradients get memory of their own."""
        self._exchange.end()
        unsynchronised.end_averaging(self)
        self._streams.leave()
        self._is_entered = False

    def state_dict(self) -> dict[str, Any]:
        """What was found out about the losses and their weights."""
        return {
            "losses": self._exchange.losses.state_dict(),
            "regular": self._exchange.averager.regular,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> SyncGradients:
        """Restores what was found out about the losses, as :meth:`state_dict` returned it."""
        self._exchange.losses.load_state_dict(state_dict.get("losses", []))
        self._exchange.averager.regular = float(state_dict.get("regular", 0.0))
        return self

    def local_states(self) -> dict[str, Any]:
        """What each rank has for itself and a checkpoint must hold, by name."""
        return {"compression": self._compression.memory, **self._exchange.local_states()}

    @property
    def has_local_parts(self) -> bool:
        """True if the ranks' models or optimizers may differ in a checkpoint."""
        return bool(self.skip) or self.may_drift

    @property
    def may_drift(self) -> bool:
        """True if replicas differ between two calls of :meth:`align_replicas`."""
        return self._compression.may_drift or self.every > 1

    @property
    def compression(self) -> Compression:
        """How gradients are compressed, and what that remembers."""
        return self._compression

    @property
    def has_counted(self) -> bool:
        """True if a rank has made something of the batch, as told in the last exchange."""
        agreed = self._exchange.step.agreed
        return isinstance(agreed, StepSummary) and (any(agreed.weights) or any(agreed.used))

    def align_replicas(self, state: Any) -> None:
        """Makes replicas equal at the end of an epoch, and before a run after one that failed.

        They differ by local steps, or by rounding.
        """
        self._exchange.align(state)
        if self._compression.may_drift and collectives.world_size() > 1:
            drift.align(trained.parameters(state, self.skip))

    def register_wish(self, poll: Callable[[], bool]) -> int:
        """Lets every exchange of gradients carry one more yes or no from each rank to all.

        Every rank must register the same wishes in the same order, at any time before the exchange
        that is to carry them.

        Args:
            poll: Called on this rank right before each exchange: True if it wishes so now.

        Returns:
            The number of the wish, for :meth:`granted`.
        """
        return self._exchange.wishes.register(poll)

    def granted(self, wish: int) -> bool:
        """True on all ranks alike if any rank had this wish at the last exchange of this step.

        A batch whose gradients are held has no exchange, and grants nothing.

        Args:
            wish: What :meth:`register_wish` returned.
        """
        return bool(self._exchange.step.agreed.wishes >> wish & 1)

    @property
    def loss_kind(self) -> str | None:
        """The kind of the loss, such as ``mean`` or ``sum``; None until it is known."""
        return self._exchange.losses.kind()

    @property
    def losses(self) -> LossVerdicts:
        """What is known of the losses."""
        return self._exchange.losses

    @property
    def stop_signal(self) -> int:
        """The signal for which all ranks stop, as last agreed at this step or after it; or 0."""
        return self._exchange.step.agreed.signal

    @property
    def accumulation(self) -> Accumulation:
        """What holds the gradients of some batches for the next ones."""
        return self._exchange.accumulation

    @property
    def timing(self) -> Timing:
        """Where the time of the last step went."""
        return self.reducer.timing if self.reducer else Timing()

    @property
    def times(self) -> Sequence[float]:
        """How long each rank took before the last exchange of this step; empty without one."""
        agreed = self._exchange.step.agreed
        return agreed.times if isinstance(agreed, StepSummary) else ()

    @property
    def reducer(self) -> Reducer | None:
        """What averages the gradients; None before the first exchange of a run and after it."""
        return self._exchange.averager.reducer

    def wish_to_stop(self, state: Any) -> tuple[bool, int]:
        """Whether this rank asks all to stop, and the signal for which it does, or 0."""
        signal = stop_request.requested() or 0
        asks = self._exchange.asks_to_stop or bool(state[torchbearer.STOP_TRAINING]) or signal > 0
        return asks, signal

    def agree_on_stop(self, state: Any, wishes: Sequence[tuple[bool, int]]) -> None:
        """Stops all ranks alike, given the :meth:`wish_to_stop` of every rank."""
        stop, signal = any(ask for ask, _ in wishes), max(number for _, number in wishes)
        self._exchange.step.agreed = RankReport(stop=stop, signal=signal)
        self._exchange.asks_to_stop = state[torchbearer.STOP_TRAINING] = stop
        self._note_signal()

    def _agree(self, state: Any, name: str) -> None:
        """Agrees on a stop where no gradient can carry the request."""
        if collectives.world_size() > 1:
            mine = self.wish_to_stop(state)
            self.agree_on_stop(state, collectives.all_gather(mine, name, collectives.SHORT_BYTES))

    def _note_signal(self) -> None:
        """Lets this rank stop for the same signal as the others."""
        if self._exchange.step.agreed.signal:
            stop_request.request(self._exchange.step.agreed.signal)
