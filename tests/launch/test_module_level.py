"""A started rank has what the script sets up: its module level, its classes, settings of torch."""

import re
import sys

import pytest

from tests.processes import Program
from torchbearer_ddp.launch.starting import VARIABLE

pytestmark = pytest.mark.concurrent


@pytest.mark.parametrize(
    ("worker", "method", "ranks", "start"),
    [("object", "spawn", 2, "fork"), ("partial", "forkserver", 1, "spawn")],
)
def test_a_rank_sees_what_one_process_sees(worker, method, ranks, start):
    words = ("module_level.py", worker, method)
    several = (*words, "--nproc-per-node", str(ranks))
    with Program(*words) as alone, Program(*several, environment={VARIABLE: start}) as program:
        assert alone.code() == 0, alone.text()
        assert program.code() == 0, program.text()
        assert "'dtype': 'torch.float64', 'deterministic': True" in alone.output[0]
        assert program.output == alone.output * ranks
        assert "INFO says " in program.text()


UNGUARDED = """
import sys
from pathlib import Path
import torch
from torchbearer_ddp import rank, run_distributed

sys.path.append(Path("a folder"))  # which Python passes over
torch.set_default_dtype(torch.float64)
print("module level")

class Thing:
    pass

def work():
    return str(torch.get_default_dtype()), Thing()

for dtype, thing in run_distributed(work):
    print(dtype, type(thing) is Thing)
print("never on a rank")
"""


@pytest.mark.parametrize(("method", "times"), [("fork", 1), ("forkserver", 2), ("spawn", 3)])
def test_without_a_guard_a_rank_runs_up_to_the_launch(method, times, tmp_path):
    path = tmp_path / "unguarded.py"
    path.write_text(UNGUARDED)
    command = (sys.executable, str(path), "--nproc-per-node", "2")
    with Program(*command, environment={VARIABLE: method}, raw=True) as program:
        assert program.code() == 0, program.text()
        expected = ["torch.float64 True\n"] * 2 + ["never on a rank\n"]
        assert program.output == ["module level\n"] * times + expected


NOTEBOOK = """
import torch, torchbearer
from torchbearer import metrics
from torchbearer_ddp import run_distributed

@metrics.default_for_key("half")
class Half(metrics.Metric):
    def __init__(self):
        super().__init__("half")

torch.set_default_dtype(torch.float64)

def look():
    torchbearer.Trial(None, metrics=["half"])
    return str(torch.get_default_dtype())

print(run_distributed(look, nproc_per_node=1))
"""


def test_a_notebook_has_no_file_but_its_metrics_and_settings_arrive():
    with Program(sys.executable, "-c", NOTEBOOK, raw=True) as program:
        assert program.code() == 0, program.text()
        assert program.output == ["['torch.float64']\n"]


LOADING = """
import torch
from torch.utils.data import DataLoader
from torchbearer_ddp import run_distributed

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return index

def work():
    return list(DataLoader(Numbers(), num_workers=1, multiprocessing_context="spawn"))

run_distributed(work)
"""


def test_a_loader_with_spawn_needs_the_guard(tmp_path):
    path = tmp_path / "loading.py"
    path.write_text(LOADING)
    with Program(sys.executable, str(path), "--nproc-per-node", "1", raw=True) as program:
        assert program.code() == 1, program.text()
        assert "Put the call under if __name__ == '__main__'." in program.text()


@pytest.mark.parametrize(("method", "ranks"), [("forkserver", "2"), ("spawn", "1")])
def test_an_error_at_module_level_is_shown_with_its_line(method, ranks, tmp_path):
    path = tmp_path / "once.py"
    path.write_text("open('marker', 'x')\n" + UNGUARDED)
    command = ("env", "-C", str(tmp_path), sys.executable, str(path), "--nproc-per-node", ranks)
    with Program(*command, environment={VARIABLE: method}, raw=True) as program:
        assert program.code() == 1, program.text()
        assert re.search("torchbearer_ddp: Rank [01] on ", program.text())
        assert 'once.py", line 1, in <module>' in program.text()
        assert "FileExistsError" in program.text()
