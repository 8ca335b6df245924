"""Draws the picture of a terminal on the first page, from what a real run prints.

    python docs/terminal_picture.py

It saves the program of the first page as ``script.py``, starts it on two local processes, and draws
what comes out.
"""

import re
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "terminal.svg"
COMMAND = "python script.py --nproc-per-node 2"
WIDTH, LINE = 96, 20


def program():
    """The first python block of the first page."""
    page = (ROOT / "docs" / "index.rst").read_text()
    block = re.search(r"code-block:: python\n(?: +:.*\n)*\n((?: {4}.*\n|\n)+)", page)[1]
    return re.sub(r"^ {4}", "", block, flags=re.MULTILINE)


def run():
    """What the command prints."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "script.py").write_text(program())
        words = COMMAND.split()[1:]
        done = subprocess.run(
            [sys.executable, *words], cwd=folder, check=True, text=True, capture_output=True
        )
    return done.stderr + done.stdout


def draw(printed):
    """A terminal with a command and its output, readable on light and dark pages."""
    lines = [f"$ {COMMAND}"]
    for line in printed.splitlines():
        lines += [line[at : at + WIDTH] for at in range(0, len(line), WIDTH)]
    height = LINE * len(lines) + 2 * LINE
    rows = "".join(
        f'<text x="16" y="{LINE * (number + 2)}" fill="{_colour(line)}">{escape(line)}</text>\n'
        for number, line in enumerate(lines)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * 8 + 32} {height}" '
        'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="13" '
        'xml:space="preserve">\n'
        f'<rect width="100%" height="100%" rx="8" fill="#1e2430"/>\n{rows}</svg>\n'
    )


def _colour(line):
    if line.startswith("$"):
        return "#9fe08f"
    return "#8fc7ff" if line.startswith("torchbearer_ddp:") else "#e6e6e6"


if __name__ == "__main__":
    PICTURE.write_text(draw(run()))
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size} bytes")
