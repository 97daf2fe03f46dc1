"""E4M3 codes under one float32 scale a group: the numbers of compressors/fp8.py (kernels: csrc/scaled.cu)."""

from __future__ import annotations

import torch

from megatron_compress.ops.groups import split_groups
from megatron_compress.ops.library import register
from megatron_compress.ops.reduce import requantize_by, store_sum

E4M3_MAX = 448.0
# Below this a group's largest magnitude no longer sets the scale, which stays a normal float32.
MIN_MAGNITUDE = 2.0**-110


def _encode(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, group_size: int) -> None:
    groups = split_groups(x.reshape(-1).float(), group_size)
    counts = [len(group) for group in groups]
    for group, code, scale in zip(groups, split_groups(codes, group_size), scales.split(counts), strict=True):
        magnitude = group.abs().amax(dim=1).clamp(min=MIN_MAGNITUDE)
        scale.copy_(torch.where(magnitude.isfinite(), magnitude * (1 / E4M3_MAX), torch.nan))
        scaled = (group * scale.reciprocal()[:, None]).clamp(-E4M3_MAX, E4M3_MAX).nan_to_num(0.0)
        code.copy_(scaled.to(torch.float8_e4m3fn).view(torch.uint8))


def _decode(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, group_size: int) -> None:
    store_sum((_dequantize(*payload, group_size) for payload in zip(codes, scales, strict=True)), out)


def _dequantize(codes: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
    groups = split_groups(codes.view(torch.float8_e4m3fn).float(), group_size)
    factors = scales.split([len(group) for group in groups])
    return torch.cat([(g * f[:, None]).view(-1) for g, f in zip(groups, factors, strict=True)])


# Arguments as in ops/fp4_quant.py.
encode = register("fp8_encode(Tensor x, Tensor(a!) codes, Tensor(b!) scales, int group_size) -> ()", _encode)
decode = register("fp8_decode(Tensor codes, Tensor scales, Tensor(a!) out, int group_size) -> ()", _decode)
requantize = register(
    "fp8_requantize(Tensor codes, Tensor scales, ScalarType dtype, int numel, Tensor(a!) codes_out, "
    "Tensor(b!) scales_out, int group_size) -> ()",
    requantize_by(_decode, _encode),
)
