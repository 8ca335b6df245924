"""Whole commands that train the same digits: ours, and what people use elsewhere.

    make bench-peers                        # installs the peers, and measures
    python -m benchmarks.peers --rounds 5   # measures

Each way is a script in ``peer_scripts``, started as its own documentation says, by turns with the
others. All of them train the same model for the same epochs, validate after each, write a
checkpoint of it and four lines for TensorBoard. All run in the environment of the peers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import digits

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv-peers" / "bin" / "python"
SCRIPTS = Path(__file__).parent / "peer_scripts"
OURS = "ours"
#: gloo now and then aborts a process of another library that ends while a peer still reads.
PEERS_TRIES = 3
#: By the name of a way, its script and the words between Python and it, to which torchrun's
#: number of processes is added.
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
WAYS: dict[str, tuple[str, list[str]]] = {
    OURS: ("ours.py", []),
    "torchrun, DDP": ("ddp.py", TORCHRUN),
    "accelerate": ("with_accelerate.py", TORCHRUN),
    "Lightning": ("with_lightning.py", []),
}
#: What is measured, and its unit in the tables: the title, the divisor and the digits shown.
COLUMNS = {
    "wall": ("Whole command, s", 1, 1),
    "first step": ("First step, s", 1, 1),
    "processor": ("Processor, s", 1, 1),
    "memory": ("Memory, MB", 1e6, 0),
    "written": ("Written, MB", 1e6, 1),
    "accuracy": ("Accuracy, %", 0.01, 1),
}


def run(worlds: list[int], rounds: int, epochs: int) -> list[dict[str, Any]]:
    """Medians over the rounds, for each number of processes.

    Memory is looked at in one more round, since looking takes time.
    """
    tables = []
    with tempfile.TemporaryDirectory(dir=disk()) as folder:
        stored = Path(folder) / "digits.pt"
        _store_digits(stored)
        for world in worlds:
            found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            for number in range(rounds):
                for way in WAYS if number % 2 else reversed(WAYS):
                    found[way].append(_command(way, world, epochs, stored, memory=False))
            medians = {
                way: {name: statistics.median(each[name] for each in all_) for name in all_[0]}
                for way, all_ in found.items()
            }
            for way in WAYS:
                looked_at = _command(way, world, epochs, stored, memory=True)
                medians[way]["memory"] = looked_at["memory"]
            tables.append(_table(world, epochs, rounds, medians, found))
    return tables


def disk() -> Path:
    """Where files are on a disk: in memory nothing is written."""
    folder = ROOT / "runs"
    folder.mkdir(exist_ok=True)
    return folder


def _store_digits(path: Path) -> None:
    x, y = digits.read()
    x, held_out = x.flatten(1), digits.HELD_OUT
    parts = (x[held_out:], y[held_out:], x[:held_out], y[:held_out])
    torch.save([each.clone() for each in parts], path)


def _command(way: str, world: int, epochs: int, stored: Path, memory: bool) -> dict[str, float]:
    """What one command took, once it is certain that all of its processes trained together."""
    script, words = WAYS[way]
    count = [str(world)] if words else []
    command = [str(PYTHON), *words, *count, str(SCRIPTS / script)]
    meter = [sys.executable, "-m", "benchmarks.meter", *(["--memory"] if memory else [])]
    with tempfile.TemporaryDirectory(dir=disk()) as folder:
        env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "MKL_"))},
            "PEERS_FOLDER": folder,
            "PEERS_DIGITS": str(stored),
            "PEERS_EPOCHS": str(epochs),
            "PEERS_WORLD": str(world),
        }
        for left in reversed(range(1 if way == OURS else PEERS_TRIES)):
            run = partial(subprocess.run, env=env, cwd=ROOT, capture_output=True, text=True)
            done = run([*meter, *command])
            if not done.returncode:
                break
            if not left:
                raise RuntimeError(f"{way} failed:\n{done.stderr}")
            print(f"{way} on {world} processes failed, and is started again", flush=True)
        ranks = [json.loads(each.read_text()) for each in Path(folder).glob("rank-*.json")]
    if len(ranks) != world or any(each["world"] != world for each in ranks):
        raise RuntimeError(f"{way} was to train on {world} processes together, but: {ranks}")
    took: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    took["first step"] = max(each["first"] for each in ranks) - took.pop("started")
    took["steps"] = ranks[0]["steps"]
    took["accuracy"] = ranks[0]["accuracy"]
    return took


def _table(
    world: int,
    epochs: int,
    rounds: int,
    medians: dict[str, dict[str, float]],
    found: dict[str, list[dict[str, float]]],
) -> dict[str, Any]:
    ours = medians[OURS]["wall"]
    walls = {way: [each["wall"] for each in all_] for way, all_ in found.items()}
    return {
        "processes": world,
        "epochs": epochs,
        "rounds": rounds,
        "results": medians,
        "ratios": {way: each["wall"] / ours for way, each in medians.items() if way != OURS},
        "spread": {way: [min(each), max(each)] for way, each in walls.items()},
    }


def cells(each: dict[str, float]) -> list[str]:
    """What the tables show of a way."""
    return [f"{each[name] / divisor:.{places}f}" for name, (_, divisor, places) in COLUMNS.items()]


def text(tables: list[dict[str, Any]]) -> str:
    """The tables for the terminal."""
    lines = []
    for table in tables:
        lines += ["", f"{table['epochs']} epochs of digits, {table['processes']} processes"]
        titles = [title for title, _, _ in COLUMNS.values()]
        lines.append("  ".join(["".ljust(14), *titles, "this / ours"]))
        for way, each in table["results"].items():
            shown = [cell.rjust(len(t)) for cell, t in zip(cells(each), titles, strict=True)]
            ratio = f"{table['ratios'][way]:.2f}" if way in table["ratios"] else ""
            lines.append("  ".join([way.ljust(14), *shown, ratio.rjust(11)]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/peers.json"))
    options = parser.parse_args()
    found = run(options.worlds, options.rounds, options.epochs)
    print(text(found))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
