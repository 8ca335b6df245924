"""Buckets through torch.distributed: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchbearer_ddp.process_group import Group
from torchbearer_ddp.reducer import sums
from torchbearer_ddp.reducer.transport import Fill
from torchbearer_ddp.waiting import Wait

#: What gloo gets at once: a large gradient is on its way while its rest is still copied, but less
#: than this costs gloo more than it gains (measured with 2 MB to 32 MB at 1 and 10 Gbit/s).
GLOO_PIECE_BYTES = 16 * 2**20


class CollectiveTransport:
    """Asynchronous sums of each bucket's pieces, over all ranks.

    Args:
        group: The group of all ranks.
        name: What to call it: the backend that serves the gradients' device.
        compress: What travels instead of single precision, or None.
    """

    overlaps = True

    def __init__(self, group: Group, name: str, compress: str | None = None) -> None:
        self.name = name
        # NCCL is slow to start and fast to run; gloo the other way round, and the sooner a full
        # bucket is on its way, the less is left to wait for after backward.
        self.bucket_bytes = (25 if name == "nccl" else 4) * 2**20
        self._group = group
        self._compress = compress
        self._pieces: dict[int, list[_Piece]] = {}

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device, header: int = 0
    ) -> torch.Tensor:
        """Ordinary memory."""
        bucket = torch.zeros(numel, dtype=dtype, device=device)
        body = numel - header
        step = self._piece_numel(dtype) if device.type == "cpu" else max(1, body)
        ends = [*range(step, body, step), numel]  # the header travels with the last numbers
        self._pieces[id(bucket)] = [
            _Piece(
                begin,
                min(end, body),
                sums.make(
                    self._group.gradients, bucket[begin:end], max(0, end - body), self._compress
                ),
            )
            for begin, end in zip([0, *ends], ends, strict=False)
        ]
        return bucket

    def _piece_numel(self, dtype: torch.dtype) -> int:
        """How much travels at once between CPUs (NCCL has streams of its own)."""
        if self._compress is not None:  # rounding takes time in which the network must not wait
            return sums.piece_numel(dtype)
        return GLOO_PIECE_BYTES // dtype.itemsize

    def start(self, bucket: torch.Tensor, weight: float = 1.0, fill: Fill | None = None) -> None:
        """Hands one piece after the other to the backend's own threads or stream."""
        for piece in self._pieces[id(bucket)]:
            if fill is not None:
                fill(piece.begin, piece.end, weight)
            elif weight != 1.0:
                bucket[piece.begin : piece.end].mul_(weight)
            for way in piece.ways:
                way.start()

    def finish(self, bucket: torch.Tensor, wait: Wait) -> None:
        """Waits for the backend."""
        ways = [way for piece in self._pieces[id(bucket)] for way in piece.ways]
        for way in ways:
            way.turn(wait)
        for way in ways:
            way.finish(wait)

    def close(self) -> None:
        """Lets go of the buckets."""
        self._pieces.clear()


@dataclass
class _Piece:
    """What travels at once.

    Args:
        begin: Where in the bucket it begins.
        end: Where it ends, without the header, which has no weight.
        ways: How it travels.
    """

    begin: int
    end: int
    ways: list[sums.Sum]
