"""Metrics that callbacks add, that hold a state of their own, and of losses of every kind."""

import sys
import types
from typing import ClassVar

import pytest
import torch
import torchbearer
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset
from torchbearer import Metric, Trial, metrics
from torchbearer.callbacks import Callback, PyCM
from torchbearer.metrics import EpochLambda, MetricList, to_dict

from torchbearer_ddp.callbacks.data import ShardData
from torchbearer_ddp.callbacks.gradients import SyncGradients
from torchbearer_ddp.callbacks.metrics import SyncMetrics
from torchbearer_ddp.callbacks.rank_zero import RankZeroOnly
from torchbearer_ddp.errors import DesyncError, DistributedError
from torchbearer_ddp.group import collectives

CONFUSION = torchbearer.state_key("confusion")


def data(count=13, classes=3):
    generator = torch.Generator().manual_seed(count)
    x = 3 * torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(classes, (count,), generator=generator))


def make_trial(metric_list, *callbacks, criterion=None, outputs=3):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, outputs, dtype=torch.float64), torch.nn.Softmax(1)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    criterion = criterion or torch.nn.CrossEntropyLoss()
    callbacks = [*callbacks, ShardData(global_batch=True), SyncMetrics()]
    trial = Trial(model, optimizer, criterion, metric_list, callbacks, verbose=0)
    return trial.to(torch.float64)


def one_epoch(trial, count=16, train=None):
    trial.with_generators(
        train or DataLoader(data(count), batch_size=4), DataLoader(data(13), batch_size=4)
    )
    return without_previews(trial.run(1)[0])


def without_previews(found):
    return {k: v for k, v in found.items() if "running" not in k and "steps" not in k}


def compare(two_ranks, body, *args):
    """Each rank reports what one process does."""
    expected = body(*args)
    for found in two_ranks.run(body, args):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-10, nan_ok=True), name
    return expected


def use_pycm():
    """A stand-in for the package pycm, which counts pairs."""

    class ConfusionMatrix:
        def __init__(self, actual, predicted):
            pairs = torch.zeros(3, 3)
            for pair in zip(actual.tolist(), predicted.tolist(), strict=True):
                pairs[pair] += 1
            self.pairs = pairs.flatten().tolist()

    sys.modules["pycm"] = types.SimpleNamespace(ConfusionMatrix=ConfusionMatrix)


class Keeps(Callback):
    """Keeps the confusion matrix of each pass."""

    def __init__(self):
        super().__init__()
        self.kept = {}

    def on_end_training(self, state):
        self.kept[str(state[torchbearer.DATA])] = state[CONFUSION].pairs

    def on_end_validation(self, state):
        self.on_end_training(state)


def test_a_confusion_matrix_is_that_of_all_of_the_data(two_ranks):
    def body():
        use_pycm()
        matrices, keeps = PyCM().on_train().on_val().to_state(CONFUSION), Keeps()
        trial = make_trial(["acc", "loss"], matrices, keeps)
        values = {**one_epoch(trial), **keeps.kept}
        return {**values, "again": list(trial.evaluate().values())}

    expected = compare(two_ranks, body)
    assert sum(expected["train_data"]) == 16
    assert sum(expected["validation_data"]) == 13


def test_a_callback_that_adds_metrics_on_rank_zero_alone_is_refused(two_ranks):
    def body():
        use_pycm()
        trial = make_trial(["loss"], RankZeroOnly(PyCM().on_val()))
        with pytest.raises(
            DesyncError, match=r"metric pycm \(EpochLambda\) is on rank 0 but not on"
        ) as caught:
            one_epoch(trial)
        assert "without RankZeroOnly" in str(caught.value)

    two_ranks.run(body)


def test_a_metric_of_one_rank_is_named_where_the_others_have_none(two_ranks):
    def body():
        trial = make_trial(["loss"] if collectives.rank() == 1 else [])
        trial.with_val_generator(DataLoader(data(), batch_size=4))
        with pytest.raises(DesyncError, match=r"metric loss .Mean. is on rank 1 but not on rank 0"):
            trial.evaluate()
        trial = make_trial(["loss", "epoch"] if collectives.rank() == 1 else ["epoch", "loss"])
        trial.with_val_generator(DataLoader(data(), batch_size=4))
        assert trial.evaluate()["val_loss"] > 0

    two_ranks.run(body)


