"""The Walsh–Hadamard transform in natural (Sylvester) order, by butterflies of fixed order (DESIGN D7)."""

from __future__ import annotations

import torch

from megatron_compress.ops.library import register
from megatron_compress.ops.reduce import saturate


def hadamard_block(length: int) -> int:
    """The largest power of two that divides `length`: the block in which rows of that length are transformed."""
    return length & -length


def hadamard_transform(x: torch.Tensor) -> torch.Tensor:
    """Unnormalized transform H·x of the last dimension, H[i, j] = (−1)^popcount(i & j); H·H = n·I.

    Stages run over distances 1, 2, 4, …; in each, (a, b) ← (a + b, a − b) in float32. A last dimension that is no
    power of two is transformed in blocks of `hadamard_block(n)`, so nothing is padded.

    Args:
        x: [..., n] float32. Growth is at most n-fold; the caller keeps it below float32's range.
    """
    block = hadamard_block(x.shape[-1])
    # One column per block, so that every butterfly adds and subtracts contiguous rows.
    columns = x.reshape(-1, block).t().contiguous()
    count = columns.shape[1]
    distance = 1
    while distance < block:
        pairs = columns.view(block // (2 * distance), 2, distance, count)
        columns = torch.empty_like(pairs)
        torch.add(pairs[:, 0], pairs[:, 1], out=columns[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=columns[:, 1])
        distance *= 2
    return columns.view(block, count).t().contiguous().view(x.shape)


def grouped_hadamard(x: torch.Tensor, out: torch.Tensor, group_size: int, scale: float) -> None:
    """Transform groups of `group_size` of the flattened `x` in float32 and write them, times `scale`, into `out`.

    Args:
        x, out: contiguous, of one shape and dtype (float32, bfloat16, float16).
        group_size: a power of two from 8 to 512 that divides x's elements.

    Raises:
        ValueError: it is not.
    """
    if group_size not in (8, 16, 32, 64, 128, 256, 512) or x.numel() % group_size:
        raise ValueError(
            f"group_size must be a power of two from 8 to 512 that divides the {x.numel()} elements, got {group_size}"
        )
    _op(x, out, group_size, scale)


def _grouped(x: torch.Tensor, out: torch.Tensor, group_size: int, scale: float) -> None:
    transformed = hadamard_transform(x.float().view(-1, group_size)) * scale
    out.copy_(saturate(transformed, out.dtype).view(out.shape))


_op = register("hadamard(Tensor x, Tensor(a!) out, int group_size, float scale) -> ()", _grouped)
