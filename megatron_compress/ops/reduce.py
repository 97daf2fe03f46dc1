"""Sums in one fixed order, so that a CUDA kernel can give the same bits (DESIGN D7)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.nn import functional as F


def pairwise_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension by a binary tree of adjacent pairs: ((x0+x1)+(x2+x3))+...

    Odd lengths are padded with one zero at each level. x: [..., n] float32, n ≥ 1; returns [...].
    """
    while x.shape[-1] > 1:
        if x.shape[-1] % 2:
            x = F.pad(x, (0, 1))
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def half_fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a·b + c of float16 tensors, rounded once, as one instruction of a GPU does."""
    exact = a.double() * b.double() + c.double()
    # float32 rounded to odd keeps on which side of a half's midpoint a value lies.
    near = exact.float()
    even = (near.view(torch.int32) & 1) == 0
    toward = torch.where(exact > near, torch.inf, -torch.inf).float()
    odd = torch.where((exact != near) & even & exact.isfinite(), near.nextafter(toward), near)
    return odd.half()


def saturate(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Clamp to the finite range of `dtype`; NaN passes."""
    limit = min(torch.finfo(dtype).max, torch.finfo(values.dtype).max)
    return values.clamp(-limit, limit)


def store_sum(parts: Iterable[torch.Tensor], out: torch.Tensor, exact: bool = False) -> None:
    """Add decoded tensors in the order given, in float32, into `out` (any float dtype; DESIGN D8, D9).

    Each part saturates at float32's largest value, a single one at `out`'s; a sum that `out` cannot hold is infinite,
    as an uncompressed one would be.

    Args:
        exact: parts are what was sent, infinities included, and do not saturate.
    """
    total, count = None, 0
    for part in parts:
        part = part.float() if exact else saturate(part, torch.float32)
        total = part if total is None else total + part
        count += 1
    out.copy_((saturate(total, out.dtype) if count == 1 and not exact else total).view(out.shape))


def requantize_by(decode: Callable[..., None], encode: Callable[..., None]) -> Callable[..., None]:
    """The reference of a requantize op of codes and scales: decode the sum, rounded to the dtype, and encode it."""

    def requantize(codes, scales, dtype, numel, codes_out, scales_out, *settings):
        total = torch.empty(numel, dtype=dtype, device=codes.device)
        decode(codes, scales, total, *settings)
        encode(total, codes_out, scales_out, *settings)

    return requantize
