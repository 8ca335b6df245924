"""The rank that torchrun or srun has started, read from its environment variables."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path

from torchbearer_ddp.errors import LaunchError
from torchbearer_ddp.group.membership import Member
from torchbearer_ddp.launch.plan import Plan

#: Each of these shows that torchrun started the process; batch scripts may set MASTER_ADDR too.
_TORCHRUN_SIGNS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
#: Slurm numbers its special steps (batch script, salloc's shell, ...) from here on.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
#: Set by ``srun --pty``; which of them depends on the version.
_PTY_VARIABLES = ("SLURM_PTY_PORT", "SLURM_PTY_WIN_COL")
#: Ports of Slurm steps: below the range from which systems take ports for outgoing connections.
_FIRST_PORT, _PORTS = 20000, 12000
#: Another program may hold the port; the ranks then try the next ones.
_PORTS_TO_TRY = 4
#: Slurm's variables by the names of today and of older versions.
_OLDER_NAMES = (
    ("SLURM_NTASKS", "SLURM_NPROCS"),
    ("SLURM_JOB_ID", "SLURM_JOBID"),
    ("SLURM_STEP_ID", "SLURM_STEPID"),
    ("SLURM_JOB_NODELIST", "SLURM_NODELIST"),
    ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
)


def in_torchrun(environment: Mapping[str, str]) -> bool:
    """True if any of torchrun's variables is set."""
    return any(name in environment for name in _TORCHRUN_SIGNS)


def in_slurm_step(environment: Mapping[str, str]) -> bool:
    """True in a process that srun started.

    A batch script has a SLURM_PROCID as well, and salloc's shell a step of its own, but a plain
    ``python script.py`` there is one process; no other ranks are started.
    """
    step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", ""))
    return "SLURM_PROCID" in environment and step.isdigit() and int(step) < _FIRST_SPECIAL_STEP


def in_interactive_shell(environment: Mapping[str, str]) -> bool:
    """True in a shell that ``srun --pty`` has opened, where a command is one process.

    Only the first task has the terminal. A step that is started in that shell inherits its
    variables but not its terminal, and ``srun --pty python script.py`` starts all tasks.
    """
    if not any(name in environment for name in _PTY_VARIABLES) or _is_task_of_slurm():
        return False
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _is_task_of_slurm() -> bool:
    """True if Slurm's daemon itself has started this process."""
    try:
        return Path(f"/proc/{os.getppid()}/comm").read_text().strip() == "slurmstepd"
    except OSError:
        return False


def read_torchrun(environment: Mapping[str, str]) -> Plan:
    """The rank that torchrun's variables describe; local rank -1 where they do not.

    Raises:
        LaunchError: If some are missing or do not fit together.
    """
    rank, world_size = _rank_of(
        environment,
        "torchrun sets all of them: start the script with torchrun, unset what is left of "
        "another run, or name a launcher, such as --launcher inline.",
        *("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    )
    agent_serves = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return Plan(
        member=Member(
            rank=rank,
            world_size=world_size,
            local_rank=_number(environment, "LOCAL_RANK", -1),
            local_world_size=_number(environment, "LOCAL_WORLD_SIZE", 1),
        ),
        host=environment["MASTER_ADDR"],
        ports=(_number(environment, "MASTER_PORT", 0),),
        serve=rank == 0 and not agent_serves,
        prefix="/".join(["torchrun", *(environment.get(name, "") for name in names)]),
    )


def read_slurm_step(environment: Mapping[str, str]) -> Plan:
    """The rank that the variables of a Slurm step describe; local rank -1 where they do not.

    Raises:
        LaunchError: If some are missing or do not fit together.
    """
    known = {new: environment[old] for new, old in _OLDER_NAMES if old in environment}
    known.update(environment)
    rank, world_size = _rank_of(
        known,
        "srun sets all of them: start the script with srun, or name another launcher, such as "
        "--launcher inline.",
        *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_ID"),
    )
    tasks = _tasks_per_node(known, world_size)
    node = _number(known, "SLURM_NODEID", 0)
    nodes = known.get("SLURM_STEP_NODELIST") or known.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    names = ("SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    step = "/".join(known.get(name, "") for name in names)
    port = _FIRST_PORT + zlib.crc32(step.encode()) % _PORTS
    return Plan(
        member=Member(
            rank=rank,
            world_size=world_size,
            local_rank=_number(known, "SLURM_LOCALID", -1),
            local_world_size=tasks[node] if node < len(tasks) else tasks[0],
        ),
        host=expand_hosts(nodes)[0],
        ports=tuple(range(port, port + _PORTS_TO_TRY)),
        serve=rank == 0,
        prefix=f"slurm/{step}",
    )


def expand_hosts(listing: str) -> list[str]:
    """The hosts in Slurm's short form of a node list.

    Example: ::

        >>> from torchbearer_ddp.launch.environments import expand_hosts
        >>> expand_hosts('login,gpu[07-08,12]')
        ['login', 'gpu07', 'gpu08', 'gpu12']
    """
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", listing):
        names = [""]
        for text, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", item):
            parts = [text] if text else _expand_ranges(ranges)
            names = [name + part for name in names for part in parts]
        hosts += names
    if not hosts:
        raise LaunchError(
            f"The node list {listing!r} names no host. Slurm sets it in SLURM_JOB_NODELIST; name "
            "the first host with --host."
        )
    return hosts


def _expand_ranges(ranges: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1)]
    return numbers


def expand_counts(listing: str) -> list[int]:
    """The numbers in Slurm's short form of tasks per node: ``2(x3),1`` is 2, 2, 2, 1."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", listing):
        counts += [int(count)] * int(times or 1)
    return counts


def _tasks_per_node(environment: Mapping[str, str], tasks: int) -> list[int]:
    """The tasks on each node: the step's own list if there is one, else the job's options."""
    nodes = _number(environment, "SLURM_NNODES", 1)
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"):
        if name not in environment:
            continue
        counts = expand_counts(environment[name])
        if name == "SLURM_NTASKS_PER_NODE":
            counts = counts[:1] * nodes
        if sum(counts) != tasks:
            raise LaunchError(
                f"SLURM_NTASKS is {tasks} but {name}={environment[name]} makes {sum(counts)} tasks "
                f"on {len(counts)} node(s): ranks would be missing. Give srun --nodes, --ntasks "
                "and --ntasks-per-node that fit together."
            )
        return counts
    return [tasks // nodes or 1] * nodes


def _rank_of(environment: Mapping[str, str], remedy: str, *needed: str) -> tuple[int, int]:
    """The rank and the world size, which the first two of the needed variables hold."""
    missing = [name for name in needed if name not in environment]
    if missing:
        found = [f"{name}={environment[name]}" for name in needed if name in environment]
        raise LaunchError(
            f"The environment has {', '.join(found) or 'none of ' + ', '.join(needed)} but not "
            f"{', '.join(missing)}: {remedy}"
        )
    rank, size = (_number(environment, name, 0) for name in needed[:2])
    if not 0 <= rank < size:
        raise LaunchError(
            f"{needed[0]} is {rank} but {needed[1]} is {size}: ranks go from 0 to {size - 1}. "
            "Look for variables left over from another run."
        )
    return rank, size


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise LaunchError(
            f"{name} is {text!r}, not a whole number. Unset it, or name a launcher, such as "
            "--launcher inline."
        ) from None
