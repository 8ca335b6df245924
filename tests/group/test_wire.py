"""What crosses between ranks: plain data, exactly, and nothing else."""

import math

import numpy
import pytest
import torch

from torchbearer_ddp.checked import Unexpected
from torchbearer_ddp.group import wire


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(2**70),
        1.5,
        "grün",
        b"",
        b"\x00\xff",
        [],
        (1, (2, [3])),
        {"a": {1: None, (2, 3): "x"}},
        {1, 2, 3},
        math.inf,
    ],
)
def test_plain_values_come_back_as_they_were(value):
    back = wire.decode(wire.encode(value))
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.uint8,
        torch.bool,
    ],
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_tensors_come_back_bitwise(dtype, shape):
    tensor = torch.randn(shape).to(dtype)
    first, back = wire.decode(wire.encode([b"odd", tensor]))
    assert first == b"odd"
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


def test_special_numbers_and_numpy_scalars():
    assert math.isnan(wire.decode(wire.encode(math.nan)))
    assert wire.decode(wire.encode(-0.0)) == 0.0
    assert wire.decode(wire.encode(0.1 + 0.2)) == 0.1 + 0.2
    assert wire.decode(wire.encode(numpy.float64(0.1))) == 0.1
    assert wire.decode(wire.encode(numpy.int32(7))) == 7


@pytest.mark.parametrize("dtype", ["float32", ">f8", "int16", "uint16", "bool", "complex128"])
def test_arrays_come_back_as_arrays(dtype):
    array = (numpy.arange(6).reshape(2, 3) % 2).astype(dtype)[:, ::-1]
    back = wire.decode(wire.encode({"a": array}))["a"]
    assert isinstance(back, numpy.ndarray)
    assert back.dtype == array.dtype.newbyteorder("=")
    assert numpy.array_equal(back, array)
    with pytest.raises(TypeError, match=r"value is a numpy\.ndarray"):
        wire.encode(numpy.array(["a"]))


def test_anything_else_is_named_and_refused():
    with pytest.raises(TypeError, match=r"value\['a'\]\[1\] is a builtins.object"):
        wire.encode({"a": [1, object()]})
    with pytest.raises(TypeError, match="function"):
        wire.encode(lambda: None)


def test_a_tensor_that_was_not_on_the_cpu_goes_to_the_device():
    # The meta device stands in for a GPU, on the way back only: it holds no data.
    packed = wire.encode([torch.ones(2), 1])
    text = bytes(packed.tolist())
    assert text.count(b"false") == 1
    moved = torch.frombuffer(bytearray(text.replace(b"false", b" true")), dtype=torch.uint8)
    assert wire.decode(moved, "meta")[0].device.type == "meta"
    assert wire.decode(packed, "meta")[0].device.type == "cpu"
    assert wire.decode(moved)[0].device.type == "cpu"


def test_numbers_of_any_size_and_mixed_sets_come_back():
    for value in (10**5000, -(7**9000), {0, None}, {"a", 1, (2, None)}, "\udcff"):
        assert wire.decode(wire.encode(value)) == value


def test_views_come_back_as_what_they_show():
    number = torch.randn(3, dtype=torch.complex64)
    for view in (number.conj(), number.conj().imag, torch._neg_view(torch.ones(3))):
        assert torch.equal(wire.decode(wire.encode(view)), view)


def test_what_has_no_end_or_no_data_is_refused():
    endless = []
    endless.append(endless)
    with pytest.raises(TypeError, match="holds itself"):
        wire.encode(endless)
    with pytest.raises(TypeError, match=r"value is a torch\.Tensor"):
        wire.encode(torch.ones(2, device="meta"))


NOTHING_SENDS = [
    "{}",
    "[]",
    '["eval",["1"]]',
    '["list"]',
    '["list",[1],[2]]',
    '["dict",[1],[1,2]]',
    '["dict",[["list",[]]],[1]]',
    '["set",[["list",[]]]]',
    '["float","1e5"]',
    '["int","x"]',
    '["tensor","load",[1],false]',
    '["tensor","float32",[1],0]',
    '["tensor","float32",[-1],false]',
    '["tensor","float32",[true],false]',
    '["tensor","float32",[4611686018427387904,4611686018427387904],false]',
    '["tensor","float32",[2],false]',
    '["tensor","bool",[4],false]',
    '["tensor","float32",[1],false,[1,1]]',
    '["tensor","uint8",[2,2],false,[0,1]]',
    '["tensor","uint8",[2,2],false,[-1,1]]',
    '["bytes",["list",[]]]',
    '["array",["tensor","bfloat16",[2],false]]',
    '["sparse","strided",[3],true,[["tensor","uint8",[4],false]]]',
    '["sparse","sparse_coo",[3],true,[["tensor","uint8",[4],false]]]',
    '["failure",1]',
    '["list",[["failure",["a","b"]]]]',
    "[" * 100_000,
    '["list",[' * 900 + "1" + "]]" * 900,
    "9" * 5000,
    "nul",
    '"\\ud800',
]


@pytest.mark.parametrize("text", NOTHING_SENDS, ids=lambda text: text[:40])
def test_a_message_that_nobody_sends_is_refused_with_a_sentence(text):
    content = len(text).to_bytes(8, "little") + text.encode() + b"\x07" * 4
    with pytest.raises(Unexpected, match=r"^(the|a tensor of the) message") as caught:
        wire.decode(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    assert "\n" not in str(caught.value)
