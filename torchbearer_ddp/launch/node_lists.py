"""Slurm's short forms of lists of hosts and of numbers, read strictly and without expanding them.

A short list can stand for any number of hosts (``n[1-20000000]``), and only one of them is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torchbearer_ddp.checked import Unexpected, shown

_NAME = r"[A-Za-z0-9_.:%-]+"
_RANGE = r"[0-9]{1,18}(?:-[0-9]{1,18})?"
_RANGES = rf"\[{_RANGE}(?:,{_RANGE})*\]"
_HOST = re.compile(rf"(?=[^,])(?:{_NAME})?(?:{_RANGES}(?:{_NAME})?)*")
_PART = re.compile(rf"({_NAME})|({_RANGES})")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def expand_hosts(listing: str, where: str = "the node list") -> Iterator[str]:
    """The hosts in Slurm's short form of a node list, one by one.

    Example: ::

        >>> from torchbearer_ddp.launch.node_lists import expand_hosts
        >>> list(expand_hosts('login,gpu[07-08,12]'))
        ['login', 'gpu07', 'gpu08', 'gpu12']

    Raises:
        Unexpected: At once, if any part of the list has another form.
    """
    wrong = Unexpected(f"{where} is {shown(listing)}, not a node list such as gpu[07-08,12]")
    hosts, end = [], -1
    for match in _HOST.finditer(listing):
        if match.start() != end + 1 or (end >= 0 and listing[end] != ","):
            raise wrong
        parts = [name or _ranges(ranges) for name, ranges in _PART.findall(match[0])]
        if any(low > high for each in parts if isinstance(each, list) for low, high, _ in each):
            raise wrong
        hosts.append(parts)
        end = match.end()
    if not hosts or end != len(listing):
        raise wrong
    return (name for parts in hosts for name in _names(parts))


def _ranges(listing: str) -> list[tuple[int, int, int]]:
    """The first and the last number of each range, and the digits that they are written with."""
    found = []
    for part in listing[1:-1].split(","):
        first, _, last = part.partition("-")
        found.append((int(first), int(last or first), len(first)))
    return found


def _names(parts: list[str | list[tuple[int, int, int]]]) -> Iterator[str]:
    if not parts:
        yield ""
        return
    *others, last = parts
    for name in _names(others):
        if isinstance(last, str):
            yield name + last
            continue
        for low, high, digits in last:
            for number in range(low, high + 1):
                yield name + str(number).zfill(digits)


class Counts:
    """The numbers in Slurm's short form of tasks per node: ``2(x3),1`` is 2, 2, 2, 1.

    Raises:
        Unexpected: If the text has another form.
    """

    def __init__(self, listing: str, where: str) -> None:
        found = [_COUNT.fullmatch(part) for part in listing.split(",")]
        if not all(found):
            raise Unexpected(f"{where} is {shown(listing)}, not a list of counts such as 2(x3),1")
        self._runs = [(int(match[1]), int(match[2] or 1)) for match in found if match]

    @property
    def nodes(self) -> int:
        """How many numbers there are."""
        return sum(times for _, times in self._runs)

    @property
    def tasks(self) -> int:
        """Their sum."""
        return sum(count * times for count, times in self._runs)

    def repeated(self, nodes: int) -> Counts:
        """The first number, so many times."""
        first = Counts("0", "")
        first._runs = [(self._runs[0][0], nodes)]
        return first

    def at(self, node: int) -> int:
        """The number at one place; the first where there is no such place."""
        for count, times in self._runs:
            if node < times:
                return count
            node -= times
        return self._runs[0][0]
