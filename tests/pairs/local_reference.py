"""What ranks that step by themselves must come to: all of them in one process, with torch alone."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tests.pairs import reference
from tests.pairs.cases import Case


class Ranks:
    """A model for each rank, and what it has trained since the last average."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.models = [reference.Model(case) for _ in range(case.world_size)]
        self._optimizers = [reference.make_optimizer(case, model) for model in self.models]
        self._samples = [reference.data(case, rank) for rank in range(case.world_size)]
        self._trained = [0] * case.world_size

    def convert(self) -> None:
        for model in self.models:
            model.convert(self._case.conversion)

    def step(self, window: list[tuple[int, int]]) -> None:
        """A step of each rank on the mean over its own samples in these batches."""
        for rank, model in enumerate(self.models):
            sizes = [self._case.sizes[rank][batch] for _, batch in window]
            self._optimizers[rank].zero_grad()
            x, y = self._samples[rank]
            for (epoch, batch), size in zip(window, sizes, strict=True):
                model.set_trainable(self._case.trainable(epoch, batch))
                start = sum(self._case.sizes[rank][:batch])
                mine = slice(start, start + size)
                # By samples, or each batch alike.
                share = 1 / len(sizes) if self._case.weighted is False else size / sum(sizes)
                half = reference.HALVES.get(self._case.mixed)
                with torch.autocast("cpu", half, enabled=half is not None):
                    loss = reference.loss(self._case, model(x[mine], rank), y[mine])
                (share * loss).backward()
            self._optimizers[rank].step()
            self._trained[rank] += sum(sizes)

    @torch.no_grad()
    def average(self) -> None:
        """Gives all of them the average by samples, or each alike."""
        counts = [1] * len(self.models) if self._case.weighted is False else self._trained
        if not any(self._trained):
            return
        for copies in zip(*(model.parameters() for model in self.models), strict=True):
            self._spread(copies, counts)
            pairs = zip(self._optimizers, copies, strict=True)
            states = [optimizer.state.get(p, {}) for optimizer, p in pairs]
            for key in set.intersection(*map(set, states)):
                if torch.is_tensor(states[0][key]):
                    self._spread([each[key] for each in states], counts)
        self._trained = [0] * len(self.models)

    @staticmethod
    def _spread(copies: Iterable[torch.Tensor], counts: list[int]) -> None:
        held = list(copies)
        mean = sum(c / sum(counts) * each.double() for c, each in zip(counts, held, strict=True))
        for each in held:
            each.copy_(mean)


def train(
    case: Case, runs: Iterable[list[tuple[int, int]]]
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The parameters after these batches of each call of ``run``, and no loss scale."""
    ranks = Ranks(case)
    converted = not case.has("converted")
    for batches in runs:
        ranks.average()  # what a run that ended early has left
        window: list[tuple[int, int]] = []
        for epoch, batch in batches:
            if epoch and not converted:
                ranks.convert()
                converted = True
            window.append((epoch, batch))
            if case.is_last_of_window(batch):
                ranks.step(window)
                window = []
            if case.is_exchange(batch):
                ranks.average()
    return {name: tensor.clone() for name, tensor in ranks.models[0].state_dict().items()}, []
