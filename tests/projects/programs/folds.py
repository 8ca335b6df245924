"""Several Trials in a loop, each on a split that is drawn at random without a seed of its own."""

import copy
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchbearer import Trial
from torchbearer.callbacks import StepLR

torch.manual_seed(9)
x = torch.randn(80, 5)
data = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
untrained = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 2))

trained, metrics, splits = {}, [], []
for fold in range(3):
    training, validation = random_split(data, [60, 20])
    model = copy.deepcopy(untrained)
    trial = Trial(
        model,
        torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
        nn.CrossEntropyLoss(),
        metrics=["acc", "loss"],
        callbacks=[
            StepLR(2),
        ],
        verbose=0,
    )
    trial.with_generators(DataLoader(training, 12), DataLoader(validation, 12))
    metrics += trial.run(3)
    trained[f"fold {fold}"] = model.state_dict()
    splits.append((list(training.indices), list(validation.indices)))

outcome = {"trained": trained, "metrics": metrics, "splits": splits}
if "PROJECT_OUTCOME" in os.environ:
    torch.save(outcome, f"{os.environ['PROJECT_OUTCOME']}-{os.getpid()}.pt")
