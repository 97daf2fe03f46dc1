"""Compressed reduce-scatter (sum) along the first dimension."""

from __future__ import annotations

from collections.abc import Generator

import torch
import torch.distributed as dist

from megatron_compress.collectives.reduction import compress_chunks, store_flat
from megatron_compress.collectives.work import Work, finished
from megatron_compress.compressors.base import Compressor
from megatron_compress.wire import TensorSpec


def reduce_scatter(
    output: torch.Tensor, tensor: torch.Tensor, compressor: Compressor, group: dist.ProcessGroup
) -> Work:
    """Sum `tensor` [n · s, ...] over the n ranks of `group`; rank i finds rows [i · s, (i+1) · s) in `output`.

    1. Compress each rank's rows; 2. all-to-all; 3. decode all payloads, one's own too, and add them in float32, in
    rank order, into `output` at `wait()`. One quantization.

    Raises:
        ValueError: the sizes do not match.
    """
    world_size = group.size()
    if output.numel() * world_size != tensor.numel():
        raise ValueError(f"reduce_scatter over {world_size} ranks: {tuple(tensor.shape)} into {tuple(output.shape)}")
    if world_size == 1 or tensor.numel() == 0:
        output.copy_(tensor)
        return finished()
    return Work(_reduce_scatter(output, tensor, compressor, group))


def _reduce_scatter(
    output: torch.Tensor, tensor: torch.Tensor, compressor: Compressor, group: dist.ProcessGroup
) -> Generator:
    spec = TensorSpec((output.numel(),), tensor.dtype)
    outgoing = compress_chunks(tensor.reshape(-1), output.numel(), group.size(), compressor)
    incoming = torch.empty_like(outgoing)
    yield dist.all_to_all_single(incoming.view(-1), outgoing.view(-1), group=group, async_op=True)
    store_flat(output, lambda flat: compressor.decompress_sum(incoming, spec, flat))
