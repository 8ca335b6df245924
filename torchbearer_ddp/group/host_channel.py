"""Small messages between ranks that are all on one host, through memory that they share.

gloo takes them through sockets and two threads of its own: measured by turns, with two and with
four ranks, a message of 4 kB takes twenty times as long.
"""

from __future__ import annotations

import struct
import zlib
from functools import partial
from typing import Any

import torch

from torchbearer_ddp.errors import DesyncError
from torchbearer_ddp.group import board
from torchbearer_ddp.group.hosts import Process
from torchbearer_ddp.group.segment import LINE_BYTES, Segment
from torchbearer_ddp.group.semaphores import Signals
from torchbearer_ddp.group.waiting import Wait

#: The most bytes of a message; longer ones are left to gloo.
MOST_BYTES = 8192
#: The most ranks: each of them signals every other one.
MOST_RANKS = 64
#: In front of a message: the number of the exchange, its length, and what it is for.
_STAMP = struct.Struct("<QQI")
_ACTIVITY_AT, _ACTIVITY_BYTES = 32, 224
_HEADER_BYTES = _ACTIVITY_AT + _ACTIVITY_BYTES
_SLOT_BYTES = _HEADER_BYTES + MOST_BYTES


class HostChannel:
    """Exchanges in which every rank writes a message, signals, and reads those of all ranks.

    Each rank has two places for messages, in turn. A rank writes into a place again only after all
    ranks have begun the exchange in between, so after all have read what was there.

    Args:
        me: This rank.
        ranks: The processes of all ranks, in rank order, of which the first offers memory.

    Raises:
        OSError: If this rank cannot share memory with the first one.
    """

    def __init__(self, me: int, ranks: list[Process]) -> None:
        self._me = me
        signal_bytes = LINE_BYTES * len(ranks)
        segment = Segment(ranks[0], self._me, len(ranks), signal_bytes + 2 * _SLOT_BYTES)
        self._signals = Signals(segment, 0, ranks, self._me)
        self._places = [
            segment.tensors(signal_bytes + turn * _SLOT_BYTES, _SLOT_BYTES, torch.uint8)
            for turn in (0, 1)
        ]
        # Memory and not tensors: a fraction of the time for a few bytes.
        self._headers: list[list[Any]] = [
            [memoryview(place.numpy())[:_HEADER_BYTES] for place in places]  # type: ignore[arg-type]
            for places in self._places
        ]
        self._turn = 0

    def all_gather(self, mine: torch.Tensor, wait: Wait) -> list[torch.Tensor]:
        """The message of each rank, by rank: bytes, equally many on every rank."""
        return [place.clone() for place in self._exchange(mine, len(mine), wait)]

    def broadcast(self, flat: torch.Tensor, wait: Wait) -> None:
        """Overwrites a flat tensor with rank zero's."""
        content = flat.view(torch.uint8)
        places = self._exchange(None if self._me else content, len(content), wait)
        if self._me:
            content.copy_(places[0])

    def _exchange(self, mine: torch.Tensor | None, length: int, wait: Wait) -> list[torch.Tensor]:
        """Gives this rank's message, if it has one, to the others, and waits for theirs.

        Ctrl-C may end it anywhere, and the script may catch that and go on.
        """
        if self._signals.are_owed:  # by an exchange that was cut short
            self._signals.collect(wait)
        places, headers = self._places[self._turn], self._headers[self._turn]
        self._turn = 1 - self._turn
        header, activity = headers[self._me], wait.activity.encode(errors="surrogateescape")
        if mine is not None:
            places[self._me][_HEADER_BYTES : _HEADER_BYTES + length] = mine
        header[_ACTIVITY_AT:] = activity[:_ACTIVITY_BYTES].ljust(_ACTIVITY_BYTES, b"\0")
        # Without it what lies there is the message of an earlier exchange.
        stamp = wait.sequence, length, zlib.crc32(activity)
        self._signals.post(before=partial(_STAMP.pack_into, header, 0, *stamp))
        self._signals.collect(wait)
        expected = header[:_ACTIVITY_AT]
        if any(each[:_ACTIVITY_AT] != expected for each in headers):
            self._raise_out_of_step(headers)
        return [place[_HEADER_BYTES : _HEADER_BYTES + length] for place in places]

    def _raise_out_of_step(self, headers: list[Any]) -> None:
        """Raises the same on every rank: all have read the same headers."""
        activities = [
            bytes(each[_ACTIVITY_AT:]).rstrip(b"\0").decode(errors="replace") for each in headers
        ]
        if len(set(activities)) == 1:  # one of them has missed some exchanges
            numbers = [_STAMP.unpack_from(each)[0] for each in headers]
            activities = [f"{a} (exchange {n})" for a, n in zip(activities, numbers, strict=True)]
        found = {rank: {"activity": activity} for rank, activity in enumerate(activities)}
        raise DesyncError(board.out_of_step(found))
