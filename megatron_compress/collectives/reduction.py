"""What the reductions share: chunks, and where results go."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_compress.compressors.base import Compressor
from megatron_compress.wire import TensorSpec


def chunk_numel(numel: int, world_size: int, granularity: int) -> int:
    """Elements of a two-shot chunk: an equal share rounded up to whole groups, so that all payloads are equal."""
    share = -(-numel // world_size)
    return -(-share // granularity) * granularity


def compress_chunks(flat: torch.Tensor, chunk: int, world_size: int, compressor: Compressor) -> torch.Tensor:
    """Payloads [world_size, payload_bytes] of consecutive chunks of `flat`, zero-padded to world_size · chunk."""
    spec = TensorSpec((chunk,), flat.dtype)
    padded = torch.nn.functional.pad(flat, (0, world_size * chunk - flat.numel()))
    payloads = torch.empty(world_size, compressor.payload_bytes(spec), dtype=torch.uint8, device=flat.device)
    for part, payload in zip(padded.view(world_size, chunk), payloads, strict=True):
        compressor.compress(part, spec, payload)
    return payloads


def store_flat(tensor: torch.Tensor, write: Callable[[torch.Tensor], object]) -> None:
    """Let `write` fill a flat tensor that becomes the contents of `tensor`, without a copy where it is contiguous."""
    flat = tensor.detach().view(-1) if tensor.is_contiguous() else tensor.new_empty(tensor.numel())
    write(flat)
    if not tensor.is_contiguous():
        tensor.copy_(flat.view(tensor.shape))
