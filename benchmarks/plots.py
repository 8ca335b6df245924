"""Pictures of results as SVG, each once for light pages and once for dark ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

#: The numbers of ranks that have a bar; the tables have more.
_DRAWN = (2, 4)
WIDTH = 760
#: Colours of both kinds of page: letters, fainter letters, lines, background, ours and DDP's.
THEMES = {
    "": ("#1e293b", "#64748b", "#e2e8f0", "#ffffff", "#2f6f9f", "#b4611f"),
    "-dark": ("#e2e8f0", "#94a3b8", "#303335", "#131416", "#5aa5d6", "#e0985c"),
}
_LEFT, _BAR, _GAP = 236, 13, 11

Rows = list[tuple[str, list[tuple[str, float]]]]
"""The label of each row, and its bars: the class of each and its length."""


def draw(found: dict[str, Any], folder: Path) -> None:
    """Draws what there is."""
    for name, picture in pictures(found).items():
        (folder / name).write_text(picture)


def pictures(found: dict[str, Any]) -> dict[str, str]:
    """The text of each file."""
    drawn = {}
    for suffix in THEMES:
        if "one host" in found:
            drawn[f"speedup{suffix}.svg"] = _speedups(found, suffix)
        if "scaling" in found:
            drawn[f"scaling{suffix}.svg"] = _scaling(found["scaling"], suffix)
        if "peers" in found:
            drawn[f"peers{suffix}.svg"] = _peers(found["peers"], suffix)
    return drawn


def _speedups(found: dict[str, Any], suffix: str) -> str:
    """Bars: how many of our steps fit into the time of one with DDP."""
    in_a_trial = [table for table in found["one host"] if table["in a"] == "Trial"]
    trials = [table for table in in_a_trial if table["ranks"] in _DRAWN]
    worlds = sorted({table["ranks"] for table in trials})
    rows: Rows = [
        (
            model,
            [
                ("ours" if table["ranks"] == worlds[0] else "more", table["ratios"]["ours, shm"])
                for table in trials
                if table["model"] == model
            ],
        )
        for model in dict.fromkeys(table["model"] for table in trials)
    ]
    groups = [("One host, in a Trial", rows)]
    if "two hosts" in found:
        model = found["two hosts"][0]["model"]
        groups.append((f"Two hosts, {model}", _host_rows(found["two hosts"])))
    longest = max(value for _, rows in groups for _, bars in rows for _, value in bars)
    scale = (WIDTH - _LEFT - 60) / math.ceil(longest)
    body, y = [], 62
    for title, rows in groups:
        body.append(_text(16, y, title, "head"))
        y += 14
        for label, bars in rows:
            body.append(_text(_LEFT - 10, y + _BAR * len(bars) / 2 + 4, label, "end"))
            for kind, value in bars:
                body.append(_box(_LEFT, y, value * scale, _BAR - 2, kind))
                body.append(_text(_LEFT + value * scale + 6, y + 10, f"{value:.2f}", "small"))
                y += _BAR
            y += _GAP
        y += 18
    line = _LEFT + scale
    head = [
        _text(16, 24, "Steps in the time of one step with DistributedDataParallel", "title"),
        *_legend([(kind, f"{n} ranks") for kind, n in zip(("ours", "more"), worlds, strict=False)]),
        f'<path class="ddp" d="M{line:.1f} 50V{y - 24:.1f}"/>',
        _text(line, y - 8, "DDP, its best setting", "ddp middle"),
    ]
    return _svg("Speed against DistributedDataParallel", y + 6, [*body, *head], suffix)


def _host_rows(tables: list[dict[str, Any]]) -> Rows:
    return [
        (f"{speed(table['link'])}, {ranks(table)} on each host", [("ours", ratio)])
        for table in tables
        if (ratio := table["ratios"].get("ours, hierarchical", table["ratios"]["ours, gloo"]))
    ]


def ranks(table: dict[str, Any]) -> str:
    """How many ranks each host has."""
    return "1 rank" if table["ranks a host"] == 1 else f"{table['ranks a host']} ranks"


def speed(link: str) -> str:
    """The speed of a link, as people write it."""
    return link.replace("mbit", " Mbit/s").replace("gbit", " Gbit/s")


def _legend(entries: list[tuple[str, str]]) -> Iterator[str]:
    for number, (kind, label) in enumerate(entries):
        x = WIDTH - 90 * (len(entries) - number)
        yield _box(x, 15, 11, 11, kind) + _text(x + 17, 25, label, "small")


def _scaling(tables: list[dict[str, Any]], suffix: str) -> str:
    """Curves: the time of a step against the number of parameters, one panel for each world."""
    times = {(table["ranks"], table["parameters"]): _times(table) for table in tables}
    sizes = sorted({size for _, size in times})
    worlds = sorted({ranks for ranks, _ in times})
    every = [value for found in times.values() for value in found.values()]
    low, high = min(every) / 1.5, max(every) * 1.5
    top, bottom, left = 66, 268, 62
    panel = (WIDTH - left - 16) / len(worlds)

    def x(start: float, size: int) -> float:
        return start + 28 + (panel - 56) * _share(size, sizes[0], sizes[-1])

    def y(milliseconds: float) -> float:
        return bottom - (bottom - top) * _share(milliseconds, low, high)

    body = [_text(16, 24, "Milliseconds a step, by the number of parameters", "title")]
    body += _legend([("ours", "ours"), ("theirs", "DDP")])
    for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1):
        body.append(f'<path class="grid" d="M{left} {y(10.0**power):.1f}H{WIDTH - 16}"/>')
        body.append(_text(left - 8, y(10.0**power) + 4, f"{10.0**power:g}", "end small"))
    for number, world in enumerate(worlds):
        start = left + number * panel
        body.append(_text(start + panel / 2, 54, f"{world} ranks", "head middle"))
        body += [_text(x(start, n), bottom + 20, _short(n), "middle small") for n in sizes]
        for way, kind in (("DDP", "ddp"), ("ours", "line")):
            points = [(x(start, n), y(times[world, n][way])) for n in sizes if (world, n) in times]
            corners = "L".join(f"{across:.1f} {down:.1f}" for across, down in points)
            body.append(f'<path class="{kind}" d="M{corners}"/>')
            body += [f'<circle class="{kind}" cx="{a:.1f}" cy="{b:.1f}" r="3"/>' for a, b in points]
    return _svg("Time of a step by the number of parameters", bottom + 34, body, suffix)


def _peers(tables: list[dict[str, Any]], suffix: str) -> str:
    """Bars: the seconds of whole commands; the fainter part is before the first step."""
    longest = max(each["wall"] for table in tables for each in table["results"].values())
    scale = (WIDTH - _LEFT - 60) / longest
    body = [_text(16, 24, "Seconds of a whole command; fainter: until the first step", "title")]
    y = 62
    for table in tables:
        body.append(_text(16, y, f"{table['processes']} processes", "head"))
        y += 14
        for way, each in table["results"].items():
            kind = "ours" if way == "ours" else "theirs"
            whole, first = each["wall"] * scale, each["first step"] * scale
            body.append(_text(_LEFT - 10, y + 11, way, "end"))
            body.append(_box(_LEFT, y, first, 14, f"{kind} faint"))
            body.append(_box(_LEFT + first, y, whole - first, 14, kind))
            body.append(_text(_LEFT + whole + 6, y + 11, f"{each['wall']:.1f}", "small"))
            y += 14 + _GAP
        y += 18
    return _svg("Whole commands by library", y - 12, body, suffix)


def _share(value: float, low: float, high: float) -> float:
    """How far a value is from the lowest to the highest, by powers."""
    return math.log(value / low) / math.log(high / low) if high > low else 0.5


def _times(table: dict[str, Any]) -> dict[str, float]:
    """The time of ours and of DDP's best setting."""
    ours = next(each for each in table["results"] if each["way"] == "ours, auto")["milliseconds"]
    return {"ours": ours, "DDP": ours * table["ratios"]["ours, auto"]}


