"""Signed integers under one bfloat16 scale per group or channel: the numbers of compressors/fixed_point.py.

Kernels: csrc/scaled.cu for groups, csrc/channel.cu for channels.
"""

from __future__ import annotations

import torch

from megatron_compress.ops.bits import pack_bits, unpack_bits
from megatron_compress.ops.groups import split_groups
from megatron_compress.ops.library import register
from megatron_compress.ops.reduce import requantize_by, store_sum

# Below this a scale no longer follows the data: levels / scale stays finite in float32.
MIN_SCALE = 2.0**-110
BF16_MAX = torch.finfo(torch.bfloat16).max


def _encode(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, group_size: int, bits: int) -> None:
    q = _quantize(split_groups(x.reshape(-1).float(), group_size), scales, bits)
    codes.copy_(pack_bits(torch.cat([part.view(-1) for part in q]), bits))


def _decode(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, group_size: int, bits: int) -> None:
    def values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        groups = split_groups(unpack_bits(codes, bits, out.numel()), group_size)
        return torch.cat([part.view(-1) for part in _dequantize(groups, scales, bits)])

    store_sum((values(*payload) for payload in zip(codes, scales, strict=True)), out)


def _encode_channels(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bits: int) -> None:
    (q,) = _quantize([x.reshape(-1, scales.numel()).float().t()], scales, bits)
    codes.copy_(pack_bits(q.t().reshape(-1), bits))


def _decode_channels(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, bits: int) -> None:
    def values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        channels = unpack_bits(codes, bits, out.numel()).view(-1, scales.numel()).t()
        (part,) = _dequantize([channels], scales, bits)
        return part.t()

    store_sum((values(*payload).reshape(out.shape) for payload in zip(codes, scales, strict=True)), out)


# Arguments as in ops/fp4_quant.py; of the channel ops, x and out are [..., scales].
encode = register(
    "fixed_point_encode(Tensor x, Tensor(a!) codes, Tensor(b!) scales, int group_size, int bits) -> ()", _encode
)
decode = register(
    "fixed_point_decode(Tensor codes, Tensor scales, Tensor(a!) out, int group_size, int bits) -> ()", _decode
)
requantize = register(
    "fixed_point_requantize(Tensor codes, Tensor scales, ScalarType dtype, int numel, Tensor(a!) codes_out, "
    "Tensor(b!) scales_out, int group_size, int bits) -> ()",
    requantize_by(_decode, _encode),
)
encode_channels = register(
    "fixed_point_channel_encode(Tensor x, Tensor(a!) codes, Tensor(b!) scales, int bits) -> ()", _encode_channels
)
decode_channels = register(
    "fixed_point_channel_decode(Tensor codes, Tensor scales, Tensor(a!) out, int bits) -> ()", _decode_channels
)


def _quantize(tiles: list[torch.Tensor], scales: torch.Tensor, bits: int) -> list[torch.Tensor]:
    """tiles: [n, g] float32 matrices; sets their scales and returns the codes."""
    top = levels(bits)
    codes = []
    for tile, scale in zip(tiles, scales.split([len(tile) for tile in tiles]), strict=True):
        scale.copy_(round_up_to_bfloat16(tile.abs().amax(dim=1)))
        steps = scale.float().reciprocal() * top
        q = (tile * steps[:, None]).round_().clamp_(-top, top).nan_to_num_(0.0)
        codes.append((q + top).to(torch.int32))
    return codes


def _dequantize(tiles: list[torch.Tensor], scales: torch.Tensor, bits: int) -> list[torch.Tensor]:
    top = levels(bits)
    factors = scales.float().split([len(tile) for tile in tiles])
    return [(tile.float() - top) * (f * (1 / top))[:, None] for tile, f in zip(tiles, factors, strict=True)]


def levels(bits: int) -> int:
    """The largest integer of a code; codes store it plus this."""
    return 2 ** (bits - 1) - 1


def round_up_to_bfloat16(magnitude: torch.Tensor) -> torch.Tensor:
    """The least bfloat16 ≥ `magnitude` (float32, ≥ 0), within [2^-110, bfloat16's largest]; NaN where not finite."""
    clamped = magnitude.clamp(MIN_SCALE, BF16_MAX)
    bits = clamped.view(torch.int32)
    up = ((bits + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(magnitude.isfinite(), up, torch.nan)
