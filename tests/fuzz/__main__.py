"""Runs one target under atheris: ``python -m tests.fuzz TARGET [FLAGS OF LIBFUZZER]``.

The corpus of the tree is where it starts; what it finds goes to the folder ``.fuzz/TARGET``.
"""

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["torchbearer_ddp"]):
    from tests.fuzz import targets

from tests.fuzz.examples import CORPUS

if __name__ == "__main__":
    name, *options = sys.argv[1:] or [""]
    if name not in targets.TARGETS:
        sys.exit(f"{name!r} is no target. There are: {', '.join(targets.TARGETS)}.")
    found = Path(".fuzz") / name
    found.mkdir(parents=True, exist_ok=True)
    words = [sys.argv[0], str(found), str(CORPUS), f"-artifact_prefix={found}/", *options]
    atheris.Setup(words, targets.TARGETS[name])
    atheris.Fuzz()
