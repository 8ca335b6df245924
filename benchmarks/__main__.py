"""Runs the benchmarks, prints tables, writes a JSON file and the plots of the documentation.

python -m benchmarks            # everything, about forty minutes
python -m benchmarks --quick    # a look at whether it works, under two minutes
python -m benchmarks --out docs/benchmarks    # what the documentation shows
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from benchmarks import (
    gpus,
    hosts,
    launching,
    models,
    one_host,
    page,
    plots,
    prediction,
    report,
    single,
    started,
)
from torchbearer_ddp import __version__


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    gpus_here = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "processor": model,
        **({"GPUs": ", ".join(gpus_here)} if gpus_here else {}),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "torchbearer_ddp": __version__,
        "python": platform.python_version(),
    }


def measure(parts: list[str], quick: bool, rounds: int, seconds: float) -> dict[str, Any]:
    """Runs the named parts, each way taking so many turns of about so many seconds."""
    if quick:
        rounds, seconds = 2, 0.05
    names = ["mlp", "conv"] if quick else list(models.CASES)
    worlds = [2] if quick else [2, 4]
    found: dict[str, Any] = {"machine": machine(), "quick": quick}
    if "single" in parts:
        found["single process"] = single.run(4 * rounds, seconds)
    if "models" in parts:
        found["one host"] = one_host.run(names, worlds, rounds, seconds)
    if "gpus" in parts and torch.cuda.device_count() > 1:
        found["GPUs"] = gpus.run(gpus.large(), rounds, seconds)
    if "scaling" in parts:
        sizes = [10_000] if quick else [10_000, 100_000, 1_000_000, 10_000_000, 50_000_000]
        found["scaling"] = one_host.scaling(sizes, [2] if quick else [2, 4, 8], rounds, seconds)
    if "launch" in parts:
        found["launch"] = launching.run(1 if quick else 5)
    if "hosts" in parts and os.geteuid() == 0:
        speeds = ["1gbit"] if quick else ["1gbit", "10gbit"]
        found["two hosts"] = hosts.run(speeds, [2] if quick else [1, 2], min(rounds, 5), seconds)
    if "started" in parts:
        some = names[:1] if quick else names
        found["as started"] = started.on_one_host(some, worlds, 1 if quick else 3, seconds)
        if os.geteuid() == 0 and not quick:  # a launch there takes half a minute
            found["as started, two hosts"] = started.on_two_hosts(
                ["1gbit", "10gbit"], [1, 2], 2, seconds
            )
    if "prediction" in parts:
        times = 1 if quick else 3
        found["prediction"] = prediction.run(["wide"] if quick else names, worlds, times)
        if os.geteuid() == 0 and not quick:
            links = ["1gbit", "10gbit"]
            found["prediction"] += prediction.between_hosts(["deep", "wide", "conv"], links, times)
    return found


def main() -> None:
    every = ["single", "models", "gpus", "scaling", "launch", "hosts", "started", "prediction"]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds: proves that it works")
    parser.add_argument("--only", nargs="+", choices=every, default=every)
    parser.add_argument("--rounds", type=int, default=9, help="how often each way takes its turn")
    parser.add_argument("--seconds", type=float, default=0.4, help="about how long a turn takes")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    options = parser.parse_args()
    found = measure(options.only, options.quick, options.rounds, options.seconds)
    print(report.text(found))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    (options.out / "figures.rst").write_text(page.text(found))
    plots.draw(found, options.out)
    print(f"\nwritten: {options.out}/results.json, the plots and the page's figures beside it")


if __name__ == "__main__":
    main()
