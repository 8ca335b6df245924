"""Plots of results as SVG, for the documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

OURS, THEIRS = "#2f6f9f", "#c8793a"


def draw(found: dict[str, Any], folder: Path) -> None:
    """Draws what there is."""
    import matplotlib

    matplotlib.use("svg")
    # The same figures give the same file.
    matplotlib.rcParams.update({"svg.hashsalt": "torchbearer_ddp", "font.size": 9})
    if "one host" in found:
        _speedups(found["one host"], folder / "speedup.svg")
    if "scaling" in found:
        _scaling(found["scaling"], folder / "scaling.svg")


def _speedups(tables: list[dict[str, Any]], path: Path) -> None:
    import matplotlib.pyplot as plt

    loops = [t for t in tables if t["in a"] == "loop"]
    figure, axes = plt.subplots(figsize=(7, 0.34 * len(loops) + 1))
    labels = [f"{t['model']}, {t['ranks']} ranks" for t in loops]
    axes.barh(labels, [t["ratios"]["ours, shm"] for t in loops], color=OURS)
    axes.axvline(1, color=THEIRS, linewidth=1.5)
    axes.text(1, -0.9, " DDP, its best setting", color=THEIRS, va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("steps in the time of one step with DDP")
    _finish(figure, axes, path)


def _scaling(tables: list[dict[str, Any]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.4))
    for ranks, style in zip(sorted({t["ranks"] for t in tables}), ("-", ":", "--"), strict=False):
        rows = [t for t in tables if t["ranks"] == ranks]
        sizes = [t["parameters"] for t in rows]
        for way, colour in (("ours, auto", OURS), ("DDP", THEIRS)):
            times = [next(r["milliseconds"] for r in t["results"] if r["way"] == way) for t in rows]
            name = "ours" if way != "DDP" else "DDP"
            axes.plot(sizes, times, style, color=colour, marker="o", label=f"{name}, {ranks} ranks")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("parameters")
    axes.set_ylabel("ms a step")
    axes.legend(frameon=False, fontsize=8)
    _finish(figure, axes, path)


def _finish(figure: Any, axes: Any, path: Path) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
