"""Says what a script can know about how it was started."""

import os
import sys

WORDS = sys.argv[1:]
lines = [
    f"name {__name__}",
    f"file {__file__}",
    f"arguments {sys.argv}",
    f"path {sys.path[0]}",
    f"module {sys.modules['__main__'].WORDS is WORDS}",
    f"package {__package__!r}",
]
os.write(1, ("\n".join(lines) + "\n").encode())


def fail():
    raise KeyError("age")


if "fail" in WORDS:
    fail()
if "exit" in WORDS:
    sys.exit(5)
if "launch" in WORDS:
    from torchbearer_ddp import rank, run_distributed

    os.write(1, f"result {run_distributed(lambda: rank(), nproc_per_node=4)}\n".encode())
