"""The trainings that tests run: as workers, imported from here, or as programs.

- :func:`train` is hard to resume, and returns all that must be equal after a resume.
- :func:`train_and_hold` is for clusters, and waits at given steps for a signal.
- :func:`train_with_events` is a small one in which ranks fail, stop or freeze.
- :func:`exchange_steps` has no Trial, only an exchange in each step.

``python -m tests.programs train`` and ``... steps`` run the last two with the package's own flags.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import inspect
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
import torchbearer
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchbearer.callbacks import Callback, CosineAnnealingLR, EarlyStopping, StepLR

from torchbearer_ddp import Checkpoint, add_arguments, data_parallel, run_distributed
from torchbearer_ddp.data import randomness
from torchbearer_ddp.group import collectives, membership, stop_request

SAMPLES = 24
EPOCHS = 4
#: How long a program waits for something that a test is about to do.
PATIENCE = 120.0
#: How long these events hold their rank up.
SLOW_SECONDS = 0.3
FREEZE_SECONDS = 0.4


# A training that is hard to resume.


class Noisy(Dataset):
    """Samples that are augmented with Python's, numpy's and torch's random numbers."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, 6, generator=generator)
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        noise = 0.1 * random.random() + 0.1 * float(numpy.random.rand())
        return self.x[index] + noise + 0.1 * torch.rand(6), self.y[index]


def spread(y_pred: torch.Tensor, y_true: torch.Tensor) -> float:
    return float(y_pred.std())


def network() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(16, 2),
    )


def build(
    *callbacks: Any,
    model: Any = None,
    workers: int = 0,
    steps: int | None = None,
    accumulate: int = 1,
) -> torchbearer.Trial:
    """A Trial with dropout, BatchNorm, Adam, two schedules, augmentation and stateful metrics."""
    torch.set_num_threads(1)
    randomness.seed_all(3)
    if (group := membership.current()) is not None:
        group.runs = 0  # as in a process that has just started
    model = model or network()
    gathering = torchbearer.metrics.EpochLambda("spread", spread, running=False)
    trial = torchbearer.Trial(
        model,
        torch.optim.Adam(model.parameters(), 0.01),
        torch.nn.CrossEntropyLoss(),
        metrics=["acc", "loss", "lr", torchbearer.metrics.to_dict(gathering)],
        callbacks=[
            *data_parallel(accumulate=accumulate),
            StepLR(1, 0.7),
            CosineAnnealingLR(T_max=7),
            *callbacks,
        ],
        verbose=0,
    )
    trial.to(collectives.device())
    # Forked workers notice when their rank is killed; the test's fork server would hide it.
    context = "fork" if workers else None
    return trial.with_generators(
        DataLoader(
            Noisy(),
            batch_size=3,
            shuffle=True,
            num_workers=workers,
            multiprocessing_context=context,
        ),
        DataLoader(Noisy(), batch_size=4),
        train_steps=steps,
    )


def outcome(trial: torchbearer.Trial) -> dict[str, Any]:
    """Everything that must be the same after a resume, on this rank."""
    optimizer = trial.state[torchbearer.OPTIMIZER]
    held = optimizer.state_dict()["state"]
    model = trial.state[torchbearer.MODEL].state_dict()
    on_gpu = collectives.device().type == "cuda"
    return {
        **{name: tensor.cpu().clone() for name, tensor in model.items()},
        **{f"{key}.{i}": value.cpu() for i, each in held.items() for key, value in each.items()},
        "history": [dict(epoch) for epoch in trial.state[torchbearer.HISTORY]],
        "rates": [group["lr"] for group in optimizer.param_groups],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if on_gpu else None,
        "python": random.getstate(),
        "numpy": numpy.random.get_state()[1].tolist(),
    }


def train(folder: Any = None, callbacks: Any = (), epochs: int = EPOCHS, **options: Any) -> Any:
    """Runs to the end and returns the outcome; without a folder, without checkpoints."""
    sizes = {k: options.pop(k) for k in ("workers", "steps", "accumulate") if k in options}
    saving = [] if folder is None else [Checkpoint(folder, **options)]
    trial = build(*saving, *callbacks, **sizes)
    trial.run(epochs)
    return outcome(trial)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


class Stopped(Exception):
    """What :func:`failing` raises."""


