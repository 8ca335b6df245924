"""Every callback of torchbearer does on two ranks what it does in one process.

The rows are in ``torchbearer_rows.py``. A callback that a new torchbearer adds fails the first test
until it has a row.
"""

import copy
import functools
import importlib
import inspect
import io
import logging
import os
import pkgutil
import re
import warnings
from pathlib import Path

import pytest
import torch
import torchbearer
from torchbearer import Callback, Trial, callbacks
from torchbearer.callbacks import imaging

from tests.callbacks.torchbearer_rows import KEY, ROWS, page_table, play
from tests.log_lines import LogLines
from torchbearer_ddp import Checkpoint, RankZeroOnly, data_parallel
from torchbearer_ddp.group import collectives

HELPERS = {"count_args", "get_writer", "close_writer"}  # functions that make no callback
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


def exports():
    """Every callback class, and every public function beside them."""
    found = set()
    package = callbacks.__name__
    modules = [m.name for m in pkgutil.walk_packages(callbacks.__path__, f"{package}.")]
    for module in [package, *modules]:
        for name, value in vars(importlib.import_module(module)).items():
            is_class = inspect.isclass(value) and issubclass(value, Callback)
            is_function = inspect.isfunction(value) and not name.startswith("_")
            if (is_class or is_function) and value.__module__.startswith(package):
                found.add(value.__name__)
    return found


def test_every_callback_has_a_row():
    assert exports() - HELPERS == set(ROWS)


def test_the_page_has_the_same_table():
    page = Path(__file__).parent.parent.parent / "docs" / "torchbearer_callbacks.rst"
    assert page_table() in page.read_text(), "python -m tests.callbacks.torchbearer_rows prints it"


def assert_same(found, expected, place):
    """Equal but for rounding; numbers in texts too."""
    assert type(found) is type(expected), f"{place}: {found!r} is not {expected!r}"
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), f"{place}: {list(found)} is not {list(expected)}"
        for key in expected:
            assert_same(found[key], expected[key], f"{place}[{key}]")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), f"{place}: {found!r} is not {expected!r}"
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{place}[{index}]")
    elif torch.is_tensor(expected):
        assert found.shape == expected.shape, place
        assert torch.allclose(found.double(), expected.double(), rtol=1e-4, atol=1e-5), place
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5, nan_ok=True), place
    elif isinstance(expected, str):
        assert NUMBER.sub("#", found) == NUMBER.sub("#", expected), place
        numbers = [[float(n) for n in NUMBER.findall(text)] for text in (found, expected)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-3, abs=2e-4), place
    else:
        assert found == expected, place


def added(first, second):
    """The sum of two ranks' notes."""
    if isinstance(first, list):
        return [added(one, other) for one, other in zip(first, second, strict=True)]
    return first + second


def plain_names(files):
    """The names of event files have the time in them."""
    return sorted({re.sub(r"events\.out\.tfevents.*", "events", name) for name in files})


def on_ranks(name, folder):
    return play(name, folder, ours=data_parallel())


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Ranks have one thread; with more the small Trials of this process only take longer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ROWS)
def test_two_ranks_do_what_one_process_does(name, two_ranks, tmp_path):
    row = ROWS[name]
    ours = data_parallel() if row.plain is None else None
    expected, expected_files = play(name, str(tmp_path / "alone"), ours=ours)
    ranks = two_ranks.run(on_ranks, (name, str(tmp_path / "together")))
    (zero, files), (one, others) = ranks
    assert others == [], "a rank other than zero has written"
    assert plain_names(files) == plain_names(expected_files)
    if row.others == "sum":
        zero = added(zero, one)
    elif row.others == "same":
        assert_same(one, expected, f"{name} on rank 1")
    else:
        assert not one, f"{name} has acted on rank 1"
    assert_same(zero, expected, name)
    assert expected or row.compared == "that it writes nothing by itself", "nothing is compared"


