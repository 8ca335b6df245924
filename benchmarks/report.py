"""Tables of results, for the terminal."""

from __future__ import annotations

from typing import Any

from benchmarks import digits, launching, links, peers, resume, run_cost, traffic


def text(found: dict[str, Any]) -> str:
    """All tables of a run."""
    lines = [f"{key}: {value}" for key, value in found["machine"].items()]
    if "single process" in found:
        ratio = found["single process"]["ratio"]
        lines += ["", f"data_parallel() in a single process: {ratio:.3f} of the plain Trial's time"]
    for part, what in (("one host", "ranks"), ("GPUs", "GPUs")):
        for table in found.get(part, []):
            lines += ["", f"{table['model']}, {table['ranks']} {what}, in a {table['in a']}"]
            lines += _rows(table)
    for table in found.get("threads", []):
        where = f"{table['ranks']} ranks with {table['threads']} threads"
        lines.append(f"{table['model']}, {where}: {table['ratios']['ours, shm']:.2f}x")
    lines += traffic.sentences(found.get("traffic", []))
    for table in found.get("memory", []):
        used = ", ".join(f"{way} {mb:.0f}" for way, mb in table["megabytes"].items())
        where = f"{table['model']}, {table['ranks']} ranks"
        lines.append(f"{where}, MB a rank: {used}; ours / DDP {table['ours / DDP']:.2f}")
    for table in found.get("scaling", []):
        best = table["ratios"]["ours, auto"]
        lines.append(f"{table['parameters']:>12,} parameters, {table['ranks']} ranks: {best:.2f}x")
    if "launch" in found:
        seconds = ", ".join(f"{way} {s:.1f} s" for way, s in found["launch"]["seconds"].items())
        lines += ["", f"command to first step: {seconds} ({found['launch']['ratio']:.2f}x)"]
        lines += launching.sentences(found["launch"])
    lines += run_cost.sentences(found.get("once", []))
    lines += resume.sentences(found.get("resume", []))
    for table in found.get("two hosts", []):
        lines += ["", f"two hosts, {table['ranks a host']} ranks each, {table['link']}"]
        lines += _rows(table)
        crossing = table["bytes sent by a host, per byte of gradient"]
        lines += [f"  bytes sent, limit {table['limit']:.2f}:"]
        lines += [f"    {way:<28} {value:.2f}" for way, value in crossing.items()]
    lines += [links.text(found.get("slow links", [])), "", digits.text(found.get("digits", []))]
    lines.append(peers.text(found.get("peers", [])))
    for table in found.get("as started", []):
        lines += ["", f"as users start them: {table['model']}, {table['ranks']} ranks"]
        lines += _rows(table)
    for table in found.get("as started, two hosts", []):
        place = f"two hosts, {table['ranks a host']} ranks each, {table['link']}"
        lines += ["", f"as users start them: {table['model']}, {place}", *_rows(table)]
    for row in found.get("prediction", []):
        lines.append(
            f"doctor --script, {row['model']}, {row['where']}: promised {row['promised']:.2f}x, "
            f"real {row['real']:.2f}x, off by {row['error']:+.0%}"
        )
    return "\n".join(lines)


def _rows(table: dict[str, Any]) -> list[str]:
    rows = [f"  {'':<28} {'ms a step':>10} {'middle half':>17}   best DDP / this"]
    for each in table["results"]:
        low, high = each["spread"]
        ratio = table["ratios"].get(each["way"])
        shown = f"{ratio:.2f}x" if ratio else ""
        rows.append(
            f"  {each['way']:<28} {each['milliseconds']:>10.2f} {low:>8.2f}-{high:<8.2f}   {shown}"
        )
    return rows
