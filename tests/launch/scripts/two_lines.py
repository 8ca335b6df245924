"""A script without functions and without run_distributed: the import and the callbacks are all."""

import os
import signal
import sys

import torch
import torchbearer
from torch.utils.data import DataLoader, TensorDataset

from torchbearer_ddp import data_parallel

what, batch = sys.argv[1], int(sys.argv[2])
if what != "unseeded":
    torch.manual_seed(3)
model = torch.nn.Linear(4, 2)
x = torch.arange(64.0).reshape(16, 4) / 64
data = TensorDataset(x, x[:, :2])


@torchbearer.callbacks.on_step_training
def event(state):
    if os.environ.get("RANK") == "1":
        if what == "raise":
            raise KeyError("a missing column")
        if what == "exit":
            sys.exit(3)
        first = (state[torchbearer.EPOCH], state[torchbearer.BATCH]) == (0, 0)
        if what == "signal" and first:
            os.kill(os.getpid(), signal.SIGTERM)


trial = torchbearer.Trial(
    model,
    torch.optim.SGD(model.parameters(), 0.1),
    torch.nn.functional.mse_loss,
    callbacks=[*data_parallel(), event],
    verbose=0,
)
trial.with_train_generator(DataLoader(data, batch_size=batch)).run(2)
if what == "launch":  # a script that has both: its worker runs on this rank
    from torchbearer_ddp import rank, run_distributed, world_size

    os.write(1, f"{run_distributed(lambda: (rank(), world_size()), nproc_per_node=3)}\n".encode())
total = sum(p.double().sum().item() for p in model.parameters())
os.write(1, f"{total:.7f}\n".encode())
