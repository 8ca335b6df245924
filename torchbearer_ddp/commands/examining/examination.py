"""What the doctor measures with all ranks, in this order, and what each rank does for it."""

from __future__ import annotations

import dataclasses
import statistics
import time
import uuid
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchbearer_ddp.commands.examining import host_checks, links
from torchbearer_ddp.commands.examining.links import Link, Pair
from torchbearer_ddp.commands.examining.meeting import Asking, Work
from torchbearer_ddp.gradients.transports.choose import choose
from torchbearer_ddp.gradients.transports.interface import Bucket
from torchbearer_ddp.group import membership
from torchbearer_ddp.group.join import join, leave
from torchbearer_ddp.group.waiting import Wait
from torchbearer_ddp.launch.plan import Plan

#: What all measurements of links may take together.
LINKS_SECONDS = 60.0
#: What a group of all ranks may take to form, and its sums.
_GROUP_SECONDS = 15.0
_FOLDER_SECONDS = 20.0
#: The longest that everything takes once the ranks have met.
LONGEST_SECONDS = LINKS_SECONDS + 2 * links.LONGEST_SECONDS + 2 * _GROUP_SECONDS + _FOLDER_SECONDS
#: What is summed: less where a link would need longer than this for it.
_LARGE_BYTES = 16 * 2**20
_SMALL_BYTES = 16 * 2**10
_SUM_SECONDS = 0.2
_SUMS = 5


@dataclass
class Report:
    """What rank zero has found out.

    Attributes:
        world_size: The number of ranks that should have come.
        timeout: How long they had, in seconds.
        host: The address of rank zero's host, as it was given.
        ranks: What each rank that came has found on its own.
        links: The measured links, by the ranks that they lead from and to.
        not_measured: Pairs for which the time was too short.
        lost: Ranks that stopped answering, and what they were asked for.
        group: The sums of all ranks, as training would compute them.
        folder: The folder's name, what rank zero has measured there, and who sees it.
    """

    world_size: int
    timeout: float
    host: str
    ranks: dict[int, dict[str, Any]] = field(default_factory=dict)
    links: dict[Pair, Link] = field(default_factory=dict)
    not_measured: list[Pair] = field(default_factory=list)
    lost: dict[int, str] = field(default_factory=dict)
    group: dict[str, Any] = field(default_factory=dict)
    folder: dict[str, Any] = field(default_factory=dict)

    @property
    def hosts(self) -> dict[int, str]:
        """An id of the host of each rank that came."""
        return {rank: found["host id"] for rank, found in self.ranks.items()}

    @property
    def missing(self) -> list[int]:
        """The ranks that did not come."""
        return [rank for rank in range(self.world_size) if rank not in self.ranks]

    def plain(self) -> dict[str, Any]:
        """The report for JSON, whose keys are strings."""
        found = dataclasses.asdict(self) | {"missing": self.missing}
        return found | {"links": {f"{a} to {b}": link for (a, b), link in self.links.items()}}


def work_of(plan: Plan) -> dict[str, Work]:
    """What a rank can be asked for."""
    return {
        "link": partial(links.measure, full=True),
        "reach": _reach,
        "group": partial(_sums, plan),
        "write": lambda folder, mark: host_checks.write_speed(Path(folder), mark),
        "see": lambda folder, mark: host_checks.sees(Path(folder), mark),
    }


def examine(asking: Asking, report: Report, folder: Path | None) -> None:
    """Rank zero's part: asks for one measurement after the other, into the report."""
    asking.gather(time.monotonic() + report.timeout)
    report.ranks, report.lost = dict(sorted(asking.here.items())), asking.lost
    _examine_links(asking, report)
    complete = report.world_size > 1 and not report.missing and not report.lost
    if complete and not any("error" in link for link in report.links.values()):
        task = ["group", _bytes_to_sum(report)]
        answers = asking.ask(dict.fromkeys(report.ranks, task), 2 * _GROUP_SECONDS)
        report.group = _slowest(answers)
    if folder is not None:
        _examine_folder(asking, report, folder)


