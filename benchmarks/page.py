"""The figures of the documentation's Benchmarks page, written from a run's results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.steps import LOCAL

_SHM, _GLOO = "ours, shm", "ours, gloo"


def text(found: dict[str, Any]) -> str:
    """All figures as reStructuredText, to be included."""
    parts = [_machine(found["machine"])]
    if "one host" in found:
        parts += [_heading("One host"), _picture("speedup.svg", _SPEEDUP), _models(found)]
    if "scaling" in found:
        parts += [_heading("More parameters, more ranks"), _picture("scaling.svg", _SCALING)]
        parts.append(_scaling(found["scaling"]))
    if "two hosts" in found:
        parts += [_heading("Two hosts"), *map(_hosts, found["two hosts"])]
    if "as started" in found:
        parts += [_heading("As users start them"), _AS_STARTED, _started(found)]
    if "prediction" in found:
        parts += [_heading("What doctor --script promises"), _PROMISES, _promises(found)]
    parts += [_heading("The rest"), *_rest(found)]
    return "\n\n".join(parts) + "\n"


_SPEEDUP = "Bars: steps of ours with shared memory in the time of one step with DDP's best setting."
_SCALING = "Curves: milliseconds a step against the number of parameters, for ours and for DDP."


_AS_STARTED = (
    "DDP started by torchrun, ours by ``run_distributed``, launch after launch by turns, in a "
    "plain loop. In the tables above all ways share their processes, so DDP too has what our "
    "launcher prepares; here each has what its own launcher gives it."
)


_PROMISES = (
    "Times as fast as one process: what a few steps promise, and what a long run was. For two "
    "hosts the promise is made on one, from the size of the gradients and the speed of the link."
)


def _promises(found: dict[str, Any]) -> str:
    rows = []
    for row in found["prediction"]:
        gains = f"{row['promised']:.2f}", f"{row['real']:.2f}"
        rows.append([row["model"], row["where"], *gains, f"{row['error']:+.0%}"])
    return _table(["Model", "Where", "Promised", "Long run", "Off by"], rows)


def _machine(machine: dict[str, Any]) -> str:
    return (
        f"Measured on {machine['cores']} cores of an {machine['processor']}, with Python "
        f"{machine['python']}, torch {machine['torch']} and one thread a rank. Four and eight "
        "ranks share these cores, and so do the two hosts."
    )


def _models(found: dict[str, Any]) -> str:
    rows = []
    for table in found["one host"]:
        times = {each["way"]: each["milliseconds"] for each in table["results"]}
        best = times[_SHM] * table["ratios"][_SHM]
        rows.append(
            [
                table["model"],
                table["ranks"],
                table["in a"],
                f"{best:.1f}",
                f"{times[_SHM]:.1f}",
                f"{times[LOCAL]:.1f}",
                *(f"**{table['ratios'][_SHM]:.2f}**", f"{table['ratios'][_GLOO]:.2f}"),
            ]
        )
    header = ["Model", "Ranks", "In a", "Best DDP, ms", "Ours, ms", "No exchange, ms"]
    return _table([*header, "DDP / shared memory", "DDP / gloo"], rows)


def _scaling(tables: list[dict[str, Any]]) -> str:
    ranks = sorted({table["ranks"] for table in tables})
    ratios = {(t["parameters"], t["ranks"]): t["ratios"]["ours, auto"] for t in tables}
    rows = [
        [f"{size:,}", *(f"{ratios[size, n]:.2f}" if (size, n) in ratios else "" for n in ranks)]
        for size in sorted({size for size, _ in ratios})
    ]
    return "DDP / ours:\n\n" + _table(["Parameters", *(f"{n} ranks" for n in ranks)], rows)


def _hosts(table: dict[str, Any]) -> str:
    crossing = table["bytes sent by a host, per byte of gradient"]
    rows = [
        [
            each["way"],
            f"{each['milliseconds']:.0f}",
            f"{table['ratios'][each['way']]:.2f}" if each["way"] in table["ratios"] else "",
            f"{crossing[each['way']]:.2f}",
        ]
        for each in table["results"]
    ]
    return (
        f"{table['model']}, {_ranks(table)} on each of two hosts, {table['link']}/s; the least "
        f"that a host can send is {table['limit']:.2f} bytes per byte of gradient in single "
        "precision:\n\n"
        + _table(["", "ms a step", "Best DDP / this", "Bytes sent per byte of gradient"], rows)
    )


def _started(found: dict[str, Any]) -> str:
    rows = []
    for table in (*found["as started"], *found.get("as started, two hosts", [])):
        place = f"{table['ranks']} ranks" if "ranks" in table else _place(table)
        times = {each["way"]: each["milliseconds"] for each in table["results"]}
        for way, ratio in table["ratios"].items():
            cells = [f"{times[way] * ratio:.1f}", f"{times[way]:.1f}", f"**{ratio:.2f}**"]
            rows.append([table["model"], place, way, *cells])
    return _table(["Model", "Where", "", "Best DDP, ms", "Ours, ms", "DDP / ours"], rows)


def _place(table: dict[str, Any]) -> str:
    return f"2 hosts with {_ranks(table)}, {table['link']}/s"


def _ranks(table: dict[str, Any]) -> str:
    return "1 rank" if table["ranks a host"] == 1 else f"{table['ranks a host']} ranks"


def _rest(found: dict[str, Any]) -> Iterable[str]:
    if "single process" in found:
        ratio = found["single process"]["ratio"]
        yield f"In one process ``data_parallel()`` takes {ratio:.3f} of the plain Trial's time."
    if "launch" in found:
        seconds = found["launch"]["seconds"]
        shown = ", ".join(f"{way} {each:.1f} s" for way, each in seconds.items())
        yield f"From the command to the end of the first step on two ranks: {shown}."
    yield "Every time and its spread: :download:`results.json <benchmarks/results.json>`."


def _heading(words: str) -> str:
    return f"{words}\n{'-' * len(words)}"


def _picture(name: str, words: str) -> str:
    return f".. image:: benchmarks/{name}\n    :alt: {words}"


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [".. csv-table::", f"    :header: {_row(header)}", ""]
    return "\n".join([*lines, *(f"    {_row(row)}" for row in rows)])


def _row(cells: Sequence[Any]) -> str:
    return ", ".join(f'"{cell}"' for cell in cells)
