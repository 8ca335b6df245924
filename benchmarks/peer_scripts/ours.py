"""torchbearer_ddp: the ranks are started by the script itself."""

import task
import torchbearer
from torch import nn
from torch.utils.data import DataLoader

from torchbearer_ddp import (
    Checkpoint,
    TensorBoard,
    data_parallel,
    device,
    rank,
    run_distributed,
    world_size,
)


def train():
    training, held_out = task.data()
    model = task.build()
    steps = task.Steps()
    count = torchbearer.callbacks.on_step_training(lambda _: steps())
    callbacks = [
        *data_parallel(),
        Checkpoint(task.FOLDER / "checkpoints", keep=None),
        TensorBoard(
            task.FOLDER / "logs", write_graph=False, write_summary=False, write_batch_metrics=False
        ),
        count,
    ]
    trial = torchbearer.Trial(
        model, task.optimizer_of(model), nn.CrossEntropyLoss(), ["acc", "loss"], callbacks
    )
    trial.with_generators(
        DataLoader(training, task.BATCH, shuffle=True), DataLoader(held_out, task.HELD_OUT_BATCH)
    )
    history = trial.to(device()).run(task.EPOCHS, verbose=0)
    steps.report(rank(), world_size(), history[-1]["val_acc"])


if __name__ == "__main__":
    run_distributed(train, nproc_per_node=task.WORLD)
