"""Drawn at random: closures that skip or fail, frozen layers, several runs, against arithmetic.

``TORCHBEARER_DDP_CLOSURE_SEEDS=1000-2000`` runs other plans than the usual ones.
"""

import contextlib
import os
import random
from dataclasses import dataclass, field

import pytest
import torch
import torchbearer
from torch import nn
from torch.nn import functional
from torchbearer import Trial
from torchbearer.callbacks import on_sample, on_step_training

from tests.callbacks.averaging import Failed, Fails, assert_replicas_equal, flat, on_two_ranks, sync
from torchbearer_ddp.group import collectives

RANKS = 2
FIRST, _, END = os.environ.get("TORCHBEARER_DDP_CLOSURE_SEEDS", "0-100").partition("-")
#: A closure returns before it clears gradients, after that, after the model, or after its loss;
#: or backward fails, and it catches that.
SKIPS = ["at once", "cleared", "predicted", "announced", "failed"]
LOSSES = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "ignored": {"ignore_index": 0},
    "weighted": {"weight": torch.tensor([0.1, 1.0, 2.0, 0.5])},
}
OPTIMIZERS = {
    "plain": lambda parameters: torch.optim.SGD(parameters, 0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
}


class Net(nn.Module):
    """A table, two layers, and one that only some batches use."""

    def __init__(self, *, sparse):
        super().__init__()
        self.table, self.hidden = nn.Embedding(12, 6, sparse=sparse), nn.Linear(6, 6)
        self.out, self.side, self.uses_side = nn.Linear(6, 4), nn.Linear(6, 4), False

    def forward(self, x):
        found = torch.tanh(self.hidden(self.table(x)))
        return self.out(found) + (self.side(found) if self.uses_side else 0.0)


@dataclass
class Batch:
    """One rank's part of a step."""

    x: torch.Tensor
    y: torch.Tensor
    uses_side: bool
    skip: str | None


@dataclass
class Run:
    """One run of the Trial: its steps, and where it is ended."""

    loss: str
    frozen: str | None
    epochs: int
    calls_on_backward: bool
    evaluates: bool
    ends: tuple[int, str] | None
    steps: list[list[Batch]] = field(default_factory=list)


class Plan:
    """All that is drawn for one seed."""

    def __init__(self, seed):
        drawn = self._drawn = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self.accumulate = drawn.choice([1, 1, 2, 3])
        self.options = {
            "transport": drawn.choice(["auto", "gloo"]),
            "bucket_mb": drawn.choice([None, 1e-4]),
            "accumulate": self.accumulate,
        }
        self.sparse = drawn.random() < 0.25
        self.optimizer = "plain" if self.sparse else drawn.choice([*OPTIMIZERS])
        self.runs = [self._run() for _ in range(drawn.randint(2, 4))]
        sums = any(run.loss == "sum" for run in self.runs)
        # With zeros instead of None a rank cannot know what others step on, and sums are refused.
        usual = sums or self.accumulate > 1 or self.optimizer != "plain"
        self.sets_to_none = usual or drawn.random() < 0.5

    def _run(self):
        drawn = self._drawn
        length = drawn.randint(2, 6)
        where = drawn.choice(["sample", "forward", "backward", "step"])
        ends = (drawn.randrange(length), where) if drawn.random() < 0.25 else None
        run = Run(
            drawn.choice([*LOSSES]),
            drawn.choice([None, None, "table", "hidden", "out"]),
            drawn.choice([1, 1, 2]),
            drawn.random() < 0.8,
            drawn.random() < 0.3,
            ends,
        )
        for index in range(length):
            is_usual = index == (ends or (-1,))[0]
            skips = [self._skip(is_usual or not index) for _ in range(RANKS)]
            skips = [skips[0] if all(skips) else each for each in skips]
            run.steps.append([self._batch(skip) for skip in skips])
        return run

    def _skip(self, is_usual):
        """Nothing is skipped where the kind of a loss is found, or the run is ended."""
        drawn = self._drawn.choice(SKIPS) if self._drawn.random() < 0.15 else None
        return None if is_usual else drawn

    def _batch(self, skip):
        n = self._drawn.choice([2, 3, 4, 4, 6])
        x = torch.randint(0, 12, (n,), generator=self._generator)
        y = torch.randint(0, 4, (n,), generator=self._generator)
        y[0] = 1  # something counts
        return Batch(x, y, self._drawn.random() < 0.5, skip)

    def start(self):
        torch.manual_seed(3)
        model = Net(sparse=self.sparse)
        optimizer = OPTIMIZERS[self.optimizer](model.parameters())
        clear = optimizer.zero_grad
        optimizer.zero_grad = lambda set_to_none=True: clear(set_to_none=self.sets_to_none)
        return model, optimizer


def freeze(model, name):
    for part in ("table", "hidden", "out"):
        getattr(model, part).requires_grad_(part != name)


class ByRanks:
    """A Trial on this rank."""

    def __init__(self, plan):
        self.plan, self.run, self.mine = plan, plan.runs[0], collectives.rank()
        self.model, self.optimizer = plan.start()

    def stop_at(self, place):
        def stop(state):
            if self.run.ends == (state[torchbearer.BATCH], place):
                raise Failed

        return stop

    def closure(self, state):
        batch = self.run.steps[state[torchbearer.BATCH]][self.mine]
        self.model.uses_side = batch.uses_side
        if batch.skip == "at once":
            return
        self.optimizer.zero_grad()
        if batch.skip != "cleared":
            self.predict(state, batch.skip)

    def predict(self, state, skip):
        predicted = state[torchbearer.Y_PRED] = self.model(state[torchbearer.X])
        self.stop_at("forward")(state)
        if skip == "predicted":
            return
        if skip == "failed" or self.run.ends == (state[torchbearer.BATCH], "backward"):
            predicted = Fails.apply(predicted)
        criterion = state[torchbearer.CRITERION]
        state[torchbearer.LOSS] = criterion(predicted, state[torchbearer.Y_TRUE])
        state[torchbearer.CALLBACK_LIST].on_criterion(state)
        if skip != "announced":
            self.go_backward(state, skip)

    def go_backward(self, state, skip):
        try:
            state[torchbearer.LOSS].backward(**state[torchbearer.BACKWARD_ARGS])
        except Failed:
            if not skip:
                raise
            self.optimizer.zero_grad()
            return
        if self.run.calls_on_backward:
            state[torchbearer.CALLBACK_LIST].on_backward(state)


def by_ranks(plan):
    """The parameters after each run of a Trial on this rank."""
    ranks, found = ByRanks(plan), []
    stops = [on_sample(ranks.stop_at("sample")), on_step_training(ranks.stop_at("step"))]
    callbacks = [*sync(**plan.options), *stops]
    trial = Trial(ranks.model, ranks.optimizer, None, callbacks=callbacks, verbose=0)
    trial.with_closure(ranks.closure)
    for run in plan.runs:
        ranks.run = run
        trial.state[torchbearer.CRITERION] = nn.CrossEntropyLoss(**LOSSES[run.loss])
        freeze(ranks.model, run.frozen)
        data = [(step[ranks.mine].x, step[ranks.mine].y) for step in run.steps]
        trial.with_train_generator(data, steps=len(data))
        with contextlib.suppress(Failed):
            trial.run(len(trial.state[torchbearer.HISTORY]) + run.epochs)
        if run.evaluates:
            trial.with_val_generator(data, steps=len(data)).evaluate()
        found.append(flat(ranks.model))
    assert_replicas_equal(ranks.model)
    return found


def by_hand(plan):
    """The same in one process, without a Trial: sums over all samples, divided by their weights."""
    model, optimizer = plan.start()
    found = []
    for run in plan.runs:
        freeze(model, run.frozen)
        for _ in range(run.epochs):
            if not epoch_by_hand(plan, run, model, optimizer):
                break
        found.append(flat(model))
    return found


def epoch_by_hand(plan, run, model, optimizer):
    """True if the epoch was not ended."""
    options = {name: each for name, each in LOSSES[run.loss].items() if name != "reduction"}
    window = []
    for index, step in enumerate(run.steps):
        if run.ends and run.ends[0] == index and run.ends[1] != "step":
            return False
        window += [batch for batch in step if batch.skip is None]
        is_last = (index + 1) % plan.accumulate == 0 or index + 1 == len(run.steps)
        is_stale = plan.accumulate == 1 and all(batch.skip == "at once" for batch in step)
        if is_last:
            if not is_stale:  # else the optimizer steps on what the last step has left
                set_gradients(plan, model, window, options, is_sum=run.loss == "sum")
            optimizer.step()
            window = []
        if run.ends and run.ends[0] == index:
            return False
    return True


def set_gradients(plan, model, window, options, *, is_sum):
    trained = [p for p in model.parameters() if p.requires_grad]
    before = {p: p.grad is not None for p in model.parameters()}
    for parameter in model.parameters():
        parameter.grad = None
    total = 0.0
    for batch in window:
        model.uses_side = batch.uses_side
        predicted = model(batch.x)
        functional.cross_entropy(predicted, batch.y, reduction="sum", **options).backward()
        weight = options.get("weight", torch.ones(4)).clone()
        weight[list(filter(None, [options.get("ignore_index")]))] = 0.0
        counted = batch.y != options.get("ignore_index", -100)
        total += float(weight[batch.y][counted].sum())
    for parameter in trained:
        if parameter.grad is not None and not is_sum and total:
            parameter.grad = parameter.grad / total
    for parameter, had in before.items():
        if parameter.grad is None and had and not plan.sets_to_none:
            parameter.grad = torch.zeros_like(parameter)


@pytest.mark.parametrize("part", range(4))
def test_plans_drawn_at_random_give_what_arithmetic_gives(part, two_ranks):
    first, end = int(FIRST), int(END or int(FIRST) + 1)

    @on_two_ranks
    def body():
        for seed in range(first + part, end, 4):
            plan = Plan(seed)
            pairs = zip(by_ranks(plan), by_hand(plan), strict=True)
            for number, (ours, expected) in enumerate(pairs):
                assert torch.allclose(ours, expected, rtol=1e-4, atol=2e-5), (seed, number)

    body(two_ranks)
