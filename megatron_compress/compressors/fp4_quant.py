"""FP4Quant: Hadamard-rotated groups in a 4-bit floating-point format (METHODS §5.2, A10–A20)."""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field, model_validator

from megatron_compress.compressors.base import Compressor, Settings
from megatron_compress.ops.bits import pack_bits, unpack_bits
from megatron_compress.ops.groups import num_groups, split_groups
from megatron_compress.ops.hadamard import hadamard_block, hadamard_transform
from megatron_compress.ops.minifloat import E2M1, E3M0, MiniFloat
from megatron_compress.ops.reduce import pairwise_sum
from megatron_compress.registry import register
from megatron_compress.wire import Layout, TensorSpec, packed_bytes

FORMATS = {"e2m1": E2M1, "e3m0": E3M0}
# Keeps sums of 512 elements below float32's largest; exact above 2^-116.
HEADROOM = 2.0**-10
# Below this a scale no longer follows the data, so that its reciprocal stays finite.
MIN_SCALE = 2.0**-120


class Fp4QuantSettings(Settings):
    group_size: Literal[32, 64, 128, 256, 512] = Field(default=64, description="Contiguous elements of a group")
    format: Literal["e2m1", "e3m0"] = Field(default="e2m1", description="4-bit element format")
    scales: Literal["dual", "single"] = Field(
        default="dual", description="dual: the paper's two float32 scales a group; single: one, with the same codes"
    )
    paper_clips: bool = Field(
        default=False,
        description="The paper's literal clips of both scales; loses groups below 1e-16 and above 1e12 (outside D9)",
    )

    @model_validator(mode="after")
    def _clips_need_dual(self):
        if self.paper_clips and self.scales == "single":
            raise ValueError("paper_clips applies to the two scales of 'dual'; remove it or set scales: dual")
        return self


@register("fp4_quant")
class Fp4Quant(Compressor):
    """FP4Quant, eqs. (1)–(3): 4 + 64 / group_size bits per element (dual), 4 + 32 / group_size (single).

    dual:   α = clip(R / sqrt(mean x² + 1e-6), 1e-3, 1e3) after scaling the group by a power of two to max|x| in [1, 4);
            h = H(αx) / √G;  s = max|h| / R;  codes = FP4(h / s);  both scales on the wire.
    single: h = Hx;  codes = FP4(h · R / max|h|);  the wire holds max|h| / (R·G), so x̂ = H(codes) · scale.
    R is the format's largest magnitude. Since s adapts to α, both give the same codes but for rounding (METHODS A12).
    Groups are contiguous in the flattened tensor; a shorter last group is rotated in blocks of the largest power of
    two that divides its length. A NaN or Inf makes its group NaN.
    """

    Settings = Fp4QuantSettings

    @property
    def granularity(self) -> int:
        return self.settings.group_size

    @property
    def format(self) -> MiniFloat:
        return FORMATS[self.settings.format]

    def layout(self, spec: TensorSpec) -> Layout:
        groups = num_groups(spec.numel, self.settings.group_size)
        return Layout.of(
            ("codes", torch.uint8, (packed_bytes(spec.numel, 4),)),
            ("scales", torch.float32, (groups,)),
            ("alphas", torch.float32, (groups if self.settings.scales == "dual" else 0,)),
        )

    def encode(self, x: torch.Tensor, spec: TensorSpec, parts: dict[str, torch.Tensor]) -> None:
        codes, scales, alphas = [], [], []
        quantize = self._quantize_dual if self.settings.scales == "dual" else self._quantize_single
        for group in split_groups(x.view(-1).float(), self.settings.group_size):
            code, *pair = quantize(group)
            finite = group.abs().amax(dim=1).isfinite()
            scale, *alpha = (torch.where(finite, part, torch.nan) for part in pair)
            codes.append((code * finite.to(torch.uint8)[:, None]).view(-1))
            scales.append(scale)
            alphas += alpha
        parts["codes"].copy_(pack_bits(torch.cat(codes), 4))
        parts["scales"].copy_(torch.cat(scales))
        if alphas:
            parts["alphas"].copy_(torch.cat(alphas))

    def decode(self, parts: dict[str, torch.Tensor], spec: TensorSpec) -> torch.Tensor:
        values = self.format.dequantize(unpack_bits(parts["codes"], 4, spec.numel))
        groups = split_groups(values, self.settings.group_size)
        counts = [len(group) for group in groups]
        scales = parts["scales"].split(counts)
        if self.settings.scales == "dual":
            alphas = parts["alphas"].split(counts)
            scales = [s * _norm(g) / a for g, s, a in zip(groups, scales, alphas, strict=True)]
        decoded = [hadamard_transform(g) * s[:, None] for g, s in zip(groups, scales, strict=True)]
        return torch.cat([d.view(-1) for d in decoded]).view(spec.shape)

    def _quantize_single(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [n, g]; returns codes [n, g] and scales [n], of no meaning where x is not finite."""
        h = hadamard_transform(x * HEADROOM)
        largest = h.abs().amax(dim=1).clamp(min=MIN_SCALE)
        codes = self.format.quantize(h * (largest.reciprocal() * self.format.max)[:, None])
        return codes, (largest * (1 / self.format.max)) * (1 / (HEADROOM * hadamard_block(x.shape[1])))

    def _quantize_dual(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x: [n, g]; returns codes [n, g], s [n] and α, times the power of two, [n]; see `_quantize_single`."""
        power = torch.ones_like(x[:, 0]) if self.settings.paper_clips else _inverse_power_of_two(x.abs().amax(dim=1))
        x = x * power[:, None]
        mean_square = pairwise_sum(x * x) * (1 / x.shape[1])
        # In float64 and rounded once: float32 square roots of torch are not correctly rounded on every device.
        root = (mean_square + 1e-6).double().sqrt().float()
        alpha = (root.reciprocal() * self.format.max).clamp(1e-3, 1e3)
        h = hadamard_transform(x * alpha[:, None])
        scale = h.abs().amax(dim=1) * _norm(x) * (1 / self.format.max)
        scale = scale.clamp(1e-12, 1e6) if self.settings.paper_clips else scale.clamp(min=MIN_SCALE)
        codes = self.format.quantize(h * (scale.reciprocal() * _norm(x))[:, None])
        return codes, scale, alpha * power


def _norm(groups: torch.Tensor) -> float:
    """1/√n of the orthonormal transform of rows as long as those of `groups`, as a float32 value."""
    return float(torch.tensor(1 / math.sqrt(hadamard_block(groups.shape[1])), dtype=torch.float32))


def _inverse_power_of_two(magnitude: torch.Tensor) -> torch.Tensor:
    """2^-e with 2^e ≤ magnitude < 2^(e+1), e kept in [-100, 126] so that the result is a normal float32."""
    exponent = (magnitude.view(torch.int32) >> 23) - 127
    return ((127 - exponent.clamp(-100, 126)) << 23).view(torch.float32)