@to_dict
class Rows(EpochLambda):
    """Depends on the order of the samples."""

    def __init__(self, name="rows"):
        super().__init__(name, self.weigh, running=False)

    @staticmethod
    def weigh(y_pred, y_true):
        return (torch.arange(1, len(y_true) + 1) * y_pred[:, 0] * (1 + y_true)).sum().item()


def rows():
    metric = Rows("added")
    metric.reset(None)
    return metric


class Adds(Callback):
    """Adds metrics in mid-pass, either to the list or in a list of its own."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def on_sample(self, state):
        if state[torchbearer.BATCH] == 1 and self.how == "appends":
            loss = metrics.get_default("loss")
            loss.reset(state)
            state[torchbearer.METRIC_LIST].metric_list += [rows(), loss]

    def on_step_training(self, state):
        if state[torchbearer.BATCH] == 1 and self.how == "replaces":
            mean_row = metrics.mean(metrics.lambda_metric("first")(lambda p, t: p[:, 0].mean()))
            mean_row.reset(state)
            old = state[torchbearer.METRIC_LIST]
            state[torchbearer.METRIC_LIST] = MetricList([old, rows(), mean_row])


@pytest.mark.parametrize("how", ["appends", "replaces"])
def test_metrics_that_are_added_in_mid_pass(two_ranks, how):
    def body():
        trial = make_trial(["acc", "loss", Rows()], Adds(how))
        trial.with_train_generator(DataLoader(data(10), batch_size=4))  # the last of 3 is smaller
        return without_previews(trial.run(1)[0])

    assert "added" in compare(two_ranks, body)


@to_dict
class F1(Metric):
    """The F1 score of class 1, which no average of batches or of ranks gives."""

    pooling: ClassVar = {"hits": "sum", "found": "sum", "wanted": "sum"}

    def __init__(self, name="f1"):
        super().__init__(name)

    def reset(self, state):
        self.hits, self.found, self.wanted = 0, torch.zeros(()), torch.zeros(1).numpy()

    def process(self, state):
        predicted = state[torchbearer.Y_PRED].argmax(1) == 1
        actual = state[torchbearer.Y_TRUE] == 1
        self.hits += int((predicted & actual).sum())
        self.found += predicted.sum()
        self.wanted += actual.sum().numpy()

    def process_final(self, state):
        return float(2 * self.hits / (self.found + self.wanted[0]))


@to_dict
class Ordered(Metric):
    """Keeps items of batches and rows of samples, in order."""

    pooling: ClassVar = {"sizes": "gather", "rows": "gather", "items": "gather"}

    def __init__(self):
        super().__init__("ordered")

    def reset(self, state):
        self.sizes, self.items, self.rows = [], [], torch.zeros(0)

    def process(self, state):
        self.sizes.append(float(state[torchbearer.X].sum()))
        self.rows = torch.cat([self.rows, state[torchbearer.X][:, 0]])
        self.items += state[torchbearer.X][:, 1].tolist()

    def process_final(self, state):
        place = torch.arange(1.0, len(self.rows) + 1, dtype=torch.float64)
        values = (place * self.rows).sum() + (place * torch.tensor(self.items)).sum()
        return [float(values), len(self.items), sum(self.sizes)]


def test_metrics_that_declare_how_they_are_pooled(two_ranks):
    expected = compare(two_ranks, lambda: one_epoch(make_trial([F1(), Ordered(), "loss"]), 14))
    assert 0 < expected["val_f1"] < 1
    assert expected["val_ordered"][1] == 13


@pytest.mark.parametrize(
    ("pooling", "message"),
    [
        ({"hits": "average"}, "an attribute is pooled by 'sum' or 'gather'"),
        ({"hits": "gather"}, "its attribute hits is a int. Keep a tensor or a list there"),
        ({"missing": "sum"}, "has no attribute missing. Set it in reset"),
    ],
)
def test_a_declaration_that_is_wrong_is_named_on_every_rank(two_ranks, pooling, message):
    def body():
        metric = F1()
        if collectives.rank() == 1:
            metric.metric.pooling = pooling
        trial = make_trial([metric])
        trial.with_val_generator(DataLoader(data(), batch_size=4))
        with pytest.raises((ValueError, DistributedError), match=message):
            trial.evaluate()
        metric.metric.pooling = F1("").metric.pooling
        assert trial.evaluate()["val_f1"] > 0  # the ranks are still in step

    two_ranks.run(body)


def breaks(*_):
    if collectives.rank() == 1:
        raise RuntimeError("no value on this rank")
    return 1.0


@to_dict
class Breaks(Metric):
    def __init__(self):
        super().__init__("breaks")

    def process_final(self, state):
        return breaks()


@pytest.mark.parametrize(
    "make", [Breaks, lambda: to_dict(EpochLambda)("rows", breaks)], ids=["averaged", "gathered"]
)
def test_a_final_value_that_raises_on_one_rank_raises_on_all(two_ranks, make):
    def body():
        trial = make_trial([make(), "loss"])
        trial.with_val_generator(DataLoader(data(), batch_size=4))
        with pytest.raises((RuntimeError, DistributedError), match="no value on this"):
            trial.evaluate()
        return collectives.all_gather(collectives.rank(), "still in step")

    assert two_ranks.run(body) == [[0, 1]] * 2


def sum_of_state(state):
    predicted = state[torchbearer.Y_PRED].log()
    return torch.nn.functional.nll_loss(predicted, state[torchbearer.Y_TRUE], reduction="sum")


def masked(state):
    """A mean over what a mask of the user's own keeps."""
    each = torch.nn.functional.cross_entropy(
        state[torchbearer.Y_PRED], state[torchbearer.Y_TRUE], reduction="none"
    )
    return (each * kept(state)).sum() / kept(state).sum()


