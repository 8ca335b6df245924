"""DistributedDataParallel in a loop of one's own, started by torchrun."""

import task
import torch
import torch.distributed as dist
from tensorboardX import SummaryWriter
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def totals(model, loader, criterion, optimizer=None, steps=None):
    """One pass: the sums of losses and of right answers, and the number of samples."""
    model.train(optimizer is not None)
    found = torch.zeros(3)
    for x, y in loader:
        with torch.set_grad_enabled(optimizer is not None):
            predicted = model(x)
            loss = criterion(predicted, y)
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps()
        right = (predicted.argmax(1) == y).sum()
        found += torch.stack([loss.detach() * len(x), right, torch.tensor(len(x))])
    dist.all_reduce(found)
    return found


def train():
    dist.init_process_group("gloo")
    training, held_out = task.data()
    model = DistributedDataParallel(task.build())
    optimizer = task.optimizer_of(model)
    criterion = nn.CrossEntropyLoss()
    sampler = DistributedSampler(training)
    loader = DataLoader(training, task.BATCH, sampler=sampler)
    held_out_sampler = DistributedSampler(held_out, shuffle=False)
    held_out_loader = DataLoader(held_out, task.HELD_OUT_BATCH, sampler=held_out_sampler)
    writes = dist.get_rank() == 0
    writer = SummaryWriter(task.FOLDER / "logs") if writes else None
    steps = task.Steps()
    for epoch in range(task.EPOCHS):
        sampler.set_epoch(epoch)
        loss, right, count = totals(model, loader, criterion, optimizer, steps)
        val_loss, val_right, val_count = totals(model, held_out_loader, criterion)
        if writer is not None:
            writer.add_scalar("loss", loss / count, epoch)
            writer.add_scalar("acc", right / count, epoch)
            writer.add_scalar("val_loss", val_loss / val_count, epoch)
            writer.add_scalar("val_acc", val_right / val_count, epoch)
            states = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**states, "epoch": epoch}, task.FOLDER / f"epoch-{epoch}.pt")
    if writer is not None:
        writer.close()
    steps.report(dist.get_rank(), dist.get_world_size(), float(val_right / val_count))
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
