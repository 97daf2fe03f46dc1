"""Bit streams: codes of 1 to 16 bits in bytes, least significant bit first.

Up to 8 bits, code i occupies bits [i·b, (i+1)·b) of the stream, bit k being bit k % 8 of byte k // 8; so of two
4-bit codes the even one is the low nibble. Codes of 9 to 16 bits are stored as the bytes of their low 8 bits,
followed by the stream of their high b − 8 bits.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from megatron_compress.wire import packed_bytes


def pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack integer codes (any shape, values in [0, 2**bits)) into uint8 [packed_bytes(numel, bits)]."""
    codes = codes.reshape(-1)
    if bits > 8:
        return torch.cat((codes.bitwise_and(0xFF).to(torch.uint8), pack_bits(codes >> 8, bits - 8)))
    if bits == 8:
        return codes.to(torch.uint8)
    count = codes.numel()
    if bits == 4 and count % 2 == 0:
        pairs = codes.to(torch.uint8).view(-1, 2)
        return pairs[:, 0] | (pairs[:, 1] << 4)
    eights = F.pad(codes.to(torch.int64), (0, -count % 8)).view(-1, 8)
    words = (eights << _shifts(bits, codes.device)).sum(dim=1)
    return words.view(torch.uint8).view(-1, 8)[:, :bits].reshape(-1)[: packed_bytes(count, bits)]


def unpack_bits(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The inverse of `pack_bits`: uint8 [packed_bytes(count, bits)] to [count] codes, uint8 or (above 8 bits) int32."""
    if bits > 8:
        high = unpack_bits(packed[count:], bits - 8, count)
        return packed[:count].to(torch.int32) | (high.to(torch.int32) << 8)
    if bits == 8:
        return packed[:count].clone()
    if bits == 4 and count % 2 == 0:
        return torch.stack((packed & 0xF, packed >> 4), dim=1).view(-1)
    rows = -(-count // 8)
    padded = F.pad(packed, (0, rows * bits - packed.numel())).view(rows, bits)
    words = F.pad(padded, (0, 8 - bits)).contiguous().view(torch.int64)
    codes = (words >> _shifts(bits, packed.device)) & ((1 << bits) - 1)
    return codes.view(-1)[:count].to(torch.uint8)


def _shifts(bits: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, 8 * bits, bits, device=device)
