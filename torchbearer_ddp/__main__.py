"""``python -m torchbearer_ddp COMMAND``: the commands of this package."""

from __future__ import annotations

import sys
from collections.abc import Callable

from torchbearer_ddp.launch import script

#: Each command: what it does in a few words, and the function that gets its arguments.
COMMANDS: dict[str, tuple[str, Callable[[list[str]], None]]] = {
    "run": ("run an unchanged script on several ranks", script.main),
}


def main(words: list[str]) -> None:
    """Runs the command that the first word names."""
    name = words[0] if words else ""
    if name in COMMANDS:
        COMMANDS[name][1](words[1:])
        return
    asked = name in ("-h", "--help")
    lines = [f"  {each:10} {text}" for each, (text, _) in COMMANDS.items()]
    usage = "\n".join(["usage: python -m torchbearer_ddp COMMAND [arguments]", "", *lines])
    if not asked:
        found = f"there is no command {name!r}" if name else "a command is missing"
        usage = f"{usage}\n\ntorchbearer_ddp: {found}; choose one of these."
    print(usage, file=sys.stdout if asked else sys.stderr)
    raise SystemExit(0 if asked else 2)


if __name__ == "__main__":
    main(sys.argv[1:])
