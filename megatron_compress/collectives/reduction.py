"""What the reductions share: chunks, and the sum of decoded payloads."""

from __future__ import annotations

from collections.abc import Iterable

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


def sum_payloads(payloads: Iterable[torch.Tensor], spec: TensorSpec, compressor: Compressor) -> torch.Tensor:
    """The float32 sum of decoded payloads, in the order given: the same bits on every rank (DESIGN D8)."""
    total: torch.Tensor | None = None
    for payload in payloads:
        part = torch.empty(spec.shape, dtype=torch.float32, device=payload.device)
        compressor.decompress(payload, spec, part)
        total = part if total is None else total.add_(part)
    return total
