"""FP8: E4M3 elements under one float32 scale per group of contiguous elements."""

from __future__ import annotations

import torch
from pydantic import Field

from megatron_compress.compressors.base import Compressor, Settings
from megatron_compress.ops.groups import num_groups, split_groups
from megatron_compress.registry import register
from megatron_compress.wire import Layout, TensorSpec

E4M3_MAX = 448.0
# Below this a group's largest magnitude no longer sets the scale: 448 / m and m / 448 both stay normal float32.
MIN_MAGNITUDE = 2.0**-110


class Fp8Settings(Settings):
    group_size: int = Field(default=256, ge=1, le=65536, description="Elements that share a scale")


@register("fp8")
class Fp8(Compressor):
    """q = E4M3(x · 448 / m) with m = max|x| of the group, x̂ = q · (m / 448); 8 + 32 / group_size bits per element.

    Rounding is to nearest even. A NaN or Inf makes its group NaN. (METHODS §1.2, per group instead of per tensor.)
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
        codes = split_groups(parts["codes"], self.settings.group_size)
        scales = parts["scales"].split([len(c) for c in codes])
        for group, code, scale in zip(split_groups(x.view(-1), self.settings.group_size), codes, scales, strict=True):
            group = group.float()
            magnitude = group.abs().amax(dim=1).clamp(min=MIN_MAGNITUDE)
            scaled = group * (magnitude.reciprocal() * E4M3_MAX)[:, None]
            code.copy_(scaled.clamp(-E4M3_MAX, E4M3_MAX).nan_to_num(0.0).to(torch.float8_e4m3fn).view(torch.uint8))
            scale.copy_(torch.where(magnitude.isfinite(), magnitude * (1 / E4M3_MAX), torch.nan))

    def decode(self, parts: dict[str, torch.Tensor], spec: TensorSpec) -> torch.Tensor:
        codes = split_groups(parts["codes"], self.settings.group_size)
        scales = parts["scales"].split([len(c) for c in codes])
        values = [
            code.view(torch.float8_e4m3fn).float() * scale[:, None] for code, scale in zip(codes, scales, strict=True)
        ]
        return torch.cat([v.view(-1) for v in values]).view(spec.shape)
