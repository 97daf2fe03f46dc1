"""FP8: E4M3 elements under one float32 scale per group of contiguous elements."""

from __future__ import annotations

import torch
from pydantic import Field

from megatron_compress.compressors.base import Compressor, Settings
from megatron_compress.ops import fp8
from megatron_compress.ops.groups import num_groups
from megatron_compress.registry import register
from megatron_compress.wire import Layout, TensorSpec


class Fp8Settings(Settings):
    group_size: int = Field(default=256, ge=1, le=65536, description="Elements that share a scale")


@register("fp8")
class Fp8(Compressor):
    """s = max|x| / 448 of the group, q = E4M3(x / s), x̂ = q · s; 8 + 32 / group_size bits per element.

    Rounding is to nearest even, saturating. A NaN or Inf makes its group NaN. (METHODS §1.2, per group instead of per
    tensor.)
    """

    Settings = Fp8Settings

    @property
    def granularity(self) -> int:
        return self.settings.group_size

    def layout(self, spec: TensorSpec) -> Layout:
        return Layout.of(
            ("codes", torch.uint8, (spec.numel,)),
            ("scales", torch.float32, (num_groups(spec.numel, self.settings.group_size),)),
        )

    def encode(self, x: torch.Tensor, spec: TensorSpec, parts: dict[str, torch.Tensor]) -> None:
        fp8.encode(x, parts["codes"], parts["scales"], self.settings.group_size)

    def decode_sum(self, parts: dict[str, torch.Tensor], spec: TensorSpec, out: torch.Tensor) -> None:
        fp8.decode(parts["codes"], parts["scales"], out, self.settings.group_size)

    def reencode(self, parts: dict[str, torch.Tensor], spec: TensorSpec, into: dict[str, torch.Tensor]) -> None:
        fp8.requantize(
            parts["codes"],
            parts["scales"],
            spec.dtype,
            spec.numel,
            into["codes"],
            into["scales"],
            self.settings.group_size,
        )