def holes():
    """Where Cutout has cut the first batch."""
    found = []
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    note = callbacks.on_sample(lambda state: found.append(state[torchbearer.X] == 0))
    ours = [*data_parallel(), callbacks.Cutout(1, 2), note]
    trial = Trial(model, optimizer, torch.nn.functional.cross_entropy, [], ours, verbose=0)
    trial.with_train_data(torch.ones(16, 1, 6, 6), torch.ones(16).long(), 8, num_workers=0)
    trial.run(1)
    return found[0]


def test_ranks_draw_random_numbers_of_their_own(two_ranks):
    first, second = two_ranks.run(holes)
    assert first.any()
    assert second.any()
    assert not torch.equal(first, second)


def trial_with(*listed, model=None, ours=True, metrics=("loss",)):
    torch.manual_seed(0)
    model = model or torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    all_callbacks = [*(data_parallel() if ours else []), *listed]
    loss = torch.nn.functional.mse_loss
    trial = Trial(model, optimizer, loss, [*metrics], all_callbacks, verbose=0)
    x, y = torch.randn(12, 3), torch.randn(12, 2)
    batch = 4 // collectives.world_size()
    trial.with_train_data(x, y, batch_size=batch, num_workers=0, shuffle=False)
    return trial.with_val_data(x, y, batch_size=2, num_workers=0, shuffle=False)


def writing(folder):
    with LogLines() as found:
        listed = [callbacks.CSVLogger(f"{folder}/log.csv"), callbacks.Best(f"{folder}/best.pt")]
        for _ in range(2):
            trial_with(*listed).run(1)
        trial_with(RankZeroOnly(callbacks.CSVLogger(f"{folder}/other.csv"))).run(1)
    return [line for line in found if "write" in line]


def test_one_line_names_what_is_written_by_rank_zero_only(two_ranks, tmp_path):
    line = "on rank 0 only, because they write: CSVLogger, Best"
    assert two_ranks.run(writing, (str(tmp_path / "a"),)) == [[line], []]
    (tmp_path / "b").mkdir()
    assert writing(str(tmp_path / "b")) == []


def kinds_and_states(folder):
    best = callbacks.Best(f"{folder}/{collectives.rank()}.pt")
    stopping = callbacks.EarlyStopping()
    trial = trial_with(best, stopping)
    trial.run(2)
    held = trial.state_dict()[torchbearer.CALLBACK_LIST]
    assert list(trial.state[torchbearer.CALLBACK_LIST])[-2:] == [best, stopping]
    return [kind.__name__ for kind in held["callback_types"]], held["callback_states"][-2:]


def test_positions_classes_and_saved_states_are_those_of_one_process(two_ranks, tmp_path):
    """So a file of one process continues on two ranks, and the other way round."""
    kinds, states = kinds_and_states(str(tmp_path))
    for found_kinds, found_states in two_ranks.run(kinds_and_states, (str(tmp_path),)):
        assert found_kinds == kinds
        assert_same(found_states[1], states[1], "EarlyStopping")
    ((_, zero), _) = two_ranks.run(kinds_and_states, (str(tmp_path),))
    assert_same(zero[0], states[0], "Best")


