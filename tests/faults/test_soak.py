"""Random events, many ranks on few cores, many launches in a row."""

import gc
import operator
import os
import random
import socket
import time
from pathlib import Path

import pytest

from tests import proc
from tests.processes import bound, until
from tests.programs import launch, train_with_events
from tests.ranks import run_ranks
from torchbearer_ddp import WorkerError, rank
from torchbearer_ddp.checkpoints import file

#: How many scripts of events are tried, and how many launches in a row.
SCRIPTS = int(os.environ.get("TORCHBEARER_DDP_SOAK", "12"))
LAUNCHES = int(os.environ.get("TORCHBEARER_DDP_LAUNCHES", "6"))
STEPS = 10
#: What an event does to the run; the rest only holds it up.
FATAL = {"raise": "raised ValueError: a bad sample", "kill": "was killed by SIGKILL"}
HARMLESS = ("slow", "freeze")


def script(number):
    """The same events each time for the same number: at most three, on two or three ranks."""
    draw = random.Random(number)
    world_size = draw.choice((2, 2, 3))
    kinds = draw.choices((*FATAL, "stop", *HARMLESS), weights=(2, 2, 3, 2, 2), k=3)
    events = {(draw.randrange(world_size), draw.randrange(STEPS)): kind for kind in kinds}
    transport = draw.choice(("shm", "gloo"))
    return world_size, transport, [{"rank": r, "step": s, "do": k} for (r, s), k in events.items()]


def expected(events):
    """How many steps there are, and the events that may be the cause if they end badly."""
    stops = [event["step"] for event in events if event["do"] == "stop"]
    # A request to stop is sent with the next gradients.
    last = min([STEPS - 1, *(step + 1 for step in stops)])
    fatal = [e for e in events if e["do"] in FATAL and e["step"] <= last]
    first = min((event["step"] for event in fatal), default=None)
    return last + 1, [event for event in fatal if event["step"] == first]


@pytest.mark.concurrent
@pytest.mark.parametrize("number", range(SCRIPTS))
def test_a_script_of_events_ends_right(number, tmp_path):
    world_size, transport, events = script(number)
    steps, causes = expected(events)
    folder = tmp_path / "run"
    started = time.monotonic()
    options = {"transport": transport, "folder": str(folder), "world_size": world_size}
    if causes:
        with pytest.raises(WorkerError) as caught:
            launch(train_with_events, events, STEPS, **options)
        host = socket.gethostname()
        heads = [f"Rank {e['rank']} on {host} {FATAL[e['do']]}" for e in causes]
        assert str(caught.value).startswith(tuple(heads)), events
    else:
        results = launch(train_with_events, events, STEPS, **options)
        assert results == [results[0]] * world_size, events
        assert results[0][0] == steps, events
    assert time.monotonic() - started < bound(30)
    # Every second step was saved; what was saved when the fault came can be loaded.
    done = causes[0]["step"] if causes else steps
    for path in folder.glob("step-*.pt"):
        file.read(path)
    if done > 3:
        saved = file.read(folder / "latest")["torchbearer_ddp"]["global_step"]
        assert done - 4 < saved <= done


def overload(transport, steps):
    return train_with_events([], steps, transport=transport)


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_thousand_steps_of_eight_ranks(transport):
    steps = 1000 if transport == "shm" else 300
    results = run_ranks(overload, 8, (transport, steps), timeout=150, group_timeout=60)
    assert results == [results[0]] * 8
    assert results[0][0] == steps


def belongings():
    """What a launch could leave behind: children, descriptors, shared memory."""
    mine = [p.name for p in Path("/dev/shm").iterdir() if p.name.startswith("torchbearer_ddp")]
    return len(proc.children()), proc.count_threads(), proc.count_descriptors(), mine


def test_launches_in_a_row_leave_nothing_behind():
    assert launch(rank) == [0, 1]  # what is made once, such as torch's thread pool, is there now
    before = belongings()
    for number in range(LAUNCHES):
        if number % 3 == 2:
            with pytest.raises(WorkerError, match="a bad sample"):
                launch(train_with_events, [{"rank": 1, "step": 1, "do": "raise"}])
        else:
            assert launch(rank) == [0, 1]
    gc.collect()  # what a caught error held

    def is_tidy():
        # There may be fewer: what earlier tests have left to the collector goes as well.
        *counts, shared = belongings()
        return shared == before[-1] and all(map(operator.le, counts, before))

    until(is_tidy, 10)  # a thread is listed for a moment after its end
