"""``python -m torchbearer_ddp doctor --script``: how much faster a script is on more ranks."""

import json
import re
import signal
import sys

import pytest

from tests import proc
from tests.processes import Program, bound, free_port, until
from torchbearer_ddp import LaunchError
from torchbearer_ddp.commands.examining import prediction, scaling
from torchbearer_ddp.commands.examining.prediction import Speed, best, link_of, over_link, speed_of
from torchbearer_ddp.commands.examining.timed_run import (
    FEWEST,
    PLAIN,
    WARM_UP,
    Timed,
    measure,
)

SCRIPT = """
import pathlib, sys, time
import torch, torchbearer
from torch.utils.data import DataLoader, TensorDataset
from torchbearer_ddp import Checkpoint, data_parallel, run_distributed

FOLDER = pathlib.Path(__file__).parent

def train(count, pause):
    x = torch.randn(count, 4)
    model = torch.nn.Linear(4, 2)
    work = torchbearer.callbacks.on_sample(lambda state: time.sleep(pause))
    callbacks = [*data_parallel(), Checkpoint(FOLDER / 'runs'), work]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = torch.nn.functional.mse_loss
    trial = torchbearer.Trial(model, optimizer, loss, callbacks=callbacks, verbose=0)
    trial.with_train_generator(DataLoader(TensorDataset(x, x[:, :2]), 8)).run(2)
    (FOLDER / 'ended').touch()

if __name__ == '__main__':
    print('a line of the script')
    if sys.argv[1] == 'fail':
        raise KeyError('age')
    run_distributed(train, (int(sys.argv[1]), float(sys.argv[2])))
"""


def script_in(folder):
    path = folder / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.concurrent
def test_a_script_is_timed_on_more_and_more_ranks(tmp_path):
    script = script_in(tmp_path)
    # Each step sleeps for 0.1 s, so no step is shorter, whatever else the machine does.
    flags = ("--nproc-per-node", "2", "--seconds", "0.5", "--link", "1gbit", "--json")
    command = (sys.executable, "-m", "torchbearer_ddp", "doctor", *flags)
    words = ("--script", str(script), "2000", "0.1")
    with Program(*command, *words, raw=True) as program:
        assert program.code(120) == 0, program.text()
        found = json.loads("".join(program.output))
    one, two = found["speeds"][:2]
    assert [each["ranks"] for each in found["speeds"]] == [1, 2, 4, 8]
    assert [each["measured"] for each in found["speeds"]] == [True, True, False, False]
    assert one["seconds"] > 0.1
    assert two["seconds"] > 0.1
    assert one["samples"] == pytest.approx(8 / one["seconds"])
    assert two["samples"] == pytest.approx(16 / two["seconds"])
    assert two["speed-up"] == pytest.approx(two["samples"] / one["samples"])
    assert found["gradient bytes"] == 40
    assert not (script.parent / "ended").exists()
    assert not (script.parent / "runs").exists()
    assert "a line of the script" not in program.text()


@pytest.mark.concurrent
def test_a_script_is_timed_where_each_rank_has_its_own_command(tmp_path):
    place = ("--world-size", "2", "--host", "127.0.0.1", "--port", str(free_port()))
    command = (sys.executable, "-m", "torchbearer_ddp", "doctor", *place, "--seconds", "0.5")
    words = ("--script", str(script_in(tmp_path)), "2000", "0.1")
    with (
        Program(*command, "--rank", "0", "--json", *words, raw=True) as zero,
        Program(*command, "--rank", "1", *words, raw=True) as one,
    ):
        codes = [zero.code(120), one.code(120)]
        assert codes == [0, 0], zero.text() + one.text()
        found = json.loads("".join(zero.output))
        assert one.output == []
    assert [each["ranks"] for each in found["speeds"]] == [1, 2]
    assert found["speeds"][1]["measured"]
    assert found["speeds"][1]["seconds"] > 0.1


