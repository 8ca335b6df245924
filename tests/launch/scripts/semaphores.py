"""Each rank makes a semaphore as a spawned loader worker needs it, and rank 1 is killed."""

import multiprocessing
import os
import signal
import subprocess
import sys

from torchbearer_ddp import barrier, rank, run_distributed


def make():
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    os.write(1, f"semaphore sem.{semaphore._semlock.name.strip('/')} child {child.pid}\n".encode())
    barrier()
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    barrier()


run_distributed(make)
