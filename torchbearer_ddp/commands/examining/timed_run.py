"""Runs a script for a few steps and times them.

That is done in a process of its own, which runs this module, because a script may change whatever
it likes in it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from torchbearer_ddp.callbacks.callback_order import OrderedCallbackList, of_kind
from torchbearer_ddp.callbacks.gradients import SyncGradients
from torchbearer_ddp.commands.children import ended_afterwards
from torchbearer_ddp.commands.proving.outputs import kept_apart
from torchbearer_ddp.commands.proving.replacing import replaced
from torchbearer_ddp.data.batch import batch_size
from torchbearer_ddp.errors import LaunchError
from torchbearer_ddp.group import collectives, trained
from torchbearer_ddp.group.hosts import HOST_ID_VARIABLE
from torchbearer_ddp.launch.child import die_with
from torchbearer_ddp.launch.run import run_distributed
from torchbearer_ddp.launch.script import run_script

#: In the first steps buckets are made, caches are filled and libraries are loaded.
WARM_UP = 3
#: The fewest steps whose median is worth something.
FEWEST = 5
_LAST_LINES = 15
_PREFIX = "torchbearer_ddp-doctor-"
#: Gradients travel as the script says.
PLAIN = "plain"


@dataclass
class Timed:
    """The steps of one run, as one of its ranks saw them.

    Attributes:
        steps: The number of steps that were timed.
        seconds: The median time of a step.
        samples: The median number of samples of this rank in a step.
        waiting: The median time a step waited for slower ranks.
        moving: The median time of the exchange itself.
        gradient_bytes: The size of all gradients.
    """

    steps: int
    seconds: float
    samples: float
    waiting: float
    moving: float
    gradient_bytes: int


class _Enough(BaseException):
    """Ends the script; no handler of errors should catch it."""


class _Clock:
    """Times the training steps of the first Trial of this process.

    Args:
        steps: How many; 0 for as many as fit into ``seconds``.
        seconds: How long, if the number is not given.
    """

    def __init__(self, steps: int, seconds: float) -> None:
        self._steps, self._seconds = steps, seconds
        self._started = self._last = 0.0
        self._count = 0
        self._times: list[list[float]] = []
        self._gradient_bytes = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Takes part in every Trial that has callbacks of this package."""
        kind = OrderedCallbackList
        with ExitStack() as stack:
            for hook, after in (
                ("on_start_training", self._start),
                ("on_step_training", self._end),
            ):
                original = vars(kind)[hook]
                stack.enter_context(replaced(kind, hook, _followed_by(original, after)))
            yield

    def _start(self, state: Any) -> None:
        """The first step of an epoch is not timed: it starts the loader."""
        self._last = 0.0
        self._started = self._started or time.perf_counter()

    def _end(self, state: Any) -> None:
        if next(iter(trained.parameters(state)), ("", torch.empty(0, device="cpu")))[1].is_cuda:
            torch.cuda.synchronize()
        now = time.perf_counter()
        gradients = next(iter(of_kind(state, SyncGradients)), None)
        self._count += 1
        if self._last:
            timing = gradients.timing if gradients else None
            parts = [timing.waiting, timing.moving] if timing else [0.0, 0.0]
            self._times.append([now - self._last, float(batch_size(state)), *parts])
        if not self._gradient_bytes:
            self._gradient_bytes = sum(
                each.numel() * each.element_size()
                for _, each in trained.parameters(state)
                if each.requires_grad
            )
        timed = len(self._times) - WARM_UP
        late = timed >= FEWEST and now - self._started > self._seconds
        if timed >= self._steps if self._steps else late:
            raise _Enough
        self._last = time.perf_counter()

    def timed(self) -> dict[str, Any] | None:
        """What was measured, or None if there were too few steps."""
        times = self._times[WARM_UP:]
        if len(times) < FEWEST:
            return None
        middle = [statistics.median(column) for column in zip(*times, strict=True)]
        seconds, samples, waiting, moving = middle
        timed = Timed(len(times), seconds, samples, waiting, moving, self._gradient_bytes)
        return asdict(timed)


