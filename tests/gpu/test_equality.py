"""Two ranks on two GPUs end where one process on one GPU ends, through NCCL."""

from __future__ import annotations

import pytest
import torch

from tests.equality import assert_equal, train_and_predict
from tests.gpu.cases import CASES, assert_alike, train
from torchbearer_ddp import device
from torchbearer_ddp.group import collectives, membership


def where() -> tuple[str, str, str]:
    group = membership.current()
    assert group is not None
    return str(device()), str(torch.ones(1, device=device()).device), group.member.backend


def test_every_rank_has_its_own_device(two, kind):
    places = two.run(where)
    if kind == "cuda":
        assert places == [(f"cuda:{i}", f"cuda:{i}", "cpu:gloo,cuda:nccl") for i in range(2)]
    else:
        assert places == [("cpu", "cpu", "gloo")] * 2


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_the_whole_list_of_callbacks(two, alone, optimizer):
    """Sharded data, pooled metrics, evaluation and predictions."""
    (one,) = alone.run(train_and_predict, (optimizer,))
    assert_equal(two.run(train_and_predict, (optimizer,)), one)


@pytest.mark.parametrize("name", CASES)
def test_gradients(two, alone, name):
    (one,) = alone.run(train, (name,))
    assert_alike(two.run(train, (name,)), one, CASES[name].tolerance)


def exchange_many() -> list[float]:
    """Small values of every kind travel besides gradients, and on GPUs too."""
    rank = collectives.rank()
    total = torch.full((1000,), rank + 1.0, device=device())
    collectives.all_reduce([total], "a sum")
    kinds = [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]
    tensors = [torch.full((5,), rank == 0, dtype=each, device=device()) for each in kinds]
    collectives.broadcast_tensors(tensors, "every dtype")
    gathered = collectives.all_gather(torch.full((2,), float(rank), device=device()), "tensors")
    return [
        float(total.sum()),
        *(float(each.sum()) for each in tensors),
        *(float(each.sum()) for each in gathered),
    ]


def test_other_exchanges(two):
    assert two.run(exchange_many) == [[3000.0, *[5.0] * 6, 0.0, 2.0]] * 2
