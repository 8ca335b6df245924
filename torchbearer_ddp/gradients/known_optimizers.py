"""The optimizers of a run: their numbers, their names, and what each of them trains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from torchbearer_ddp.group import trained

_NOTHING: tuple[list[torch.nn.Parameter], list[int], frozenset[int]] = ([], [], frozenset())


class KnownOptimizers:
    """Numbers optimizers in the order in which they were found, the same on every rank.

    They are kept, so that no later one gets the identity of one that is gone.
    """

    def __init__(self, found: Mapping[str, torch.optim.Optimizer] | None = None) -> None:
        self._known: dict[int, tuple[torch.optim.Optimizer, str, int]] = {}
        self._owner: dict[int, int] = {}
        #: By optimizer what it trained when it was last asked: the parameters, and their identities
        #: in their order and as a set.
        self._identities: dict[int, tuple[list[torch.nn.Parameter], list[int], frozenset[int]]] = {}
        for number, (name, optimizer) in enumerate((found or {}).items()):
            self._known[id(optimizer)] = optimizer, name, number
            self.set_owner(number, trained.parameters_of(optimizer))

    def __len__(self) -> int:
        return len(self._known)

    def number(self, optimizer: torch.optim.Optimizer) -> int:
        """The number of an optimizer, a new one if it was not known."""
        known = self._known.get(id(optimizer))
        if known is None:
            number = len(self._known)
            name = f"{type(optimizer).__name__} number {number}"
            known = self._known[id(optimizer)] = optimizer, name, number
        return known[2]

    def identities(self, optimizer: torch.optim.Optimizer) -> frozenset[int]:
        """The identities of all that an optimizer trains; asked at every step."""
        listed = [id(each) for group in optimizer.param_groups for each in group["params"]]
        _, before, identities = self._identities.get(id(optimizer), _NOTHING)
        if listed != before:
            identities = frozenset(listed)
            self._identities[id(optimizer)] = trained.parameters_of(optimizer), listed, identities
        return identities

    def name(self, number: int) -> str:
        """The name of an optimizer, for messages; another rank may know more of them."""
        names = [name for _, name, _ in self._known.values()]
        return names[number] if number < len(names) else f"optimizer number {number}"

    def trains(self, parameter: torch.nn.Parameter) -> bool:
        """True if one of them does."""
        return id(parameter) in self._owner

    def owner(self, parameter: torch.nn.Parameter) -> int:
        """The number of the first optimizer that trains a parameter; 0 if none does."""
        return self._owner.get(id(parameter), 0)

    def set_owner(self, number: int, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Notes what an optimizer trains, as far as no other one did so before."""
        for parameter in parameters:
            self._owner.setdefault(id(parameter), number)
