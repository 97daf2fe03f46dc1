"""Groups rotated and in a 4-bit floating-point format: the numbers of compressors/fp4_quant.py.

The reference states the order of operations that csrc/fp4_quant.cu follows to the bit.
"""

from __future__ import annotations

import math

import torch

from megatron_compress.ops.bits import pack_bits, unpack_bits
from megatron_compress.ops.groups import split_groups
from megatron_compress.ops.hadamard import hadamard_block, hadamard_transform
from megatron_compress.ops.library import register
from megatron_compress.ops.minifloat import E2M1, E3M0, MiniFloat
from megatron_compress.ops.reduce import pairwise_sum, store_sum

# Keeps sums of 512 elements below float32's largest; exact above 2^-116.
HEADROOM = 2.0**-10
# Below this a scale no longer follows the data, so that its reciprocal stays finite.
MIN_SCALE = 2.0**-120


def _encode(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    alphas: torch.Tensor,
    group_size: int,
    e3m0: bool,
    paper_clips: bool,
) -> None:
    rotated = [hadamard_transform(group * HEADROOM) for group in split_groups(x.reshape(-1).float(), group_size)]
    _store(rotated, codes, scales, alphas, _format(e3m0), paper_clips)


def _decode(
    codes: torch.Tensor, scales: torch.Tensor, alphas: torch.Tensor, out: torch.Tensor, group_size: int, e3m0: bool
) -> None:
    groups = _coefficients(codes, scales, alphas, out.numel(), group_size, _format(e3m0))
    if len(codes) == 1:
        parts = [hadamard_transform(values[0]) * factors[0][:, None] for values, factors in groups]
        return store_sum([torch.cat([part.view(-1) for part in parts])], out)
    parts = []
    for values, factors in groups:
        # The power of two keeps huge values in range until they are rotated back.
        shrink = torch.where((factors > 1).any(dim=0), HEADROOM, 1.0)
        parts.append(hadamard_transform(_weighted_sum(values, factors * shrink)) * (1 / shrink)[:, None])
    out.copy_(torch.cat([part.view(-1) for part in parts]).view(out.shape))


def _requantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    alphas: torch.Tensor,
    numel: int,
    codes_out: torch.Tensor,
    scales_out: torch.Tensor,
    alphas_out: torch.Tensor,
    group_size: int,
    e3m0: bool,
    paper_clips: bool,
) -> None:
    rotated = []
    for values, factors in _coefficients(codes, scales, alphas, numel, group_size, _format(e3m0)):
        rotated.append(_weighted_sum(values, factors * (hadamard_block(values.shape[-1]) * HEADROOM)))
    _store(rotated, codes_out, scales_out, alphas_out, _format(e3m0), paper_clips)


# x: contiguous, any shape; codes, scales, alphas: the payload's sections (alphas empty: one scale a group).
encode = register(
    "fp4_quant_encode(Tensor x, Tensor(a!) codes, Tensor(b!) scales, Tensor(c!) alphas, int group_size, bool e3m0, "
    "bool paper_clips) -> ()",
    _encode,
)
# codes, scales, alphas: [ranks, n], the sections of stacked payloads; out: contiguous, gets the sum over ranks.
decode = register(
    "fp4_quant_decode(Tensor codes, Tensor scales, Tensor alphas, Tensor(a!) out, int group_size, bool e3m0) -> ()",
    _decode,
)
# encode of decode's sum of `numel` elements, which stays rotated: H·H is the group's length.
requantize = register(
    "fp4_quant_requantize(Tensor codes, Tensor scales, Tensor alphas, int numel, Tensor(a!) codes_out, "
    "Tensor(b!) scales_out, Tensor(c!) alphas_out, int group_size, bool e3m0, bool paper_clips) -> ()",
    _requantize,
)


def _format(e3m0: bool) -> MiniFloat:
    return E3M0 if e3m0 else E2M1


def _store(
    rotated: list[torch.Tensor],
    codes: torch.Tensor,
    scales: torch.Tensor,
    alphas: torch.Tensor,
    format: MiniFloat,
    paper_clips: bool,
) -> None:
    """Quantize groups [n, g] of rotated values, which hold `HEADROOM`, into a payload's sections."""
    parts = [_quantize(h, format, dual=alphas.numel() > 0, paper_clips=paper_clips) for h in rotated]
    codes.copy_(pack_bits(torch.cat([code.view(-1) for code, _, _ in parts]), 4))
    scales.copy_(torch.cat([scale for _, scale, _ in parts]))
    if alphas.numel():
        alphas.copy_(torch.cat([alpha for _, _, alpha in parts]))


