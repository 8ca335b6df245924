"""The benchmarks' own instruments, and what their page makes of results."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import page, peers, plots

MEGABYTE = 1_000_000
#: Works in a process of a process: writes, holds memory, and uses the processor.
WORKS = f"""
import os, sys, time
kept = bytearray(b"x" * {50 * MEGABYTE})
with open(sys.argv[1], "wb") as file:
    file.write(os.urandom({8 * MEGABYTE}))
    os.fsync(file.fileno())
end = time.process_time() + 0.5
while time.process_time() < end:
    pass
"""


def measured(*words: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.meter", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)


def test_a_command_is_measured_with_the_processes_of_its_processes() -> None:
    runs = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WORKS!r}, sys.argv[1]])"
    with tempfile.TemporaryDirectory(dir=peers.disk()) as folder:
        found = measured("--memory", sys.executable, "-c", runs, f"{folder}/file")
    assert found["processor"] > 0.5
    assert found["wall"] > 0.5
    assert 50 * MEGABYTE < found["memory"] < 150 * MEGABYTE
    assert found["written"] >= 8 * MEGABYTE


def test_processes_that_a_command_leaves_behind_are_measured(tmp_path: Path) -> None:
    leaves = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {WORKS!r}, sys.argv[1]])"
    )
    assert measured(sys.executable, "-c", leaves, str(tmp_path / "file"))["processor"] > 0.5


def test_peers_are_shown_with_every_column() -> None:
    took = {
        **{"wall": 8.0, "first step": 3.0, "processor": 12.0, "memory": 4e8, "written": 6e6},
        **{"accuracy": 0.953, "steps": 63},
    }
    slower = {**took, "wall": 12.0}
    table = {
        "processes": 2,
        "epochs": 20,
        "results": {peers.OURS: took, "Lightning": slower},
        "ratios": {"Lightning": 1.5},
    }
    machine = {"cores": 2, "processor": "x", "python": "3", "torch": "2"}
    found = {"machine": machine, "peers": [table]}
    shown = page.text(found)
    assert '"Lightning", "2", "12.0", "3.0", "12.0", "**1.50**"' in shown
    assert '"Lightning", "2", "400", "6.0", "95.3"' in shown
    assert "1.50" in peers.text([table])
    drawn = plots.pictures(found)
    assert drawn.keys() == {"peers.svg", "peers-dark.svg"}
    assert "Lightning" in drawn["peers.svg"]
