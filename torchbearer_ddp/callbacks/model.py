"""Equal replicas: the same model and optimizer state on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
import torchbearer
from torch.nn.parameter import is_lazy

from torchbearer_ddp.callbacks.callback_order import LAST, OrderedCallback, of_kind
from torchbearer_ddp.callbacks.gradients import SyncGradients
from torchbearer_ddp.callbacks.mixed_precision import MixedPrecision
from torchbearer_ddp.errors import DesyncError
from torchbearer_ddp.group import agreement, collectives, layouts, replicas, trained
from torchbearer_ddp.group.join import versions
from torchbearer_ddp.log import announce


class SyncModel(OrderedCallback):
    """Makes the replicas equal at the start, and checks that they stay equal.

    A replica is all that a run trains: the model, the criterion, and every module and optimizer in
    the state of the Trial, under any key, and in the attributes of its callbacks.

    Example: ::

        >>> from torchbearer import Trial
        >>> from torchbearer_ddp import SyncModel
        >>> trial = Trial(None, callbacks=[SyncModel()])

    Args:
        check: The number of epochs between comparisons of the replicas; 0 for no comparison.

    State Requirements:
        - :attr:`torchbearer.state.MODEL`: The model to broadcast
        - :attr:`torchbearer.state.OPTIMIZER`: Its state is broadcast where ranks start with
          different ones
        - :attr:`torchbearer.state.HISTORY`: The epochs done so far
    """

    only_once: ClassVar[bool] = True
    # After the callbacks that may load or initialise weights, and before Checkpoint.
    order: ClassVar[Mapping[str, int]] = {"on_start": LAST, "on_end_training": LAST}

    def __init__(self, check: int = 1) -> None:
        super().__init__()
        if check < 0:
            raise ValueError(f"check is {check}: give the number of epochs between checks, or 0.")
        self._check = check

    def on_init(self, state: Any) -> None:
        """Broadcasts at init, so that what the user does next finds equal models on all ranks."""
        super().on_init(state)
        if collectives.world_size() > 1:
            tensors = _replicated(state, trained.find(state))
            remedy = "Build the same model on every rank."
            agreement.agree(_shapes(tensors), "the model", remedy)
            collectives.broadcast_tensors([tensor for _, tensor in tensors], "the model")

    def on_start(self, state: Any) -> None:
        """Compares at the start: weights may have been loaded, moved or initialised since init."""
        if collectives.world_size() == 1:
            return
        found = trained.find(state)
        _refuse_lazy(found)
        for each in of_kind(state, SyncGradients):
            each.align_replicas(state)
            each.stop_is_asked_elsewhere = True  # here, at the end of each epoch
        tensors = _replicated(state, found)
        local = {id(p) for each in _skipped(state) for p in trained.parameters_of(each)}
        optimizers = {
            name: each
            for name, each in found.optimizers.items()
            if local.isdisjoint(map(id, trained.parameters_of(each)))
        }
        states = [(f"the state of {n}", _checksums(each)) for n, each in optimizers.items()]
        compared = [*tensors, *states]
        checksums = replicas.fingerprint(compared)
        history = state[torchbearer.HISTORY]
        losses = [each.losses.kept(state) for each in of_kind(state, SyncGradients)]
        # Lengths of histories, checksums and what is known may differ, unlike the plan.
        everyone = agreement.agree(
            _plan(state, found, tensors),
            "the plan of this run",
            "Start every rank with the same script, arguments, data and packages.",
            extra=(len(history), agreement.digest(checksums), agreement.digest(losses)),
        )
        _align_history(history, [epochs for epochs, _, _ in everyone])
        for each in of_kind(state, SyncGradients):
            each.losses.keep(alike=len({known for _, _, known in everyone}) == 1)
        names, digests = [name for name, _ in compared], [each for _, each, _ in everyone]
        if difference := replicas.difference(names, checksums, digests):
            name, ranks = difference
            announce(
                f"{name} on rank {ranks} differed from rank 0 at the start; every rank now has "
                "rank 0's model and optimizer state"
            )
            collectives.broadcast_tensors([tensor for _, tensor in tensors], "the model")
            for optimizer in optimizers.values():
                _broadcast_optimizer(optimizer)

    def on_end_training(self, state: Any) -> None:
        """After the last step and before validation: BatchNorm statistics are averaged here."""
        if collectives.world_size() == 1:
            return
        epoch = state[torchbearer.EPOCH]
        is_due = bool(self._check) and (epoch + 1) % self._check == 0
        drifts = any(each.may_drift for each in of_kind(state, SyncGradients))
        found = trained.find(state)
        _compare(state, found, with_values=is_due and not drifts)
        modules = torch.nn.ModuleList(found.modules.values())
        local = [buffer for each in _skipped(state) for buffer in _buffers_of(each)]
        replicas.align_buffers(modules, local)
        for each in of_kind(state, SyncGradients):
            each.align_replicas(state)
        if is_due and drifts:
            _compare(state, found, with_values=True)


def _compare(state: Any, found: trained.Found, *, with_values: bool) -> None:
    """Compares what the ranks train, and the values of parameters too, in one exchange.

    Buffers are not compared: they are made equal. The same exchange agrees on a stop.

    Raises:
        DesyncError: On every rank, if something differs.
    """
    shapes = _shapes(_replicated(state, found))
    parameters = _with_values(found.parameters(_skipped(state))) if with_values else []
    checksums = replicas.fingerprint(parameters)
    gradients = of_kind(state, SyncGradients)
    everyone = agreement.agree(
        shapes,
        "what is trained",
        "Keep the same modules in the state and on callbacks of every rank; what is rank zero's "
        "alone belongs into a callback in RankZeroOnly, or into SyncGradients(skip=...)",
        extra=(agreement.digest(checksums), [each.wish_to_stop(state) for each in gradients]),
        head_bytes=collectives.SHORT_BYTES,
    )
    digests = [digest for digest, _ in everyone]
    for index, each in enumerate(gradients):
        each.agree_on_stop(state, [wishes[index] for _, wishes in everyone])
    names = [name for name, _ in parameters]
    if difference := replicas.difference(names, checksums, digests):
        name, ranks = difference
        raise DesyncError(
            f"After epoch {state[torchbearer.EPOCH]}, {name} on rank {ranks} differs from rank "
            "0's. Only some ranks change it: look for an optimizer step outside the Trial, a "
            "callback that writes parameters, or a parameter that is not in the model."
        )


def _skipped(state: Any) -> list[Any]:
    """What SyncGradients leaves to each rank on purpose."""
    return [each for callback in of_kind(state, SyncGradients) for each in callback.skip]


def _buffers_of(thing: Any) -> list[torch.Tensor]:
    return list(thing.buffers()) if isinstance(thing, torch.nn.Module) else []


def _replicated(state: Any, found: trained.Found) -> replicas.Named:
    """Parameters and buffers, which must be equal on all ranks."""
    skip = _skipped(state)
    return _with_values([*found.parameters(skip), *found.buffers(skip)])


def _with_values(tensors: Iterable[tuple[str, torch.Tensor]]) -> replicas.Named:
    return [(name, each) for name, each in tensors if not is_lazy(each) and not each.is_meta]


def _refuse_lazy(found: trained.Found) -> None:
    """Parameters that get their shape in a run would get other values on each rank."""
    lazy = [name for name, parameter in found.parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(
            f"{lazy[0]} has no shape yet (a lazy module): it would get its values during the run, "
            "from each rank's own random numbers. Pass one batch through the model before run()."
        )


def _shapes(tensors: replicas.Named) -> dict[str, str]:
    return {f"the model's {name}": f"{tuple(t.shape)} {t.dtype}" for name, t in tensors}


def _plan(state: Any, found: trained.Found, tensors: replicas.Named) -> dict[str, Any]:
    """What must be equal on all ranks before they train together."""
    return {
        "the world size": collectives.world_size(),
        "the number of epochs": state[torchbearer.MAX_EPOCHS],
        "the training steps per epoch": state[torchbearer.SELF].state[torchbearer.TRAIN_STEPS],
        # Only the class of RankZeroOnly: other ranks need not have the callback inside it.
        "the callbacks": ", ".join(type(c).__name__ for c in state[torchbearer.CALLBACK_LIST]),
        "the dtype of MixedPrecision": [each.dtype for each in of_kind(state, MixedPrecision)],
        "the metrics": str(state[torchbearer.METRIC_LIST]),
        **{name: type(each).__name__ for name, each in found.optimizers.items()},
        **{f"the version of {name}": version for name, version in versions().items()},
        **_shapes(tensors),
    }


def _checksums(optimizer: Any) -> torch.Tensor:
    """One tensor for the whole of an optimizer's state: ranks may hold different keys."""
    parts = [torch.tensor(len(optimizer.state), dtype=torch.int64, device="cpu")]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            held = optimizer.state.get(parameter, {})
            parts += [held[key] for key in sorted(held) if torch.is_tensor(held[key])]
    return replicas.fingerprint([("", part) for part in parts])


def _align_history(history: list[Any], epochs_done: list[int]) -> None:
    """A state that was loaded on rank zero alone also has epochs that the other ranks lack."""
    if len(set(epochs_done)) > 1:
        announce(f"only some ranks had a history ({epochs_done}); every rank now has rank 0's")
        history[:] = collectives.broadcast(list(history), "the history")


def _broadcast_optimizer(optimizer: Any) -> None:
    is_rank_zero = collectives.is_rank_zero()
    mine: Any = optimizer.state_dict() if is_rank_zero else None
    received = collectives.broadcast(mine, "the optimizer's state")
    if not is_rank_zero:
        layouts.load_optimizer(optimizer, received)