def _short(size: int) -> str:
    return f"{size // 1_000_000}M" if size >= 1_000_000 else f"{size // 1000}k"


def _text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(words)}</text>'


def _box(x: float, y: float, width: float, height: float, kind: str) -> str:
    size = f'width="{width:.1f}" height="{height}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} rx="2" class="{kind}"/>'


def _svg(title: str, height: float, body: list[str], suffix: str) -> str:
    letters, faint, grid, background, ours, theirs = THEMES[suffix]
    style = (
        f"text{{font:13px system-ui,sans-serif;fill:{letters}}}"
        ".title{font-size:15px;font-weight:600}.head{font-weight:600}"
        f".small{{font-size:12px;fill:{faint}}}.end{{text-anchor:end}}"
        f".middle{{text-anchor:middle}}.ours{{fill:{ours}}}.more{{fill:{ours};opacity:.55}}"
        f".theirs{{fill:{theirs}}}.faint{{opacity:.55}}.grid{{stroke:{grid}}}"
        f"path.line{{stroke:{ours};fill:none;stroke-width:2}}circle.line{{fill:{ours}}}"
        f"path.ddp{{stroke:{theirs};fill:none;stroke-width:2}}text.ddp,circle.ddp{{fill:{theirs}}}"
    )
    parts = "\n  ".join(body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'width="{WIDTH}" height="{height:.0f}" role="img">\n  <title>{title}</title>\n'
        f'  <style>{style}</style>\n  <rect width="{WIDTH}" height="{height:.0f}" rx="8" '
        f'fill="{background}"/>\n  {parts}\n</svg>\n'
    )
