"""How long a resume in mid-epoch takes until its first batch, against the place in the epoch.

    python -m benchmarks.resume [--places 1 1000 10000 100000] [--rounds 3] [--workers 0]

One run of each kind of loader saves at each place. Then it is resumed there, by turns: leaving out
at the sampler what was done, by the state of torchdata's StatefulDataLoader, and replaying it
(``resumes_by_replay``). The time is that from ``run()`` to the first batch.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torchbearer
from torch.utils.data import DataLoader, Dataset
from torchbearer.callbacks import on_sample, on_step_training
from torchdata.stateful_dataloader import StatefulDataLoader

from torchbearer_ddp import Checkpoint
from torchbearer_ddp.checkpoints.writer import finish_writing

BATCH = 4
PLACES = [1, 1000, 10_000, 100_000]
#: How the loader comes to its place, and its class.
WAYS = {"skipped": DataLoader, "by its state": StatefulDataLoader, "replayed": DataLoader}


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


def trial(count: int, workers: int, way: str, *callbacks: Any) -> torchbearer.Trial:
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 1)
    made = torchbearer.Trial(
        model,
        torch.optim.SGD(model.parameters(), 1e-6),
        torch.nn.functional.mse_loss,
        callbacks=[*callbacks],
        verbose=0,
    )
    data = Items(count, way == "replayed")
    return made.with_train_generator(WAYS[way](data, BATCH, shuffle=True, num_workers=workers))


def save_at(places: list[int], count: int, workers: int, way: str, folder: Path) -> None:
    """Trains up to the last place, and saves at each."""
    checkpoint = Checkpoint(folder, every_epochs=None, monitor=None, keep=None)

    @on_step_training
    def save(state: Any) -> None:
        if checkpoint.global_step == max(places):  # saved at the end of the step before
            raise Reached
        if checkpoint.global_step + 1 in places:
            checkpoint.save_now(state)

    try:
        trial(count, workers, way, checkpoint, save).run(1)
    except Reached:
        finish_writing()


def seconds_to_first_batch(path: Path, count: int, workers: int, way: str) -> float:
    used: list[Any] = []

    @on_sample
    def stop(state: Any) -> None:
        used.append(state)
        raise Reached

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resumed = trial(count, workers, way, Checkpoint(folder, resume=path), stop)
        begin = time.perf_counter()
        try:
            resumed.run(1)
        except Reached:
            taken = time.perf_counter() - begin
            # The garbage collector, during a later run, would wait 5 s for each worker.
            used.pop().pop(torchbearer.ITERATOR)
            vars(resumed.state[torchbearer.TRAIN_DATA][0])["_iterator"] = None
            return taken
    raise RuntimeError("No batch was left.")


def run(places: list[int], rounds: int, workers: int = 0) -> list[dict[str, Any]]:
    """The median milliseconds of each way from ``run()`` to the first batch, for each place."""
    logging.getLogger("torchbearer_ddp").setLevel(logging.WARNING)
    count = (max(places) + 10) * BATCH
    times: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in ("skipped", "by its state"):  # what is replayed is saved like what is skipped
            save_at(places, count, workers, way, Path(folder, way))
        for _ in range(rounds):
            for place, way in itertools.product(places, WAYS):
                saved = Path(folder, way if way in ("skipped", "by its state") else "skipped")
                path = saved / f"step-{place:07d}.pt"
                taken = seconds_to_first_batch(path, count, workers, way)
                times.setdefault((way, place), []).append(1000 * taken)
    return [
        {
            "batch": place,
            "milliseconds": {way: statistics.median(times[way, place]) for way in WAYS},
        }
        for place in places
    ]


def sentences(found: list[dict[str, Any]]) -> Iterator[str]:
    """What was found, place by place."""
    for row in found:
        shown = ", ".join(f"{way} {taken:.1f} ms" for way, taken in row["milliseconds"].items())
        yield f"from run() to batch {row['batch']:,}: {shown}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--places", type=int, nargs="+", default=PLACES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    print("\n".join(sentences(run(options.places, options.rounds, options.workers))))


if __name__ == "__main__":
    main()
