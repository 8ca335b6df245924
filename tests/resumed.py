"""Runs that are interrupted and resumed, and what the second part of them read."""

import functools
import warnings

import pytest
import torchbearer
from torchbearer.callbacks import on_sample, on_start

from tests.programs import Noisy, Stopped, assert_same, build, failing, outcome
from torchbearer_ddp import Checkpoint
from torchbearer_ddp.checkpoints.writer import finish_writing
from torchbearer_ddp.group import collectives

#: The items that were read in this process, and the samples that were trained on.
READ: list[int] = []
TRAINED: list[int] = []
#: The state of the run in progress, here and not on a callback: what callbacks hold is saved.
STATES: list[torchbearer.State] = []


class Counted(Noisy):
    """Each item draws from the generators of the process, and is counted outside of the set."""

    def __getitem__(self, index):
        READ.append(int(index))
        return super().__getitem__(index)


def run(loader, *callbacks, steps=None, epochs=2, **options):
    """The outcome of a run with these data, and how many samples it read and trained on."""
    READ.clear()
    TRAINED.clear()

    @on_start
    def note(state):
        STATES.append(state)

    @on_sample
    def count(state):
        TRAINED.append(len(state[torchbearer.X]))

    trial = build(note, count, *callbacks, **options)
    data = loader()
    trial.with_train_generator(data, steps=steps or len(data))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*callbacks are not those.*")
            trial.run(epochs)
    finally:
        # Where a run has failed, the garbage collector would wait 5 s for each worker.
        STATES.pop().pop(torchbearer.ITERATOR, None)
        used, _ = trial.state[torchbearer.TRAIN_DATA]
        if hasattr(used, "_iterator"):  # a StatefulDataLoader holds it too
            used._iterator = None
    return outcome(trial), len(READ), sum(TRAINED)


@functools.cache
def whole(loader, *callbacks, **options):
    """The outcome of a run that is not interrupted."""
    return run(loader, *callbacks, **options)[0]


def resumed(folder, loader, at, *callbacks, every_steps=None, **options):
    """Runs to the end, and again with an interruption; returns what the second part read."""
    expected = whole(loader, *callbacks, **options)
    saving = Checkpoint(folder, every_steps=every_steps or at - 1)
    with pytest.raises(Stopped):
        run(loader, *callbacks, failing(at), saving, **options)
    finish_writing()
    collectives.barrier()
    found, read, trained = run(loader, *callbacks, Checkpoint(folder), **options)
    assert_same(found, expected)
    return read, trained
