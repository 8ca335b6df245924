"""The figures of the documentation's Benchmarks page, written from a run's results."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from benchmarks import launching, peers, run_cost, traffic
from benchmarks.plots import THEMES, ranks, speed
from benchmarks.steps import DDP, LOCAL

_SHM, _GLOO = "ours, shm", "ours, gloo"


def text(found: dict[str, Any]) -> str:
    """All figures as reStructuredText, to be included: by model, by link and by launch."""
    parts = [_picture("speedup", _SPEEDUP)] if "one host" in found else []
    parts += [*_my_model(found), *_my_link(found), *_my_launch(found)]
    parts += [_heading("How it was measured"), _machine(found["machine"])]
    return "\n\n".join(parts) + "\n"


_SPEEDUP = (
    "Bars for each model and each link: how many steps of ours fit into the time of one step with "
    "DDP's best setting."
)
_SCALING = "Curves: milliseconds a step against the number of parameters, for ours and for DDP."
_MODELS = (
    "*DDP* is the fastest of its three settings, *ours* the exchange through shared memory, and "
    "*no exchange* the same steps without averaging, which is the least that a step can take. "
    "*DDP / ours* above 1 means that ours is faster. *DDP / gloo* is the same comparison for "
    "``transport='gloo'``, which goes through sockets as DDP does; it is what remains where shared "
    "memory cannot be used. Times are milliseconds a step."
)
_MEMORY = (
    "Megabytes at the highest during steps in a plain loop, each way in processes of its own; "
    "memory that ranks share is divided among them. *DDP* is the setting that takes least."
)
_HOSTS = (
    "*DDP* is the fastest of its three settings. *DDP / this* above 1 means that this is faster. "
    "*Bytes sent* is what one host sends for each byte of gradient in single precision; less than "
    "{limit:.2f} needs compression (``compress='bf16'``). With one rank on each host gradients go "
    "through ``gloo``, with more they are summed inside each host first (``hierarchical``)."
)
_LINKS = (
    "*Plain DDP / this* compares with DDP without a hook, *same hook / this* with DDP and a "
    "hook of the same kind: torch's, or for int8 ours. *MB* is what one host sends in a step."
)
_AS_STARTED = (
    "DDP started by torchrun, ours by ``run_distributed``, one launch after the other, in a plain "
    "loop. In the tables above all ways share their processes, so DDP too has what our launcher "
    "prepares; here each has what its own launcher gives it. Times are milliseconds a step."
)
_ONCE = (
    "A run of one step in a fresh ``Trial`` on two ranks, in milliseconds: DDP makes its buckets "
    "when the model is wrapped, this package in the first step of the first run, and it keeps them "
    "for the runs after it. *Checksums* compare the replicas at the end of each epoch; the last "
    f"column is their share of an epoch of {run_cost.EPOCH_STEPS} steps."
)
_RESUME = (
    "Milliseconds from ``run()`` to the first batch, by the batch at which the run was "
    "interrupted. Batches are *skipped* at the sampler; *by its state* is torchdata's "
    "``StatefulDataLoader``; *replayed* reads all batches again, as is done where skipping would "
    "not be exact."
)
_PEERS = (
    "The same digits, model, optimizer and epochs, validation, a checkpoint and a line for "
    "TensorBoard after each epoch, as whole commands: torchrun with a loop around DDP, accelerate "
    "started by torchrun, Lightning with ``strategy='ddp'``, and ours. *First step* is the time "
    "until all processes have taken it, *processor* the time of all cores, *memory* the highest "
    "sum over all processes, in which shared memory counts once and the files of libraries do not, "
    "*written* what was written to the disk. *This / ours* compares whole commands."
)
_PEERS_PICTURE = (
    "Bars: seconds of whole commands by library, and of them those until the first step."
)
_PROMISES = (
    "Times as fast as one process: what a few steps promise, and what a long run was. For two "
    "hosts the promise is made on one, from the size of the gradients and the speed of the link."
)
_DIGITS = (
    "Accuracy on the 1,000 digits that are held out of 5,000 real ones, after equal epochs on two "
    "hosts with two ranks each, mean over the seeds; in brackets the points above the exact run:"
)


def _my_model(found: dict[str, Any]) -> Iterator[str]:
    yield _heading("My model")
    if "one host" in found:
        yield _label("one host")
        for place, title in (("Trial", "In a Trial"), ("loop", "In a plain loop")):
            yield _heading(f"{title}, on one host", "~")
            if place == "Trial":
                yield _MODELS
            tables = [table for table in found["one host"] if table["in a"] == place]
            yield _models(sorted(tables, key=lambda table: table["ranks"]))
    if "traffic" in found:
        yield _heading("What copies and sums take", "~")
        yield from traffic.sentences(found["traffic"])
    if "memory" in found:
        yield _heading("Memory of a rank", "~")
        yield _MEMORY
        yield _memory(found["memory"])
    if "threads" in found:
        yield _heading("More threads a rank", "~")
        yield _threads(found["threads"])
    if "scaling" in found:
        yield _heading("More parameters, more ranks", "~")
        yield _picture("scaling", _SCALING)
        yield _scaling(found["scaling"])


def _my_link(found: dict[str, Any]) -> Iterator[str]:
    if not ("two hosts" in found or "slow links" in found):
        return
    yield _heading("My link")
    if tables := found.get("two hosts"):
        yield _label("two hosts")
        yield f"Two hosts train a {tables[0]['model']}. " + _HOSTS.format(limit=tables[0]["limit"])
        for link in dict.fromkeys(table["link"] for table in tables):
            yield _heading(f"{speed(link)} between two hosts", "~")
            yield _hosts([table for table in tables if table["link"] == link])
    if tables := found.get("slow links"):
        yield _heading("In fewer bytes", "~")
        yield _LINKS
        for link in dict.fromkeys(table["link"] for table in tables):
            yield f"{speed(link)}:"
            yield _links([table for table in tables if table["link"] == link])
    if "digits" in found:
        yield _DIGITS
        yield _digits(found["digits"])


def _my_launch(found: dict[str, Any]) -> Iterator[str]:
    yield _heading("My launch")
    if "as started" in found:
        yield _heading("As users start them", "~")
        yield _AS_STARTED
        yield _started(found)
    if "launch" in found:
        yield _heading("From the command to the first step", "~")
        seconds = found["launch"]["seconds"]
        shown = ", ".join(f"{way} {each:.1f} s" for way, each in seconds.items())
        yield f"From the command to the end of the first step on two ranks: {shown}."
        yield from launching.sentences(found["launch"])
    if "once" in found:
        yield _heading("What is done once", "~")
        yield _ONCE
        yield _once(found["once"])
    if "resume" in found:
        yield _heading("Resuming in the middle of an epoch", "~")
        yield _RESUME
        yield _resumes(found["resume"])
    if "peers" in found:
        yield _heading("Beside other libraries", "~")
        yield _PEERS
        yield _picture("peers", _PEERS_PICTURE)
        yield from _peers(found["peers"])
    if "single process" in found:
        yield _heading("One process", "~")
        ratio = found["single process"]["ratio"]
        yield f"In one process ``data_parallel()`` takes {ratio:.3f} of the plain Trial's time."
    if "prediction" in found:
        yield _heading("What doctor --script promises", "~")
        yield _PROMISES
        yield _promises(found)


def _peers(tables: list[dict[str, Any]]) -> Iterator[str]:
    """Two tables, since one of all columns would not fit the page: times, and what else it took."""
    times, others = [], []
    for table in tables:
        for way, each in table["results"].items():
            ratio = f"**{table['ratios'][way]:.2f}**" if way in table["ratios"] else ""
            cells = peers.cells(each)
            times.append([way, table["processes"], *cells[:3], ratio])
            others.append([way, table["processes"], *cells[3:]])
    titles = [title for title, _, _ in peers.COLUMNS.values()]
    yield _table(["Way", "Processes", *titles[:3], "This / ours"], times)
    yield _table(["Way", "Processes", *titles[3:]], others)


def _once(found: list[dict[str, Any]]) -> str:
    rows = []
    for row in found:
        first, later = row["runs"]["first"], row["runs"]["third"]
        times = [each[way] for each in (first, later) for way in ("no exchange", "DDP", "ours")]
        cells = [*(f"{each:.1f}" for each in times), f"{run_cost.share(row):.1%}"]
        rows.append([row["model"], *cells])
    names = [f"{which}, {way}" for which in ("First", "Third") for way in ("none", "DDP", "ours")]
    return _table(["Model", *names, "Checksums"], rows)


def _resumes(found: list[dict[str, Any]]) -> str:
    ways = list(found[0]["milliseconds"])
    rows = [
        [f"{row['batch']:,}", *(f"{row['milliseconds'][way]:.1f}" for way in ways)] for row in found
    ]
    return _table(["Batch", *(way.capitalize() for way in ways)], rows)


def _links(tables: list[dict[str, Any]]) -> str:
    rows = []
    for table in tables:
        plain = table["times as fast as plain DDP"]
        same = table["times as fast as DDP with the same"]
        for way, milliseconds in table["milliseconds"].items():
            ratios = (f"{each[way]:.2f}" if way in each else "" for each in (plain, same))
            sent = f"{table['megabytes'][way]:.2f}"
            ranks = table["ranks a host"]
            rows.append([table["model"], ranks, way, f"{milliseconds:.0f}", sent, *ratios])
    header = ["Model", "Ranks a host", "Way", "ms", "MB", "Plain DDP / this", "Same hook / this"]
    return _table(header, rows)


def _digits(tables: list[dict[str, Any]]) -> str:
    rows = [
        [
            way,
            *(
                f"{table['accuracy'][way]:.2f} % ({0.0 - table['points below exact'][way]:+.2f})"
                for table in tables
            ),
        ]
        for way in tables[0]["accuracy"]
    ]
    titles = [f"{t['model']}, {t['epochs']} epochs, {t['seeds']} seeds" for t in tables]
    return _table(["Way", *titles], rows)


def _promises(found: dict[str, Any]) -> str:
    rows = []
    for row in found["prediction"]:
        gains = f"{row['promised']:.2f}", f"{row['real']:.2f}"
        rows.append([row["model"], row["where"], *gains, f"{row['error']:+.0%}"])
    return _table(["Model", "Where", "Promised", "Long run", "Off by"], rows)


def _machine(machine: dict[str, Any]) -> str:
    return (
        f"Measured on {machine['cores']} cores of an {machine['processor']}, with Python "
        f"{machine['python']}, torch {machine['torch']} and one thread a rank where no table "
        "says otherwise. Three and more ranks share these cores, and so do the two hosts. Every "
        "figure is in :download:`results.json <benchmarks/results.json>`, times of steps and of "
        "whole commands beside other libraries with their spread."
    )


def _models(tables: list[dict[str, Any]]) -> str:
    rows = []
    for table in tables:
        times = {each["way"]: each["milliseconds"] for each in table["results"]}
        ratio = table["ratios"][_SHM]
        shown = (f"{each:.1f}" for each in (times[_SHM] * ratio, times[_SHM], times[LOCAL]))
        gloo = f"{table['ratios'][_GLOO]:.2f}" if _GLOO in table["ratios"] else ""
        rows.append([table["model"], table["ranks"], *shown, f"**{ratio:.2f}**", gloo])
    header = ["Model", "Ranks", "DDP", "Ours", "No exchange", "DDP / ours", "DDP / gloo"]
    return _table(header, rows)


def _memory(tables: list[dict[str, Any]]) -> str:
    rows = []
    for table in tables:
        used = table["megabytes"]
        shown = [used[LOCAL], min(used[way] for way in DDP), used[_SHM]]
        ratio = f"**{table['ours / DDP']:.2f}**"
        rows.append([table["model"], table["ranks"], *(f"{mb:.0f}" for mb in shown), ratio])
    return _table(["Model", "Ranks", "No exchange", "DDP", "Ours", "Ours / DDP"], rows)


def _threads(tables: list[dict[str, Any]]) -> str:
    counts = sorted({table["threads"] for table in tables})
    ratios = {(t["model"], t["ranks"], t["threads"]): t["ratios"][_SHM] for t in tables}
    rows = [
        [
            *(model, ranks),
            *(f"{ratios[key]:.2f}" if (key := (model, ranks, n)) in ratios else "" for n in counts),
        ]
        for model, ranks in dict.fromkeys((model, ranks) for model, ranks, _ in ratios)
    ]
    header = ["Model", "Ranks", *(f"{n} thread{'s' if n > 1 else ''}" for n in counts)]
    return "DDP / ours, in a plain loop:\n\n" + _table(header, rows)


def _scaling(tables: list[dict[str, Any]]) -> str:
    ranks = sorted({table["ranks"] for table in tables})
    ratios = {(t["parameters"], t["ranks"]): t["ratios"]["ours, auto"] for t in tables}
    rows = [
        [f"{size:,}", *(f"{ratios[size, n]:.2f}" if (size, n) in ratios else "" for n in ranks)]
        for size in sorted({size for size, _ in ratios})
    ]
    return "DDP / ours:\n\n" + _table(["Parameters", *(f"{n} ranks" for n in ranks)], rows)


def _hosts(tables: list[dict[str, Any]]) -> str:
    rows = []
    for table in tables:
        crossing = table["bytes sent by a host, per byte of gradient"]
        times = {each["way"]: each["milliseconds"] for each in table["results"]}
        best = min(DDP, key=times.__getitem__)
        for way in (LOCAL, best, *table["ratios"]):
            ratio = f"{table['ratios'][way]:.2f}" if way in table["ratios"] else ""
            cells = [f"{times[way]:.0f}", ratio, f"{crossing[way]:.2f}"]
            rows.append([table["ranks a host"], "DDP" if way == best else way, *cells])
    return _table(["Ranks a host", "Way", "ms a step", "DDP / this", "Bytes sent"], rows)


def _started(found: dict[str, Any]) -> str:
    rows = []
    for table in (*found["as started"], *found.get("as started, two hosts", [])):
        place = f"{table['ranks']} ranks" if "ranks" in table else _place(table)
        times = {each["way"]: each["milliseconds"] for each in table["results"]}
        for way, ratio in table["ratios"].items():
            cells = [f"{times[way] * ratio:.1f}", f"{times[way]:.1f}", f"**{ratio:.2f}**"]
            rows.append([table["model"], place, way.removeprefix("ours, "), *cells])
    return _table(["Model", "Where", "Ours with", "DDP", "Ours", "DDP / ours"], rows)


def _place(table: dict[str, Any]) -> str:
    return f"2 hosts with {ranks(table)}, {speed(table['link'])}"


def _heading(words: str, line: str = "-") -> str:
    """A heading that other pages can link to, as bench-my-model."""
    return f"{_label(words)}\n\n{words}\n{line * len(words)}"


def _label(words: str) -> str:
    return f".. _bench-{re.sub(r'[^a-z0-9]+', '-', words.lower())}:"


def _picture(name: str, words: str) -> str:
    """A picture of ``plots``, of which the page shows the one for its colours."""
    both = "\n\n".join(
        f"    .. image:: benchmarks/{name}{suffix}.svg\n        :alt: {words}\n"
        f"        :class: {'only-dark' if suffix else 'only-light'}"
        for suffix in THEMES
    )
    return f".. container:: picture\n\n{both}"


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [".. csv-table::", "    :class: sortable", f"    :header: {_row(header)}", ""]
    return "\n".join([*lines, *(f"    {_row(row)}" for row in rows)])


def _row(cells: Sequence[Any]) -> str:
    return ", ".join(f'"{cell}"' for cell in cells)
