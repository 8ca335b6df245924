"""Gradients of several batches, added up in the precision of their parameters."""

import pytest
import torch
from torch import nn
from torchbearer import Trial

from torchbearer_ddp import SyncGradients

#: Gradients of about a thousand: times the ratio of two batch sizes they leave the range of fp16.
SCALE = 8000.0


class Net(nn.Module):
    """A layer in half precision, whose result is in single precision."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2).to(dtype)

    def forward(self, x):
        return self.layer(x.to(self.layer.weight.dtype)).to(x.dtype)


def loss(y_pred, y_true):
    return SCALE * nn.functional.mse_loss(y_pred, y_true)


@pytest.mark.parametrize("sizes", [(256, 2), (2, 256), (256, 2, 64), (2, 256, 2)])
def test_batches_of_very_different_sizes_stay_in_the_range_of_half_precision(sizes):
    model, exact = Net(torch.float16), Net(torch.float32)
    torch.manual_seed(1)
    batches = [(torch.randn(size, 4), torch.randn(size, 2)) for size in sizes]
    optimizer = torch.optim.SGD(model.parameters(), 0.1 / SCALE)
    callbacks = [SyncGradients(accumulate=len(sizes))]
    trial = Trial(model, optimizer, loss, callbacks=callbacks, verbose=0)
    trial.with_train_generator(batches).run(1)
    x, y = (torch.cat(each) for each in zip(*batches, strict=True))
    loss(exact(x), y).backward()
    torch.optim.SGD(exact.parameters(), 0.1 / SCALE).step()
    for found, expected in zip(model.parameters(), exact.parameters(), strict=True):
        assert torch.allclose(found.float(), expected, atol=2e-3)
