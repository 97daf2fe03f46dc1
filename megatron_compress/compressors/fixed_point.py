"""Fixed point: signed integers of 2 to 16 bits under one scale per channel or per group."""

from __future__ import annotations

import torch
from pydantic import Field

from megatron_compress.compressors.base import Compressor, Settings
from megatron_compress.ops import fixed_point
from megatron_compress.ops.groups import num_groups
from megatron_compress.registry import register
from megatron_compress.wire import Layout, TensorSpec, packed_bytes


class FixedPointSettings(Settings):
    bits: int = Field(default=8, ge=2, le=16, description="Bits of a code")
    group_size: int | None = Field(
        default=None,
        ge=1,
        le=65536,
        description="Contiguous elements that share a scale; without it, each channel (last dimension) has one",
    )


@register("fixed_point")
class FixedPoint(Compressor):
    """The naive gradient compressor of TAH-Quant and AQ-SGD (METHODS §4, A8), without its faults.

    q = round(x · L / s) in [−L, L] with L = 2^(bits−1) − 1 and s ≥ max|x| over the channel (all tokens) or group,
    x̂ = q · (s / L). The scale is max|x| rounded *up* to bfloat16 and the quantizer uses the rounded value, so nothing
    clips and error relative to s does not depend on amplitude: the papers' gradient scale c has no effect. AQ-SGD's
    code has a float16 scale (overflows at 65504), adds 1e-6 to it (a floor under small gradients), and clips +max|x|
    to its top code 2^(bits−1) − 1 of 2^(bits−1).

    A 1-D message is one channel. A NaN or Inf makes its channel or group NaN.
    """

    Settings = FixedPointSettings

    @property
    def granularity(self) -> int:
        return self.settings.group_size or 1

    def refuse_axis(self, axis: str) -> str | None:
        if axis == "tensor" and self.settings.group_size is None:
            return "reductions cut tensors into flat chunks, which have no channels; set group_size (64, say)"
        return None

    def layout(self, spec: TensorSpec) -> Layout:
        if self.settings.group_size is None:
            count = spec.num_channels if len(spec.shape) > 1 else min(1, spec.numel)
        else:
            count = num_groups(spec.numel, self.settings.group_size)
        return Layout.of(
            ("codes", torch.uint8, (packed_bytes(spec.numel, self.settings.bits),)),
            ("scales", torch.bfloat16, (count if spec.numel else 0,)),
        )

    def encode(self, x: torch.Tensor, spec: TensorSpec, parts: dict[str, torch.Tensor]) -> None:
        bits, group_size = self.settings.bits, self.settings.group_size
        if group_size is None:
            fixed_point.encode_channels(x, parts["codes"], parts["scales"], bits)
        else:
            fixed_point.encode(x, parts["codes"], parts["scales"], group_size, bits)

    def decode_sum(self, parts: dict[str, torch.Tensor], spec: TensorSpec, out: torch.Tensor) -> None:
        bits, group_size = self.settings.bits, self.settings.group_size
        if group_size is None:
            fixed_point.decode_channels(parts["codes"], parts["scales"], out, bits)
        else:
            fixed_point.decode(parts["codes"], parts["scales"], out, group_size, bits)

    def reencode(self, parts: dict[str, torch.Tensor], spec: TensorSpec, into: dict[str, torch.Tensor]) -> None:
        bits, group_size = self.settings.bits, self.settings.group_size
        if group_size is None:
            return super().reencode(parts, spec, into)
        fixed_point.requantize(
            parts["codes"], parts["scales"], spec.dtype, spec.numel, into["codes"], into["scales"], group_size, bits
        )
