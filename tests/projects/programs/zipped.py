"""Two loaders that are read side by side, by a loader class of the script's own."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial

batch_size = int(os.environ.get("BATCH_SIZE", "12"))


class Zipped:
    """All that it has is a length and batches."""

    def __init__(self, *loaders):
        self.loaders = loaders

    def __len__(self):
        return min(len(loader) for loader in self.loaders)

    def __iter__(self):
        for (words, y), (pictures,) in zip(*self.loaders, strict=True):
            yield torch.cat([words, pictures], 1), y


def zipped(samples, size):
    words, pictures = torch.randn(samples, 3), torch.randn(samples, 4)
    labels = (words[:, 0] + pictures[:, 0] > 0).long()
    texts = DataLoader(TensorDataset(words, labels), size)
    return Zipped(texts, DataLoader(TensorDataset(pictures), size))


torch.manual_seed(14)
model = nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 2))
trial = Trial(
    model,
    torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
    nn.CrossEntropyLoss(),
    metrics=["acc", "loss"],
    verbose=0,
)
trial.with_generators(zipped(66, batch_size), zipped(40, 12))
history = trial.run(3)

outcome = {"trained": model.state_dict(), "metrics": history}
if "PROJECT_OUTCOME" in os.environ:
    torch.save(outcome, f"{os.environ['PROJECT_OUTCOME']}-{os.getpid()}.pt")
