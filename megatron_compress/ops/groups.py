"""Contiguous groups of a flattened tensor; the last one may be shorter (METHODS A19)."""

from __future__ import annotations

import torch


def num_groups(numel: int, group_size: int) -> int:
    return -(-numel // group_size)


def split_groups(flat: torch.Tensor, group_size: int) -> list[torch.Tensor]:
    """The groups of a 1-D tensor as at most two matrices: [numel // group_size, group_size] and, if any, [1, rest]."""
    whole = flat.numel() - flat.numel() % group_size
    matrices = []
    if whole:
        matrices.append(flat[:whole].view(-1, group_size))
    if whole < flat.numel():
        matrices.append(flat[whole:].view(1, -1))
    return matrices
