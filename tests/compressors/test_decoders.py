"""Payloads decoded in plain Python by the words of docs/wire.md, a second implementation of every byte's meaning."""

import math
import struct

import pytest
import torch

from megatron_compress.wire import TensorSpec
from tests.strategies import all_compressors, normal

FORMATS = {"e2m1": (0, 0.5, 1, 1.5, 2, 3, 4, 6), "e3m0": (0, 0.25, 0.5, 1, 2, 4, 8, 16)}


class Reader:
    """Takes sections off a payload one by one."""

    def __init__(self, payload: bytes):
        self.payload, self.at = payload, 0

    def take(self, nbytes: int, alignment: int = 1) -> bytes:
        if nbytes:
            start = math.ceil(self.at / alignment) * alignment
            assert not any(self.payload[self.at : start])
            self.at = start + nbytes
        return self.payload[self.at - nbytes : self.at]

    def codes(self, count: int, bits: int) -> list[int]:
        if bits > 8:
            low = self.take(count)
            return [byte | high << 8 for byte, high in zip(low, self.codes(count, bits - 8), strict=True)]
        stream = self.take(math.ceil(count * bits / 8))
        bit = [byte >> i & 1 for byte in stream for i in range(8)]
        assert not any(bit[count * bits :])
        return [sum(bit[i * bits + k] << k for k in range(bits)) for i in range(count)]

    def float32(self, count: int) -> list[float]:
        return list(struct.unpack(f"<{count}f", self.take(4 * count, 4)))

    def bfloat16(self, count: int) -> list[float]:
        uppers = struct.unpack(f"<{count}H", self.take(2 * count, 2))
        return [struct.unpack("<f", struct.pack("<I", upper << 16))[0] for upper in uppers]

    def end(self) -> None:
        assert len(self.payload) % 16 == 0
        assert len(self.payload) - self.at < 16
        assert not any(self.payload[self.at :])


def hadamard(values: list[float]) -> list[float]:
    """H over blocks of the largest power of two that divides the length."""
    block = 1
    while len(values) % (2 * block) == 0:
        block *= 2
    return [
        sum((-1) ** bin(i & j).count("1") * values[i - i % block + j] for j in range(block)) for i in range(len(values))
    ]


def e4m3(code: int) -> float:
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    assert code & 127 != 127, "NaN"
    magnitude = 2.0**-6 * mantissa / 8 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8)
    return -magnitude if sign else magnitude


def groups(values: list, size: int) -> list[list]:
    return [values[i : i + size] for i in range(0, len(values), size)]


def decode_identity(reader, spec, s):
    take = {torch.float32: reader.float32, torch.bfloat16: reader.bfloat16}
    return take[spec.dtype](spec.numel)


