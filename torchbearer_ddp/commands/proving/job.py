"""What one run of a proof does: which script, on which side, with what changed."""

from __future__ import annotations

from dataclasses import dataclass, field

#: What one process can be made to do as N ranks do: each is a reason why they differ.
BATCH_NORM, RANDOM, LOSS = "batch_norm", "random", "loss"


@dataclass(frozen=True)
class Job:
    """One run of the script.

    Attributes:
        script: The path of the script, or the name of a module.
        is_module: True for a module.
        arguments: The script's own arguments.
        world_size: The number of ranks to compare with one process.
        steps: How many steps to take.
        seed: The seed of both sides.
        rounding: None, or the number of the run that starts from parameters that differ by one unit
            in the last place.
        imitates: What one process does as N ranks do.
    """

    script: str
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    world_size: int = 2
    steps: int = 20
    seed: int = 0
    rounding: int | None = None
    imitates: tuple[str, ...] = field(default=())
