"""The metrics of several ranks are those of one process."""

import contextlib
import io
import math
import warnings

import pytest
import torch
import torchbearer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)
from torchbearer import Metric, Trial, metrics
from torchbearer.callbacks import Callback, EarlyStopping, Tqdm
from torchbearer.metrics import mean, running_mean, std, to_dict, var

from tests.ranks import ranks, run_ranks
from torchbearer_ddp.callbacks.data import ShardData
from torchbearer_ddp.callbacks.metrics import SyncMetrics
from torchbearer_ddp.group import collectives
from torchbearer_ddp.metrics.pooled_list import PooledMetricList


def data(count, classes=3):
    generator = torch.Generator().manual_seed(count)
    x = torch.rand(count, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(classes, (count,), generator=generator))


@var
@std
@mean(dim=0)
@metrics.lambda_metric("outputs")
def outputs(y_pred, y_true):
    return y_pred


@running_mean
@std
@var(unbiased=False)
@mean
@metrics.lambda_metric("first_output")
def first_output(y_pred, y_true):
    return y_pred[:, 0].mean()  # one value per batch, as the loss


@to_dict
class WeightedSum(metrics.EpochLambda):
    """Depends on the order of the samples, so a wrong order shows."""

    def __init__(self):
        super().__init__("weighted_sum", self.weigh, running=False)

    @staticmethod
    def weigh(y_pred, y_true):
        place = torch.arange(len(y_true), dtype=torch.float64)
        return ((place + 1) * y_pred[:, 0] * (1 + y_true)).sum().item()


def all_metrics():
    return [
        "acc",
        "loss",
        "cat_acc",
        "epoch",
        "lr",
        metrics.TopKCategoricalAccuracy(k=2),
        std(metrics.Loss)(),
        outputs,
        first_output,
        WeightedSum(),
        torchbearer.EPOCH,
    ]


def make_trial(metric_list, *callbacks, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3, dtype=torch.float64), torch.nn.Softmax(1))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    callbacks = [*callbacks, ShardData(), SyncMetrics()]
    trial = Trial(model, optimizer, torch.nn.CrossEntropyLoss(), metric_list, callbacks, **options)
    return trial.to(torch.float64)


def report(count, batch_size, *, trained=0, scale=1):
    """What a Trial reports: on one process in a plain call, on a rank of several in a group."""
    trial = make_trial(all_metrics(), verbose=0)
    loader = DataLoader(data(count), batch_size=batch_size)
    trial.with_val_generator(loader).with_test_generator(loader)
    if trained:
        trial.with_train_generator(DataLoader(data(trained), batch_size=batch_size * scale))
        trial.run(1)
        return {k: v for k, v in trial.state[torchbearer.HISTORY][0].items() if "running" not in k}
    return {**trial.evaluate(), **trial.evaluate(data_key=torchbearer.TEST_DATA)}


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if name not in ("train_steps", "validation_steps"):
            assert found[name] == pytest.approx(value, rel=1e-11, abs=1e-11), name


@pytest.mark.parametrize(
    ("world_size", "count", "batch_size"),
    [(2, 13, 4), (3, 7, 4), (3, 20, 1)],
    ids=["uneven", "an empty rank", "batches of one"],
)
def test_evaluation_reports_what_one_process_does(world_size, count, batch_size):
    expected = report(count, batch_size)
    assert {"val_loss", "val_loss_std", "val_acc", "val_weighted_sum", "test_loss"} <= set(expected)
    for found in run_ranks(report, world_size, (count, batch_size)):
        same(found, expected)


def test_the_area_under_the_curve_is_that_of_all_predictions():
    def body():
        trial = make_trial([metrics.RocAucScore(one_hot_classes=3)], verbose=0)
        return trial.with_val_generator(DataLoader(data(21), batch_size=4)).evaluate()

    expected = body()
    assert 0 < expected["val_roc_auc_score"] < 1
    for found in run_ranks(body, 2):
        same(found, expected)


@pytest.mark.parametrize("world_size", [2, 3])
def test_training_reports_what_one_process_does_on_the_same_global_batches(world_size):
    trained = 6 * world_size + 2 * world_size  # the last batch is smaller
    expected = report(5, 3, trained=trained, scale=world_size)
    for found in run_ranks(report, world_size, (5, 3), {"trained": trained}):
        same(found, expected)
        assert found["train_steps"] == math.ceil(8 / 3)


@pytest.mark.parametrize(
    ("criterion", "names"),
    [
        (torch.nn.MSELoss(), ["acc", "mse", "loss"]),
        (torch.nn.BCELoss(), ["acc", "binary_acc", "loss"]),
        (torch.nn.MSELoss(reduction="sum"), ["loss"]),
    ],
)
def test_metrics_of_other_criteria(criterion, names):
    def body(batch_size):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 1, dtype=torch.float64), torch.nn.Sigmoid())
        dataset = data(11, classes=2)
        targets = dataset.tensors[1][:, None].double()
        loader = DataLoader(TensorDataset(dataset.tensors[0], targets), batch_size=3)
        train = DataLoader(loader.dataset, batch_size=batch_size, drop_last=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        callbacks = [SyncMetrics(), ShardData()]
        trial = Trial(model, optimizer, criterion, names, callbacks, verbose=0).to(torch.float64)
        history = trial.with_generators(train, loader).run(1)
        return {k: v for k, v in history[0].items() if "running" not in k}

    expected = body(4)
    for found in run_ranks(body, 2, (2,)):
        same(found, expected)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data(10))

    def __len__(self):
        return 10


