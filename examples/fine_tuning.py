"""Fine-tuning: the head is trained first, then the frozen body is thawed.

    python examples/fine_tuning.py --nproc-per-node 2

Parameters may be frozen or thawed at any time, as long as every rank does it before the same step.
"""

import torch
import torchbearer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchbearer.callbacks import on_start_epoch

from torchbearer_ddp import data_parallel, device, is_rank_zero, run_distributed

THAW_AT = 2


@on_start_epoch
def thaw(state):
    """Trains the body too, from this epoch on."""
    state[torchbearer.MODEL][0].requires_grad_(state[torchbearer.EPOCH] >= THAW_AT)


def train():
    x = torch.randn(1200, 20)
    y = (x[:, :10].norm(dim=1) > x[:, 10:].norm(dim=1)).long()
    body = nn.Sequential(nn.Linear(20, 64), nn.ReLU())  # here you load what was trained before
    model = nn.Sequential(body, nn.Linear(64, 2))
    before = body[0].weight.detach().clone()
    trial = torchbearer.Trial(
        model,
        torch.optim.Adam(
            [
                {"params": model[0].parameters(), "lr": 0.002},
                {"params": model[1].parameters(), "lr": 0.01},
            ]
        ),
        nn.CrossEntropyLoss(),
        metrics=["acc", "loss"],
        callbacks=[*data_parallel(global_batch=True), thaw],
    ).to(device())
    trial.with_generators(
        DataLoader(TensorDataset(x[:1000], y[:1000]), batch_size=20, shuffle=True),
        DataLoader(TensorDataset(x[1000:], y[1000:]), batch_size=50),
    )
    trial.run(THAW_AT)
    frozen = torch.equal(body[0].weight.detach().cpu(), before)
    history = trial.run(8)
    thawed = not torch.equal(body[0].weight.detach().cpu(), before)
    if is_rank_zero():
        print(f"frozen at first: {frozen}, thawed later: {thawed}")
        print(f"accuracy: {history[-1]['val_acc']:.3f}")


if __name__ == "__main__":
    run_distributed(train)
