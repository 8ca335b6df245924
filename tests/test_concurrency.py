"""Concurrent tests overlap, and each has its own outcome."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULE = """
import threading
import pytest

pytestmark = pytest.mark.concurrent(3)
met = threading.Barrier(3, timeout=30)

@pytest.mark.parametrize("number", [1, 2, 3])
def test_all_wait_for_each_other(number, tmp_path, shared):
    met.wait()
    assert number < 3, shared
    (tmp_path / "own").touch(exist_ok=False)

def test_not_here():
    pytest.skip("no such machine")

@pytest.fixture(scope="module")
def shared():
    return "wide scope"
"""


def test_each_has_its_own_outcome(tmp_path):
    (tmp_path / "test_module.py").write_text(MODULE)
    plugins = ("-p", "tests.concurrency", "-p", "no:cacheprovider")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rsf", *plugins, "--rootdir", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "1 failed, 2 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "FAILED test_module.py::test_all_wait_for_each_other[3] - Assert" in done.stdout
    assert "AssertionError: wide scope" in done.stdout
    assert "no such machine" in done.stdout
