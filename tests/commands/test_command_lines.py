"""The command line of ``python -m torchbearer_ddp``: every command explains itself."""

import re

import pytest

from torchbearer_ddp.__main__ import COMMANDS, main


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_and_the_exit_codes(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    text = capsys.readouterr().out
    assert text.startswith(f"usage: python -m torchbearer_ddp {name}")
    example = text.partition("example:\n")[2].partition("exit codes:")
    assert example[0].strip().startswith(f"python -m torchbearer_ddp {name}"), text
    assert {"0", "2"} <= set(re.findall(r"^  (\d)  \w", example[2], re.MULTILINE))
