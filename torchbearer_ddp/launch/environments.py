"""The rank that torchrun or srun has started, read from its environment variables."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from pathlib import Path

from torchbearer_ddp import checked
from torchbearer_ddp.errors import LaunchError
from torchbearer_ddp.group.membership import Member
from torchbearer_ddp.launch.node_lists import Counts, expand_hosts
from torchbearer_ddp.launch.plan import MOST_RANKS, Plan

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
_LAST_PORT = 65535
_REMEDY = ". Unset what is left of another run, or name a launcher, such as --launcher inline."
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
    numbered = checked.is_number(step) and int(step) < _FIRST_SPECIAL_STEP
    return "SLURM_PROCID" in environment and numbered


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
    with checked.as_error(LaunchError, after=_REMEDY):
        local_size = checked.variable(environment, "LOCAL_WORLD_SIZE", 1, 1, world_size)
        # Without the number of local ranks, that of the rank is bounded by all of them.
        bound = local_size if "LOCAL_WORLD_SIZE" in environment else world_size
        return Plan(
            member=Member(
                rank=rank,
                world_size=world_size,
                local_rank=checked.variable(environment, "LOCAL_RANK", -1, 0, bound - 1),
                local_world_size=local_size,
            ),
            host=checked.host(environment["MASTER_ADDR"], "MASTER_ADDR"),
            ports=(checked.variable(environment, "MASTER_PORT", 0, 1, _LAST_PORT),),
            serve=rank == 0 and not agent_serves,
            prefix="/".join(["torchrun", *(_text(environment, name) for name in names)]),
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
    names = ("SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    with checked.as_error(LaunchError, after=_REMEDY):
        for name in names:
            checked.variable(known, name, 0, 0)
        tasks = _tasks_per_node(known, world_size)
        node = checked.variable(known, "SLURM_NODEID", 0, 0, world_size - 1)
        local_size = tasks.at(node)
        is_exact = "SLURM_STEP_TASKS_PER_NODE" in known and node < tasks.nodes
        bound = local_size if is_exact else world_size
        local_rank = checked.variable(known, "SLURM_LOCALID", -1, 0, bound - 1)
        host = _first_host(known, tasks.nodes)
    step = "/".join(known.get(name, "") for name in names)
    port = _FIRST_PORT + zlib.crc32(step.encode()) % _PORTS
    return Plan(
        member=Member(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_size,
        ),
        host=host,
        ports=tuple(range(port, port + _PORTS_TO_TRY)),
        serve=rank == 0,
        prefix=f"slurm/{step}",
    )


def _first_host(environment: Mapping[str, str], nodes: int) -> str:
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if listing := environment.get(name):
            return checked.host(next(expand_hosts(listing, name)), name)
    if nodes > 1:
        raise checked.Unexpected(f"SLURM_JOB_NODELIST is not set, but there are {nodes} nodes")
    return "127.0.0.1"


def _tasks_per_node(environment: Mapping[str, str], tasks: int) -> Counts:
    """The tasks on each node: the step's own list if there is one, else the job's options."""
    nodes = checked.variable(environment, "SLURM_NNODES", 1, 1, tasks)
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"):
        if name not in environment:
            continue
        counts = Counts(environment[name], name)
        if name == "SLURM_NTASKS_PER_NODE":
            counts = counts.repeated(nodes)
        if counts.tasks != tasks:
            raise LaunchError(
                f"SLURM_NTASKS is {tasks} but {name}={environment[name]} makes {counts.tasks} "
                f"tasks on {counts.nodes} node(s): ranks would be missing. Give srun --nodes, "
                "--ntasks and --ntasks-per-node that fit together."
            )
        return counts
    return Counts(f"{tasks // nodes}(x{nodes})", "SLURM_NNODES")


def _rank_of(environment: Mapping[str, str], remedy: str, *needed: str) -> tuple[int, int]:
    """The rank and the world size, which the first two of the needed variables hold."""
    missing = [name for name in needed if name not in environment]
    if missing:
        found = [f"{name}={environment[name]}" for name in needed if name in environment]
        raise LaunchError(
            f"The environment has {', '.join(found) or 'none of ' + ', '.join(needed)} but not "
            f"{', '.join(missing)}: {remedy}"
        )
    with checked.as_error(LaunchError, after=_REMEDY):
        size = checked.variable(environment, needed[1], 0, 1, MOST_RANKS)
        rank = checked.variable(environment, needed[0], 0)
    if not 0 <= rank < size:
        raise LaunchError(
            f"{needed[0]} is {rank} but {needed[1]} is {size}: ranks go from 0 to {size - 1}. "
            "Look for variables left over from another run."
        )
    return rank, size


def _text(environment: Mapping[str, str], name: str) -> str:
    return checked.printable(environment.get(name, ""), name)
