"""Draws docs/images/favicon.svg: two torches.

    python docs/favicon_picture.py

A test compares the picture with what this script draws.
"""

from __future__ import annotations

from svg_file import svg, write

#: Flame, handle, and the handle in a dark tab: a page has one icon, so its file has to know both.
COLOURS = {"favicon.svg": ("#e8590c", "#64748b", "#a3b1c6")}
#: The flame ends above the handle, so that both are seen in the 16 pixels of a tab.
TORCH = (
    '<path class="flame" d="M11 2c4 4 4 7 2.5 10h-5C7 9 8 5 11 2z"/>'
    '<path class="handle" d="M8 14h6l-1.2 15h-3.6z"/>'
)


def draw(name: str) -> str:
    """The picture in this file."""
    flame, handle, light = COLOURS[name]
    style = f".flame{{fill:{flame}}}.handle{{fill:{handle}}}"
    style += f"@media(prefers-color-scheme:dark){{.handle{{fill:{light}}}}}"
    torches = [f'<g transform="translate({x})">{TORCH}</g>' for x in (0, 10)]
    return svg("torchbearer_ddp", (32, 32), style, torches)


if __name__ == "__main__":
    write(draw, COLOURS)
