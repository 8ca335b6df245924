"""After Ctrl-C: the file that was saved and the command that continues are named, and work."""

import re
import shlex
import signal
import sys

import pytest

from tests.processes import Program, until

pytestmark = pytest.mark.concurrent

SCRIPT = """
import sys, time
import torch, torchbearer
from torch.utils.data import DataLoader, TensorDataset
from tests.programs import short_trial
from torchbearer_ddp import CUT_SHORT, Checkpoint, data_parallel, is_rank_zero, run_distributed

@torchbearer.callbacks.on_step_training
def pause(state):
    if is_rank_zero() and state[torchbearer.EPOCH] == 1:
        print("epoch 1", flush=True)
    time.sleep(0.01)

def train(folder, epochs):
    model = torch.nn.Linear(4, 2)
    callbacks = [*data_parallel(), pause, Checkpoint(folder)]
    trial = short_trial(model, torch.nn.functional.mse_loss, *callbacks)
    data = TensorDataset(torch.randn(40, 4), torch.randn(40, 2))
    trial.with_train_generator(DataLoader(data, batch_size=2)).run(epochs)
    trial.with_val_generator(DataLoader(data, batch_size=2)).evaluate()
    if is_rank_zero():
        print("cut short:", trial.state[CUT_SHORT], flush=True)

if __name__ == "__main__":
    run_distributed(train, (sys.argv[1], int(sys.argv[2])))
"""


@pytest.mark.parametrize("flags", [(), ("--nproc-per-node", "2")], ids=["one", "two"])
def test_the_command_that_is_named_continues_from_the_file_that_is_named(flags, tmp_path):
    path, folder = tmp_path / "script.py", tmp_path / "with space"
    path.write_text(SCRIPT)
    command = (sys.executable, str(path), str(folder), "2000", *flags)
    with Program(*command, raw=True) as program:
        until(lambda: "epoch 1\n" in program.output or program.process.poll() is not None, 60)
        program.process.send_signal(signal.SIGINT)
        assert program.code() == 130, program.text()
        assert "cut short: SIGINT\n" in program.output
        found = re.search(r"; saved (.+\.pt); to continue: (.+)\n", program.said())
        assert found, program.text()
    assert folder / found[1].rpartition("/")[2] == type(folder)(found[1])
    words = shlex.split(found[2])
    assert words == [sys.executable, *command[1:]]
    words[words.index("2000")] = "3"
    with Program(*words, raw=True) as program:
        assert program.code() == 0, program.text()
        assert f"continuing from {found[1]}" in program.said()
        assert program.output[-1] == "cut short: None\n"
