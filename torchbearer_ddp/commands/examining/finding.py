"""One finding of the doctor, and how it names ranks and hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchbearer_ddp.commands import words
from torchbearer_ddp.commands.examining.examination import Report


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        problem: True if training would fail or be wrong, or a link is far slower than the others;
            False if it is only slower than it could be, or may mislead.
        found: What was found, with numbers.
        remedy: What to do about it.
    """

    problem: bool
    found: str
    remedy: str


def who(report: Report, rank: int, *, alone: bool = False) -> str:
    """A rank with its host, or the host alone."""
    found = report.ranks[rank]
    names = {each["host"] for each in report.ranks.values()}
    # Hosts with the same name are told apart by their addresses.
    is_unique = len(names) == len(set(report.hosts.values()))
    named = found["host"] if is_unique else f"{found['host']} ({found['place']['address']})"
    return named if alone else f"rank {rank} on {named}"


def by_value(found: Mapping[int, Any]) -> dict[Any, list[int]]:
    """The ranks that have each value."""
    values: dict[Any, list[int]] = {}
    for rank, value in found.items():
        values.setdefault(value, []).append(rank)
    return values


def differing(found: Mapping[Any, list[int]]) -> str:
    """Each value with the ranks that have it."""
    return "; ".join(f"{value} on {words.ranks(ranks)}" for value, ranks in found.items())
