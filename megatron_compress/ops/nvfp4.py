"""E2M1 codes under two levels of scales, E4M3 within float32: the numbers of compressors/nvfp4.py (METHODS §2.1)."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from megatron_compress.ops.bits import pack_bits, unpack_bits
from megatron_compress.ops.fp8 import E4M3_MAX, MIN_MAGNITUDE
from megatron_compress.ops.groups import split_groups
from megatron_compress.ops.minifloat import E2M1

BLOCK = 16  # elements under an E4M3 scale
GROUP = 128  # elements under a float32 scale
# The least E4M3 number: no block's scale is zero.
MIN_BLOCK_SCALE = 2.0**-9
# Rounding to E4M3 makes a scale smaller by a factor of 16/17 at most: so much larger, no element is beyond 6 scales.
TRUNCATION_FREE = 17 / 16


def encode(
    x: torch.Tensor, codes: torch.Tensor, block_scales: torch.Tensor, scales: torch.Tensor, truncation_free: bool
) -> None:
    """Quantize to the nearest code, ties to the even one.

    Args:
        x: float32, bfloat16 or float16, n elements, contiguous; groups and blocks run over it as if it were flat.
        codes: uint8 [⌈n / 2⌉], element 2j in the low nibble.
        block_scales: uint8 [⌈n / 16⌉], bits of E4M3 numbers.
        scales: float32 [⌈n / 128⌉]; NaN for a group with a NaN or an infinity.
        truncation_free: scales 17/16 as large (METHODS §2.2).
    """
    quantized = [_quantize(group, truncation_free) for group in split_groups(x.reshape(-1).float(), GROUP)]
    indices, inner, outer = (torch.cat([part.reshape(-1) for part in parts]) for parts in zip(*quantized, strict=True))
    codes.copy_(pack_bits(indices, 4))
    block_scales.copy_(inner)
    scales.copy_(outer)


def decode(codes: torch.Tensor, block_scales: torch.Tensor, scales: torch.Tensor, numel: int) -> torch.Tensor:
    """float32 [numel] of what `encode` wrote: code × (scale × block scale), each product rounded to float32."""
    values = E2M1.dequantize(unpack_bits(codes, 4, numel))
    per_block = scales.repeat_interleave(GROUP // BLOCK)[: block_scales.numel()]
    steps = per_block * block_scales.view(torch.float8_e4m3fn).float()
    return values * steps.repeat_interleave(BLOCK)[:numel]


def _quantize(groups: torch.Tensor, truncation_free: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [n, g], E4M3 bits [n, ⌈g / 16⌉] and scales [n] of float32 groups [n, g], g ≤ 128."""
    headroom = TRUNCATION_FREE if truncation_free else 1.0
    blocks = F.pad(groups, (0, -groups.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    magnitudes = blocks.abs().amax(dim=2)
    largest = magnitudes.amax(dim=1).clamp(min=MIN_MAGNITUDE)
    scales = torch.where(largest.isfinite(), largest * (headroom / (E4M3_MAX * E2M1.max)), torch.nan)
    wanted = magnitudes / scales[:, None] * (headroom / E2M1.max)
    inner = wanted.nan_to_num(0.0).clamp(MIN_BLOCK_SCALE, E4M3_MAX).to(torch.float8_e4m3fn)
    steps = (scales[:, None] * inner.float()).reciprocal()
    codes = E2M1.nearest((blocks * steps[:, :, None]).nan_to_num(0.0)).flatten(1)[:, : groups.shape[1]]
    return codes, inner.view(torch.uint8), scales
