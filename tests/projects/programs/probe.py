"""A linear probe on the features of a network, which a callback trains beside it."""

import os

import torch
import torch.nn.functional as F
import torchbearer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial
from torchbearer.callbacks import Callback


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 6), nn.Tanh())
        self.decoder = nn.Linear(6, 8)

    def forward(self, x):
        return self.decoder(self.encoder(x))


class LinearProbe(Callback):
    """How well a linear layer tells the classes from the features, while these are learned."""

    def __init__(self, features, classes):
        self.layer = nn.Linear(features, classes)
        self.optimizer = torch.optim.Adam(self.layer.parameters(), lr=0.02)

    def on_step_training(self, state):
        with torch.no_grad():
            features = state[torchbearer.MODEL].encoder(state[torchbearer.X])
        labels = (state[torchbearer.X].sum(1) > 0).long()
        self.optimizer.zero_grad()
        F.cross_entropy(self.layer(features), labels).backward()
        self.optimizer.step()


torch.manual_seed(7)
x = torch.randn(66, 8)
model, probe = Autoencoder(), LinearProbe(6, 2)
trial = Trial(
    model,
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    nn.MSELoss(),
    metrics=["mse", "loss"],
    callbacks=[
        probe,
    ],
    verbose=0,
)
trial.with_train_generator(DataLoader(TensorDataset(x, x), batch_size=12))
history = trial.run(3)

outcome = {
    "trained": {"model": model.state_dict(), "probe": probe.layer.state_dict()},
    "metrics": history,
}
if "PROJECT_OUTCOME" in os.environ:
    torch.save(outcome, f"{os.environ['PROJECT_OUTCOME']}-{os.getpid()}.pt")