def time_alone(script, *words, limit=None):
    launch = {"launcher": "inline", "device": "cpu"}
    return measure([str(script), *words], False, launch, 5, 1.0, limit or bound(60))


@pytest.mark.concurrent
def test_a_script_that_fails_shows_its_own_error(tmp_path):
    script = script_in(tmp_path)
    with pytest.raises(LaunchError, match=r"(?s)failed\. The end of its output:.*KeyError: 'age'"):
        time_alone(script, "fail")


@pytest.mark.concurrent
def test_a_script_with_too_few_steps_is_refused(tmp_path):
    script = script_in(tmp_path)
    few = 8 * (WARM_UP + FEWEST) // 2
    with pytest.raises(LaunchError, match="has fewer than 9 training steps"):
        time_alone(script, str(few), "0")
    assert (script.parent / "ended").exists()


@pytest.mark.concurrent
def test_a_script_that_takes_too_long_is_ended(tmp_path):
    script = script_in(tmp_path)
    with pytest.raises(LaunchError, match=r"did not do its first steps within 0\.2 s"):
        time_alone(script, "80", "60", limit=0.2)


WAITING = """
import os, signal, time
from pathlib import Path
import torch
from torchbearer_ddp import run_distributed

def work():
    torch.save(1, "saved.pt")  # among the temporary files
    Path(f"begun-{os.getpid()}").touch()
    # As in native code: nothing but SIGKILL ends it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    time.sleep(600)

run_distributed(work)
"""


def test_what_a_script_saved_is_removed_if_it_takes_too_long(tmp_path, monkeypatch):
    (script := tmp_path / "script.py").write_text(WAITING)
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)
    launch = {"nproc_per_node": 2, "device": "cpu"}
    with pytest.raises(LaunchError, match="did not do its first steps within"):
        measure([str(script)], False, launch, 5, 1.0, bound(8))
    begun = [int(each.name.partition("-")[2]) for each in tmp_path.glob("begun-*")]
    assert len(begun) == 2
    until(lambda: not any(map(proc.is_running, begun)), 10)
    assert list(temporary.iterdir()) == []


@pytest.mark.concurrent
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_stopped_measurement_leaves_no_process_behind(signum, code, tmp_path):
    (tmp_path / "script.py").write_text(WAITING)
    (temporary := tmp_path / "temporary").mkdir()
    words = ("doctor", "--nproc-per-node", "2", "--script", "script.py")
    command, place = (sys.executable, "-m", "torchbearer_ddp", *words), {"TMPDIR": str(temporary)}
    with Program(*command, raw=True, folder=tmp_path, environment=place) as program:
        until(lambda: list(tmp_path.glob("begun-*")), 60)
        program.process.send_signal(signum)
        assert program.code(30) == code, program.text()
        until(lambda: not program.alive(), 10)
    if signum == signal.SIGTERM:
        assert list(temporary.iterdir()) == []


# The prediction.

TIMED = Timed(20, 0.1, 32, 0.0, 0.0, 25_000_000)


def speeds(*samples, exchange=0.0):
    """1, 2, 4, ... ranks with these samples a second."""
    ranks = [2**power for power in range(len(samples))]
    return [
        Speed(n, 1, 32 * n / rate, exchange * (n > 1), rate)
        for n, rate in zip(ranks, samples, strict=True)
    ]


@pytest.mark.parametrize(
    ("samples", "use"),
    [
        ((100, 190, 360), 4),
        ((100, 170, 180), 2),
        ((100, 110, 120), 1),
        ((100, 90, 80), 1),
        ((100, 115, 200), 4),
        ((100, 110, 135), 1),
    ],
)
def test_the_number_of_ranks_after_which_more_are_hardly_faster(samples, use):
    assert best(speeds(*samples)).ranks == use


