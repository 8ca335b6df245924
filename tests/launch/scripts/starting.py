"""Shows what a rank has of its launcher, and what is its own: ``starting.py FOLDER INODE``."""

import atexit
import json
import os
import random
import signal
import stat
import sys
import tempfile
from pathlib import Path

import numpy
import torch

from torchbearer_ddp import rank, run_distributed

FOLDER, INODE = Path(sys.argv[1]), int(sys.argv[2])
LAUNCHER = os.getpid()
print("module level", flush=True)
(FOLDER / "lines").write_text("".join(f"line {number}\n" for number in range(9)))
lines = (FOLDER / "lines").open("rb", buffering=0)
lines.readline()
journal = (FOLDER / "journal").open("a")
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
torch.set_default_dtype(torch.float64)
(torch.ones(1000, 1000) @ torch.ones(1000, 1000)).sum()  # starts OpenMP's threads


def is_open(inode):
    """Whether this process has the pipe of this number."""
    found = [path.stat() for path in Path("/proc/self/fd").iterdir() if path.exists()]
    return any(stat.S_ISFIFO(each.st_mode) and each.st_ino == inode for each in found)


def read_lines(number):
    lines = sys.modules["__main__"].lines  # one that is named here would have to be sent
    return [lines.readline().decode() for _ in range(number)]


def work(launcher):
    atexit.register(print, f"exit handler of rank {rank()}")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    total = (torch.ones(1000, 1000) * 2).sum().item()  # hangs if OpenMP was forked in use
    return {
        "read": read_lines(3),
        "session": os.getsid(0) == os.getpid() == os.getpgid(0),
        "parent": os.getppid() == launcher,
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "ignored": signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN,
        "stdin": sys.stdin.read(),
        "pipe": is_open(INODE),
        "variables": (os.environ["OMP_NUM_THREADS"], os.getenv("HOME")),
        "threads": threads,
        "total": total,
        "dtype": str(torch.get_default_dtype()),
        "random": (random.random(), numpy.random.random(), torch.rand(1).item()),
    }


if __name__ == "__main__":
    assert is_open(INODE)
    temporary = tempfile.TemporaryDirectory()
    atexit.register(print, "exit handler of the launcher")
    journal.write("once\n")
    facts = run_distributed(work, (LAUNCHER,), nproc_per_node=2, seed=7)
    assert Path(temporary.name).exists()
    print(json.dumps(facts))
