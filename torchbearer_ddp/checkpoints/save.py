"""Saving: every rank collects its part, rank zero writes the file, as a rule in the background."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torchbearer

from torchbearer_ddp.checkpoints import contents, rank_state
from torchbearer_ddp.checkpoints.contents import SECTION
from torchbearer_ddp.checkpoints.file import Label
from torchbearer_ddp.checkpoints.folder import FORMAT, Folder
from torchbearer_ddp.checkpoints.resume import EpochTrace, data_plan
from torchbearer_ddp.checkpoints.runs import stopped_by
from torchbearer_ddp.checkpoints.snapshot import Snapshot
from torchbearer_ddp.checkpoints.writer import Writer, finish_writing
from torchbearer_ddp.group import collectives, replicas, stop_request
from torchbearer_ddp.group.join import versions


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
        self._serial = 0

    @property
    def has_failed(self) -> bool:
        """True if a write has failed whose error was not raised yet."""
        return self._writer.has_failed

    def open(self) -> None:
        """Opens the folder; on rank zero."""
        finish_writing()  # of a run of this process that failed
        self._folder.open()
        self._serial = self._folder.next_serial()

    def save(
        self,
        state: Any,
        choose_names: Callable[[], list[str]],
        global_step: int,
        trace: EpochTrace | None,
        runs: list[list[int]],
    ) -> bool:
        """Saves under the names that rank zero chooses; if none, raises a failed write's error.

        With a trace it saves the middle of an epoch; ``runs`` is the log of the script's runs. One
        exchange tells all ranks of an error on
        any of them and where their buffers differ; the next brings each rank's part to rank zero.

        Returns:
            True on all ranks if there was something to save.
        """
        model = contents.unwrapped(state[torchbearer.MODEL])
        payload: dict[str, Any] = {}
        names: list[str] = []
        part = checksums = error = None
        try:
            if collectives.is_rank_zero():
                names = choose_names()
                payload = self._collect(state, names, global_step, trace)
            part = rank_state.collect(state, None if trace is None else trace.collect(state))
            checksums = replicas.fingerprint(model.named_buffers())
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
        own = {"packed": part, "buffers": rank_state.differing_buffers(model, everyone)}
        parts = collectives.gather_to(own, "each rank's part of a checkpoint")
        if parts:
            averaged = rank_state.averaged_statistics(model, [each["buffers"] for each in parts])
            payload[contents.MODEL].update(averaged)
            payload[SECTION]["ranks"] = parts
            payload[SECTION]["stopped"] = stopped_by(state, by_signal=any(signals))
            payload[SECTION]["runs"] = logged = [list(each) for each in runs]
            label = Label(self._serial, payload[SECTION]["epochs"], global_step)
            self._serial += 1
            self._writer.start(lambda: self._write(payload, names, label, logged[:-1]))
        if not self._background:
            self.finish()
        return True

    def finish(self) -> None:
        """Waits until rank zero has written; if it could not, all ranks raise."""
        self._writer.wait()
        collectives.raise_together(self._writer.take_error(), "writing a checkpoint")

    def close(self) -> None:
        """Lets another run use the folder."""
        self._folder.close()

    def _collect(
        self, state: Any, names: list[str], global_step: int, trace: EpochTrace | None
    ) -> dict[str, Any]:
        """On rank zero: the part of the file that is the same for all ranks."""
        if names:
            self._writer.wait()  # the next copies overwrite those that it writes
        if (failure := self._writer.take_error()) is not None:
            raise failure
        if not names:
            return {}
        payload = contents.collect(state, self._snapshot)
        epochs = len(state[torchbearer.HISTORY])
        batch = 0 if trace is None else state[torchbearer.BATCH] + 1
        payload[SECTION] |= {
            "format": FORMAT,
            "epochs": epochs,
            "batch": batch,
            "global_step": global_step,
            **data_plan(state),
            "versions": {"python": sys.version.split()[0], **versions()},
        }
        return payload

    def _write(
        self, payload: dict[str, Any], names: list[str], label: Label, ended: list[list[int]]
    ) -> None:
        self._folder.put(payload, names, label)
        self._folder.remove_old(ended)  # only now: the new one is durable
