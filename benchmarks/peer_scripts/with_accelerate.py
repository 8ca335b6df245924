"""Accelerate, started by torchrun: ``accelerate launch --cpu`` starts one process, in silence."""

import task
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader


def totals(accelerator, model, loader, criterion, optimizer=None, steps=None):
    """One pass: the sums of losses and of right answers, and the number of samples."""
    model.train(optimizer is not None)
    found = torch.zeros(3)
    for x, y in loader:
        with torch.set_grad_enabled(optimizer is not None):
            predicted = model(x)
            loss = criterion(predicted, y)
        if optimizer is not None:
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            steps()
        right = (predicted.argmax(1) == y).sum()
        found += torch.stack([loss.detach() * len(x), right, torch.tensor(len(x))])
    return accelerator.reduce(found)


def train():
    folders = ProjectConfiguration(
        task.FOLDER, logging_dir=task.FOLDER / "logs", automatic_checkpoint_naming=True
    )
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_config=folders)
    training, held_out = task.data()
    model = task.build()
    criterion = nn.CrossEntropyLoss()
    model, optimizer, loader, held_out_loader = accelerator.prepare(
        model,
        task.optimizer_of(model),
        DataLoader(training, task.BATCH, shuffle=True),
        DataLoader(held_out, task.HELD_OUT_BATCH),
    )
    accelerator.init_trackers("digits")
    steps = task.Steps()
    for epoch in range(task.EPOCHS):
        loss, right, count = totals(accelerator, model, loader, criterion, optimizer, steps)
        val_loss, val_right, val_count = totals(accelerator, model, held_out_loader, criterion)
        values = {
            "loss": float(loss / count),
            "acc": float(right / count),
            "val_loss": float(val_loss / val_count),
            "val_acc": float(val_right / val_count),
        }
        accelerator.log(values, step=epoch)
        accelerator.save_state()
    accelerator.end_training()
    steps.report(accelerator.process_index, accelerator.num_processes, values["val_acc"])


if __name__ == "__main__":
    train()
