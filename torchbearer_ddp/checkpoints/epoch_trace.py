"""The place of a loader in its epoch: how it came there, and how it comes there again.

It is started over, with the generators as they were when it was first started. Where a batch is a
function of its indices and of the generators, the batches that were trained on already are left out
at the sampler. A StatefulDataLoader continues by its own state. Any other loader is replayed: these
batches are loaded again and dropped, so that worker processes and data sets with a memory are in
the state that they were in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torchbearer
from torchbearer.callbacks import Tqdm

from torchbearer_ddp.checkpoints import generators, loader_state, memory, metric_state, skipping
from torchbearer_ddp.checkpoints.worker_states import WorkerStates
from torchbearer_ddp.log import announce

_DATA = f"{torchbearer.TRAIN_DATA}."


class EpochTrace:
    """The generators at the start of the epoch, and where torchbearer last started the loader over.

    It does so within an epoch that has more steps than the loader has batches; then a new order is
    drawn, in between the draws of training. To be made before the loader is started.
    """

    def __init__(self, state: Any) -> None:
        self._start = generators.collect(state)
        self._memory = memory.of_data(state)
        self._remembers = False
        self._again_at = 0
        self._again: dict[str, Any] | None = None
        self._skip: skipping.Skip | loader_state.Place | None = None
        self._workers: WorkerStates | None = None
        self._stateful = stateful = loader_state.find(state)
        self._obstacle = None if stateful is None else loader_state.obstacle(state, stateful)
        self._loader = loader = skipping.skippable(state)
        if stateful is not None and self._obstacle is None:
            self._loader = loader = stateful
        if loader is not None:
            self._watch([None] * loader.num_workers)

    def stepped(self, state: Any) -> None:
        """Notes the generators if the loader is at its end after this step, and not the epoch."""
        generator, done = state[torchbearer.GENERATOR], state[torchbearer.BATCH] + 1
        if generator is None or state[torchbearer.STEPS] == done:
            return
        if done % max(1, len(generator)) == 0:
            self._again_at, self._again = done, generators.collect(state)

    def collect(self, state: Any) -> dict[str, Any]:
        """Plain data for :meth:`continue_at`, after a step."""
        self._remembers |= self._has_memory(state)
        done = state[torchbearer.BATCH] + 1
        goes_by_state = self._stateful is not None and self._loader is self._stateful
        return {
            "start": self._start,
            "again_at": self._again_at,
            "again": self._again,
            "values": metric_state.collect_values(state[torchbearer.METRICS]),
            "remembers": self._remembers,
            # Workers whose data has a memory do not report any more, and are not asked.
            "workers": []
            if self._workers is None or self._remembers
            else self._workers.collect(done),
            "loader": loader_state.collect(state, self._stateful, done)
            if goes_by_state and not self._remembers
            else None,
        }

    def _has_memory(self, state: Any) -> bool:
        """True if what is read next may depend on what was read before."""
        loader, workers = state[torchbearer.GENERATOR], self._workers
        if getattr(loader, "num_workers", 0):
            # The workers of a loader that was started over do not report.
            return workers is None or workers.remembers or self._again is not None
        names = dict(generators.find(state)).keys()
        is_new = any(n.startswith(_DATA) and n not in self._start["loaders"] for n in names)
        return is_new or memory.has_changed(self._memory, memory.of_data(state))

    def prepare(self, state: Any, saved: dict[str, Any], wanted: Any, done: int) -> None:
        """For ``on_start_epoch``: lets the loader start where it was after ``done`` steps.

        ``wanted`` are the generators at the save.
        """
        loader, workers = self._loader, saved.get("workers", [])
        # A file of an earlier version does not say what the data remembers.
        remembers = saved.get("remembers", True)
        if self._stateful is not None:
            self._prepare_stateful(state, saved, remembers, done)
        elif loader is not None and not remembers and len(workers) == loader.num_workers:
            self._watch(workers, done)
            self._skip = skipping.Skip(state, saved, wanted, done)

    def _prepare_stateful(
        self, state: Any, saved: dict[str, Any], remembers: bool, done: int
    ) -> None:
        loader, held, workers = self._stateful, saved.get("loader"), saved.get("workers", [])
        why = self._obstacle
        if why is None and remembers:
            why = "what its data set remembers, or a worker has drawn, was not saved"
        elif why is None and held is None:
            why = "its state was not saved"
        elif why is None and len(workers) != loader.num_workers:
            why = f"it had {len(workers)} workers then and has {loader.num_workers} now"
        if why is None and held is not None:
            own = " and that of its data set" if loader_state.saves_itself(loader.dataset) else ""
            announce(f"data: the StatefulDataLoader continues by its own state{own}")
            self._skip = place = loader_state.Place(state, loader, held, self._start)
            self._watch(workers, done, place.first)
        else:
            announce(f"data: the StatefulDataLoader loads {done} batches again, because {why}")

    def _watch(self, restored: list[Any], done: int = 0, first: int | None = None) -> None:
        if self._loader.num_workers:
            self.started()
            own = self._stateful is not None and loader_state.saves_itself(self._loader.dataset)
            self._workers = WorkerStates(self._loader, restored, done, first, own)
            self._workers.install(self._loader)

    def started(self) -> None:
        """For ``on_start_training``: the loader has been started."""
        if self._workers is not None:
            self._workers.uninstall(self._loader)

    def leave(self) -> None:
        """For the end of a run, which may have failed before its loader was started."""
        if self._loader is not None:
            skipping.remove_stand_in(self._loader)
            self.started()
        if self._loader is not None and self._loader is self._stateful:
            loader_state.forget(self._loader)

    def continue_at(self, state: Any, saved: dict[str, Any], done: int) -> None:
        """Brings the loader to its place after ``done`` steps, and the loop to the step after.

        For ``on_start_training``, the loader having been started with the generators at the start
        of this trace.
        """
        sampler, steps = state[torchbearer.SAMPLER], state[torchbearer.STEPS]
        self._again_at, self._again = saved["again_at"], saved["again"]
        self._remembers = saved.get("remembers", True)
        if self._skip is None or not self._skip.finish():
            self._workers = self._workers if self._skip is None else None  # of another iterator
            self._replay(state, sampler, done)
        state[torchbearer.METRICS] = saved["values"]
        state[torchbearer.SAMPLER] = _resumed(sampler, done, steps)
        if steps != -1:
            state[torchbearer.STEPS] = steps - done
        show_progress(state, done, on_epoch=False)

    def _replay(self, state: Any, sampler: Any, done: int) -> None:
        for state[torchbearer.BATCH] in range(done):
            if self._again is not None and state[torchbearer.BATCH] == self._again_at:
                generators.restore(state, self._again)
            sampler(state)


def _resumed(sampler: Any, done: int, steps: int) -> Callable[[Any], None]:
    """Makes torchbearer's loop, which counts from 0, count from the batch where it continues.

    torchbearer calls the sampler right after it has set the number of the batch, before any
    callback can see the smaller number.
    """

    def sample(state: Any) -> None:
        state[torchbearer.STEPS] = steps
        state[torchbearer.BATCH] += done
        sampler(state)

    return sample


def show_progress(state: Any, done: int, *, on_epoch: bool) -> None:
    """Moves torchbearer's progress bars, of epochs or of steps, to where the run continues."""
    callbacks = state[torchbearer.CALLBACK_LIST]
    # torchbearer's own printer is not in the list but in front of it.
    for printer in [getattr(callbacks, "callback", None), *callbacks]:
        if isinstance(printer, Tqdm) and printer._on_epoch == on_epoch and printer._loader:
            samples = getattr(printer, "samples", None)  # on several ranks the bar counts these
            printer._loader.initial = printer._loader.n = samples.after(done) if samples else done
            printer._loader.refresh()
