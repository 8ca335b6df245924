"""Scripts for ``prove``: a training of two lines each way, with one thing that is special."""

from __future__ import annotations

#: The parts that a script may have of its own, and what they are otherwise.
_PARTS = {
    "imports": "",
    "seed": "torch.manual_seed(5)",
    "data": "x = torch.randn(88, 6)\ny = (x[:, 0] * x[:, 1] > 0).long()",
    "data_set": "TensorDataset(x, y)",
    "model": "nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))",
    "before": "",
    "optimizer": "torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)",
    "criterion": "nn.CrossEntropyLoss()",
    "callbacks": "",
    "options": "global_batch=True",
    "loader": "DataLoader(data, 12, shuffle=True)",
    "validation": "DataLoader(TensorDataset(x[:30], y[:30]), 8, shuffle=True)",
    "run": "trial.run(3)",
}
_SCRIPT = """\
import torch
import torchbearer
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchbearer import Trial
from torchbearer_ddp import data_parallel, rank, world_size
{imports}

{seed}
{data}
data = {data_set}
model = {model}
{before}
trial = Trial(
    model,
    {optimizer},
    {criterion},
    metrics=["acc", "loss"],
    callbacks=[{callbacks}*data_parallel({options})],
    verbose=0,
)
trial.with_generators({loader}, {validation})
{run}
"""


def script(**parts: str) -> str:
    """The script with some of its parts replaced."""
    assert parts.keys() <= _PARTS.keys()
    return _SCRIPT.format(**{**_PARTS, **parts})


_NORMALISED = "nn.Sequential(nn.Linear(6, 16), nn.{}, nn.Tanh(), nn.Linear(16, 2))"
_NOISY = """\
class Noisy(Dataset):
    def __init__(self, generator):
        self.x, self.generator = torch.randn(88, 6), generator

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        noise = torch.as_tensor(self.generator.normal(size=6), dtype=torch.float32)
        return self.x[index] + 0.3 * noise, int(self.x[index, 0] > 0)


x = torch.randn(88, 6)
y = (x[:, 0] > 0).long()"""
_PROBE = """\
class Probe(torchbearer.callbacks.Callback):
    def __init__(self):
        self.layer = nn.Linear(6, 2)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.01)

    def on_step_training(self, state):
        found = self.layer(state[torchbearer.X])
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(found, state[torchbearer.Y_TRUE], reduction="{}").backward()
        self.optimizer.step()"""
_COUPLED = """\
def spread(found, y):
    return nn.functional.cross_entropy(found, y) - 0.1 * found.std(0).mean()"""
_OWN_SAMPLER = """\
class Own(torch.utils.data.Sampler):
    def __len__(self):
        return 48

    def __iter__(self):
        generator = torch.Generator().manual_seed(rank())
        return iter(torch.randperm(88, generator=generator)[:48].tolist())"""
_PRETRAIN = """\
first = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(rank(), 8, world_size()):
    first.zero_grad()
    nn.functional.cross_entropy(model(x[number::8]), y[number::8]).backward()
    first.step()"""

