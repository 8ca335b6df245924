"""What the package logs in a block, also on ranks, where pytest's ``caplog`` is not at hand."""

from __future__ import annotations

import logging
from types import TracebackType

from torchbearer_ddp.log import logger


class LogLines(logging.Handler):
    """A block whose lines are kept: ``with LogLines() as lines``.

    Args:
        level: The lowest level that is kept.
    """

    def __init__(self, level: int = logging.INFO) -> None:
        super().__init__(level)
        self._found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._found.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logger.addHandler(self)
        return self._found

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        logger.removeHandler(self)
