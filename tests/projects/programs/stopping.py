"""A batch sampler with a short last batch, early stopping, and the best weights at the end."""

import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial
from torchbearer.callbacks import Best, EarlyStopping

batch_size = int(os.environ.get("BATCH_SIZE", "12"))
folder = Path(os.environ.get("PROJECT_FOLDER", "."))


class Chunks:
    """Batches of neighbours; the last one is what is left."""

    def __init__(self, samples, size):
        self.samples, self.size = samples, size

    def __iter__(self):
        for start in range(0, self.samples, self.size):
            yield list(range(start, min(start + self.size, self.samples)))

    def __len__(self):
        return -(-self.samples // self.size)


torch.manual_seed(10)
x = torch.randn(66, 6)
train_data = TensorDataset(x, (x[:, 0] > 0).long())
x = torch.randn(30, 6)
validation_data = TensorDataset(x, (x[:, 0] + 0.8 * torch.randn(30) > 0).long())

model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
trial = Trial(
    model,
    torch.optim.SGD(model.parameters(), lr=1.0),
    nn.CrossEntropyLoss(),
    metrics=["acc", "loss"],
    callbacks=[
        EarlyStopping(monitor="val_loss", patience=2),
        Best(str(folder / "best.pt"), monitor="val_loss"),
    ],
    verbose=0,
)
trial.with_generators(
    DataLoader(train_data, batch_sampler=Chunks(66, batch_size)),
    DataLoader(validation_data, batch_sampler=Chunks(30, 12)),
)
history = [dict(epoch) for epoch in trial.run(12)]
last = {name: tensor.clone() for name, tensor in model.state_dict().items()}
trial.load_state_dict(torch.load(folder / "best.pt", weights_only=False))

outcome = {
    "trained": {"last": last, "best": model.state_dict()},
    "metrics": history,
    "evaluated": trial.evaluate(),
}
if "PROJECT_OUTCOME" in os.environ:
    torch.save(outcome, f"{os.environ['PROJECT_OUTCOME']}-{os.getpid()}.pt")
