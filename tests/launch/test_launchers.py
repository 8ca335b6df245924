"""The launch matrix: every way to start the same script, with real processes."""

import sys

import pytest

from tests.hosts import hosts
from tests.processes import SCRIPTS, Program, free_port, slurm_step

pytestmark = pytest.mark.concurrent

SUM = str(SCRIPTS / "sum.py")


def results(*programs):
    """What the programs printed, each the list of the results of the ranks that it started."""
    found = []
    for program in programs:
        assert program.code() == 0, program.text()
        found += [eval(line) for line in program.output]
    return sorted(item for each in found for item in each)


def test_one_process():
    with Program("sum.py", "10") as program:
        assert results(program) == [[0, 1, 0, 10.0]]
        assert program.text().count("torchbearer_ddp: 1 process (no launch flags") == 1


def test_local_processes():
    with Program("sum.py", "10", "--nproc-per-node", "2") as program:
        assert results(program) == [[0, 2, 0, 21.0], [1, 2, 1, 21.0]]
        line = "torchbearer_ddp: 2 ranks on this host (from --nproc-per-node 2), gloo on cpu, "
        assert program.text().count(line) == 1
        assert not program.alive()


def test_two_launches_at_once_do_not_meet():
    with (
        Program("sum.py", "10", "--nproc-per-node", "2") as one,
        Program("sum.py", "20", "--nproc-per-node", "2") as other,
    ):
        assert results(one) == [[0, 2, 0, 21.0], [1, 2, 1, 21.0]]
        assert results(other) == [[0, 2, 0, 41.0], [1, 2, 1, 41.0]]


def test_one_command_per_rank():
    port = str(free_port())
    flags = ("10", "--world-size", "2", "--host", "127.0.0.1", "--port", port, "--rank")
    with Program("sum.py", *flags, "1") as one, Program("sum.py", *flags, "0") as zero:
        assert results(zero, one) == [[0, 2, 0, 21.0], [1, 2, 1, 21.0]]
        assert "torchbearer_ddp" in zero.text()
        assert "torchbearer_ddp" not in one.text()


def test_one_command_per_node():
    port = str(free_port())
    flags = ("10", "--nnodes", "2", "--nproc-per-node", "2", "--host", "127.0.0.1", "--port", port)
    with (
        Program("sum.py", *flags, "--node-rank", "1") as second,
        Program("sum.py", *flags, "--node-rank", "0") as first,
    ):
        everyone = [[rank, 4, rank % 2, 46.0] for rank in range(4)]
        assert results(first, second) == everyone
        assert results(second) == everyone[2:]


def test_torchrun():
    command = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-endpoint")
    endpoint = ("localhost:0", "--rdzv-backend", "c10d", SUM, "10")
    with Program(sys.executable, *command, *endpoint, raw=True) as program:
        assert results(program) == [[0, 2, 0, 21.0], [1, 2, 1, 21.0]]
        assert "2 ranks on this host (from torchrun's environment)" in program.text()


def test_slurm_step():
    job = str(free_port())
    with (
        Program("sum.py", "10", environment=slurm_step(1, job)) as one,
        Program("sum.py", "10", environment=slurm_step(0, job)) as zero,
    ):
        assert results(zero, one) == [[0, 2, 0, 21.0], [1, 2, 1, 21.0]]
        assert f"(from the Slurm step of job {job})" in zero.text()


def test_two_hosts_one_rank_each():
    with hosts(2) as (first, second):
        flags = ("10", "--world-size", "2", "--host", first.address, "--rank")
        with (
            Program("sum.py", *flags, "1", before=second.command) as one,
            Program("sum.py", *flags, "0", before=first.command) as zero,
        ):
            found = results(zero, one)
            assert [[r, n, total] for r, n, _, total in found] == [[0, 2, 21.0], [1, 2, 21.0]]


def test_two_hosts_two_ranks_each():
    with hosts(2) as (first, second):
        flags = ("10", "--nnodes", "2", "--nproc-per-node", "2", "--host", first.address)
        with (
            Program("sum.py", *flags, "--node-rank", "1", before=second.command) as other,
            Program("sum.py", *flags, "--node-rank", "0", before=first.command) as zero,
        ):
            assert results(zero, other) == [[rank, 4, rank % 2, 46.0] for rank in range(4)]
