"""Equal replicas and averaged gradients: the heart of data-parallel training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torchbearer
from torch.nn.parallel import DistributedDataParallel

from torchbearer_ddp import collectives, process_group, randomness, replicas, signals
from torchbearer_ddp.announce import announce
from torchbearer_ddp.callbacks import plan
from torchbearer_ddp.callbacks.accumulation import Accumulation
from torchbearer_ddp.callbacks.ordering import FIRST, LAST, OrderedCallback
from torchbearer_ddp.errors import DesyncError
from torchbearer_ddp.metrics import batch_size
from torchbearer_ddp.reducer.header import Answer, Note
from torchbearer_ddp.reducer.order import GradientOrder
from torchbearer_ddp.reducer.reducer import Options, Reducer, Timing
from torchbearer_ddp.reducer.sums import HALVES


class SyncModel(OrderedCallback):
    """Begins with equal replicas, and makes sure that they stay equal.

    Example: ::

        >>> from torchbearer import Trial
        >>> from torchbearer_ddp import SyncModel
        >>> trial = Trial(None, callbacks=[SyncModel()])

    Args:
        check: Compare the replicas after every so many epochs; 0 for never.

    State Requirements:
        - :attr:`torchbearer.state.MODEL`: The model to broadcast
        - :attr:`torchbearer.state.OPTIMIZER`: Its state is broadcast where ranks start with
          different ones
        - :attr:`torchbearer.state.HISTORY`: The epochs done so far
    """

    # After the callbacks that may load or initialise weights; a checkpoint comes later still.
    order: ClassVar[Mapping[str, int]] = {"on_start": LAST, "on_end_training": LAST}

    def __init__(self, check: int = 1) -> None:
        super().__init__()
        if check < 0:
            raise ValueError(f"check is {check}: give the number of epochs between checks, or 0.")
        self._check = check

    def on_init(self, state: Any) -> None:
        """Broadcasts at init, so that whatever the user does with the model next is done alike."""
        super().on_init(state)
        if collectives.world_size() > 1:
            plan.compare_models(state)
            self._broadcast_tensors(state)

    def on_start(self, state: Any) -> None:
        """Compares at the start: weights may have been loaded, moved or initialised since init."""
        if collectives.world_size() == 1:
            return
        self._align_history(state)
        plan.compare(state)
        tensors = replicas.replicated_tensors(
            state[torchbearer.MODEL], state[torchbearer.OPTIMIZER]
        )
        optimizer = state[torchbearer.OPTIMIZER]
        difference = replicas.first_difference(
            [*tensors, *_optimizer_tensors(optimizer)], "the replicas at the start"
        )
        if difference is not None:
            name, ranks = difference
            announce(
                f"{name} on rank {', '.join(map(str, ranks))} differed from rank 0 at the start; "
                "every rank now has rank 0's model and optimizer state"
            )
            self._broadcast_tensors(state)
            self._broadcast_optimizer(optimizer)

    def on_end_training(self, state: Any) -> None:
        """After the last step and before validation: statistics agree, and so must the rest."""
        if collectives.world_size() == 1:
            return
        model = state[torchbearer.MODEL]
        replicas.align_buffers(model)
        if self._check and (state[torchbearer.EPOCH] + 1) % self._check == 0:
            tensors = replicas.replicated_tensors(model, state[torchbearer.OPTIMIZER])
            difference = replicas.first_difference(tensors, "the replicas after an epoch")
            if difference is not None:
                name, ranks = difference
                raise DesyncError(
                    f"After epoch {state[torchbearer.EPOCH]}, {name} on rank "
                    f"{', '.join(map(str, ranks))} differs from rank 0's. Something changes it on "
                    "some ranks only: an optimizer step outside the Trial, a callback that writes "
                    "parameters, or a parameter that is not in the model."
                )

    def _align_history(self, state: Any) -> None:
        """A state loaded on rank zero alone also brings epochs that the others have not seen."""
        history = state[torchbearer.HISTORY]
        done = collectives.all_gather(len(history), "the number of epochs done")
        if len(set(done)) > 1:
            announce(f"only some ranks had a history ({done}); every rank now has rank 0's")
            history[:] = collectives.broadcast(list(history), "the history")

    def _broadcast_tensors(self, state: Any) -> None:
        tensors = replicas.replicated_tensors(
            state[torchbearer.MODEL], state[torchbearer.OPTIMIZER]
        )
        collectives.broadcast_tensors([t for _, t in tensors], "the model")

    def _broadcast_optimizer(self, optimizer: Any) -> None:
        mine = optimizer.state_dict() if collectives.is_rank_zero() else None
        received = collectives.broadcast(mine, "the optimizer's state")
        if not collectives.is_rank_zero():
            optimizer.load_state_dict(received)


def _optimizer_tensors(optimizer: Any) -> list[tuple[str, torch.Tensor]]:
    """One tensor for the whole of the optimizer's state: ranks may hold different keys."""
    parts = [torch.tensor(len(optimizer.state), dtype=torch.int64)]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            held = optimizer.state.get(parameter, {})
            parts += [held[key] for key in sorted(held) if torch.is_tensor(held[key])]
    return [("the optimizer's state", replicas.fingerprint([("", part) for part in parts]))]


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
        self._answer: Answer | None = None

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
        group = process_group.current()
        if group is not None and group.member.world_size > 1 and not group.parted:
            randomness.part_streams(group.member.rank)
            group.parted = True

    def on_start_training(self, state: Any) -> None:
        """Each epoch anew: layers may have been added, moved or replaced in between."""
        self._asked = self._ran_backward = False
        self._answer = None
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
        group = process_group.current()
        if group is None or group.member.world_size == 1:
            return
        frozen = [not parameter.requires_grad for _, parameter in self._trained]
        if self._reducer is None or frozen != self._frozen:
            self._frozen = frozen
            self._reducer = self._new_reducer(group, state)
        signum = signals.requested() or 0
        note = Note(0, batch_size(state), stop=self._asked or signum > 0, signal=signum)
        if _closure_decides(state):
            note.loss = float(state[torchbearer.LOSS].detach())
        self._answer = self._reducer.reduce(note)
        if _closure_decides(state):
            # Every rank must come to the same decision on how often to call the closure.
            with torch.no_grad():
                state[torchbearer.LOSS].fill_(self._answer.loss)

    def on_step_training(self, state: Any) -> None:
        """After every callback that may ask to stop at this step."""
        if collectives.world_size() == 1:
            if signals.requested():
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
            signals.request(answer.signal)

    def on_end_training(self, state: Any) -> None:
        """A request made at the last step or since has no gradient to travel with."""
        self._agree(state, "a stop at the end of training")

    def on_checkpoint(self, state: Any) -> None:
        """The last hook before torchbearer looks at the flag at the end of an epoch."""
        self._agree(state, "a stop at the end of an epoch")

    def on_end(self, state: Any) -> None:
        """Gives the buckets back: the gradients stay valid, in memory of their own."""
        self._close()
        signals.stop_asking()

    def _agree(self, state: Any, name: str) -> None:
        if collectives.world_size() == 1:
            return
        signum = signals.requested() or 0
        asked = self._asked or bool(state[torchbearer.STOP_TRAINING]) or signum > 0
        everyone = collectives.all_gather((asked, signum), name)
        self._asked = any(each for each, _ in everyone)
        state[torchbearer.STOP_TRAINING] = self._asked
        if last := max(number for _, number in everyone):
            signals.request(last)

    def _new_reducer(self, group: process_group.Group, state: Any) -> Reducer:
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
