"""How commands print: sizes, speeds and times in words, columns, headings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_INDENT = "  "


def size(count: float) -> str:
    """A number of bytes."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(count) < 1000:
            digits = 0 if unit == "bytes" or count >= 100 else 1
            return f"{count:.{digits}f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def speed(bytes_per_second: float) -> str:
    """A number of bytes per second."""
    return f"{size(bytes_per_second)}/s"


def duration(seconds: float) -> str:
    """A time, from microseconds to seconds."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def listing(items: Sequence[Any]) -> str:
    """Items with commas and an *and*: 0, 1 and 3."""
    words = [str(item) for item in items]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def ranks(numbers: Sequence[int]) -> str:
    """Some ranks: rank 1, ranks 1 and 2."""
    return f"rank{'s' * (len(numbers) > 1)} {listing(numbers)}"


def section(title: str, rows: Mapping[str, Any]) -> list[str]:
    """A heading with aligned names and values below it; nothing without rows."""
    if not rows:
        return []
    width = max(map(len, rows))
    return ["", title, *(f"{_INDENT}{name:{width}}  {value}" for name, value in rows.items())]


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], left: int = 1) -> list[str]:
    """Aligned columns, the first ones to the left and the others to the right."""
    cells = [list(map(str, row)) for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        _INDENT
        + "  ".join(
            f"{cell:{'<' if number < left else '>'}{width}}"
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
