"""Compressed all-reduce (sum)."""

from __future__ import annotations

from collections.abc import Generator
from typing import Literal

import torch
import torch.distributed as dist

from megatron_compress.collectives.reduction import chunk_numel, compress_chunks, store_flat
from megatron_compress.collectives.work import Work, finished
from megatron_compress.compressors.base import Compressor
from megatron_compress.wire import TensorSpec

Algorithm = Literal["auto", "one_shot", "two_shot"]


def all_reduce(
    tensor: torch.Tensor, compressor: Compressor, group: dist.ProcessGroup, algorithm: Algorithm = "auto"
) -> Work:
    """Sum `tensor` (any shape and strides; float32, bfloat16, float16) over `group`, in place after `wait()`.

    one_shot: 1. compress the whole tensor; 2. all-gather the payloads; 3. every rank decodes all of them and adds
    them in float32, in rank order. One quantization.
    two_shot: 1. cut into equal chunks, one a rank, and compress each; 2. all-to-all; 3. the owner decodes and adds in
    float32, in rank order; 4. compresses the sum (`Compressor.reencode`); 5. all-gather; 6. every rank decodes
    all chunks, its own too. Two quantizations, fewer bytes beyond two ranks.
    auto: one_shot at two ranks, where both send the same bytes, two_shot beyond.

    The result is identical on every rank, to the bit. All ranks must call with equal shape, dtype and settings.
    """
    if group.size() == 1 or tensor.numel() == 0:
        return finished()
    steps = _one_shot if choose(algorithm, group.size()) == "one_shot" else _two_shot
    return Work(steps(tensor, compressor, group))


def choose(algorithm: Algorithm, world_size: int) -> Literal["one_shot", "two_shot"]:
    """What `auto` means for a group of `world_size`."""
    if algorithm == "auto":
        return "one_shot" if world_size <= 2 else "two_shot"
    return algorithm


def _one_shot(tensor: torch.Tensor, compressor: Compressor, group: dist.ProcessGroup) -> Generator:
    spec = TensorSpec((tensor.numel(),), tensor.dtype)
    payload = compressor.compress(tensor.reshape(-1), spec)
    gathered = payload.new_empty(group.size(), payload.numel())
    yield dist.all_gather_into_tensor(gathered.view(-1), payload, group=group, async_op=True)
    store_flat(tensor, lambda flat: compressor.decompress_sum(gathered, spec, flat))


def _two_shot(tensor: torch.Tensor, compressor: Compressor, group: dist.ProcessGroup) -> Generator:
    world_size = group.size()
    chunk = chunk_numel(tensor.numel(), world_size, compressor.granularity)
    spec = TensorSpec((chunk,), tensor.dtype)
    outgoing = compress_chunks(tensor.reshape(-1), chunk, world_size, compressor)
    incoming = torch.empty_like(outgoing)
    yield dist.all_to_all_single(incoming.view(-1), outgoing.view(-1), group=group, async_op=True)

    payload = compressor.requantize(incoming, spec)
    gathered = torch.empty_like(incoming)
    yield dist.all_gather_into_tensor(gathered.view(-1), payload, group=group, async_op=True)

    result = tensor.new_empty(world_size, chunk)
    for part, source in zip(result, gathered, strict=True):
        compressor.decompress(source, spec, part)
    tensor.copy_(result.view(-1)[: tensor.numel()].view(tensor.shape))
