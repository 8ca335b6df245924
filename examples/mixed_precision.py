"""Mixed precision: forward and loss in bf16 (or fp16), parameters in single precision.

python examples/mixed_precision.py --nproc-per-node 2
python examples/mixed_precision.py --nproc-per-node 2 --dtype fp16
"""

import argparse

import torch
import torchbearer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchbearer_ddp import (
    MixedPrecision,
    add_arguments,
    data_parallel,
    device,
    is_rank_zero,
    run_distributed,
)


def train(dtype):
    x = torch.randn(1200, 20)
    y = (x.sum(1) > 0).long()
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    trial = torchbearer.Trial(
        model,
        torch.optim.Adam(model.parameters(), lr=0.005),
        nn.CrossEntropyLoss(),
        metrics=["acc", "loss"],
        callbacks=[*data_parallel(), MixedPrecision(dtype)],
    )
    trial.with_generators(
        DataLoader(TensorDataset(x[:1000], y[:1000]), batch_size=20, shuffle=True),
        DataLoader(TensorDataset(x[1000:], y[1000:]), batch_size=50),
    )
    history = trial.to(device()).run(4)
    if is_rank_zero():
        print(f"parameters: {model[0].weight.dtype}")
        print(f"accuracy: {history[-1]['val_acc']:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=["bf16", "fp16"], default="bf16")
    options = add_arguments(parser).parse_args()
    run_distributed(train, args=(options.dtype,), options=options)
