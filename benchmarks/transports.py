"""How long the sum of one bucket takes: shared memory against gloo, and the ratio.

    python -m benchmarks.transports --nproc-per-node 2

The transports take turns within each round, so that whatever else the machine does hits them alike:
trust the ratios rather than the times.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from torchbearer_ddp import add_arguments, run_distributed
from torchbearer_ddp.gradients.transports.choose import choose
from torchbearer_ddp.gradients.transports.interface import Bucket
from torchbearer_ddp.group import membership
from torchbearer_ddp.group.waiting import Wait

SIZES = (1_000, 64_000, 256_000, 4_000_000, 16_000_000, 40_000_000)
NAMES = ("gloo", "shm")


def measure(sizes, rounds, seconds):
    """Seconds per sum by size in bytes and transport: one figure per round."""
    group = membership.current()
    buckets = [Bucket(torch.float32, torch.device("cpu"), size // 4) for size in sizes]
    transports = {name: choose(group, name, buckets)[0] for name in NAMES}
    found = {}
    for index, size in enumerate(sizes):
        repeats = max(3, min(1000, int(seconds / (4e-5 + size * 1e-9))))
        times = {name: [] for name in NAMES}
        for _ in range(rounds + 1):
            for name, transport in transports.items():
                times[name].append(sum_repeatedly(group, transport, index, repeats))
        found[size] = {name: each[1:] for name, each in times.items()}  # the first one warms up
    return found


def sum_repeatedly(group, transport, index, repeats):
    weight = 1 / group.member.world_size
    wait = Wait(group, "a bucket")
    transport.tensors[index].fill_(1.0)
    transport.start(index, weight)
    transport.finish(index, wait)
    started = time.perf_counter()
    for _ in range(repeats):
        transport.start(index, weight)
        transport.finish(index, wait)
    return (time.perf_counter() - started) / repeats


def table(found):
    yield f"{'bytes':>12} {'gloo':>10} {'shm':>10}   gloo / shm (lowest to highest round)"
    for size, times in found.items():
        ratios = [gloo / shm for gloo, shm in zip(times["gloo"], times["shm"], strict=True)]
        columns = " ".join(f"{1e3 * statistics.median(times[name]):7.3f} ms" for name in NAMES)
        spread = f"({min(ratios):.1f} to {max(ratios):.1f})"
        yield f"{size:12,} {columns}   {statistics.median(ratios):5.2f} {spread}"


def main():
    parser = add_arguments(argparse.ArgumentParser(description=__doc__))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.05, help="of each turn, roughly")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    results = run_distributed(
        measure, (options.sizes, options.rounds, options.seconds), options=options, device="cpu"
    )
    print("\n".join(table(results[0])))
    if options.json:
        options.json.write_text(json.dumps(results[0], indent=1))


if __name__ == "__main__":
    main()
