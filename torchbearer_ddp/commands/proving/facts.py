"""What is known of a run besides its numbers: what may be the reason for a difference."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torchbearer
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from torchbearer_ddp.commands.proving.imitation import Imitation
from torchbearer_ddp.commands.proving.streams import SampleStreams
from torchbearer_ddp.data import randomness
from torchbearer_ddp.data.sampling import ShardSampler
from torchbearer_ddp.gradients.loss import classify
from torchbearer_ddp.group import trained

_OF_TORCH = (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


def empty() -> dict[str, Any]:
    """The facts before anything has run."""
    return {
        "eps": 0.0,
        "trial_optimizers": [],
        "owners": {},
        "steps_outside": 0,
        "dropouts": [],
        "draws_in_step": [],
        "data_set_draws": False,
        "half_precision": False,
        "batch_norms": 0,
        "loss_kind": None,
        "sampler": None,
    }


def of_trial(facts: dict[str, Any], state: Any) -> None:
    """What can be said of a Trial before its first step."""
    loader, _ = state[torchbearer.SELF].state.get(torchbearer.TRAIN_DATA) or (None, None)
    if isinstance(loader, DataLoader):
        sampler: Any = loader.batch_sampler if loader.batch_size is None else loader.sampler
        while isinstance(sampler, ShardSampler):
            sampler = sampler.inner
        if type(sampler) not in _OF_TORCH:
            facts["sampler"] = type(sampler).__name__
    parameters = trained.parameters(state)
    dtypes = {p.dtype for _, p in parameters if p.is_floating_point()}
    facts["eps"] = max([facts["eps"], *(torch.finfo(dtype).eps for dtype in dtypes)])


def note_loss(facts: dict[str, Any], criterion: Any, state: Any) -> None:
    """The kind of the criterion, whatever the script says of it."""
    kind = classify(criterion, state).kind
    if facts["loss_kind"] in (None, "mean", "unknown"):
        facts["loss_kind"] = kind


def note_step(
    facts: dict[str, Any], state: Any, seeded: dict[str, Any], imitation: Imitation
) -> None:
    """What has happened in a step whose random generators were seeded before."""
    drawn = randomness.rng_state()
    names = {"python": "python's", "numpy": "numpy's", "torch": "torch's", "cuda": "CUDA's"}
    for key, value in drawn.items():
        drew = not randomness.equal_states({key: value}, {key: seeded[key]})
        drew |= key == "torch" and imitation.has_drawn
        if drew and names[key] not in facts["draws_in_step"]:
            facts["draws_in_step"].append(names[key])
    facts["batch_norms"] = imitation.batch_norms
    facts["dropouts"] = [
        f"{prefix}.{name}" if prefix != "model" else name
        for prefix, module in trained.modules(state).items()
        for name, each in module.named_modules()
        if isinstance(each, _DropoutNd) and each.training and each.p > 0
    ]


def take_indices(facts: dict[str, Any], state: Any) -> list[str] | None:
    """The indices of the samples of this batch, in order of their names, where they are known."""
    loader, _ = state[torchbearer.SELF].state.get(torchbearer.TRAIN_DATA) or (None, None)
    data = getattr(loader, "dataset", None)
    if not isinstance(data, SampleStreams) or loader is None or loader.num_workers:
        return None
    found = sorted(map(repr, data.indices))
    data.indices.clear()
    facts["data_set_draws"] |= data.draws
    return found


def checksums(state: Any) -> tuple[torch.Tensor, str]:
    """One number for each sample of a batch, and the shape of a sample.

    Two batches with samples of one shape have the same samples if they have the same numbers.
    """
    found: list[torch.Tensor] = []
    _collect((state.get(torchbearer.X), state.get(torchbearer.Y_TRUE)), found)
    rows = [each for each in found if each.dim() and len(each) == len(found[0])]
    if not rows:
        return torch.zeros(0, dtype=torch.int64, device="cpu"), ""
    numbers = [0] * len(rows[0])
    for tensor in rows:
        whole = tensor.detach().cpu().contiguous()
        for index, row in enumerate(whole.view(len(whole), -1).view(torch.uint8).numpy()):
            numbers[index] = zlib.crc32(row, numbers[index])
    return torch.tensor(sorted(numbers), device="cpu"), str(
        [tuple(each.shape[1:]) for each in rows]
    )


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    if torch.is_tensor(value):
        found.append(value)
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            _collect(each, found)