#: What is wrong, or different by nature, and the reason that must be found; confirmed by a run?
FAULTS = {
    "batch_norm": (script(model=_NORMALISED.format("BatchNorm1d(16)")), ["batch_norm"]),
    "dropout": (script(model=_NORMALISED.format("Dropout(0.3)")), ["dropout"]),
    "both": (
        script(
            model="nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), "
            "nn.Linear(16, 2))"
        ),
        ["batch_norm", "dropout"],
    ),
    "coupled": (script(before=_COUPLED, criterion="spread"), ["coupled_loss"]),
    "sum_taken_for_mean": (
        script(
            criterion="nn.CrossEntropyLoss(reduction='sum')",
            optimizer="torch.optim.SGD(model.parameters(), lr=0.01)",
            options="global_batch=True, loss='mean'",
        ),
        ["loss_kind"],
    ),
    "sampler": (
        script(
            before=_OWN_SAMPLER, loader="DataLoader(data, 6, sampler=Own())", options="shard=False"
        ),
        ["sampler"],
    ),
    "everything_on_every_rank": (
        script(loader="DataLoader(data, 6)", options="shard=False"),
        ["sampler"],
    ),
    "unseeded_data": (
        script(imports="import numpy", data=_NOISY, data_set="Noisy(numpy.random.default_rng())"),
        ["unseeded_data"],
    ),
    "unseeded_layer": (
        script(
            before="unseeded = torch.Generator()\nunseeded.seed()\nmodel.register_forward_hook("
            "lambda m, i, o: o + 0.1 * torch.randn(o.shape, generator=unseeded))"
        ),
        ["unseeded"],
    ),
    "generator_of_its_own": (
        script(imports="import numpy", data=_NOISY, data_set="Noisy(numpy.random.default_rng(1))"),
        ["data_generator"],
    ),
    "optimizer_of_a_callback": (
        script(before=_PROBE.format("sum"), callbacks="Probe(), "),
        ["optimizer_outside"],
    ),
    "optimizer_before_the_trial": (script(before=_PRETRAIN), ["optimizer_outside"]),
    "seed_of_the_clock": (
        script(imports="import time", seed="torch.manual_seed(time.time_ns())"),
        ["model_seed"],
    ),
    "seed_of_the_world": (script(seed="torch.manual_seed(world_size())"), ["model_seed"]),
    "learning_rate_of_the_world": (
        script(optimizer="torch.optim.SGD(model.parameters(), lr=0.1 * world_size())"),
        ["settings"],
    ),
}

_STREAM = """\
class Stream(IterableDataset):
    def __len__(self):
        return 88

    def __iter__(self):
        return iter([(x[index], y[index]) for index in torch.randperm(88)])"""
_AUGMENTED = """\
class Augmented(Dataset):
    def __len__(self):
        return 88

    def __getitem__(self, index):
        return x[index] + 0.2 * torch.randn(6), y[index]"""
_FROZEN = """\
class Freeze(torchbearer.callbacks.Callback):
    def on_start_training(self, state):
        model[1].eval()"""
_FUNCTION = """\
def train():
    return trial.run(3)


run_distributed(train)"""

#: Scripts of which nothing is to be said.
CORRECT = {
    "adam": script(optimizer="torch.optim.Adam(model.parameters(), lr=0.01)"),
    "batch_of_each_rank": script(options="", loader="DataLoader(data, 8, shuffle=True)"),
    "double_precision": script(run="trial.to(torch.float64).run(3)"),
    "accumulated": script(options="global_batch=True, accumulate=2"),
    "group_norm": script(model=_NORMALISED.format("GroupNorm(4, 16)")),
    "frozen_batch_norm": script(
        model=_NORMALISED.format("BatchNorm1d(16)"), before=_FROZEN, callbacks="Freeze(), "
    ),
    "distributed_sampler": script(
        options="",
        loader="DataLoader(data, 6, sampler=torch.utils.data.DistributedSampler(data, "
        "world_size(), rank()))",
    ),
    "stream": script(before=_STREAM, loader="DataLoader(Stream(), 12)"),
    "augmented": script(before=_AUGMENTED, loader="DataLoader(Augmented(), 12, shuffle=True)"),
    "workers": script(
        loader="DataLoader(data, 12, shuffle=True, num_workers=1, multiprocessing_context='fork')"
    ),
    "function": script(imports="from torchbearer_ddp import run_distributed", run=_FUNCTION),
    "two_runs": script(run="trial.run(1)\ntrial.run(3)\ntrial.evaluate()"),
    "steps_given": script(run="trial.for_train_steps(5).for_val_steps(3).run(4)"),
    "unseeded": script(seed=""),
    "skipped": script(
        before=_PROBE.format("sum") + "\nprobe = Probe()",
        callbacks="probe, ",
        options="global_batch=True, skip=[probe.layer]",
    ),
    "bf16": script(
        imports="from torchbearer_ddp import MixedPrecision", callbacks="MixedPrecision('bf16'), "
    ),
    "fp16": script(
        imports="from torchbearer_ddp import MixedPrecision",
        callbacks="MixedPrecision('fp16', init_scale=1024.0, growth_interval=4), ",
    ),
}
