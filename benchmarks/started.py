"""As users start them: DDP by torchrun, ours by run_distributed, launch after launch by turns.

Elsewhere all ways take turns in the same processes, so DDP too has what our launcher prepares, such
as memory that is kept from step to step. Here each has what its own launcher gives it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch.distributed as dist

from benchmarks import measure, models, steps
from benchmarks.hosts import PORT, Command, environment, launch, linked
from tests.hosts import Host
from torchbearer_ddp import is_rank_zero, run_distributed

OURS, OURS_BF16 = "ours, auto", "ours, auto, bf16"
#: How often each way takes its turn within a launch.
TURNS = 3


def on_one_host(
    names: list[str], worlds: list[int], launches: int, seconds: float
) -> list[dict[str, Any]]:
    """Measures the named models with each number of ranks."""
    tables = []
    for world in worlds:
        ranks = ["--nproc-per-node", str(world)]
        ddp = _torchrun(["--standalone", *ranks], names, seconds)
        ours = _ourselves(ranks, names, [OURS], seconds)
        env = dict(os.environ)
        found = _by_turns([(ddp, env)], [(ours, env)], launches)
        tables += [{"ranks": world, **each} for each in found]
    return tables


def on_two_hosts(
    speeds: list[str], ranks: list[int], launches: int, seconds: float
) -> list[dict[str, Any]]:
    """Measures the wide MLP over each link speed, with each number of ranks a host."""
    tables = []
    for speed in speeds:
        for per_host in ranks:
            with linked(speed) as both:
                found = _by_turns(*_on_each(both, per_host, seconds), launches)
            tables += [{"link": speed, "ranks a host": per_host, **each} for each in found]
    return tables


def _on_each(
    both: list[Host], per_host: int, seconds: float
) -> tuple[list[Command], list[Command]]:
    """What torchrun and what we are told on each host."""
    first, names = both[0].address, ["wide"]
    ddp, ours = [], []
    for node, host in enumerate(both):
        place = ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", str(per_host)]
        env = environment(host, per_host)
        meet = ["--master-addr", first, "--master-port", str(PORT)]
        named = {**env, "GLOO_SOCKET_IFNAME": host.interface}  # we find it by ourselves
        ddp.append(([*host.command, *_torchrun([*place, *meet], names, seconds)], named))
        meet = ["--host", first, "--port", str(PORT)]
        mine = _ourselves([*place, *meet], names, [OURS, OURS_BF16], seconds)
        ours.append(([*host.command, *mine], env))
    return ddp, ours


def _torchrun(flags: list[str], names: list[str], seconds: float) -> list[str]:
    task = _task(names, list(steps.DDP), seconds)
    return [sys.executable, "-m", "torch.distributed.run", *flags, *task]


def _ourselves(flags: list[str], names: list[str], ways: list[str], seconds: float) -> list[str]:
    return [sys.executable, *_task(names, ways, seconds), *flags]


def _task(names: list[str], ways: list[str], seconds: float) -> list[str]:
    return ["-m", "benchmarks.started", json.dumps([names, ways, seconds])]


def _by_turns(ddp: list[Command], ours: list[Command], launches: int) -> list[dict[str, Any]]:
    """The medians of so many launches of each, as tables by model."""
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(launches):
        for commands in (ddp, ours):
            for model, milliseconds in launch(commands).items():
                for way, each in milliseconds.items():
                    found.setdefault(model, {}).setdefault(way, []).append(each)
    tables = []
    for model, by_way in found.items():
        results = [measure.result(way, each) for way, each in by_way.items()]
        tables.append({"model": model, "results": results, "ratios": measure.ratios(results)})
    return tables


def _measure(names: list[str], ways: list[str], seconds: float) -> dict[str, dict[str, float]]:
    """The median step of each way with each model, in milliseconds."""
    found = {}
    for name in names:
        case = models.CASES[name]
        results = measure.interleaved(case, ways, steps.in_a_loop, rounds=TURNS, seconds=seconds)
        found[case.title] = {each["way"]: each["milliseconds"] for each in results}
    return found


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        answer = _measure(*task)
        if is_rank_zero():
            print(json.dumps(answer))
        dist.destroy_process_group()
    else:
        answers = run_distributed(_measure, task)
        print(json.dumps(answers[0]))