def test_advice_names_what_limits():
    lines = prediction.advice(speeds(100, 170, 180))
    assert lines[0] == "Times as fast as one process: 2 ranks 1.7, 4 ranks 1.8."
    assert lines[1] == "Use 2 ranks; the cores of this host limit beyond that."
    lines = prediction.advice(speeds(100, 170, 180, exchange=0.4))
    assert "the exchange of gradients limits beyond that (56% of a step)" in lines[1]
    assert "accumulate=" in lines[2]
    assert prediction.advice(speeds(100, 190))[1] == "Use 2 ranks; more may be faster still."
    assert "2 ranks cannot be 3.0 times as fast" in prediction.advice(speeds(100, 300))[1]


def test_a_slow_link_is_predicted_and_compression_recommended():
    single = speed_of(1, TIMED)
    assert (single.samples, single.seconds) == (320, 0.1)
    slow = over_link(single, TIMED, 2, link_of("1gbit"), 0.01)
    assert slow.seconds == pytest.approx(0.1 + 0.2)  # 25 MB at 125 MB/s
    assert slow.samples == pytest.approx(64 / slow.seconds)
    half = over_link(single, TIMED, 2, link_of("1gbit"), 0.03, compress=True)
    assert half.seconds == pytest.approx(0.1 + 0.1)
    lines = prediction.advice([single, slow], half)
    assert "Use one process; the link between the hosts limits beyond that (67% of" in lines[1]
    expected = "sends half the bytes between hosts: 2 ranks on 2 hosts would be 1.0 times as fast."
    assert lines[3] == f"SyncGradients(compress='bf16') {expected}"
    assert lines[4].startswith("SyncGradients(compress='int8') sends a quarter")
    text = prediction.text("train.py", [single, slow], TIMED)
    assert "predicted" in text
    assert "gradients of 25.0 MB" in text


def test_a_fast_link_leaves_the_hosts_own_work():
    """Compression is not recommended where rounding takes longer than the link."""
    single, fast = speed_of(1, TIMED), link_of("100gbit")
    plain = over_link(single, TIMED, 2, fast, 0.02)
    half = over_link(single, TIMED, 2, fast, 0.05, compress=True)
    assert plain.seconds == pytest.approx(0.1 + 0.02)
    assert half.seconds == pytest.approx(0.1 + 0.05)
    assert over_link(single, TIMED, 4, fast, 0.02).seconds == pytest.approx(0.1 + 1.5 * 0.02)
    assert not any("compress" in line for line in prediction.advice([single, plain], half))


@pytest.mark.concurrent
@pytest.mark.parametrize("wire", [PLAIN, "bf16"])
def test_gradients_of_a_timed_script_travel_as_between_hosts(tmp_path, wire):
    """The script says at its end which way they took."""
    script = script_in(tmp_path)
    told = "options = callbacks[2]._exchange.averager._options"
    told += "; raise KeyError(options.transport, options.compress.kind)"
    script.write_text(script.read_text().replace("(FOLDER / 'ended').touch()", told))
    launch = {"nproc_per_node": 2, "device": "cpu"}
    few = str(16 * (WARM_UP + FEWEST) // 2)
    expected = re.escape(str(("gloo", None if wire == PLAIN else wire)))
    with pytest.raises(LaunchError, match=f"KeyError: {expected}"):
        measure([str(script), few, "0"], False, launch, 5, 1.0, bound(60), wire)


@pytest.mark.parametrize(
    ("text", "rate"),
    [("1gbit", 125e6), ("110MB/s", 110e6), ("10 Gbit/s", 1.25e9), ("800kbit", 1e5), ("5e", None)],
)
def test_speeds_of_links(text, rate):
    if rate is None:
        with pytest.raises(ValueError, match="'5e' is no speed"):
            link_of(text)
    else:
        assert link_of(text) == rate


def test_sizes():
    assert [scaling._sizes(most) for most in (1, 2, 4, 6)] == [[], [2], [2, 4], [2, 4, 6]]
