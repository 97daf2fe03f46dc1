"""Where Hadamards stand in the three products of a linear layer: any placement, simulated (METHODS §1.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_compress.ops.absmax import AbsmaxFormat
from megatron_compress.ops.rotation import rotate, unrotate


@dataclass(frozen=True)
class Placement:
    """Hadamards of one product A·B, A [M, K] and B [K, N]; the product without quantizers stays what it is.

    Args:
        left: over A's rows, undone on the result's.
        middle: over the contracted dimension of both, where it cancels.
        right: over B's columns, undone on the result's.
    """

    left: bool = False
    middle: bool = False
    right: bool = False


@dataclass(frozen=True)
class Placements:
    """Of Y = X·Wᵀ, E_X = E_Y·W and G = E_Yᵀ·X."""

    forward: Placement = Placement()
    error: Placement = Placement()
    gradient: Placement = Placement()


# HALO-0, HALO-1 and HALO-2.
LEVELS = (
    Placements(),
    Placements(Placement(middle=True), Placement(right=True), Placement(right=True)),
    Placements(Placement(middle=True), Placement(left=True, right=True), Placement(right=True)),
)


def placed_product(
    a: torch.Tensor, b: torch.Tensor, placement: Placement, fmt: AbsmaxFormat | None = None
) -> torch.Tensor:
    """A·B with both operands rotated as placed and then quantized; without `fmt`, not quantized.

    Args:
        a, b: [M, K] and [K, N], any floating dtype.

    Returns:
        [M, N] float32.
    """
    if placement.left:
        a = rotate(a.t()).t()
    if placement.middle:
        a, b = rotate(a), rotate(b.t()).t()
    if placement.right:
        b = rotate(b)
    if fmt:
        a, b = fmt.quantize(a).dequantize(), fmt.quantize(b).dequantize()
    out = a.float() @ b.float()
    out = unrotate(out) if placement.right else out
    return unrotate(out.t()).t() if placement.left else out


class _Simulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, placements, fmt):
        ctx.save_for_backward(x, weight)
        ctx.placements, ctx.fmt = placements, fmt
        return placed_product(x, weight.t(), placements.forward, fmt).to(x.dtype)

    @staticmethod
    def backward(ctx, error):
        x, weight = ctx.saved_tensors
        error_x = placed_product(error, weight, ctx.placements.error, ctx.fmt)
        gradient = placed_product(error.t(), x, ctx.placements.gradient, ctx.fmt)
        return error_x.to(x.dtype), gradient.to(weight.dtype), None, None


def simulated_linear(
    x: torch.Tensor, weight: torch.Tensor, placements: Placements, fmt: AbsmaxFormat | None
) -> torch.Tensor:
    """X·Wᵀ and its gradients with Hadamards as placed, by quantizing and dequantizing; saves x and weight whole.

    Args:
        x, weight: [tokens, in] and [out, in].

    Returns:
        [tokens, out] of x's dtype.
    """
    return _Simulated.apply(x, weight, placements, fmt)
