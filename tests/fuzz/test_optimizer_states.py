"""Something odd in a saved optimizer or scheduler: it is refused, or the next steps work.

``TORCHBEARER_DDP_ODD_RESUMES=100000`` runs all of the cases instead of some.
"""

import copy
import functools
import os
import random
import warnings

import pytest
import torch
from torch.optim import lr_scheduler

from tests.fuzz.targets import ODD, places, replaced
from torchbearer_ddp.checkpoints import contents, rehearsal
from torchbearer_ddp.errors import CheckpointError
from torchbearer_ddp.group import layouts

CASES = 2 * int(os.environ.get("TORCHBEARER_DDP_ODD_RESUMES", "30"))
VALUES = (
    *ODD, 0, 0.5, float("nan"), float("inf"), 2**62, -(2**62), torch.ones(()), torch.ones(1),
    torch.ones(2, dtype=torch.float64), torch.ones(3, 2), torch.zeros(0),
    torch.tensor(float("nan")),
)  # fmt: skip
OPTIMIZERS = {
    "SGD": {"momentum": 0.9},
    "Adam": {"lr": torch.tensor(0.01), "amsgrad": True, "foreach": False},
    "AdamW": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "Adadelta": {},
    "Adagrad": {},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "Rprop": {},
    "ASGD": {},
    "Adafactor": {},
    "LBFGS": {"history_size": 2, "max_iter": 2},
}
SCHEDULERS = {
    "StepLR": {"step_size": 1},
    "MultiStepLR": {"milestones": [1, 3]},
    "ConstantLR": {},
    "LinearLR": {},
    "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingLR": {"T_max": 3},
    "CosineAnnealingWarmRestarts": {"T_0": 2},
    "CyclicLR": {"base_lr": 0.001, "max_lr": 0.1},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 20},
    "ReduceLROnPlateau": {"patience": 0},
}


def chosen(saved):
    every = [(path, value) for path in places(saved) for value in VALUES]
    return random.Random(0).sample(every, min(CASES, len(every)))


class Training:
    """Parameters of several shapes, two of them alike, with an optimizer."""

    def __init__(self, kind, **settings):
        shapes = [(3, 2), (2,), (3,), (2,)]
        self.parameters = [torch.ones(shape, requires_grad=True) for shape in shapes]
        self.optimizer = getattr(torch.optim, kind)(self.parameters, **settings)

    def step(self):
        def closure():
            self.optimizer.zero_grad()
            loss = sum(parameter.square().sum() for parameter in self.parameters)
            loss.backward()
            return loss

        self.optimizer.step(closure)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.timeout(60 + CASES)
def test_optimizer(kind):
    made = Training(kind, **OPTIMIZERS[kind])
    for _ in range(3):
        made.step()
    good = copy.deepcopy(made.optimizer.state_dict())
    refused = 0
    for path, value in [((), good), *chosen(good)]:
        made, saved = Training(kind, **OPTIMIZERS[kind]), replaced(good, path, value)
        load = functools.partial(layouts.load_optimizer, made.optimizer, copy.deepcopy(saved))
        try:
            contents.fitting(load, "it")
        except CheckpointError:
            assert value is not good, "a good one is refused"
            refused += 1
        else:
            made.step()
            made.step()
    assert refused > CASES / 3 or CASES > 1000


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.timeout(60 + CASES)
def test_scheduler(kind):
    def build():
        training = Training("SGD", lr=0.1, momentum=0.9)
        return training, getattr(lr_scheduler, kind)(training.optimizer, **SCHEDULERS[kind])

    def step(training, scheduler):
        training.step()
        scheduler.step(*[1.0] * (kind == "ReduceLROnPlateau"))

    def load(saved):
        _, unused = build()
        contents.load_scheduler(unused, copy.deepcopy(saved), "it")
        contents.fitting(functools.partial(rehearsal.try_step, unused), "it")
        training, scheduler = build()
        contents.load_scheduler(scheduler, copy.deepcopy(saved), "it")
        return training, scheduler

    training, scheduler = build()
    for _ in range(3):
        step(training, scheduler)
    good = copy.deepcopy(scheduler.state_dict())
    refused = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for path, value in [((), good), *chosen(good)]:
            try:
                loaded = load(replaced(good, path, value))
            except CheckpointError:
                assert value is not good, "a good one is refused"
                refused += 1
            else:
                step(*loaded)
    assert refused > CASES / 3 or CASES > 1000


def test_a_schedule_that_has_come_to_its_end_is_not_refused():
    training = Training("SGD", lr=0.1, momentum=0.9)
    scheduler = lr_scheduler.OneCycleLR(training.optimizer, max_lr=0.1, total_steps=3)
    for _ in range(2):
        training.step()
        scheduler.step()
    saved = copy.deepcopy(scheduler.state_dict())
    scheduler = lr_scheduler.OneCycleLR(Training("SGD", momentum=0.9).optimizer, 0.1, total_steps=3)
    contents.load_scheduler(scheduler, saved, "it")
    rehearsal.try_step(scheduler)
    rehearsal.try_step(scheduler)
    with pytest.raises(ValueError, match="Tried to step"):
        scheduler.step()
