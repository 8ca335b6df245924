"""The links between ranks, measured over TCP: whether they connect, how fast, and how far apart.

Each rank listens, answers the others' measurements, and measures when it is asked to. Nothing is
read from a connection but a token, commands of one byte and bytes that are thrown away, and no call
here takes longer than its bound.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterable
from typing import Any

from torchbearer_ddp.group.bounded import in_background

Link = dict[str, Any]
Pair = tuple[int, int]

_CONNECT_SECONDS = 3.0
#: How long another address of a rank may take, once its own has failed.
_OTHER_SECONDS = 1.0
_MOST_OTHERS = 8
#: How long all pings of a link may take, and a transfer in one direction.
_PING_SECONDS = 4.0
_TRANSFER_SECONDS = 8.0
#: The longest that :func:`measure` takes, with room for a busy host.
LONGEST_SECONDS = _CONNECT_SECONDS + _PING_SECONDS + 2 * _TRANSFER_SECONDS + 5.0
_PINGS = 20
_FIRST_BYTES = 64 * 2**10
_MOST_BYTES = 64 * 2**20
#: A transfer that took this long is a good measure.
_ENOUGH_SECONDS = 0.1
#: A link that is so many times slower than the median is measured twice.
_MUCH = 2.0
_PIECE = bytes(2**20)
_TOKEN_BYTES = 16
#: A command: its letter and a number of bytes.
_COMMAND = struct.Struct(">cQ")
_PING, _TAKE, _GIVE = b"P", b"T", b"G"
_CLOCK = struct.Struct(">d")
_DONE = b"."
#: Up to so many ranks every pair is measured; with more, every pair of hosts.
MOST_RANKS = 16


class Listener:
    """Answers measurements of other ranks until this process ends.

    Args:
        address: Where to listen; empty for every interface, to find out which ones are reached.
    """

    def __init__(self, address: str = "") -> None:
        if address or not socket.has_dualstack_ipv6():
            self._socket = socket.create_server((address, 0), backlog=128)
        else:
            self._socket = socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True
            )
        self.port: int = self._socket.getsockname()[1]
        #: Only those who have read it in the store are answered.
        self.token = secrets.token_hex(_TOKEN_BYTES // 2)
        in_background(self._accept)

    def _accept(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            in_background(lambda connection=connection: self._serve(connection))  # type: ignore[misc]

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, EOFError):
            _prepare(connection)
            token = _receive(connection, _TOKEN_BYTES, _soon())
            if not secrets.compare_digest(token, self.token.encode()):
                return
            while True:
                head = _receive(connection, _COMMAND.size, _soon())
                command, count = _COMMAND.unpack(head)
                if command == _PING:
                    connection.sendall(_CLOCK.pack(time.time()))
                elif command == _TAKE and count <= _MOST_BYTES:
                    _discard(connection, count, _soon())
                    connection.sendall(_DONE)
                elif command == _GIVE and count <= _MOST_BYTES:
                    _send(connection, count, _soon())
                else:
                    return


def measure(place: dict[str, Any], *, full: bool) -> Link:
    """The link from this rank to the one that listens at a place; ``full`` with its bandwidth.

    A place has an address, a port, a token, and other addresses by the names of their interfaces.
    """
    link: Link = {}
    try:
        connection = _connect(place["address"], place, _CONNECT_SECONDS)
    except OSError as error:
        link["error"] = _reason(error, _CONNECT_SECONDS)
        return link | {"reached instead": _reachable(place)}
    with connection:
        try:
            _ping(connection, link)
            if full:
                _bandwidth(connection, link)
        except (OSError, EOFError) as error:
            pinged = "round trip" in link
            seconds = _TRANSFER_SECONDS if pinged else _PING_SECONDS
            what = "data" if pinged else "single bytes"
            link["error"] = f"connected, but {what} {_stalled(error, seconds)}"
    return link


def _connect(address: str, place: dict[str, Any], seconds: float) -> socket.socket:
    if not address:
        raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    connection = socket.create_connection((address, place["port"]), seconds)
    _prepare(connection)
    connection.sendall(place["token"].encode())
    return connection


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(_CONNECT_SECONDS)  # for what is short, such as a token
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _reachable(place: dict[str, Any]) -> dict[str, str]:
    """The other addresses of a rank that do connect, by interface."""
    found = {}
    for name, address in list(place["others"].items())[:_MOST_OTHERS]:
        if address != place["address"]:
            with contextlib.suppress(OSError), _connect(address, place, _OTHER_SECONDS):
                found[name] = address
    return found


def _reason(error: OSError, seconds: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {seconds:g} s"
    return (error.strerror or str(error)).lower()


def _stalled(error: Exception, seconds: float) -> str:
    if isinstance(error, TimeoutError):
        return f"did not pass within {seconds:g} s"
    return f"did not pass ({getattr(error, 'strerror', None) or 'it was closed'})"


def _ping(connection: socket.socket, link: Link) -> None:
    """The median round trip, and how far the other clock is ahead, by the quickest answer."""
    answers: list[tuple[float, float]] = []
    deadline, took = time.monotonic() + _PING_SECONDS, 0.0
    while len(answers) < _PINGS and time.monotonic() + took < deadline:
        sent, started = time.time(), time.perf_counter()
        connection.sendall(_COMMAND.pack(_PING, 0))
        theirs = _CLOCK.unpack(_receive(connection, _CLOCK.size, deadline))[0]
        took = time.perf_counter() - started
        answers.append((took, theirs - (sent + took / 2)))
    link["round trip"] = statistics.median(took for took, _ in answers)
    link["clock"] = min(answers)[1]


def _bandwidth(connection: socket.socket, link: Link) -> None:
    """Bytes per second in each direction."""

    def send(count: int) -> None:
        deadline = _soon()
        connection.sendall(_COMMAND.pack(_TAKE, count))
        _send(connection, count, deadline)
        _receive(connection, len(_DONE), deadline)

    def fetch(count: int) -> None:
        connection.sendall(_COMMAND.pack(_GIVE, count))
        _discard(connection, count, _soon())

    link["send"] = _throughput(send, link["round trip"])
    link["receive"] = _throughput(fetch, link["round trip"])


def _throughput(transfer: Callable[[int], None], round_trip: float) -> float:
    """Transfers more and more, until it takes long enough to be a measure."""
    count = _FIRST_BYTES
    while True:
        started = time.perf_counter()
        transfer(count)
        took = max(1e-6, time.perf_counter() - started - round_trip)
        if took >= _ENOUGH_SECONDS or count >= _MOST_BYTES:
            return count / took
        count = min(4 * count, _MOST_BYTES)


def _soon() -> float:
    return time.monotonic() + _TRANSFER_SECONDS


def _send(connection: socket.socket, count: int, deadline: float) -> None:
    while count > 0:
        _limit(connection, deadline)
        count -= connection.send(_PIECE[:count] if count < len(_PIECE) else _PIECE)


def _discard(connection: socket.socket, count: int, deadline: float) -> None:
    place = bytearray(min(count, len(_PIECE)))
    while count > 0:
        _limit(connection, deadline)
        received = connection.recv_into(place, min(count, len(place)))
        if not received:
            raise EOFError
        count -= received


def _receive(connection: socket.socket, count: int, deadline: float) -> bytes:
    content = b""
    while len(content) < count:
        _limit(connection, deadline)
        piece = connection.recv(count - len(content))
        if not piece:
            raise EOFError
        content += piece
    return content


def _limit(connection: socket.socket, deadline: float) -> None:
    """The next call ends at the deadline; a timeout of a socket alone counts from each call."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    connection.settimeout(left)


