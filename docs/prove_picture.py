"""Draws docs/images/prove.svg and prove-dark.svg, from what ``prove`` writes for the page's script.

    python docs/prove_picture.py

It saves the program of the page as ``train.py``, proves it on four ranks, and takes the plot of the
gradients from the page that ``--html`` writes.
"""

import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "images"
COMMAND = "--nproc-per-node 4 --steps 20 --sample-streams --html proof.html train.py"
#: Text, lines, the equal area, rounding, differences, beyond.
COLOURS = {
    "prove.svg": ("#697084", "#dde1ea", "#dff0e6", "#16794c", "#2456c8", "#b3261e"),
    "prove-dark.svg": ("#9aa3b5", "#323a4a", "#17382a", "#5fc192", "#84a9ff", "#ff8a80"),
}


def program():
    """The python block of the page."""
    page = (ROOT / "docs" / "prove.rst").read_text()
    return textwrap.dedent(re.search(r"code-block:: python\n\n((?: {4}.*\n|\n)+)", page)[1])


def run():
    """The plot of the gradients, as it is in the page that ``prove`` writes."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(program())
        words = [sys.executable, "-m", "torchbearer_ddp", "prove", *COMMAND.split()]
        subprocess.run(words, cwd=folder, check=True)
        page = (Path(folder) / "proof.html").read_text()
    return re.search(r'<svg viewBox="[^"]*" role="img" aria-label="gradient.*?</svg>', page)[0]


def draw(plot, colours):
    """The plot as a file of its own, without a background."""
    text, line, equal, rounding, found, beyond = colours
    style = (
        f"text{{fill:{text};font:12px system-ui,sans-serif}}.grid{{stroke:{line}}}"
        f".band{{fill:{equal}}}.bound{{fill:none;stroke:{rounding};stroke-dasharray:5 4}}"
        f".rounding{{fill:none;stroke:{rounding};stroke-width:1.5}}"
        f".found{{fill:none;stroke:{found};stroke-width:1.5}}"
        f"circle.equal{{fill:{found}}}circle.beyond{{fill:{beyond}}}"
    )
    body = re.sub(r"<style>.*?</style>", "", plot)
    opening, _, rest = body.partition(">")
    opening = opening.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"')
    return f"{opening}><style>{style}</style>{rest}\n"


if __name__ == "__main__":
    plot = run()
    for name, colours in COLOURS.items():
        (FOLDER / name).write_text(draw(plot, colours))
