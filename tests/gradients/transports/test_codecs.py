"""Single precision in fewer bytes: how much is lost, and what is not."""

import numpy
import pytest
import torch

from torchbearer_ddp.gradients.transports.codecs import BLOCK, codec_of

SIZES = [1, 3, BLOCK - 1, BLOCK, BLOCK + 1, 10 * BLOCK + 7]


def round_trip(kind, numbers):
    codec = codec_of(kind)
    data = torch.full((codec.size(numbers.numel()),), 77, dtype=torch.uint8)
    codec.encode(numbers, data)
    found = torch.full_like(numbers, 5.0)
    codec.decode(data, found)
    return found, data


@pytest.mark.parametrize("numel", SIZES)
def test_eight_bits_lose_half_a_step_of_their_block(numel):
    torch.manual_seed(numel)
    numbers = torch.randn(numel) * torch.logspace(-6, 2, numel)
    found, data = round_trip("int8", numbers)
    for first in range(0, numel, BLOCK):
        block = slice(first, first + BLOCK)
        step = float(numbers[block].abs().max()) / 127
        assert float((found - numbers)[block].abs().max()) <= 0.5001 * step
    assert len(data) <= numel + 4 * (numel // BLOCK + 1) + 8


def test_eight_bits_are_what_arithmetic_by_hand_gives():
    numbers = torch.tensor([1.27, -0.634, 0.006, 0.0, 0.5])
    found, data = round_trip("int8", numbers)
    assert numpy.frombuffer(data.numpy(), "float32", 1)[0] == pytest.approx(0.01)
    assert data[4:9].view(torch.int8).tolist() == [127, -63, 1, 0, 50]
    assert torch.allclose(found, torch.tensor([1.27, -0.63, 0.01, 0.0, 0.5]))


@pytest.mark.parametrize("kind", ["int8", "bf16", "fp16"])
@pytest.mark.parametrize("numel", SIZES)
def test_zeros_stay_zeros(kind, numel):
    assert torch.equal(round_trip(kind, torch.zeros(numel))[0], torch.zeros(numel))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_block_that_is_not_finite_stays_so_and_the_others_do_not_suffer(value):
    numbers = torch.ones(3 * BLOCK)
    numbers[BLOCK + 5] = value
    found, _ = round_trip("int8", numbers)
    assert not found[BLOCK : 2 * BLOCK].isfinite().any()
    assert torch.allclose(found[:BLOCK], torch.ones(BLOCK))
    assert torch.allclose(found[2 * BLOCK :], torch.ones(BLOCK))


def test_numbers_without_a_scale_are_zeros():
    assert torch.equal(round_trip("int8", torch.full((5,), 1e-40))[0], torch.zeros(5))
