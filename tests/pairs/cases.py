"""Pairs of options and situations, each drawn from a seed so that a person can replay it."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

#: What a run of gradients meets, alone and two at a time.
FEATURES = (
    "weighted",  # weighted=True, and batches that differ between the ranks
    "equal",  # weighted=False, likewise
    "accumulate",
    "compress",
    "uneven",  # the last batches of an epoch differ between the ranks
    "frozen",  # a layer that is never trained
    "thawed",  # a layer that is frozen and thawed during an epoch
    "gradient",  # a layer that is frozen when the gradients are exchanged, but has one
    "unused",  # a layer that only rank 1 uses
    "sparse",
    "half",  # a layer in half precision
    "stop",  # a callback of one rank asks to stop while gradients are held
    "caught",  # an exception that the caller catches, before or in the middle of backward
    "resume",  # killed while gradients are held, and started again
    "runs",  # several calls of run(), with evaluate() between them
    "lbfgs",
    "closure",  # a closure of the script's own
    "converted",  # the model is converted at the end of an epoch
    "hook",  # a communication hook of torch
    "local",  # steps of each rank's own, and their average
    "bf16",  # MixedPrecision, without and with a scaled loss
    "fp16",
)
#: Options of which a run has one.
_APART = ({"weighted", "equal"}, {"bf16", "fp16"})
#: By transport the hosts of its ranks.
LAYOUTS = {"gloo": "aa", "shm": "aa", "hierarchical": "abba"}
BATCHES = 6
#: Where a library must refuse instead of computing something else.
_ACCUMULATING = {"accumulate", "stop", "resume"}


@dataclass(frozen=True)
class Case:
    """One run, and everything that the reference needs to know of it.

    Attributes:
        sizes: The sizes of each rank's batches, by rank.
        calls: Up to which epoch each call of ``run`` trains.
        event: The batch of the first epoch at which the stop is asked for or the exception comes.
        kill: The epoch and the batch before which a run that is resumed ends.
        place: Where the exception comes from: ``sample`` or ``backward``.
        calls_back: True if the script's own closure calls ``on_backward``.
        hook: The name of one of torch's hooks.
        every: The number of steps from one average of the replicas to the next.
        mixed: The dtype of MixedPrecision.
        loss_scale: Its first scale, so large that the first steps are skipped.
    """

    features: frozenset[str]
    transport: str
    seed: int
    sizes: tuple[tuple[int, ...], ...]
    weighted: bool | None
    accumulate: int
    compress: str | None
    bucket_mb: float | None
    dtype: str
    momentum: float
    scale: float
    calls: tuple[int, ...]
    event: int
    kill: tuple[int, int]
    place: str
    conversion: str
    calls_back: bool
    hook: str | None
    every: int
    mixed: str | None
    loss_scale: float

    @property
    def world_size(self) -> int:
        return len(self.sizes)

    @property
    def refusal(self) -> str | None:
        """The sentence with which the library refuses what it cannot compute."""
        smaller = self.features & {"compress", "hook"}
        refusals = {
            "compress is .* and hook is": len(smaller) == 2,
            "every is .* and gradients travel as": bool(smaller) and self.has("local"),
            "LBFGS.*accumulate|accumulate.*LBFGS": self.has("lbfgs")
            and bool(self.features & _ACCUMULATING),
            r"MixedPrecision\('fp16'\) does not work with LBFGS|every does not work with LBFGS": (
                self.has("lbfgs") and (self.mixed == "fp16" or self.has("local"))
            ),
            r"MixedPrecision\('fp16'\) keeps parameters in single precision": (
                self.has("half") and self.mixed == "fp16"
            ),
            r"MixedPrecision\('fp16'\) finds .* PowerSGD": (
                self.compress == "powersgd" and self.mixed == "fp16"
            ),
            r"MixedPrecision\('fp16'\) skips .* every is": (
                self.has("local") and self.mixed == "fp16"
            ),
        }
        return next((sentence for sentence, applies in refusals.items() if applies), None)

    @property
    def hosts(self) -> tuple[object, ...]:
        """The host of each rank; through gloo each rank sends as if it had one of its own."""
        if self.transport == "gloo":
            return tuple(range(self.world_size))
        return tuple(LAYOUTS[self.transport])

    @property
    def is_compressed(self) -> bool:
        """True if gradients travel in half precision: those of single precision between hosts."""
        several = len(set(self.hosts)) > 1
        return self.compress is not None and several and self.dtype == "float32"

    def has(self, feature: str) -> bool:
        return feature in self.features

    def is_last_of_window(self, batch: int) -> bool:
        """True if the optimizer steps after this batch of an epoch."""
        return (batch + 1) % self.accumulate == 0 or batch + 1 == BATCHES

    def is_exchange(self, batch: int) -> bool:
        """True if the ranks exchange something after this batch of an epoch."""
        return (batch + 1) % (self.accumulate * self.every) == 0 or batch + 1 == BATCHES

    def trainable(self, epoch: int, batch: int) -> dict[str, bool]:
        """Which layers that change so are trained by this batch."""
        flags = {}
        if self.has("thawed"):
            flags["thawed"] = (epoch * BATCHES + batch) // 3 % 2 == 1
        if self.has("gradient") and self.accumulate > 1:  # only the first batch of each window
            flags["gradient"] = batch % self.accumulate == 0
        return flags


def pairs() -> list[tuple[str, ...]]:
    """Every feature alone, and every two."""
    alone = [(feature,) for feature in FEATURES]
    two = itertools.combinations(FEATURES, 2)
    return [*alone, *(pair for pair in two if set(pair) not in _APART)]


def draw(chosen: tuple[str, ...], transport: str, seed: int) -> Case:
    """The case of these features, and from the second seed on one more; equal in every process."""
    draws = random.Random(f"{sorted(chosen)} {transport} {seed}")
    features = frozenset(chosen)
    if seed:  # the first seed has nothing but the pair, so that what it shows is easy to read
        taken = features.union(*(each for each in _APART if each & features))
        features |= {draws.choice([each for each in FEATURES if each not in taken])}
    accumulate = draws.choice((2, 4)) if features & _ACCUMULATING else 1
    large = bool(features & {"half", "compress"})
    regular = 256 if large else draws.choice((3, 4, 8))
    sizes = []
    differ = bool(features & {"weighted", "equal"})
    for rank in range(len(LAYOUTS[transport])):
        size = max(1, regular // (1 + rank % 3)) if differ else regular
        last = draws.randint(1, size) if differ or "uneven" in features else size
        sizes.append((size,) * (BATCHES - 1) + (last,))
    dtype = draws.choice(("float32", "float32", "float64"))
    if "compress" in features:  # of others nothing is compressed
        dtype = "float32"
    if "lbfgs" in features:  # its steps depend on small differences of gradients
        dtype = "float64"
    mixed = next(iter(features & {"bf16", "fp16"}), None)
    if mixed is not None:  # autocast leaves numbers in double precision alone
        dtype = "float32"
    return Case(
        features=features,
        transport=transport,
        seed=seed,
        sizes=tuple(sizes),
        weighted="weighted" in features if differ else None,
        accumulate=accumulate,
        compress=draws.choice(("bf16", "fp16", "int8", "powersgd"))
        if "compress" in features
        else None,
        bucket_mb=draws.choice((None, 1e-4)),
        dtype=dtype,
        momentum=0.0 if "sparse" in features else draws.choice((0.0, 0.9)),
        # Gradients of hundreds: times the batch size they leave the range of fp16.
        scale=8000.0 if large and "lbfgs" not in features else 1.0,
        calls=(1, 3) if "runs" in features else (3,) if "resume" in features else (2,),
        event=draws.randrange(0, 3) if "stop" in features else draws.randrange(1, 4),
        kill=(draws.choice((1, 2)), draws.choice((1, 3, 5))),
        place=draws.choice(("sample", "backward")),
        conversion=draws.choice(conversions(features)),
        calls_back=accumulate > 1 or draws.choice((True, False)),
        hook=draws.choice(_hooks(features)) if "hook" in features else None,
        every=draws.choice((2, 3)) if "local" in features else 1,
        mixed=mixed,
        loss_scale=2.0**14 if large else 2.0**18,
    )


def _hooks(features: frozenset[str]) -> list[str]:
    """The hooks whose rounding the other features bear."""
    return [
        "allreduce_hook",
        *([] if features & {"lbfgs", "bf16", "fp16"} else ["fp16_compress_hook"]),
    ]


def conversions(features: frozenset[str]) -> list[str]:
    """The conversions of a model that work in one process too."""
    found = ["channels_last", "share_memory", "double", "half"]
    if features & {"resume", "lbfgs"}:  # the model, or the optimizer, has the dtype that it had
        found.remove("double")
    if {"resume", "half"} <= features:
        found.remove("half")
    if "sparse" in features:  # torch cannot share the memory of a sparse gradient
        found.remove("share_memory")
    if "lbfgs" in features:  # it wants views of the gradients
        found.remove("channels_last")
    return found
