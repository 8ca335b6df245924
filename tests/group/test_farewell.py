"""A rank that has returned says so to those that still wait for it."""

import re

import pytest
import torch
import torchbearer
from torch.utils.data import DataLoader, TensorDataset

from tests.programs import short_trial
from tests.ranks import run_ranks
from torchbearer_ddp import data_parallel
from torchbearer_ddp.errors import DesyncError
from torchbearer_ddp.group import collectives


def alone_in_evaluate(rank, transport):
    x = torch.ones(8, 2)
    trial = short_trial(
        torch.nn.Linear(2, 2), torch.nn.functional.mse_loss, *data_parallel(transport=transport)
    )
    loader = DataLoader(TensorDataset(x, x), batch_size=2)
    trial.with_generators(loader, loader).run(1)
    if collectives.rank() == rank:
        try:
            trial.evaluate(data_key=torchbearer.VALIDATION_DATA)
        except DesyncError as error:
            return str(error)
    return None


@pytest.mark.parametrize(("rank", "transport"), [(0, "shm"), (1, "gloo")])
def test_a_rank_that_returned_is_named_with_the_call_of_the_other(rank, transport):
    found = run_ranks(alone_in_evaluate, 2, (rank, transport))
    assert found[1 - rank] is None
    assert re.fullmatch(
        rf"Rank {1 - rank} has already returned from the worker while rank {rank} is in "
        r"evaluate\(\) \(test_farewell.py:\d+\). Call it on every rank.",
        found[rank],
    )


def alone_at_a_barrier():
    if collectives.rank() == 0:
        with pytest.raises(DesyncError, match=r"is in barrier\(\) \(test_farewell.py:\d+\)"):
            collectives.barrier()


def test_outside_of_a_trial_too():
    run_ranks(alone_at_a_barrier, 2)
