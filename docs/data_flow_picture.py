"""Draws docs/images/data_flow.svg and data_flow-dark.svg: one run, from its start to its results.

    python docs/data_flow_picture.py

A test compares the pictures with what is described here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from svg_file import CODE, WORDS, svg, write

#: Rows from top to bottom: rank 0, what is exchanged, the other ranks; or one box for all of them.
#: A slash ends a line of a box; [bucket] stands for the drawing of one.
RUN = """
all: run_distributed(train)/
    arguments and flags, else torchrun, else a Slurm step, else this process alone
name: rank 0 | ranks 1, 2, ... N-1
hook: on_init/a Trial is built
    > SyncModel/rank 0's parameters and buffers
    > on_init/the same Trial is built
hook: on_start/loaders become shares of/the data, random streams part
    <> ShardData, SyncModel/seeds of the loaders agreed;/plan and replicas compared
    <> on_start/loaders become shares of/the data, random streams part
loop: every epoch
loop: every step
own: a batch of its own/forward, loss, backward
hook: on_backward/its gradients become/the average
    <> SyncGradients/one bucket after the other,/summed in shared memory,/through gloo or NCCL/
    [bucket]/header: step, batch size, stop,/signal, time, loss, and which/parameters were used
    <> on_backward/its gradients become/the average
own: clipping, optimizer step/stop, if any rank asked for it
end: every step
hook: end of a pass/metrics of all of the data
    <> SyncMetrics/sums, counts, predictions
    <> end of a pass/metrics of all of the data
hook: on_checkpoint/writes the file, gives it/its name when it is whole
    < Checkpoint/every rank's random state/and metrics
    < on_checkpoint/sends its part to rank 0
end: every epoch
all: the results of all ranks, in rank order/
    or the first cause: which rank failed, on which host, with its own traceback
"""
#: The middle and the width of each column, and of all of them.
LEFT, MIDDLE, RIGHT, ALL = (154, 236), (440, 252), (726, 236), (440, 856)
#: Of a line of text and of a bucket; between rows.
LINE, BUCKET, GAP = 19, 46, 24
#: From the frame of a loop to what is inside: above, where its name needs room, and elsewhere.
ABOVE, AROUND = 30, 12
#: Inside, edge and letters of each kind of box; parts, which are in an exchange, come after it.
COLOURS = {
    "data_flow.svg": {
        "name": ("#334155", "#334155", "#f8fafc"),
        "hook": ("#dfeafb", "#8fb0de", "#1e293b"),
        "own": ("#fef3c7", "#d6a83c", "#45330a"),
        "exchange": ("#0f766e", "#0f766e", "#f0fdfa"),
        "part": ("#ccfbf1", "#ccfbf1", "#134e4a"),
    },
    "data_flow-dark.svg": {
        "name": ("#475569", "#475569", "#f8fafc"),
        "hook": ("#1c2f4d", "#4a72ab", "#e2e8f0"),
        "own": ("#3f300c", "#c79a33", "#fde9b0"),
        "exchange": ("#115e59", "#115e59", "#f0fdfa"),
        "part": ("#a7e3da", "#a7e3da", "#0b3b37"),
    },
}
#: Fonts, and lines in a grey that is seen on light and on dark pages.
STYLE = (
    f"text{{text-anchor:middle}}.words{{font:14px {WORDS}}}.title{{font:600 15px {WORDS}}}"
    f".code{{font:600 14px {CODE}}}.line{{fill:none;stroke:#8090a6;stroke-width:2}}"
    ".loop{stroke-width:1.5;stroke-dasharray:6 5}.tip{fill:#8090a6}"
)
TIP = (
    '<marker id="tip" viewBox="0 0 10 10" refX="10" refY="5" markerWidth="6" markerHeight="6" '
    'orient="auto-start-reverse"><path class="tip" d="M0 0L10 5L0 10z"/></marker>'
)
TIPS = {"<": ' marker-start="url(#tip)"', ">": ' marker-end="url(#tip)"'}


def tall(text: str) -> int:
    """The height of a box with this text."""
    return 18 + sum(BUCKET if line == "[bucket]" else LINE for line in text.split("/"))


def box(kind: str, column: tuple[int, int], text: str, middle: int, height: int) -> str:
    """A box, with its text in the middle."""
    x, width = column
    top, y = middle - height // 2, middle - tall(text) // 2 + 9
    drawn = f'<rect x="{x - width // 2}" y="{top}" width="{width}" height="{height}" rx="6"/>'
    names = "title code" if "_" in text or kind == "exchange" else "title"
    for line in text.split("/"):
        if line == "[bucket]":
            drawn += box("part", (x - 42, 136), "gradients", y + BUCKET // 2, 30)
            drawn += box("part", (x + 70, 80), "header", y + BUCKET // 2, 30)
            y += BUCKET
        else:
            drawn += f'<text x="{x}" y="{y + 15}" class="{names}">{line}</text>'
            y += LINE
        names = "words"
    return f'<g class="{kind}">{drawn}</g>'


def arrow(x: int, y: int, to: str, way: str = ">") -> str:
    """A line to the right or down, with a tip at its end, its start, or both."""
    return f'<path class="line" d="M{x} {y}{to}"{"".join(TIPS[each] for each in way)}/>'


def row(kind: str, cells: list[str], middle: int, height: int) -> Iterator[str]:
    """The boxes beside each other, and the arrows between them."""
    if kind == "all":
        yield box("name", ALL, cells[0], middle, height)
        return
    yield box(kind, LEFT, cells[0], middle, height)
    yield box(kind, RIGHT, cells[-1], middle, height)
    if len(cells) == 5:
        # It may be taller than its row, where the rows above and below have none.
        yield box("exchange", MIDDLE, cells[2], middle, max(height, tall(cells[2])))
        for (x, width), (to, wide) in ((LEFT, MIDDLE), (MIDDLE, RIGHT)):
            yield arrow(x + width // 2, middle, f"H{to - wide // 2}", cells[1])


def draw(name: str) -> str:
    """The picture in this file."""
    parts, y, bottom = [TIP], 8, 0
    loops: list[int] = []
    # What is indented continues the row above.
    for line in RUN.strip().replace("/\n    ", "/").replace("\n    ", " ").splitlines():
        kind, text = line.split(": ", 1)
        if kind == "loop":
            loops.append(y)
            y += ABOVE
        elif kind == "end":
            top = loops.pop()
            x = AROUND * (len(loops) + 1)
            size = f'width="{2 * (MIDDLE[0] - x)}" height="{bottom + AROUND - top}"'
            parts.append(f'<rect class="line loop" x="{x}" y="{top}" {size} rx="10"/>')
            parts.append(box("name", (MIDDLE[0], 128), text, top, 24))
            y += AROUND
        else:
            cells = re.split(r" (<>|<|>|\|) ", text)
            height = max(tall(cells[0]), tall(cells[-1]))
            parts += [arrow(x, bottom, f"V{y}") for x, _ in (LEFT, RIGHT) if bottom]
            parts += row(kind, cells, y + height // 2, height)
            bottom = y + height
            y = bottom + GAP
    boxes = "".join(
        f".{kind} rect{{fill:{inside};stroke:{edge}}}.{kind} text{{fill:{letters}}}"
        for kind, (inside, edge, letters) in COLOURS[name].items()
    )
    return svg("The way of the data through a run", (880, bottom + 8), STYLE + boxes, parts)


if __name__ == "__main__":
    write(draw, COLOURS)
