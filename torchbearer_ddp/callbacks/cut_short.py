"""Whether a run has ended early, for the code after it."""

from __future__ import annotations

import signal
from typing import Any

import torchbearer

from torchbearer_ddp.group import stop_request

#: The key of ``trial.state`` that says after ``run()`` why it has ended before its last step: the
#: name of a signal (``'SIGINT'`` after Ctrl-C), ``'callback'`` if a callback asked for it, such as
#: EarlyStopping, or None if the run is complete.
CUT_SHORT = torchbearer.state_key("cut_short")


class RunEnd:
    """Notes how a run ends, in the state of its Trial; evaluations in or after it change nothing.

    The state that a run gives to its hooks is not that of the Trial, and evaluations have their
    own.
    """

    def __init__(self) -> None:
        self._is_run = False
        self._state: Any = None

    def begin(self, trial: torchbearer.Trial, method: str) -> None:
        """Called when run, evaluate or predict is called, and not by a callback of a run."""
        self._is_run, self._state = method == "run", None
        if self._is_run:
            trial.state[CUT_SHORT] = None

    def note(self, hook: str, state: Any) -> None:
        """Called with ``on_start`` and ``on_end``."""
        if not self._is_run:
            return
        if hook == "on_start" and self._state is None:
            self._state = state
        elif hook == "on_end" and state is self._state and state[torchbearer.STOP_TRAINING]:
            signum = stop_request.received()
            why = signal.Signals(signum).name if signum else "callback"
            state[CUT_SHORT] = state[torchbearer.SELF].state[CUT_SHORT] = why