@pytest.mark.parametrize("kind", ["batch sampler", "stream", "batches of the user's own"])
def test_other_loaders(kind):
    def body():
        dataset = data(10)
        batches = BatchSampler(SequentialSampler(range(10)), 3, drop_last=False)
        ready = [(x, y) for x, y in zip(*(t.split(3) for t in dataset.tensors), strict=True)]
        loader = {
            "batch sampler": lambda: DataLoader(dataset, batch_sampler=batches),
            "stream": lambda: DataLoader(Stream(), batch_size=3),
            "batches of the user's own": lambda: DataLoader(ready, batch_size=None),
        }[kind]()
        names = ["acc", "loss", outputs, first_output]
        return make_trial(names, verbose=0).with_val_generator(loader).evaluate()

    expected = body()
    for found in run_ranks(body, 2):
        same(found, expected)


@to_dict
class Last(Metric):
    """Keeps the last value it saw: nothing that could be pooled."""

    def __init__(self):
        super().__init__("last")

    def process(self, state):
        self.value = float(state[torchbearer.Y_TRUE].sum())

    def process_final(self, state):
        return self.value


@ranks(3)
def test_what_cannot_be_pooled_is_averaged_with_one_warning():
    trial = make_trial([Last(), "loss"], verbose=0)
    trial.with_val_generator(DataLoader(data(4), batch_size=2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        values = [trial.evaluate()["val_last"] for _ in range(2)]
    y = data(4).tensors[1]
    assert values == [float(y.sum()) / 2] * 2  # the third rank has no value
    about = [str(w.message) for w in caught if "cannot be pooled" in str(w.message)]
    assert len(about) == (1 if collectives.is_rank_zero() else 0)
    assert all("last (Last)" in text for text in about)


@ranks(2)
def test_nothing_is_pooled_twice():
    trial = make_trial(["loss", WeightedSum()], verbose=0)
    trial.with_val_generator(DataLoader(data(13), batch_size=4))
    first = trial.evaluate()
    pooled = trial.state[torchbearer.METRIC_LIST]
    state = torchbearer.State()
    state.update({torchbearer.DEVICE: "cpu"})
    assert pooled.process_final(state) == first
    assert trial.evaluate() == first


class StopsEarly(Callback):
    def on_step_validation(self, state):
        state[torchbearer.STOP_TRAINING] = collectives.rank() == 1


@ranks(2)
def test_a_stop_in_validation_on_one_rank_leaves_the_ranks_in_step():
    trial = make_trial(["acc", "loss"], StopsEarly(), verbose=0)
    trial.with_val_generator(DataLoader(data(24), batch_size=2))
    values = trial.evaluate()
    assert collectives.all_gather(values, "values") == [values, values]


class Reads(Callback):
    """Notes what callbacks read, in the hooks in which torchbearer's own read."""

    def __init__(self):
        super().__init__()
        self.read = []

    def on_end_training(self, state):
        self.read.append(state[torchbearer.METRICS]["loss"])

    def on_end_validation(self, state):
        self.read.append(state[torchbearer.METRICS]["val_loss"])

    def on_end_epoch(self, state):
        self.read.append(state[torchbearer.METRICS]["val_loss"])


@ranks(3)
def test_callbacks_read_the_values_of_all_ranks_and_stop_together():
    reads = Reads()
    trial = make_trial(["loss"], reads, EarlyStopping(patience=1), verbose=0)
    trial.with_generators(DataLoader(data(9), batch_size=2), DataLoader(data(3), batch_size=2))
    history = trial.run(5)
    assert len(history) == 2  # it does not learn
    assert collectives.all_gather(reads.read, "what was read") == [reads.read] * 3


@ranks(2)
def test_only_rank_zero_prints_and_counts_the_samples_of_all():
    shown = io.StringIO()
    loader = DataLoader(data(16), batch_size=2)
    trial = make_trial(["loss"], Tqdm(file=shown)).with_generators(loader, loader)
    for verbose in (-1, 2, 1):
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            trial.run(len(trial.state[torchbearer.HISTORY]) + 1, verbose=verbose)
        text = printed.getvalue()
        if collectives.rank() == 1:
            # A bar of epochs is drawn before any callback can tell, and wiped out again.
            assert "\n" not in text
            assert verbose == 1 or text == ""
            assert shown.getvalue() == ""
        elif verbose == 1:
            assert "it/s" in text
        else:
            assert "16/16" in text
            assert " samples/s" in text
            assert "val_loss" in text


def test_without_a_group_the_trial_is_untouched():
    trial = make_trial(["loss"])
    assert type(trial.state[torchbearer.METRIC_LIST]) is metrics.MetricList
    assert trial.verbose == 2


@ranks(2)
def test_only_some_ranks_can_add_up_their_batches():
    mine = [torch.tensor([2.0, 3.0]), torch.tensor([0.1, 0.7])][collectives.rank()]
    state = torchbearer.State()
    state.update({torchbearer.X: torch.zeros(4, 2), torchbearer.Y_TRUE: torch.zeros(4)})
    values = mean(metrics.lambda_metric("values")(lambda y_pred, y_true: y_pred))
    pooled = PooledMetricList.over(metrics.MetricList([values]))
    pooled.eval()
    pooled.reset(state)
    for value in mine:
        state[torchbearer.Y_PRED] = value
        pooled.process(state)
    single = ((torch.tensor(2.0) + 0.1) + 3.0) + 0.7
    assert pooled.process_final(state) == {"val_values": (single / 4).item()}