def _followed_by(original: Callable[..., None], after: Callable[[Any], None]) -> Any:
    def call(callbacks: Any, state: Any) -> None:
        original(callbacks, state)
        after(state)

    return call


def time_script(
    name: str, is_module: bool, steps: int, seconds: float, wire: str | None, folder: str
) -> dict[str, Any] | None:
    """Runs the script on this rank until enough steps are timed; see :func:`measure`.

    What it saves goes to the folder, which the command removes: a rank may be killed.
    """
    clock = _Clock(steps, seconds)
    own = Path(folder) / f"rank-{collectives.rank()}"
    own.mkdir()
    with kept_apart(own), clock.installed(), _sent_through_gloo(wire):
        try:
            run_script(name, is_module)
        except _Enough:
            pass
        except SystemExit as end:
            if end.code:
                raise
    return clock.timed()


@contextmanager
def _sent_through_gloo(wire: str | None) -> Iterator[None]:
    """Lets the ranks exchange gradients as hosts do, in this precision; None changes nothing."""
    if wire is None:
        yield
        return
    os.environ[HOST_ID_VARIABLE] = str(collectives.rank())
    original = vars(SyncGradients)["__init__"]

    def made(callback: SyncGradients, **options: Any) -> None:
        half = {} if wire == PLAIN else {"compress": wire, "hook": None, "hook_state": None}
        original(callback, **{**options, "transport": "gloo", **half})

    with replaced(SyncGradients, "__init__", made):
        yield


def measure(
    command: list[str],
    is_module: bool,
    launch: dict[str, Any],
    steps: int,
    seconds: float,
    limit: float,
    wire: str | None = None,
) -> Timed:
    """Times a script that is started as ``launch`` says, in processes of its own.

    With ``wire`` gradients travel between the ranks as they do between hosts: :data:`PLAIN`, or in
    half precision, such as ``bf16``.

    Raises:
        LaunchError: If it fails, takes longer than the limit, or has too few steps.
    """
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "output.txt"
        task = {
            **{"command": command, "is_module": is_module, "launch": launch},
            **{"steps": steps, "seconds": seconds, "wire": wire, "answer": str(answer)},
            **{"folder": folder, "parent": os.getpid()},
        }
        words = [sys.executable, "-m", __name__, json.dumps(task)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
            try:
                with ended_afterwards(process):
                    process.wait(limit)
            except subprocess.TimeoutExpired:
                raise LaunchError(
                    f"{command[0]} did not do its first steps within {limit:g} s. Allow more time "
                    "with --limit, or give it less data."
                ) from None
        if answer.exists():
            found = json.loads(answer.read_text())
            if found is None:
                raise LaunchError(
                    f"{command[0]} has fewer than {WARM_UP + FEWEST + 1} training steps in an "
                    "epoch of a Trial with callbacks of this package. Give it more data, or add "
                    "*data_parallel() to the callbacks of its Trial."
                )
            return Timed(**found)
        lines = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    shown = "\n".join(f"  {line}" for line in lines)
    raise LaunchError(f"{command[0]} failed. The end of its output:\n{shown}")


def main(text: str) -> None:
    """Runs the script of a task, and writes what the first rank of this process measured."""
    task = json.loads(text)
    die_with(task["parent"])
    name, *arguments = task["command"]
    sys.argv[:] = [name, *arguments]
    sys.path[0] = str(Path.cwd() if task["is_module"] else Path(name).resolve().parent)
    names = ("is_module", "steps", "seconds", "wire", "folder")
    work = (name, *(task[each] for each in names))
    found = run_distributed(time_script, work, **task["launch"])
    Path(task["answer"]).write_text(json.dumps(found[0]))


if __name__ == "__main__":
    main(sys.argv[1])
