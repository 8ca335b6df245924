"""The bar counts samples up to those that there are; a run without steps or data says so."""

import contextlib
import io
import re
import warnings

import pytest
import torch
import torchbearer
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchbearer import Trial
from torchbearer.callbacks import Tqdm, on_step_training

from torchbearer_ddp import Checkpoint, data_parallel
from torchbearer_ddp.group import collectives

SAMPLES = 100


def data(samples=SAMPLES):
    return TensorDataset(torch.randn(samples, 3), torch.randn(samples, 2))


def trial_with(*callbacks, verbose=0):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = nn.functional.mse_loss
    return Trial(model, optimizer, loss, callbacks=[*data_parallel(), *callbacks], verbose=verbose)


def plain(loader_of=DataLoader, **options):
    return lambda samples: loader_of(data(samples), **options)


def distributed(samples):
    found = data(samples)
    sampler = DistributedSampler(found, collectives.world_size(), collectives.rank())
    return DataLoader(found, 15, sampler=sampler)


def batches(samples):
    found = data(samples)
    return DataLoader(found, batch_sampler=BatchSampler(SequentialSampler(found), 30, False))


#: The loader, the steps that are given, the numbers of the bar in training, and in validation.
LOADERS = {
    "whole batches": (plain(batch_size=10), None, [20, 40, 60, 80, 100], [20, 40, 60, 80, 100]),
    "a short last batch": (plain(batch_size=30), None, [60, 100], [60, 100]),
    "one batch larger than the data": (plain(batch_size=250), None, [100], [100]),
    "a last batch that is dropped": (plain(batch_size=30, drop_last=True), None, [60], [60, 90]),
    "fewer steps": (plain(batch_size=10), 2, [20, 40], [20, 40, 60, 80, 100]),
    "more steps than batches": (plain(batch_size=50), 4, [100, 200, 300, 400], [100]),
    "the user's own sampler": (distributed, None, [30, 60, 90, 100], [30, 60, 90, 100]),
    "a batch sampler": (batches, None, [60, 100], [60, 100]),
}


def numbers(name, in_list):
    """What the bars of this rank have shown: in training, and in validation."""
    make, steps, _, _ = LOADERS[name]
    shown = io.StringIO()
    bar = Tqdm(file=shown, mininterval=0, miniters=1)
    trial = trial_with(*([bar] if in_list else []), verbose=0 if in_list else 2)
    trial.with_train_generator(make(SAMPLES), steps).with_val_generator(make(SAMPLES))
    with contextlib.nullcontext() if in_list else contextlib.redirect_stderr(shown):
        trial.run(1)
    text = re.split(r"0/1\(v\)", shown.getvalue(), maxsplit=1)
    found = [re.findall(r" (\d+)/(\d+) \[.*?samples", part) for part in text]
    return [sorted({(int(n), int(total)) for n, total in part} - {(0, 0)}) for part in found]


@pytest.mark.parametrize("name", LOADERS)
def test_the_bar_counts_up_to_the_samples_that_there_are(name, two_ranks):
    *_, training, validation = LOADERS[name]
    first, second = two_ranks.run(numbers, (name, True))
    assert second == [[]]
    for found, expected in zip(first, (training, validation), strict=True):
        total = expected[-1]
        assert [each for each in found if each[0]] == [(number, total) for number in expected]


def test_torchbearers_own_bar_does_too(two_ranks):
    first, second = two_ranks.run(numbers, ("a short last batch", False))
    assert second == [[]]
    assert [part[-1] for part in first] == [(100, 100), (100, 100)]


def resumed(folder):
    """The numbers of the bar of a run that continues in mid-epoch."""
    for stops in (True, False):
        shown = io.StringIO()
        bar = Tqdm(file=shown, mininterval=0, miniters=1)
        trial = trial_with(bar, Checkpoint(folder, every_steps=1))
        trial.with_train_generator(DataLoader(data(), 10))
        if stops:  # all ranks stop one step later
            trial.state[torchbearer.CALLBACK_LIST].append([on_step_training(_stop)])
        trial.run(1)
    return sorted({int(n) for n in re.findall(r"\| (\d+)/100 \[", shown.getvalue())})


def _stop(state):
    state[torchbearer.STOP_TRAINING] = True


def test_a_resumed_epoch_goes_on_at_its_number_of_samples(two_ranks, tmp_path):
    (found, _) = two_ranks.run(resumed, (str(tmp_path),))
    assert found == [0, 40, 60, 80, 100]


def no_steps(samples, batch, drop_last):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        trial = trial_with()
        trial.with_train_generator(DataLoader(data(samples), batch, drop_last=drop_last)).run(2)
    return [str(each.message) for each in caught if "trains nothing" in str(each.message)]


def test_a_run_without_training_steps_says_so(two_ranks):
    first, second = two_ranks.run(no_steps, (100, 60, True))
    assert second == []
    [line] = first
    assert "0 training steps in an epoch of 100 samples, where a step takes 120" in line
    assert two_ranks.run(no_steps, (100, 50, True)) == [[], []]
    assert no_steps(100, 60, True) == []
    assert len(no_steps(50, 60, True)) == 1


def evaluation_only():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trial_with().with_val_generator(DataLoader(data(), 10)).run(1)


def test_a_run_that_is_to_evaluate_only_says_nothing(two_ranks):
    evaluation_only()
    two_ranks.run(evaluation_only)


def predictions_of_one_batch():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return trial_with().with_test_data(torch.randn(5, 3), 8, num_workers=0).predict(verbose=0)


def test_a_rank_without_data_predicts_without_a_warning(two_ranks):
    first, second = two_ranks.run(predictions_of_one_batch)
    assert first.shape == (5, 2)
    assert torch.equal(first, second)


class Counts(Tqdm):
    """A bar of the user's own."""

    steps = 0

    def _update(self, state):
        self.steps += 1


def own_bar():
    bar = Counts(file=io.StringIO())
    trial_with(bar).with_train_generator(DataLoader(data(), 10)).run(1)
    return bar.steps


def test_a_bar_of_the_users_own_is_shown_by_rank_zero_as_it_is(two_ranks):
    assert two_ranks.run(own_bar) == [5, 0]
