"""Prints the sum over all ranks, as seen by each of them; started in every way there is."""

import os
import sys

import torch

from torchbearer_ddp import run_distributed
from torchbearer_ddp.group import collectives


def add_up(start):
    total = torch.tensor([float(start + collectives.rank())])
    collectives.all_reduce([total], "the sum")
    return [collectives.rank(), collectives.world_size(), collectives.local_rank(), total.item()]


# No guard: a started rank does not import this script.
results = run_distributed(add_up, args=(int(sys.argv[1]),))
os.write(1, f"{results}\n".encode())  # one write: the lines of two ranks must not mix