def kept(state):
    return state[torchbearer.X][:, 0] > -2


LOSSES = {
    "a mean": (torch.nn.CrossEntropyLoss(), [SyncGradients()]),
    "a sum": (torch.nn.CrossEntropyLoss(reduction="sum"), [SyncGradients()]),
    "a sum, no verdict": (torch.nn.CrossEntropyLoss(reduction="sum"), []),
    "a sum, a function": (sum_of_state, [SyncGradients()]),
    "a sum, as the user says": (sum_of_state, [SyncGradients(loss="sum")]),
    "class weights": (
        torch.nn.CrossEntropyLoss(torch.tensor([0.1, 2.0, 5.0]).double()),
        [SyncGradients()],
    ),
    "ignored": (torch.nn.CrossEntropyLoss(ignore_index=1), [SyncGradients()]),
    "ignored, no verdict": (torch.nn.CrossEntropyLoss(ignore_index=1), []),
    "a mask": (masked, [SyncGradients(weight=lambda state: kept(state).sum())]),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("count", [16, 14], ids=["equal batches", "a short last batch"])
def test_the_loss_is_that_of_one_process(two_ranks, name, count):
    def body():
        criterion, callbacks = LOSSES[name]
        return one_epoch(make_trial(["loss"], *callbacks, criterion=criterion), count)

    assert compare(two_ranks, body)["loss"] > 0


def test_a_part_without_a_target_that_counts_does_not_make_the_loss_nan(two_ranks):
    def body():
        dataset = data(8)
        dataset.tensors[1][1::2] = 1  # all that rank 1 has
        dataset.tensors[1][::2] = 2
        criterion = torch.nn.CrossEntropyLoss(ignore_index=1)
        trial = make_trial(["loss"], SyncGradients(), criterion=criterion)
        return one_epoch(trial, train=DataLoader(dataset, batch_size=4))

    assert compare(two_ranks, body)["loss"] > 0


@pytest.mark.parametrize("size", [2, 3])
def test_rows_of_a_batch_sampler_are_in_order(two_ranks, size):
    def body():
        batches = BatchSampler(SequentialSampler(range(13)), size, drop_last=False)
        trial = make_trial([Rows(), Ordered(), "loss"])
        trial.with_val_generator(DataLoader(data(13), batch_sampler=batches))
        return trial.evaluate()

    compare(two_ranks, body)
