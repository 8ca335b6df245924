"""A generative adversarial network: the discriminator is trained from the state.

In the shape of torchbearer's own example: the discriminator, its optimizer and its criterion are in
the Trial's state under keys of the script's own, and each step runs two base closures.
"""

import os

import torch
import torchbearer as tb
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial

torch.manual_seed(0)
epochs, batch_size, latent, pixels = 3, 12, 3, 8
adversarial_loss = nn.BCELoss()

GENERATOR_LOSS = tb.state_key("generator_loss")
DISCRIMINATOR = tb.state_key("discriminator")
DISCRIMINATOR_OPTIMIZER = tb.state_key("discriminator_optimizer")
DISCRIMINATOR_CRITERION = tb.state_key("discriminator_criterion")
DISCRIMINATOR_LOSS = tb.state_key("discriminator_loss")
JUDGED = tb.state_key("judged")


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(latent, 16), nn.LeakyReLU(0.2), nn.Linear(16, pixels))

    def forward(self, real, state):
        return torch.tanh(self.model(state[tb.Y_TRUE]))  # the noise comes with the sample


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(pixels, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, image, state=None):
        return torch.sigmoid(self.model(image))


def generator_criterion(state):
    judged = state[DISCRIMINATOR](state[tb.Y_PRED], state)
    state[GENERATOR_LOSS] = adversarial_loss(judged, torch.ones_like(judged))
    return state[GENERATOR_LOSS]


def discriminator_criterion(state):
    real = state[DISCRIMINATOR](state[tb.X], state)
    fake = state[DISCRIMINATOR](state[tb.Y_PRED].detach(), state)
    real_loss = adversarial_loss(real, torch.ones_like(real))
    fake_loss = adversarial_loss(fake, torch.zeros_like(fake))
    return (real_loss + fake_loss) / 2


train_generator = tb.base_closure(
    tb.X, tb.MODEL, tb.Y_PRED, tb.Y_TRUE, tb.CRITERION, tb.LOSS, tb.OPTIMIZER
)
train_discriminator = tb.base_closure(
    tb.Y_PRED, DISCRIMINATOR, JUDGED, tb.Y_TRUE,
    DISCRIMINATOR_CRITERION, DISCRIMINATOR_LOSS, DISCRIMINATOR_OPTIMIZER,
)  # fmt: skip


def closure(state):
    train_generator(state)
    state[tb.Y_PRED] = state[tb.Y_PRED].detach()
    train_discriminator(state)
    state[DISCRIMINATOR_OPTIMIZER].step()


@tb.metrics.mean
class GeneratorLoss(tb.metrics.Metric):
    def process(self, state):
        return state[GENERATOR_LOSS].detach()


@tb.metrics.mean
class DiscriminatorLoss(tb.metrics.Metric):
    def process(self, state):
        return state[DISCRIMINATOR_LOSS].detach()


images = torch.tanh(torch.randn(66, pixels) + 0.5)
loader = DataLoader(TensorDataset(images, torch.randn(66, latent)), batch_size)
generator, discriminator = Generator(), Discriminator()

trial = Trial(
    generator,
    torch.optim.Adam(generator.parameters(), lr=0.002, betas=(0.5, 0.999)),
    generator_criterion,
    metrics=["loss", GeneratorLoss("generator"), DiscriminatorLoss("discriminator")],
    verbose=0,
)
trial.state[DISCRIMINATOR] = discriminator
trial.state[DISCRIMINATOR_OPTIMIZER] = torch.optim.Adam(discriminator.parameters(), lr=0.002)
trial.state[DISCRIMINATOR_CRITERION] = discriminator_criterion
trial.with_train_generator(loader).with_closure(closure)
history = trial.run(epochs)

outcome = {
    "trained": {"generator": generator.state_dict(), "discriminator": discriminator.state_dict()},
    "metrics": history,
}
if "PROJECT_OUTCOME" in os.environ:
    torch.save(outcome, f"{os.environ['PROJECT_OUTCOME']}-{os.getpid()}.pt")
