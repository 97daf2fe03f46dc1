"""AQ-SGD: how a sample's activation differs from the one that crossed the same link an epoch ago."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field

from megatron_compress.compressors.base import Compressor
from megatron_compress.compressors.fixed_point import FixedPoint, FixedPointSettings
from megatron_compress.compressors.identity import Identity
from megatron_compress.ops.reduce import saturate
from megatron_compress.registry import register
from megatron_compress.sample_memory import SampleMemory
from megatron_compress.wire import TensorSpec


class AqSgdSettings(FixedPointSettings):
    bits: int = Field(default=4, ge=2, le=8, description="Bits of a code")
    memory_folder: str | None = Field(
        default=None, description="Folder for the remembered activations, in mapped files; without it, in memory"
    )


@register("aq_sgd")
class AqSgd(FixedPoint):
    """AQ-SGD (METHODS §4): the change Δ = x − m(ξ) of a sample ξ, in fixed point; both ends set m(ξ) to m(ξ) + Δ̂.

    In a sample's first epoch x is sent as it is and m(ξ) = x. So the error of what arrives shrinks with the change from
    epoch to epoch, and does not add up. The paper's code keeps m in float16; here it has the dtype of the message, so
    that both ends hold what the receiver computed with, to the bit, over the whole range. Δ is quantized as by
    `fixed_point` (without its faults in the paper's code).

    By itself, away from a pipeline, it remembers nothing: m = 0. A NaN or Inf makes its channel or group NaN, once: it
    is remembered as 0.
    """

    Settings = AqSgdSettings
    remembers = True

    def refuse_axis(self, axis: str) -> str | None:
        if axis == "tensor":
            return "a reduction has no samples to remember; use fixed_point with a group_size"
        return None

    def of_samples(self, memory: SampleMemory, samples: Sequence[int], known: bool) -> Compressor:
        """For one message, of these samples. Each end calls `compress` or `decompress` of it once.

        Args:
            known: whether all samples of the step are remembered; if not, all of them are sent as they are.
        """
        return _Change(self.settings, memory, samples) if known else _Whole(memory, samples)


class _Whole(Identity):
    """The first time that samples are seen."""

    def __init__(self, memory: SampleMemory, samples: Sequence[int]):
        super().__init__(Identity.Settings())
        self._memory, self._samples = memory, samples

    def compress(self, tensor: torch.Tensor, spec: TensorSpec, payload: torch.Tensor | None = None) -> torch.Tensor:
        self._memory.store(self._samples, tensor)
        return super().compress(tensor, spec, payload)

    def decompress(self, payload: torch.Tensor, spec: TensorSpec, out: torch.Tensor) -> torch.Tensor:
        super().decompress(payload, spec, out)
        self._memory.store(self._samples, out)
        return out


class _Change(FixedPoint):
    """Any later time."""

    name = "aq_sgd"

    def __init__(self, settings: AqSgdSettings, memory: SampleMemory, samples: Sequence[int]):
        super().__init__(settings)
        self._memory, self._samples = memory, samples
        self._before: torch.Tensor | None = None

    def compress(self, tensor: torch.Tensor, spec: TensorSpec, payload: torch.Tensor | None = None) -> torch.Tensor:
        payload = super().compress(tensor, spec, payload)
        arrives = torch.empty(spec.shape, dtype=spec.dtype, device=tensor.device)
        self._memory.store(self._samples, self.decompress_sum(payload[None], spec, arrives))
        return payload

    def decompress(self, payload: torch.Tensor, spec: TensorSpec, out: torch.Tensor) -> torch.Tensor:
        super().decompress(payload, spec, out)
        self._memory.store(self._samples, out)
        return out

    def encode(self, x: torch.Tensor, spec: TensorSpec, parts: dict[str, torch.Tensor]) -> None:
        change = x.float() - self._remembered(x.device)
        # Two finite values may lie further apart than float32 reaches.
        super().encode(torch.where(x.isfinite(), saturate(change, torch.float32), torch.nan), spec, parts)

    def decode_sum(self, parts: dict[str, torch.Tensor], spec: TensorSpec, out: torch.Tensor) -> None:
        change = torch.empty(spec.shape, dtype=torch.float32, device=out.device)
        super().decode_sum(parts, spec, change)
        out.copy_(saturate(self._remembered(out.device) + change, out.dtype))

    def _remembered(self, device: torch.device) -> torch.Tensor:
        """As it was before this message, also after its end has stored it."""
        if self._before is None:
            self._before = self._memory.read(self._samples, device)
        return self._before
