"""Everything that trains is in the file, and continues: GANs, probes, learned losses, scalers."""

import functools
import threading
import warnings

import pytest
import torch
import torchbearer
from torch.utils.data import DataLoader, TensorDataset
from torchbearer.callbacks import Callback, on_sample
from torchbearer.state import StateKey

from tests.programs import Stopped, assert_same, failing, outcome
from tests.ranks import RankPool
from torchbearer_ddp import Checkpoint, CheckpointError, RankZeroOnly, SyncGradients, SyncMetrics
from torchbearer_ddp.checkpoints import contents, file, trained_state
from torchbearer_ddp.checkpoints.writer import finish_writing
from torchbearer_ddp.data import randomness
from torchbearer_ddp.group import collectives, membership

DISC, DISC_OPTIMIZER = StateKey("disc"), StateKey("disc_optimizer")
LOSS, LOOSE, ODD, FAILS = (StateKey(name) for name in ("loss_module", "loose", "odd", "fails"))


class Adversary(Callback):
    """Trains the discriminator that is in the state, as torchbearer's own example does."""

    def on_init(self, state):
        disc = torch.nn.Sequential(
            torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
        )
        state[DISC] = disc
        state[DISC_OPTIMIZER] = torch.optim.Adam(disc.parameters(), 0.01)

    def on_forward(self, state):
        state[DISC_OPTIMIZER].zero_grad()
        state[DISC](
            state[torchbearer.X] + state[torchbearer.Y_PRED].detach().mean()
        ).mean().backward()
        state[DISC_OPTIMIZER].step()
        state[torchbearer.Y_PRED] = state[torchbearer.Y_PRED] + state[DISC](state[torchbearer.X])


class Probe(Callback):
    """Trains modules of its own, made at its start, with a scheduler and a scaler."""

    def on_start(self, state):
        self.layers = {"a": torch.nn.Linear(6, 1), "b": [torch.nn.Linear(1, 1)]}
        parameters = [*self.layers["a"].parameters(), *self.layers["b"][0].parameters()]
        self.offset = torch.nn.Parameter(torch.rand(1))
        self.optimizer = torch.optim.SGD([*parameters, self.offset], 0.1, momentum=0.9)
        first = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 3])
        second = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(
            self.optimizer, [first, second], milestones=[5]
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)

    def on_step_training(self, state):
        loss = self.layers["b"][0](self.layers["a"](state[torchbearer.X])) + self.offset
        self.optimizer.zero_grad()
        self.scaler.scale(loss.square().mean()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()


class Learned(torch.nn.Module):
    """A loss with a parameter and a buffer."""

    def __init__(self):
        super().__init__()
        self.sigma = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, y_pred, y_true):
        if self.training:
            self.mean.lerp_(y_pred.detach().mean(), 0.1)
        return (
            (y_pred - self.mean - y_true) / self.sigma
        ).square().mean() + self.sigma.square().sum()


def gan(*callbacks):
    return trial_of(torch.nn.MSELoss(), [], [Adversary(), *callbacks])


def probe(*callbacks):
    return trial_of(torch.nn.MSELoss(), [], [Probe(), *callbacks])


def rank_zero_probe(*callbacks):
    return trial_of(torch.nn.MSELoss(), [], [RankZeroOnly(Probe()), *callbacks])


def learned(*callbacks):
    loss, loose = Learned(), torch.nn.Parameter(torch.ones(1))

    def criterion(y_pred, y_true):
        return loss(y_pred * loose, y_true)

    trial = trial_of(criterion, [*loss.parameters(), loose], callbacks)
    trial.state[LOSS] = loss
    return trial


