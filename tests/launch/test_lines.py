"""How lines are made of what ranks write, and what becomes of them; without processes."""

import contextlib
import fcntl
import os
import struct
import subprocess
import termios
from pathlib import Path

import pytest

from tests.terminal import screen
from torchbearer_ddp.group.membership import Member
from torchbearer_ddp.launch import output
from torchbearer_ddp.launch.plan import Plan


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([b"one\ntwo\n"], [b"one\n", b"two\n"]),
        ([b"o", b"ne", b"\ntw", b"o\n"], [b"one\n", b"two\n"]),
        ([b"\n\n"], [b"\n", b"\n"]),
        ([b"\r 10%", b"\r 20%", b"\r100%  ", b"\n"], [b"100%\n"]),
        ([b"windows\r", b"\nline\r\n"], [b"windows\r\n", b"line\r\n"]),
        ([b"\r 10%|#\r       \r", b"then a line\n"], [b"then a line\n"]),
        ([b"indented \n"], [b"indented \n"]),
    ],
)
def test_lines_are_assembled(chunks, lines):
    stream = output._Stream(None, None, 0)
    assert [line for chunk in chunks for line in stream.assemble(chunk)] == lines
    assert stream.rest() == b""


def test_a_long_bar_is_shown_now_and_then(monkeypatch):
    monkeypatch.setattr(output, "_SNAPSHOT_SECONDS", 5.0)
    stream = output._Stream(None, None, 0)
    start = stream._shown_at
    stream.assemble(b"no bar")
    assert stream.snapshot(start + 10) is None
    stream.assemble(b"\r 10%\r 20%")
    assert stream.snapshot(start + 4) is None
    assert stream.snapshot(start + 6) == b" 20%\n"
    assert stream.snapshot(start + 7) is None


def test_rank_zero_has_a_terminal_of_the_launchers_size(monkeypatch):
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        monkeypatch.setattr("sys.stderr", terminal)
        shown = output.Output(Plan(member=Member(world_size=2, local_world_size=2)))
        (first,), (second,) = shown.open_for(0), shown.open_for(1)  # one for stdout and stderr
        assert (first.is_terminal, second.is_terminal) == (True, False)
        for size in ((100, 40), (60, 20)):
            fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", *size[::-1], 0, 0))
            shown.resize()
            assert os.get_terminal_size(first.writer) == size
        os.write(first.writer, b"prompt> ")
        shown.take(first)
        os.write(second.writer, b"half a ")
        shown.take(second)
        os.write(second.writer, b"line\n")
        shown.take(second)
        for stream in (first, second):
            stream.close_writer()
        shown.close()
    found = ""
    with contextlib.suppress(OSError):  # at the end of what was written
        while True:
            found += os.read(master, 1 << 16).decode()
    assert screen(found.replace("\r\n", "\n")) == [
        "[rank 1] half a line",
        "[rank 0] prompt>",
        "",
    ]
    os.close(master)


def test_a_process_that_writes_for_ever_delays_no_end():
    shown = output.Output(Plan())
    (stream, *others) = shown.open_for(0)
    with subprocess.Popen(["yes"], stdout=stream.writer) as endless:
        for each in (stream, *others):
            each.close_writer()
        shown.close()
        assert endless.wait(30) != 0  # by a pipe that is closed


def test_the_screen_of_these_tests():
    assert screen("a\r\n\rbar 1\rbar 2\r\x1b[Kline\nbar 2") == ["a", "line", "bar 2"]


def test_a_full_log_file_is_named_and_the_run_goes_on(caplog, monkeypatch, tmp_path):
    plan = Plan(log_dir=str(tmp_path))
    full = Path("/dev/full")  # a device that is always full; a link to it would be refused
    monkeypatch.setattr(output, "_open_log", lambda path: full.open("ab", buffering=0))
    shown = output.Output(plan)
    (stream, *_) = streams = shown.open_for(0)
    os.write(stream.writer, b"lost\nlost too\n")
    shown.take(stream)
    assert len(caplog.records) == 1
    assert "rank-0.log cannot be written (No space left on device): it ends" in caplog.text
    for each in streams:
        each.close_writer()
    shown.close()
