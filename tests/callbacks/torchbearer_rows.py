"""The table of torchbearer's callbacks: how each is run, and what of its effect is compared.

Each row is run as a plain Trial, without any callback of ours, in one process with the global
batch, and beside ``data_parallel()`` on two ranks. ``docs/torchbearer_callbacks.rst`` is the same
table for readers.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torchbearer
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Callback, Trial, callbacks
from torchbearer.callbacks import imaging, init
from torchbearer.callbacks.manifold_mixup import ManifoldMixup

from tests.callbacks import optional_packages
from torchbearer_ddp.group import collectives

EPOCHS, CLASSES, IMAGE = 3, 3, (3, 6, 6)
TRAINED, EVALUATED, GLOBAL_BATCH, EVALUATED_BATCH = 24, 20, 8, 4
KEY = torchbearer.state_key("row")
HOOKS = [name for name in vars(Callback) if name.startswith("on_")]


class Run:
    """One run of a row: what its parts need, and what is known at its end."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.notes: list[Any] = []
        self.printed = io.StringIO()
        self.bar = io.StringIO()
        self.trial: Any = None

    def note(self, value: Callable[[Any], Any]) -> Callable[[Any], None]:
        """A function of the state that notes a value of it."""
        return lambda state: self.notes.append(value(state))

    @property
    def model(self) -> nn.Module:
        return self.trial.state[torchbearer.MODEL]

    @property
    def history(self) -> list[dict[str, Any]]:
        return metrics_of(self.trial.state[torchbearer.HISTORY])


def metrics_of(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The history without the number of steps, which is each rank's own."""
    return [{k: v for k, v in epoch.items() if not k.endswith("_steps")} for epoch in history]


def mean_loss() -> Any:
    """The loss without its running mean, which is a preview of each rank's own data."""
    return torchbearer.metrics.mean(type(torchbearer.metrics.Loss().root))()


@dataclass
class Row:
    """One callback.

    Attributes:
        make: Makes the callback, or a list with it.
        ranks: Where it acts on several ranks, for the page.
        compared: What is compared, for the page.
        effect: What is compared, of a run that has ended.
        others: What ranks other than zero have: "same" effect, "none", or the "sum" is compared.
        plain: Makes what a plain Trial needs for the same effect, where the callback itself does
            not work with today's torch, or acts on the first batch only; None if nothing does.
        model, criterion, metric, lr: Parts of the Trial.
    """

    make: Callable[[Run], Any]
    ranks: str
    compared: str
    effect: Callable[[Run], Any]
    others: str = "same"
    plain: Callable[[Run], Any] | str | None = "make"
    model: Callable[[], nn.Module] = field(default_factory=lambda: network)
    criterion: Any = nn.functional.cross_entropy
    metric: Callable[[], Any] = mean_loss
    lr: float = 0.1


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, CLASSES))


def images() -> torch.Tensor:
    return torch.rand(TRAINED, *IMAGE, generator=torch.Generator().manual_seed(0))


