"""What is wrong with the hosts: versions, clocks, memory, ports, names, and the folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torchbearer_ddp.commands import words
from torchbearer_ddp.commands.examining.examination import Report
from torchbearer_ddp.commands.examining.finding import Finding, by_value, differing, who

_CLOCK_SECONDS = 1.0
_NAME_SECONDS = 0.5
_SMALL_SHARED_MEMORY = 128e6
#: So many processes for each core, besides the ranks, disturb what is measured.
_BUSY = 1.0
_FEW_FILES = 1024
_SLOW_DISK = 50e6
_SLOW_FSYNC = 1.0


def find(report: Report) -> Iterator[Finding]:
    """All findings about hosts."""
    for check in (_settings, _clocks, _hosts, _folder):
        yield from check(report)


def _settings(report: Report) -> Iterator[Finding]:
    """What must be the same on every rank."""
    sizes = by_value({rank: found["world size"] for rank, found in report.ranks.items()})
    if len(sizes) > 1:
        yield Finding(
            True,
            f"The world size differs: {differing(sizes)}.",
            "Give every rank the same --world-size.",
        )
    for name in next(iter(report.ranks.values()), {"versions": ()})["versions"]:
        versions = {rank: each["versions"].get(name, "?") for rank, each in report.ranks.items()}
        found = by_value(versions)
        if len(found) > 1:
            yield Finding(
                name not in ("torchbearer", "Python"),
                f"{name} differs: {differing(found)}.",
                "Install the same versions on every host; results differ otherwise, or ranks do "
                "not understand each other.",
            )


def _clocks(report: Report) -> Iterator[Finding]:
    away = {
        rank: link["clock"]
        for (one, rank), link in report.links.items()
        if one == 0 and abs(link.get("clock", 0.0)) > _CLOCK_SECONDS
    }
    for rank, seconds in away.items():
        yield Finding(
            False,
            f"The clock of {who(report, rank)} is {abs(seconds):.1f} s "
            f"{'ahead of' if seconds > 0 else 'behind'} rank 0's.",
            "Logs of the hosts cannot be compared, and make or rsync may take old files for new. "
            "Synchronise the clocks (chrony or ntpd).",
        )


def _hosts(report: Report) -> Iterator[Finding]:
    """What is true of a host; of several that have the same, the first is described."""
    first = {host: rank for rank, host in sorted(report.hosts.items(), reverse=True)}
    alike: dict[str, list[tuple[str, Finding]]] = {}
    for host, rank in sorted(first.items(), key=lambda each: each[1]):
        local = [each for each, other in report.hosts.items() if other == host]
        name = who(report, rank, alone=True)
        for finding in _host(report.ranks[rank], local, name):
            alike.setdefault(finding.remedy, []).append((name, finding))
    for (_, finding), *others in alike.values():
        also = f" Likewise {words.listing([name for name, _ in others])}." if others else ""
        yield replace(finding, found=f"{finding.found}{also}")
    answers = {
        rank: ", ".join(found["rendezvous"]["addresses"]) or "nothing"
        for rank, found in report.ranks.items()
    }
    if len(by_value(answers)) > 1:
        yield Finding(
            False,
            f"The name {report.host} means different addresses: {differing(by_value(answers))}.",
            "Give --host an address instead of a name, or mend /etc/hosts or the name server.",
        )


def _host(found: dict[str, Any], local: list[int], host: str) -> Iterator[Finding]:
    memory, processor = found["memory"], found["processor"]
    if problem := found["segment"].get("problem"):
        yield Finding(
            False,
            f"{host} cannot share memory between ranks ({problem}).",
            "Gradients and small messages go through gloo there, which is slower. Allow "
            "memfd_create.",
        )
    if memory.get("shared memory", _SMALL_SHARED_MEMORY) < _SMALL_SHARED_MEMORY:
        yield Finding(
            False,
            f"/dev/shm of {host} has {words.size(memory['shared memory'])}, which loaders with "
            "workers fill quickly (ranks do not use it for gradients).",
            "Start the container with --shm-size 8g or --ipc host, or use num_workers=0.",
        )
    ports = found["ports"]
    if ports["opened"] < ports["wanted"]:
        yield Finding(
            True,
            f"{host} could open only {ports['opened']} of {ports['wanted']} ports "
            f"({ports['problem']}).",
            f"Ranks listen on ports of the range {ports['range'] or 'of the system'}; end what "
            "holds them, or raise the limit of open files.",
        )
    if 0 < memory["open files"] < _FEW_FILES:
        yield Finding(
            False,
            f"A process on {host} may have {memory['open files']} open files.",
            "Each rank has connections to all others, and loaders have more: ulimit -n 4096.",
        )
    cores = processor.get("cores of the container", processor["usable cores"])
    if len(local) > cores and not found["gpus"]:
        yield Finding(
            False,
            f"{len(local)} ranks share {cores:g} usable core{'s' * (cores != 1)} of {host}.",
            "They take turns: start no more ranks than cores.",
        )
    if processor["load"] - len(local) > _BUSY * cores:
        yield Finding(
            False,
            f"{host} was busy during the examination: {processor['load']:.1f} processes wanted "
            f"{cores:g} core{'s' * (cores != 1)}.",
            "The speeds above are lower than those of an idle host. End other programs, and start "
            "the doctor again.",
        )
    name = found["network"]
    if not name["addresses"] or name["seconds"] > _NAME_SECONDS:
        answer = name.get("problem") or f"after {name['seconds']:.1f} s"
        yield Finding(
            False,
            f"{host} looks up its own name {name['host']}: {answer}.",
            "Every connection to a rendezvous looks names up. Add the name to /etc/hosts.",
        )


def _folder(report: Report) -> Iterator[Finding]:
    found = report.folder
    if not found:
        return
    if "problem" in found:
        yield Finding(
            True,
            f"Rank 0 cannot write into {found['folder']} ({found['problem']}).",
            "Give a folder that this user may write, with room for the checkpoints.",
        )
        return
    if found["durable"] < _SLOW_DISK or found["fsync"] > _SLOW_FSYNC:
        yield Finding(
            False,
            f"{found['folder']} writes {words.speed(found['durable'])} with fsync, which alone "
            f"takes {words.duration(found['fsync'])}.",
            "Checkpoint writes in the background; save less often, or to a local disk.",
        )
    blind = [rank for rank, sees in found.get("seen", {}).items() if not sees]
    if blind:
        hosts = words.listing(sorted({report.ranks[rank]["host"] for rank in blind}))
        yield Finding(
            False,
            f"{found['folder']} is not the same folder on {hosts} as on rank 0.",
            "Rank 0 writes the checkpoints: a run that continues with another host as its first "
            "does not find them. Use a folder that all hosts share.",
        )
