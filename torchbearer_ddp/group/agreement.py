"""Agreement: values that must be equal on all ranks are compared by their digests.

A thousand ranks that agree read a thousand digests, not a thousand copies of the same text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from torchbearer_ddp import checked
from torchbearer_ddp.errors import DesyncError
from torchbearer_ddp.group import collectives, streaming, wire

_PAIR = checked.items(checked.anything, 2)


def digest(value: Any) -> str:
    """A digest of plain data; empty if it cannot be sent."""
    try:
        encoded = wire.take_apart(value)
    except TypeError:
        return ""
    return hashlib.sha256(encoded.packed().numpy().tobytes()).hexdigest()


def agree(
    values: dict[str, Any],
    what: str,
    remedy: str,
    extra: Any = None,
    head_bytes: int = streaming.HEAD_BYTES,
) -> list[Any]:
    """Raises the same DesyncError on every rank if any of these values differs between ranks.

    Returns the ``extra`` data of every rank, by rank, which may differ. The values themselves are
    sent only if their digests differ.
    """
    everyone = collectives.all_gather((digest(values), extra), what, head_bytes)
    for sender, each in enumerate(everyone):
        with wire.received(sender, what):
            checked.text()(_PAIR(each, "it")[0], "the first part")
    digests = {digest for digest, _ in everyone}
    if len(digests) > 1 or "" in digests:
        _raise_difference(collectives.all_gather(values, f"{what} (in full)"), what, remedy)
    return [theirs for _, theirs in everyone]


def _raise_difference(everyone: Sequence[Any], what: str, remedy: str) -> None:
    for sender, each in enumerate(everyone):
        with wire.received(sender, what):
            checked.table(checked.anything)(each, "it")
    for key in sorted({key for theirs in everyone for key in theirs}):
        found: dict[str, list[int]] = {}
        for each_rank, theirs in enumerate(everyone):
            found.setdefault(str(theirs.get(key)), []).append(each_rank)
        if len(found) > 1:
            listing = "; ".join(
                f"{_shortened(text)} on rank {', '.join(map(str, ranks))}"
                for text, ranks in found.items()
            )
            raise DesyncError(f"The ranks disagree on {key} ({what}): {listing}. {remedy}")


def _shortened(text: str) -> str:
    return text if len(text) <= 300 else text[:297] + "..."
