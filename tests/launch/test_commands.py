"""``python -m torchbearer_ddp``: mistakes on its command line, in this process."""

import pytest

from tests.processes import SCRIPTS
from torchbearer_ddp.__main__ import main

PLAIN = str(SCRIPTS / "plain.py")


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("--nproc", "2", PLAIN), 2, "--nproc is unknown; did you mean --nproc-per-node?"),
        ((), 2, "no script is named"),
        (("nowhere.py",), 2, "can't open file 'nowhere.py'"),
        (("broken.py",), 1, "SyntaxError"),
    ],
)
def test_mistakes_end_before_anything_starts(words, code, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("def f(:\n")
    with pytest.raises(SystemExit) as end:
        main(["run", *words])
    assert end.value.code == code
    printed = capsys.readouterr()
    assert text in printed.err
    assert printed.out == ""


def test_commands_are_listed(capsys):
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "a command is missing" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "run an unchanged script" in capsys.readouterr().out
