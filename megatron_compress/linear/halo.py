"""HALO-0, HALO-1 and HALO-2: a linear layer whose three products multiply one-byte codes (METHODS §1.1)."""

from __future__ import annotations

import torch

from megatron_compress.ops.absmax import AbsmaxFormat, Quantized, product
from megatron_compress.ops.rotation import rotate, unrotate


class _Halo(torch.autograd.Function):
    """Saves the codes of X and W, a byte an element, and nothing wider."""

    @staticmethod
    def forward(ctx, x, weight, level, fmt):
        codes_x = fmt.quantize(rotate(x) if level else x)
        codes_w = fmt.quantize(rotate(weight) if level else weight)
        ctx.save_for_backward(codes_x.codes, codes_x.scale, codes_w.codes, codes_w.scale)
        ctx.level, ctx.fmt, ctx.dtypes = level, fmt, (x.dtype, weight.dtype)
        return product(codes_x, codes_w, x.dtype, fast=x.dtype == torch.bfloat16)

    @staticmethod
    def backward(ctx, error):
        saved = ctx.saved_tensors
        codes_x, codes_w = Quantized(*saved[:2]), Quantized(*saved[2:])
        error_x = gradient = None
        # Without Hadamards over the tokens both products multiply the same codes of the error.
        codes_e = ctx.fmt.quantize(error) if ctx.level < 2 or ctx.needs_input_grad[1] else None
        if ctx.needs_input_grad[0]:
            error_x = _error_product(error, codes_e, codes_w, ctx.level, ctx.fmt).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            gradient = product(codes_e.t(), codes_x.t(), error.dtype)
            gradient = (unrotate(gradient) if ctx.level else gradient).to(ctx.dtypes[1])
        return error_x, gradient, None, None


def _error_product(
    error: torch.Tensor, codes_e: Quantized | None, codes_w: Quantized, level: int, fmt: AbsmaxFormat
) -> torch.Tensor:
    """E_X [tokens, in]."""
    if level < 2:
        error_x = product(codes_e, codes_w.t(), error.dtype)
        return unrotate(error_x) if level else error_x
    over_tokens = fmt.quantize(rotate(error.t()).t())
    rotated = product(over_tokens, codes_w.t(), error.dtype)
    return unrotate(unrotate(rotated.t()).t())


def halo_linear(x: torch.Tensor, weight: torch.Tensor, level: int, fmt: AbsmaxFormat) -> torch.Tensor:
    """X·Wᵀ by codes of `fmt`, forward and backward.

    Args:
        x: [..., in] float32 or bfloat16.
        weight: [out, in], of x's dtype.
        level: 0, no Hadamard; 1, of X and W over the inputs; 2, of the error over the tokens as well.

    Returns:
        [..., out] of x's dtype.

    Raises:
        ValueError: no such level.
    """
    if level not in (0, 1, 2):
        raise ValueError(f"level must be 0, 1 or 2 (HALO-0, HALO-1, HALO-2), got {level!r}")
    out = _Halo.apply(x.reshape(-1, x.shape[-1]), weight, level, fmt)
    return out.view(*x.shape[:-1], weight.shape[0])
