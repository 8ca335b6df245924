"""A Trial under torchrun or srun joins by itself: no run_distributed, and nothing else changes."""

import contextlib
import re
import sys

import pytest

from tests.processes import Program, free_port, slurm_step

pytestmark = pytest.mark.concurrent


def torchrun(rank, port):
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


@contextlib.contextmanager
def two_ranks(what, environment=torchrun):
    port = str(free_port())
    with (
        Program("two_lines.py", what, "4", environment=environment(0, port)) as zero,
        Program("two_lines.py", what, "4", environment=environment(1, port)) as one,
    ):
        yield zero, one


def test_two_ranks_train_as_one_process_with_their_batches_together():
    with (
        two_ranks("train") as (zero, one),
        two_ranks("launch", slurm_step) as (first, second),
        Program("two_lines.py", "train", "8") as alone,
    ):
        ranks = (zero, one, first, second)
        codes = [p.code() for p in (*ranks, alone)]
        assert codes == [0] * 5, "".join(p.text() for p in ranks)
        assert all(each.output[-1:] == alone.output for each in ranks)
        # A script that calls run_distributed as well: its worker runs on the rank that it is.
        assert (first.output[0], second.output[0]) == ("[(0, 2)]\n", "[(1, 2)]\n")
        ignored = "this script is rank 0 of 2, started by srun; run_distributed ignores nproc_per"
        assert ignored in first.text()
        assert zero.text().count("2 ranks") == 2  # on which hosts, and the transport
        assert "from the Slurm step of job" in first.text()
        assert one.said() == second.said() == alone.said() == ""


def test_ranks_that_drew_other_numbers_continue_alike_with_a_warning():
    with two_ranks("unseeded") as (zero, one):
        assert [p.code() for p in (zero, one)] == [0, 0], zero.text() + one.text()
        assert zero.output == one.output
        assert "each rank has drawn other random numbers so far (torch): a random" in zero.text()
        assert one.said() == ""


def test_an_error_ends_all_ranks_with_its_cause():
    with two_ranks("raise") as (zero, one):
        assert [p.code(20) for p in (zero, one)] == [1, 1], zero.text() + one.text()
        assert one.said().startswith("torchbearer_ddp: Rank 1 on ")
        assert "raised KeyError: 'a missing column'\nTraceback" in one.said()
        assert re.search(r"Rank 1 on .* raised KeyError.*\(Rank 0 stopped because", zero.said())
        assert "Traceback" not in zero.said()


def test_an_exit_code_stays_and_the_others_end():
    with two_ranks("exit") as (zero, one):
        assert [p.code(20) for p in (zero, one)] == [1, 3], zero.text() + one.text()


def test_a_signal_stops_all_ranks_at_one_step():
    with two_ranks("signal") as (zero, one):
        assert [p.code(20) for p in (zero, one)] == [143, 143], zero.text() + one.text()
        assert zero.output == one.output != []


def test_a_step_of_one_task_stays_alone_and_says_how_to_start_more():
    single = {**slurm_step(0, "77"), "SLURM_NTASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    with Program("two_lines.py", "train", "8", environment=single) as program:
        assert program.code() == 0, program.text()
        assert "1 process (from the Slurm step of job 77; 'srun --ntasks N" in program.text()


def test_half_an_environment_is_refused():
    with Program("two_lines.py", "train", "8", environment={"RANK": "0"}) as program:
        assert program.code() == 2
        (line,) = program.errors
        assert line.startswith("torchbearer_ddp: The environment has RANK=0 but not WORLD_SIZE")


OWN_GROUP = """
import torch.distributed as dist
from torchbearer_ddp import barrier, rank

dist.init_process_group("gloo")
barrier()
if rank() == 1:
    raise KeyError("a missing column")
barrier()
"""


def test_a_group_of_the_users_own_reports_errors_too():
    port = str(free_port())
    command = (sys.executable, "-c", OWN_GROUP)
    with (
        Program(*command, environment=torchrun(0, port), raw=True) as zero,
        Program(*command, environment=torchrun(1, port), raw=True) as one,
    ):
        assert [p.code(20) for p in (zero, one)] == [1, 1], zero.text() + one.text()
        assert "Rank 1 on " in zero.text()
        assert "raised KeyError: 'a missing column'" in zero.text()


ENDS_AT_ONCE = """
import atexit, sys
from pathlib import Path

def threads():
    return set(Path("/proc/self/task").iterdir())

def left():
    return [each for each in threads() - before if "gloo" in (each / "comm").read_text()]

atexit.register(lambda: print("threads left:", len(left())))  # called last
before = threads()

import torch.distributed as dist
from torchbearer_ddp.group import collectives

dist.init_process_group("gloo")
if "destroyed" not in sys.argv:
    before = threads()
assert collectives.all_gather(collectives.rank(), "ranks") == [0, 1]
if "destroyed" in sys.argv:
    dist.destroy_process_group()
assert left()
"""


@pytest.mark.parametrize("group", ["left open", "destroyed"])
def test_no_thread_of_ours_outlives_a_script_with_a_group_of_its_own(group):
    """A thread of gloo that puts down its last message while Python ends aborts the process."""
    port = str(free_port())
    command = (sys.executable, "-c", ENDS_AT_ONCE, group)
    with (
        Program(*command, environment=torchrun(0, port), raw=True, fresh=True) as zero,
        Program(*command, environment=torchrun(1, port), raw=True, fresh=True) as one,
    ):
        assert [p.code(40) for p in (zero, one)] == [0, 0], zero.text() + one.text()
        assert zero.output == one.output == ["threads left: 0\n"]
