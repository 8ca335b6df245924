"""Equal replicas: the same model and optimizer state on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torchbearer

from torchbearer_ddp.callbacks.callback_order import LAST, OrderedCallback
from torchbearer_ddp.errors import DesyncError
from torchbearer_ddp.group import collectives, replicas
from torchbearer_ddp.group.join import versions
from torchbearer_ddp.log import announce


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
            _compare_models(state)
            self._broadcast_tensors(state)

    def on_start(self, state: Any) -> None:
        """Compares at the start: weights may have been loaded, moved or initialised since init."""
        if collectives.world_size() == 1:
            return
        self._align_history(state)
        _compare_run(state)
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


_REMEDY = "Start every rank with the same script, arguments, data and packages."


def _compare_models(state: Any) -> None:
    """Raises the same error on every rank if their models differ in more than values.

    Args:
        state: The state of the Trial.

    Raises:
        DesyncError: Naming the first parameter or buffer that differs, and what each rank has.
    """
    collectives.agree(_shapes(state), "the model", "Build the same model on every rank.")


def _compare_run(state: Any) -> None:
    """Raises the same error on every rank if the ranks are about to do different things.

    Args:
        state: The state of the running Trial.

    Raises:
        DesyncError: Naming what differs, and what each rank has.
    """
    collectives.agree(
        {
            "the world size": collectives.world_size(),
            "the number of epochs": state[torchbearer.MAX_EPOCHS],
            "the number of epochs done": len(state[torchbearer.HISTORY]),
            "the training steps per epoch": state[torchbearer.SELF].state[torchbearer.TRAIN_STEPS],
            "the callbacks": ", ".join(map(_name, state[torchbearer.CALLBACK_LIST])),
            "the metrics": str(state[torchbearer.METRIC_LIST]),
            "the optimizer": type(state[torchbearer.OPTIMIZER]).__name__,
            **{f"the version of {name}": v for name, v in versions().items()},
            **_shapes(state),
        },
        "the plan of this run",
        _REMEDY,
    )


def _shapes(state: Any) -> dict[str, str]:
    tensors = replicas.replicated_tensors(state[torchbearer.MODEL], state[torchbearer.OPTIMIZER])
    return {f"the model's {name}": f"{tuple(t.shape)} {t.dtype}" for name, t in tensors}


def _name(callback: Any) -> str:
    # Not what RankZeroOnly wraps: ranks other than zero may not even have it.
    return type(callback).__name__