def failing(at: int) -> Any:
    """A callback that fails at the given batch, counted over all epochs of this process."""
    left = [at]

    @torchbearer.callbacks.on_sample
    def fail(state: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise Stopped

    return fail


# Short trainings.


class GradientDescent(torch.optim.Optimizer):
    """Gradient descent with momentum, in processes that shall start fast.

    torch's own optimizers import its graph tracer when they are built, which takes 1.4 s in every
    new process; :func:`inspect.unwrap` gives the methods without it.
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)

    def __init__(self, parameters: Any, lr: float, momentum: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    if "velocity" not in state:
                        state["velocity"] = torch.zeros_like(parameter)
                    state["velocity"].mul_(group["momentum"]).add_(parameter.grad)
                    parameter.sub_(state["velocity"], alpha=group["lr"])
        return loss


def short_trial(
    model: torch.nn.Module, criterion: Any, *callbacks: Any, momentum: float = 0.0
) -> torchbearer.Trial:
    """A Trial for a process that shall start fast."""
    torch.set_num_threads(1)
    optimizer = GradientDescent(model.parameters(), 0.1, momentum)
    return torchbearer.Trial(model, optimizer, criterion, callbacks=list(callbacks), verbose=0)


def parameters(model: torch.nn.Module) -> torch.Tensor:
    """All parameters in one tensor."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def launch(worker: Any, *args: Any, world_size: int = 2, timeout: float = 30, **kwargs: Any) -> Any:
    """Runs a worker on local ranks, as a script without flags would."""
    nothing = argparse.Namespace()  # not the flags of the test runner
    return run_distributed(
        worker, args, kwargs, options=nothing, nproc_per_node=world_size, timeout=timeout
    )


# On a cluster.


class Hold(Callback):
    """Waits after certain steps until a stop is requested; at each place once.

    Args:
        places: The steps to wait after, each counted from a start of the job.
        marks: The folder in which each rank leaves a file when it has come to a place.
    """

    def __init__(self, places: list[int], marks: Path) -> None:
        super().__init__()
        named = [(s, marks / f"holds-{n}-{collectives.rank()}") for n, s in enumerate(places)]
        self._left = [(step, mark) for step, mark in named if not mark.exists()]
        self._steps = 0

    def on_step_training(self, state: Any) -> None:
        self._steps += 1
        if self._left and self._steps == self._left[0][0]:
            self._left[0][1].touch()
            deadline = time.monotonic() + PATIENCE
            while not stop_request.requested() and time.monotonic() < deadline:
                time.sleep(0.02)


def train_and_hold(
    folder: str, places: Sequence[int] = (), every_steps: int | None = None
) -> dict[str, Any]:
    """Three epochs of five steps on four ranks, with dropout, momentum and shuffling.

    Args:
        folder: The folder of the checkpoints.
        places: Where to hold, see :class:`Hold`.
        every_steps: See :class:`Checkpoint`.
    """
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(16, 3)
    )
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(
        torch.randn(60, 8, generator=generator), torch.randint(3, (60,), generator=generator)
    )
    saving = Checkpoint(folder, every_steps=every_steps)
    holding = Hold(list(places), Path(folder).parent)
    trial = short_trial(
        model, torch.nn.CrossEntropyLoss(), *data_parallel(), saving, holding, momentum=0.9
    )
    trial.with_train_generator(DataLoader(data, batch_size=3, shuffle=True))
    history = trial.run(3)
    return {
        "parameters": parameters(model).tolist(),
        "epochs": len(history),
        "rank": collectives.rank(),
        "host": socket.gethostname(),
        "restarts": restarts(),
    }


def stop_early_and_hold(folder: str) -> dict[str, Any]:
    """A run that EarlyStopping ends in its second epoch; after it the first start holds."""
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 3)
    data = TensorDataset(torch.randn(12, 8), torch.randint(3, (12,)))
    never_better = EarlyStopping(monitor="loss", patience=1, min_delta=100.0)
    callbacks = (*data_parallel(), Checkpoint(folder), never_better)
    optimizer = GradientDescent(model.parameters(), 0.1, 0.0)
    trial = torchbearer.Trial(
        model, optimizer, torch.nn.CrossEntropyLoss(), ["loss"], list(callbacks), verbose=0
    )
    history = trial.with_train_generator(DataLoader(data, batch_size=3)).run(9)
    result = {"epochs": len(history), "parameters": parameters(model).tolist()}
    if restarts() == 0:
        mark = Path(folder).parent / f"holds-0-{collectives.rank()}"
        unfinished = mark.with_suffix(".part")
        unfinished.write_text(json.dumps(result))
        unfinished.rename(mark)
        time.sleep(PATIENCE)
    return {**result, "restarts": restarts()}


def restarts() -> int:
    """How often Slurm has started this job again."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def wait_for_signal(marks: str) -> int:
    """Waits on the first start without looking for a stop request; returns the restarts."""
    if restarts() == 0:
        (Path(marks) / f"holds-0-{collectives.rank()}").touch()
        time.sleep(PATIENCE)
    return restarts()


def read_variables(*names: str) -> list[str | None]:
    """Variables of the environment that this rank sees."""
    return [os.environ.get(name) for name in names]


# Ranks that fail.


def _raise(state: Any) -> None:
    raise ValueError("a bad sample")


def _kill(state: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(state: Any) -> None:
    state[torchbearer.STOP_TRAINING] = True


def _nan(state: Any) -> None:
    state[torchbearer.X] = state[torchbearer.X] * float("nan")


def _freeze(state: Any) -> None:
    """Stops this process; a helper lets it go on a while after it has stopped."""
    pid = os.getpid()
    # A SIGCONT before the SIGSTOP would be lost. grep ends with 1 while the process runs.
    look = f"grep -qs ') T ' /proc/{pid}/stat; [ $? = 1 ] || break; sleep 0.01"
    wait = f"for _ in $(seq 1000); do {look}; done; sleep {FREEZE_SECONDS}"
    subprocess.Popen(["sh", "-c", f"{wait}; kill -CONT {pid}"])
    os.kill(pid, signal.SIGSTOP)


def _exhaust(state: Any) -> None:
    """Allocates more than this process may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (16 * 2**30, hard))
    torch.zeros(2**34)


