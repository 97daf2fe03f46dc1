"""Sums in one fixed order, so that a CUDA kernel can give the same bits (DESIGN D7)."""

from __future__ import annotations

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