def _quantize(
    h: torch.Tensor, format: MiniFloat, dual: bool, paper_clips: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """h: [n, g]; returns codes [n, g], zeros where a group is not finite, scales and alphas [n], NaN there."""
    length, block = h.shape[1], hadamard_block(h.shape[1])
    largest = h.abs().amax(dim=1)
    finite = largest.isfinite()
    largest = largest.clamp(min=MIN_SCALE)
    inverse = largest.reciprocal() * format.max
    scale = (largest * (1 / format.max)) * (1 / (HEADROOM * block))
    alpha = scale
    if dual:
        t = h * inverse[:, None]
        squares = pairwise_sum(t * t)
        scale, alpha, clipped = _dual_scales(largest, squares, block, length, format, paper_clips)
        inverse = clipped if paper_clips else inverse
    t = h * inverse[:, None]
    codes = format.quantize(t.clamp(-format.max, format.max) if paper_clips else t)
    codes = torch.where(finite[:, None], codes, 0)
    return codes, torch.where(finite, scale, torch.nan), torch.where(finite, alpha, torch.nan)


def _dual_scales(
    largest: torch.Tensor, squares: torch.Tensor, block: int, length: int, format: MiniFloat, paper_clips: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The paper's s and α, and under its clips what multiplies the transformed values (METHODS §5.2).

    The mean square is taken behind the rotation, which does not change it. Groups are taken times a power of two (in
    α on the wire), so that α is of the order of one; under the paper's clips they are taken as they are.
    """
    norm = _norm(block)
    if paper_clips:
        power, gain, ratio = torch.ones_like(largest), 1.0, 1 / block / length
        unit, root_block = largest * (1 / HEADROOM), norm
    else:
        power, gain, ratio = _inverse_power_of_two(largest), block * HEADROOM, block / length
        unit, root_block = largest * power, norm * block
    root = unit * (1 / format.max)
    mean_square = (squares * ratio) * (root * root)
    # In float64 and rounded once: float32 square roots of torch are not correctly rounded on every device.
    deviation = (mean_square + 1e-6).double().sqrt().float()
    alpha = (deviation.reciprocal() * format.max).clamp(1e-3, 1e3)
    scale = ((alpha * unit) * root_block) * (1 / format.max)
    if paper_clips:
        scale = scale.clamp(1e-12, 1e6)
    inverse = (scale.reciprocal() * (alpha * norm)) * (1 / HEADROOM)
    return scale, (alpha * gain) * power, inverse


def _coefficients(
    codes: torch.Tensor, scales: torch.Tensor, alphas: torch.Tensor, numel: int, group_size: int, format: MiniFloat
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of stacked payloads, for whole groups and the short one: values of codes [ranks, n, g], factors [ranks, n]."""
    ranks = [split_groups(format.dequantize(unpack_bits(c, 4, numel)), group_size) for c in codes]
    result = []
    first = 0
    for values in map(torch.stack, zip(*ranks, strict=True)):
        count = values.shape[1]
        factors = scales[:, first : first + count]
        if alphas.shape[1]:
            factors = factors * _norm(hadamard_block(values.shape[2])) / alphas[:, first : first + count]
        result.append((values, factors))
        first += count
    return result


def _weighted_sum(values: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """values: [ranks, n, g], factors: [ranks, n]; the sum of products over ranks, in order, [n, g]."""
    total = values[0] * factors[0][:, None]
    for value, factor in zip(values[1:], factors[1:], strict=True):
        total += value * factor[:, None]
    return total


def _norm(block: int) -> float:
    """1/√n of the orthonormal transform, as a float32 value."""
    return float(torch.tensor(1 / math.sqrt(block), dtype=torch.float32))


def _inverse_power_of_two(magnitude: torch.Tensor) -> torch.Tensor:
    """2^-e with 2^e ≤ magnitude < 2^(e+1), for magnitudes from `MIN_SCALE` to 2^127."""
    return ((254 - (magnitude.view(torch.int32) >> 23)) << 23).view(torch.float32)
