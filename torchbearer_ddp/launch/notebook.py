"""Progress bars in a notebook: rank zero is another process, so the notebook draws its bars."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from torchbearer import magics
from tqdm import tqdm as text_bar


def is_notebook() -> bool:
    """True in a notebook; by torchbearer's own rule also IPython in a terminal is one."""
    return bool(magics.is_notebook()) and not getattr(sys.stdout, "isatty", bool)()


def bar_class() -> Any:
    """The bar of a notebook: a widget, or plain text in the cell where there are no widgets."""
    from tqdm.notebook import IProgress, tqdm  # this imports the widgets, which takes long

    # Not by trying: a widget that could not be made counts as a bar, and fails at its end.
    return text_bar if IProgress is None else tqdm


class NotebookBars:
    """Draws the bars of rank zero with tqdm's widget for notebooks."""

    def __init__(self) -> None:
        self._bars: dict[int, Any] = {}

    def draw(self, number: int, state: dict[str, Any], is_last: bool) -> None:
        """Draws a bar, which is a new one if its number is; ``state`` are tqdm's own names."""
        bar = self._bars.get(number)
        if bar is None:
            names = ("desc", "total", "unit", "initial")
            options = {name: state[name] for name in names}
            self._bars[number] = bar = bar_class()(**options)
        bar.n = state["n"]
        bar.set_postfix_str(state["postfix"], refresh=True)
        if is_last:
            self._bars.pop(number).close()

    def close(self) -> None:
        """Closes bars whose rank has ended without closing them."""
        for bar in self._bars.values():
            with contextlib.suppress(Exception):
                bar.close()
        self._bars.clear()