def decode_fixed_point(reader, spec, s):
    top = 2 ** (s.bits - 1) - 1
    codes = reader.codes(spec.numel, s.bits)
    channels = spec.shape[-1] if len(spec.shape) > 1 else 1
    scales = reader.bfloat16(channels if s.group_size is None else math.ceil(spec.numel / s.group_size))
    scale_of = (lambda i: i % channels) if s.group_size is None else (lambda i: i // s.group_size)
    return [(q - top) * scales[scale_of(i)] / top for i, q in enumerate(codes)]


def decode_fp4_quant(reader, spec, s):
    table = [*FORMATS[s.format], *(-m for m in FORMATS[s.format])]
    values = [table[code] for code in reader.codes(spec.numel, 4)]
    rows = groups(values, s.group_size)
    factors = reader.float32(len(rows))
    if s.scales == "dual":
        blocks = [len(row) & -len(row) for row in rows]
        alphas = reader.float32(len(rows))
        factors = [f / (a * math.sqrt(b)) for f, a, b in zip(factors, alphas, blocks, strict=True)]
    return [h * factor for row, factor in zip(rows, factors, strict=True) for h in hadamard(row)]


def decode_fp8(reader, spec, s):
    codes = reader.take(spec.numel)
    scales = reader.float32(math.ceil(spec.numel / s.group_size))
    return [e4m3(code) * scales[i // s.group_size] for i, code in enumerate(codes)]


def decode_nvfp4(reader, spec, s):
    table = [*FORMATS["e2m1"], *(-m for m in FORMATS["e2m1"])]
    codes = reader.codes(spec.numel, 4)
    inner = [e4m3(code) for code in reader.take(math.ceil(spec.numel / 16))]
    outer = reader.float32(math.ceil(spec.numel / 128))
    return [table[code] * inner[i // 16] * outer[i // 128] for i, code in enumerate(codes)]


def decode_tah_quant(reader, spec, s):
    g, channels = s.group_size, spec.shape[-1] if spec.shape else 1
    samples = 1 if spec.sample_dim is None else spec.shape[spec.sample_dim]
    rows = math.prod(spec.shape[:-1])
    whole, short = channels // g, channels % g
    window = {None: g, "token": max(1, whole) * g}.get(s.allocation_size, s.allocation_size)
    windows, tiles = channels // window, whole + (short > 0)
    high = samples * (round(s.high_fraction * 100) * (rows // samples) * windows // 100)
    num_low = (rows * windows - high) * (window // g)
    high_codes = iter(reader.codes((rows * whole - num_low) * g, s.high_bits))
    low_codes = iter(reader.codes(num_low * g, s.low_bits))
    short_codes = iter(reader.codes(rows * short, s.high_bits))
    scales, zeros = reader.bfloat16(rows * tiles), reader.bfloat16(rows * tiles)
    high_map = reader.codes(rows * windows, 1)
    pivots = reader.codes(rows * tiles, round(math.log2(g)))
    assert sum(high_map) == high

    decoded = []
    for i in range(rows * tiles):
        row, tile = divmod(i, tiles)
        outside = tile * g // window >= windows
        is_high = outside or high_map[row * windows + tile * g // window]
        stream, length = (short_codes, short) if tile == whole else (high_codes if is_high else low_codes, g)
        y = [next(stream) * abs(scales[i]) + zeros[i] for _ in range(length)]
        if math.copysign(1, scales[i]) < 0:
            y = hadamard(y)
            y[0], y[pivots[i]] = y[pivots[i]], y[0]
        else:
            assert pivots[i] == 0
        decoded += y
    assert not [*high_codes, *low_codes, *short_codes]
    order = torch.arange(spec.numel).view(spec.shape)
    order = order if spec.sample_dim is None else order.movedim(spec.sample_dim, 0)
    return torch.tensor(decoded)[order.reshape(-1).argsort()].tolist()


DECODERS = {
    "aq_sgd": decode_fixed_point,  # of the change of a sample; of one that is not remembered, from zero
    "fixed_point": decode_fixed_point,
    "fp4_quant": decode_fp4_quant,
    "fp8": decode_fp8,
    "identity": decode_identity,
    "nvfp4": decode_nvfp4,
    "tah_quant": decode_tah_quant,
}


@all_compressors
@pytest.mark.parametrize("shape", [(2, 2, 150), (3, 1, 300), (7,), (2, 64), (5, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_page_suffices_to_decode(compressor, shape, dtype):
    x = normal(shape, 0, dtype)
    x.view(-1)[3::40] *= 50
    spec = TensorSpec(shape, dtype, 1 if len(shape) == 3 else None)
    payload = compressor.compress(x, spec)
    reader = Reader(bytes(payload.tolist()))
    decoded = torch.tensor(DECODERS[compressor.name](reader, spec, compressor.settings))
    reader.end()
    expected = compressor.decompress(payload, spec, torch.empty(shape))
    # fp4_quant rotates back in half precision.
    precision = 2.0**-9 if compressor.name == "fp4_quant" else 1e-6
    assert torch.allclose(decoded.view(shape), expected, rtol=1e-5, atol=precision * float(x.abs().max()))
