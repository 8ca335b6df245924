"""A submission: what is sent to Slurm, and the private folder that it is sent from."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from torchbearer_ddp.checkpoints.opening import written_by_others
from torchbearer_ddp.errors import LaunchError
from torchbearer_ddp.slurm.job import SlurmJob
from torchbearer_ddp.slurm.submitit_adapter import Executor, known_parameters
from torchbearer_ddp.slurm.task import SlurmTask

_START_FILE = Path(__file__).with_name("start.py")


class Submission:
    """A job that is ready to be submitted; nothing is written yet.

    Args:
        run: What every task of the job runs.
        name: The job's name, unless the parameters have one.
        folder: Where the job's files and logs go.
        parameters: Parameters of submitit or sbatch, by their names.
        max_requeues: How often the job may start again.

    Raises:
        ValueError: If a parameter makes no sense.
        LaunchError: If there is no Slurm here.
    """

    def __init__(
        self,
        run: Callable[[], Any],
        name: str,
        folder: str | os.PathLike[str],
        parameters: dict[str, Any],
        max_requeues: int,
    ) -> None:
        if shutil.which("sbatch") is None or shutil.which("srun") is None:
            raise LaunchError(
                "No sbatch on the PATH, so there is no Slurm to submit to. Submit from a login "
                "node of the cluster, or load its Slurm module."
            )
        self._task = SlurmTask(run, max_requeues)
        self._executor = Executor(Path(folder), _START_FILE, SlurmJob, max_requeues)
        plain = {key.removeprefix("slurm_"): value for key, value in parameters.items()}
        self._executor.update_parameters(**_completed(self._executor.translate(plain), name))

    def script(self) -> str:
        """The script that sbatch would be given."""
        return self._executor.script()

    def submit(self) -> SlurmJob:
        """Submits the job.

        Raises:
            LaunchError: If the folder is not private or sbatch rejects the job.
        """
        with _private_folder(self._executor.folder):
            return cast(SlurmJob, self._executor.submit_task(self._task))


def _completed(given: dict[str, Any], name: str) -> dict[str, Any]:
    """The parameters for submitit's executor, with what a job of ranks needs."""
    if given.get("gpus_per_node") == 0:
        del given["gpus_per_node"]  # a cluster without GPUs rejects even 0
    known = {key: given.pop(key) for key in known_parameters() & set(given)}
    # The others are sbatch's, which rejects what it does not know.
    additional = {**given, **known.get("additional_parameters", {})}
    if "array" in additional:
        raise ValueError(
            f"array is {additional['array']!r} but submit_slurm submits one job. Call it once per "
            "job, or start the script with srun in an sbatch --array script."
        )
    if not {"requeue", "no-requeue", "no_requeue"} & set(additional):
        additional["requeue"] = True  # some clusters do not requeue by default
    srun = list(known.get("srun_args", ()))
    if not any(arg.startswith(("-K", "--kill-on-bad-exit")) for arg in srun):
        srun.append("--kill-on-bad-exit=1")  # else the others would wait for that rank
    if "cpus_per_task" in known:
        srun.append(f"--cpus-per-task={known['cpus_per_task']}")  # srun ignores sbatch's
    defaults = {"job_name": name, "time": None}  # the partition's own limit, not submitit's 5 min
    return {**defaults, **known, "additional_parameters": additional, "srun_args": srun}


@contextlib.contextmanager
def _private_folder(folder: Path) -> Iterator[None]:
    """Makes the folder, or checks it; removes what it made if the submission fails."""
    made: list[Path] = []
    try:
        for path in [*reversed(folder.parents), folder]:
            with contextlib.suppress(FileExistsError):
                path.mkdir(0o700)
                made.append(path)
        _check_private(folder)
        yield
    except BaseException as error:
        for path in reversed(made):
            with contextlib.suppress(OSError):  # another job uses it already
                path.rmdir()
        if isinstance(error, OSError):
            raise LaunchError(
                f"The submission folder {folder} cannot be written ({error.strerror}: "
                f"{error.filename}). Name another one, on a file system that the nodes share."
            ) from error
        raise


def _check_private(folder: Path) -> None:
    if others := written_by_others(folder):
        raise LaunchError(
            f"The submission folder {folder} {others}, who could run code in the job through the "
            f"pickles in it. Run chmod 700 {folder}, or name a folder of your own."
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(13, "Permission denied", str(folder))
