"""The control: the tensor's own bytes, through every hook, payload and handle that a real compressor uses."""

from __future__ import annotations

import torch

from megatron_compress.compressors.base import Compressor
from megatron_compress.registry import register
from megatron_compress.wire import Layout, TensorSpec


@register("identity")
class Identity(Compressor):
    """Sends values unchanged; a run with it equals the plain run to the bit on up to two ranks (STYLE 23)."""

    exact = True

    def layout(self, spec: TensorSpec) -> Layout:
        return Layout.of(("values", spec.dtype, spec.shape))

    def encode(self, x: torch.Tensor, spec: TensorSpec, parts: dict[str, torch.Tensor]) -> None:
        parts["values"].copy_(x)

    def decode(self, parts: dict[str, torch.Tensor], spec: TensorSpec) -> torch.Tensor:
        return parts["values"]
