"""Runs the benchmarks, prints tables, writes a JSON file and the plots of the documentation.

python -m benchmarks            # everything, about three hours
python -m benchmarks --quick    # a look at whether it works, a few minutes
python -m benchmarks --out docs/benchmarks    # what the documentation shows
python -m benchmarks --only peers --keep --out docs/benchmarks    # a part of it, the rest as it was
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
    digits,
    formulas,
    gpus,
    hosts,
    launching,
    links,
    many_ranks,
    memory,
    models,
    one_host,
    page,
    peers,
    plots,
    prediction,
    report,
    resume,
    run_cost,
    single,
    started,
    traffic,
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
    names, worlds = _names_and_worlds(quick)
    found: dict[str, Any] = {"machine": machine(), "quick": quick}
    if "single" in parts:
        found["single process"] = single.run(4 * rounds, seconds)
    _measure_models(found, parts, quick, rounds, seconds)
    if "gpus" in parts and torch.cuda.device_count() > 1:
        found["GPUs"] = gpus.run(gpus.large(), rounds, seconds)
    _measure_once(found, parts, quick)
    _measure_hosts(found, parts, quick, rounds, seconds)
    if "peers" in parts and peers.PYTHON.exists():  # make bench-peers installs them
        found["peers"] = peers.run([2] if quick else [2, 4], 1 if quick else 5, 2 if quick else 20)
    if "ranks" in parts and os.geteuid() == 0:
        found["many ranks"] = many_ranks.run([2] if quick else many_ranks.RANKS, rounds, seconds)
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
            rates = ["1gbit", "10gbit"]
            found["prediction"] += prediction.between_hosts(["deep", "wide", "conv"], rates, times)
    return found


def _names_and_worlds(quick: bool) -> tuple[list[str], list[int]]:
    return (["mlp", "conv"], [2]) if quick else (list(models.CASES), [2, 4])


def _measure_models(
    found: dict[str, Any], parts: list[str], quick: bool, rounds: int, seconds: float
) -> None:
    names, worlds = _names_and_worlds(quick)
    if "models" in parts:
        others = () if quick else (3, 8)
        found["one host"] = one_host.run(names, worlds, rounds, seconds, others)
    if "threads" in parts:
        some = names[:1] if quick else ["mlp", "deep", "wide", "conv"]
        found["threads"] = one_host.threads(
            some, {2: [2]} if quick else one_host.THREADS, min(rounds, 5), seconds
        )
    if "traffic" in parts:
        some = names[:1] if quick else ["mlp", "deep", "wide"]
        found["traffic"] = traffic.run(some, rounds, seconds)
    if "memory" in parts:
        cases = [models.CASES[name] for name in names]
        cases += [] if quick else [models.mlp_of(10**8)]
        found["memory"] = memory.run(cases, worlds)
    if "scaling" in parts:
        sizes = [10_000] if quick else [10**4, 10**5, 10**6, 10**7, 10**8]
        found["scaling"] = one_host.scaling(sizes, [2] if quick else [2, 3, 4, 8], rounds, seconds)


def _measure_once(found: dict[str, Any], parts: list[str], quick: bool) -> None:
    if "launch" in parts:
        found["launch"] = launching.run(1 if quick else 5, [2] if quick else [2, 8])
    if "once" in parts:
        some = ["mlp"] if quick else ["mlp", "deep", "wide", "conv"]
        found["once"] = run_cost.run(some, 1 if quick else 5)
    if "resume" in parts:
        places = resume.PLACES[:2] if quick else resume.PLACES
        found["resume"] = resume.run(places, 1 if quick else 3)


def _measure_hosts(
    found: dict[str, Any], parts: list[str], quick: bool, rounds: int, seconds: float
) -> None:
    if "hosts" in parts and os.geteuid() == 0:
        speeds = ["1gbit"] if quick else ["1gbit", "10gbit"]
        found["two hosts"] = hosts.run(speeds, [2] if quick else [1, 2], min(rounds, 5), seconds)
    if "links" in parts and os.geteuid() == 0:
        speeds, cases = (["1gbit"], ["conv"]) if quick else (links.SPEEDS, ["wide", "conv"])
        few = 1 if quick else min(rounds, 5)
        found["slow links"] = links.run(speeds, [2] if quick else [1, 2], cases, few, 5 * seconds)
    if "digits" in parts:
        models_there, seeds, epochs = (["MLP"], 1, 1) if quick else (["MLP", "conv"], 5, 15)
        found["digits"] = digits.run(models_there, seeds, epochs)


def main() -> None:
    every = [
        *("single", "models", "threads", "traffic", "memory", "gpus", "scaling", "launch"),
        *("once", "resume"),
        *("hosts", "links", "digits", "peers", "ranks", "started", "prediction"),
    ]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds: proves that it works")
    parser.add_argument("--only", nargs="+", choices=every, default=every)
    parser.add_argument("--rounds", type=int, default=9, help="how often each way takes its turn")
    parser.add_argument("--seconds", type=float, default=0.4, help="about how long a turn takes")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    parser.add_argument("--keep", action="store_true", help="parts of an earlier run stay")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    stored = options.out / "results.json"
    found = json.loads(stored.read_text()) if options.keep and stored.exists() else {}
    for part in options.only:
        new = measure([part], options.quick, options.rounds, options.seconds)
        print(report.text(new), flush=True)
        found |= new
        stored.write_text(json.dumps(found, indent=1) + "\n")  # it takes hours, and may be ended
    (options.out / "figures.rst").write_text(page.text(found))
    if "many ranks" in found:
        (options.out / "many_ranks.rst").write_text(formulas.text(found["many ranks"]))
    plots.draw(found, options.out)
    print(f"\nwritten: {options.out}/results.json, the plots and the page's figures beside it")


if __name__ == "__main__":
    main()
