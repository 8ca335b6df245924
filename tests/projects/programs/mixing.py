"""Images that are mixed and cut at random; the trained Trial is saved, reloaded and replayed."""

import io
import os

import torch
import torchbearer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial
from torchbearer.callbacks import Callback, Cutout, Mixup

torch.manual_seed(6)


class Replayed(Callback):
    """The metrics of each epoch, as a replay shows them."""

    def __init__(self):
        self.metrics = []

    def on_end_epoch(self, state):
        self.metrics.append(dict(state[torchbearer.METRICS]))


def images(samples):
    labels = torch.arange(samples) % 3
    x = torch.randn(samples, 1, 6, 6) * 0.3
    x[torch.arange(samples), 0, labels * 2] += 1
    return TensorDataset(x, labels)


def build():
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    return Trial(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        Mixup.mixup_loss,
        metrics=["acc", "loss"],
        callbacks=[
            Mixup(alpha=0.5),
            Cutout(1, 2),
        ],
        verbose=0,
    ).with_generators(DataLoader(train_images, 12, shuffle=True), DataLoader(other_images, 12))


train_images, other_images = images(66), images(27)
trial = build()
history = [dict(epoch) for epoch in trial.run(3)]
evaluated = trial.evaluate()
file = io.BytesIO()
torch.save(trial.state_dict(), file)
file.seek(0)

again, replayed = build(), Replayed()
again.load_state_dict(torch.load(file, weights_only=False))
reloaded = again.evaluate()
again.replay(callbacks=[replayed], verbose=0)

outcome = {
    "trained": trial.state[torchbearer.MODEL].state_dict(),
    "metrics": history,
    "evaluated": evaluated,
    "reloaded": reloaded,
    "replayed": replayed.metrics,
    "reloaded_model": again.state[torchbearer.MODEL].state_dict(),
}
if "PROJECT_OUTCOME" in os.environ:
    torch.save(outcome, f"{os.environ['PROJECT_OUTCOME']}-{os.getpid()}.pt")
