"""``python -m torchbearer_ddp env``: this host and process, in a form to paste into an issue."""

from __future__ import annotations

import json
from typing import Any

from torchbearer_ddp.commands import facts, words
from torchbearer_ddp.commands.parser import GOOD, command_parser

_DESCRIPTION = """\
Shows versions, cores and threads, memory and shared memory, GPUs, network interfaces, Slurm, and
the variables that decide how ranks start: what an issue should contain. Of the environment only
variables of torch, gloo, NCCL, OpenMP, Slurm and this package are shown.
"""


def main(arguments: list[str]) -> None:
    """Prints what is known about this host and process."""
    parser = command_parser("env", _DESCRIPTION, "\n--json", {GOOD: "shown"})
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")
    options = parser.parse_args(arguments)
    found = facts.collect()
    print(json.dumps(found, indent=1) if options.json else text(found))


def text(found: facts.Facts) -> str:
    """What was collected, as aligned lines."""
    processor, memory = found["processor"], dict(found["memory"])
    files = memory.pop("open files")
    lines = [
        *words.section("versions", found["versions"]),
        *words.section("processor", processor),
        *words.section(
            "memory",
            {**{name: words.size(each) for name, each in memory.items()}, "open files": files},
        ),
        *words.section("GPUs", gpus(found["gpus"])),
        *words.section("network", network(found["network"])),
        *words.section("Slurm", slurm(found["slurm"])),
        *words.section("environment", found["environment"]),
    ]
    return "\n".join(lines[1:])


def gpus(found: facts.Facts) -> dict[str, str]:
    """Each GPU with its memory, or why there is none."""
    if found.get("problem"):
        return {"none": found["problem"]}
    every = {
        f"cuda:{number}": f"{each['name']}, {words.size(each['memory'])}"
        for number, each in enumerate(found["visible"])
    }
    return every or {"none": "no GPU is visible to torch"}


def network(found: facts.Facts) -> dict[str, str]:
    """The host's name and the interfaces."""
    answer = ", ".join(found["addresses"]) or found["problem"]
    rows = {"host name": f"{found['host']} ({answer}, in {words.duration(found['seconds'])})"}
    for each in found["interfaces"]:
        mbit = f", {each['mbit']} Mbit/s" if "mbit" in each else ""
        rows[each["name"]] = f"{each['address'] or 'no address'}, {each['state']}{mbit}"
    gloo = found["gloo"]
    rows["gloo uses"] = f"{gloo['interface']} ({gloo['why']})" if gloo["interface"] else gloo["why"]
    return rows


def slurm(found: facts.Facts) -> dict[str, Any]:
    """The job and task, and the commands."""
    commands = ", ".join(found["commands"]) or "none found"
    return {**{name: found[name] for name in found if name != "commands"}, "commands": commands}
