"""What grows with the number of ranks: bytes, descriptors and memory of up to 32 real ranks.

Each launch has a network of its own, whose loopback carries nothing else, so that its counter is
that of the ranks. Many more ranks than cores say nothing about time but as ratios of one launch.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchbearer
from torchbearer import metrics

from benchmarks import measure, models, steps
from tests.hosts import hosts
from tests.proc import count_descriptors
from torchbearer_ddp import barrier, run_distributed, world_size
from torchbearer_ddp.data import randomness
from torchbearer_ddp.group import collectives, membership, wire
from torchbearer_ddp.metrics.pooled_list import PooledMetricList

RANKS = [2, 4, 8, 16, 32]
CASE = models.CASES["mlp"]
#: The steps of the epoch whose metrics are exchanged.
EPOCH_STEPS = 1000
_GLOO, _SHM = "ours, gloo", "ours, shm"
_SENT = Path("/sys/class/net/lo/statistics/tx_bytes")
#: Connects ranks when they first talk, as it is done from 65 ranks on.
_LAZY = {"TORCH_GLOO_LAZY_INIT": "1"}


def run(ranks: list[int], rounds: int, seconds: float) -> dict[str, Any]:
    """Measures launches with these numbers of ranks, all connected and connected late."""
    points = []
    for number in ranks:
        early = _launched(number, {}, rounds, seconds)
        late = _launched(number, _LAZY, 1, seconds)
        kept = ("joining", "descriptors", "descriptors of rank zero")
        late = {f"{name}, late": late[name] for name in kept}
        points.append({"ranks": number, **early, **late})
    parameters = list(CASE.build().parameters())
    return {
        "model": CASE.title,
        "parameters": sum(each.numel() for each in parameters),
        "tensors": len(parameters),
        "epoch steps": EPOCH_STEPS,
        "points": points,
    }


def _launched(number: int, variables: dict[str, str], rounds: int, seconds: float) -> Any:
    words = [sys.executable, "-m", "benchmarks.many_ranks", str(number), str(rounds), str(seconds)]
    environment = {**os.environ, **variables, "OMP_NUM_THREADS": "1"}
    with hosts(1) as (host,):
        done = subprocess.run(
            [*host.command, *words], env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
    return json.loads(done.stdout.splitlines()[-1])


def _measure(rounds: int, seconds: float) -> dict[str, Any]:
    """On each rank of a launch."""
    barrier("joined")
    # As between hosts: here small messages would go through memory.
    membership.current().host_channel = None  # type: ignore[union-attr]
    joining = _sent()
    sent = _Counter()
    part = {"generators": randomness.rng_state(), "started": randomness.rng_state()}
    own_bytes = len(wire.encode(part))
    parts = [part] * world_size() if collectives.is_rank_zero() else []
    step = steps.in_a_loop(_GLOO, CASE)
    step(2)
    found = {
        "joining": joining / world_size(),
        "barrier": sent.by_each(lambda: [barrier("one of them") for _ in range(10)]) / 10,
        "gradients": sent.by_each(lambda: step(10)) / 10,
        "metrics": sent.by_each(_epoch()),
        "part": own_bytes,
        "parts gathered": sent.by_each(lambda: collectives.gather_to(part, "the parts")),
        "parts scattered": sent.by_each(lambda: collectives.scatter(parts, "the parts")),
    }
    ways = [steps.LOCAL, _GLOO, _SHM]
    results = measure.interleaved(CASE, ways, steps.in_a_loop, rounds=rounds, seconds=seconds)
    times = {each["way"]: each["milliseconds"] for each in results}
    mine = {
        "shared": _shared_bytes(),
        "private": _private_bytes(),
        "descriptors": count_descriptors() - 1,  # without that of the list
    }
    everyone = collectives.all_gather(mine, "what each rank has")
    return {
        **found,
        "times a step without exchange": {w: times[w] / times[steps.LOCAL] for w in ways[1:]},
        "shared memory": everyone[0]["shared"] / world_size(),
        "private memory": statistics.median(each["private"] for each in everyone),
        "descriptors": max(each["descriptors"] for each in everyone[1:]),
        "descriptors of rank zero": everyone[0]["descriptors"],
    }


class _Counter:
    """What each rank sends during an action, without the barriers around it."""

    def __init__(self) -> None:
        self._own = 0.0
        self._own = self.by_each(lambda: None)

    def by_each(self, action: Callable[[], Any]) -> float:
        """The bytes that a rank sends on average, packet headers included."""
        barrier("before")
        before = _sent()
        barrier("begun")
        action()
        barrier("done")
        after = _sent()
        barrier("after")
        return (after - before) / world_size() - self._own


def _epoch() -> Callable[[], Any]:
    """The exchange of the metrics at the end of an epoch."""
    state = torchbearer.State()
    state.update({torchbearer.CRITERION: torch.nn.CrossEntropyLoss(), torchbearer.DEVICE: "cpu"})
    state.update({torchbearer.X: torch.zeros(32, 2), torchbearer.Y_TRUE: torch.arange(32) % 10})
    pooled = PooledMetricList.over(metrics.MetricList(["acc", "loss"]))
    pooled.train()
    pooled.reset(state)
    for _ in range(EPOCH_STEPS):
        state.update({torchbearer.Y_PRED: torch.rand(32, 10), torchbearer.LOSS: torch.rand(())})
        pooled.process(state)
    return lambda: pooled.process_final(state)


def _sent() -> int:
    return int(_SENT.read_text())


def _shared_bytes() -> int:
    """The memory of gradients that all ranks have mapped."""
    spans = [
        line.split()[0].split("-")
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "memfd:torchbearer_ddp" in line
    ]
    return sum(int(end, 16) - int(begin, 16) for begin, end in spans)


def _private_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private"))


if __name__ == "__main__":
    number, rounds, seconds = sys.argv[1:4]
    answers = run_distributed(
        _measure, (int(rounds), float(seconds)), nproc_per_node=int(number), launcher="spawn"
    )
    print(json.dumps(answers[0]))
