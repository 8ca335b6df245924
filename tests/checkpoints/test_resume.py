"""Runs that continue: with tensors of every layout, metrics of every value, errors on one rank."""

import functools
import warnings

import numpy
import pytest
import torch
import torchbearer
from torch.utils.data import DataLoader, TensorDataset
from torchbearer.callbacks import Callback, StepLR

from tests.programs import Stopped, assert_same, failing, outcome
from tests.ranks import RankPool, ranks
from tests.stand_ins import cuda_devices
from torchbearer_ddp import Checkpoint, CheckpointError, RankZeroOnly, data_parallel
from torchbearer_ddp.checkpoints import file, rank_state
from torchbearer_ddp.checkpoints.file import Label
from torchbearer_ddp.checkpoints.writer import finish_writing
from torchbearer_ddp.data import randomness
from torchbearer_ddp.errors import DistributedError
from torchbearer_ddp.group import collectives, membership, wire


def as_a_new_process():
    torch.set_num_threads(1)
    randomness.seed_all(3)
    if (group := membership.current()) is not None:
        group.runs = 0


def quietly(trial, epochs):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*callbacks are not those.*")
        trial.run(epochs)


def images(*callbacks):
    """A convolution in channels_last, trained by fused Adam."""
    as_a_new_process()
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4 * 9, 2)
    ).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), 0.01, fused=True)
    trial = torchbearer.Trial(
        model,
        optimizer,
        torch.nn.CrossEntropyLoss(),
        callbacks=[*data_parallel(), *callbacks],
        verbose=0,
    )
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, 3, 5, 5, generator=generator), torch.arange(24) % 2)
    return trial.with_train_generator(DataLoader(data, batch_size=3, shuffle=True))


@pytest.mark.parametrize("background", [True, False])
def test_fused_adam_in_channels_last(tmp_path, background):
    @ranks(2)
    def body():
        whole = images()
        whole.run(3)
        with pytest.raises(Stopped):
            images(failing(7), Checkpoint(tmp_path, every_steps=1, background=background)).run(3)
        finish_writing()
        collectives.barrier()
        resumed = images(Checkpoint(tmp_path))
        quietly(resumed, 3)
        assert_same(outcome(resumed), outcome(whole))
        model, optimizer = (resumed.state[k] for k in (torchbearer.MODEL, torchbearer.OPTIMIZER))
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        assert optimizer.state[model[0].weight]["exp_avg"].stride() == model[0].weight.stride()

    body()


