"""Equal replicas and averaged gradients: the heart of data-parallel training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torchbearer
from torch.nn.parallel import DistributedDataParallel

from torchbearer_ddp.callbacks.callback_order import FIRST, LAST, OrderedCallback
from torchbearer_ddp.data import randomness
from torchbearer_ddp.data.batch import batch_size
from torchbearer_ddp.errors import DesyncError
from torchbearer_ddp.gradients.accumulation import Accumulation
from torchbearer_ddp.gradients.header import MAX_WISHES, RankReport, StepSummary
from torchbearer_ddp.gradients.hooks import GradientOrder
from torchbearer_ddp.gradients.reducer import Options, Reducer, Timing
from torchbearer_ddp.gradients.transports.sums import HALVES
from torchbearer_ddp.group import collectives, membership, replicas, stop_request
from torchbearer_ddp.log import announce


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
            bytes. They are still added in single precision, and rounded twice on their way; what
            rounding takes away is not carried over to the next step (no error feedback). Ranks of
            one host share memory, where there is nothing to save.
        accumulate: Exchange gradients and step every so many batches, on their average: what one
            step with so many times the batch would do. The rest of an epoch makes a smaller one.

    State Requirements:
        - :attr:`torchbearer.state.MODEL`: The model whose gradients are averaged
        - :attr:`torchbearer.state.OPTIMIZER`: What else it trains is averaged too
        - :attr:`torchbearer.state.X`: Its first dimension is the batch size
        - :attr:`torchbearer.state.STOP_TRAINING`: Becomes the same on every rank
    """

    # First of all in on_backward: a callback that clips must see the average. Last where others
    # may ask to stop: only then is their wish known.
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
        self._options = Options(transport, weighted, bucket_bytes, compress)
        self._accumulation = Accumulation(accumulate)
        self._reducer: Reducer | None = None
        self._trained: list[tuple[str, torch.nn.Parameter]] = []
        self._noted: GradientOrder | None = None
        self._order: list[int] = []
        self._frozen: list[bool] = []
        self._asked = False
        self._ran_backward = False
        self._announced = False
        self._answer: StepSummary | None = None
        self._polls: list[Callable[[], bool]] = []
        self._granted = 0
        self._stop_signal = 0

    def register_wish(self, poll: Callable[[], bool]) -> int:
        """Lets every exchange of gradients carry one more yes or no from each rank to all.

        Every rank must register the same wishes in the same order, at any time before the exchange
        that is to carry them.

        Args:
            poll: Called on this rank right before each exchange: True if it wishes so now.

        Returns:
            The number of the wish, to ask :meth:`granted` with.
        """
        if len(self._polls) == MAX_WISHES:
            raise ValueError(
                f"register_wish was called {MAX_WISHES} times before: there is no room."
            )
        self._polls.append(poll)
        return len(self._polls) - 1

    def granted(self, wish: int) -> bool:
        """True on all ranks alike if any rank had this wish at the last exchange of this step.

        A batch whose gradients are held has no exchange, and nothing is granted.

        Args:
            wish: What :meth:`register_wish` returned.
        """
        return bool(self._granted >> wish & 1)

    @property
    def stop_signal(self) -> int:
        """The signal for which all ranks stop, as last agreed at this step or after it; or 0."""
        return self._stop_signal

    @property
    def holds_gradients(self) -> bool:
        """True while gradients of some batches wait for those of the next ones."""
        return self._accumulation.holds_gradients

    @property
    def timing(self) -> Timing:
        """Where the time of the last step went."""
        return self._reducer.timing if self._reducer else Timing(0.0, 0.0, 0.0)

    def on_start(self, state: Any) -> None:
        """Before anything is drawn for training: from here on each rank has its own noise."""
        group = membership.current()
        if group is not None and group.member.world_size > 1 and not group.rng_diverged:
            randomness.diverge_streams(group.member.rank)
            group.rng_diverged = True

    def on_start_training(self, state: Any) -> None:
        """Each epoch anew: layers may have been added, moved or replaced in between."""
        self._asked = self._ran_backward = False
        self._answer = None
        self._granted = self._stop_signal = 0
        if collectives.world_size() > 1:
            trained = replicas.trained_tensors(
                state[torchbearer.MODEL], state[torchbearer.OPTIMIZER]
            )
            if _kinds(trained) != _kinds(self._trained):
                self._close()
                self._trained = trained
                if self._noted is not None:  # of a run that failed within its first backward
                    self._noted.close()
                self._noted, self._order = None, []

    def on_sample(self, state: Any) -> None:
        """A step begins, and nothing is agreed in it yet."""
        self._granted = self._stop_signal = 0

    def on_criterion(self, state: Any) -> None:
        """Right before backward: from here on a full bucket may travel while backward runs."""
        self._accumulation.restore()
        if self._trained and not self._order and self._noted is None:
            self._noted = GradientOrder([parameter for _, parameter in self._trained])
        if self._reducer is not None and not self._accumulation.goes_on(state):
            self._reducer.begin(batch_size(state))

    def on_backward(self, state: Any) -> None:
        """Right after backward: the gradients are complete and nobody has used them yet."""
        self._ran_backward = True
        if self._noted is not None:
            self._order, self._noted = self._noted.close(), None
        if self._accumulation.hold(state):
            return
        wishes = sum(1 << number for number, poll in enumerate(self._polls) if poll())
        signum = stop_request.requested() or 0
        group = membership.current()
        if group is None or group.member.world_size == 1:
            self._granted, self._stop_signal = wishes, signum
            return
        frozen = [not parameter.requires_grad for _, parameter in self._trained]
        if self._reducer is None or frozen != self._frozen:
            self._frozen = frozen
            self._reducer = self._new_reducer(group, state)
        note = RankReport(
            0, batch_size(state), stop=self._asked or signum > 0, signal=signum, wishes=wishes
        )
        if _closure_decides(state):
            note.loss = float(state[torchbearer.LOSS].detach())
        self._answer = self._reducer.reduce(note)
        self._granted, self._stop_signal = self._answer.wishes, self._answer.signal
        if _closure_decides(state):
            # Every rank must come to the same decision on how often to call the closure.
            with torch.no_grad():
                state[torchbearer.LOSS].fill_(self._answer.loss)

    def on_step_training(self, state: Any) -> None:
        """After every callback that may ask to stop at this step."""
        if collectives.world_size() == 1:
            if stop_request.requested():
                state[torchbearer.STOP_TRAINING] = True
            return
        if not self._ran_backward:
            raise DesyncError(
                "This step ended without on_backward being called, so the gradients were not "
                "averaged. A custom closure must call "
                "state[torchbearer.CALLBACK_LIST].on_backward(state) after backward."
            )
        answer, self._answer, self._ran_backward = self._answer, None, False
        self._asked = self._asked or bool(state[torchbearer.STOP_TRAINING])
        # The others do not know of a new request yet: leave the loop with them, at the next
        # exchange.
        state[torchbearer.STOP_TRAINING] = answer is not None and answer.stop
        if answer is not None and answer.signal:
            stop_request.request(answer.signal)

    def on_end_training(self, state: Any) -> None:
        """A request made at the last step or since has no gradient to travel with."""
        self._agree(state, "a stop at the end of training")

    def on_checkpoint(self, state: Any) -> None:
        """The last hook before torchbearer looks at the flag at the end of an epoch."""
        self._agree(state, "a stop at the end of an epoch")

    def on_end(self, state: Any) -> None:
        """Gives the buckets back: the gradients stay valid, in memory of their own."""
        self._close()
        stop_request.stop_polling()

    def _agree(self, state: Any, name: str) -> None:
        if collectives.world_size() == 1:
            return
        signum = stop_request.requested() or 0
        asked = self._asked or bool(state[torchbearer.STOP_TRAINING]) or signum > 0
        everyone = collectives.all_gather((asked, signum), name)
        self._asked = any(each for each, _ in everyone)
        state[torchbearer.STOP_TRAINING] = self._asked
        self._stop_signal = max(number for _, number in everyone)
        if self._stop_signal:
            stop_request.request(self._stop_signal)

    def _new_reducer(self, group: membership.Group, state: Any) -> Reducer:
        self._close()
        model = state[torchbearer.MODEL]
        collectives.agree(
            {"the trained parameters": [n for n, p in self._trained if p.requires_grad]},
            "the gradients to exchange",
            "Freeze and unfreeze the same parameters on every rank at the same step.",
        )
        order = self._order or [*reversed(range(len(self._trained)))]
        order = collectives.broadcast(order, "the order of the gradients")
        in_order = [self._trained[index][1] for index in order]
        wrapped = isinstance(model, DistributedDataParallel)
        reducer = Reducer(
            group,
            [] if wrapped else [parameter for parameter in in_order if parameter.requires_grad],
            _sparse_parameters(model),
            self._options,
        )
        if not self._announced:
            announce(
                "the model is wrapped in DistributedDataParallel, which averages the gradients"
                if wrapped
                else reducer.choice
            )
            self._announced = True
        return reducer

    def _close(self) -> None:
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None


def _kinds(trained: list[tuple[str, torch.nn.Parameter]]) -> list[tuple[Any, ...]]:
    return [(name, id(p), p.data_ptr(), p.dtype, p.device, p.shape) for name, p in trained]


def _sparse_parameters(model: torch.nn.Module) -> set[int]:
    """Embeddings that were asked to have sparse gradients."""
    return {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
    }


def _closure_decides(state: Any) -> bool:
    """LBFGS looks at the loss to decide how often to call the closure."""
    return isinstance(state[torchbearer.OPTIMIZER], torch.optim.LBFGS)
