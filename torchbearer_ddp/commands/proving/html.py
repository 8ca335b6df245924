"""The report of a proof as one HTML file, with nothing to load from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from torchbearer_ddp.commands.proving import text
from torchbearer_ddp.commands.proving.comparison import LIMIT
from torchbearer_ddp.commands.proving.plot import panel
from torchbearer_ddp.commands.proving.proof import Proof
from torchbearer_ddp.group.join import versions

#: The tensors and metrics that are listed one by one: those with the largest differences.
_LISTED = 20
_STYLE = """
:root { --ink:#1d2330; --faint:#697084; --line:#dde1ea; --page:#f6f7fa; --card:#fff; --good:#16794c;
  --good-soft:#e3f4ea; --bad:#b3261e; --bad-soft:#fbe7e5; --blue:#2456c8; --band:#dff0e6; }
@media (prefers-color-scheme: dark) { :root { --ink:#e6e9f0; --faint:#9aa3b5; --line:#323a4a;
  --page:#12161e; --card:#1a202b; --good:#62c796; --good-soft:#173527; --bad:#ff8a80;
  --bad-soft:#43201e; --blue:#8fb0ff; --band:#1d3a2c; } }
* { box-sizing:border-box } body { margin:0; background:var(--page); color:var(--ink);
  font:15px/1.5 system-ui,sans-serif }
main { max-width:860px; margin:0 auto; padding:32px 20px 56px; overflow-wrap:anywhere }
h1 { font-size:25px; line-height:1.25; margin:10px 0 4px } h2 { font-size:17px; margin:0 0 6px }
p { margin:4px 0 } .faint { color:var(--faint) } code { font:13px ui-monospace,monospace }
.badge { display:inline-block; padding:2px 12px; border-radius:99px; font-weight:600 }
.good .badge { background:var(--good-soft); color:var(--good) }
.bad .badge { background:var(--bad-soft); color:var(--bad) }
section { background:var(--card); border:1px solid var(--line); border-radius:10px;
  padding:16px 20px; margin-top:16px; overflow-x:auto }
ul { margin:4px 0; padding-left:20px } li { margin:4px 0 }
table { border-collapse:collapse; width:100%; font-variant-numeric:tabular-nums }
th,td { padding:4px 8px; border-bottom:1px solid var(--line); text-align:right; white-space:nowrap }
th { color:var(--faint); font-weight:500 } th:first-child,td:first-child { text-align:left }
td.beyond { color:var(--bad); font-weight:600 } svg { width:100%;
  min-width:560px; height:auto; display:block }
svg text { fill:var(--faint); font:12px system-ui,sans-serif } .grid { stroke:var(--line) }
.band { fill:var(--band) } .bound { fill:none; stroke:var(--good); stroke-dasharray:5 4 }
.rounding { fill:none; stroke:var(--good); stroke-width:1.5 }
.found { fill:none; stroke:var(--blue); stroke-width:1.5 }
circle.equal { fill:var(--blue) } circle.beyond { fill:var(--bad) }
.key span { margin-right:18px; white-space:nowrap } .key i { display:inline-block; width:22px;
  height:0; border-top:2px solid; vertical-align:middle; margin-right:6px }
summary { cursor:pointer; font-weight:600 }
"""
_KEY = """<p class="key faint">
<span><i style="color:var(--blue)"></i>ranks against one process</span>
<span><i style="color:var(--good)"></i>what rounding does, measured</span>
<span><i style="color:var(--good);border-top-style:dashed"></i>bound: {limit:g} times that</span>
</p>"""
_MEANING = """<p class="faint">Differences are relative to the size of the tensor; the largest of
each step. Rounding is measured: the single process ran again from parameters that differed by one
unit in the last place. Below the dashed line a difference is no more than that.</p>"""


def page(proof: Proof) -> str:
    """The whole file."""
    first = "".join(f"<p>{escape(line)}</p>" for line in text.first_differences(proof))
    job = proof.job
    words = " ".join([*(["-m"] if job.is_module else []), job.script, *job.arguments])
    with_versions = ", ".join(f"{name} {each}" for name, each in versions().items())
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(text.verdict(proof))}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>
<body><main class="{"good" if proof.is_equal else "bad"}">
<span class="badge">{"equal" if proof.is_equal else "differs"}</span>
<h1>{escape(text.verdict(proof))}</h1>{first}
<p class="faint"><code>{escape(words)}</code> &middot; {proof.seconds:.0f} s &middot;
{escape(with_versions)}</p>
{_reasons(proof)}
{_plots(proof)}
<section><h2>Largest differences</h2>{_largest(proof)}</section>
<section><details><summary>Every step</summary>{_steps(proof)}</details></section>
<section><h2>Notes</h2>{_list(text.notes(proof))}</section>
</main></body></html>
"""


def _reasons(proof: Proof) -> str:
    if proof.is_equal:
        return ""
    problems = [escape(each) for each in proof.comparison.problems]
    items = [*(escape(text.reason_line(each)) for each in proof.reasons), *problems]
    after = f"<p>{escape(text.APART_FROM_THAT)}</p>" if proof.explained else ""
    items = items or [escape(text.NO_REASON)]
    return f"<section><h2>Why</h2>{_list(items, raw=True)}{after}</section>"


def _plots(proof: Proof) -> str:
    found = []
    for stage in ("loss", "gradient", "parameter"):
        if picture := panel(proof.comparison, stage):
            found.append(f"<h2>{text.COMPARED[stage].capitalize()}</h2>{picture}")
    if proof.explained is not None:
        picture = panel(proof.explained, "gradient")
        found.append(f"<h2>Gradients, when one process does the same</h2>{picture}")
    key = _KEY.format(limit=LIMIT)
    sections = [f"{key}{_MEANING}", *found]
    return "".join(f"<section>{each}</section>" for each in sections)


def _largest(proof: Proof) -> str:
    worst: dict[tuple[str, str], Any] = {}
    for each in proof.comparison.differences:
        key = (each.stage, each.name)
        if key not in worst or each.ratio > worst[key].ratio:
            worst[key] = each
    listed = sorted(worst.values(), key=lambda each: -each.ratio)[:_LISTED]
    rows = [
        (
            each.name if each.name == each.stage else f"{each.stage} {each.name}",
            str(each.step),
            f"{each.relative:.1e}",
            f"{each.relative_rounding:.1e}",
            text.cell(each),
        )
        for each in listed
    ]
    return _table(["", "at step", "difference", "rounding", "multiple"], rows)


def _steps(proof: Proof) -> str:
    return _table(["step", *text.columns(proof).values()], text.rows(proof))


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in header)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="beyond">{escape(each[1:])}</td>'
            if each.startswith("!")
            else f"<td>{escape(each)}</td>"
            for each in row
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _list(items: Sequence[str], *, raw: bool = False) -> str:
    return f"<ul>{''.join(f'<li>{each if raw else escape(each)}</li>' for each in items)}</ul>"


def write(proof: Proof, path: str) -> None:
    """Writes the file."""
    Path(path).write_text(page(proof), encoding="utf-8")
