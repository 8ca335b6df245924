"""Draws the pictures and writes the tables of the Benchmarks page, from the stored results.

The table of the page on the design, of many ranks, is among them.

    python docs/benchmark_pictures.py

``make bench`` measures and stores; this is for a change of the pictures alone. A test compares.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import formulas, page, plots  # noqa: E402

FOLDER = ROOT / "docs" / "benchmarks"


def files():
    """The text of each file beside the results."""
    found = json.loads((FOLDER / "results.json").read_text())
    return {
        "figures.rst": page.text(found),
        "many_ranks.rst": formulas.text(found["many ranks"]),
        **plots.pictures(found),
    }


if __name__ == "__main__":
    for name, text in files().items():
        (FOLDER / name).write_text(text)
