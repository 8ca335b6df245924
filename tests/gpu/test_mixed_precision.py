"""MixedPrecision on two GPUs, against a loop by hand on one."""

from __future__ import annotations

import pytest
import torch

from tests.callbacks.half_precision import CASES, Case, Outcome, assert_same, by_hand, train
from torchbearer_ddp import device


def run(case: Case) -> Outcome:
    return train(case, 2, device())


def run_by_hand(case: Case) -> Outcome:
    return by_hand(case, 2, 2, device())


@pytest.mark.parametrize("name", CASES)
def test_two_gpus_are_a_loop_by_hand(two, alone, name):
    (expected,) = alone.run(run_by_hand, (CASES[name],))
    found = two.run(run, (CASES[name],))
    for each in found:
        assert_same(each, expected)
        for ours, first in zip(each.parameters, found[0].parameters, strict=True):
            assert torch.equal(ours, first)
