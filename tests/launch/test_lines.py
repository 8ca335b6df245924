"""How lines are made of what ranks write, and what becomes of them; without processes."""

import os

import pytest

from tests.terminal import screen
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


def test_the_screen_of_these_tests():
    assert screen("a\r\n\rbar 1\rbar 2\r\x1b[Kline\nbar 2") == ["a", "line", "bar 2"]


def test_a_full_log_file_is_named_and_the_run_goes_on(caplog, tmp_path):
    plan = Plan(log_dir=str(tmp_path))
    (tmp_path / "rank-0.log").symlink_to("/dev/full")
    shown = output.Output(plan)
    (stream, *_) = streams = shown.open_for(0)
    os.write(stream.writer, b"lost\nlost too\n")
    shown.take(stream)
    assert len(caplog.records) == 1
    assert "rank-0.log cannot be written (No space left on device): it ends" in caplog.text
    for each in streams:
        each.close_writer()
    shown.close()
