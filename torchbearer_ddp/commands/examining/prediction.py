"""How much faster a script is on more ranks: what was timed, what follows, and what to do."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torchbearer_ddp.commands import words
from torchbearer_ddp.commands.examining.timed_run import Timed

#: Twice the ranks are worth it if they are so many times as fast.
_WORTH = 1.2
#: From this share of a step on, the exchange is what limits.
_LARGE_SHARE = 0.25
#: From this share of a step on, a link decides how fast a training is.
_LINK_DECIDES = 0.5
#: So many times faster than the number of ranks cannot be.
_SUPERLINEAR = 1.1
_UNITS = {"bit": 1 / 8, "b": 1.0}
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
#: Half precision is recommended where it is so many times as fast.
_GAIN = 1.1


@dataclass(frozen=True)
class Speed:
    """The speed with some number of ranks.

    Attributes:
        ranks: How many.
        hosts: On how many hosts.
        seconds: The time of a step.
        exchange: How much of it the exchange takes.
        samples: The samples of all ranks in a second.
        measured: False if it is predicted.
    """

    ranks: int
    hosts: int
    seconds: float
    exchange: float
    samples: float
    measured: bool = True


def speed_of(ranks: int, timed: Timed, hosts: int = 1) -> Speed:
    """The speed that was measured."""
    rate = ranks * timed.samples / timed.seconds
    return Speed(ranks, hosts, timed.seconds, timed.moving, rate)


def over_link(
    speed: Speed, timed: Timed, hosts: int, link: float, own: float, *, compress: bool = False
) -> Speed:
    """What is to be expected of so many hosts, each as this one, over a link between them.

    Every host sends the gradient nearly twice, in parts (as in a ring), after backward. While the
    link carries one part, the hosts work on others, so the slower of the two decides.

    Args:
        speed: What was measured on this host.
        timed: The same run's times.
        hosts: How many hosts.
        link: The bytes per second of the link.
        own: The seconds of an exchange between two processes of this host through gloo, where no
            link limits: what two hosts do themselves.
        compress: True if gradients travel in half precision; also when ``own`` was measured.
    """
    part = 2 * (hosts - 1) / hosts
    sent = part * timed.gradient_bytes / (2 if compress else 1)
    crossing = max(sent / link, part * own)
    seconds = speed.seconds + crossing
    rate = hosts * speed.ranks * timed.samples / seconds
    return Speed(hosts * speed.ranks, hosts, seconds, speed.exchange + crossing, rate, False)


def link_of(text: str) -> float:
    """The bytes per second of a link, such as ``1gbit``, ``110MB/s`` or ``10 Gbit/s``.

    Raises:
        ValueError: If it is not understood.
    """
    found = re.fullmatch(r"([\d.]+) ?([kmg]?)(bit|b)(?:/s)?", text.strip().lower())
    if not found or not float(found[1]):
        raise ValueError(f"{text!r} is no speed: write 1gbit, 10gbit or 110MB/s")
    return float(found[1]) * _PREFIXES[found[2]] * _UNITS[found[3]]


def best(speeds: list[Speed]) -> Speed:
    """The number of ranks after which more are hardly faster."""
    chosen = speeds[0]
    for each in speeds[1:]:
        if each.samples > chosen.samples * _WORTH ** math.log2(each.ranks / chosen.ranks):
            chosen = each
    return chosen


def limited(speeds: list[Speed]) -> Speed:
    """The speed that is to be explained: the first beyond the best, or the best itself."""
    chosen = best(speeds)
    return next((each for each in speeds if each.ranks > chosen.ranks), chosen)


def plain(speeds: list[Speed], timed: Timed, compressed: Speed | None = None) -> dict[str, Any]:
    """All of it for JSON."""
    return {
        "speeds": [
            {**asdict(each), "speed-up": each.samples / speeds[0].samples} for each in speeds
        ],
        "gradient bytes": timed.gradient_bytes,
        "use": best(speeds).ranks,
        "advice": advice(speeds, compressed),
    }


def text(name: str, speeds: list[Speed], timed: Timed, compressed: Speed | None = None) -> str:
    """The table, and what follows from it."""
    rows = [
        [
            each.ranks,
            *([each.hosts] if speeds[-1].hosts > 1 else []),
            words.duration(each.seconds),
            words.duration(each.exchange) if each.ranks > 1 else "-",
            f"{each.samples:,.0f}",
            f"{each.samples / speeds[0].samples:.2f}",
            "measured" if each.measured else "predicted",
        ]
        for each in speeds
    ]
    hosts = ["hosts"] if speeds[-1].hosts > 1 else []
    header = ["ranks", *hosts, "step", "exchange", "samples/s", "speed-up", ""]
    first = (
        f"{name}: {timed.steps} steps each, {timed.samples:g} samples a step on each rank, "
        f"gradients of {words.size(timed.gradient_bytes)}"
    )
    return "\n".join([first, *words.table(header, rows), "", *advice(speeds, compressed)])


def advice(speeds: list[Speed], compressed: Speed | None = None) -> list[str]:
    """What to use, what limits beyond that, and what may help.

    ``compressed`` is what :func:`limited` would be with half the bytes, if that is known.
    """
    single, chosen, beyond = speeds[0], best(speeds), limited(speeds)
    gains = ", ".join(
        f"{each.ranks} ranks {each.samples / single.samples:.1f}" for each in speeds[1:]
    )
    lines = [f"Times as fast as one process: {gains}."]
    for each in speeds:
        if each.samples > _SUPERLINEAR * each.ranks * single.samples:
            return [
                *lines,
                f"No recommendation: {each.ranks} ranks cannot be "
                f"{each.samples / single.samples:.1f} times as fast. One process was disturbed, or "
                "does not use its threads well: compare with OMP_NUM_THREADS=1, on an idle host.",
            ]
    use = "one process" if chosen.ranks == 1 else f"{chosen.ranks} ranks"
    place = f" on {chosen.hosts} hosts" if chosen.hosts > 1 else ""
    share = beyond.exchange / beyond.seconds
    if beyond is chosen:
        lines.append(f"Use {use}{place}; more may be faster still.")
    elif share > _LARGE_SHARE:
        kind = "the link between the hosts" if beyond.hosts > 1 else "the exchange of gradients"
        lines.append(f"Use {use}{place}; {kind} limits beyond that ({share:.0%} of a step).")
    else:
        lines.append(f"Use {use}{place}; the cores of this host limit beyond that.")
    if beyond.ranks > 1 and share > _LARGE_SHARE:
        lines.append("Larger batches, or accumulate=... of SyncGradients, exchange less often.")
        lines += _fewer_bytes(single, beyond, compressed)
    return lines


def _fewer_bytes(single: Speed, beyond: Speed, compressed: Speed | None) -> Iterator[str]:
    """What helps where a link between hosts is the limit."""
    if beyond.hosts > 1 and compressed is None:
        yield "SyncGradients(compress='bf16') sends half the bytes between hosts."
    elif compressed is not None and compressed.samples > _GAIN * beyond.samples:
        yield (
            "SyncGradients(compress='bf16') sends half the bytes between hosts: "
            f"{beyond.ranks} ranks on {beyond.hosts} hosts would be "
            f"{compressed.samples / single.samples:.1f} times as fast."
        )
    if beyond.hosts > 1 and beyond.exchange > _LINK_DECIDES * beyond.seconds:
        yield (
            "SyncGradients(compress='int8') sends a quarter, compress='powersgd' a few percent, "
            "every=8 an eighth or more: the page on slow links says what each of them costs."
        )
