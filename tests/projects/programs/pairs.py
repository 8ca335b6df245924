"""A siamese network: pairs that are alike or not, with a margin loss and two inputs."""

import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchbearer import Trial
from torchbearer.callbacks import StepLR


class Pairs(Dataset):
    def __init__(self, samples, seed):
        generator = torch.Generator().manual_seed(seed)
        self.left = torch.randn(samples, 5, generator=generator)
        self.alike = torch.randint(0, 2, (samples,), generator=generator).float()
        other = torch.randn(samples, 5, generator=generator)
        self.right = torch.where(self.alike[:, None] > 0, self.left + 0.1 * other, other)

    def __len__(self):
        return len(self.alike)

    def __getitem__(self, index):
        return {"left": self.left[index], "right": self.right[index]}, self.alike[index]


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 3))

    def forward(self, x):
        return F.pairwise_distance(self.layers(x["left"]), self.layers(x["right"]))


def margin_loss(distance, alike):
    return (alike * distance**2 + (1 - alike) * F.relu(1 - distance) ** 2).mean()


if __name__ == "__main__":
    torch.manual_seed(4)
    model = Siamese()
    trial = Trial(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        margin_loss,
        metrics=["loss"],
        callbacks=[
            StepLR(1, gamma=0.8),
        ],
        verbose=0,
    )
    trial.with_generators(DataLoader(Pairs(66, 1), 12), DataLoader(Pairs(31, 2), 12))
    history = trial.run(3)
    outcome = {"trained": model.state_dict(), "metrics": history}
    if "PROJECT_OUTCOME" in os.environ:
        torch.save(outcome, f"{os.environ['PROJECT_OUTCOME']}-{os.getpid()}.pt")