def trial_of(criterion, parameters, callbacks, skip=lambda model: []):
    torch.set_num_threads(1)
    randomness.seed_all(3)
    if (group := membership.current()) is not None:
        group.runs = 0
    model = torch.nn.Linear(6, 1)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(24, 6, generator=generator), torch.randn(24, 1, generator=generator)
    )
    trial = torchbearer.Trial(
        model,
        torch.optim.Adam([*model.parameters(), *parameters], 0.01),
        criterion,
        metrics=["loss"],
        callbacks=[SyncGradients(skip=skip(model)), SyncMetrics(), *callbacks],
        verbose=0,
    )
    # Without SyncModel: what a rank trains for itself may differ between ranks here.
    return trial.with_train_generator(DataLoader(data, batch_size=3, shuffle=True))


def everything(trial):
    """What must be equal, also of what the finder knows."""
    found = outcome(trial)
    for name, held in trained_state.collect(trial.state).items():
        for key, value in held.items():
            found[f"{name} {key}"] = value
    return found


def equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert same(found[name], value), (name, found[name], value)


def same(one, other):
    if isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in other)
    if isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def check(build, folder, at):
    whole = build()
    whole.run(3)
    with pytest.raises(Stopped):
        build(failing(at), Checkpoint(folder, every_steps=2)).run(3)
    finish_writing()
    collectives.barrier()
    resumed = build(Checkpoint(folder))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*callbacks are not those.*")
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step|.*epoch parameter")
        resumed.run(3)
    equal(everything(resumed), everything(whole))


def local_layer(*callbacks):
    """A layer of the model that each rank trains for itself."""
    return trial_of(torch.nn.MSELoss(), [], callbacks, skip=lambda model: [model.bias])


SHAPES = [gan, probe, rank_zero_probe, learned]


@pytest.mark.parametrize("build", SHAPES)
@pytest.mark.parametrize("at", [6, 11, 18])
def test_what_trains_beside_the_model_continues(tmp_path, build, at):
    check(build, tmp_path, at)


def test_on_ranks_each_continues_with_its_own(tmp_path):
    with RankPool(2) as pool:
        for build in [*SHAPES, local_layer]:
            folder = tmp_path / build.__name__
            pool.run(functools.partial(check, build, folder, 7))
    section = file.read(tmp_path / "local_layer" / "latest")["torchbearer_ddp"]
    assert [set(each["others"]) for each in section["ranks"]] == [{"model", "optimizer"}] * 2
    assert set(section["ranks"][0]["others"]["model"]) == {"bias"}
    section = file.read(tmp_path / "gan" / "latest")["torchbearer_ddp"]
    differ = [each["others"] for each in section["ranks"]]
    # Of a module only the tensors that differ.
    assert [set(each) for each in differ] == [{"state['disc']"}] * 2
    assert set(differ[0]["state['disc']"]) == {"1.running_mean", "1.running_var"}


def verdict_comes_back(folder):
    trial = gan(Checkpoint(folder))
    trial.run(1)
    collectives.barrier()
    saved = file.read(folder / "latest")["torchbearer_ddp"]["callbacks"]
    assert [kind for kind, _ in saved["SyncGradients"]["losses"]] == ["mean"]
    assert saved["Checkpoint"] == callbacks_of(trial)["Checkpoint"].state_dict()
    seen = []

    @torchbearer.callbacks.on_start_training
    def note(state):
        seen.append(callbacks_of(resumed)["SyncGradients"].state_dict())

    resumed = gan(Checkpoint(folder, monitor="loss"), note)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resumed.run(2)
    assert seen == [saved["SyncGradients"]]


def callbacks_of(trial):
    return contents.named_callbacks(trial.state[torchbearer.CALLBACK_LIST])


def test_our_own_callbacks_states_are_saved_and_put_back_before_the_first_step(tmp_path):
    with RankPool(2) as pool:
        pool.run(functools.partial(verdict_comes_back, tmp_path))


