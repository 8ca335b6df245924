"""A Wasserstein GAN: several steps of the critic in each step, in a closure of the script's own.

The closure calls no callback at all, and the critic's weights are clipped by hand.
"""

import os

import torch
import torchbearer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial

torch.manual_seed(1)
CRITIC_STEPS = 3
CRITIC = torchbearer.state_key("critic")
CRITIC_OPTIMIZER = torchbearer.state_key("critic_optimizer")

generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))
critic = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
real = torch.randn(72, 6) * 0.3 + 1
noise = torch.randn(72, CRITIC_STEPS + 1, 4)  # for each step of the critic, and the generator's


def closure(state):
    real, noise = state[torchbearer.X], state[torchbearer.Y_TRUE]
    for step in range(CRITIC_STEPS):
        state[CRITIC_OPTIMIZER].zero_grad()
        fake = state[torchbearer.MODEL](noise[:, step]).detach()
        (state[CRITIC](fake).mean() - state[CRITIC](real).mean()).backward()
        state[CRITIC_OPTIMIZER].step()
        for parameter in state[CRITIC].parameters():
            parameter.data.clamp_(-0.2, 0.2)
    state[torchbearer.OPTIMIZER].zero_grad()
    state[torchbearer.Y_PRED] = state[torchbearer.MODEL](noise[:, -1])
    state[torchbearer.LOSS] = -state[CRITIC](state[torchbearer.Y_PRED]).mean()
    state[torchbearer.LOSS].backward()


trial = Trial(
    generator,
    torch.optim.RMSprop(generator.parameters(), lr=0.002),
    metrics=["loss"],
    verbose=0,
)
trial.state[CRITIC] = critic
trial.state[CRITIC_OPTIMIZER] = torch.optim.RMSprop(critic.parameters(), lr=0.005)
trial.with_closure(closure)
trial.with_train_generator(DataLoader(TensorDataset(real, noise), batch_size=24))
history = trial.run(3)

outcome = {
    "trained": {"generator": generator.state_dict(), "critic": critic.state_dict()},
    "metrics": history,
}
if "PROJECT_OUTCOME" in os.environ:
    torch.save(outcome, f"{os.environ['PROJECT_OUTCOME']}-{os.getpid()}.pt")
