"""Tensors of GPUs in arguments and results arrive on the CPU."""

import cloudpickle
import pytest
import torch

from tests.stand_ins.cuda import CudaTensor, pretended
from torchbearer_ddp.launch import pickling, rank, worker


def on_gpu(*numbers, **options):
    return CudaTensor(torch.tensor(numbers, **options))


def task(value, model):
    return value


def sent(value):
    """What a rank gets for an argument."""
    _, (received,), _ = worker.unpack(worker.pack((task, (value,), {})))
    return received


def returned(value):
    """What the launcher gets for a result."""
    return cloudpickle.loads(rank._pickled_result(value, 0))


@pytest.mark.parametrize("way", [sent, returned])
def test_tensors_of_a_gpu_arrive_on_the_cpu(way):
    with pretended():
        shared = on_gpu(1.0, 2.0)
        learned = on_gpu(3.0).requires_grad_()
        value = {"loss": [shared, shared], "learned": learned, "host": torch.ones(2), "n": 1}
        found = way(value)
    assert found["loss"][0] is found["loss"][1]
    assert torch.equal(found["loss"][0], torch.tensor([1.0, 2.0]))
    assert found["learned"].requires_grad
    assert found["learned"].item() == 3.0
    assert {type(each) for each in found["loss"]} == {torch.Tensor}
    assert found["n"] == 1


@pytest.mark.parametrize("way", [sent, returned])
def test_a_model_of_a_gpu_arrives_on_the_cpu(way):
    model = torch.nn.Linear(2, 1)
    expected = model.weight.detach().clone()
    with pretended():
        model.weight = torch.nn.Parameter(CudaTensor(expected), requires_grad=False)
        found = way(model)
    assert type(found.weight.data) is torch.Tensor
    assert torch.equal(found.weight, expected)
    assert not found.weight.requires_grad


def test_what_is_on_the_cpu_is_pickled_as_ever():
    value = {"weights": torch.nn.Linear(2, 1), "view": torch.arange(6)[1:3], "text": "x"}
    found = cloudpickle.loads(pickling.dumps(value))
    assert torch.equal(found["weights"].weight, value["weights"].weight)
    assert torch.equal(found["view"], value["view"])
    assert found["text"] == "x"
