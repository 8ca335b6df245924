"""Flatten, in every pass and on every kind of input."""

import collections

import pytest
import torch
import torchbearer
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial

from torchbearer_ddp.callbacks.flatten import Flatten

Pair = collections.namedtuple("Pair", "left right")


@pytest.mark.parametrize("hook", ["on_sample", "on_sample_validation"])
def test_every_kind_of_input(hook):
    image, vector, scalars = torch.rand(3, 2, 4), torch.rand(3, 5), torch.rand(3)
    state = torchbearer.State()

    def flat(value):
        state[torchbearer.X] = value
        getattr(Flatten(), hook)(state)
        return state[torchbearer.X]

    assert torch.equal(flat(image), image.reshape(3, 8))
    assert torch.equal(flat(vector), vector)
    assert torch.equal(flat(scalars), scalars)
    assert flat(torch.rand(0, 2, 4)).shape == (0, 8)
    assert flat(None) is None
    assert [t.shape for t in flat((image, scalars))] == [(3, 8), (3,)]
    assert isinstance(flat([image]), list)
    assert flat(Pair(image, image)).right.shape == (3, 8)
    assert flat({"a": {"b": image}})["a"]["b"].shape == (3, 8)


def test_a_linear_model_trains_validates_and_predicts_on_images():
    images, labels = torch.rand(6, 2, 3), torch.randint(2, (6,))
    loader = DataLoader(TensorDataset(images, labels), batch_size=4)
    model = torch.nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trial = Trial(
        model, optimizer, torch.nn.CrossEntropyLoss(), ["acc"], [Flatten()], verbose=0
    ).with_generators(loader, loader, loader)
    history = trial.run(1)
    assert {"acc", "val_acc"} <= set(history[0])
    assert torch.allclose(trial.predict(), model(images.flatten(1)))
