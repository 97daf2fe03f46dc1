"""Compressed all-gather along the first dimension."""

from __future__ import annotations

from collections.abc import Generator

import torch
import torch.distributed as dist

from megatron_compress.collectives.work import Work, finished
from megatron_compress.compressors.base import Compressor
from megatron_compress.wire import TensorSpec


def all_gather(output: torch.Tensor, tensor: torch.Tensor, compressor: Compressor, group: dist.ProcessGroup) -> Work:
    """Gather `tensor` [s, ...] of the n ranks of `group` into `output` [n · s, ...] (contiguous) at `wait()`.

    1. Compress; 2. all-gather the payloads; 3. decode all of them, one's own too, so that every rank holds the same
    bits.

    Raises:
        ValueError: the sizes do not match.
    """
    world_size = group.size()
    if output.numel() != tensor.numel() * world_size:
        raise ValueError(f"all_gather over {world_size} ranks: {tuple(tensor.shape)} into {tuple(output.shape)}")
    if world_size == 1 or tensor.numel() == 0:
        output.copy_(tensor)
        return finished()
    return Work(_all_gather(output, tensor, compressor, group))


def _all_gather(
    output: torch.Tensor, tensor: torch.Tensor, compressor: Compressor, group: dist.ProcessGroup
) -> Generator:
    spec = TensorSpec((tensor.numel(),), tensor.dtype)
    payload = compressor.compress(tensor.reshape(-1), spec)
    gathered = payload.new_empty(group.size(), payload.numel())
    yield dist.all_gather_into_tensor(gathered.view(-1), payload, group=group, async_op=True)
    for part, source in zip(output.view(group.size(), -1), gathered, strict=True):
        compressor.decompress(source, spec, part)
