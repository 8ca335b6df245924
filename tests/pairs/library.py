"""The same runs on several ranks, with the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torchbearer
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial
from torchbearer.callbacks import Callback

from tests.pairs import reference
from tests.pairs.cases import BATCHES, Case
from torchbearer_ddp import Checkpoint, MixedPrecision, data_parallel
from torchbearer_ddp.group import collectives

#: For each call of ``run`` the batches that it trained, each an epoch and a number.
Journal = list[list[tuple[int, int]]]


#: The loss scale after each step of the optimizer.
Scales = list[float]


class BadBatch(Exception):
    """What the caller of ``run`` catches."""


class Killed(Exception):
    """The end of a run that is resumed."""


class Happenings(Callback):
    """Lets each event of a case happen once, and notes the batches and the loss scales."""

    def __init__(
        self, case: Case, model: reference.Model, journal: Journal, scales: Scales, left: set[str]
    ) -> None:
        super().__init__()
        self._case, self._model, self._left = case, model, left
        self._journal, self._scales = journal, scales

    def _happens(self, event: str, now: bool) -> bool:
        if not now or event not in self._left:
            return False
        self._left.remove(event)
        return True

    def on_sample(self, state: Any) -> None:
        epoch, batch = state[torchbearer.EPOCH], state[torchbearer.BATCH]
        self._model.set_trainable(self._case.trainable(epoch, batch))
        if self._happens("resume", (epoch, batch) == self._case.kill):
            raise Killed
        if self._happens("caught", batch == self._case.event):
            if self._case.place == "sample":
                raise BadBatch
            self._model.fails = BadBatch()

    def on_step_training(self, state: Any) -> None:
        epoch, batch = state[torchbearer.EPOCH], state[torchbearer.BATCH]
        self._journal[-1].append((epoch, batch))
        if self._case.is_last_of_window(batch) and "loss_scale" in state[torchbearer.METRICS]:
            self._scales.append(state[torchbearer.METRICS]["loss_scale"])
        # Every rank forgets the event, but only one asks.
        if self._happens("stop", batch == self._case.event) and collectives.rank() == 1:
            state[torchbearer.STOP_TRAINING] = True

    def on_end_epoch(self, state: Any) -> None:
        if state[torchbearer.EPOCH] == 0 and self._happens("converted", self._is_training(state)):
            self._model.convert(self._case.conversion)

    def _is_training(self, state: Any) -> bool:
        """False for evaluate(), which ends an epoch as well."""
        return bool(self._journal[-1])


def closure_of(case: Case, model: reference.Model) -> Callable[[Any], Any] | None:
    """A closure of the script's own, where the case needs one."""
    freezes = case.has("gradient") and case.accumulate == 1
    if not (case.has("closure") or case.has("lbfgs") or freezes):
        return None
    calls_back = case.calls_back or not case.has("closure")

    def closure(state: Any) -> torch.Tensor:
        state[torchbearer.OPTIMIZER].zero_grad()
        if freezes:
            model.set_trainable({"gradient": True})
        state[torchbearer.Y_PRED] = state[torchbearer.MODEL](state[torchbearer.X])
        loss = state[torchbearer.CRITERION](state[torchbearer.Y_PRED], state[torchbearer.Y_TRUE])
        state[torchbearer.LOSS] = loss
        if case.mixed is not None:
            state[torchbearer.CALLBACK_LIST].on_criterion(state)
        loss.backward(**state[torchbearer.BACKWARD_ARGS])
        if freezes:
            model.set_trainable({"gradient": False})
        if calls_back:
            state[torchbearer.CALLBACK_LIST].on_backward(state)
        return state[torchbearer.LOSS]

    return closure


def build(
    case: Case, journal: Journal, scales: Scales, left: set[str], folder: str
) -> tuple[Trial, Any]:
    """A Trial of this rank, on data of its own."""
    model = reference.Model(case)
    model.rank = rank = collectives.rank()
    options: dict[str, Any] = {"transport": case.transport, "bucket_mb": case.bucket_mb}
    if case.accumulate > 1:
        options["accumulate"] = case.accumulate
    if case.weighted is not None:
        options["weighted"] = case.weighted
    if case.compress is not None:
        options["compress"] = case.compress
        if case.compress == "powersgd":
            options["rank"] = 6  # of which small matrices are not made: they travel as they are
    if case.hook is not None:
        options |= {"hook": getattr(default_hooks, case.hook), "transport": "auto"}
    if case.every > 1:
        options["every"] = case.every
    more: list[Any] = []
    if case.has("resume"):
        more.append(Checkpoint(folder, every_steps=1, background=False, monitor=None))
    if case.mixed is not None:
        scaling = {"init_scale": case.loss_scale, "growth_interval": reference.GROWTH_INTERVAL}
        more.append(MixedPrecision(case.mixed, **scaling))
    trial = Trial(
        model,
        reference.make_optimizer(case, model),
        lambda y_pred, y_true: reference.loss(case, y_pred, y_true),
        callbacks=[
            *data_parallel(shard=False, **options),
            Happenings(case, model, journal, scales, left),
            *more,
        ],
        verbose=0,
    )
    if closure := closure_of(case, model):
        trial.with_closure(closure)
    loader = DataLoader(TensorDataset(*reference.data(case, rank)), batch_size=case.sizes[rank][0])
    assert len(loader) == BATCHES
    return trial.with_train_generator(loader), model


def call_runs(case: Case, trial: Trial, journal: Journal) -> None:
    """What the script does: each call once, and again after an exception or a stop."""
    for number, epochs in enumerate(case.calls):
        if number:
            trial.evaluate(data_key=torchbearer.TRAIN_DATA)
        while len(trial.state[torchbearer.HISTORY]) < epochs:
            journal.append([])
            try:
                trial.run(epochs)
            except BadBatch:
                continue


def train(case: Case, folder: str) -> tuple[dict[str, torch.Tensor], Journal, Scales]:
    """Trains a case on this rank; returns the parameters, the batches of each run, the scales."""
    torch.set_num_threads(1)
    journal: Journal = []
    scales: Scales = []
    left = {"stop", "caught", "resume", "converted"} & case.features
    trial, model = build(case, journal, scales, left, folder)
    try:
        call_runs(case, trial, journal)
    except Killed:
        trial, model = build(case, journal, scales, left, folder)
        call_runs(case, trial, journal)
    parameters = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return parameters, journal, scales
