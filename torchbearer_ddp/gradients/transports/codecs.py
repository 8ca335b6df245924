"""Single precision in fewer bytes, and back."""

from __future__ import annotations

import torch

from torchbearer_ddp.gradients.transports.compression import HALVES, INT8

#: So many numbers share one scale.
BLOCK = 256
#: The largest number of a block becomes this.
_LARGEST = 127
#: A block whose numbers are all smaller than this counts as zeros: its scale has no reciprocal.
_SMALLEST = 1e-35
_SCALE_BYTES = 4
_ALIGNMENT = 8


def codec_of(kind: str) -> Codec:
    """The codec by its name."""
    return BlockCodec() if kind == INT8 else HalfCodec(HALVES[kind])


class HalfCodec:
    """Half precision: two bytes a number."""

    #: A slice is a multiple of so many numbers.
    block = 1

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def size(self, numel: int) -> int:
        """The bytes that so many numbers take."""
        return numel * self._dtype.itemsize

    def encode(self, numbers: torch.Tensor, data: torch.Tensor) -> None:
        """Rounds."""
        self._halves(data, numbers.numel()).copy_(numbers)

    def decode(self, data: torch.Tensor, numbers: torch.Tensor) -> None:
        """Converts back."""
        numbers.copy_(self._halves(data, numbers.numel()))

    def _halves(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        return data[: self.size(numel)].view(self._dtype)


class BlockCodec:
    """Eight bits a number, and one scale for each block: the largest number of it over 127.

    A block with a number that is not finite has a scale that is not, so all of it comes back as
    not finite: a step that must be skipped is skipped on every rank.
    """

    block = BLOCK

    def size(self, numel: int) -> int:
        """The bytes that so many numbers take: scales, then numbers."""
        used = _SCALE_BYTES * -(-numel // BLOCK) + numel
        return -(-used // _ALIGNMENT) * _ALIGNMENT

    def encode(self, numbers: torch.Tensor, data: torch.Tensor) -> None:
        """Divides each block by its scale, and rounds."""
        scales, small = self._parts(data, numbers.numel())
        for (first, last), scale in self._rows(scales, numbers.numel()):
            rows = numbers[first:last].view(len(scale), -1)
            largest = torch.maximum(rows.amax(1), rows.amin(1).neg_())
            torch.div(largest, _LARGEST, out=scale)
            scale.masked_fill_(scale < _SMALLEST, 0.0)
            inverse = scale.reciprocal().masked_fill_(scale == 0.0, 0.0)
            scaled = torch.mul(rows, inverse.unsqueeze(1)).round_()
            small[first:last].view_as(rows).copy_(scaled)

    def decode(self, data: torch.Tensor, numbers: torch.Tensor) -> None:
        """Multiplies each block by its scale."""
        scales, small = self._parts(data, numbers.numel())
        numbers.copy_(small)
        for (first, last), scale in self._rows(scales, numbers.numel()):
            numbers[first:last].view(len(scale), -1).mul_(scale.unsqueeze(1))

    def _parts(self, data: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        end = _SCALE_BYTES * -(-numel // BLOCK)
        return data[:end].view(torch.float32), data[end : end + numel].view(torch.int8)

    def _rows(self, scales: torch.Tensor, numel: int) -> list[tuple[tuple[int, int], torch.Tensor]]:
        """Whole blocks, and the rest: where they are among the numbers, and their scales."""
        whole = numel // BLOCK
        parts = [((0, whole * BLOCK), scales[:whole]), ((whole * BLOCK, numel), scales[whole:])]
        return [part for part in parts if len(part[1])]


#: Writes single precision into bytes, and reads it back.
Codec = HalfCodec | BlockCodec
