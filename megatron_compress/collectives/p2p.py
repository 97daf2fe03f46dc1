"""Point-to-point transfers of compressed tensors.

Megatron decides which transfer starts when, so the two halves stand apart: a payload to hand to any send or receive,
and the step that follows a receive.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_compress.collectives.work import Work
from megatron_compress.compressors.base import Compressor
from megatron_compress.wire import TensorSpec


@dataclass(frozen=True)
class Incoming:
    """A tensor that waits for its payload. `finish` decodes in place, into the very tensor that Megatron holds."""

    tensor: torch.Tensor
    payload: torch.Tensor
    spec: TensorSpec
    compressor: Compressor

    @classmethod
    def expect(cls, tensor: torch.Tensor, spec: TensorSpec, compressor: Compressor) -> Incoming:
        payload = torch.empty(compressor.payload_bytes(spec), dtype=torch.uint8, device=tensor.device)
        return cls(tensor, payload, spec, compressor)

    def finish(self) -> None:
        with torch.no_grad():
            self.compressor.decompress(self.payload, self.spec, self.tensor)


def isend(tensor: torch.Tensor, dst: int, compressor: Compressor, group: dist.ProcessGroup | None = None) -> Work:
    """Send `tensor` to global rank `dst`; it may be freed at once, the handle keeps the payload."""
    spec = pipeline_spec(tensor)
    return Work(_send(compressor.compress(tensor, spec), dst, group))


def irecv(tensor: torch.Tensor, src: int, compressor: Compressor, group: dist.ProcessGroup | None = None) -> Work:
    """Receive from global rank `src` into `tensor`, whose shape and dtype must be the sender's, at `wait()`."""
    return Work(_receive(Incoming.expect(tensor, pipeline_spec(tensor), compressor), src, group))


def pipeline_spec(tensor: torch.Tensor) -> TensorSpec:
    """The spec of a pipeline message: dimension 1 of [s, b, h] counts samples (DESIGN D13)."""
    return TensorSpec.of(tensor, sample_dim=1 if tensor.dim() == 3 else None)


def _send(payload: torch.Tensor, dst: int, group: dist.ProcessGroup | None) -> Generator:
    yield dist.isend(payload, dst, group=group)


def _receive(incoming: Incoming, src: int, group: dist.ProcessGroup | None) -> Generator:
    yield dist.irecv(incoming.payload, src, group=group)
    incoming.finish()
