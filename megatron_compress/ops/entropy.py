"""Entropy of normalized magnitudes, by a fixed polynomial so that every device ranks tiles alike (DESIGN D7)."""

from __future__ import annotations

import math

import torch

from megatron_compress.ops.reduce import pairwise_sum

# log2 m ≈ (m − 1) + (m − 1)(2 − m)(slope · m + offset) on [1, 2], error below 8.8e-4, for sums; the logarithm of an
# element is linear between powers of two, 0 to 0.0861 below log2, much alike in all windows. As in csrc/tah_rank.cu.
_LOG2_SLOPE = -0.15922019
_LOG2_OFFSET = 0.58208556
# Keeps the sum of 65536 magnitudes below float32's largest; exact above 2^-109.
_HEADROOM = 2.0**-17
# Keeps the reciprocal of a window's sum finite; the papers' ε and ς of 1e-30 play no other part.
_MIN_SUM = 2.0**-120
# The largest of the 12-bit keys by which windows are ranked.
MAX_KEY = 4095


def window_entropy(x: torch.Tensor) -> torch.Tensor:
    """−Σ p log2 p with p = |x| / Σ|x| over windows of tiles (TAH-Quant eqs. (1)–(2), METHODS A1); 0 for all zeros.

    High where magnitudes are even, low where few dominate. Computed as log2 S − (Σ |x| log2 |x|) / S with S = Σ|x|,
    logarithms counted from the exponent of a tile's, then of the window's sum: a power of two changes no bit. The
    elements' logarithms are linear between powers of two: up to 0.087 bits too high, and of windows of one kind alike
    to about 0.01 (1 % of tiles rank otherwise than by exact logarithms on normal data, with the same error).

    Args:
        x: [..., tiles, elements] float32, finite; a window has at most 65536 elements.

    Returns:
        [...] in bits / 256.
    """
    magnitude = (x * _HEADROOM).abs()
    sums = pairwise_sum(magnitude)
    bases = _exponent_bits(sums)
    weighted = pairwise_sum(magnitude * ((magnitude.view(torch.int32) - bases[..., None]).float() * 2.0**-31))
    total = pairwise_sum(sums)
    base = _exponent_bits(total)
    shift = (bases - base[..., None]).float() * 2.0**-31
    weighted = pairwise_sum(weighted + sums * shift)
    return _log2_mantissa(total) - weighted * total.clamp(min=_MIN_SUM).reciprocal()


def ranking_key(x: torch.Tensor) -> torch.Tensor:
    """The entropy of windows [..., tiles, elements] in units of its largest value, as integers up to `MAX_KEY`."""
    scale = 256.0 * MAX_KEY / math.log2(x.shape[-2] * x.shape[-1])
    return (window_entropy(x) * scale).clamp(0, MAX_KEY).to(torch.int32)


def _exponent_bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32) & 0x7F800000


def _log2_mantissa(x: torch.Tensor) -> torch.Tensor:
    """log2 of positive x / 2^e for its exponent e, in units of 256."""
    bits = (x.view(torch.int32) & 0x7FFFFF) | 0x3F800000
    m = bits.view(torch.float32)
    curve = ((m - 1.0) * (2.0 - m)) * (m * (_LOG2_SLOPE / 256) + _LOG2_OFFSET / 256)
    return (bits - 0x3F800000).float() * 2.0**-31 + curve
