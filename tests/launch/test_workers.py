"""What a worker may be, what comes back, and what a command line shows."""

import os
import sys
import threading
from pathlib import Path

import pytest
import torch

from tests.processes import Program
from torchbearer_ddp import run_distributed
from torchbearer_ddp.errors import LaunchError, WorkerError
from torchbearer_ddp.group import collectives


@pytest.fixture(autouse=True)
def _quiet_command_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["script.py", "--epochs", "3"])
    # Restores the hook that shows errors, which a failed run has changed.
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


class Thing:
    def __init__(self, rank):
        self.rank = rank


def test_closures_lambdas_arguments_and_results_in_rank_order():
    offset = 100

    def local(factor, *, plus):
        return {"sum": offset + factor * collectives.rank() + plus, "thing": torch.ones(2)}

    found = run_distributed(local, (10,), {"plus": 1}, nproc_per_node=2)
    assert [each["sum"] for each in found] == [101, 111]
    assert torch.equal(found[1]["thing"], torch.ones(2))
    found = run_distributed(lambda: Thing(collectives.rank()), nproc_per_node=2)
    assert [type(each) for each in found] == [Thing, Thing]
    assert [each.rank for each in found] == [0, 1]


def test_ranks_have_the_command_line_path_and_folder_of_the_launcher(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "side").mkdir()
    (tmp_path / "side" / "only_here.py").write_text("def answer():\n    return 42\n")
    monkeypatch.syspath_prepend(str(tmp_path / "side"))
    from only_here import answer

    def look():
        return sys.argv, str(Path.cwd()), answer(), os.environ["OMP_NUM_THREADS"]

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    expected = (["script.py", "--epochs", "3"], str(tmp_path), 42, str(threads))
    assert run_distributed(look, nproc_per_node=2) == [expected] * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert run_distributed(look, nproc_per_node=1)[0][3] == "7"


def test_large_payloads_and_results():
    blob = os.urandom(3_000_000)
    assert run_distributed(lambda data: data, (blob,), nproc_per_node=2) == [blob, blob]


def test_seeds_are_alike_on_every_rank_and_follow_the_scripts_own():
    def draw():
        import random

        import numpy

        return torch.rand(1).item(), numpy.random.rand(), random.random()

    torch.manual_seed(5)
    first, second = run_distributed(draw, nproc_per_node=2)
    assert first == second
    assert run_distributed(draw, nproc_per_node=1)[0] == first
    assert run_distributed(draw, nproc_per_node=1, seed=6)[0] != first
    torch.manual_seed(5)
    assert run_distributed(draw, launcher="inline")[0][0] == first[0]


def test_the_device_of_a_single_process():
    def look():
        return str(collectives.device()), collectives.world_size()

    assert run_distributed(look, device="cpu") == [("cpu", 1)]


def test_a_failure_comes_back_with_rank_host_and_traceback():
    def fail():
        if collectives.rank() == 1:
            raise KeyError("a missing column")
        collectives.barrier()

    with pytest.raises(WorkerError, match=r"(?s)^Rank 1 on .* raised KeyError.*in fail") as caught:
        run_distributed(fail, nproc_per_node=2)
    assert (caught.value.rank, caught.value.exitcode) == (1, 1)


def test_a_worker_that_cannot_be_sent_starts_nothing():
    lock = threading.Lock()
    with pytest.raises(LaunchError, match=r"cannot be sent to other processes .*lock"):
        run_distributed(lambda: lock, nproc_per_node=2)


def test_inside_a_worker():
    def nested():
        run_distributed(lambda: 1, nproc_per_node=2)

    with pytest.raises(LaunchError, match="called inside a worker"):
        run_distributed(nested, nproc_per_node=1)
    with pytest.raises(LaunchError, match="called inside a worker"):
        run_distributed(nested)
    assert run_distributed(lambda: 1) == [1]


def test_two_launches_from_two_threads():
    found = {}

    def launch(name):
        found[name] = run_distributed(
            lambda: collectives.all_gather(name, "names"), nproc_per_node=2
        )

    threads = [threading.Thread(target=launch, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert found == {name: [[name, name]] * 2 for name in "ab"}


def test_bad_arguments_are_value_errors():
    with pytest.raises(ValueError, match="nproc_per_node is 0"):
        run_distributed(lambda: 1, nproc_per_node=0)
    with pytest.raises(ValueError, match="no argument nprocs; it has backend"):
        run_distributed(lambda: 1, nprocs=2)


NOTEBOOK = """
import pickle, torch
from torchbearer_ddp import rank, run_distributed

class Net(torch.nn.Linear):
    pass

def cell():
    net = pickle.loads(pickle.dumps(Net(1, 1)))  # as a checkpoint of a whole model would
    return [rank(), type(net).__name__]

print(run_distributed(cell, nproc_per_node=2))
"""


def test_a_notebook_has_no_file():
    with Program(sys.executable, "-c", NOTEBOOK, raw=True) as program:
        assert program.code() == 0, program.text()
        assert program.output == ["[[0, 'Net'], [1, 'Net']]\n"]


@pytest.mark.parametrize(
    ("flags", "environment", "complaint"),
    [
        (("--nproc-per-node", "0"), {}, "--nproc-per-node is 0; it must be a whole number from 1"),
        (
            ("--nproc-per-node", "x"),
            {},
            "Argument --nproc-per-node: 'x' is neither a number nor gpu",
        ),
        (("--rank", "3", "--world-size", "2", "--host", "h"), {}, "--rank is 3 but --world-size"),
        (("--launcher", "ssh"), {}, "--launcher is 'ssh'; it can be auto, inline"),
        ((), {"RANK": "0"}, "The environment has RANK=0 but not WORLD_SIZE"),
    ],
)
def test_the_command_line_shows_one_line_and_exits_with_2(flags, environment, complaint):
    with Program("sum.py", "10", *flags, environment=environment) as program:
        assert program.code() == 2
        assert program.output == []
        (line,) = program.errors
        assert line.startswith(f"torchbearer_ddp: {complaint}")
