"""Saving: every rank collects its part, rank zero writes the file, as a rule in the background."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torchbearer

from torchbearer_ddp.checkpoints import contents, rank_state, trained_state
from torchbearer_ddp.checkpoints.contents import SECTION
from torchbearer_ddp.checkpoints.epoch_trace import EpochTrace
from torchbearer_ddp.checkpoints.file import Label
from torchbearer_ddp.checkpoints.folder import Folder
from torchbearer_ddp.checkpoints.form import FORMAT
from torchbearer_ddp.checkpoints.resume import data_plan
from torchbearer_ddp.checkpoints.runs import Runs, stopped_by
from torchbearer_ddp.checkpoints.snapshot import Snapshot
from torchbearer_ddp.checkpoints.writer import Writer, end_idle_threads
from torchbearer_ddp.group import collectives, launcher, replicas, stop_request
from torchbearer_ddp.group.join import versions


@dataclass
class Moment:
    """What is saved, and when.

    Attributes:
        state: The state of the run.
        global_step: The number of steps done.
        trace: In the middle of an epoch, how its loader came there.
        runs: The calls of ``run()`` so far.
        has_local_parts: True if SyncGradients leaves parts of the model to each rank; then the
            model and its optimizer are compared, and saved for each rank where they differ.
    """

    state: Any
    global_step: int
    trace: EpochTrace | None
    runs: Runs
    has_local_parts: bool

    def collect_own(self) -> torch.Tensor:
        """What this rank has for itself, packed."""
        place = None if self.trace is None else self.trace.collect(self.state)
        return rank_state.collect(self.state, self.runs.started, place)


class Saver:
    """Writes checkpoints of all ranks into a folder that only rank zero uses.

    Args:
        folder: The folder.
        background: Write while training goes on.
    """

    def __init__(self, folder: Folder, *, background: bool) -> None:
        self._folder = folder
        self._background = background
        self._writer = Writer()
        self._snapshot = Snapshot(borrow=not background)
        self._saveable = trained_state.Saveable()
        self._serial = 0

    @property
    def has_failed(self) -> bool:
        """True if a write has failed whose error was not raised yet."""
        return self._writer.has_failed

    def open(self) -> None:
        """Opens the folder; on rank zero."""
        end_idle_threads()  # of a run of this process that failed
        self._folder.open()
        self._serial = self._folder.next_serial()

    def save(self, moment: Moment, choose_names: Callable[[], list[str]]) -> bool:
        """Saves under the names that rank zero chooses; if none, raises a failed write's error.

        One exchange tells all ranks of an error on any of them and where they differ; the next
        brings each rank's part to rank zero.

        Returns:
            True on all ranks if there was something to save.
        """
        model = contents.unwrapped(moment.state[torchbearer.MODEL])
        payload: dict[str, Any] = {}
        names: list[str] = []
        others: trained_state.States = {}
        part = checksums = error = None
        try:
            others, digests = self._saveable.collect(moment.state, moment.has_local_parts)
            part = moment.collect_own()
            checksums = (replicas.fingerprint(model.named_buffers()), digests)
            # Last: a GPU copies while this process goes on, and the checksums would wait for it.
            if collectives.is_rank_zero():
                names = choose_names()
                payload = self._collect(moment, others, names)
        except Exception as caught:
            error = caught
        signalled = stop_request.received() is not None
        report = (collectives.describe_error(error), names, checksums, signalled)
        reports = collectives.all_gather(report, "saving a checkpoint")
        errors, wanted, everyone, signals = zip(*reports, strict=True)
        if error is not None:
            raise error
        collectives.raise_first(errors)
        if not wanted[0]:
            return False
        buffers, things = zip(*everyone, strict=True)
        own = {
            "packed": part,
            "buffers": rank_state.differing_buffers(model, buffers),
            "others": trained_state.differing(others, digests, things),
        }
        parts = collectives.gather_to(own, "each rank's part of a checkpoint")
        if parts:
            averaged = rank_state.averaged_statistics(model, [each["buffers"] for each in parts])
            payload[contents.MODEL].update(averaged)
            payload[SECTION][rank_state.PARTS] = parts
            payload[SECTION]["stopped"] = stopped_by(
                moment.state, mid_epoch=moment.trace is not None, by_signal=any(signals)
            )
            self._start_writing(payload, names)
        if not self._background:
            self.finish()
        return True

    def finish(self) -> None:
        """Waits until rank zero has written; if it could not, all ranks raise."""
        self._writer.wait()
        collectives.raise_together(self._writer.take_error(), "writing a checkpoint")

    def close(self) -> None:
        """Lets another run use the folder, and ends the thread of this one."""
        self._writer.close()
        self._folder.close()

    def _collect(
        self, moment: Moment, others: trained_state.States, names: list[str]
    ) -> dict[str, Any]:
        """On rank zero: the part of the file that is the same for all ranks."""
        if names:
            self._writer.wait()  # the next copies overwrite those that it writes
        if (failure := self._writer.take_error()) is not None:
            raise failure
        if not names:
            return {}
        payload = contents.collect(moment.state, others, self._snapshot)
        payload[SECTION] |= {
            "format": FORMAT,
            "epochs": len(moment.state[torchbearer.HISTORY]),
            "batch": 0 if moment.trace is None else moment.state[torchbearer.BATCH] + 1,
            "global_step": moment.global_step,
            "runs": [list(each) for each in moment.runs.log],
            **data_plan(moment.state),
            "versions": {"python": sys.version.split()[0], **versions()},
        }
        return payload

    def _start_writing(self, payload: dict[str, Any], names: list[str]) -> None:
        section = payload[SECTION]
        label = Label(self._serial, section["epochs"], section["global_step"])
        self._serial += 1

        def write() -> None:
            self._snapshot.wait()
            self._folder.put(payload, names, label)
            launcher.note_saved(str(self._folder.path / names[0]))
            self._folder.remove_old(section["runs"][:-1])  # only now: the new one is durable

        self._writer.start(write)
