"""Segmentation with a dice loss over the whole batch, which couples its samples."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial


def dice_loss(y_pred, y_true):
    probability = torch.sigmoid(y_pred)
    overlap = (probability * y_true).sum()
    return 1 - (2 * overlap + 1) / (probability.sum() + y_true.sum() + 1)


def scenes(samples):
    mask = (torch.rand(samples, 1, 6, 6) > 0.7).float()
    return TensorDataset(mask + 0.3 * torch.randn(samples, 1, 6, 6), mask)


torch.manual_seed(12)
model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1))
trial = Trial(
    model,
    torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
    dice_loss,
    metrics=["loss"],
    verbose=0,
)
trial.with_train_generator(DataLoader(scenes(72), batch_size=24))
history = trial.run(3)

outcome = {"trained": model.state_dict(), "metrics": history}
if "PROJECT_OUTCOME" in os.environ:
    torch.save(outcome, f"{os.environ['PROJECT_OUTCOME']}-{os.getpid()}.pt")
