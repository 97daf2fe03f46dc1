"""Fixed point: signed integers of 2 to 16 bits under one scale per channel or per group."""

from __future__ import annotations

import torch
from pydantic import Field

from megatron_compress.compressors.base import Compressor, Settings
from megatron_compress.ops.bits import pack_bits, unpack_bits
from megatron_compress.ops.groups import num_groups, split_groups
from megatron_compress.registry import register
from megatron_compress.wire import Layout, TensorSpec, packed_bytes

# Below this a scale no longer follows the data: levels / scale stays finite in float32.
MIN_SCALE = 2.0**-110
BF16_MAX = torch.finfo(torch.bfloat16).max


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

    @property
    def levels(self) -> int:
        return 2 ** (self.settings.bits - 1) - 1

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
        tiles = self._tiles(x.float(), spec)
        scales = parts["scales"].split([len(tile) for tile in tiles])
        codes = []
        for tile, scale in zip(tiles, scales, strict=True):
            scale.copy_(round_up_to_bfloat16(tile.abs().amax(dim=1)))
            steps = scale.float().reciprocal() * self.levels
            q = (tile * steps[:, None]).round_().clamp_(-self.levels, self.levels).nan_to_num_(0.0)
            codes.append((q + self.levels).to(torch.int32))
        parts["codes"].copy_(pack_bits(self._untile(codes, spec), self.settings.bits))

    def decode(self, parts: dict[str, torch.Tensor], spec: TensorSpec) -> torch.Tensor:
        codes = unpack_bits(parts["codes"], self.settings.bits, spec.numel).view(spec.shape)
        tiles = self._tiles(codes.float() - self.levels, spec)
        scales = parts["scales"].float().split([len(tile) for tile in tiles])
        values = [tile * (scale * (1 / self.levels))[:, None] for tile, scale in zip(tiles, scales, strict=True)]
        return self._untile(values, spec).view(spec.shape)

    def _tiles(self, x: torch.Tensor, spec: TensorSpec) -> list[torch.Tensor]:
        """Matrices whose rows share a scale."""
        if self.settings.group_size is not None:
            return split_groups(x.reshape(-1), self.settings.group_size)
        if len(spec.shape) < 2:
            return [x.reshape(1, -1)]
        return [x.reshape(-1, spec.num_channels).t()]

    def _untile(self, tiles: list[torch.Tensor], spec: TensorSpec) -> torch.Tensor:
        """The flat tensor whose `_tiles` these are."""
        if self.settings.group_size is None and len(spec.shape) > 1:
            return tiles[0].t().reshape(-1)
        return torch.cat([tile.reshape(-1) for tile in tiles])


def round_up_to_bfloat16(magnitude: torch.Tensor) -> torch.Tensor:
    """The least bfloat16 ≥ `magnitude` (float32, ≥ 0), within [2^-110, bfloat16's largest]; NaN where not finite."""
    clamped = magnitude.clamp(MIN_SCALE, BF16_MAX)
    bits = clamped.view(torch.int32)
    up = ((bits + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(magnitude.isfinite(), up, torch.nan)
