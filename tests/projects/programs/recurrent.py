"""A recurrent network with clipped gradients and two schedulers, one of them per batch."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial
from torchbearer.callbacks import CosineAnnealingLR, ExponentialLR, GradientNormClipping


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.GRU(4, 8, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        _, hidden = self.recurrent(x)
        return self.out(hidden[-1])


def sequences(samples):
    x = torch.randn(samples, 7, 4)
    return TensorDataset(x, x.sum((1, 2)).abs().div(3).long().clamp(max=2))


def train():
    torch.manual_seed(5)
    model = Network()
    trial = Trial(
        model,
        torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
        nn.CrossEntropyLoss(),
        metrics=["acc", "loss", "lr"],
        callbacks=[
            GradientNormClipping(0.5, params=list(model.parameters())),
            ExponentialLR(0.9),
            CosineAnnealingLR(T_max=20, step_on_batch=True),
        ],
        verbose=0,
    )
    trial.with_generators(DataLoader(sequences(66), 12), DataLoader(sequences(20), 12))
    return model, trial.run(3)


model, history = train()
outcome = {"trained": model.state_dict(), "metrics": history}
if "PROJECT_OUTCOME" in os.environ:
    torch.save(outcome, f"{os.environ['PROJECT_OUTCOME']}-{os.getpid()}.pt")
