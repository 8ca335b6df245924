"""Draws docs/images/layers.svg: the folders of the package, one layer above the other.

    python docs/layers_picture.py

The files in each folder are read from the source; a test compares the picture with it.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "torchbearer_ddp"
PICTURE = Path(__file__).parent / "images" / "layers.svg"

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
COLUMN, ROW, GAP, LINE = 490, 124, 8, 17
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1e293b}"
    ".name{font:600 15px ui-monospace,Menlo,Consolas,monospace}"
    ".files{font:12px ui-monospace,Menlo,Consolas,monospace;fill:#475569}"
    "rect{fill:#e8eef5;stroke:#94a3b8}"
)


def files(folder: str) -> str:
    """The modules of a folder, by name."""
    names = (path.stem for path in (PACKAGE / folder).glob("*.py"))
    return ", ".join(sorted(name for name in names if not name.startswith("__")))


def box(folder: str) -> str:
    """One folder."""
    text, column, row, columns, rows = LAYERS[folder]
    x, y = GAP + column * COLUMN, GAP + row * ROW
    width, height = columns * COLUMN - GAP, rows * ROW - GAP
    title = "errors, log, version" if folder == "." else f"{folder}/"
    lines = [f'<text x="{x + 14}" y="{y + 24}" class="name">{title}</text>']
    lines.append(f'<text x="{x + 14}" y="{y + 43}">{text}</text>')
    wrapped = textwrap.wrap(files(folder), (width - 28) // 8) if folder != "." else []
    for number, line in enumerate(wrapped):
        at = y + 62 + number * LINE
        lines.append(f'<text x="{x + 14}" y="{at}" class="files">{line}</text>')
    shape = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'
    return "<g>" + shape + "".join(lines) + "</g>"


def draw() -> str:
    """The picture."""
    width = 2 * COLUMN + GAP
    height = max(row + rows for _, _, row, _, rows in LAYERS.values()) * ROW + GAP
    boxes = "\n  ".join(map(box, LAYERS))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img">\n  <title>The layers of torchbearer_ddp</title>\n'
        f"  <style>{_STYLE}</style>\n  {boxes}\n</svg>\n"
    )


if __name__ == "__main__":
    PICTURE.write_text(draw())