class UnpackingNetwork(nn.Module):
    """Takes and returns dictionaries, as UnpackState has it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, x: Any) -> Any:
        return {torchbearer.Y_PRED: self.layers(x[torchbearer.X]), KEY: x[torchbearer.Y_TRUE]}


def play(name: str, folder: str, *, ours: list[Callback] | None = None) -> tuple[Any, list[str]]:
    """Runs a row and returns its effect on this rank, and the files that this rank has written."""
    row = ROWS[name]
    run = Run(f"{folder}/{collectives.rank()}")
    Path(run.folder).mkdir(parents=True)
    torch.manual_seed(collectives.rank())
    make = row.make if ours is not None or row.plain == "make" else row.plain
    made = as_list(make(run))
    model = row.model()
    run.trial = Trial(
        model,
        torch.optim.SGD(model.parameters(), row.lr, momentum=0.5),
        row.criterion,
        [row.metric()],
        [*(ours or []), *made],
        verbose=0,
    )
    x = images()
    y = torch.arange(TRAINED) % CLASSES
    batch = GLOBAL_BATCH // collectives.world_size()
    run.trial.with_train_generator(DataLoader(TensorDataset(x, y), batch))
    evaluated = TensorDataset(x[:EVALUATED], y[:EVALUATED])
    run.trial.with_val_generator(DataLoader(evaluated, EVALUATED_BATCH))
    with contextlib.redirect_stdout(run.printed), optional_packages.installed():
        run.trial.run(EPOCHS)
        files = [path for path in sorted(Path(run.folder).rglob("*")) if path.is_file()]
        return row.effect(run), [str(path.relative_to(run.folder)) for path in files]


def as_list(made: Any) -> list[Callback]:
    return made if isinstance(made, list) else [made]


# What is compared.


def parameters(run: Run) -> list[torch.Tensor]:
    return [p.detach().clone() for p in run.model.parameters()]


def trained(run: Run) -> Any:
    return parameters(run), run.history


def notes(run: Run) -> list[Any]:
    return run.notes


def epochs(run: Run) -> int:
    return len(run.history)


def text_files(run: Run, suffix: str = "") -> dict[str, list[str]]:
    """Every file with this suffix, line by line."""
    return {
        str(path.relative_to(run.folder)): path.read_text().splitlines()
        for path in sorted(Path(run.folder).rglob(f"*{suffix}"))
        if path.is_file()
    }


def checkpoints(run: Run) -> dict[str, Any]:
    """The model, optimizer and history in each file."""
    found = {}
    for path in sorted(Path(run.folder).rglob("*.pt")):
        held = torch.load(path, weights_only=False)
        found[str(path.relative_to(run.folder))] = [
            held[torchbearer.MODEL],
            held[torchbearer.OPTIMIZER],
            metrics_of(held[torchbearer.HISTORY]),
        ]
    return found


def saved_tensors(run: Run) -> dict[str, Any]:
    return {path.name: torch.load(path) for path in sorted(Path(run.folder).rglob("*.pt"))}


def pictures(run: Run) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(run.folder).rglob("*.png"))}


def events(run: Run, *, skipped: str = r"(?!)") -> dict[str, list[Any]]:
    """The points of each tag, by folder and tag; of the skipped tags only the steps."""
    found: dict[str, list[Any]] = {}
    for path in sorted(Path(run.folder).rglob("*tfevents*")):
        folder = path.parent.relative_to(run.folder)
        found.setdefault(f"{folder}", [])
        for event in LegacyEventFileLoader(str(path)).Load():
            if event.graph_def:
                found.setdefault(f"{folder} graph", [])
            for value in event.summary.value:
                kind = value.WhichOneof("value")
                content: Any = getattr(value, kind)
                content = content.encoded_image_string if kind == "image" else content
                content = content.string_val[0].decode() if kind == "tensor" else content
                if re.search(skipped, value.tag):
                    content = None
                found.setdefault(f"{folder} {value.tag}", []).append((event.step, content))
    return found


def gradient_norms(state: Any) -> list[float]:
    return [float(p.grad.norm()) for p in state[torchbearer.MODEL].parameters()]


def sums(state: Any) -> Any:
    """What mixing samples within a batch does not change: the sums over the batch."""
    targets = state[torchbearer.Y_TRUE]
    targets = targets if isinstance(targets, tuple) else (targets,)
    return [state[torchbearer.X].sum(0), *(target.double().sum(0) for target in targets)]


# Parts of rows.

EVERY_RANK = "every rank"
RANK_ZERO = "rank zero"
ALL_IMAGES = "rank zero, with the images of all ranks"
OWN_NUMBERS = "every rank, with random numbers of its own"
LIST_OF_PARAMETERS = "every rank; on every batch, not on the first one only"


def decorated(hook: str) -> Row:
    """A function that a decorator has bound to a hook."""
    per_batch = hook.endswith("_validation") and hook.split("_")[1] not in ("start", "end")
    return Row(
        lambda run: getattr(callbacks, hook)(lambda state: run.notes.append(1)),
        EVERY_RANK,
        "the calls" + (", of all ranks together" if per_batch else ""),
        lambda run: torch.tensor(len(run.notes)),
        others="sum" if per_batch else "same",
    )


def counted(make: Callable[[Callable[[Any], None]], Callback]) -> Row:
    """A callback around a function of the state, whose calls are noted."""
    return Row(
        lambda run: make(run.note(counter_of)),
        EVERY_RANK,
        "the calls: their epochs and batches",
        notes,
    )


def written(
    make: Callable[[str], Callback],
    compared: str,
    effect: Callable[[Run], Any],
    ranks: str = RANK_ZERO,
    **options: Any,
) -> Row:
    """A callback that writes into a folder."""
    return Row(lambda run: make(run.folder), ranks, compared, effect, others="none", **options)


def saved(make: Callable[[str], Callback]) -> Row:
    """A callback that saves the Trial."""
    compared = "the files: their names, and the model, optimizer and history in them"
    return written(make, compared, checkpoints)


def scheduled(make: Callable[[], Callback], **options: Any) -> Row:
    """A scheduler of learning rates."""

    def rate(state: Any) -> float:
        return state[torchbearer.OPTIMIZER].param_groups[0]["lr"]

    def with_notes(made: Callable[[], Callback]) -> Callable[[Run], Any]:
        return lambda run: [made(), callbacks.on_step_training(run.note(rate))]

    plain = options.pop("plain", None)
    if plain is not None:
        options["plain"] = with_notes(plain)
    return Row(
        with_notes(make),
        EVERY_RANK,
        "the learning rate of every step, and the model",
        lambda run: (run.notes, parameters(run)),
        **options,
    )


def clipped(make: Callable[..., Callback]) -> Row:
    """A callback that changes gradients; torchbearer alone needs a list of parameters."""

    def note(run: Run) -> Callback:
        return callbacks.on_step_training(run.note(gradient_norms))

    def plain(run: Run) -> list[Callback]:
        late = callbacks.on_start(lambda state: clip.__setattr__("params", listed(state)))
        clip = make(params=[])
        return [late, clip, note(run)]

    def listed(state: Any) -> list[nn.Parameter]:
        return list(state[torchbearer.MODEL].parameters())

    return Row(
        lambda run: [make(), note(run)],
        LIST_OF_PARAMETERS,
        "the gradients of every step, and the model",
        lambda run: (run.notes, trained(run)),
        plain=plain,
    )


def initialised(make: Callable[[], Callback]) -> Row:
    """A callback that initialises the model; the ranks have different seeds."""

    def first(run: Run) -> Callback:
        return callbacks.on_start_epoch(run.note(lambda state: parameters_of(state)))

    def parameters_of(state: Any) -> list[torch.Tensor]:
        return [p.detach().clone() for p in state[torchbearer.MODEL].parameters()]

    return Row(
        lambda run: [make(), first(run)],
        "every rank; rank zero's values are sent to the others",
        "the parameters before training, and after it",
        lambda run: (run.notes[0], parameters(run)),
    )


def brightened(state: Any) -> None:
    state[torchbearer.X] += 5


def mixed(make: Callable[[], Any], compared: str, value: Any = sums, **options: Any) -> Row:
    """A callback that changes a batch at random: what is noted does not depend on the draw."""
    changed: list[bool] = []

    def note(state: Any) -> Any:
        originals = images().flatten(1)
        distances = torch.cdist(state[torchbearer.X].flatten(1), originals)
        changed.append(bool((distances.min(1).values > 0.01).any()))
        return value(state)

    def effect(run: Run) -> list[Any]:
        assert any(changed), "no image was changed"
        changed.clear()
        return run.notes

    return Row(
        lambda run: [*as_list(make()), callbacks.on_sample(run.note(note))],
        OWN_NUMBERS,
        compared,
        effect,
        others="sum",
        **options,
    )


def save_picture(folder: str) -> Callable[[Any, Any, Any], None]:
    """A handler of the user's own."""

    def handler(image: torch.Tensor, index: int, state: Any) -> None:
        name = f"{state[torchbearer.EPOCH]}-{state[torchbearer.BATCH]}-{index}.pt"
        torch.save(image, f"{folder}/{name}")

    return handler


