"""One line on rank zero: what was detected, chosen or repaired, and why."""

from __future__ import annotations

import sys

from torchbearer_ddp import collectives


def announce(line: str) -> None:
    """Prints a line to stderr, on rank zero only.

    Args:
        line: One sentence, without a full stop.
    """
    if collectives.is_rank_zero():
        print(f"torchbearer_ddp: {line}", file=sys.stderr, flush=True)
