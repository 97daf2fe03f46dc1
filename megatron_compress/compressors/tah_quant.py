"""TAH-Quant: tiles of 4 or 3 bits by entropy, pivot swap and Hadamard under outliers (METHODS §5.1, A1–A7)."""

from __future__ import annotations

import math
from dataclasses import astuple
from fractions import Fraction
from typing import Literal

import torch
from pydantic import Field, model_validator

from megatron_compress.compressors.base import Compressor, Settings
from megatron_compress.ops import tah_quant
from megatron_compress.ops.tiling import Tiling
from megatron_compress.registry import register
from megatron_compress.wire import Layout, TensorSpec, packed_bytes

MAX_SAMPLES, MAX_TILES = 2**16 - 1, 2**31 - 1


class TahQuantSettings(Settings):
    group_size: Literal[8, 16, 32, 64, 128, 256] = Field(default=64, description="G: elements of a quantization tile")
    allocation_size: int | Literal["token"] | None = Field(
        default=None, description="A: elements of an allocation tile, a multiple of group_size; 'token' for a whole row"
    )
    high_bits: int = Field(default=4, ge=2, le=8, description="Bits of the high-entropy tiles")
    low_bits: int = Field(default=3, ge=2, le=8, description="Bits of the others")
    high_fraction: float = Field(default=0.8, ge=0, le=1, description="p: share of a sample's tiles at high_bits")
    outlier_threshold: float = Field(
        default=2.0, ge=0, description="τ: rotate where the largest magnitude exceeds τ times the second; .inf: never"
    )

    @model_validator(mode="after")
    def _consistent(self):
        if isinstance(self.allocation_size, int) and (
            self.allocation_size < self.group_size or self.allocation_size % self.group_size
        ):
            raise ValueError(
                f"allocation_size must be a multiple of group_size ({self.group_size}), got {self.allocation_size}"
            )
        if self.low_bits > self.high_bits:
            raise ValueError(f"low_bits ({self.low_bits}) must not exceed high_bits ({self.high_bits})")
        return self


@register("tah_quant")
class TahQuant(Compressor):
    """TAH-Quant, eqs. (1)–(4); at G = A = 64 and 80 % of 4, 20 % of 3 bits: 3.8 + 39/64 = 4.41 bits per element.

    1. Per sample, the k = floor(p · tiles) allocation tiles of highest entropy (ties: lower index) get high_bits.
    2. A tile whose largest magnitude exceeds τ times the second is rotated: the pivot (first of the largest) changes
       places with element 0, then y = Hx / G, which turns the outlier into an offset of the whole tile.
    3. q = round((y − z) / s) in [0, 2^b − 1], z = min y, s = (max y − z) / (2^b − 1); x̂ from y = q · s + z.

    Scale and zero travel as bfloat16 (DESIGN D9), the scale's sign bit being the rotation flag; a tile costs 16 + 16
    bits, 1 of the bit map and log2 G of the pivot. The quantizer uses the rounded scale, and the rounded zero where
    the tile is not rotated. Where it is, it uses the exact zero: the rounding error of z is an offset of the whole
    tile, which the inverse rotation puts on the pivot alone (2^-9 of its value), so the error beside an outlier does
    not grow with it.

    A short last tile is rotated only if its length is a power of two. A NaN or Inf makes its quantization tile NaN,
    which ranks as zeros.
    """

    Settings = TahQuantSettings

    @property
    def granularity(self) -> int:
        return self.settings.group_size

    def refuse_axis(self, axis: str) -> str | None:
        if axis == "tensor" and self.settings.allocation_size == "token":
            return "reductions cut tensors into flat chunks, which have no tokens; set allocation_size to a number"
        return None

    def tiling(self, spec: TensorSpec) -> Tiling:
        """How a message is cut.

        Raises:
            ValueError: it has more samples or tiles than the kernels count.
        """
        group = self.settings.group_size
        allocation = self.settings.allocation_size or group
        if allocation == "token":
            allocation = max(group, spec.num_channels // group * group)
        rows = spec.num_rows // max(1, spec.num_samples)
        windows, rest = divmod(spec.num_channels, allocation)
        # The decimal the user wrote, not its binary neighbour: 0.29 of 100 tiles are 29.
        share = Fraction(repr(self.settings.high_fraction))
        tiling = Tiling(
            samples=spec.num_samples,
            rows=rows,
            inner=1 if spec.sample_dim is None else math.prod(spec.shape[spec.sample_dim + 1 : -1]),
            channels=spec.num_channels,
            group=group,
            per_window=allocation // group,
            windows=windows,
            rest_tiles=rest // group,
            short=rest % group,
            high_per_sample=math.floor(share * rows * windows),
        )
        tiles = tiling.samples * tiling.rows * tiling.tiles
        if tiling.samples > MAX_SAMPLES or tiles > MAX_TILES:
            raise ValueError(
                f"tah_quant takes messages of at most {MAX_SAMPLES} samples and {MAX_TILES} tiles; {tuple(spec.shape)} "
                f"has {tiling.samples} and {tiles}: send it in parts or raise group_size"
            )
        return tiling

    def layout(self, spec: TensorSpec) -> Layout:
        t = self.tiling(spec)
        tiles = t.samples * t.rows * t.tiles
        high, low = self.settings.high_bits, self.settings.low_bits
        return Layout.of(
            ("high_codes", torch.uint8, (packed_bytes(t.num_high * t.group, high),)),
            ("low_codes", torch.uint8, (packed_bytes(t.num_low * t.group, low),)),
            ("short_codes", torch.uint8, (packed_bytes(t.samples * t.rows * t.short, high),)),
            ("scales", torch.bfloat16, (tiles,)),
            ("zeros", torch.bfloat16, (tiles,)),
            ("high_map", torch.uint8, (packed_bytes(t.samples * t.rows * t.windows, 1),)),
            ("pivots", torch.uint8, (packed_bytes(tiles, t.pivot_bits),)),
        )

    def encode(self, x: torch.Tensor, spec: TensorSpec, parts: dict[str, torch.Tensor]) -> None:
        tah_quant.encode(x, list(parts.values()), *self._numbers(spec))

    def decode_sum(self, parts: dict[str, torch.Tensor], spec: TensorSpec, out: torch.Tensor) -> None:
        tah_quant.decode(list(parts.values()), out, *self._numbers(spec))

    def _numbers(self, spec: TensorSpec) -> tuple[list[int], float]:
        cut = [*astuple(self.tiling(spec)), self.settings.high_bits, self.settings.low_bits]
        return cut, self.settings.outlier_threshold
