"""The contract: every callback that torchbearer ships runs beside ours, on two ranks.

A callback that a new torchbearer adds fails the first test until it has a case here. Those that
cannot run at all are named with the reason, and a plain Trial, without any of ours, proves it.
"""

import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torchbearer
from torch import nn
from torchbearer import Callback, Trial, callbacks
from torchbearer.callbacks import imaging, init
from torchbearer.callbacks.manifold_mixup import ManifoldMixup

from tests.ranks import run_ranks
from torchbearer_ddp import RankZeroOnly, data_parallel
from torchbearer_ddp.group import collectives

EPOCHS, CLASSES, IMAGE = 2, 3, (1, 6, 6)
KEY = torchbearer.state_key("contract")


@dataclass
class Case:
    """How to run one callback.

    Args:
        make: Makes the callback, given a folder it may write to.
        model: Makes the model.
        criterion: The loss.
        needs: The optional package without which it cannot run.
        broken: How it fails in a plain Trial with the versions of today; empty where it works.
    """

    make: Callable[[str], Callback]
    model: Callable[[], nn.Module] | None = None
    criterion: Any = nn.functional.cross_entropy
    needs: str = ""
    broken: str = ""

    def reason(self) -> str:
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return f"No module named '{self.needs}'"
        return self.broken


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(32, CLASSES)
    )


class UnpackingNetwork(nn.Module):
    """Takes and returns dictionaries, as UnpackState has it."""

    def __init__(self):
        super().__init__()
        self.layers = network()

    def forward(self, x):
        return {torchbearer.Y_PRED: self.layers(x[torchbearer.X]), KEY: x[torchbearer.Y_TRUE]}


class FirstImage(imaging.ImagingCallback):
    """The image that the abstract ImagingCallback leaves to its user."""

    def on_batch(self, state):
        return state[torchbearer.X][0]


class CachedImage(imaging.CachingImagingCallback):
    """The image that the abstract CachingImagingCallback leaves to its user."""

    def on_cache(self, cache, state):
        return cache[0]


def writer(make):
    """Callbacks that write files are wrapped as users wrap them."""
    return Case(lambda folder: RankZeroOnly(lambda: make(folder)))


def decorated(decorator):
    """A function of state that a decorator has made a callback of."""
    return Case(lambda folder: decorator(lambda state: state.__setitem__(KEY, 1)))


def on_step(decorator):
    """A decorator of callbacks rather than of functions."""
    step = callbacks.on_step_training
    return Case(lambda folder: decorator(step(lambda state: state.__setitem__(KEY, 1))))


def penalty(state):
    return 0.1 * state[torchbearer.MODEL][-1].weight.abs().sum()


def scheduler(optimizer, last_epoch=-1):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, last_epoch=last_epoch)


HOOKS = [name for name in vars(Callback) if name.startswith("on_")]
NO_RANGE = "unexpected keyword argument 'range'"

