"""How far doctor --script is off: the speed that a few steps promise against that of a long run.

On one host both are measured by turns, with the same script. For two hosts the promise is made on
one host, from the size of the gradients and the speed of the link; the long run is then on two.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.hosts import PORT, environment, linked
from torchbearer_ddp.commands.examining import prediction
from torchbearer_ddp.commands.examining.timed_run import PLAIN, Timed, measure

SCRIPT = str(Path(__file__).with_name("trained.py"))
#: Steps of a long run, and how long a run of one process is timed for the promise.
LONG, SECONDS = 100, 1.0
LIMIT = 300.0


def run(names: list[str], worlds: list[int], rounds: int) -> list[dict[str, Any]]:
    """Compares on one host, with each number of ranks."""
    tables = []
    for name in names:
        promised: dict[int, list[float]] = {n: [] for n in [1, *worlds]}
        real: dict[int, list[float]] = {n: [] for n in [1, *worlds]}
        for _ in range(rounds):
            steps = 0
            for ranks in promised:
                timed = _timed(name, ranks, steps)
                steps = steps or timed.steps
                promised[ranks].append(timed.seconds)
                real[ranks].append(_long_run([_ranks(ranks)], name))
        for ranks in worlds:
            gains = [
                ranks * statistics.median(each[1]) / statistics.median(each[ranks])
                for each in (promised, real)
            ]
            tables.append(_row(name, f"{ranks} ranks", *gains))
    return tables


def between_hosts(names: list[str], speeds: list[str], rounds: int) -> list[dict[str, Any]]:
    """Compares two hosts with a rank each with what one host promises."""
    tables = []
    for speed in speeds:
        for name in names:
            with linked(speed) as both:
                # One process there has the threads that it has on each of the two hosts.
                env = {**os.environ, **environment(both[0], 1)}
                promised, alone, real = [], [], []
                for _ in range(rounds):
                    timed = _timed(name, 1, 0, env)
                    single = prediction.speed_of(1, timed)
                    link = prediction.link_of(speed)
                    own = _timed(name, 2, timed.steps, env, PLAIN).moving
                    promised.append(prediction.over_link(single, timed, 2, link, own).seconds)
                    alone.append(timed.seconds)
                    real.append(_long_run(_on(both), name))
            single = statistics.median(alone)
            gains = [2 * single / statistics.median(each) for each in (promised, real)]
            tables.append(_row(name, f"2 hosts, {speed}/s", *gains))
    return tables


def _row(name: str, place: str, promised: float, real: float) -> dict[str, Any]:
    error = promised / real - 1
    return {"model": name, "where": place, "promised": promised, "real": real, "error": error}


def _timed(
    name: str,
    ranks: int,
    steps: int,
    env: dict[str, str] | None = None,
    wire: str | None = None,
) -> Timed:
    """What the doctor measures."""
    launch = {"launcher": "inline"} if ranks == 1 else {"nproc_per_node": ranks}
    before = dict(os.environ)
    os.environ.update(env or {})
    try:
        command = [SCRIPT, name, str(10 * LONG)]
        launch = {**launch, "device": "cpu"}
        return measure(command, False, launch, steps, SECONDS, LIMIT, wire)
    finally:
        os.environ.clear()
        os.environ.update(before)


#: What comes before the command (``ip netns exec``), the launch flags, and the environment.
Start = tuple[list[str], list[str], dict[str, str]]


def _ranks(ranks: int) -> Start:
    return [], ["--nproc-per-node", str(ranks)] if ranks > 1 else [], dict(os.environ)


def _on(both: list[Any]) -> list[Start]:
    place = ["--world-size", "2", "--host", both[0].address, "--port", str(PORT)]
    return [
        (list(host.command), [*place, "--rank", str(rank)], {**os.environ, **environment(host, 1)})
        for rank, host in enumerate(both)
    ]


def _long_run(commands: list[Start], name: str) -> float:
    """The seconds of a step over a whole run, as rank zero saw them."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds"
        started = [
            subprocess.Popen(
                [*before, sys.executable, SCRIPT, name, str(LONG), str(out), *flags],
                env=env,
                stderr=subprocess.DEVNULL,
            )
            for before, flags, env in commands
        ]
        try:
            for process in started:
                assert process.wait(LIMIT) == 0
        finally:
            for process in started:
                process.kill()
        return float(out.read_text())
