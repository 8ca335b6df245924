"""A script without any function: train, evaluate and predict at module level."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial

torch.manual_seed(13)
x = torch.randn(113, 6)
y = (x[:, 0] + x[:, 1] ** 2 > 0.5).long()
train_loader = DataLoader(TensorDataset(x[:66], y[:66]), batch_size=12)
val_loader = DataLoader(TensorDataset(x[66:96], y[66:96]), batch_size=12)
test_loader = DataLoader(TensorDataset(x[96:], y[96:]), batch_size=12)

model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
trial = Trial(
    model,
    torch.optim.Adam(model.parameters(), lr=0.01),
    nn.CrossEntropyLoss(),
    metrics=["acc", "loss"],
    verbose=0,
)
trial.with_generators(train_loader, val_loader, test_loader)
history = [dict(epoch) for epoch in trial.run(epochs=3)]
evaluated = trial.evaluate()
predictions = trial.predict()
print(f"accuracy {evaluated['val_acc']:.3f} of {len(predictions)} predictions")

outcome = {
    "trained": model.state_dict(),
    "metrics": history,
    "evaluated": evaluated,
    "predictions": predictions,
}
if "PROJECT_OUTCOME" in os.environ:
    torch.save(outcome, f"{os.environ['PROJECT_OUTCOME']}-{os.getpid()}.pt")
