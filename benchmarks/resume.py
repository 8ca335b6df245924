"""How long a resume in mid-epoch takes until its first batch, against the place in the epoch.

    python benchmarks/resume.py [--places 1 1000 10000 100000] [--rounds 3] [--workers 0]

One run saves at each place. Then it is resumed there, by turns: leaving out at the sampler what was
done, and replaying it (``resumes_by_replay``). The time is that from ``run()`` to the first batch.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torchbearer
from torch.utils.data import DataLoader, Dataset
from torchbearer.callbacks import on_sample, on_step_training

from torchbearer_ddp import Checkpoint
from torchbearer_ddp.checkpoints.writer import finish_writing

BATCH = 4


class Items(Dataset[Any]):
    """As many items as an epoch needs; to read one takes some microseconds."""

    def __init__(self, count: int, replays: bool) -> None:
        self.count = count
        self.resumes_by_replay = replays

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((8,), float(index)) + torch.rand(8), torch.zeros(1)


class Reached(Exception):
    """The run is where it should be measured, or where it need not go on."""


def trial(count: int, workers: int, replays: bool, *callbacks: Any) -> torchbearer.Trial:
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 1)
    made = torchbearer.Trial(
        model,
        torch.optim.SGD(model.parameters(), 1e-6),
        torch.nn.functional.mse_loss,
        callbacks=[*callbacks],
        verbose=0,
    )
    data = Items(count, replays)
    return made.with_train_generator(DataLoader(data, BATCH, shuffle=True, num_workers=workers))


def save_at(places: list[int], count: int, workers: int, folder: Path) -> None:
    """Trains up to the last place, and saves at each."""
    checkpoint = Checkpoint(folder, every_epochs=None, monitor=None, keep=None)

    @on_step_training
    def save(state: Any) -> None:
        if checkpoint.global_step in places:
            checkpoint.save_now(state)
        if checkpoint.global_step == max(places):
            raise Reached

    # It counts the steps after all others, unless it is called before them.
    checkpoint.order = {**Checkpoint.order, "on_step_training": -1000}  # type: ignore[misc]
    try:
        trial(count, workers, False, checkpoint, save).run(1)
    except Reached:
        finish_writing()


def seconds_to_first_batch(path: Path, count: int, workers: int, replays: bool) -> float:
    @on_sample
    def stop(state: Any) -> None:
        raise Reached

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resumed = trial(count, workers, replays, Checkpoint(folder, resume=path), stop)
        begin = time.perf_counter()
        try:
            resumed.run(1)
        except Reached:
            return time.perf_counter() - begin
    raise RuntimeError("No batch was left.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--places", type=int, nargs="+", default=[1, 1000, 10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    logging.getLogger("torchbearer_ddp").setLevel(logging.WARNING)
    count = (max(options.places) + 10) * BATCH
    times: dict[tuple[bool, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_at(options.places, count, options.workers, Path(folder))
        for _ in range(options.rounds):
            for place, replays in itertools.product(options.places, (False, True)):
                path = Path(folder) / f"step-{place:07d}.pt"
                taken = seconds_to_first_batch(path, count, options.workers, replays)
                times.setdefault((replays, place), []).append(taken)
    titles = ("skipped", "to the first", "replayed", "replayed / skipped")
    print(f"{'batch':>8} {titles[0]:>12} {titles[1]:>13} {titles[2]:>12} {titles[3]:>19}")
    first = statistics.median(times[False, options.places[0]])
    for place in options.places:
        skipped, replayed = (statistics.median(times[each, place]) for each in (False, True))
        print(
            f"{place:8d} {skipped * 1000:9.1f} ms {skipped / first:12.2f}x "
            f"{replayed * 1000:9.1f} ms {replayed / skipped:18.1f}x",
            flush=True,
        )


if __name__ == "__main__":
    main()
