"""Entropy of normalized magnitudes, by a fixed polynomial so that every device ranks tiles alike (DESIGN D7)."""

from __future__ import annotations

import torch

from megatron_compress.ops.reduce import pairwise_sum

# log2(1 + t) ≈ t + t (1 − t) Q(t) on [0, 1], error below 7.1e-6; Q's coefficients from t^4 down to t^0.
_LOG2_COEFFICIENTS = (0.02627305, -0.09838762, 0.18486223, -0.27672833, 0.44265944)
# Keeps the reciprocal of a tile's sum finite; the papers' ε and ς of 1e-30 play no other part.
_MIN_SUM = 2.0**-120


def log2(x: torch.Tensor) -> torch.Tensor:
    """log2 of positive normal float32 values: exponent plus polynomial of the mantissa, Horner, no fused steps.

    It is finite at zero, too, so that 0 · log2 0 is 0.
    """
    bits = x.view(torch.int32)
    exponent = ((bits >> 23) - 127).float()
    t = ((bits & 0x7FFFFF) | 0x3F800000).view(torch.float32) - 1.0
    q = torch.full_like(t, _LOG2_COEFFICIENTS[0])
    for coefficient in _LOG2_COEFFICIENTS[1:]:
        q = q * t + coefficient
    return exponent + (t + (t * (1.0 - t)) * q)


def magnitude_entropy(x: torch.Tensor) -> torch.Tensor:
    """−Σ p log2 p with p = |x| / Σ|x| over the last dimension (TAH-Quant eqs. (1)–(2), METHODS A1); 0 for all zeros.

    High where magnitudes are even, low where few dominate. x: [..., n] float32, finite; returns [...].
    """
    magnitude = x.abs()
    p = magnitude * (1.0 / pairwise_sum(magnitude).clamp(min=_MIN_SUM))[..., None]
    return -pairwise_sum(p * log2(p))
