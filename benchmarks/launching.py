"""Whole commands with a script of one step: our launcher against torchrun with a DDP script."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_MODEL = """
import os, time, torch
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
os.write(1, f'{{time.time()}}\\n'.encode())  # one piece: ranks share the stream
dist.destroy_process_group()
"""

_OURS = f"""
import sys, torchbearer
from torchbearer_ddp import data_parallel, run_distributed
{_MODEL}
def train():
    trial = torchbearer.Trial(model, torch.optim.SGD(model.parameters(), 0.1),
                              torch.nn.functional.cross_entropy, callbacks=data_parallel(),
                              verbose=0)
    trial.with_train_data(x, y, batch_size=2, num_workers=0).for_train_steps(1).run(1)
    os.write(1, f'{{time.time()}}\\n'.encode())  # one piece: ranks share the stream

run_distributed(train)
"""


def run(rounds: int, worlds: Sequence[int] = (2, 8)) -> dict[str, Any]:
    """Medians of interleaved rounds, in seconds, and torchrun's against ours.

    The first step and the whole command, from its start; and the end, from the last rank's step.
    """
    with tempfile.TemporaryDirectory() as folder:
        ddp, ours = Path(folder) / "ddp.py", Path(folder) / "ours.py"
        ddp.write_text(_DDP)
        ours.write_text(_OURS)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        found = {}
        for world in worlds:
            ranks = ["--nproc-per-node", str(world)]
            commands = {
                "torchrun with DDP": [*torchrun, *ranks, str(ddp)],
                "ours": [sys.executable, str(ours), *ranks],
            }
            times: dict[str, list[dict[str, float]]] = {way: [] for way in commands}
            for _ in range(rounds):
                for way, command in commands.items():
                    times[way].append(_seconds(command))
            found[str(world)] = {
                way: {name: statistics.median(t[name] for t in each) for name in each[0]}
                for way, each in times.items()
            }
    first = {way: each["first step"] for way, each in found[str(worlds[0])].items()}
    ratio = first["torchrun with DDP"] / first["ours"]
    return {"seconds": first, "ratio": ratio, "commands": found}


def sentences(found: dict[str, Any]) -> Iterator[str]:
    """What was found about whole commands."""
    for world, ways in found.get("commands", {}).items():
        whole = {way: each["whole"] for way, each in ways.items()}
        shown = ", ".join(f"{way} {seconds:.1f} s" for way, seconds in whole.items())
        yield (
            f"A whole command of one step with {world} ranks: {shown}; ours takes "
            f"{whole['ours'] / whole['torchrun with DDP']:.2f} of torchrun's time, and "
            f"{ways['ours']['end']:.2f} s from the last step to the prompt."
        )


def _seconds(command: list[str]) -> dict[str, float]:
    """How long a command takes, of which each rank prints the time of its step.

    A group of torch's own that is closed while a peer still reads fails now and then; what counts
    here was printed before.
    """
    started = time.time()
    done = subprocess.run(command, capture_output=True, text=True)
    ended = time.time()
    try:
        steps = [float(word) for word in done.stdout.split()]
        first, last = min(steps), max(steps)
    except ValueError:
        raise RuntimeError(f"{command} took no step:\n{done.stderr}") from None
    return {"first step": first - started, "whole": ended - started, "end": ended - last}
