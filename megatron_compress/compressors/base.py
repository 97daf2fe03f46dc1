"""What a compressor is. To add one, write a file like `fp8.py` in this folder; nothing else needs to change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import ClassVar

import torch
from pydantic import BaseModel, ConfigDict

from megatron_compress.ops.reduce import saturate, store_sum
from megatron_compress.wire import FLOAT_DTYPES, Layout, TensorSpec


class Settings(BaseModel):
    """Base of a compressor's settings: strict, frozen, unknown names refused. Units and ranges stand in the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Compressor(ABC):
    """Maps a tensor to a payload of a size that both ends compute, and back (DESIGN D6, D9).

    A subclass gives `Settings`, `layout`, `encode` and `decode`, or with kernels of its own `decode_sum`, `reencode`.
    It is a pure function of its input and settings:
    the same tensor gives the same bytes, and it knows nothing of collectives or of Megatron.
    """

    name: ClassVar[str]
    Settings: ClassVar[type[Settings]] = Settings
    # True where decode gives back the very values that went in, infinities included.
    exact: ClassVar[bool] = False
    # True where both ends of a link keep what they need of each training sample (`AqSgd.of_samples`).
    remembers: ClassVar[bool] = False

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

    def decode(self, parts: dict[str, torch.Tensor], spec: TensorSpec) -> torch.Tensor:
        """The tensor of shape `spec.shape` that `parts` stand for, in float32 (`spec.dtype` where `exact`).

        Finite input decodes to finite values or, where they lie beyond float32, to ±inf, which `decode_sum`
        saturates; a non-finite element decodes to NaN over the scope of its scale. A subclass gives this, or
        `decode_sum` where its kernels add.
        """
        raise NotImplementedError(f"{type(self).__name__} gives neither decode nor decode_sum")

    def decode_sum(self, parts: dict[str, torch.Tensor], spec: TensorSpec, out: torch.Tensor) -> None:
        """Decode stacked payloads and add them, in float32, in order, into `out` (contiguous; float32, bfloat16,
        float16; see `ops.reduce.store_sum`). parts: the sections, each with a leading dimension of ranks."""
        ranks = range(len(next(iter(parts.values()))))
        decoded = (self.decode({name: part[rank] for name, part in parts.items()}, spec) for rank in ranks)
        store_sum(decoded, out, self.exact)

    def reencode(self, parts: dict[str, torch.Tensor], spec: TensorSpec, into: dict[str, torch.Tensor]) -> None:
        """`decode_sum`, then `encode` into the sections of another payload.

        The sum is rounded to `spec.dtype` in between, but where a compressor never leaves its own basis.
        """
        total = torch.empty(spec.shape, dtype=spec.dtype, device=next(iter(parts.values())).device)
        self.decode_sum(parts, spec, total)
        self.encode(total, spec, into)

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
        payload = self._payload(spec, payload, tensor.device)
        if spec.numel:
            self.encode(tensor.detach().contiguous(), spec, self.layout_of(spec).views(payload))
        return payload

    def decompress(self, payload: torch.Tensor, spec: TensorSpec, out: torch.Tensor) -> torch.Tensor:
        """Decode `payload` into `out` (spec.shape, any float dtype and strides), in place, and return `out`.

        Values that `out`'s dtype cannot hold saturate to its largest finite one; NaN stays NaN (DESIGN D9).
        """
        return self.decompress_sum(payload[None], spec, out)

    @torch.no_grad()
    def decompress_sum(self, payloads: torch.Tensor, spec: TensorSpec, out: torch.Tensor) -> torch.Tensor:
        """Decode `payloads` [ranks, payload_bytes] and add them in float32, in order, into `out`, as `decompress`.

        The sum of several is not saturated: what is too large for `out` becomes infinite, as it would uncompressed.
        """
        if tuple(out.shape) != spec.shape:
            raise ValueError(f"out has shape {tuple(out.shape)}, the message {spec.shape}")
        if not spec.numel:
            return out
        parts = self.layout_of(spec).views(payloads)
        if self.exact and len(payloads) == 1:
            return out.copy_(self.decode({name: part[0] for name, part in parts.items()}, spec))
        if out.is_contiguous() and out.dtype in FLOAT_DTYPES:
            self.decode_sum(parts, spec, out.detach())
            return out
        total = torch.empty(spec.shape, dtype=torch.float32, device=out.device)
        self.decode_sum(parts, spec, total)
        return out.copy_(saturate(total, out.dtype) if len(payloads) == 1 else total)

    @torch.no_grad()
    def requantize(self, payloads: torch.Tensor, spec: TensorSpec, payload: torch.Tensor | None = None) -> torch.Tensor:
        """The payload of the sum of `payloads` [ranks, payload_bytes] (see `reencode`); `payload` as in `compress`."""
        payload = self._payload(spec, payload, payloads.device)
        if spec.numel:
            layout = self.layout_of(spec)
            self.reencode(layout.views(payloads), spec, layout.views(payload))
        return payload

    def _payload(self, spec: TensorSpec, payload: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        """The buffer to write into; what lies between its sections is zero, for it travels too."""
        layout = self.layout_of(spec)
        if payload is None:
            payload = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
        for start, end in layout.gaps:
            payload[start:end] = 0
        return payload

    def __repr__(self) -> str:
        values = ", ".join(f"{key}={value}" for key, value in self.settings)
        return f"{self.name}({values})"
