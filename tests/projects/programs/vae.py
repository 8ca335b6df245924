"""A variational autoencoder: its loss is a function of the state, and a sum."""

import os

import torch
import torch.nn.functional as F
import torchbearer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial

torch.manual_seed(2)
MEAN = torchbearer.state_key("mean")
LOG_VARIANCE = torchbearer.state_key("log_variance")


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(10, 16)
        self.mean, self.log_variance = nn.Linear(16, 3), nn.Linear(16, 3)
        self.decode = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 10), nn.Sigmoid())

    def forward(self, x, state):
        hidden = F.relu(self.encode(x))
        state[MEAN], state[LOG_VARIANCE] = self.mean(hidden), self.log_variance(hidden)
        noise = state[torchbearer.Y_TRUE]  # drawn once for each sample, with the data
        return self.decode(state[MEAN] + noise * torch.exp(0.5 * state[LOG_VARIANCE]))


def loss(state):
    reconstruction = F.binary_cross_entropy(
        state[torchbearer.Y_PRED], state[torchbearer.X], reduction="sum"
    )
    mean, log_variance = state[MEAN], state[LOG_VARIANCE]
    divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
    return reconstruction + divergence


def loader(samples):
    return DataLoader(TensorDataset(torch.rand(samples, 10), torch.randn(samples, 3)), 12)


def main():
    model = VAE()
    trial = Trial(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
        loss,
        metrics=["loss"],
        verbose=0,
    )
    trial.with_generators(loader(66), loader(30))
    history = trial.run(3)
    return {"trained": model.state_dict(), "metrics": history}


outcome = main()
if "PROJECT_OUTCOME" in os.environ:
    torch.save(outcome, f"{os.environ['PROJECT_OUTCOME']}-{os.getpid()}.pt")
