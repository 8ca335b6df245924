"""The metrics of a pass of many ranks: what each sends, and that the sums are those of one process.

Pure functions, for all ranks one after the other.
"""

import functools

import pytest
import torch
import torchbearer
from torchbearer import metrics

from tests.scale.simulated import WORLD_SIZE
from torchbearer_ddp.group import wire
from torchbearer_ddp.metrics.combine import BatchOrder, check_equal, combined
from torchbearer_ddp.metrics.pooled_list import PooledMetricList
from torchbearer_ddp.metrics.pooling import Ledger

STEPS = 100
#: Besides the sums of the batches: names, sizes, counts.
FIXED_BYTES = 1000


def a_list(training):
    state = torchbearer.State()
    state.update(
        {
            torchbearer.CRITERION: torch.nn.CrossEntropyLoss(),
            torchbearer.DATA: torchbearer.VALIDATION_DATA,
            torchbearer.X: torch.zeros(32, 2),
            torchbearer.Y_PRED: torch.zeros(32, 10),
            torchbearer.Y_TRUE: torch.zeros(32, dtype=torch.long),
            torchbearer.LOSS: torch.tensor(0.5),
        }
    )
    found = PooledMetricList.over(metrics.MetricList(["acc", "loss"]))
    (found.train if training else found.eval)()
    found.reset(state)
    found.process(state)
    return found, state


def recorded(values, count):
    ledger = Ledger()
    ledger._columns, ledger._counts = {"_sum": [values]}, [count] * len(values)
    return ledger


def passed(training):
    """What a pass of all ranks gives, its messages, and the sums of batches by metric and rank."""
    found, state = a_list(training)
    order = BatchOrder.of(None, training=training)
    generator = torch.Generator().manual_seed(1)
    correct = torch.randint(0, 33, (WORLD_SIZE, STEPS), generator=generator).float()
    losses = torch.rand(WORLD_SIZE, STEPS, generator=generator)
    found._sizes, found._weights = [32] * STEPS, [32.0] * STEPS
    messages = []
    for rank in range(WORLD_SIZE):
        found._ledgers = [recorded(correct[rank], 32.0), recorded(losses[rank], 1.0)]
        messages.append(wire.encode(found._held(state, order, reports=True)))
    everyone = [wire.decode(message) for message in messages]
    check_equal([each["titles"] for each in everyone])
    found._complete(everyone, order)
    pooled = [held for _, held in combined(found._leaves, everyone, order=order, device="cpu")]
    return pooled, messages, correct, losses


@pytest.mark.parametrize("training", [True, False])
def test_only_the_values_whose_order_matters_are_sent_batch_by_batch(training):
    _, messages, _, _ = passed(training)
    assert max(map(len, messages)) <= 4 * STEPS + FIXED_BYTES


def test_an_evaluation_has_the_sums_of_one_process_to_the_last_bit():
    (acc, loss), _, correct, losses = passed(training=False)
    for pooled, values in ((acc, correct), (loss, losses)):
        assert torch.equal(pooled["_sum"], functools.reduce(torch.add, values.T.flatten()))
    assert (acc["_count"], loss["_count"]) == (32 * WORLD_SIZE * STEPS, WORLD_SIZE * STEPS)


def test_a_training_adds_the_parts_of_each_step_in_the_order_of_the_ranks():
    (acc, loss), _, correct, losses = passed(training=True)
    totals = functools.reduce(torch.add, 32.0 * losses.double())
    assert torch.equal(loss["_sum"], (totals / (32 * WORLD_SIZE)).sum().float())
    assert torch.equal(acc["_sum"], correct.double().sum().float())
    assert (acc["_count"], loss["_count"]) == (32 * WORLD_SIZE * STEPS, STEPS)
