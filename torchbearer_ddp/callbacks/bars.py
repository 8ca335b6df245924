"""The progress bar where there is no terminal: lines in a log, or a bar that a notebook draws.

torchbearer redraws its bar after every step. In a file that is a line of carriage returns, as long
as the run; so there a line is written at the end of each pass, and once a minute in long ones.
"""

from __future__ import annotations

import itertools
import sys
import time
from typing import Any

from torchbearer import magics
from torchbearer.callbacks import printer
from tqdm import tqdm

from torchbearer_ddp.group import launcher

#: Between two lines of one pass.
LINE_SECONDS = 60.0
#: Between two messages to a notebook.
_DRAW_SECONDS = 0.1
_LINE = "{desc}: {percentage:.0f}% {n_fmt}/{total_fmt} [{elapsed}, {rate_fmt}{postfix}]"
_LINE_OF_UNKNOWN_LENGTH = "{desc}: {n_fmt} [{elapsed}, {rate_fmt}{postfix}]"
_numbers = itertools.count()


def progress_bar(*args: Any, **options: Any) -> Any:
    """A bar for torchbearer's Tqdm, made as tqdm's own is made."""
    if options.get("file") is not None:
        return tqdm(*args, **options)  # chosen by the user
    if launcher.draws_bars():
        return LauncherBar(*args, **options)
    has_terminal = getattr(sys.stderr, "isatty", bool)()
    return (tqdm if has_terminal else LineBar)(*args, **options)


class _Bar(tqdm):  # type: ignore[misc]
    """Counts like tqdm's bar, and shows itself in another way, at intervals and at its end."""

    disable: bool
    #: No thread that redraws a bar which stands still.
    monitor_interval = 0
    interval = LINE_SECONDS

    def __init__(self, *args: Any, **options: Any) -> None:
        self._shown_at, self._shown_n = time.monotonic(), options.get("initial", 0)
        #: A bar of epochs has no description: each of its steps is shown.
        self._shows_each = options.get("desc") is None
        #: torchbearer shows the metrics so far by a step that was not taken, and counts it.
        self._skips_first = self._shows_each and self._shown_n > 0
        super().__init__(*args, **{**options, "mininterval": float("inf")})

    def update(self, n: float = 1) -> Any:
        """Counts a step."""
        if self._skips_first:
            self._skips_first = False
            return None
        return super().update(n)

    def refresh(self, *args: Any, **options: Any) -> Any:
        """Called after every step, with its metrics."""
        is_new = self._shows_each and self.n > self._shown_n
        if is_new or time.monotonic() - self._shown_at > self.interval:
            self._show_now(is_last=False)
        return True

    def clear(self, *args: Any, **options: Any) -> None:
        """There is nothing on a screen."""

    def close(self) -> None:
        """Shows the end of a pass."""
        if self.disable:
            return
        self.disable = True
        self._decr_instances(self)
        if not self._shows_each or self.n > self._shown_n:
            self._show_now(is_last=True)

    def _show_now(self, *, is_last: bool) -> None:
        self._shown_at, self._shown_n = time.monotonic(), self.n
        self.show(is_last=is_last)

    def show(self, *, is_last: bool) -> None:
        """Shows the bar as it is now."""
        raise NotImplementedError


class LineBar(_Bar):
    """Writes lines."""

    def show(self, *, is_last: bool) -> None:
        """Writes one line with one call."""
        known = {**self.format_dict, "prefix": self.desc.rstrip(": ") if self.desc else "epochs"}
        form = _LINE if self.total else _LINE_OF_UNKNOWN_LENGTH
        text = self.format_meter(**{**known, "ncols": None, "bar_format": self.bar_format or form})
        self.fp.write(f"{text}\n")
        self.fp.flush()


class LauncherBar(_Bar):
    """Is drawn by the launcher, in its notebook."""

    interval = _DRAW_SECONDS

    def __init__(self, *args: Any, **options: Any) -> None:
        self._number = next(_numbers)
        super().__init__(*args, **options)
        self._show_now(is_last=False)

    def show(self, *, is_last: bool) -> None:
        """Sends what the bar shows."""
        state = {name: getattr(self, name) for name in ("n", "total", "unit", "initial")}
        state |= {"desc": (self.desc or "").rstrip(": "), "postfix": self.postfix or ""}
        launcher.tell("bar", number=self._number, state=state, is_last=is_last)


def _allow_text_in_notebooks() -> None:
    """Lets torchbearer's bar for notebooks be plain text where there are no widgets to draw it."""
    from tqdm.notebook import IProgress  # this imports the widgets, which takes long

    if IProgress is None:
        vars(sys.modules["tqdm"])["tqdm_notebook"] = tqdm


# torchbearer makes its bar before any callback is called.
vars(printer)["tqdm"] = progress_bar
if magics.is_notebook():
    _allow_text_in_notebooks()
