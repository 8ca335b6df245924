"""From the command to the first step: our launcher against torchrun with a DDP script."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_MODEL = """
import time, torch
model = torch.nn.Linear(784, 10)
x, y = torch.randn(32, 784), torch.randint(0, 10, (32,))
"""

_DDP = f"""
import torch.distributed as dist
{_MODEL}
dist.init_process_group('gloo')
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
torch.nn.functional.cross_entropy(model(x), y).backward()
optimizer.step()
if dist.get_rank() == 0:
    print(time.time())
dist.destroy_process_group()
"""

_OURS = f"""
import torchbearer
from torchbearer_ddp import data_parallel, is_rank_zero, run_distributed
{_MODEL}
def train():
    trial = torchbearer.Trial(model, torch.optim.SGD(model.parameters(), 0.1),
                              torch.nn.functional.cross_entropy, callbacks=data_parallel(),
                              verbose=0)
    trial.with_train_data(x, y, batch_size=16, num_workers=0).for_train_steps(1).run(1)
    if is_rank_zero():
        print(time.time())

run_distributed(train, nproc_per_node=2)
"""


def run(rounds: int) -> dict[str, Any]:
    """Seconds from the command to the first step on two ranks, medians of interleaved rounds."""
    with tempfile.TemporaryDirectory() as folder:
        ddp, ours = Path(folder) / "ddp.py", Path(folder) / "ours.py"
        ddp.write_text(_DDP)
        ours.write_text(_OURS)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        commands = {
            "torchrun with DDP": [*torchrun, "--nproc-per-node", "2", str(ddp)],
            "ours": [sys.executable, str(ours)],
        }
        times: dict[str, list[float]] = {way: [] for way in commands}
        for _ in range(rounds):
            for way, command in commands.items():
                times[way].append(_seconds_to_first_step(command))
    medians = {way: statistics.median(each) for way, each in times.items()}
    return {"seconds": medians, "ratio": medians["torchrun with DDP"] / medians["ours"]}


def _seconds_to_first_step(command: list[str]) -> float:
    """Seconds until the command prints the time of its first step.

    A group of torch's own that is closed while a peer still reads fails now and then; what counts
    here was printed before.
    """
    started = time.time()
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        return float(done.stdout.split()[-1]) - started
    except (IndexError, ValueError):
        raise RuntimeError(f"{command} took no step:\n{done.stderr}") from None
