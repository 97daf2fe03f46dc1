"""TAH-Quant: tiles of 4 or 3 bits by entropy, pivot swap and Hadamard under outliers (METHODS §5.1, A1–A7)."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal

import torch
from pydantic import Field, model_validator

from megatron_compress.compressors.base import Compressor, Settings
from megatron_compress.ops.bits import pack_bits, unpack_bits
from megatron_compress.ops.entropy import magnitude_entropy
from megatron_compress.ops.hadamard import hadamard_block, hadamard_transform
from megatron_compress.ops.tiling import Tiling, from_rows, to_rows
from megatron_compress.registry import register
from megatron_compress.wire import Layout, TensorSpec, packed_bytes

# Keeps range and transform of a tile below float32's largest; exact above 2^-116.
HEADROOM = 2.0**-10
MIN_SCALE = torch.finfo(torch.float32).tiny


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
        group = self.settings.group_size
        allocation = self.settings.allocation_size or group
        if allocation == "token":
            allocation = max(group, spec.num_channels // group * group)
        rows = spec.num_rows // max(1, spec.num_samples)
        windows, rest = divmod(spec.num_channels, allocation)
        # The decimal the user wrote, not its binary neighbour: 0.29 of 100 tiles are 29.
        share = Fraction(repr(self.settings.high_fraction))
        return Tiling(
            samples=spec.num_samples,
            rows=rows,
            group=group,
            per_window=allocation // group,
            windows=windows,
            rest_tiles=rest // group,
            short=rest % group,
            high_per_sample=math.floor(share * rows * windows),
        )

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
            ("pivots", torch.uint8, (packed_bytes(tiles, _pivot_bits(t)),)),
        )

    def encode(self, x: torch.Tensor, spec: TensorSpec, parts: dict[str, torch.Tensor]) -> None:
        t = self.tiling(spec)
        rows = to_rows(x.float(), spec)
        whole = rows[:, : t.whole_tiles * t.group].reshape(-1, t.group)
        high_map = self._allocate(whole, t)
        is_high = t.expand(high_map)
        high, low = self.settings.high_bits, self.settings.low_bits

        codes, *whole_parts = self._quantize(whole, torch.where(is_high, 2.0**high - 1, 2.0**low - 1))
        parts["high_codes"].copy_(pack_bits(codes[is_high], high))
        parts["low_codes"].copy_(pack_bits(codes[~is_high], low))
        short_parts = [[], [], []]
        if t.short:
            short = rows[:, -t.short :]
            codes, *short_parts = self._quantize(short, short.new_full((len(short),), 2.0**high - 1))
            parts["short_codes"].copy_(pack_bits(codes, high))
            short_parts = [[part] for part in short_parts]
        scales, zeros, pivots = (t.join(*pair) for pair in zip(whole_parts, short_parts, strict=True))
        parts["scales"].copy_(scales)
        parts["zeros"].copy_(zeros)
        parts["high_map"].copy_(pack_bits(high_map, 1))
        parts["pivots"].copy_(pack_bits(pivots, _pivot_bits(t)))

    def decode(self, parts: dict[str, torch.Tensor], spec: TensorSpec) -> torch.Tensor:
        t = self.tiling(spec)
        num_rows = t.samples * t.rows
        high, low = self.settings.high_bits, self.settings.low_bits
        is_high = t.expand(unpack_bits(parts["high_map"], 1, num_rows * t.windows).bool())
        whole = torch.empty(len(is_high), t.group, device=is_high.device)
        whole[is_high] = unpack_bits(parts["high_codes"], high, t.num_high * t.group).float().view(-1, t.group)
        whole[~is_high] = unpack_bits(parts["low_codes"], low, t.num_low * t.group).float().view(-1, t.group)
        codes = [whole]
        if t.short:
            short = unpack_bits(parts["short_codes"], high, num_rows * t.short)
            codes.append(short.float().view(num_rows, t.short))
        pivots = unpack_bits(parts["pivots"], _pivot_bits(t), num_rows * t.tiles)
        per_tile = [t.split(values) for values in (parts["scales"], parts["zeros"], pivots)]
        rows = [_dequantize(*args).reshape(num_rows, -1) for args in zip(codes, *per_tile, strict=True)]
        return from_rows(torch.cat(rows, dim=1), spec)

    def _allocate(self, whole: torch.Tensor, t: Tiling) -> torch.Tensor:
        """Rank the windows of each sample by entropy; whole: [whole tiles, G]; returns flags [samples, windows]."""
        tiles = _scaled(whole)[0].view(t.samples, t.rows, t.whole_tiles, t.group)[:, :, : t.windows * t.per_window]
        windows = tiles.reshape(t.samples, t.rows * t.windows, t.per_window * t.group)
        order = magnitude_entropy(windows).argsort(dim=1, descending=True, stable=True)
        high_map = torch.zeros(order.shape, dtype=torch.bool, device=whole.device)
        return high_map.scatter_(1, order[:, : t.high_per_sample], True)

    def _quantize(self, x: torch.Tensor, levels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x: [n, g] tiles, levels: [n] = 2^b − 1; returns codes [n, g], scales and zeros [n] (bf16), pivots [n]."""
        x, finite = _scaled(x)
        pivot, rotated = self._find_outlier(x)
        y = x.clone()
        y[rotated] = hadamard_transform(_swap(x[rotated], pivot[rotated])) * (1 / x.shape[1])

        low, high = y.amin(dim=1) + 0.0, y.amax(dim=1) + 0.0  # −0 is 0: which of them is met depends on the device
        zero = _to_bfloat16(low / HEADROOM)
        reference = torch.where(rotated, low, zero.float() * HEADROOM)
        scale = _to_bfloat16((high - reference).clamp(min=0) / levels / HEADROOM)
        step = scale.float() * HEADROOM
        inverse = torch.where(step < MIN_SCALE, 0.0, 1.0 / step)
        codes = ((y - reference[:, None]) * inverse[:, None]).round().clamp(min=0).minimum(levels[:, None])

        scale = torch.where(finite, torch.where(rotated, -scale, scale), torch.nan)
        return codes.to(torch.uint8), scale, torch.where(finite, zero, torch.nan), torch.where(rotated, pivot, 0)

    def _find_outlier(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Index of the first largest magnitude of each tile, and whether the tile is to be rotated (eq. (3))."""
        largest, pivot = x.abs().max(dim=1)
        length = x.shape[1]
        threshold = self.settings.outlier_threshold
        if length == 1 or hadamard_block(length) != length or math.isinf(threshold):
            return pivot, torch.zeros_like(largest, dtype=torch.bool)
        second = x.abs().scatter(1, pivot[:, None], 0.0).amax(dim=1)
        return pivot, largest > threshold * second


def _scaled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [n, g] tiles; returns them times HEADROOM, with zeros where a tile is not finite, and which are [n]."""
    finite = x.abs().amax(dim=1).isfinite()
    x = x * HEADROOM
    x[~finite] = 0.0
    return x, finite


def _dequantize(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, pivots: torch.Tensor) -> torch.Tensor:
    """codes: [n, g] float32, the rest [n]; returns [n, g] float32."""
    rotated = torch.signbit(scales)
    y = codes * (scales.float().abs() * HEADROOM)[:, None] + (zeros.float() * HEADROOM)[:, None]
    y[rotated] = _swap(hadamard_transform(y[rotated]), pivots[rotated].long())
    return y * (1 / HEADROOM)


def _swap(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Exchange elements 0 and index[i] of each row i."""
    at = index[:, None]
    swapped = x.scatter(1, at, x[:, :1])
    swapped[:, 0] = x.gather(1, at)[:, 0]
    return swapped


def _pivot_bits(t: Tiling) -> int:
    return t.group.bit_length() - 1


def _to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """Round to bfloat16, saturating."""
    limit = torch.finfo(torch.bfloat16).max
    return x.clamp(-limit, limit).to(torch.bfloat16)
