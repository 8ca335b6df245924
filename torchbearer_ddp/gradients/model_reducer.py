"""The reducer for what a model and its optimizer train, made anew whenever that changes."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from torchbearer_ddp.gradients.header import RankReport, StepSummary
from torchbearer_ddp.gradients.hooks import GradientOrder
from torchbearer_ddp.gradients.reducer import Options, Reducer
from torchbearer_ddp.group import collectives, replicas
from torchbearer_ddp.group.membership import Group
from torchbearer_ddp.log import announce

Named = list[tuple[str, torch.nn.Parameter]]
_WRAPPED = "the model is wrapped in DistributedDataParallel, which averages the gradients"


class ModelReducer:
    """Averages the gradients of one model after another, each with a reducer of its own."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._model = torch.nn.Module()
        self._trained: Named = []
        self._frozen: list[bool] = []
        self._order = GradientOrder([])
        self._announced = False
        #: None until the first exchange, and after :meth:`close`.
        self.reducer: Reducer | None = None

    def track(self, model: torch.nn.Module, optimizer: Any) -> None:
        """Sets what is trained from here on; a reducer for something else is closed."""
        self._model = model
        trained = replicas.trained_tensors(model, optimizer)
        if _kinds(trained) != _kinds(self._trained):
            self.close()
            self._order.close()  # of a run that failed within its first backward
            self._trained = trained
            self._order = GradientOrder([parameter for _, parameter in trained])

    def reduce(self, group: Group, report: RankReport) -> StepSummary:
        """Replaces every gradient by its average over all ranks."""
        self._order.close()  # after the first backward the order is known
        frozen = [not parameter.requires_grad for _, parameter in self._trained]
        if self.reducer is None or frozen != self._frozen:
            self.close()
            self._frozen = frozen
            self.reducer = self._make(group)
        return self.reducer.reduce(report)

    def close(self) -> None:
        """Releases the buckets; the gradients stay valid, in memory of their own."""
        if self.reducer is not None:
            self.reducer.close()
            self.reducer = None

    def _make(self, group: Group) -> Reducer:
        orders = collectives.agree(
            {name: parameter.requires_grad for name, parameter in self._trained},
            "requires_grad of the parameters",
            "Freeze and unfreeze the same parameters on every rank at the same step.",
            extra=self._order.indices,
        )
        in_order = [self._trained[index][1] for index in orders[0]]  # rank zero's order for all
        wrapped = isinstance(self._model, DistributedDataParallel)
        trained = [] if wrapped else [p for p in in_order if p.requires_grad]
        reducer = Reducer(group, trained, _sparse_parameters(self._model), self._options)
        if not self._announced:
            announce(_WRAPPED if wrapped else reducer.choice)
            self._announced = True
        return reducer


def _kinds(trained: Named) -> list[tuple[Any, ...]]:
    return [(name, id(p), p.data_ptr(), p.dtype, p.device, p.shape) for name, p in trained]


def _sparse_parameters(model: torch.nn.Module) -> set[int]:
    """Embeddings that were asked to have sparse gradients."""
    return {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
    }
