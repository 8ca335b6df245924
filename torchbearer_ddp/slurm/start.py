# ruff: noqa: E402 - the path comes first
"""The first lines of a submitted task; run as a file, so that nothing is imported before them.

Slurm's signal may come while torch is still being imported, and would end the process. It is held
back until the task can handle it.
"""

import sys

del sys.path[0]  # this package's own folder, whose modules are not to be imported from here

import os
import signal

if __name__ == "__main__":
    _name = f"SIG{os.environ.get('SUBMITIT_PREEMPT_SIGNAL', 'USR2')}"
    if _name not in signal.Signals.__members__:
        sys.exit(f"torchbearer_ddp: SUBMITIT_PREEMPT_SIGNAL makes {_name!r}, which is no signal.")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.Signals[_name]})
    sys.path.insert(0, "")  # where the job was submitted from, as with python -m

    from submitit.core.submission import submitit_main

    submitit_main()

    from torchbearer_ddp.group.failures import exit_normally

    exit_normally(0)
