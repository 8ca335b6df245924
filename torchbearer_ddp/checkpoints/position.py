"""The place in an epoch: how its data came about, and how to come to the same batch again.

A loader cannot be told to start in the middle, so it is started over: with the generators as they
were when it was first started, the batches that were trained on already are drawn again and thrown
away. Worker processes, shuffled orders and data sets with a memory then stand where they stood.
"""

from __future__ import annotations

from typing import Any

import torchbearer
from torchbearer.callbacks import Tqdm

from torchbearer_ddp.checkpoints import metric_state, rank_state


class Trace:
    """The generators at the start of the epoch, and where torchbearer last started the loader over.

    It does so within an epoch that has more steps than the loader has batches; then a new order is
    drawn, in between the draws of training.

    Args:
        state: The state of the running Trial, before the loader is started.
    """

    def __init__(self, state: Any) -> None:
        self._start = rank_state.generators(state)
        self._again_at = 0
        self._again: dict[str, Any] | None = None

    def stepped(self, state: Any) -> None:
        """Looks, after a step, whether the loader is at its end and will be started over.

        Args:
            state: The state of the running Trial.
        """
        generator, done = state[torchbearer.GENERATOR], state[torchbearer.BATCH] + 1
        if generator is None or state[torchbearer.STEPS] == done:
            return
        if done % max(1, len(generator)) == 0:
            self._again_at, self._again = done, rank_state.generators(state)

    def collect(self, state: Any) -> dict[str, Any]:
        """Plain data for :meth:`replay`.

        Args:
            state: The state of the running Trial, after a step.
        """
        return {
            "start": self._start,
            "again_at": self._again_at,
            "again": self._again,
            "values": metric_state.pack_all(state[torchbearer.METRICS]),
        }

    def replay(self, state: Any, saved: dict[str, Any], done: int) -> None:
        """Brings the loader to where it stood after ``done`` steps, and the loop to the step after.

        To be called in ``on_start_training``, the loader having been started with the generators
        that this trace began with.

        Args:
            state: The state of the running Trial.
            saved: What :meth:`collect` gave on this rank.
            done: The number of steps done in this epoch.
        """
        sampler, steps = state[torchbearer.SAMPLER], state[torchbearer.STEPS]
        self._again_at, self._again = saved["again_at"], saved["again"]
        for state[torchbearer.BATCH] in range(done):
            if self._again is not None and state[torchbearer.BATCH] == self._again_at:
                rank_state.set_generators(state, self._again)
            sampler(state)
        state[torchbearer.METRICS] = metric_state.unpack_all(
            saved["values"], state[torchbearer.DEVICE]
        )
        state[torchbearer.SAMPLER] = _ResumedSampler(sampler, done, steps)
        if steps != -1:
            state[torchbearer.STEPS] = steps - done
        show_progress(state, done, on_epoch=False)


class _ResumedSampler:
    """torchbearer's loop counts from 0; this makes it count from the batch where it continues.

    The sampler is the first that torchbearer calls in a step, right after it has set the number of
    the batch, so that nobody sees the smaller number.

    Args:
        sampler: The sampler that loads the batch.
        done: The number of steps done before.
        steps: The number of steps of the whole epoch.
    """

    def __init__(self, sampler: Any, done: int, steps: int) -> None:
        self._sampler = sampler
        self._done = done
        self._steps = steps

    def __call__(self, state: Any) -> None:
        state[torchbearer.STEPS] = self._steps
        state[torchbearer.BATCH] += self._done
        self._sampler(state)


def show_progress(state: Any, done: int, *, on_epoch: bool) -> None:
    """Moves torchbearer's progress bars to where the run continues.

    Args:
        state: The state of the running Trial.
        done: The steps or epochs done.
        on_epoch: Whether bars of epochs or bars of steps are meant.
    """
    callbacks = state[torchbearer.CALLBACK_LIST]
    # torchbearer's own printer is not in the list but in front of it.
    for printer in [getattr(callbacks, "callback", None), *callbacks]:
        if isinstance(printer, Tqdm) and printer._on_epoch == on_epoch and printer._loader:
            printer._loader.initial = printer._loader.n = done
            printer._loader.refresh()
