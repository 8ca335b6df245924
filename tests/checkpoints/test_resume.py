"""Runs that continue: in every layout."""

import warnings

import pytest
import torch
import torchbearer
from torch.utils.data import DataLoader, TensorDataset
from torchbearer.callbacks import on_sample

from tests.programs import assert_same, outcome
from tests.ranks import ranks
from torchbearer_ddp import Checkpoint, data_parallel
from torchbearer_ddp.checkpoints.writer import finish_writing
from torchbearer_ddp.data import randomness
from torchbearer_ddp.group import collectives, membership


class Stopped(Exception):
    pass


def failing(at):
    """A callback that fails at the given batch, counted over all epochs."""
    left = [at]

    @on_sample
    def fail(state):
        left[0] -= 1
        if not left[0]:
            raise Stopped

    return fail


def as_a_new_process():
    torch.set_num_threads(1)
    randomness.seed_all(3)
    if (group := membership.current()) is not None:
        group.runs = 0


def quietly(trial, epochs):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*callbacks are not those.*")
        trial.run(epochs)


def images(*callbacks):
    """A convolution in channels_last, trained by fused Adam."""
    as_a_new_process()
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4 * 9, 2)
    ).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), 0.01, fused=True)
    trial = torchbearer.Trial(
        model,
        optimizer,
        torch.nn.CrossEntropyLoss(),
        callbacks=[*data_parallel(), *callbacks],
        verbose=0,
    )
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, 3, 5, 5, generator=generator), torch.arange(24) % 2)
    return trial.with_train_generator(DataLoader(data, batch_size=3, shuffle=True))


@pytest.mark.parametrize("background", [True, False])
def test_fused_adam_in_channels_last(tmp_path, background):
    @ranks(2)
    def body():
        whole = images()
        whole.run(3)
        with pytest.raises(Stopped):
            images(failing(7), Checkpoint(tmp_path, every_steps=1, background=background)).run(3)
        finish_writing()
        collectives.barrier()
        resumed = images(Checkpoint(tmp_path))
        quietly(resumed, 3)
        assert_same(outcome(resumed), outcome(whole))
        model, optimizer = (resumed.state[k] for k in (torchbearer.MODEL, torchbearer.OPTIMIZER))
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        assert optimizer.state[model[0].weight]["exp_avg"].stride() == model[0].weight.stride()

    body()