CASES = {
    **{hook: decorated(getattr(callbacks, hook)) for hook in HOOKS},
    "LambdaCallback": Case(lambda folder: callbacks.decorators.LambdaCallback(print)),
    "bind_to": decorated(callbacks.bind_to(Callback.on_sample)),
    "add_to_loss": Case(lambda folder: callbacks.add_to_loss(penalty)),
    "once": on_step(callbacks.once),
    "once_per_epoch": on_step(callbacks.once_per_epoch),
    "only_if": on_step(callbacks.only_if(lambda state: state[torchbearer.BATCH] == 1)),
    "CallbackList": Case(lambda folder: callbacks.CallbackList([callbacks.TerminateOnNaN()])),
    "AggregatePredictions": Case(lambda folder: callbacks.AggregatePredictions()),
    "UnpackState": Case(
        lambda folder: callbacks.UnpackState([torchbearer.X, torchbearer.Y_TRUE]), UnpackingNetwork
    ),
    # What saves and logs
    "_Checkpointer": writer(lambda folder: callbacks.checkpointers._Checkpointer(f"{folder}/a/b")),
    "Best": writer(lambda folder: callbacks.Best(f"{folder}/best/model.pt")),
    "Interval": writer(lambda folder: callbacks.Interval(f"{folder}/i/model.pt", on_batch=True)),
    "MostRecent": writer(lambda folder: callbacks.MostRecent(folder + "/recent/{epoch}.pt")),
    "ModelCheckpoint": writer(lambda folder: callbacks.ModelCheckpoint(f"{folder}/m/model.pt")),
    "CSVLogger": writer(lambda folder: callbacks.CSVLogger(f"{folder}/log.csv")),
    "AbstractTensorBoard": writer(
        lambda folder: callbacks.tensor_board.AbstractTensorBoard(f"{folder}/abstract")
    ),
    "TensorBoard": writer(
        lambda folder: callbacks.TensorBoard(f"{folder}/tensorboard", write_batch_metrics=True)
    ),
    "TensorBoardText": writer(lambda folder: callbacks.TensorBoardText(f"{folder}/text")),
    "TensorBoardProjector": writer(
        lambda folder: callbacks.TensorBoardProjector(f"{folder}/projector", num_images=4)
    ),
    "TensorBoardImages": Case(
        lambda folder: callbacks.TensorBoardImages(folder, key=torchbearer.X, num_images=4),
        needs="torchvision",
        broken=NO_RANGE,
    ),
    "ConsolePrinter": Case(lambda folder: callbacks.ConsolePrinter()),
    "Tqdm": Case(lambda folder: callbacks.Tqdm()),
    "LiveLossPlot": Case(lambda folder: callbacks.LiveLossPlot(), needs="livelossplot"),
    "PyCM": Case(lambda folder: callbacks.PyCM().on_val().to_state(KEY), needs="pycm"),
    "ImagingCallback": Case(lambda folder: FirstImage().on_train().to_state(KEY)),
    "FromState": Case(
        lambda folder: imaging.FromState(torchbearer.X, lambda x: x[0]).on_val().to_state(KEY)
    ),
    "CachingImagingCallback": Case(
        lambda folder: CachedImage(num_images=4).on_train().to_state(KEY)
    ),
    "MakeGrid": Case(
        lambda folder: imaging.MakeGrid(num_images=4).on_train().to_state(KEY),
        needs="torchvision",
        broken=NO_RANGE,
    ),
    "ClassAppearanceModel": Case(
        lambda folder: (
            imaging.ClassAppearanceModel(CLASSES, IMAGE, steps=2).on_train().to_state(KEY)
        )
    ),
    # What changes the training
    "EarlyStopping": Case(lambda folder: callbacks.EarlyStopping()),
    "TerminateOnNaN": Case(lambda folder: callbacks.TerminateOnNaN()),
    "GradientClipping": Case(lambda folder: callbacks.GradientClipping(0.01)),
    "GradientNormClipping": Case(lambda folder: callbacks.GradientNormClipping(0.01)),
    "WeightDecay": Case(lambda folder: callbacks.WeightDecay()),
    "L1WeightDecay": Case(lambda folder: callbacks.L1WeightDecay()),
    "L2WeightDecay": Case(lambda folder: callbacks.L2WeightDecay()),
    "Cutout": Case(lambda folder: callbacks.Cutout(1, 2)),
    "RandomErase": Case(lambda folder: callbacks.RandomErase(1, 2)),
    "CutMix": Case(lambda folder: callbacks.CutMix(1, CLASSES)),
    "Mixup": Case(lambda folder: callbacks.Mixup(), criterion=callbacks.Mixup.mixup_loss),
    "ManifoldMixup": Case(
        lambda folder: ManifoldMixup().at_depth(None), criterion=callbacks.Mixup.mixup_loss
    ),
    "SamplePairing": Case(lambda folder: callbacks.SamplePairing(lambda state: True)),
    "BCPlus": Case(lambda folder: callbacks.BCPlus(classes=CLASSES)),
    "LabelSmoothingRegularisation": Case(
        lambda folder: callbacks.LabelSmoothingRegularisation(0.1, CLASSES)
    ),
    "WeightInit": Case(lambda folder: init.WeightInit(lambda m: nn.init.ones_(m.weight))),
    "KaimingNormal": Case(lambda folder: init.KaimingNormal()),
    "KaimingUniform": Case(lambda folder: init.KaimingUniform()),
    "XavierNormal": Case(lambda folder: init.XavierNormal()),
    "XavierUniform": Case(lambda folder: init.XavierUniform()),
    "ZeroBias": Case(lambda folder: init.ZeroBias()),
    "LsuvInit": Case(lambda folder: init.LsuvInit(torch.randn(4, *IMAGE))),
    "TorchScheduler": Case(lambda folder: callbacks.TorchScheduler(scheduler)),
    "LambdaLR": Case(lambda folder: callbacks.LambdaLR(lambda epoch: 0.5**epoch)),
    "StepLR": Case(lambda folder: callbacks.StepLR(1, step_on_batch=True)),
    "MultiStepLR": Case(lambda folder: callbacks.MultiStepLR([1])),
    "ExponentialLR": Case(lambda folder: callbacks.ExponentialLR(0.5)),
    "CosineAnnealingLR": Case(lambda folder: callbacks.CosineAnnealingLR(4)),
    "CyclicLR": Case(lambda folder: callbacks.CyclicLR(0.01, 0.1, monitor=None)),
    "ReduceLROnPlateau": Case(
        lambda folder: callbacks.ReduceLROnPlateau(),
        broken="unexpected keyword argument 'verbose'",  # gone from torch's scheduler
    ),
}
HELPERS = {"count_args", "get_writer", "close_writer"}  # functions that make no callback


