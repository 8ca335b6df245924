"""Contrastive learning: each sample is told from all others of its batch, so they are coupled."""

import os

import torch
import torch.nn.functional as F
import torchbearer
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchbearer import Trial

torch.manual_seed(3)


class Views(Dataset):
    """Two noisy views of each sample."""

    def __init__(self, samples):
        self.x = torch.randn(samples, 8)
        self.first, self.second = (self.x + 0.2 * torch.randn(samples, 8) for _ in range(2))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return (self.first[index], self.second[index]), index


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, first, second):
        return F.normalize(self.layers(first), dim=1), F.normalize(self.layers(second), dim=1)


def info_nce(state):
    first, second = state[torchbearer.Y_PRED]
    similarity = first @ second.T / 0.3
    return F.cross_entropy(similarity, torch.arange(len(first)))


model = Encoder()
trial = Trial(
    model,
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    info_nce,
    metrics=["loss"],
    verbose=0,
)
trial.with_train_generator(DataLoader(Views(72), batch_size=24))
history = trial.run(3)

outcome = {"trained": model.state_dict(), "metrics": history}
if "PROJECT_OUTCOME" in os.environ:
    torch.save(outcome, f"{os.environ['PROJECT_OUTCOME']}-{os.getpid()}.pt")
