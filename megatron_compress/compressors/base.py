"""What a compressor is. To add one, write a file like `fp8.py` in this folder; nothing else needs to change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import ClassVar

import torch
from pydantic import BaseModel, ConfigDict

from megatron_compress.wire import Layout, TensorSpec


class Settings(BaseModel):
    """Base of a compressor's settings: strict, frozen, unknown names refused. Units and ranges stand in the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Compressor(ABC):
    """Maps a tensor to a payload of a size that both ends compute, and back (DESIGN D6, D9).

    A subclass gives `Settings`, `layout`, `encode` and `decode`. It is a pure function of its input and settings:
    the same tensor gives the same bytes, and it knows nothing of collectives or of Megatron.
    """

    name: ClassVar[str]
    Settings: ClassVar[type[Settings]] = Settings
    # True where decode gives back the very values that went in, infinities included.
    exact: ClassVar[bool] = False

    def __init__(self, settings: Settings):
        self.settings = settings
        self.layout_of = lru_cache(maxsize=1024)(self.layout)

    @property
    def granularity(self) -> int:
        """Chunks of a two-shot reduction are multiples of this many elements."""
        return 1

    def refuse_axis(self, axis: str) -> str | None:
        """Why these settings cannot serve `axis` ("pipeline" or "tensor"), with the fix; None where they can."""
        return None

    @abstractmethod
    def layout(self, spec: TensorSpec) -> Layout:
        """The payload's sections for a message of this spec."""

    @abstractmethod
    def encode(self, x: torch.Tensor, spec: TensorSpec, parts: dict[str, torch.Tensor]) -> None:
        """Write the contiguous tensor `x` into the layout's typed views. `x` has at least one element."""

    @abstractmethod
    def decode(self, parts: dict[str, torch.Tensor], spec: TensorSpec) -> torch.Tensor:
        """The tensor of shape `spec.shape` that `parts` stand for, in float32 (`spec.dtype` where `exact`).

        Finite input decodes to finite values or, where they lie beyond float32, to ±inf, which `decompress`
        saturates; a non-finite element decodes to NaN over the scope of its scale.
        """

    def payload_bytes(self, spec: TensorSpec) -> int:
        """Size of the payload in bytes."""
        return self.layout_of(spec).nbytes

    def bits_per_element(self, spec: TensorSpec) -> float:
        """Bits of payload per element of the tensor, metadata and padding included."""
        return 8 * self.payload_bytes(spec) / max(1, spec.numel)

    @torch.no_grad()
    def compress(self, tensor: torch.Tensor, spec: TensorSpec, payload: torch.Tensor | None = None) -> torch.Tensor:
        """Encode `tensor` (spec.shape, spec.dtype, any strides) and return the payload.

        Args:
            payload: uint8 buffer of `payload_bytes(spec)` to write into; allocated on the tensor's device if None.
        """
        if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
            raise ValueError(f"tensor is {tensor.dtype} {tuple(tensor.shape)}, its spec says {spec.dtype} {spec.shape}")
        layout = self.layout_of(spec)
        if payload is None:
            payload = torch.empty(layout.nbytes, dtype=torch.uint8, device=tensor.device)
        if spec.numel:
            for start, end in layout.gaps:  # they travel too: the same bytes every time
                payload[start:end] = 0
            self.encode(tensor.detach().contiguous(), spec, layout.views(payload))
        return payload

    @torch.no_grad()
    def decompress(self, payload: torch.Tensor, spec: TensorSpec, out: torch.Tensor) -> torch.Tensor:
        """Decode `payload` into `out` (spec.shape, any float dtype and strides), in place, and return `out`.

        Values that `out`'s dtype cannot hold saturate to its largest finite one; NaN stays NaN (DESIGN D9).
        """
        if tuple(out.shape) != spec.shape:
            raise ValueError(f"out has shape {tuple(out.shape)}, the message {spec.shape}")
        if spec.numel:
            values = self.decode(self.layout_of(spec).views(payload), spec)
            out.copy_(values if self.exact else saturate(values, out.dtype))
        return out

    def __repr__(self) -> str:
        values = ", ".join(f"{key}={value}" for key, value in self.settings)
        return f"{self.name}({values})"


def saturate(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Clamp to the finite range of `dtype`; NaN passes."""
    limit = min(torch.finfo(dtype).max, torch.finfo(values.dtype).max)
    return values.clamp(-limit, limit)
