"""What is wrong with the ranks' attendance and with the links between them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from torchbearer_ddp.commands import words
from torchbearer_ddp.commands.examining.examination import Report
from torchbearer_ddp.commands.examining.finding import Finding, who

#: A link that is so many times slower than the others of its kind is named.
_TIMES_SLOWER = 3.0
#: Round trips and bandwidths that are slow, whatever the others are.
_SLOW_ROUND_TRIP = 0.005
_SLOW_BYTES = 50e6
_USELESS_BYTES = 12.5e6
_UNEQUAL_ROUND_TRIP = 0.0005


def find(report: Report) -> Iterator[Finding]:
    """All findings about links."""
    for check in (_attendance, _reach, _interfaces, _speed, _group):
        yield from check(report)


def _attendance(report: Report) -> Iterator[Finding]:
    if report.missing:
        came = len(report.ranks)
        yield Finding(
            True,
            f"Only {came} of {report.world_size} ranks came to {report.host} within "
            f"{report.timeout:g} s; {words.ranks(report.missing)} did not.",
            "Start them, and see their output: a rank that cannot reach the rendezvous says why. "
            "Allow more time with --timeout.",
        )
    for rank, asked in report.lost.items():
        yield Finding(
            True,
            f"{who(report, rank)} stopped answering ({_ASKED.get(asked, asked)}).",
            "See its output; it was killed, its host is frozen, or its link was cut meanwhile.",
        )
    if report.not_measured:
        yield Finding(
            False,
            f"{len(report.not_measured)} links were not measured: the others took too long.",
            "Mend the links that are named, and start the doctor again.",
        )


_ASKED = {
    "link": "while it measured a link",
    "reach": "while it connected to other ranks",
    "group": "while all ranks formed a group",
    "write": "while it wrote into the folder",
    "see": "while it looked into the folder",
}


def _reach(report: Report) -> Iterator[Finding]:
    """Links that do not work, in both directions or in one."""
    failed = {pair: link["error"] for pair, link in report.links.items() if "error" in link}
    for (one, other), error in failed.items():
        back = report.links.get((other, one), {})
        start, end = who(report, one), who(report, other)
        address = report.ranks[other]["place"]["address"] or "no address"
        if report.links[one, other].get("reached instead"):
            continue  # said of the interface
        if "round trip" in report.links[one, other]:
            yield Finding(
                True,
                f"{start} reaches {end} with single bytes, but not with more ({error}).",
                "As a rule the MTU of these hosts, or of a switch between them, differs: compare "
                "what ip link shows on both.",
            )
        elif "round trip" in back:
            yield Finding(
                True,
                f"The link is one-way: {start} cannot reach {end} at {address} ({error}), but is "
                "reached from there.",
                f"Open all ports on {end} for {start}: ranks connect to each other on any port.",
            )
        elif one < other:
            yield Finding(
                True,
                f"{start} and {end} cannot reach each other ({address}: {error}).",
                "Check the cable, the routes and the firewall between these two hosts; ranks "
                "connect to each other on any port.",
            )


def _interfaces(report: Report) -> Iterator[Finding]:
    """Ranks whose interface others cannot reach, although another one of theirs can be."""
    better: dict[int, dict[str, str]] = {}
    for (_, other), link in report.links.items():
        better.setdefault(other, {}).update(link.get("reached instead", {}))
    for rank, found in report.ranks.items():
        gloo = found["gloo"]
        chosen = f"{gloo['interface']} ({gloo.get('address') or 'which has no address'})"
        if better.get(rank):
            name, address = next(iter(better[rank].items()))
            yield Finding(
                True,
                f"{who(report, rank)} uses the interface {chosen}, by {gloo['why']}, where other "
                f"ranks cannot reach it; they do reach {address} on {name}.",
                f"Set GLOO_SOCKET_IFNAME={name} on that host (NCCL_SOCKET_IFNAME for GPUs)"
                + (", or unset it." if gloo["why"] == "GLOO_SOCKET_IFNAME" else "."),
            )
        elif gloo["interface"] and not gloo.get("address"):
            known = ", ".join(each["name"] for each in found["network"]["interfaces"])
            yield Finding(
                True,
                f"{who(report, rank)} has GLOO_SOCKET_IFNAME={gloo['interface']}, an interface "
                f"without an address; it has {known}.",
                "Unset the variable, or set it to the interface that leads to the other hosts.",
            )


def _speed(report: Report) -> Iterator[Finding]:
    """Links between hosts that are slower than the others, or slow in themselves."""
    found = {
        (one, other): link
        for (one, other), link in report.links.items()
        if "send" in link and report.hosts[one] != report.hosts[other]
    }
    if not found:
        return
    usual = statistics.median(link["send"] for link in found.values())
    slow = {
        pair: link["send"]
        for pair, link in found.items()
        if link["send"] < max(usual / _TIMES_SLOWER, _SLOW_BYTES)
    }
    for (one, other), rate in slow.items():
        if (other, one) not in slow or one < other:  # both directions are in one sentence
            yield _slow_link(report, (one, other), rate, slow.get((other, one)), usual)
    trip = statistics.median(link["round trip"] for link in found.values())
    for (one, other), link in found.items():
        limit = min(_SLOW_ROUND_TRIP, max(_TIMES_SLOWER * trip, _UNEQUAL_ROUND_TRIP))
        if one < other and link["round trip"] > limit:
            yield Finding(
                False,
                f"The round trip between {who(report, one)} and {who(report, other)} takes "
                f"{words.duration(link['round trip'])}; the median is {words.duration(trip)}.",
                "Every step waits for it. Use hosts that are close to each other, or exchange "
                "less often with SyncGradients(accumulate=...).",
            )


def _slow_link(
    report: Report, pair: tuple[int, int], rate: float, back: float | None, usual: float
) -> Finding:
    start, end = (who(report, rank) for rank in pair)
    unequal = min(rate, back or rate) < usual / _TIMES_SLOWER
    speeds = words.speed(rate) if back is None else f"{words.speed(rate)}, {words.speed(back)} back"
    compared = f"; the median of the links between hosts is {words.speed(usual)}" * unequal
    link_itself = "Look at the cable, the switch port and other traffic of these hosts. "
    fewer_bytes = (
        "Gradients cross it at every step: SyncGradients(compress='bf16') halves them, "
        "compress='int8' sends a quarter, and doctor --script tells whether the link limits your "
        "training."
    )
    is_problem = unequal or rate < _USELESS_BYTES
    return Finding(
        is_problem,
        f"The link from {start} to {end} is slow: {speeds}{compared}.",
        link_itself * is_problem + fewer_bytes,
    )


def _group(report: Report) -> Iterator[Finding]:
    if failed := report.group.get("failed"):
        yield Finding(
            True,
            f"Every link works, but the ranks could not form a group: {failed}",
            "See the interfaces above, and set GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME for GPUs) "
            "to the one that leads to the other hosts.",
        )
