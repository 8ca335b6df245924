"""A small training in which ranks do what a script of events says; a program and a worker."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from typing import Any

import torch
import torchbearer
from torch.utils.data import DataLoader, TensorDataset
from torchbearer.callbacks import Callback

from torchbearer_ddp import Checkpoint, add_arguments, data_parallel, run_distributed
from torchbearer_ddp.group import collectives

#: How long an event of this kind holds its rank up.
SLOW_SECONDS = 0.3
FREEZE_SECONDS = 0.4


class Events(Callback):
    """Makes events happen on this rank, each before the backward pass of its step.

    Args:
        events: What happens, each with ``rank``, ``step`` and ``do``.
    """

    def __init__(self, events: list[dict[str, Any]]) -> None:
        super().__init__()
        self._mine = {e["step"]: e["do"] for e in events if e["rank"] == collectives.rank()}
        self.steps = 0

    def on_sample(self, state: Any) -> None:
        if do := self._mine.get(self.steps):
            _EVENTS[do](state)

    def on_step_training(self, state: Any) -> None:
        self.steps += 1


def _raise(state: Any) -> None:
    raise ValueError("a bad sample")


def _kill(state: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _exit(state: Any) -> None:
    sys.exit(3)


def _vanish(state: Any) -> None:
    os._exit(1)


def _stop(state: Any) -> None:
    state[torchbearer.STOP_TRAINING] = True


def _nan(state: Any) -> None:
    state[torchbearer.X] = state[torchbearer.X] * float("nan")


def _slow(state: Any) -> None:
    time.sleep(SLOW_SECONDS)


def _freeze(state: Any) -> None:
    """Stops this process; a helper lets it go on a while after it has stopped."""
    pid = os.getpid()
    # A SIGCONT before the SIGSTOP would be lost. grep says 1 while the process is there and runs.
    look = f"grep -qs ') T ' /proc/{pid}/stat; [ $? = 1 ] || break; sleep 0.01"
    wait = f"for _ in $(seq 1000); do {look}; done; sleep {FREEZE_SECONDS}"
    subprocess.Popen(["sh", "-c", f"{wait}; kill -CONT {pid}"])
    os.kill(pid, signal.SIGSTOP)


def _stuck(state: Any) -> None:
    time.sleep(600)


def _exhaust(state: Any) -> None:
    """Allocates more than this process may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (16 * 2**30, hard))
    torch.zeros(2**34)


_EVENTS = {
    "raise": _raise,
    "kill": _kill,
    "exit": _exit,
    "_exit": _vanish,
    "stop": _stop,
    "nan": _nan,
    "slow": _slow,
    "freeze": _freeze,
    "exhaust": _exhaust,
    "stuck": _stuck,
}


def launch(worker: Any, *args: Any, world_size: int = 2, timeout: float = 30, **kwargs: Any) -> Any:
    """Runs a worker on local ranks, as a script without flags would."""
    nothing = argparse.Namespace()  # not the flags of the test runner
    return run_distributed(
        worker, args, kwargs, options=nothing, nproc_per_node=world_size, timeout=timeout
    )


def fingerprint(model: torch.nn.Module) -> str:
    """The same for parameters that have the same bits."""
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def train(
    events: list[dict[str, Any]],
    steps: int = 10,
    *,
    transport: str = "auto",
    folder: str | None = None,
    callbacks: Any = (),
    pause: float = 0.0,
) -> tuple[int, str]:
    """Trains for so many steps, and returns how many it were and the parameters' fingerprint."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 2)
    script = Events(events)
    saving = [Checkpoint(folder, every_steps=2, every_epochs=None)] if folder else []

    @torchbearer.callbacks.on_step_training
    def tell(state: Any) -> None:
        if pause:
            # The plain timeout holds from the second step on.
            if state[torchbearer.BATCH] == 1:
                os.write(1, f"rank {collectives.rank()} pid {os.getpid()}\n".encode())
            time.sleep(pause)

    trial = torchbearer.Trial(
        model,
        torch.optim.SGD(model.parameters(), 0.01),
        torch.nn.functional.mse_loss,
        callbacks=[*data_parallel(transport=transport), script, tell, *callbacks, *saving],
        verbose=0,
    )
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 2))
    trial.with_train_generator(DataLoader(data, batch_size=4), steps=steps).run(1)
    return script.steps, fingerprint(model)


if __name__ == "__main__":
    parser = add_arguments(argparse.ArgumentParser())
    parser.add_argument("--events", type=json.loads, default=[])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--transport", default="auto")
    options = parser.parse_args()
    with contextlib.suppress(BrokenPipeError):
        results = run_distributed(
            train,
            (options.events, options.steps),
            {"pause": options.pause, "transport": options.transport},
            options=options,
        )
        os.write(1, f"{json.dumps(results)}\n".encode())  # one write: lines must not mix
