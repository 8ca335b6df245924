"""A sum and a mean in one loss, with clipped gradients: their balance depends on the batch."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial
from torchbearer.callbacks import GradientNormClipping


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, x):
        code = torch.tanh(self.encoder(x))
        return self.decoder(code), code


def loss(reconstructed, code, x):
    return nn.functional.mse_loss(reconstructed, x) + 0.02 * code.abs().sum()


torch.manual_seed(15)
x = torch.randn(72, 8)
model = Autoencoder()
trial = Trial(
    model,
    torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
    loss,
    metrics=["loss"],
    callbacks=[
        GradientNormClipping(0.5, params=list(model.parameters())),
    ],
    verbose=0,
)
trial.with_train_generator(DataLoader(TensorDataset(x, x), batch_size=24))
history = trial.run(3)

outcome = {"trained": model.state_dict(), "metrics": history}
if "PROJECT_OUTCOME" in os.environ:
    torch.save(outcome, f"{os.environ['PROJECT_OUTCOME']}-{os.getpid()}.pt")