def test_names_in_the_file(tmp_path):
    gan(Checkpoint(tmp_path / "gan")).run(1)
    probe(Checkpoint(tmp_path / "probe")).run(1)
    learned(Checkpoint(tmp_path / "learned")).run(1)
    found = {
        name: sorted(file.read(tmp_path / name / "latest")["torchbearer_ddp"]["others"])
        for name in ("gan", "probe", "learned")
    }
    assert found == {
        "gan": ["state['disc']", "state['disc_optimizer']"],
        "probe": [
            "Probe.layers['a']",
            "Probe.layers['b'][0]",
            "Probe.optimizer",
            "Probe.scaler",
            "Probe.scheduler",
            "parameters outside of modules",
        ],
        "learned": ["parameters outside of modules", "state['loss_module']"],
    }


def test_a_part_of_the_model_and_a_loader_are_not_saved_again(tmp_path):
    @on_sample
    def holds(state):
        pass

    trial = gan(holds, Checkpoint(tmp_path))
    holds.part = trial.state[torchbearer.MODEL]
    holds.loader, holds.trial, holds.kind = trial.state[torchbearer.TRAIN_GENERATOR], trial, Probe
    trial.run(1)
    others = file.read(tmp_path / "latest")["torchbearer_ddp"]["others"]
    assert sorted(others) == ["state['disc']", "state['disc_optimizer']"]


class Odd:
    """What it returns is not plain data."""

    def state_dict(self):
        return {"lock": threading.Event()}

    def load_state_dict(self, state_dict):
        raise AssertionError


class Raising(Odd):
    def state_dict(self):
        raise RuntimeError("not on this rank")


def test_what_cannot_be_saved_is_named_once(tmp_path):
    trial = gan(Checkpoint(tmp_path))
    trial.state[ODD], trial.state[FAILS] = Odd(), Raising()
    with pytest.warns(UserWarning, match="Not in the checkpoints") as found:
        trial.run(3)
    (message,) = [str(w.message) for w in found if "Not in the checkpoints" in str(w.message)]
    assert "state['odd']['lock'] is a threading.Event" in message
    assert "state['fails'] raised RuntimeError('not on this rank')" in message


def test_a_thing_that_is_new_or_gone_is_named(tmp_path):
    gan(Checkpoint(tmp_path)).run(1)
    with pytest.warns(
        UserWarning,
        match=r"only in the checkpoint: state\['disc'\], .*only in this "
        r"run: parameters outside of modules, state\['loose'\], state\['loss_module'\]",
    ):
        learned_in_place_of_the_gan(tmp_path).run(2)


def learned_in_place_of_the_gan(folder):
    trial = learned(Checkpoint(folder))
    model = trial.state[torchbearer.MODEL]
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    trial.state[torchbearer.OPTIMIZER] = optimizer
    trial.state[LOOSE] = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    return trial


def test_another_shape_is_refused_with_its_name(tmp_path):
    gan(Checkpoint(tmp_path)).run(1)
    trial = gan(Checkpoint(tmp_path))
    trial.state[DISC][0] = torch.nn.Linear(6, 5)
    with pytest.raises(CheckpointError, match=r"latest|epoch-0001.*not of this state\['disc'\]: 0"):
        trial.run(2)


def test_load_brings_them_into_a_trial(tmp_path):
    trained = gan(Checkpoint(tmp_path))
    trained.run(1)
    other = gan()
    Checkpoint.load(other, tmp_path / "latest")
    assert_same(other.state[DISC].state_dict(), dict(trained.state[DISC].state_dict()))


@pytest.mark.parametrize(
    ("name", "key", "odd"),
    [
        ("loss_module", "patience", [None]),
        ("loss_module", "best", {}),
        ("odd", "scale", torch.ones(2)),
    ],
)
def test_what_torchs_own_classes_would_only_fail_on_later_is_refused(name, key, odd):
    trial = torchbearer.Trial(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(trial.state[torchbearer.MODEL].parameters())
    trial.state[LOSS] = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    trial.state[ODD] = torch.amp.GradScaler("cpu")
    saved = trained_state.collect(trial.state)
    trained_state.restore(trial.state, saved, {})
    place = f"state[{name!r}]"
    with pytest.raises(CheckpointError, match=rf"does not fit .*{key}"):
        trained_state.restore(trial.state, {**saved, place: {**saved[place], key: odd}}, {})
