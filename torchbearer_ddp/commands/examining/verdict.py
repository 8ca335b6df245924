"""The doctor's report in plain language: what was measured, what was found, what to do."""

from __future__ import annotations

import statistics
import textwrap
from typing import Any

from torchbearer_ddp.commands import words
from torchbearer_ddp.commands.examining import host_findings, link_findings
from torchbearer_ddp.commands.examining.examination import Report
from torchbearer_ddp.commands.examining.finding import Finding
from torchbearer_ddp.commands.examining.links import Link

#: A table of more ranks than this does not fit a terminal.
_WIDEST_TABLE = 8
_WIDTH = 96


def diagnose(report: Report) -> list[Finding]:
    """All findings, problems first."""
    found = [*link_findings.find(report), *host_findings.find(report)]
    return sorted(found, key=lambda finding: not finding.problem)


def text(report: Report, findings: list[Finding]) -> str:
    """The whole report."""
    hosts = len(set(report.hosts.values()))
    came, of = len(report.ranks), f" of {report.world_size}" if report.missing else ""
    lines = [f"{came}{of} rank{'s' * (report.world_size > 1)} on {hosts} host{'s' * (hosts > 1)}"]
    lines += [*_ranks(report), *_links(report), *_group(report), *_rest(report)]
    return "\n".join([*lines, "", *verdict(findings)])


def verdict(findings: list[Finding]) -> list[str]:
    """The findings, each with its remedy."""
    problems = sum(finding.problem for finding in findings)
    advice = len(findings) - problems
    if not findings:
        return ["verdict: nothing was found that would slow down or stop a run"]
    counts = [f"{problems} problem{'s' * (problems != 1)}"] if problems else []
    counts += [f"{advice} thing{'s' * (advice != 1)} to know"] if advice else []
    lines = [f"verdict: {' and '.join(counts)}"]
    for number, finding in enumerate(findings, 1):
        kind = "problem" if finding.problem else "to know"
        lines += _wrapped(f"{number}. {kind}: ", finding.found)
        lines += _wrapped("   what to do: ", finding.remedy)
    return lines


def _wrapped(start: str, words_of_it: str) -> list[str]:
    return textwrap.wrap(words_of_it, _WIDTH, initial_indent=start, subsequent_indent=" " * 6)


def _ranks(report: Report) -> list[str]:
    rows = []
    for rank, found in sorted(report.ranks.items()):
        gloo, processor = found["gloo"], found["processor"]
        rows.append(
            [
                *(rank, found["host"], found["place"]["address"] or "-", gloo["interface"] or "-"),
                *(processor["usable cores"], found["gpus"], f"{processor['load']:.1f}"),
            ]
        )
    header = ["rank", "host", "address", "interface", "cores", "GPUs", "load"]
    return words.table(header, rows, left=4)


def _links(report: Report) -> list[str]:
    ranks = sorted({rank for pair in report.links for rank in pair})
    if not ranks:
        return []
    if len(ranks) > _WIDEST_TABLE:
        return [*_summary(report)]
    header = ["from", *(f"to {rank}" for rank in ranks)]

    def cells(one: int, name: str, show: Any) -> list[str]:
        return [_cell(report.links.get((one, other)), name, show) for other in ranks]

    trips = [[f"rank {one}", *cells(one, "round trip", words.duration)] for one in ranks]
    rates = [[f"rank {one}", *cells(one, "send", words.speed)] for one in ranks]
    return [
        *("", "round trip between ranks, over TCP", *words.table(header, trips)),
        *("", "bandwidth, over TCP", *words.table(header, rates)),
    ]


def _cell(link: Link | None, name: str, show: Any) -> str:
    if link and name in link:
        return str(show(link[name]))
    return "fails" if link and "error" in link else "-"


def _summary(report: Report) -> list[str]:
    """The links of many ranks: the slowest, the median and the fastest of each kind."""
    rows = []
    for kind, inside in (("inside a host", True), ("between hosts", False)):
        found = [
            link
            for (one, other), link in report.links.items()
            if (report.hosts[one] == report.hosts[other]) is inside and "send" in link
        ]
        if found:
            trips = [link["round trip"] for link in found]
            rates = [link["send"] for link in found]
            middle = words.duration(statistics.median(trips)), words.duration(max(trips))
            span = (min(rates), statistics.median(rates), max(rates))
            rows.append([kind, len(found), *middle, *map(words.speed, span)])
    header = [
        "links over TCP",
        "measured",
        "median trip",
        "longest",
        "slowest",
        "median",
        "fastest",
    ]
    return ["", *words.table(header, rows)]


def _group(report: Report) -> list[str]:
    group = report.group
    if "large" not in group:
        return []
    rate = words.speed(group["bytes"] / group["large"])
    return words.section(
        "sums over all ranks, as in training",
        {
            "path": group["gradients"].removeprefix("gradients: "),
            "one number": words.duration(group["small"]),
            words.size(group["bytes"]): f"{words.duration(group['large'])} ({rate})",
        },
    )


def _rest(report: Report) -> list[str]:
    """The rest, in a line each."""
    rows = {}
    first = {host: rank for rank, host in sorted(report.hosts.items(), reverse=True)}
    every = [report.ranks[rank] for rank in first.values()]
    if not every:
        return []
    free = [each["memory"].get("free shared memory", 0) for each in every]
    rows["shared memory"] = f"{words.size(min(free))} free in /dev/shm" + _least(every)
    ports = min((each["ports"] for each in every), key=lambda each: int(each["opened"]))
    rows["free ports"] = (
        f"{ports['opened']} of {ports['wanted']} that were tried, of the range {ports['range']}"
    )
    clocks = [
        link["clock"] for (one, _), link in report.links.items() if not one and "clock" in link
    ]
    if clocks:
        rows["clocks"] = f"within {words.duration(max(map(abs, clocks)))} of rank 0's"
    names = report.ranks[min(report.ranks)]["rendezvous"]
    answer = ", ".join(names["addresses"]) or names["problem"]
    rows["name"] = f"{report.host} is {answer}"
    versions = report.ranks[min(report.ranks)]["versions"]
    rows["versions"] = ", ".join(f"{name} {each}" for name, each in versions.items())
    if "durable" in report.folder:
        found = report.folder
        rows["folder"] = (
            f"{found['folder']}: {words.speed(found['write'])}, with fsync "
            f"{words.speed(found['durable'])} (fsync of {words.size(found['bytes'])} takes "
            f"{words.duration(found['fsync'])})"
        )
    return words.section("hosts", rows)


def _least(every: list[dict[str, Any]]) -> str:
    return " on the host with the least" if len(every) > 1 else ""