class FirstImage(imaging.ImagingCallback):
    """The image that the abstract ImagingCallback leaves to its user."""

    def on_batch(self, state: Any) -> torch.Tensor:
        return state[torchbearer.X][0]


class CachedImages(imaging.CachingImagingCallback):
    """The images that the abstract CachingImagingCallback leaves to its user."""

    def on_cache(self, cache: torch.Tensor, state: Any) -> torch.Tensor:
        return cache


def identity() -> nn.Module:
    """Parameters that do not change the outputs, so that these show what was mixed."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(108, CLASSES))
    nn.init.constant_(model[1].weight, 0.01)
    nn.init.zeros_(model[1].bias)
    return model


def invalid_on_one_rank(state: Any) -> None:
    """The second sample of an epoch, which rank one has, makes the loss of its batch NaN."""
    marked = (state[torchbearer.X] == images()[1]).flatten(1).all(1).any()
    if state[torchbearer.EPOCH] == 1 and marked:
        state[torchbearer.LOSS] = state[torchbearer.LOSS] * float("nan")


def plateau(**options: Any) -> Callable[..., Any]:
    return functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, **options)


def matrix_row(run: Run) -> Callback:
    made = callbacks.PyCM().on_val().to_state(KEY)
    return made.to_pycm_file(f"{run.folder}/" + "matrix-{epoch}")


def bar_lines(run: Run) -> list[tuple[str, str]]:
    """The last line of each pass: its name, and its metrics."""
    # A line that is shorter than the one before is filled up with spaces.
    line = r"(\d+/\d+\(\w\)): 100%.*?\[.*?, ([a-z_]+=[^\r\]]+)\] *\n"
    return re.findall(line, run.bar.getvalue())


def printed_lines(run: Run) -> list[str]:
    """What stands at the end of each pass."""
    return [line.rpartition("\r")[2] for line in run.printed.getvalue().split("\n") if line]


def plotted(run: Run) -> list[Any]:
    return [(plot.updates, plot.drawn) for plot in optional_packages.PlotLosses.made]


def penalty(state: Any) -> torch.Tensor:
    return 0.1 * state[torchbearer.MODEL][-1].weight.abs().sum()


def counter_of(state: Any) -> tuple[int, int]:
    return state[torchbearer.EPOCH], state[torchbearer.BATCH]


ROWS: dict[str, Row] = {
    **{hook: decorated(hook) for hook in HOOKS},
    "LambdaCallback": counted(
        lambda f: callbacks.bind_to(Callback.on_step_training)(
            callbacks.decorators.LambdaCallback(f)
        )
    ),
    "bind_to": counted(lambda f: callbacks.bind_to(Callback.on_sample)(f)),
    "once": counted(lambda f: callbacks.once(callbacks.on_step_training(f))),
    "once_per_epoch": counted(lambda f: callbacks.once_per_epoch(callbacks.on_step_training(f))),
    "only_if": counted(
        lambda f: callbacks.only_if(lambda state: state[torchbearer.BATCH] == 1)(
            callbacks.on_step_training(f)
        )
    ),
    "CallbackList": counted(
        lambda f: callbacks.CallbackList([callbacks.on_sample(f), callbacks.on_step_training(f)])
    ),
    "add_to_loss": Row(
        lambda run: callbacks.add_to_loss(penalty),
        EVERY_RANK,
        "the model and the history",
        trained,
    ),
    "UnpackState": Row(
        lambda run: callbacks.UnpackState([torchbearer.X, torchbearer.Y_TRUE]),
        EVERY_RANK,
        "the model and the history",
        trained,
        model=UnpackingNetwork,
    ),
    "AggregatePredictions": Row(
        lambda run: [
            callbacks.AggregatePredictions(),
            callbacks.on_end_validation(
                run.note(lambda state: state[torchbearer.FINAL_PREDICTIONS])
            ),
        ],
        "every rank, with the predictions of all ranks",
        "the predictions, in their order",
        notes,
    ),
    # What saves and logs.
    "_Checkpointer": written(
        lambda folder: callbacks.checkpointers._Checkpointer(f"{folder}/a/b"),
        "that it writes nothing by itself",
        checkpoints,
    ),
    "Best": saved(lambda folder: callbacks.Best(folder + "/best/{epoch}-{val_loss:.3f}.pt")),
    "Interval": saved(lambda folder: callbacks.Interval(folder + "/i/{epoch}.pt")),
    "MostRecent": saved(lambda folder: callbacks.MostRecent(folder + "/recent/{epoch}.pt")),
    "ModelCheckpoint": saved(
        lambda folder: callbacks.ModelCheckpoint(folder + "/m/{epoch}.pt", save_best_only=True)
    ),
    "CSVLogger": written(
        lambda folder: callbacks.CSVLogger(f"{folder}/log.csv"),
        "the file, line by line",
        text_files,
    ),
    "AbstractTensorBoard": written(
        lambda folder: callbacks.tensor_board.AbstractTensorBoard(f"{folder}/abstract"),
        "the folders",
        events,
    ),
    "TensorBoard": written(
        lambda folder: callbacks.TensorBoard(
            f"{folder}/curves", write_batch_metrics=True, batch_step_size=1
        ),
        "the points of the epochs, and the steps of the points of batches, whose values are of "
        "rank zero's part of the batch",
        functools.partial(events, skipped="^batch/|running_"),
        metric=lambda: "loss",
    ),
    "TensorBoardText": written(
        lambda folder: callbacks.TensorBoardText(f"{folder}/text"),
        "the texts of the epochs",
        functools.partial(events, skipped="^trial/"),
    ),
    "TensorBoardProjector": written(
        lambda folder: callbacks.TensorBoardProjector(f"{folder}/projector", num_images=18),
        "the embeddings and labels, of more images than one rank has",
        functools.partial(text_files, suffix=".tsv"),
        ALL_IMAGES,
    ),
    "TensorBoardImages": written(
        lambda folder: callbacks.TensorBoardImages(
            f"{folder}/images", key=torchbearer.X, num_images=18
        ),
        "the pictures, of more images than one rank has",
        events,
        ALL_IMAGES,
        plain=None,
    ),
    "ConsolePrinter": Row(
        lambda run: callbacks.ConsolePrinter(),
        RANK_ZERO,
        "the line at the end of each pass",
        printed_lines,
        others="none",
    ),
    "Tqdm": Row(
        lambda run: callbacks.Tqdm(file=run.bar),
        "rank zero; it counts the samples of all ranks",
        "the line at the end of each pass",
        bar_lines,
        others="none",
    ),
    "LiveLossPlot": Row(
        lambda run: callbacks.LiveLossPlot(),
        RANK_ZERO,
        "the values that are plotted",
        plotted,
        others="none",
    ),
    "PyCM": Row(
        lambda run: [
            matrix_row(run),
            callbacks.on_end_epoch(run.note(lambda state: state[KEY].table)),
        ],
        "every rank, with the predictions of all ranks; files are written by rank zero",
        "the matrices",
        notes,
    ),
    "ImagingCallback": written(
        lambda folder: FirstImage().on_train().with_handler(save_picture(folder)),
        "the picture of each batch",
        saved_tensors,
        "rank zero, with its images",
    ),
    "FromState": written(
        lambda folder: (
            imaging.FromState(torchbearer.X, lambda x: x[0], callbacks.once_per_epoch)
            .on_val()
            .to_file(folder + "/{epoch}-{index}.png")
        ),
        "the picture of each epoch",
        pictures,
        "rank zero, with its images",
    ),
    "CachingImagingCallback": written(
        lambda folder: (
            CachedImages(num_images=18).on_train().to_file(folder + "/{epoch}-{index}.png")
        ),
        "the pictures, of more images than one rank has",
        pictures,
        ALL_IMAGES,
    ),
    "MakeGrid": Row(
        lambda run: [
            imaging.MakeGrid(num_images=18)
            .on_val()
            .to_state(KEY)
            .to_file(run.folder + "/{epoch}.png"),
            callbacks.on_end_epoch(run.note(lambda state: state[KEY])),
        ],
        ALL_IMAGES,
        "the pictures, of more images than one rank has; in the state, on every rank",
        lambda run: run.notes,
        plain=None,
    ),
    "ClassAppearanceModel": written(
        lambda folder: (
            imaging.ClassAppearanceModel(CLASSES, IMAGE, steps=2, target=1)
            .on_train()
            .with_handler(save_picture(folder))
        ),
        "the picture that it optimises",
        saved_tensors,
    ),
    # What changes the training.
    "EarlyStopping": Row(
        lambda run: callbacks.EarlyStopping(min_delta=1.0),
        EVERY_RANK,
        "the number of epochs, and the history",
        lambda run: run.history,
    ),
    "TerminateOnNaN": Row(
        lambda run: [callbacks.TerminateOnNaN(), callbacks.on_criterion(invalid_on_one_rank)],
        "every rank; all stop where one does",
        "the number of epochs, where the loss of one rank is NaN",
        epochs,
        metric=lambda: "loss",
    ),
    **{
        kind.__name__: clipped(functools.partial(kind, 0.01 if "Clip" in kind.__name__ else 0.1))
        for kind in (
            callbacks.GradientClipping,
            callbacks.GradientNormClipping,
            callbacks.WeightDecay,
            callbacks.L1WeightDecay,
            callbacks.L2WeightDecay,
        )
    },
    "LabelSmoothingRegularisation": Row(
        lambda run: callbacks.LabelSmoothingRegularisation(0.1, CLASSES),
        EVERY_RANK,
        "the model and the history",
        trained,
    ),
    "Cutout": mixed(
        lambda: callbacks.Cutout(1, 12, constant=0.5),
        "the images, with a hole as large as the image",
        lambda state: state[torchbearer.X].sum(0),
    ),
    "RandomErase": mixed(
        lambda: [callbacks.on_sample(brightened), callbacks.RandomErase(1, 12)],
        "the number of replaced pixels, with a hole as large as the image",
        lambda state: (state[torchbearer.X] < 1).sum(),
    ),
    "CutMix": mixed(
        lambda: callbacks.CutMix(1, CLASSES),
        "the sums of the targets over the batch",
        lambda state: sums(state)[1:],
    ),
    "Mixup": mixed(
        lambda: callbacks.Mixup(lam=0.7),
        "the sums of the images and of both targets over the batch",
        criterion=callbacks.Mixup.mixup_loss,
    ),
    "SamplePairing": mixed(
        lambda: callbacks.SamplePairing(lambda state: True),
        "the sums of the images and of the targets over the batch",
    ),
    "BCPlus": mixed(
        lambda: callbacks.BCPlus(classes=CLASSES),
        "the sums of the targets over the batch, and that every image has mean 0",
        lambda state: [sums(state)[1], state[torchbearer.X].mean((1, 2, 3)).abs().max()],
    ),
    "ManifoldMixup": Row(
        lambda run: [
            ManifoldMixup(lam=0.7).for_layers(["1"]).at_depth(0),
            callbacks.on_forward(run.note(lambda state: state[torchbearer.Y_PRED].sum(0))),
        ],
        OWN_NUMBERS,
        "the sums of the mixed layer over the batch",
        notes,
        others="sum",
        model=identity,
        criterion=callbacks.Mixup.mixup_loss,
        lr=0.0,
    ),
    "WeightInit": initialised(lambda: init.WeightInit(lambda m: nn.init.normal_(m.weight))),
    "KaimingNormal": initialised(init.KaimingNormal),
    "KaimingUniform": initialised(init.KaimingUniform),
    "XavierNormal": initialised(init.XavierNormal),
    "XavierUniform": initialised(init.XavierUniform),
    "ZeroBias": initialised(init.ZeroBias),
    "LsuvInit": initialised(lambda: init.LsuvInit(torch.rand(4, *IMAGE))),
    "TorchScheduler": scheduled(
        lambda: callbacks.TorchScheduler(
            lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        )
    ),
    "LambdaLR": scheduled(lambda: callbacks.LambdaLR(lambda epoch: 0.5**epoch)),
    "StepLR": scheduled(lambda: callbacks.StepLR(1, gamma=0.9, step_on_batch=True)),
    "MultiStepLR": scheduled(lambda: callbacks.MultiStepLR([1])),
    "ExponentialLR": scheduled(lambda: callbacks.ExponentialLR(0.5)),
    "CosineAnnealingLR": scheduled(lambda: callbacks.CosineAnnealingLR(4)),
    "CyclicLR": scheduled(
        lambda: callbacks.CyclicLR(0.01, 0.1, monitor=None, step_size_up=2, step_on_batch=True)
    ),
    "ReduceLROnPlateau": scheduled(
        lambda: callbacks.ReduceLROnPlateau(patience=0, threshold=10.0, threshold_mode="abs"),
        plain=lambda: callbacks.TorchScheduler(
            plateau(patience=0, threshold=10.0, threshold_mode="abs"), monitor="val_loss"
        ),
    ),
}


def page_table() -> str:
    """The rows as the table of the page; callbacks of which the same is said share a row."""
    said: dict[tuple[str, str], list[str]] = {}
    for name, row in ROWS.items():
        said.setdefault((row.ranks, row.compared), []).append(f"``{name}``")
    head = ("Callback", "On several ranks", "Compared with one process")
    cells = [head, *((", ".join(names), *texts) for texts, names in said.items())]
    lines = [".. list-table::", "   :header-rows: 1", "   :widths: 30 30 40", ""]
    for callback, *texts in cells:
        lines += [f"   * - {callback}", *(f"     - {text}" for text in texts)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page_table())