class Odd(torch.nn.Module):
    """A model with buffers of every kind."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 2)
        self.register_buffer("adjacency", torch.eye(6).to_sparse_coo())
        self.register_buffer("rows", torch.eye(6).to_sparse_csr())
        self.register_buffer("scale", torch.ones(1).expand(6))
        self.register_buffer("small", torch.ones(2).to(torch.float8_e4m3fn))
        self.register_buffer("counts", torch.zeros(2, dtype=torch.uint16))

    def forward(self, x):
        if self.training:
            # They change with the data, so the ranks differ in them until the end of the epoch.
            mean = x.detach().mean(0)
            self.scale = mean[:1].expand(6)
            self.adjacency = torch.diag(mean.round(decimals=1)).to_sparse_coo()
            self.rows = torch.diag(mean.relu()).to_sparse_csr()
            self.small = mean[:2].to(torch.float8_e4m3fn)
            self.counts = (self.counts.int() + 1).to(torch.uint16)
        mixed = torch.sparse.mm(self.adjacency, x.t()) + torch.mm(self.rows, x.t())
        return self.layer(x + mixed.t() + self.scale + self.small.float().sum())


def confusion(y_pred, y_true):
    matrix = numpy.zeros((2, 2))
    numpy.add.at(matrix, (y_true.numpy(), y_pred.argmax(1).numpy()), 1)
    return matrix


def odd_buffers(*callbacks):
    as_a_new_process()
    model = Odd()
    matrix = torchbearer.metrics.EpochLambda("confusion", confusion, running=False)
    trial = torchbearer.Trial(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        torch.nn.CrossEntropyLoss(),
        metrics=["loss", torchbearer.metrics.to_dict(matrix)],
        callbacks=[*data_parallel(), *callbacks],
        verbose=0,
    )
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, 6, generator=generator), torch.arange(24) % 2)
    return trial.with_train_generator(DataLoader(data, batch_size=3, shuffle=True))


def same_outcome(found, expected):
    for one, other in zip(found.pop("history"), expected.pop("history"), strict=True):
        matrices = [each.pop("confusion") for each in (one, other)]
        assert all(isinstance(each, numpy.ndarray) for each in matrices)
        assert numpy.array_equal(*matrices)
        assert one == other
    for each in (found, expected):
        for name in ("adjacency", "rows", "small"):
            each[name] = each[name].to_dense().float()
    assert_same(found, expected)


def check_odd_buffers(folder, at):
    whole = odd_buffers()
    whole.run(3)
    with pytest.raises(Stopped):
        odd_buffers(failing(at), Checkpoint(folder, every_steps=1)).run(3)
    finish_writing()
    collectives.barrier()
    resumed = odd_buffers(Checkpoint(folder))
    quietly(resumed, 3)
    same_outcome(outcome(resumed), outcome(whole))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("at", [3, 9])
def test_buffers_and_metrics_of_every_kind(tmp_path, at):
    check_odd_buffers(tmp_path, at)


def test_buffers_and_metrics_of_every_kind_on_ranks(tmp_path):
    with RankPool(2) as pool:
        pool.run(functools.partial(check_odd_buffers, tmp_path, 7))


class Refusing(Callback):
    """Rank zero alone finds that it cannot load its state."""

    def state_dict(self):
        return {"path": "gone"}

    def load_state_dict(self, state_dict):
        raise OSError("the log is gone")


def refused_on_rank_zero(folder):
    images(RankZeroOnly(Refusing), Checkpoint(folder)).run(1)
    collectives.barrier()
    trial = images(RankZeroOnly(Refusing), Checkpoint(folder))
    with pytest.raises((OSError, DistributedError), match="the log is gone") as caught:
        trial.run(2)
    assert isinstance(caught.value, OSError) == collectives.is_rank_zero()
    with pytest.raises((OSError, DistributedError), match="the log is gone"):
        Checkpoint.load(images(RankZeroOnly(Refusing)), folder / "latest")
    assert collectives.all_gather(1, "the ranks are still in step") == [1, 1]


def monitored_array(folder):
    trial = odd_buffers(Checkpoint(folder, monitor="confusion"))
    expected = r"monitor='confusion'\): .* numpy.ndarray of shape \(2, 2\)"
    with pytest.raises(CheckpointError, match=expected):
        trial.run(1)
    assert collectives.all_gather(1, "the ranks are still in step") == [1, 1]


@pytest.mark.parametrize("body", [refused_on_rank_zero, monitored_array])
def test_an_error_on_rank_zero_alone_is_raised_on_all(tmp_path, body):
    with RankPool(2) as pool:
        pool.run(functools.partial(body, tmp_path))


@ranks(2)
def test_each_rank_is_sent_its_own_part_alone(tmp_path):
    def find():
        parts = [{"packed": torch.full((3,), float(rank))} for rank in range(2)]
        return "a/file", {"model": {}, "torchbearer_ddp": {"world_size": 2, "ranks": parts}}

    def changed():
        path, payload = find()
        payload["torchbearer_ddp"]["ranks"] *= 2  # of a run on four ranks
        return path, payload

    rank = collectives.rank()
    path, payload = rank_state.sent_by_rank_zero(find, "a checkpoint")
    assert path == "a/file"
    (own,) = payload["torchbearer_ddp"]["ranks"].items()
    assert own[0] == rank
    assert own[1]["packed"].tolist() == [rank] * 3
    _, payload = rank_state.sent_by_rank_zero(changed, "a checkpoint")
    assert payload["torchbearer_ddp"] == {"world_size": 2}
    assert rank_state.sent_by_rank_zero(lambda: ("", None), "a checkpoint") == ("", None)


@pytest.mark.parametrize("changed", [False, True])
def test_a_run_that_continues_on_another_kind_of_device_is_told(tmp_path, changed):
    with pytest.raises(Stopped):
        images(Checkpoint(tmp_path, every_steps=1), failing(3)).run(2)
    finish_writing()
    with cuda_devices.visible(*["GPU-a"] * changed), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        images(Checkpoint(tmp_path)).run(2)
    told = [str(w.message) for w in found if "saved by a run on the CPU" in str(w.message)]
    assert len(told) == changed
    assert all("continues on cuda" in text for text in told)


def with_metrics(path, *names, **options):
    as_a_new_process()
    model = torch.nn.Linear(2, 1)
    trial = torchbearer.Trial(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        torch.nn.MSELoss(),
        list(names),
        callbacks=[*data_parallel(), Checkpoint(path, keep=None, **options)],
        verbose=0,
    )
    data = TensorDataset(torch.ones(6, 2), torch.arange(6.0)[:, None])
    return trial.with_train_generator(DataLoader(data, 2))


def test_metrics_that_are_not_those_of_the_checkpoint_are_not_mixed_up(tmp_path):
    with_metrics(tmp_path, "loss", "mse", every_steps=1).run(1)
    (tmp_path / "epoch-0001.pt").unlink()
    (tmp_path / "step-0000003.pt").unlink(missing_ok=True)
    with pytest.warns(
        UserWarning, match=r"The metrics are not those of .*step-0000002.pt \("
    ) as said:
        with_metrics(tmp_path, "mse", "loss", every_epochs=None).run(1)
    assert len([each for each in said if "metrics" in str(each.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with_metrics(tmp_path, "loss", "mse", every_epochs=None).run(1)


def test_other_metrics_where_no_step_of_the_epoch_is_left_are_refused(tmp_path):
    with_metrics(tmp_path, "loss", every_steps=3, every_epochs=None).run(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CheckpointError, match="no step of its epoch is left"):
            with_metrics(tmp_path, "mse", "loss").run(1)


class Gathering(torchbearer.bases.Metric):
    """A metric of the user's own, which fails on what it was not made for."""

    def reset(self, state):
        self.rows = []

    def process(self, state):
        self.rows = [*self.rows, [1.0]]
        return {}

    def process_final(self, state):
        return {self.name: sum(row[0] for row in self.rows)}


