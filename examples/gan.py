"""A GAN: two networks, two optimizers and a closure of its own.

    python examples/gan.py --nproc-per-node 2

All of it is averaged. ``loss="mean"`` says that the losses of the closure are means over the batch,
which cannot be seen from outside.

The generator learns to turn noise into points of a normal distribution around (2, -1).
"""

import torch
import torchbearer
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

from torchbearer_ddp import data_parallel, device, is_rank_zero, run_distributed

DISCRIMINATOR = torchbearer.state_key("discriminator")
DISCRIMINATOR_OPTIMIZER = torchbearer.state_key("discriminator_optimizer")
CENTRE = torch.tensor([2.0, -1.0])


def network(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, outputs))


def closure(state):
    """A step of the discriminator, then the gradients of the generator."""
    generator, discriminator = state[torchbearer.MODEL], state[DISCRIMINATOR]
    noise, real = state[torchbearer.X], state[torchbearer.Y_TRUE]

    state[DISCRIMINATOR_OPTIMIZER].zero_grad()
    fake = generator(noise).detach()
    (softplus(-discriminator(real)).mean() + softplus(discriminator(fake)).mean()).backward()
    state[DISCRIMINATOR_OPTIMIZER].step()  # its gradients are averaged here

    state[torchbearer.OPTIMIZER].zero_grad()
    state[torchbearer.Y_PRED] = generator(noise)
    state[torchbearer.LOSS] = softplus(-discriminator(state[torchbearer.Y_PRED])).mean()
    state[torchbearer.LOSS].backward()
    state[torchbearer.CALLBACK_LIST].on_backward(state)  # and the generator's here


def train():
    real = torch.randn(2000, 2) * 0.5 + CENTRE
    generator, discriminator = network(4, 2).to(device()), network(2, 1).to(device())
    trial = torchbearer.Trial(
        generator,
        torch.optim.Adam(generator.parameters(), lr=2e-3),
        criterion=None,
        metrics=["loss"],
        callbacks=[*data_parallel(global_batch=True, loss="mean")],
    )
    trial.state[DISCRIMINATOR] = discriminator
    trial.state[DISCRIMINATOR_OPTIMIZER] = torch.optim.Adam(discriminator.parameters(), lr=2e-3)
    trial.with_closure(closure)
    loader = DataLoader(TensorDataset(torch.randn(2000, 4), real), batch_size=50, shuffle=True)
    trial.with_train_generator(loader).to(device()).run(10)
    with torch.no_grad():
        found = generator(torch.randn(1000, 4, device=device())).mean(0).cpu()
    if is_rank_zero():
        away = (found - CENTRE).norm()
        print(f"the centre of the generated points is {away:.3f} away from that of the data")


if __name__ == "__main__":
    run_distributed(train)
