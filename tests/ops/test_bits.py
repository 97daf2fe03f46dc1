"""Bit streams against a plain Python oracle."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_compress.ops.bits import pack_bits, unpack_bits
from megatron_compress.wire import packed_bytes

ALL_BITS = range(1, 17)


def stream(codes: list[int], bits: int) -> bytes:
    """Code i in bits [i·b, (i+1)·b) of one little-endian number; above 8 bits, low bytes first, then the rest."""
    if bits > 8:
        return bytes(code & 0xFF for code in codes) + stream([code >> 8 for code in codes], bits - 8)
    number = sum(code << (i * bits) for i, code in enumerate(codes))
    return number.to_bytes(-(-len(codes) * bits // 8), "little")


@pytest.mark.parametrize("bits", ALL_BITS)
@settings(max_examples=25)
@given(data=st.data())
def test_packs_the_stream_and_unpacks_it(bits, data):
    codes = data.draw(st.lists(st.integers(0, 2**bits - 1), max_size=70))
    packed = pack_bits(torch.tensor(codes, dtype=torch.int32), bits)
    assert packed.dtype == torch.uint8
    assert bytes(packed.tolist()) == stream(codes, bits)
    assert len(packed) == packed_bytes(len(codes), bits)
    unpacked = unpack_bits(packed, bits, len(codes))
    assert unpacked.dtype == (torch.uint8 if bits <= 8 else torch.int32)
    assert unpacked.tolist() == codes


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 16, 1001])
def test_every_code_at_every_length(bits, count):
    for fill in (0, 2**bits - 1):
        codes = torch.full((count,), fill, dtype=torch.int32)
        assert bytes(pack_bits(codes, bits).tolist()) == stream(codes.tolist(), bits)
    codes = (torch.arange(count) * 40503) % 2**bits
    assert torch.equal(
        unpack_bits(pack_bits(codes, bits), bits, count), codes.to(torch.uint8 if bits <= 8 else torch.int32)
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_any_integer_dtype_and_shape(dtype):
    codes = torch.arange(24).view(2, 3, 4).remainder(8)
    assert torch.equal(pack_bits(codes.to(dtype), 3), pack_bits(codes.reshape(-1), 3))
    assert torch.equal(pack_bits(codes.to(dtype).transpose(0, 2), 3), pack_bits(codes.transpose(0, 2).reshape(-1), 3))


def test_flags_are_one_bit_codes():
    flags = torch.tensor([True, False, False, True, True, False, False, False, True])
    assert pack_bits(flags, 1).tolist() == [0b00011001, 0b1]


def test_even_codes_lie_in_low_nibbles():
    assert pack_bits(torch.tensor([0x1, 0xA, 0xF, 0x2]), 4).tolist() == [0xA1, 0x2F]
    assert pack_bits(torch.tensor([0x1, 0xA, 0xF]), 4).tolist() == [0xA1, 0x0F]


def test_ten_bits_are_low_bytes_then_high_pairs():
    assert pack_bits(torch.tensor([0x1FF, 0x2AA, 0x000, 0x3FF]), 10).tolist() == [0xFF, 0xAA, 0x00, 0xFF, 0b11_00_10_01]


def test_unpacking_leaves_the_packed_bytes_alone():
    for bits in ALL_BITS:
        packed = pack_bits(torch.arange(16) % 2**bits, bits)
        before = packed.clone()
        unpack_bits(packed, bits, 16).zero_()
        assert torch.equal(packed, before)