def continued(folder, epochs):
    """A run with a callback of each kind and our Checkpoint; warnings are errors."""
    best = callbacks.Best(f"{folder}/best.pt")
    listed = [
        best,
        callbacks.CSVLogger(f"{folder}/log.csv"),
        imaging.FromState(torchbearer.X).cache(8).on_val().to_state(KEY, index=[0]),
        callbacks.GradientNormClipping(1.0),
        callbacks.AggregatePredictions(),
        callbacks.Tqdm(file=io.StringIO()),
        callbacks.ReduceLROnPlateau(),
        Checkpoint(f"{folder}/checkpoints"),
    ]
    trial = trial_with(*listed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("default", "(?s).*was saved under other conditions")
        history = trial.run(epochs)
    return len(history), best.best


def test_a_checkpoint_of_one_process_continues_on_two_ranks_and_back(two_ranks, tmp_path):
    assert continued(str(tmp_path), 1)[0] == 1
    (epochs, on_ranks), _ = two_ranks.run(continued, (str(tmp_path), 2))
    assert epochs == 2
    epochs, at_the_end = continued(str(tmp_path), 3)
    assert epochs == 3
    assert at_the_end < on_ranks


# Parameters that torchbearer holds as an iterator.

CLIPPERS = [
    callbacks.GradientNormClipping,
    callbacks.GradientClipping,
    callbacks.L1WeightDecay,
    callbacks.L2WeightDecay,
]
GIVEN = {
    "nothing": lambda model: None,
    "an iterator": lambda model: model.parameters(),
    "a filter": lambda model: filter(lambda p: p.requires_grad, model.parameters()),
    "a list": lambda model: list(model.parameters()),
}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("kind", CLIPPERS, ids=lambda kind: kind.__name__)
def test_parameters_are_used_on_every_batch(kind, given, caplog):
    caplog.set_level(logging.INFO)
    expected = torch.nn.Linear(3, 2)
    found = copy.deepcopy(expected)
    trial_with(kind(0.01, params=list(expected.parameters())), model=expected, ours=False).run(2)
    trial_with(kind(0.01, params=GIVEN[given](found)), model=found).run(2)
    for mine, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, other)
    held_already = given == "a list" or kind is callbacks.GradientClipping
    said = f"{kind.__name__} acts on every batch" in caplog.text
    assert said == (not held_already)


def test_an_iterator_that_an_earlier_trial_has_used_up_is_replaced():
    clip = callbacks.GradientNormClipping(0.01)
    norms = []
    note = callbacks.on_step_training(
        lambda state: norms.append(float(state[torchbearer.MODEL].weight.grad.norm()))
    )
    trial_with(clip, ours=False).run(1)
    trial_with(clip, note).run(1)
    assert len(norms) == 3
    assert max(norms) <= 0.0101


def test_parameters_of_a_layer_that_was_replaced_between_runs_are_used():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    norms = []
    note = callbacks.on_step_training(
        lambda state: norms.append(float(model[0].weight.grad.norm()))
    )
    trial = trial_with(callbacks.GradientNormClipping(0.01), note, model=model)
    trial.run(1)
    model[0] = torch.nn.Linear(3, 2)
    trial.state[torchbearer.OPTIMIZER].add_param_group({"params": list(model.parameters())})
    trial.run(2)
    assert len(norms) == 6
    assert max(norms) <= 0.0101


# Arguments that torch has removed.


@pytest.mark.parametrize("verbose", [False, True])
def test_a_removed_argument_of_a_scheduler_is_left_out(verbose, caplog):
    caplog.set_level(logging.INFO)
    by_hand = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, verbose=verbose)
    plateau = callbacks.ReduceLROnPlateau(patience=0, threshold=9.0, verbose=verbose)
    trial = trial_with(plateau, callbacks.TorchScheduler(by_hand))
    trial.run(2)
    assert trial.state[torchbearer.OPTIMIZER].param_groups[0]["lr"] == pytest.approx(1e-5)
    lines = [line for line in caplog.messages if "print nothing" in line]
    assert len(lines) == 2 * verbose


def test_a_folder_that_another_rank_makes_at_the_same_time_is_used(tmp_path, monkeypatch):
    """The other rank makes it after torchbearer has looked for it."""
    folder = tmp_path / "models"
    exists = os.path.exists

    def late(path):
        if str(path) == str(folder) and not folder.is_dir():
            folder.mkdir()
            return False
        return exists(path)

    monkeypatch.setattr(os.path, "exists", late)
    callbacks.Best(f"{folder}/best.pt")
    assert folder.is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        callbacks.Best(f"{tmp_path}/file/models/best.pt")
