"""``run_distributed`` in a real notebook: its bar, its lines, its results, and ``breakpoint()``."""

import nbformat
import pytest

from tests.notebooks import execute, shown
from tests.requirements import needs_package

pytestmark = pytest.mark.concurrent(2)

TRAIN = """
import torch, torchbearer
from torch.utils.data import DataLoader, TensorDataset
from torchbearer_ddp import data_parallel, rank, run_distributed

def train(epochs, stops=False):
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 2))
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = torch.nn.functional.mse_loss
    trial = torchbearer.Trial(model, optimizer, loss, ['loss'], [*data_parallel()], verbose=2)
    trial.with_train_generator(DataLoader(data, 4))
    if stops:
        breakpoint()
    print('a line of rank', rank())
    return len(trial.run(epochs))
"""
CELLS = (
    "run_distributed(train, (2,), nproc_per_node=2)",
    "run_distributed(train, (1, True), nproc_per_node=2)",
    "run_distributed(lambda: {}['age'], nproc_per_node=2)",
    "run_distributed(train, (1,), launcher='inline')",
)
WITHOUT_WIDGETS = "import sys; sys.modules['ipywidgets'] = None"
WIDGET = "application/vnd.jupyter.widget-view+json"


def executed(folder, *first):
    """The notebook after all of its cells; each with what it shows."""
    cells = map(nbformat.v4.new_code_cell, ["\n".join([*first, TRAIN]), *CELLS])
    notebook = nbformat.v4.new_notebook(cells=list(cells))
    execute(notebook, folder)
    return notebook


def result(cell):
    (found,) = [each for each in cell.outputs if each.output_type == "execute_result"]
    return found.data["text/plain"]


def check(notebook):
    """What holds with widgets and without them."""
    made, two, stops, fails, one = notebook.cells
    assert made.outputs == []
    assert (result(two), result(stops), result(one)) == ("[2, 2]", "[1, 1]", "[1]")
    assert sorted(shown(two, "stdout").splitlines()) == ["a line of rank 0", "a line of rank 1"]
    text = shown(stops)
    assert "rank 0 does not stop at breakpoint() in " in text
    assert "in a notebook, run it in one process (--launcher inline)" in text
    (error,) = [each for each in fails.outputs if each.output_type == "error"]
    assert error.ename == "WorkerError"
    assert "raised KeyError: 'age'" in error.evalue
    everything = "".join(shown(cell) for cell in notebook.cells)
    assert "Exception ignored" not in everything
    assert "\x1b[A" not in everything  # the cursor stays: a cell has no lines above to go to


def test_the_bar_is_a_widget(tmp_path):
    needs_package("ipywidgets")
    notebook = executed(tmp_path)
    check(notebook)
    _, two, _, _, one = notebook.cells
    for cell, passes in ((two, 2), (one, 1)):
        widgets = [each for each in cell.outputs if WIDGET in each.get("data", {})]
        assert len(widgets) == passes
        assert "\r" not in shown(cell)
    (state,) = notebook.metadata.widgets.values()
    bars = [each["state"] for each in state["state"].values() if "Progress" in each["model_name"]]
    full = [(bar["value"], bar["max"], bar["bar_style"]) for bar in bars if "value" in bar]
    assert full == [(64, 64, "success")] * 3 + [(16, 16, "success")]


def test_without_widgets_the_bar_is_text_in_the_cell(tmp_path):
    notebook = executed(tmp_path, WITHOUT_WIDGETS)
    check(notebook)
    _, two, _, _, one = notebook.cells
    for cell, ends in ((two, ["0/2(t): 100%", "1/2(t): 100%"]), (one, ["0/1(t): 100%"])):
        for end in ends:
            assert end in shown(cell)
