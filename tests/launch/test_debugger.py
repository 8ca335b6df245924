"""``breakpoint()``: one rank has the terminal, the others wait; without one, a sentence."""

import os
import sys

import pytest

from tests.processes import Program, until
from tests.terminal import TerminalProgram

pytestmark = pytest.mark.concurrent

SCRIPT = """
import dataclasses
from torchbearer_ddp import barrier, rank, run_distributed
from torchbearer_ddp.group import membership

def work():
    barrier()
    group, member = membership.current(), membership.current().member
    group.member = dataclasses.replace(member, timeout=3.0)  # for one wait
    group.past_first_step = True
    print("before", rank())
    secret = 40 + rank()
    breakpoint()
    barrier()
    group.member = member
    print("secret", secret)
    barrier()

if __name__ == "__main__":
    run_distributed(work)
    print("all have ended")
"""


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    path = tmp_path_factory.mktemp("debugger") / "script.py"
    path.write_text(SCRIPT)
    return (sys.executable, str(path), "--nproc-per-node", "2")


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_has_the_terminal_and_the_other_waits(command, rank, tmp_path):
    logs = tmp_path / "logs"
    flags = ("--debug-rank", str(rank), "--log-dir", str(logs))
    with TerminalProgram(*command, *flags, raw=True) as program:
        program.until("(Pdb) ")
        # From Python 3.13 on it stops at the call itself, before that in the line after it.
        line = 13 if sys.version_info >= (3, 13) else 14
        place = f"script.py:{line}; the others wait for it, without a timeout"
        assert f"torchbearer_ddp: rank {rank} is in the debugger at " in program.text()
        assert place in program.text()
        other = logs / f"rank-{1 - rank}.log"
        waits = f"rank {1 - rank} waits without a timeout: rank {rank} is in the debugger at"
        _wait_longer_than_the_timeout(program, other, waits)
        program.type("p 1000 + secret\n")
        program.until(f"{1040 + rank}")
        program.type("secret = 7\n")
        program.type("continue\n")
        assert program.code() == 0, program.text()
        lines = program.screen()
        assert f"[rank {rank}] secret 7" in lines
        assert f"[rank {1 - rank}] secret {41 - rank}" in lines
        passes = f"[rank {1 - rank}] torchbearer_ddp: rank {1 - rank} does not stop at breakpoint()"
        assert any(line.startswith(passes) for line in lines)
        assert lines.index(f"[rank {rank}] before {rank}") < lines.index("all have ended")


def _wait_longer_than_the_timeout(program, log, waits):
    """Until the other rank has said so, and then for as long as its wait could have taken."""
    until(lambda: log.exists() and waits in log.read_text(), 30)
    program.type("import time; time.sleep(7); print('slept' * 2)\n")
    program.until("sleptslept")


def test_ctrl_c_in_the_debugger_ends_the_run(command):
    with TerminalProgram(*command, "--grace", "300", raw=True) as program:
        program.until("(Pdb) ")
        os.killpg(program.process.pid, 2)  # what the terminal sends to its foreground
        assert program.code() == 130, program.text()
        assert "all have ended" not in program.text()
        assert not program.alive()


TRAINING = """
import torch, torchbearer
from tests.programs import short_trial
from torch.utils.data import DataLoader, TensorDataset
from torchbearer_ddp import Checkpoint, CUT_SHORT, data_parallel, rank, run_distributed

def work(folder):
    model = torch.nn.Linear(4, 2)

    @torchbearer.callbacks.on_step_training
    def look(state):
        if (state[torchbearer.EPOCH], state[torchbearer.BATCH]) == (0, 3):
            breakpoint()
        elif (state[torchbearer.EPOCH], rank()) == (1, 0):
            print("trains", flush=True)

    parts = (*data_parallel(), look, Checkpoint(folder, every_epochs=10**6))
    trial = short_trial(model, torch.nn.functional.mse_loss, *parts)
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 2))
    trial.with_train_generator(DataLoader(data, batch_size=4)).run(10**6)
    print("cut short by", trial.state[CUT_SHORT])

if __name__ == "__main__":
    import sys
    run_distributed(work, (sys.argv[1],), nproc_per_node=2, grace=300.0)
"""


@pytest.mark.parametrize("typed", ["", "continue\n", "import time; time.sleep(1000)\n"])
def test_ctrl_c_in_the_debugger_saves_as_always(tmp_path, typed):
    (tmp_path / "training.py").write_text(TRAINING)
    folder = str(tmp_path / "checkpoints")
    with TerminalProgram(
        sys.executable, str(tmp_path / "training.py"), folder, raw=True
    ) as program:
        program.until("(Pdb) ")
        if typed:
            program.type(typed)
            program.until("trains" if typed.startswith("continue") else "sleep(1000)")
        os.killpg(program.process.pid, 2)
        assert program.code() == 130, program.text()
        assert "cut short by SIGINT" in program.text()
        assert "got SIGINT, all ranks have ended; saved " in program.text()


def test_without_a_terminal_a_sentence_says_what_to_do(command):
    with Program(*command, raw=True) as program:
        assert program.code() == 0, program.text()
        said = program.said()
        assert said.count("does not stop at breakpoint()") == 1
        assert "rank 0 does not stop at breakpoint() in " in said
        assert "there is no terminal for a debugger. Start the script in one, with" in said
    with Program(*command, raw=True, environment={"PYTHONBREAKPOINT": "0"}) as program:
        assert program.code() == 0, program.text()
        assert program.said() == ""
