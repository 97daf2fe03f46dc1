"""Groups rotated and in a 4-bit floating-point format: the numbers of compressors/fp4_quant.py.

Groups are taken times a power of two, so that they can be rotated in half precision, whose error is a thousandth of
that of four bits: H·y with x = y · block · unit, |H·y| < 2. The reference states the order of operations that
csrc/fp4_*.cu follow to the bit.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from megatron_compress.ops.bits import pack_bits, unpack_bits
from megatron_compress.ops.groups import split_groups
from megatron_compress.ops.hadamard import hadamard_block, hadamard_transform
from megatron_compress.ops.library import register
from megatron_compress.ops.minifloat import E2M1, E3M0, MiniFloat
from megatron_compress.ops.reduce import half_fma, pairwise_sum, saturate

# Groups whose largest magnitude is below it, and payloads whose factors are, no longer follow their data.
MIN_PEAK, MIN_FACTOR = 2.0**-110, 2.0**-120
# The least that rotated values are scaled by; a group above MIN_PEAK has none as small.
MIN_LARGEST = 2.0**-14


class Rotated(NamedTuple):
    """Groups [n, g]: `values` in half precision, times `growth` and `unit` [n], not finite where they are not."""

    values: torch.Tensor
    unit: torch.Tensor
    growth: float = 1.0


def _encode(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    alphas: torch.Tensor,
    group_size: int,
    e3m0: bool,
    paper_clips: bool,
) -> None:
    rotated = [_rotate(group) for group in split_groups(x.reshape(-1).float(), group_size)]
    _store(rotated, codes, scales, alphas, _format(e3m0), paper_clips)


def _decode(
    codes: torch.Tensor, scales: torch.Tensor, alphas: torch.Tensor, out: torch.Tensor, group_size: int, e3m0: bool
) -> None:
    parts = []
    for values, factors in _coefficients(codes, scales, alphas, out.numel(), group_size, _format(e3m0)):
        alone = len(codes) == 1
        rotated = Rotated(values[0].half(), factors[0]) if alone else _weighted_sum(values, factors, _format(e3m0))
        decoded = (hadamard_transform(rotated.values).float() * rotated.growth) * rotated.unit[:, None]
        parts.append(saturate(decoded, out.dtype) if alone else decoded)
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
    groups = _coefficients(codes, scales, alphas, numel, group_size, _format(e3m0))
    rotated = [_weighted_sum(values, factors, _format(e3m0)) for values, factors in groups]
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


def _rotate(x: torch.Tensor) -> Rotated:
    peak = x.abs().amax(dim=1)
    unit = _power_of_two(peak.clamp(min=MIN_PEAK))
    y = x * ((1 / unit) * (1 / hadamard_block(x.shape[1])))[:, None]
    return Rotated(hadamard_transform(y.half()), unit)


def _store(
    rotated: list[Rotated],
    codes: torch.Tensor,
    scales: torch.Tensor,
    alphas: torch.Tensor,
    format: MiniFloat,
    paper_clips: bool,
) -> None:
    """Quantize rotated groups into a payload's sections."""
    parts = [_quantize(r, format, dual=alphas.numel() > 0, paper_clips=paper_clips) for r in rotated]
    codes.copy_(pack_bits(torch.cat([code.view(-1) for code, _, _ in parts]), 4))
    scales.copy_(torch.cat([scale for _, scale, _ in parts]))
    if alphas.numel():
        alphas.copy_(torch.cat([alpha for _, _, alpha in parts]))


def _quantize(
    rotated: Rotated, format: MiniFloat, dual: bool, paper_clips: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [n, g], zeros where a group is not finite, scales and alphas [n], NaN there."""
    h, unit, growth = rotated
    largest = h.abs().amax(dim=1).float().clamp(min=MIN_LARGEST)
    inverse = largest.reciprocal() * (format.max * format.unit)
    scale = ((largest * growth) * (1 / format.max)) * unit
    alpha = scale
    if dual:
        scale, alpha, clipped = _dual_scales(rotated, largest * growth, format, paper_clips)
        inverse = clipped if paper_clips else inverse
    t = h * inverse.half()[:, None]
    if paper_clips:
        t = t.clamp(-format.max * format.unit, format.max * format.unit)
    finite = unit.isfinite()
    codes = torch.where(finite[:, None], format.quantize(t), 0)
    return codes, torch.where(finite, scale, torch.nan), torch.where(finite, alpha, torch.nan)


def _dual_scales(
    rotated: Rotated, largest: torch.Tensor, format: MiniFloat, paper_clips: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The paper's s and α, and under its clips what multiplies the rotated values (METHODS §5.2).

    The mean square is taken behind the rotation, which does not change it. Groups are taken over `unit` (in α on the
    wire), so that α is of the order of one; under the paper's clips they are taken as they are.
    """
    h, unit, growth = rotated
    block = hadamard_block(h.shape[1])
    norm = _norm(block)
    squares = pairwise_sum(h.float() * h.float())
    taken = unit if paper_clips else torch.ones_like(unit)
    mean_square = ((squares * (growth * growth * block / h.shape[1])) * taken) * taken
    # In float64 and rounded once: float32 square roots of torch are not correctly rounded on every device.
    deviation = (mean_square + 1e-6).double().sqrt().float()
    alpha = (deviation.reciprocal() * format.max).clamp(1e-3, 1e3)
    scale = (((alpha * largest) * (norm * block)) * taken) * (1 / format.max)
    if not paper_clips:
        return scale, alpha * (1 / unit), scale
    scale = scale.clamp(1e-12, 1e6)
    inverse = (((scale.reciprocal() * alpha) * (norm * block)) * taken) * (growth * format.unit)
    return scale, alpha, inverse.clamp(max=torch.finfo(torch.float16).max)


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


def _weighted_sum(values: torch.Tensor, factors: torch.Tensor, format: MiniFloat) -> Rotated:
    """The sum of products over ranks, in order. values: [ranks, n, g], factors: [ranks, n]."""
    ranks = len(values)
    power = _power_of_two(factors.amax(dim=0).clamp(min=MIN_FACTOR))
    shrink = 0.5 ** (1 + (ranks - 1).bit_length())  # the sum stays within the format's range
    weights = (factors * (1 / power) * (shrink / format.unit)).half()[..., None]
    products = (values * format.unit).half()
    total = products[0] * weights[0]
    for product, weight in zip(products[1:], weights[1:], strict=True):
        total = half_fma(product, weight, total)
    return Rotated(total, power, 1 / shrink)


def _norm(block: int) -> float:
    """1/√n of the orthonormal transform, as a float32 value."""
    return float(torch.tensor(1 / math.sqrt(block), dtype=torch.float32))


def _power_of_two(magnitude: torch.Tensor) -> torch.Tensor:
    """The largest power of two that is not above a normal float32 `magnitude`; NaN and infinity become infinity."""
    return (magnitude.view(torch.int32) & 0x7F800000).view(torch.float32)