# Which pairs, and in which order.


def pairs(hosts: dict[int, str]) -> list[Pair]:
    """The pairs to measure, of ranks on these hosts.

    Of many ranks the first of each host stands for it, and inside a host for the others' partner.
    """
    ranks = sorted(hosts)
    first: dict[str, int] = {}
    for rank in ranks:
        first.setdefault(hosts[rank], rank)
    return [
        (one, other)
        for one in ranks
        for other in ranks
        if one < other
        and (
            len(ranks) <= MOST_RANKS
            or (
                first[hosts[one]] == one and (hosts[other] == hosts[one] or other in first.values())
            )
        )
    ]


def rounds(chosen: Iterable[Pair], hosts: dict[int, str]) -> list[list[Pair]]:
    """The pairs in rounds in which no host takes part twice: its link would be shared."""
    planned: list[tuple[set[str], list[Pair]]] = []
    for one, other in chosen:
        both = {hosts[one], hosts[other]}
        for busy, together in planned:
            if not busy & both:
                busy |= both
                together.append((one, other))
                break
        else:
            planned.append((both, [(one, other)]))
    return [together for _, together in planned]


def slow_pairs(found: dict[Pair, Link]) -> list[Pair]:
    """The pairs whose link is much slower than the median, in one direction or in both."""
    rates = {
        pair: (link["send"], link["receive"]) for pair, link in found.items() if "send" in link
    }
    if not rates:
        return []
    usual = statistics.median(rate for both in rates.values() for rate in both)
    return [pair for pair, both in rates.items() if min(both) * _MUCH < usual]


def faster(link: Link, again: Link) -> Link:
    """The better of two measurements, in each direction; a link that failed has failed."""
    if "send" not in again:
        return again
    best = {name: max(link[name], again[name]) for name in ("send", "receive")}
    return {**again, **best, "round trip": min(link["round trip"], again["round trip"])}
