"""What is ended with a rank, and what is left to tidy up."""

from pathlib import Path

from tests import proc
from tests.processes import Program, until


def test_semaphores_of_killed_ranks_are_removed():
    with Program("semaphores.py", "--nproc-per-node", "2") as program:
        assert program.code(60) == 1
        words = [line.split() for line in program.output if line.startswith("semaphore")]
        assert len(words) == 2, program.text()
        files = [Path("/dev/shm") / name for _, name, _, _ in words]
        until(lambda: not any(file.exists() for file in files), 10)
        for _, _, _, child in words:
            assert not proc.is_running(int(child))
        until(lambda: not program.alive(), 10)
