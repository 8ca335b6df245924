"""A program that is forked from a warm Python is the one that ``python`` would start."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests import warm_python
from tests.processes import Program, until

pytestmark = pytest.mark.concurrent

#: All that a program can tell of its start, and an end.
FACTS = """
import json, os, signal, sys, threading

def stream(each):
    return [each.fileno(), each.encoding, each.line_buffering, each.isatty(), each.seekable()]

main = sys.modules["__main__"]
print(json.dumps({
    "arguments": [sys.argv, sys.orig_argv, sys.path, sys.flags.interactive],
    "module": [__name__, getattr(main, "__file__", None), main.__dict__ is globals()],
    "loader": [type(main.__loader__).__name__, getattr(main.__spec__, "name", None)],
    "folder": os.getcwd(),
    "session": os.getsid(0) == os.getpid(),
    "environment": {k: v for k, v in os.environ.items()
                    if k not in ("TORCHBEARER_DDP_TEST", "PYTEST_CURRENT_TEST")},
    "streams": [stream(each) for each in (sys.stdout, sys.stderr)],
    "descriptors": sorted(os.listdir("/proc/self/fd")),
    "handlers": [str(signal.getsignal(n)).partition(" at ")[0] for n in (2, 13, 15, 17)],
    "blocked": [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "threads": threading.active_count(),
}))
"""


def ended(words: tuple[str, ...], fresh: bool, folder: Path, **environment: str) -> Program:
    with Program(
        *(sys.executable, *words),
        raw=True,
        fresh=fresh,
        folder=folder,
        environment=environment,
    ) as program:
        program.code(120)
        return program


@pytest.mark.parametrize("kind", ["-c", "-m", "file"])
def test_it_finds_what_a_new_python_finds(kind: str, tmp_path: Path) -> None:
    (tmp_path / "facts.py").write_text(FACTS)
    words = {"-c": ("-c", FACTS), "-m": ("-m", "facts"), "file": ("facts.py",)}[kind]
    new, forked = (
        ended((*words, "--flag", "a b"), fresh, tmp_path, RANK="3", OMP_NUM_THREADS="1")
        for fresh in (True, False)
    )
    assert new.code() == forked.code() == 0, forked.text()
    assert json.loads(forked.output[0]) == json.loads(new.output[0])


ENDS = {
    "nothing": "pass",
    "a number": "raise SystemExit(7)",
    "a text": "raise SystemExit('no such file')",
    "an error": "def f():\n    raise KeyError('a missing column')\nf()",
    "a syntax error": "1 +",
    "an interrupt": "raise KeyboardInterrupt",
    "a signal": "import os; os.kill(os.getpid(), 9)",
    "handlers": "import atexit; atexit.register(print, 'handler'); print('printed')",
    "a thread": "import threading; threading.Timer(0.3, print, ['from a thread']).start()",
}


@pytest.mark.parametrize("how", ENDS)
def test_it_ends_as_a_new_python_ends(how: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ENDS[how])
    new, forked = (ended(("script.py",), fresh, tmp_path) for fresh in (True, False))
    assert forked.code() == new.code(), forked.text()
    assert forked.text() == new.text()


def test_each_draws_random_numbers_of_its_own(tmp_path: Path) -> None:
    draw = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(1))"
    one, other = (ended(("-c", draw), False, tmp_path) for _ in range(2))
    pairs = zip(one.output[0].split(), other.output[0].split(), strict=True)
    assert all(mine != another for mine, another in pairs), (one.output, other.output)


def test_all_that_comes_of_it_is_known_and_ended() -> None:
    parent = "import subprocess, sys, time; print('started', flush=True); time.sleep(600)"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {parent!r}])"
    with Program(sys.executable, "-c", start, raw=True) as program:
        until(lambda: program.output == ["started\n"], 60)
        assert len(program.alive()) == 2
        assert program.process.pid in program.alive()
        assert program.process.poll() is None
    assert program.process.returncode == -signal.SIGKILL
    until(lambda: not program.alive(), 10)


def test_the_server_ends_also_if_a_forked_process_has_its_socket() -> None:
    server = warm_python._Server(dict(os.environ))
    copy = os.dup(server._socket.fileno())
    try:
        server.close()
    finally:
        os.close(copy)
    assert server._process.returncode == 0
