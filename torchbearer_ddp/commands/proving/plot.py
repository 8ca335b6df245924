"""A plot of the differences against the rounding bound over the steps, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from torchbearer_ddp.commands.proving.comparison import LIMIT, Comparison, Difference

WIDTH, HEIGHT = 760, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 14, 36


@dataclass(frozen=True)
class _Axes:
    """Where steps and sizes are in a picture."""

    steps: int
    low: int
    high: int

    def x(self, step: float) -> float:
        """The place of a step."""
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (step + 0.5) / max(self.steps, 1)

    def y(self, value: float) -> float:
        """The place of a relative difference, on a logarithmic scale; zero is at the bottom."""
        power = math.log10(value) if value > 0 else self.low
        part = (min(max(power, self.low), self.high) - self.low) / (self.high - self.low)
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * part


def panel(comparison: Comparison, stage: str) -> str:
    """The largest difference of each step of one stage, with what rounding does beside it."""
    worst = [comparison.worst(step, stage) for step in range(comparison.steps)]
    found = [each for each in worst if each is not None]
    if not found:
        return ""
    axes = _axes(comparison.steps, found)
    body = "".join([*_band(axes, found), *_grid(axes), *_points(axes, found)])
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{stage}: differences of '
        f'{comparison.steps} steps">{body}</svg>'
    )


def _axes(steps: int, found: Sequence[Difference]) -> _Axes:
    values = [v for d in found for v in (d.relative, d.relative_rounding) if 0 < v < math.inf]
    values += [LIMIT * each.relative_rounding for each in found]
    powers = [math.log10(value) for value in values if 0 < value < math.inf] or [-8.0, -6.0]
    return _Axes(
        steps, math.floor(min(powers)), max(math.ceil(max(powers)), math.floor(min(powers)) + 1)
    )


def _grid(axes: _Axes) -> Iterator[str]:
    every = max(1, (axes.high - axes.low) // 6)
    for power in range(axes.low, axes.high + 1, every):
        y = axes.y(10.0**power)
        yield f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield (
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">10'
            f'<tspan dy="-5" font-size="9">{power}</tspan></text>'
        )
    for step in range(0, axes.steps, max(1, axes.steps // 10)):
        yield f'<text x="{axes.x(step):.1f}" y="{HEIGHT - 16}" text-anchor="middle">{step}</text>'
    yield f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 3}" text-anchor="end">step</text>'


def _band(axes: _Axes, found: Sequence[Difference]) -> Iterator[str]:
    """What is equal, and within it what rounding has done."""
    base = axes.y(0)
    edge = [(axes.x(each.step), axes.y(LIMIT * each.relative_rounding)) for each in found]
    # To the edges of the picture, also where there is one step.
    edge = [(_LEFT, edge[0][1]), *edge, (WIDTH - _RIGHT, edge[-1][1])]
    outline = [(_LEFT, base), *edge, (WIDTH - _RIGHT, base)]
    yield f'<polygon class="band" points="{_path(outline)}"/>'
    yield f'<polyline class="bound" points="{_path(edge)}"/>'
    rounding = [(axes.x(each.step), axes.y(each.relative_rounding)) for each in found]
    yield f'<polyline class="rounding" points="{_path(rounding)}"/>'


def _points(axes: _Axes, found: Sequence[Difference]) -> Iterator[str]:
    places = [(axes.x(each.step), axes.y(each.relative)) for each in found]
    yield f'<polyline class="found" points="{_path(places)}"/>'
    for (x, y), each in zip(places, found, strict=True):
        kind = "equal" if each.is_equal else "beyond"
        size = f"{each.relative:.1e}, {each.ratio:.3g} times rounding"
        title = f"step {each.step}: {escape(each.name)}, {size}"
        place = f'class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3.6"'
        yield f"<circle {place}><title>{title}</title></circle>"


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
