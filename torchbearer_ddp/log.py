"""The package's logger, a standard one: ``logging.getLogger("torchbearer_ddp")``.

Lines of level INFO and above go to stderr, unless the program has set up logging itself: then they
go where its records go. Every record has the rank of the process as ``record.rank``.
"""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("torchbearer_ddp")


class _Context:
    """The rank of this process, as far as it is known."""

    rank = 0


def set_rank(rank: int) -> None:
    """Sets the rank that records carry; only rank zero's announcements are shown."""
    _Context.rank = rank


def announce(line: str) -> None:
    """Logs on rank zero what was detected, chosen or repaired; one sentence, no full stop."""
    if _Context.rank == 0:
        logger.info(line)


class _DefaultHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to stderr, for programs that have not set up logging themselves."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the line in one piece: ranks may share a terminal."""
        if not logging.root.handlers:
            self.stream = sys.stderr  # it may have been replaced since
            super().emit(record)


def _add_rank(record: logging.LogRecord) -> bool:
    record.rank = _Context.rank
    return True


if not logger.handlers:
    _handler = _DefaultHandler(sys.stderr)
    _handler.setFormatter(logging.Formatter("torchbearer_ddp: %(message)s"))
    logger.addHandler(_handler)
    logger.addFilter(_add_rank)
    logger.setLevel(logging.INFO)
