"""Confusion matrices from a callback that adds a metric during the pass, as torchbearer's PyCM."""

import os

import torch
import torchbearer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial
from torchbearer.callbacks import Callback
from torchbearer.metrics import EpochLambda, MetricList

CLASSES = 3


class ConfusionMatrix(Callback):
    """Counts pairs of true and predicted classes over each pass."""

    def __init__(self):
        self.tables = []

    def add_metric(self, state):
        def count(y_pred, y_true):
            pairs = y_true * CLASSES + y_pred.argmax(1)
            self.tables.append(torch.bincount(pairs, minlength=CLASSES**2).tolist())

        metric = EpochLambda("confusion", count, False)
        metric.reset(state)
        state[torchbearer.METRIC_LIST] = MetricList([state[torchbearer.METRIC_LIST], metric])

    def on_start_training(self, state):
        self.add_metric(state)

    def on_start_validation(self, state):
        if state[torchbearer.DATA] is torchbearer.VALIDATION_DATA:
            self.add_metric(state)


def blobs(samples):
    labels = torch.randint(CLASSES, (samples,))
    return TensorDataset(torch.randn(samples, 4) + labels[:, None], labels)


torch.manual_seed(8)
model, confusion = (
    nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, CLASSES)),
    ConfusionMatrix(),
)
trial = Trial(
    model,
    torch.optim.SGD(model.parameters(), lr=0.1),
    nn.CrossEntropyLoss(),
    metrics=["acc", "loss"],
    callbacks=[
        confusion,
    ],
    verbose=0,
)
trial.with_generators(DataLoader(blobs(66), 12), DataLoader(blobs(41), 12))
history = trial.run(3)

outcome = {"trained": model.state_dict(), "metrics": history, "tables": confusion.tables}
if "PROJECT_OUTCOME" in os.environ:
    torch.save(outcome, f"{os.environ['PROJECT_OUTCOME']}-{os.getpid()}.pt")