@pytest.mark.parametrize("step", [2, 3])  # of 3 in the epoch
@pytest.mark.parametrize("rows", [7, [None]])
def test_metrics_that_fail_on_what_a_file_holds_name_it(tmp_path, rows, step):
    with_metrics(tmp_path, Gathering("own"), every_steps=step, every_epochs=None).run(1)
    path = tmp_path / f"step-{step:07d}.pt"
    payload = file.read(path)
    packed = wire.decode(payload["torchbearer_ddp"]["ranks"][0]["packed"])
    held = next(each for each in packed["metrics"].values() if "rows" in each)
    with_metrics(tmp_path, Gathering("own")).run(1)  # nothing is odd yet
    (tmp_path / "epoch-0001.pt").unlink()
    held["rows"] = rows
    payload["torchbearer_ddp"]["ranks"][0]["packed"] = wire.encode(packed)
    file.write(path, payload, Label(9, 0, 9))
    said = rf"{path.name}: the metrics failed when they were first used .*\(TypeError: .*\)"
    with pytest.raises(CheckpointError, match=said) as raised:
        with_metrics(tmp_path, Gathering("own")).run(1)
    assert isinstance(raised.value.__cause__, TypeError)


def test_a_learning_rate_that_is_a_tensor_and_its_scheduler(tmp_path):
    def made():
        trial = images(StepLR(1, 0.5), Checkpoint(tmp_path))
        parameters = trial.state[torchbearer.MODEL].parameters()
        optimizer = torch.optim.Adam(parameters, torch.tensor(0.1), foreach=False)
        trial.state[torchbearer.OPTIMIZER] = optimizer
        return trial

    made().run(1)
    continued = made()
    continued.run(2)
    rate = continued.state[torchbearer.OPTIMIZER].param_groups[0]["lr"]
    assert rate.item() == pytest.approx(0.025)


@pytest.mark.parametrize(("at", "warned"), [(4, 0), (7, 1)])
def test_a_loader_that_goes_on_from_epoch_to_epoch(tmp_path, at, warned):
    """Its place is not known after the first epoch, which is said."""

    def trial(*callbacks):
        made = images(*callbacks).for_train_steps(5).with_inf_train_loader()
        made.state[torchbearer.TRAIN_GENERATOR].inf = True
        return made

    whole = trial()
    whole.run(2)
    with pytest.raises(Stopped):
        trial(failing(at), Checkpoint(tmp_path, every_steps=1)).run(2)
    finish_writing()
    resumed = trial(Checkpoint(tmp_path))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        resumed.run(2)
    told = [str(w.message) for w in found if "with_inf_train_loader()" in str(w.message)]
    assert len(told) == warned
    if not warned:
        assert_same(outcome(resumed), outcome(whole))
