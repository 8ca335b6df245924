"""The average of what all ranks have trained: parameters, and tensors of optimizer states."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from torchbearer_ddp import checked
from torchbearer_ddp.errors import DesyncError
from torchbearer_ddp.gradients.exchange import Options, Trained
from torchbearer_ddp.gradients.header import RankReport, StepSummary
from torchbearer_ddp.gradients.hooks import Marks
from torchbearer_ddp.gradients.reducer import Reducer
from torchbearer_ddp.gradients.spare import Spare
from torchbearer_ddp.gradients.weights import Average, Weights
from torchbearer_ddp.group import collectives, trained
from torchbearer_ddp.group.membership import Group

Tensors = dict[str, torch.Tensor]


class ReplicaAverage:
    """Averages replicas by a reducer: what is averaged takes the place of its gradients.

    A parameter is averaged once an optimizer of any rank has changed it; a tensor of an optimizer's
    state where all ranks have it.

    Args:
        options: How the average travels.
        skip: Modules and parameters that are left to each rank.
    """

    def __init__(self, options: Options, skip: list[Any]) -> None:
        self._options = options
        self._skip = skip
        #: Parameters, by identity, that an optimizer of this rank has changed.
        self.changed: set[int] = set()
        #: What this rank had when the reducer was made.
        self._layout: list[Any] = []
        #: What the reducer averages: for each name something of the same kind, with a gradient.
        self._carriers: dict[str, torch.nn.Parameter] = {}
        self._marks = Marks()
        self._reducer: Reducer | None = None
        self._spare = Spare()
        #: Names of those that were changed before a restart.
        self._changed_before: set[str] = set()
        #: The weight of a regular window, the same on every rank; 0 as long as it is not known.
        self.regular = 0.0

    def rest(self, group: Group | None) -> None:
        """Ends a run: its buckets are kept for the next one, unless an exchange was cut short."""
        if self._reducer is not None and group is not None:
            self._spare.keep(self._reducer, group, [*self._carriers.items()], self._trained())
        self._close()
        self.regular = 0.0

    def _close(self) -> None:
        if self._reducer is not None:
            self._reducer.close()
        self._reducer, self._marks = None, Marks()

    @torch.no_grad()
    def reduce(self, group: Group, state: Any, report: RankReport, average: Average) -> StepSummary:
        """Gives every rank the average of all; collective.

        Raises:
            DesyncError: On every rank, if the ranks are at different steps.
        """
        named = dict(trained.parameters(state, self._skip))
        parameters = {name: each.data for name, each in named.items() if each.is_floating_point()}
        changed = self._names_of_changed(named)
        states = _states(state, {id(each): name for name, each in named.items()})
        layout = [changed, *(_describe(name, each) for name, each in states.items())]
        tensors = {**parameters, **states}
        if self._reducer is None:
            self._remake(group, changed, tensors, states, report)
            self._layout = layout
        report.regroup = layout != self._layout or not self._fit(tensors)
        summary = self._exchange(tensors, report, average)
        if summary.regroup:  # some rank has others than before; nothing was written yet
            self._remake(group, changed, tensors, states, report)
            self._layout, report.regroup = layout, False
            summary = self._exchange(tensors, report, average)
        if average is Average.WEIGHTED and not any(summary.weights):
            # No rank has counted a sample: all replicas are as good, and none of them is zero.
            summary = self._exchange(tensors, report, Average.EQUAL)
        self._check(group, summary)
        for name, carrier in self._carriers.items():
            if carrier.grad is not None:
                tensors[name].copy_(carrier.grad)
                carrier.grad = None
        return summary

    def load(self, changed: Iterable[str], regular: float) -> None:
        """Takes what a run before a restart had changed, and its regular weight."""
        self._close()  # made for another one, before the parameters of the checkpoint were there
        self._changed_before, self.regular = set(changed), regular

    def names_of_changed(self, state: Any) -> list[str]:
        """The names of the parameters that the steps of this rank have changed."""
        return self._names_of_changed(dict(trained.parameters(state, self._skip)))

    def _names_of_changed(self, named: dict[str, torch.nn.Parameter]) -> list[str]:
        return [
            name
            for name, each in named.items()
            if each.is_floating_point()
            and (id(each) in self.changed or name in self._changed_before)
        ]

    def _fit(self, tensors: Tensors) -> bool:
        """True if this rank has all that the reducer averages, as it was."""
        return all(
            name in tensors and _describe(name, tensors[name]) == _describe(name, carrier)
            for name, carrier in self._carriers.items()
        )

    def _remake(
        self,
        group: Group,
        changed: list[str],
        tensors: Tensors,
        states: Tensors,
        report: RankReport,
    ) -> None:
        """Makes the reducer for what any rank has changed, and all ranks have."""
        mine = {
            "changed": changed,
            "states": {name: _describe(name, each) for name, each in states.items()},
            "weight": self.regular or report.weight,
            "spare": self._spare.is_ready(group, [*self._carriers.items()]),
        }
        everyone = collectives.all_gather(mine, "what the steps of each rank have changed")
        if not all(each["spare"] for each in everyone):
            self._spare.drop()
        self._close()
        any_changed = {name for each in everyone for name in each["changed"]}
        names = [name for name in tensors if name in any_changed]
        for name, kind in everyone[0]["states"].items():
            if all(each["states"].get(name) == kind for each in everyone):
                names.append(name)
        self._carriers = {name: self._carrier(name, tensors[name]) for name in names}
        self.regular = max(each["weight"] for each in everyone) or 1.0
        weights = Weights(group.member.world_size, self.regular)
        self._reducer = self._spare.take(self._trained())
        if self._reducer is None:
            self._reducer = Reducer(group, self._trained(), self._options, weights, self._marks)
        else:
            self._reducer.reopen(weights, self._marks)

    def _trained(self) -> list[Trained]:
        return [Trained(each) for each in self._carriers.values()]

    def _carrier(self, name: str, tensor: torch.Tensor) -> torch.nn.Parameter:
        """The carrier of an earlier run, if it is of the same kind."""
        known = self._carriers.get(name)
        if known is not None and _describe(name, known) == _describe(name, tensor):
            return known
        return torch.nn.Parameter(tensor.detach())

    def _exchange(self, tensors: Tensors, report: RankReport, average: Average) -> StepSummary:
        assert self._reducer is not None
        for name, carrier in self._carriers.items():
            # Where this rank has others now the exchange is repeated, whatever it sends.
            carrier.grad = carrier.data if report.regroup else tensors[name]
        self._marks.begin_step()
        summary = self._reducer.reduce(report, average)
        if max(summary.weights) > self.regular:
            self.regular = max(summary.weights)
            self._reducer.weights = Weights(len(summary.weights), self.regular)
        return summary

    @staticmethod
    def _check(group: Group, summary: StepSummary) -> None:
        if not summary.together:
            group.broken = True
            places = [f"rank {r} after batch {b:.0f}" for r, b in enumerate(summary.batches)]
            raise DesyncError(
                f"The ranks averaged their parameters at different places: {'; '.join(places)}. "
                "Every rank must take the same number of steps: look for a batch or a step that "
                "only some ranks skip."
            )


class ReplicaPlace:
    """What steps have changed on this rank, as a part of a checkpoint."""

    def __init__(self, replicas: ReplicaAverage, state: Any) -> None:
        self._replicas = replicas
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        """The changed parameters by name, and the weight of a regular window."""
        changed = self._replicas.names_of_changed(self._state) if self._state else []
        return {"changed": changed, "regular": self._replicas.regular}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave."""
        changed = checked.items(checked.text())(saved["changed"], "what local steps have changed")
        self._replicas.load(changed, float(saved["regular"]))


def _states(state: Any, names: dict[int, str]) -> Tensors:
    """The tensors of numbers in the optimizers' states, by name."""
    found: Tensors = {}
    for owner, optimizer in trained.optimizers(state).items():
        for parameter in trained.parameters_of(optimizer):
            name, held = names.get(id(parameter)), optimizer.state.get(parameter, {})
            for key, value in sorted(held.items()) if name is not None else ():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    found[f"{owner}: {key} of {name}"] = value
    return found


def _describe(name: str, tensor: torch.Tensor) -> list[Any]:
    kind = str(tensor.dtype), str(tensor.device), list(tensor.shape), list(tensor.stride())
    return [name, *kind]
