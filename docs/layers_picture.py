"""Draws docs/images/layers.svg and layers-dark.svg: the folders of the package, by layer.

    python docs/layers_picture.py

The files in each folder are read from the source; a test compares the picture with it.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from svg_file import CODE, WORDS, svg, write

PACKAGE = Path(__file__).parent.parent / "torchbearer_ddp"

#: Each folder: what it does, left edge, top, width and height in units of a column and a row.
LAYERS = {
    "commands": ("what python -m torchbearer_ddp offers besides run", 0, 0, 2, 1),
    "commands/proving": ("prove: a script on N ranks against one process", 0, 1, 1, 1),
    "commands/examining": ("doctor: hosts, links, and the speed of a script", 1, 1, 1, 1),
    "callbacks": ("what users add to a Trial, one file per callback", 0, 2, 1, 1),
    "launch": ("run_distributed: flags, plan, supervisor, rank", 1, 2, 1, 2),
    "gradients": ("what is averaged, and when", 0, 3, 1, 1),
    "gradients/transports": ("how a bucket is summed over the ranks", 0, 4, 1, 1),
    "checkpoints": ("what is saved, where, and how a run resumes", 0, 5, 1, 1),
    "metrics": ("metrics and predictions of all ranks", 0, 6, 1, 1),
    "slurm": ("submission through submitit", 1, 4, 1, 3),
    "data": ("one rank's share of the data", 0, 7, 2, 1),
    "group": ("who the ranks are, how they meet, wait and talk", 0, 8, 2, 1),
    ".": ("known to all", 0, 9, 2, 1),
}
COLUMN, GAP, LINE = 490, 8, 17
#: Text, names of files, the inside of a box and its edge.
COLOURS = {
    "layers.svg": ("#1e293b", "#475569", "#e8eef5", "#94a3b8"),
    "layers-dark.svg": ("#e2e8f0", "#a3b1c6", "#1e2937", "#475569"),
}


def files(folder: str) -> str:
    """The modules of a folder, by name."""
    names = (path.stem for path in (PACKAGE / folder).glob("*.py"))
    return ", ".join(sorted(name for name in names if not name.startswith("__")))


def wrapped(folder: str) -> list[str]:
    """The lines with the names of the modules."""
    if folder == ".":
        return []
    return textwrap.wrap(files(folder), (LAYERS[folder][3] * COLUMN - GAP - 28) // 8)


#: The height of each row: that of its tallest box that has one row.
HEIGHTS = [
    max(
        60 + GAP + len(wrapped(folder)) * LINE
        for folder, (_, _, top, _, rows) in LAYERS.items()
        if (top, rows) == (row, 1)
    )
    for row in range(max(top + rows for _, _, top, _, rows in LAYERS.values()))
]


def box(folder: str) -> str:
    """One folder."""
    text, column, row, columns, rows = LAYERS[folder]
    x, y = GAP + column * COLUMN, GAP + sum(HEIGHTS[:row])
    width, height = columns * COLUMN - GAP, sum(HEIGHTS[row : row + rows]) - GAP
    title = "checked, errors, log, version" if folder == "." else f"{folder}/"
    lines = [f'<text x="{x + 14}" y="{y + 24}" class="name">{title}</text>']
    lines.append(f'<text x="{x + 14}" y="{y + 43}">{text}</text>')
    for number, line in enumerate(wrapped(folder)):
        at = y + 62 + number * LINE
        lines.append(f'<text x="{x + 14}" y="{at}" class="files">{line}</text>')
    shape = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'
    return "<g>" + shape + "".join(lines) + "</g>"


def draw(name: str) -> str:
    """The picture in this file."""
    text, small, inside, edge = COLOURS[name]
    style = (
        f"text{{font:14px {WORDS};fill:{text}}}"
        f".name{{font:600 15px {CODE}}}"
        f".files{{font:12px {CODE};fill:{small}}}"
        f"rect{{fill:{inside};stroke:{edge}}}"
    )
    size = (2 * COLUMN + GAP, GAP + sum(HEIGHTS))
    return svg("The layers of torchbearer_ddp", size, style, map(box, LAYERS))


if __name__ == "__main__":
    write(draw, COLOURS)
