"""FP4Quant: Hadamard-rotated groups in a 4-bit floating-point format (METHODS §5.2, A10–A20)."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, model_validator

from megatron_compress.compressors.base import Compressor, Settings
from megatron_compress.ops import fp4_quant
from megatron_compress.ops.groups import num_groups
from megatron_compress.registry import register
from megatron_compress.wire import Layout, TensorSpec, packed_bytes


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

    dual:   α = clip(R / sqrt(mean x² + 1e-6), 1e-3, 1e3) of the group times a power of two; h = H(αx) / √G;
            s = max|h| / R;  codes = FP4(h / s);  both scales on the wire.
    single: h = Hx;  codes = FP4(h · R / max|h|);  the wire holds max|h| / (R·G), so x̂ = H(codes) · scale.
    R is the format's largest magnitude. Since s adapts to α, both have the same codes (METHODS A12); only under the
    paper's clips, outside D9, does α act.
    Groups are contiguous in the flattened tensor; a shorter last group is rotated in blocks of the largest power of
    two that divides its length. A NaN or Inf makes its group NaN.
    """

    Settings = Fp4QuantSettings

    @property
    def granularity(self) -> int:
        return self.settings.group_size

    def layout(self, spec: TensorSpec) -> Layout:
        groups = num_groups(spec.numel, self.settings.group_size)
        return Layout.of(
            ("codes", torch.uint8, (packed_bytes(spec.numel, 4),)),
            ("scales", torch.float32, (groups,)),
            ("alphas", torch.float32, (groups if self.settings.scales == "dual" else 0,)),
        )

    def encode(self, x: torch.Tensor, spec: TensorSpec, parts: dict[str, torch.Tensor]) -> None:
        fp4_quant.encode(x, *self._sections(parts), self.settings.group_size, self._e3m0, self.settings.paper_clips)

    def decode_sum(self, parts: dict[str, torch.Tensor], spec: TensorSpec, out: torch.Tensor) -> None:
        fp4_quant.decode(*self._sections(parts), out, self.settings.group_size, self._e3m0)

    def reencode(self, parts: dict[str, torch.Tensor], spec: TensorSpec, into: dict[str, torch.Tensor]) -> None:
        settings = self.settings
        fp4_quant.requantize(
            *self._sections(parts),
            spec.numel,
            *self._sections(into),
            settings.group_size,
            self._e3m0,
            settings.paper_clips,
        )

    @property
    def _e3m0(self) -> bool:
        return self.settings.format == "e3m0"

    @staticmethod
    def _sections(parts: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return parts["codes"], parts["scales"], parts["alphas"]
