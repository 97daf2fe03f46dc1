"""NVFP4 with double-block scales: 4-bit elements, an E4M3 scale for 16 of them, a float32 scale for 128."""

from __future__ import annotations

import torch
from pydantic import Field

from megatron_compress.compressors.base import Compressor, Settings
from megatron_compress.ops import nvfp4
from megatron_compress.ops.groups import num_groups
from megatron_compress.registry import register
from megatron_compress.wire import Layout, TensorSpec, packed_bytes


class Nvfp4Settings(Settings):
    truncation_free: bool = Field(
        default=False, description="Scales 17/16 as large, so that none saturates its block's largest element"
    )


@register("nvfp4")
class Nvfp4(Compressor):
    """s = max|x| / 2688 of 128 elements, t = E4M3(max|x| / s / 6) of 16, q = E2M1(x / (s · t)), x̂ = q · s · t.

    4.75 bits per element. A NaN or Inf makes its 128 elements NaN. (TetraJet-v2; METHODS §2.1, with the guard against
    a zero t behind the cast; elements are rounded to nearest.)
    """

    Settings = Nvfp4Settings

    @property
    def granularity(self) -> int:
        return nvfp4.GROUP

    def layout(self, spec: TensorSpec) -> Layout:
        return Layout.of(
            ("codes", torch.uint8, (packed_bytes(spec.numel, 4),)),
            ("block_scales", torch.uint8, (num_groups(spec.numel, nvfp4.BLOCK),)),
            ("scales", torch.float32, (num_groups(spec.numel, nvfp4.GROUP),)),
        )

    def encode(self, x: torch.Tensor, spec: TensorSpec, parts: dict[str, torch.Tensor]) -> None:
        nvfp4.encode(x, parts["codes"], parts["block_scales"], parts["scales"], self.settings.truncation_free)

    def decode(self, parts: dict[str, torch.Tensor], spec: TensorSpec) -> torch.Tensor:
        return nvfp4.decode(parts["codes"], parts["block_scales"], parts["scales"], spec.numel).view(spec.shape)
