"""What the scripts that draw boxes and lines share: fonts, the file and its folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

FOLDER = Path(__file__).parent / "images"
WORDS, CODE = "system-ui,sans-serif", "ui-monospace,Menlo,Consolas,monospace"


def svg(title: str, size: tuple[int, int], style: str, parts: Iterable[str]) -> str:
    """A picture without a background: it has that of the page."""
    width, height = size
    body = "\n  ".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img">\n  <title>{title}</title>\n'
        f"  <style>{style}</style>\n  {body}\n</svg>\n"
    )


def write(draw: Callable[[str], str], names: Iterable[str]) -> None:
    """Writes the pictures of these names where the pages look for them."""
    for name in names:
        (FOLDER / name).write_text(draw(name))
