"""A script as users have it, which trains one of the models: what doctor --script is given.

    python benchmarks/trained.py wide 100 [file]

It writes the seconds of a step over the whole epoch into the file, if one is named.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torchbearer
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.models import CASES
from torchbearer_ddp import data_parallel, is_rank_zero, run_distributed, world_size

#: As many steps come before the clock starts.
WARM_UP = 5


def train(name: str, steps: int, out: str | None) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build()
    x, y = case.batch()
    times_over = (steps + WARM_UP) * world_size()
    data = TensorDataset(*(torch.cat([each] * times_over) for each in (x, y)))
    times = []

    @torchbearer.callbacks.on_step_training
    def note(state):
        times.append(time.perf_counter())

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    callbacks = [*data_parallel(), note]
    trial = torchbearer.Trial(model, optimizer, case.criterion, ["loss"], callbacks, verbose=0)
    trial.with_train_generator(DataLoader(data, len(x))).run(1)
    if out and is_rank_zero():
        Path(out).write_text(str((times[-1] - times[WARM_UP - 1]) / (len(times) - WARM_UP)))


if __name__ == "__main__":
    words = sys.argv[1:4]
    run_distributed(train, (words[0], int(words[1]), words[2] if len(words) > 2 else None))
