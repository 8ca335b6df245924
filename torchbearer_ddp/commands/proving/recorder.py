"""Records what each step of a Trial computes: on the ranks, and in the process to compare with."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torchbearer
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchbearer_ddp.callbacks.autocast_region import AutocastRegion
from torchbearer_ddp.callbacks.callback_order import OrderedCallbackList, of_kind
from torchbearer_ddp.callbacks.data import DATA_KEYS
from torchbearer_ddp.callbacks.gradients import SyncGradients
from torchbearer_ddp.callbacks.hooks import HOOKS
from torchbearer_ddp.commands.proving import facts
from torchbearer_ddp.commands.proving.imitation import Imitation
from torchbearer_ddp.commands.proving.job import Job
from torchbearer_ddp.commands.proving.joining import JoinedData
from torchbearer_ddp.commands.proving.replacing import replaced
from torchbearer_ddp.commands.proving.sketch import sketch
from torchbearer_ddp.commands.proving.streams import by_sample, step_seed
from torchbearer_ddp.data import randomness
from torchbearer_ddp.data.batch import batch_size
from torchbearer_ddp.group import collectives, replicas, trained

Recording = dict[str, Any]


class Enough(BaseException):
    """All steps are done; not an Exception, so that no script catches it."""


class Recorder:
    """Is called with every hook of every Trial that has callbacks of this package."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rank = collectives.rank()
        #: None on the ranks; in one process, where the batches of all ranks come from.
        self._joined = JoinedData(job.world_size) if collectives.world_size() == 1 else None
        self._imitation = Imitation(job.imitates)
        #: By identity, with the objects themselves, so that no other gets the same one.
        self._names: dict[int, tuple[str, Any]] = {}
        #: Parameters that each rank trains for itself, on purpose.
        self._local: set[int] = set()
        self._optimizers: dict[int, tuple[str, Any]] = {}
        self._trials: list[Any] = []
        self._step: dict[str, Any] | None = None
        self._runs: list[int] = []
        self._kinds: set[Any] = set()
        self.recording: Recording = {
            "rank": self._rank,
            "steps": [],
            "initial": [],
            "passes": [],
            "facts": facts.empty(),
        }

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Takes part in every Trial of this process."""
        kind = OrderedCallbackList
        with ExitStack() as stack:
            for hook in HOOKS:
                stack.enter_context(replaced(kind, hook, self._around(hook, vars(kind)[hook])))
            stack.enter_context(replaced(kind, "enter", self._entering(kind.enter)))
            stack.enter_context(replaced(kind, "leave", self._leaving(kind.leave)))
            stack.enter_context(
                replaced(AutocastRegion, "enter", lambda region: self._note_half_precision())
            )
            stack.enter_context(self._imitation.installed())
            stack.callback(register_optimizer_step_post_hook(self._after_optimizer).remove)
            yield

    def _around(self, hook: str, original: Callable[..., None]) -> Callable[..., None]:
        before, after = (getattr(self, f"_{when}_{hook}", None) for when in ("before", "after"))

        def call(callbacks: Any, state: Any) -> None:
            if before is not None:
                before(state)
            original(callbacks, state)
            if after is not None:
                after(state)

        return call

    def _entering(self, original: Callable[..., None]) -> Callable[..., None]:
        def enter(callbacks: Any, *where: Any) -> None:
            self._runs.append(torch.initial_seed())
            original(callbacks, *where)

        return enter

    def _leaving(self, original: Callable[..., None]) -> Callable[..., None]:
        def leave(callbacks: Any) -> None:
            original(callbacks)
            if self._joined is not None:  # the ranks draw from one common stream now
                randomness.leave_run(self._runs[-1], len(self._runs) - 1)
            is_failing = sys.exc_info()[0] is not None  # its error is to be seen
            if len(self.recording["steps"]) >= self._job.steps and not is_failing:
                raise Enough

        return leave

    def _note_half_precision(self) -> None:
        """In place of autocast, which rounds each part of a batch by more than what is looked for.

        What rounding does could not be measured either: a unit in the last place of a parameter is
        lost when it is rounded to half precision.
        """
        self.recording["facts"]["half_precision"] = True

    # The hooks, in the order of a run.

    def _before_on_start(self, state: Any) -> None:
        if self._joined is not None:
            self._joined.replace(state)

    def _after_on_start(self, state: Any) -> None:
        trial = state[torchbearer.SELF]
        for key in DATA_KEYS:
            loader, _ = trial.state.get(key) or (None, None)
            by_sample(loader, self._job.seed)
        by_sample(state.get(torchbearer.GENERATOR), self._job.seed)

    def _after_on_start_training(self, state: Any) -> None:
        trial = state[torchbearer.SELF]
        if any(trial is each for each in self._trials):
            return
        self._trials.append(trial)
        self._name(state)
        named = trained.parameters(state, self._skipped(state))
        self.recording["initial"].append({name: sketch(each) for name, each in named})
        facts.of_trial(self.recording["facts"], state)
        if self._joined is not None:
            self._prepare(state, named)

    def _prepare(self, state: Any, named: trained.Named) -> None:
        """Makes one process what this job wants it to be."""
        if self._job.rounding is not None:
            generator = torch.Generator().manual_seed(self._job.rounding)
            for _, parameter in named:
                change_by_one_unit(parameter, generator)
        criterion = self._imitation.criterion(state[torchbearer.CRITERION])
        for each in (state, state[torchbearer.SELF].state):
            each[torchbearer.CRITERION] = criterion

    def _before_on_start_epoch(self, state: Any) -> None:
        if self._joined is not None:
            self._joined.set_epoch(state)

    def _before_on_sample(self, state: Any) -> None:
        number = len(self.recording["steps"])
        rows, shape = facts.checksums(state)
        self._step = {
            "trial": len(self._trials) - 1,
            "samples": batch_size(state),
            "rows": rows,
            "row_shape": shape,
            "indices": facts.take_indices(self.recording["facts"], state),
            "gradients": {},
            "settings": {},
        }
        randomness.seed_all(step_seed(self._job.seed, number, self._rank))
        if self._joined is not None:
            parts = self._joined.parts(state, batch_size(state))
            self._imitation.begin_step(parts, self._job.seed, number)
        self._seeded = randomness.rng_state()

    def _after_on_criterion(self, state: Any) -> None:
        criterion = state[torchbearer.CRITERION]
        if self._joined is not None and id(criterion) not in self._kinds:
            self._kinds.add(id(criterion))
            facts.note_loss(self.recording["facts"], criterion, state)

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not any(p.requires_grad for p in trained.parameters_of(optimizer)):
            return  # the one that torchbearer uses where none is given
        if self._step is None:
            self.recording["facts"]["steps_outside"] += 1
            return
        new = (f"{type(optimizer).__name__} {len(self._optimizers)}", optimizer)
        title, _ = self._optimizers.setdefault(id(optimizer), new)
        if any(optimizer is each.state[torchbearer.OPTIMIZER] for each in self._trials):
            self.recording["facts"]["trial_optimizers"].append(title)
        for group_number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    self._step["settings"][f"{title}, group {group_number}: {key}"] = float(value)
        for index, parameter in enumerate(trained.parameters_of(optimizer)):
            unknown = (f"{title}, parameter {index}", parameter)
            name, _ = self._names.setdefault(id(parameter), unknown)
            self.recording["facts"]["owners"].setdefault(name, title)
            is_common = id(parameter) not in self._local
            if parameter.grad is not None and is_common and self._rank == 0:
                self._add_gradient(name, parameter.grad)

    def _add_gradient(self, name: str, gradient: torch.Tensor) -> None:
        """A parameter may have several steps in one batch."""
        found: dict[str, Any] = self._step["gradients"]  # type: ignore[index]
        times = sum(each.partition(" #")[0] == name for each in found)
        found[f"{name} #{times + 1}" if times else name] = sketch(gradient)

    def _after_on_step_training(self, state: Any) -> None:
        step, self._step = self._step, None
        if step is None or len(self.recording["steps"]) >= self._job.steps:
            return
        self._imitation.end_step()
        self._name(state)
        named = trained.parameters(state, self._skipped(state))
        gradients = _gradients_of(state)
        step["loss"] = _number(state.get(torchbearer.LOSS))
        step["kind"] = gradients.loss_kind if gradients else None
        step["weight"] = gradients.losses.weight(state, 0) if gradients else float(step["samples"])
        step["replica"] = zlib.crc32(repr(replicas.fingerprint(named).tolist()).encode())
        step["parameters"] = {n: sketch(each) for n, each in named} if self._rank == 0 else {}
        facts.note_step(self.recording["facts"], state, self._seeded, self._imitation)
        self.recording["steps"].append(step)
        if len(self.recording["steps"]) >= self._job.steps:
            # After SyncGradients, and on every rank at the same step: nothing is left to agree on.
            state[torchbearer.STOP_TRAINING] = True

    def _after_on_end_training(self, state: Any) -> None:
        self._add_pass("training", state)

    def _after_on_end_validation(self, state: Any) -> None:
        self._add_pass("validation", state)

    def _add_pass(self, name: str, state: Any) -> None:
        values = {
            key: number
            for key, value in state[torchbearer.METRICS].items()
            if not key.startswith("running_") and (number := _number(value)) is not None
        }
        after = len(self.recording["steps"])
        self.recording["passes"].append({"name": name, "after": after, "values": values})

    def _name(self, state: Any) -> None:
        for name, parameter in trained.parameters(state):
            self._names[id(parameter)] = (name, parameter)
        skipped = (trained.parameters_of(each) for each in self._skipped(state))
        self._local.update(id(parameter) for each in skipped for parameter in each)

    def _skipped(self, state: Any) -> list[Any]:
        gradients = _gradients_of(state)
        return gradients.skip if gradients else []


def _gradients_of(state: Any) -> SyncGradients | None:
    return next(iter(of_kind(state, SyncGradients)), None)


def _number(value: Any) -> float | None:
    """A number as it is, and the mean of a tensor."""
    if torch.is_tensor(value) and value.numel():
        return float(value.detach().double().mean())
    return float(value) if isinstance(value, int | float) else None


@torch.no_grad()
def change_by_one_unit(parameter: torch.Tensor, generator: torch.Generator) -> None:
    """Changes each number by about one unit in the last place, up or down."""
    if not parameter.is_floating_point():
        return
    signs = torch.randint(0, 2, parameter.shape, generator=generator, device="cpu") * 2 - 1
    eps = torch.finfo(parameter.dtype).eps
    parameter.mul_((1 + eps * signs.double()).to(parameter.device, parameter.dtype))
