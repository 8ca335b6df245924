"""Messages for the user, through the standard logger ``logging.getLogger("torchbearer_ddp")``.

Messages of level INFO and above go to stderr, unless the program has set up logging: if this logger
or the root logger has a handler, messages go only there. Records have the attribute ``rank``.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any

logger = logging.getLogger("torchbearer_ddp")


class _Context:
    """The rank of this process, as far as it is known."""

    rank = 0


def set_rank(rank: int) -> None:
    """Sets the rank of later records; only rank zero's announcements are shown."""
    _Context.rank = rank


def announce(line: str) -> None:
    """Logs on rank zero what was detected, chosen or repaired: one sentence without a full stop."""
    if _Context.rank == 0:
        logger.info(line)


class _DefaultHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to stderr if no other handler receives the record."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the line with one call: ranks may share a terminal."""
        has_other = len(logger.handlers) > 1 or (logger.propagate and logging.root.handlers)
        if not has_other:
            self.stream = sys.stderr  # the program may have replaced it
            with _above_progress_bars():
                super().emit(record)


def _above_progress_bars() -> contextlib.AbstractContextManager[None]:
    """Lets tqdm remove its bars from the terminal for a line, and draw them again below it."""
    tqdm: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if getattr(tqdm, "_instances", None) and getattr(sys.stderr, "isatty", bool)():
        found: contextlib.AbstractContextManager[None] = tqdm.external_write_mode(sys.stderr)
        return found
    return contextlib.nullcontext()


def _add_rank(record: logging.LogRecord) -> bool:
    record.rank = _Context.rank
    return True


_handler = _DefaultHandler(sys.stderr)
_handler.setFormatter(logging.Formatter("torchbearer_ddp: %(message)s"))
logger.addHandler(_handler)
logger.addFilter(_add_rank)
if logger.level == logging.NOTSET:  # the program may have chosen a level before the import
    logger.setLevel(logging.INFO)