def _examine_links(asking: Asking, report: Report) -> None:
    chosen, stop = links.pairs(report.hosts), time.monotonic() + LINKS_SECONDS
    places = {rank: found["place"] for rank, found in report.ranks.items()}
    first, report.not_measured = _measure(asking, report, chosen, stop)
    report.links |= first
    # Something else may have used the link, or the cores: what seems slow is measured again.
    again, _ = _measure(asking, report, links.slow_pairs(first), stop)
    for pair, link in again.items():
        report.links[pair] = links.faster(first[pair], link)
    # The other way round: a firewall may let connections through in one direction only.
    wanted: dict[int, list[int]] = {}
    for one, other in report.links:
        wanted.setdefault(other, []).append(one)
    back = {rank: ["reach", [places[one] for one in ones]] for rank, ones in wanted.items()}
    for rank, answer in asking.ask(back, links.LONGEST_SECONDS).items():
        for one, link in zip(wanted[rank], answer, strict=True):
            there = report.links[one, rank]
            if "send" in there and "error" not in link:
                link |= {"send": there["receive"], "receive": there["send"]}
            if link:
                report.links[rank, one] = link


def _measure(
    asking: Asking, report: Report, chosen: list[Pair], stop: float
) -> tuple[dict[Pair, Link], list[Pair]]:
    """The links of some pairs, and those for which the time was too short."""
    found: dict[Pair, Link] = {}
    late: list[Pair] = []
    for together in links.rounds(chosen, report.hosts):
        if time.monotonic() > stop:
            late += together
            continue
        tasks = {one: ["link", report.ranks[other]["place"]] for one, other in together}
        answers = asking.ask(tasks, links.LONGEST_SECONDS)
        found |= {pair: answers[pair[0]] for pair in together if pair[0] in answers}
    return found, late


def _reach(places: list[dict[str, Any]]) -> list[Link]:
    """Connects to several ranks; those after half of the time are taken as measured once."""
    stop, found = time.monotonic() + links.LONGEST_SECONDS / 2, []
    for place in places:
        found.append(links.measure(place, full=False) if time.monotonic() < stop else {})
    return found


def _examine_folder(asking: Asking, report: Report, folder: Path) -> None:
    mark = f".torchbearer_ddp-doctor-{uuid.uuid4().hex[:8]}"
    words = [str(folder.absolute()), mark]
    try:
        answers = asking.ask({0: ["write", *words]}, _FOLDER_SECONDS)
        report.folder = {"folder": str(folder), **answers.get(0, {"problem": "no answer"})}
        if "problem" not in report.folder:
            firsts = {report.hosts[rank]: rank for rank in sorted(report.ranks, reverse=True)}
            others = {rank: ["see", *words] for rank in firsts.values() if rank}
            report.folder["seen"] = asking.ask(others, _FOLDER_SECONDS / 2)
    finally:
        host_checks.clean(folder, mark)


# The sums, as training computes them.


def _bytes_to_sum(report: Report) -> int:
    slowest = min((link["send"] for link in report.links.values() if "send" in link), default=1e9)
    return int(max(_SMALL_BYTES, min(_LARGE_BYTES, slowest * _SUM_SECONDS)))


def _sums(plan: Plan, size: int) -> dict[str, Any]:
    """Forms a group of all ranks as a run does, and times the sum of a number and of many."""
    timed = plan.with_member(timeout=min(_GROUP_SECONDS, plan.member.timeout))
    join(timed.member, plan.host, plan.ports, serve=plan.serve, prefix=f"{plan.prefix}/sums")
    group = membership.current()
    if group is None:
        return {"failed": "the group is gone"}
    device = torch.device(group.member.device)
    sizes = (1, size // 4)
    transport, line = choose(group, "auto", [Bucket(torch.float32, device, size) for size in sizes])
    small, large = (_time_sums(group, transport, index, device) for index in range(len(sizes)))
    leave()
    return {"gradients": line, "small": small, "large": large, "bytes": size}


def _time_sums(group: Any, transport: Any, index: int, device: torch.device) -> float:
    """The median time of one sum."""
    times = []
    for _ in range(_SUMS):
        started = time.perf_counter()
        transport.start(index, 1 / group.member.world_size)
        transport.finish(index, Wait(group, "a sum of the doctor"))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def _slowest(answers: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """The sums as the slowest rank saw them, or the first failure."""
    for rank, answer in sorted(answers.items()):
        if "failed" in answer:
            return {"rank": rank, **answer}
    return max(answers.values(), key=lambda each: float(each["large"]), default={})
