"""What grows with the number of ranks, as formulas, beside what was measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchbearer_ddp.gradients.header import Header
from torchbearer_ddp.group.collectives import SHORT_BYTES
from torchbearer_ddp.group.streaming import HEAD_BYTES

MANY = 1000
#: Of the header of gradients in single precision, for each rank.
ROW_BYTES = 4 * Header.size(1, 0)
#: The message with the metrics of a pass, without the values of its batches.
METRICS_BYTES = 700


@dataclass(frozen=True)
class Quantity:
    """Something that a rank has or sends.

    Args:
        title: What it is.
        formula: What is expected, for people.
        value: The same as a function of the number of ranks and of what was measured.
        measured: The key of what was measured.
        show: How a value is written.
    """

    title: str
    formula: str
    value: Callable[[int, dict[str, Any]], float] | None
    measured: str
    show: Callable[[float], str]


def _number(value: float) -> str:
    return f"{value:,.0f}"


def _size(value: float) -> str:
    for unit, bytes_each in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= bytes_each:
            return f"{value / bytes_each:.3g} {unit}"
    return f"{value:.0f} B"


def _bucket(n: int, found: dict[str, Any]) -> float:
    return 4 * found["parameters"] + ROW_BYTES * n + 4 * found["tensors"]


def _epoch(n: int, found: dict[str, Any]) -> float:
    return (n - 1) * (HEAD_BYTES + SHORT_BYTES + METRICS_BYTES + 4 * found["epoch steps"])


def _part(n: int, found: dict[str, Any]) -> float:
    return float(found["points"][0]["part"] * (n - 1) / n)


QUANTITIES = [
    Quantity(
        "open files, if all are connected, as up to 64 ranks are",
        "3 (N - 1) + 21",
        lambda n, _: 3 * (n - 1) + 21,
        "descriptors",
        _number,
    ),
    Quantity("open files, connected late", "", None, "descriptors, late", _number),
    Quantity(
        "the same on rank zero, which has collected a part from each",
        "N + 22",
        lambda n, _: n + 22,
        "descriptors of rank zero, late",
        _number,
    ),
    Quantity("sent to join, all connected", "", None, "joining", _size),
    Quantity("sent to join, connected late", "", None, "joining, late", _size),
    Quantity(
        "sent for a barrier or a flag",
        f"{SHORT_BYTES} (N - 1)",
        lambda n, _: SHORT_BYTES * (n - 1),
        "barrier",
        _size,
    ),
    Quantity(
        "sent for the gradients of a step, gloo",
        f"2 (N - 1) / N x (4 P + {ROW_BYTES} N + 4 T)",
        lambda n, found: 2 * (n - 1) / n * _bucket(n, found),
        "gradients",
        _size,
    ),
    Quantity(
        "shared memory for gradients, shm",
        f"4 P + {ROW_BYTES} N + 4 T",
        _bucket,
        "shared memory",
        _size,
    ),
    Quantity(
        "sent for the metrics of an epoch",
        f"(N - 1) (4 S + {HEAD_BYTES + SHORT_BYTES + METRICS_BYTES:,})",
        _epoch,
        "metrics",
        _size,
    ),
    Quantity(
        "sent to save what each rank has for itself",
        f"C (N - 1) / N + {SHORT_BYTES} (N - 1)",
        lambda n, found: _part(n, found) + SHORT_BYTES * (n - 1),
        "parts gathered",
        _size,
    ),
    Quantity(
        "sent to resume it",
        f"(C + {HEAD_BYTES:,}) (N - 1) / N",
        lambda n, found: _part(n, found) + HEAD_BYTES * (n - 1) / n,
        "parts scattered",
        _size,
    ),
    Quantity("private memory", "", None, "private memory", _size),
]


def text(found: dict[str, Any]) -> str:
    """The table and its legend, for the page on the design."""
    points = {each["ranks"]: each for each in found["points"]}
    header = ["On each rank", "Formula", *(f"{n} ranks" for n in points), f"{MANY:,} ranks"]
    rows = [_cells(each, points, found) for each in QUANTITIES]
    for way in points[min(points)]["times a step without exchange"]:
        ratios = [each["times a step without exchange"][way] for each in points.values()]
        title = f"a step with {way.partition(', ')[2]}, times one without exchange"
        rows.append([title, "", *(f"{ratio:.1f}" for ratio in ratios), ""])
    lines = [".. csv-table::", f"    :header: {_row(header)}", ""]
    legend = (
        f"N ranks on one host train an {found['model']}: P = {found['parameters']:,} parameters in "
        f"T = {found['tensors']} tensors, S = {found['epoch steps']:,} steps an epoch with ``acc`` "
        f"and ``loss``, C = {_size(found['points'][0]['part'])} of random generators in a "
        "checkpoint. Measured values, and behind them what the formula says. Bytes were counted by "
        "the interface, so they include the headers of packets and of gloo, several hundred bytes "
        "for a short message; the formulas are of what is sent. All ranks share two cores, with "
        "other work beside them, so of times only ratios are shown. Small messages go through gloo "
        "here, as between hosts, and not through shared memory."
    )
    return "\n".join([legend, "", *lines, *(f"    {_row(row)}" for row in rows), "", *_limits()])


def _cells(each: Quantity, points: dict[int, dict[str, Any]], found: dict[str, Any]) -> list[str]:
    cells = []
    for n, point in points.items():
        shown = each.show(point[each.measured])
        cells.append(f"{shown} ({each.show(each.value(n, found))})" if each.value else shown)
    many = each.show(each.value(MANY, found)) if each.value else ""
    return [each.title, each.formula, *cells, many]


def _limits() -> list[str]:
    files, messages = 2 * MANY + 64, 2 * (MANY - 1)
    return [
        f"At {MANY:,} ranks the first limit is the number of open files of the one process that "
        f"holds the store: {files:,}, where many systems allow 1,024 without being asked. It "
        "raises its own limit, and where it may not, the run is refused with the number that it "
        "needs. The first limit of speed is the ring in which gloo sums: "
        f"{messages:,} messages one after the other for each bucket, however small it is. With "
        "``hierarchical`` the ring has one rank of each host: 2 (H - 1) messages for H hosts.",
        "",
    ]


def _row(cells: list[str]) -> str:
    return ", ".join(f'"{cell}"' for cell in cells)
