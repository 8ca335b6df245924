"""The benchmark against DDP on two GPUs, which prints its table; python -m benchmarks has more."""

from __future__ import annotations

from benchmarks import gpus, report
from benchmarks.models import CASES
from benchmarks.steps import DDP, LOCAL


def test_the_benchmark_prints_a_table(kind, capsys):
    rounds, seconds = (9, 0.4) if kind == "cuda" else (2, 0.01)
    cases = gpus.large() if kind == "cuda" else [CASES["mlp"]]
    tables = gpus.run(cases, rounds, seconds, kind=kind)
    assert len(tables) == 2 * len(cases)
    with capsys.disabled():
        print(report.text({"machine": {"device": kind}, "GPUs": tables}))
    ours = "ours, nccl" if kind == "cuda" else "ours, gloo"
    for table in tables:
        assert {LOCAL, ours, f"{ours}, bf16", *DDP} <= {each["way"] for each in table["results"]}
        assert all(each["milliseconds"] > 0 for each in table["results"])
        assert table["ratios"][ours] > 0
