"""Without a terminal the bar is a line for each pass; a notebook draws the bars of its ranks."""

import contextlib
import io
import json
import os
import re
from typing import ClassVar

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial
from torchbearer.callbacks import Tqdm

from torchbearer_ddp import data_parallel
from torchbearer_ddp.callbacks import bars
from torchbearer_ddp.group import launcher
from torchbearer_ddp.launch import notebook

EPOCHS = 3


def shown(verbose, epochs=EPOCHS, before=0, callbacks=()):
    """What a run in one process or on several ranks writes to stderr, which is no terminal."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trial = Trial(
        model,
        optimizer,
        torch.nn.functional.mse_loss,
        metrics=["loss"],
        callbacks=[*data_parallel(), *callbacks],
        verbose=0,
    )
    data = TensorDataset(torch.randn(40, 3), torch.randn(40, 2))
    trial.with_generators(DataLoader(data, 2), DataLoader(data, 2))
    if before:
        trial.run(before)
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        trial.run(epochs, verbose=verbose)
    lines = text.getvalue().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("torchbearer_ddp: "))


def in_list():
    return shown(0, callbacks=[Tqdm()])


def check_passes(text, unit):
    lines = text.splitlines()
    assert len(lines) == 2 * EPOCHS
    assert "\r" not in text
    for number, line in enumerate(lines):
        epoch, letter = number // 2, "tv"[number % 2]
        total = 40 if unit == " samples" else 20
        assert re.fullmatch(
            rf"{epoch}/{EPOCHS}\({letter}\): 100% {total}/{total} "
            rf"\[\d\d:\d\d, +[\d.]+{unit}/s, .*loss=.*\]",
            line,
        ), line


def test_one_line_for_each_pass(two_ranks):
    check_passes(shown(2), "it")
    for case in (shown, in_list):
        first, second = two_ranks.run(case, (2,) if case is shown else ())
        check_passes(first, " samples")
        assert second == ""


def test_one_line_for_each_epoch(two_ranks):
    first, second = two_ranks.run(shown, (1,))
    assert second == ""
    for text in (shown(1), first):
        numbers = [re.match(r"epochs: \d+% (\d)/3 \[", line)[1] for line in text.splitlines()]
        assert numbers == ["1", "2", "3"]
    first, second = two_ranks.run(shown, (1, 4, 2))
    assert [line.split()[2] for line in first.splitlines()] == ["3/4", "4/4"]
    assert second == ""


def test_a_line_now_and_then_in_a_long_pass(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(bars.time, "monotonic", lambda: clock[0])
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        bar = bars.progress_bar(total=100, desc="0/1(t)")
        for _ in range(100):
            clock[0] += 5
            bar.update(1)
            bar.set_postfix_str("loss=1")
        bar.close()
    numbers = re.findall(r"0/1\(t\): \d+% (\d+)/100 \[.*, loss=1\]\n", text.getvalue())
    assert numbers == ["13", "26", "39", "52", "65", "78", "91", "100"]


def test_without_a_length():
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        bar = bars.progress_bar(total=None, desc="0/1(t)")
        bar.update(7)
        bar.close()
    assert re.fullmatch(r"0/1\(t\): 7 \[\d\d:\d\d, .*it/s\]\n", text.getvalue())


def test_in_a_terminal_and_with_a_file_of_its_own_it_is_tqdms():
    for options in ({"file": io.StringIO()}, {}):
        stream = io.StringIO()
        stream.isatty = lambda: True
        with contextlib.redirect_stderr(stream):
            bar = bars.progress_bar(total=2, **options)
            assert type(bar) is bars.tqdm
            bar.close()


@pytest.fixture
def linked(monkeypatch):
    """A connection to a launcher in a notebook; its messages are in the list."""
    reader, writer = os.pipe()
    monkeypatch.setenv(launcher.BARS_VARIABLE, "1")
    launcher.connect(writer)
    yield reader
    launcher._Link.descriptor = None
    os.close(reader)
    os.close(writer)


class Widget:
    """Stands in for tqdm's widget."""

    made: ClassVar[list] = []

    def __init__(self, **options):
        self.options, self.closed, self.seen = options, False, []
        Widget.made.append(self)

    def set_postfix_str(self, text, refresh):
        self.seen.append((self.n, text))

    def close(self):
        self.closed = True


def test_a_notebook_draws_the_bars_of_its_ranks(linked, monkeypatch):
    monkeypatch.setattr(notebook, "bar_class", lambda: Widget)
    Widget.made.clear()
    monkeypatch.setattr(bars.LauncherBar, "interval", 0.0)
    drawing = notebook.NotebookBars()
    bar = bars.progress_bar(total=3, desc="0/1(t)", unit=" samples")
    for number in range(3):
        bar.update(1)
        bar.set_postfix_str(f"loss={number}")
    bar.close()
    for line in os.read(linked, 1 << 16).splitlines():
        message = json.loads(line)
        assert message.pop("kind") == "bar"
        drawing.draw(**message)
    [widget] = Widget.made
    assert widget.options == {"desc": "0/1(t)", "total": 3, "unit": " samples", "initial": 0}
    assert widget.seen[0] == (0, "")
    assert widget.seen[-1] == (3, "loss=2")
    assert (1, "loss=0") in widget.seen
    assert widget.closed
