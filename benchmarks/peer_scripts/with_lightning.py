"""Lightning with ``strategy='ddp'``: its Trainer starts the other processes."""

import lightning
import task
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader


class Digits(lightning.LightningModule):
    def __init__(self, steps):
        super().__init__()
        self.model = task.build()
        self.criterion = nn.CrossEntropyLoss()
        self.steps = steps

    def training_step(self, batch, number):
        return self._step(batch, "")

    def validation_step(self, batch, number):
        self._step(batch, "val_")

    def _step(self, batch, prefix):
        x, y = batch
        predicted = self.model(x)
        loss = self.criterion(predicted, y)
        right = (predicted.argmax(1) == y).float().mean()
        values = {f"{prefix}loss": loss, f"{prefix}acc": right}
        self.log_dict(values, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(x))
        return loss

    def on_train_batch_end(self, outputs, batch, number):
        self.steps()

    def configure_optimizers(self):
        return task.optimizer_of(self.model)


def train():
    training, held_out = task.data()
    steps = task.Steps()
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=task.WORLD,
        max_epochs=task.EPOCHS,
        callbacks=[ModelCheckpoint(task.FOLDER / "checkpoints", save_top_k=-1)],
        logger=TensorBoardLogger(task.FOLDER / "logs"),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(
        Digits(steps),
        DataLoader(training, task.BATCH, shuffle=True),
        DataLoader(held_out, task.HELD_OUT_BATCH),
    )
    accuracy = float(trainer.callback_metrics["val_acc"])
    steps.report(trainer.global_rank, trainer.world_size, accuracy)


if __name__ == "__main__":
    train()
