"""torchbearer's own callbacks, where they need help to do on N ranks what they do in one process.

A callback stays in the user's list, with its place and its saved state; a stand-in is called for
it. Callbacks that write do so on rank zero. What one process would see of all of the data (images,
predictions) is gathered. Two faults of torchbearer that act in one process as well are mended:
parameters held as an iterator, and an argument that torch has removed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torchbearer
from torchbearer.callbacks import (
    AggregatePredictions,
    Callback,
    ConsolePrinter,
    CSVLogger,
    GradientClipping,
    GradientNormClipping,
    LiveLossPlot,
    PyCM,
    TensorBoardImages,
    TensorBoardProjector,
    Tqdm,
    WeightDecay,
)
from torchbearer.callbacks.checkpointers import _Checkpointer
from torchbearer.callbacks.imaging import ImagingCallback
from torchbearer.callbacks.tensor_board import AbstractTensorBoard
from torchbearer.callbacks.torch_scheduler import TorchScheduler

from torchbearer_ddp.callbacks.hooks import StandIn
from torchbearer_ddp.callbacks.images import GatheredImages, GatheredTensorBoardImages, divided
from torchbearer_ddp.callbacks.progress import RankZeroBar
from torchbearer_ddp.group import collectives, local_work
from torchbearer_ddp.log import announce
from torchbearer_ddp.metrics import predictions

_WRITERS = (_Checkpointer, CSVLogger, AbstractTensorBoard, ConsolePrinter, LiveLossPlot)
#: Where a callback keeps its stand-in: it may be in the lists of several Trials.
_ATTRIBUTE = "_torchbearer_ddp_stand_in"


def stand_ins(callbacks: list[Callback]) -> list[Callback]:
    """What to call for each of these callbacks; one line names those that changed to rank zero."""
    new = [each for each in callbacks if _ATTRIBUTE not in vars(each)]
    found = [stand_in(each) for each in callbacks]
    kinds = (_OnRankZero, GatheredTensorBoardImages, GatheredImages)
    writing = [type(each).__name__ for each in new if isinstance(stand_in(each), kinds)]
    if writing and collectives.world_size() > 1:
        announce(f"on rank 0 only, because they write: {', '.join(writing)}")
    return found


def stand_in(callback: Callback) -> Callback:
    """What to call for a callback: itself, unless it needs help."""
    if isinstance(callback, TorchScheduler):
        _drop_verbose(callback)
    for kinds, kind in _STAND_INS:
        if isinstance(callback, kinds) and _ATTRIBUTE not in vars(callback):
            setattr(callback, _ATTRIBUTE, kind(callback))
            break
    found: Callback = vars(callback).get(_ATTRIBUTE, callback)
    return found


class _OnRankZero(StandIn):
    """Calls a callback on rank zero."""

    def call(self, hook: str, state: Any) -> None:
        """Calls a hook of the callback, whose work the other ranks do not share."""
        if collectives.is_rank_zero():
            with local_work.local():
                super().call(hook, state)


class _AllPredictions(StandIn):
    """Gives AggregatePredictions the predictions of all ranks."""

    def on_end_validation(self, state: Any) -> None:
        """Gathers at the end of the pass, a hook that every rank calls."""
        share = divided(state)
        if share is None:
            self.callback.on_end_validation(state)
        else:
            state[torchbearer.FINAL_PREDICTIONS] = predictions.gather(
                self.callback.predictions_list, share, state[torchbearer.DEVICE]
            )


class _Matrices(StandIn):
    """Lets PyCM, whose matrices every rank has a part in, write them on rank zero."""

    def __init__(self, callback: Any) -> None:
        super().__init__(callback)
        callback._handlers = [_on_rank_zero(handler) for handler in callback._handlers]


class _EveryBatch(StandIn):
    """Gives a callback a list of parameters, where an iterator ends after the first batch."""

    def __init__(self, callback: Any) -> None:
        super().__init__(callback)
        held = isinstance(callback.params, Iterator)
        if held:
            # Used up if the callback was in a Trial before.
            callback.params = list(callback.params) or None
        self._from_model = callback.params is None
        if held or (self._from_model and not isinstance(callback, GradientClipping)):
            announce(
                f"{type(callback).__name__} acts on every batch: it has a list of its parameters, "
                "not torchbearer's iterator, which the first batch uses up"
            )

    def on_start(self, state: Any) -> None:
        """In each run anew: layers may have been added or frozen since."""
        if self._from_model:
            parameters: Iterable[Any] = state[torchbearer.MODEL].parameters()
            if not isinstance(self.callback, WeightDecay):
                parameters = (each for each in parameters if each.requires_grad)
            self.callback.params = list(parameters)
        self.callback.on_start(state)

    def on_backward(self, state: Any) -> None:
        """A batch whose gradients are held for a later one has none, and torch clips no nothing."""
        values = isinstance(self.callback, GradientClipping)
        if not values or any(parameter.grad is not None for parameter in self.callback.params):
            self.callback.on_backward(state)


_STAND_INS: tuple[tuple[Any, type[StandIn]], ...] = (
    ((TensorBoardImages, TensorBoardProjector), GatheredTensorBoardImages),
    (ImagingCallback, GatheredImages),
    (_WRITERS, _OnRankZero),
    (AggregatePredictions, _AllPredictions),
    ((GradientNormClipping, GradientClipping, WeightDecay), _EveryBatch),
    (Tqdm, RankZeroBar),
    (PyCM, _Matrices),
)


def _drop_verbose(callback: Any) -> None:
    """Takes the argument that torch has removed from its schedulers out of the call of one."""
    builder = callback._scheduler_builder
    if not isinstance(builder, functools.partial) or "verbose" not in builder.keywords:
        return
    if "verbose" in inspect.signature(builder.func).parameters:
        return
    kept = {name: value for name, value in builder.keywords.items() if name != "verbose"}
    callback._scheduler_builder = functools.partial(builder.func, *builder.args, **kept)
    if builder.keywords["verbose"]:
        announce(
            f"{type(callback).__name__}(verbose=True): schedulers of this torch print nothing; "
            "TensorBoard writes the learning rates"
        )


def _on_rank_zero(handler: Any) -> Any:
    """A handler of PyCM for rank zero only, unless it does nothing but fill the state."""
    if handler.__qualname__ == f"{PyCM.to_state.__qualname__}.<locals>.handler":
        return handler

    @functools.wraps(handler)
    def on_rank_zero(matrix: Any, state: Any) -> None:
        if collectives.is_rank_zero():
            handler(matrix, state)

    return on_rank_zero


def _retry_folder() -> None:
    """Lets ranks make the same checkpointer at the same time.

    torchbearer's constructor looks for the folder and then makes it; between the two, another rank
    may have made it. It runs before any hook, so the class itself has to be changed.
    """
    construct = _Checkpointer.__init__

    @functools.wraps(construct)
    def retry(self: Any, *args: Any, **options: Any) -> None:
        try:
            construct(self, *args, **options)
        except FileExistsError:
            construct(self, *args, **options)

    _Checkpointer.__init__ = retry


_retry_folder()
