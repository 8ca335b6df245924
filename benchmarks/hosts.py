"""Two hosts: network namespaces with a link of a given speed, and the bytes that cross it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import measure, models, steps
from tests.hosts import Host, hosts
from torchbearer_ddp import run_distributed
from torchbearer_ddp.group import collectives

PORT = 29400

Command = tuple[list[str], dict[str, str]]
"""What is started on a host, and its environment."""


def run(speeds: list[str], ranks: list[int], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Measures the wide MLP over each link speed, with each number of ranks a host.

    Args:
        speeds: As ``tc`` writes them: ``1gbit``.
        ranks: The numbers of ranks on each host.
        rounds: How often each way takes its turn.
        seconds: About how long a turn takes.
    """
    tables = []
    for speed in speeds:
        for per_host in ranks:
            with linked(speed) as both:
                found = on_both(both, per_host, "benchmarks.hosts", [str(rounds), str(seconds)])
            tables.append({"link": speed, "ranks a host": per_host, **found})
    return tables


@contextlib.contextmanager
def linked(speed: str) -> Iterator[list[Host]]:
    """Two hosts with a link of the given speed between them."""
    with hosts(2) as both:
        for host in both:
            subprocess.run(
                [*host.command, "tc", "qdisc", "add", "dev", host.interface, "root",
                 "tbf", "rate", speed, "burst", "512kb", "latency", "50ms"],
                check=True,
            )  # fmt: skip
        yield both


def environment(host: Host, per_host: int) -> dict[str, str]:
    """What lets the namespaces of one machine pass for two machines.

    Without it ranks would share memory across them, and each host would take all the cores.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // (2 * per_host))
    return {
        **os.environ,
        "TORCHBEARER_DDP_HOST_ID": host.name,
        "OMP_NUM_THREADS": str(threads),
    }


def launch(commands: list[Command]) -> Any:
    """Starts one command on each host, as a user would; the first one prints the results."""
    started = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        for command, env in commands
    ]
    outputs = [process.communicate(timeout=1800)[0] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError(f"{commands} failed: {outputs}")
    return json.loads(outputs[0].splitlines()[-1])


def on_both(both: list[Host], per_host: int, module: str, words: list[str]) -> dict[str, Any]:
    """Starts a module on both hosts, with the name of the interface and these words."""
    commands = []
    for node, host in enumerate(both):
        command = [
            *host.command, sys.executable, "-m", module, host.interface, *words,
            "--nnodes", "2", "--node-rank", str(node),
            "--nproc-per-node", str(per_host), "--host", both[0].address, "--port", str(PORT),
        ]  # fmt: skip
        commands.append((command, environment(host, per_host)))
    found: dict[str, Any] = launch(commands)
    return found


def _measure(interface: str, rounds: int, seconds: float) -> dict[str, Any]:
    case = models.CASES["wide"]
    several = collectives.world_size() > 2
    names = steps.ways(["gloo", *(["hierarchical"] if several else [])], ["bf16"])
    names = [name for name in names if name != steps.PER_PARAMETER]
    sent: dict[str, float] = {}

    def prepare(way: str, case: models.Case) -> steps.Steps:
        run = steps.in_a_loop(way, case)

        def counted(count: int) -> float:
            before = _sent_bytes(interface)
            took = run(count)
            sent[way] = (_sent_bytes(interface) - before) / count
            return took

        return counted

    results = measure.interleaved(case, names, prepare, rounds=rounds, seconds=seconds)
    parameters = sum(p.numel() for p in case.build().parameters())
    hosts_count = 2
    return {
        "model": case.title,
        "results": results,
        "ratios": measure.ratios(results),
        "bytes sent by a host, per byte of gradient": {
            way: sent[way] / (4 * parameters) for way in names
        },
        "limit": 2 * (hosts_count - 1) / hosts_count,
    }


def _sent_bytes(interface: str) -> int:
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


if __name__ == "__main__":
    interface, rounds, seconds = sys.argv[1:4]
    answers = run_distributed(_measure, (interface, int(rounds), float(seconds)))
    print(json.dumps(answers[0]))
