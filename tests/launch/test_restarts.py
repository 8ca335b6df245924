"""After a failure the ranks start again: from the newest checkpoint, and not for ever."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.processes import Program
from torchbearer_ddp import WorkerError
from torchbearer_ddp.group import launcher
from torchbearer_ddp.launch.restarts import Failure, Restarts

pytestmark = pytest.mark.concurrent

TRAINING = """
import hashlib, os, sys
from pathlib import Path
import torch, torchbearer
from torch.utils.data import DataLoader, TensorDataset
from tests.programs import parameters, short_trial
from torchbearer_ddp import Checkpoint, add_arguments, data_parallel
from torchbearer_ddp import rank, run_distributed, world_size

def work(folder, events):
    torch.manual_seed(1)
    events = dict(each.split(":") for each in events.split(",") if each)
    model = torch.nn.Linear(4, 2)

    @torchbearer.callbacks.on_sample
    def happen(state):
        step = 10 * state[torchbearer.EPOCH] + state[torchbearer.BATCH] + 1
        what = events.get(str(step))
        mark = Path(folder + f"-{step}")
        if what is None or rank() != 1 or (what != "always" and mark.exists()):
            return
        mark.touch()
        if what == "kill":
            os.kill(os.getpid(), 9)
        raise ValueError(f"in step {step}")

    saving = Checkpoint(folder, every_steps=3, resume=False)
    trial = short_trial(model, torch.nn.functional.mse_loss, *data_parallel(), happen, saving)
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(80, size, generator=generator) for size in (4, 2))
    data = TensorDataset(x, y)
    trial.with_train_generator(DataLoader(data, batch_size=8 // world_size(), shuffle=True)).run(2)
    return hashlib.sha256(parameters(model).numpy().tobytes()).hexdigest()

if __name__ == "__main__":
    import argparse
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--events", default="")
    options = add_arguments(parser).parse_args()
    for result in run_distributed(work, (options.folder, options.events), options=options, seed=5):
        os.write(1, f"result {result}\\n".encode())
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("restarts") / "training.py"
    path.write_text(TRAINING)
    return str(path)


def run(script, folder, *flags, code=0, events="", before=("--nproc-per-node", "2")):
    words = [script, str(folder / "checkpoints"), "--events", events]
    command = [*before, *words, *flags] if before[0] == "-m" else [*words, *before, *flags]
    with Program(sys.executable, *command, raw=True) as program:
        assert program.code(150) == code, program.text()
        return [line.split()[1] for line in program.output if "result" in line], program.text()


def test_a_run_that_failed_twice_ends_as_one_that_did_not(script, tmp_path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "restarted").mkdir()
    whole, _ = run(script, tmp_path / "whole")
    found, text = run(
        script, tmp_path / "restarted", "--max-restarts", "3", events="5:raise,14:kill"
    )
    assert found == whole
    assert len(set(whole)) == 1
    folder = re.escape(str(tmp_path / "restarted" / "checkpoints"))
    assert re.search(
        r"attempt 1 failed at step 5\. Rank 1 on \S+ raised ValueError: in step 5\n\nTraceback.*"
        rf"The ranks start again from {folder}/step-0000003\.pt \(restart 1 of at most 3\)\n.*"
        r"attempt 2 failed at step 14\. Rank 1 on \S+ was killed by SIGKILL\..*"
        rf"The ranks start again from {folder}/step-0000012\.pt \(restart 2 of at most 3\)\n",
        text,
        re.DOTALL,
    ), text


def test_a_failure_that_comes_back_at_the_same_step_ends_it(script, tmp_path):
    found, text = run(script, tmp_path, "--max-restarts", "9", code=1, events="2:always")
    assert found == []
    assert "The ranks start again from the beginning: no checkpoint was saved" in text
    assert len(re.findall(r"  attempt \d: at step 2: Rank 1 on \S+ raised ValueError", text)) == 3
    assert "It fails at step 2 each time, so the ranks do not start again." in text


LATE = """
import atexit, os
from torchbearer_ddp import rank, run_distributed
from torchbearer_ddp.group import launcher

def work():
    if rank() == 1 and launcher.RESTARTS_VARIABLE not in os.environ:
        atexit.register(launcher.note_saved, "late.pt")
        raise ValueError("early")
    return launcher.is_restarted()

if __name__ == "__main__":
    print("resumes", run_distributed(work, nproc_per_node=2, max_restarts=1))
"""


def test_a_checkpoint_that_is_complete_only_after_the_failure_counts(tmp_path):
    path = tmp_path / "late.py"
    path.write_text(LATE)
    with Program(sys.executable, str(path), raw=True) as program:
        assert program.code(90) == 0, program.text()
        text = program.text()
    assert "The ranks start again from late.pt (restart 1 of at most 1)" in text
    assert "resumes [True, True]" in text


STOPPING = """
import os, time
from torchbearer_ddp import barrier, rank, run_distributed

def work():
    barrier()
    print("rank", rank(), "pid", os.getpid(), flush=True)
    try:
        time.sleep(600)
    finally:
        if rank() == 1:
            raise ValueError("cannot save")

if __name__ == "__main__":
    run_distributed(work, nproc_per_node=2, max_restarts=1)
"""


@pytest.mark.parametrize("receiver", ["launcher", "rank"])
def test_an_error_while_stopping_for_a_signal_does_not_start_the_ranks_again(receiver, tmp_path):
    path = tmp_path / "stopping.py"
    path.write_text(STOPPING)
    with Program(sys.executable, str(path), raw=True) as program:
        first = program.pids(2)[0]
        os.kill(program.process.pid if receiver == "launcher" else first, signal.SIGTERM)
        assert program.code() == 1, program.text()
        assert "ValueError: cannot save" in program.said()
        assert "start again" not in program.said()


def test_torchruns_own_restarts_and_a_changed_number_of_ranks(script, tmp_path):
    command = (
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
    )
    # torchrun's second failure ends it; what was saved by then serves a run on another number.
    text = Path(script).read_text().replace(", resume=False", "")
    path = tmp_path / "training.py"
    path.write_text(text)
    _, text = run(str(path), tmp_path, code=1, events="5:raise,14:kill", before=command)
    assert "step-0000003.pt (epochs done: 0, steps in all: 3)" in text
    found, text = run(str(path), tmp_path, before=("--nproc-per-node", "1"))
    assert len(found) == 1
    assert "step-0000012.pt (epochs done: 1, steps in all: 12)" in text


# The decision, without processes.


class Attempt:
    """Fails as it is told, or succeeds."""

    def __init__(self, failure, checkpoint=None):
        self.failure, self.checkpoint = failure, checkpoint

    def run(self, worker):
        if self.failure is None:
            return ["result"]
        raise WorkerError(f"Rank 1 on here {self.failure.kind}\n\nTraceback", rank=1, exitcode=7)


def attempts(most, *failures):
    """The result or the error of these attempts, and the variables of each."""
    left, variables = list(failures), []

    def start(number, given):
        assert number == len(variables)
        variables.append(given)
        return left.pop(0)

    try:
        return Restarts(most, start).run(None), variables
    except WorkerError as error:
        return error, variables


def failed(step, kind="raised ValueError", checkpoint=None):
    return Attempt(Failure(kind, step), checkpoint)


def test_without_restarts_the_error_is_as_it_is():
    error, variables = attempts(0, failed(3))
    assert str(error) == "Rank 1 on here raised ValueError\n\nTraceback"
    assert variables == [{}]


def test_the_count_and_the_checkpoint_are_handed_on():
    result, variables = attempts(3, failed(1), failed(5, checkpoint="a"), failed(6), Attempt(None))
    assert result == ["result"]
    counts = [each.get(launcher.RESTARTS_VARIABLE) for each in variables]
    assert counts == [None, "1", "2", "3"]
    assert [launcher.RESUME_VARIABLE in each for each in variables] == [False, False, True, True]


def test_every_attempt_is_named_when_they_are_used_up():
    error, _ = attempts(2, failed(1), failed(None, "was killed"), failed(9))
    assert str(error).endswith(
        "  attempt 1: at step 1: Rank 1 on here raised ValueError\n"
        "  attempt 2: before the first step: Rank 1 on here was killed\n"
        "  attempt 3: at step 9: Rank 1 on here raised ValueError\n"
        "--max-restarts is 2: the ranks do not start again."
    )
    assert (error.rank, error.exitcode) == (1, 7)


@pytest.mark.parametrize(
    ("failures", "place"),
    [
        ([failed(4)] * 3, "at step 4"),
        ([failed(4), failed(6), failed(4), failed(4)], "at step 4"),
        ([failed(None)] * 3, "before the first step"),
    ],
)
def test_the_same_failure_three_times_is_enough(failures, place):
    error, variables = attempts(99, *failures)
    assert len(variables) == len(failures)
    assert f"It fails {place} each time, so the ranks do not start again." in str(error)


def test_another_failure_at_the_same_step_is_another_one():
    others = [failed(4, f"raised {name}Error") for name in ("Key", "OS", "Value")]
    result, _ = attempts(99, *others, Attempt(None))
    assert result == ["result"]
