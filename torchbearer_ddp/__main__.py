"""``python -m torchbearer_ddp COMMAND``: the commands of this package."""

from __future__ import annotations

import importlib
import os
import signal
import sys

from torchbearer_ddp.errors import DistributedError
from torchbearer_ddp.launch.ending import exit_with_message

#: Each command: what it does in a few words, and the module whose ``main`` gets its arguments.
#: The module is imported when its command is called.
COMMANDS = {
    "run": ("run an unchanged script on several ranks", "launch.script"),
    "prove": ("compare a script on several ranks with one process", "commands.prove"),
    "doctor": ("examine hosts and the links between them before a run", "commands.doctor"),
    "env": ("show versions, cores, GPUs, network and Slurm, for an issue", "commands.env"),
    "inspect": ("show what is in a checkpoint, and whether it is whole", "commands.inspect"),
    "export": ("write the model of a checkpoint as plain weights", "commands.export"),
}
_EXAMPLE = "python -m torchbearer_ddp run --nproc-per-node 2 script.py"


def main(words: list[str]) -> None:
    """Runs the command that the first word names."""
    name = words[0] if words else ""
    if name in COMMANDS:
        _call(COMMANDS[name][1], words[1:])
        return
    asked = name in ("-h", "--help")
    lines = [f"  {each:10} {text}" for each, (text, _) in COMMANDS.items()]
    usage = "\n".join(
        [
            *("usage: python -m torchbearer_ddp COMMAND [arguments]", "", *lines, ""),
            *(f"example: {_EXAMPLE}", "COMMAND --help shows its flags and its exit codes."),
        ]
    )
    if not asked:
        found = f"there is no command {name!r}" if name else "a command is missing"
        usage = f"{usage}\n\ntorchbearer_ddp: {found}; choose one of these."
    print(usage, file=sys.stdout if asked else sys.stderr)
    raise SystemExit(0 if asked else 2)


def _call(module: str, words: list[str]) -> None:
    """Calls a command; an error of this package ends it with its message and exit code 1."""
    command = importlib.import_module(f"torchbearer_ddp.{module}")
    if not module.startswith("commands."):  # run has chosen its exit code: that of the script
        command.main(words)
        return
    try:
        try:
            command.main(words)
        finally:
            print(end="", flush=True)
    except BrokenPipeError:  # the reader of the report, such as head, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(128 + signal.SIGPIPE) from None
    except DistributedError as error:
        exit_with_message(error, 1)
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