def _stuck(state: Any) -> None:
    time.sleep(600)


def _look_past_the_end(state: Any) -> None:
    """An index error, which a GPU finds by an assertion in its kernel, after the call returned."""
    table = torch.zeros(3, device=collectives.device())
    state[torchbearer.X] = state[torchbearer.X] + table[torch.tensor([7], device=table.device)]


_EVENTS: dict[str, Callable[[Any], None]] = {
    "raise": _raise,
    "kill": _kill,
    "exit": lambda state: sys.exit(3),
    "_exit": lambda state: os._exit(1),
    "stop": _stop,
    "nan": _nan,
    "slow": lambda state: time.sleep(SLOW_SECONDS),
    "freeze": _freeze,
    "exhaust": _exhaust,
    "stuck": _stuck,
    "index": _look_past_the_end,
}


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


def train_with_events(
    events: list[dict[str, Any]],
    steps: int = 10,
    *,
    transport: str = "auto",
    folder: str | None = None,
    callbacks: Any = (),
    pause: float = 0.0,
) -> tuple[int, str]:
    """Trains, and returns the number of steps and a digest of the parameters' bits.

    With a pause after each step every rank prints its process id after the second one, from which
    on the plain timeout holds.
    """
    model = torch.nn.Linear(4, 2)
    happening = Events(events)
    saving = [Checkpoint(folder, every_steps=2, every_epochs=None)] if folder else []

    @torchbearer.callbacks.on_step_training
    def report(state: Any) -> None:
        if pause:
            if state[torchbearer.BATCH] == 1:
                _print(f"pid {os.getpid()}")
            time.sleep(pause)

    trial = short_trial(
        model,
        torch.nn.functional.mse_loss,
        *data_parallel(transport=transport),
        *(happening, report, *callbacks, *saving),
    )
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 2))
    trial.to(collectives.device())
    trial.with_train_generator(DataLoader(data, batch_size=4), steps=steps).run(1)
    bits = parameters(model).cpu().numpy().tobytes()
    return happening.steps, hashlib.sha256(bits).hexdigest()


def exchange_steps(event: str, on: int) -> Any:
    """Makes one exchange after the other, until rank ``on`` does at step 5 what the event says.

    Args:
        event: ``raise``, ``kill``, ``leave`` or ``return``; or, without an end of their own,
            ``none``, ``polite`` (stops on request) and ``stubborn`` (ignores the request).
        on: The rank that misbehaves.
    """

    def step(number: int) -> bool:
        # From the first step on, so that a signal after the line with the pid does not interrupt.
        asked = event in ("polite", "stubborn") and stop_request.requested() is not None
        stop = asked and event == "polite"
        total = torch.tensor([float(stop)])
        collectives.all_reduce([total], f"step {number}")
        return total.item() > 0

    step(0)
    if group := membership.current():
        group.past_first_step = True  # as after the first gradients: now the plain timeout holds
    _print(f"pid {os.getpid()}")
    for number in range(1, 60_000):
        if number == 5 and event not in ("none", "polite", "stubborn"):
            if collectives.rank() == on:
                return _misbehave(event)
            if event in ("return", "leave"):
                return "done"
        if step(number):
            _print("saved")
            return "stopped"
        time.sleep(0.001)


def _misbehave(event: str) -> Any:
    if event == "leave":
        sys.exit(0)
    if event == "return":
        return (number for number in range(3))
    return _EVENTS[event](None)


def _print(text: str) -> None:
    """One write, so that the lines of two ranks do not mix."""
    os.write(1, f"rank {collectives.rank()} {text}\n".encode())


def _main() -> None:
    parser = argparse.ArgumentParser()
    programs = parser.add_subparsers(dest="program", required=True)
    training = add_arguments(programs.add_parser("train"))
    training.add_argument("--events", type=json.loads, default=[])
    training.add_argument("--steps", type=int, default=10)
    training.add_argument("--pause", type=float, default=0.0)
    training.add_argument("--transport", default="auto")
    stepping = add_arguments(programs.add_parser("steps"))
    stepping.add_argument("event")
    stepping.add_argument("--on", type=int, default=1)
    options = parser.parse_args()
    if options.program == "steps":
        print(run_distributed(exchange_steps, (options.event, options.on), options=options))
        return
    with contextlib.suppress(BrokenPipeError):
        results = run_distributed(
            train_with_events,
            (options.events, options.steps),
            {"pause": options.pause, "transport": options.transport},
            options=options,
        )
        os.write(1, f"{json.dumps(results)}\n".encode())  # one write: lines must not mix


if __name__ == "__main__":
    _main()
