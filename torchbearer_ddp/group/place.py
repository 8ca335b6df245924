"""Where in the user's code this rank is, for messages."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

#: Code of these packages is not the user's.
_FOREIGN = ("torchbearer", "torchbearer_ddp", "torch", "contextlib")
#: torchbearer's decorators around the methods of a Trial.
_WRAPPER = "wrapper"


def users_place() -> str:
    """The function that the user's code has called, and from where; empty in another thread."""
    frame: FrameType | None = sys._getframe(1)
    called = ""
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _FOREIGN:
            return f"{called}() ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
        if frame.f_code.co_name != _WRAPPER:
            called = frame.f_code.co_name
        frame = frame.f_back
    return ""