def run(name: str, folder: str, ours: list[Callback]) -> nn.Module:
    case = CASES[name]
    model = (case.model or network)()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    trial = Trial(model, optimizer, case.criterion, ["loss"], [*ours, case.make(folder)], verbose=0)
    x, y = torch.randn(24, *IMAGE, generator=torch.Generator().manual_seed(0)), torch.arange(24)
    trial.with_train_data(x, y % CLASSES, batch_size=4, num_workers=0)
    trial.with_val_data(x, y % CLASSES, batch_size=4, num_workers=0)
    assert len(trial.run(EPOCHS)) in range(1, EPOCHS + 1)
    return model


def exports() -> dict[str, str]:
    """Every callback class, and every public function beside them, with its module."""
    found = {}
    package = callbacks.__name__
    for module in [
        package,
        *(m.name for m in pkgutil.walk_packages(callbacks.__path__, f"{package}.")),
    ]:
        for name, value in vars(importlib.import_module(module)).items():
            is_class = inspect.isclass(value) and issubclass(value, Callback)
            is_function = inspect.isfunction(value) and not name.startswith("_")
            if (is_class or is_function) and value.__module__.startswith(package):
                found[value.__name__] = value.__module__.removeprefix(f"{package}.").split(".")[0]
    return found


def test_every_callback_has_a_case():
    assert set(exports()) - HELPERS == set(CASES)


def together(names: list[str], folder: str) -> None:
    for name in names:
        torch.manual_seed(collectives.rank())
        try:
            model = run(name, folder, data_parallel())
        except Exception as error:
            raise AssertionError(f"{name} failed beside our callbacks") from error
        weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        mine, others = collectives.all_gather(weights, f"the parameters after {name}")
        assert torch.isfinite(mine).all(), name
        assert torch.equal(mine, others), f"{name} leaves the ranks with different parameters"


GROUPS = ["decorators", "init", "torch_scheduler", "the rest"]


@pytest.mark.parametrize("group", GROUPS)
def test_every_callback_runs_on_two_ranks_and_leaves_them_equal(group, tmp_path):
    modules = exports()
    names = [
        name
        for name, case in CASES.items()
        if (modules[name] if modules[name] in GROUPS else "the rest") == group and not case.reason()
    ]
    assert names
    run_ranks(together, 2, (names, str(tmp_path)))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.reason()])
def test_what_is_left_out_fails_in_a_plain_trial_too(name, tmp_path):
    with pytest.raises((TypeError, ModuleNotFoundError), match=CASES[name].reason()):
        run(name, str(tmp_path), [])
