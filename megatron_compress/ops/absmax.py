"""One-byte codes under one scale a tensor, by its largest magnitude (METHODS §1.2), and products of such tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Below this the largest magnitude no longer sets the scale, which stays a normal float32.
MIN_MAGNITUDE = 2.0**-110


@dataclass(frozen=True)
class Quantized:
    """A tensor as `codes · scale`.

    Args:
        codes: int8 or float8_e4m3fn.
        scale: float32 of no dimension, on the codes' device; NaN if the tensor held a value that is not finite.
    """

    codes: torch.Tensor
    scale: torch.Tensor

    def t(self) -> Quantized:
        """The transpose of a matrix; a view."""
        return Quantized(self.codes.t(), self.scale)

    def dequantize(self) -> torch.Tensor:
        """float32 values."""
        return self.codes.float() * self.scale


@dataclass(frozen=True)
class AbsmaxFormat:
    """Numbers of a format, rounded half to even and clamped to ±max, under scale = max|x| · clip / max.

    The simulated formats use the codes of a wider one that holds each of their values: INT4 those of INT8, FP6 and FP4
    those of E4M3. Their products run as the wider format's, with the same result.

    Args:
        max: the largest value.
        mantissa_bits, min_exponent: of a floating-point format, the exponent the smallest normal's; None: integers.
        clip: share of the largest magnitude that `max` stands for.
    """

    name: str
    max: float
    mantissa_bits: int | None = None
    min_exponent: int | None = None
    clip: float = 1.0

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8 if self.mantissa_bits is None else torch.float8_e4m3fn

    def scale_of(self, x: torch.Tensor) -> torch.Tensor:
        """float32 of no dimension, computed on x's device without waiting for it."""
        magnitude = x.abs().amax().float()
        return torch.where(magnitude.isfinite(), magnitude.clamp(min=MIN_MAGNITUDE) * (self.clip / self.max), torch.nan)

    def quantize(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> Quantized:
        """Codes of x (any shape and floating dtype) under its own scale, or one that several parts share."""
        scale = self.scale_of(x) if scale is None else scale
        values = (x.float() / scale).nan_to_num(0.0).clamp(-self.max, self.max)
        return Quantized(self._rounded(values).to(self.dtype), scale)

    def _rounded(self, values: torch.Tensor) -> torch.Tensor:
        if self.mantissa_bits is None:
            return values.round()
        if self is FP8:  # the cast rounds
            return values
        exponent = (torch.frexp(values).exponent - 1).clamp(min=self.min_exponent)
        step = torch.ldexp(torch.ones_like(values), exponent - self.mantissa_bits)
        return (values / step).round() * step


INT8 = AbsmaxFormat("int8", 127.0)
FP8 = AbsmaxFormat("fp8", 448.0, mantissa_bits=3, min_exponent=-6)
FP6 = AbsmaxFormat("fp6", 28.0, mantissa_bits=2, min_exponent=-2, clip=0.75)  # E3M2
FP4 = AbsmaxFormat("fp4", 6.0, mantissa_bits=1, min_exponent=0, clip=0.75)  # E2M1
INT4 = AbsmaxFormat("int4", 7.0)
FORMATS = {fmt.name: fmt for fmt in (INT8, FP8, FP6, FP4, INT4)}


def product(a: Quantized, b: Quantized, dtype: torch.dtype, fast: bool = False) -> torch.Tensor:
    """A·Bᵀ of two matrices of codes, on the tensor cores where these take the sizes (multiples of 16, compute 8.9).

    Args:
        a, b: [M, K] and [N, K] of one code dtype.
        dtype: of the result; float32 or bfloat16.
        fast: leave partial FP8 sums in the tensor cores' own precision; for bfloat16 results only.

    Returns:
        [M, N].
    """
    if not (a.codes.is_cuda and _fits_tensor_cores(a.codes, b.codes)):
        return ((a.codes.double() @ b.codes.double().t()) * (a.scale * b.scale)).to(dtype)
    left, right = a.codes.contiguous(), b.codes.contiguous()
    if left.dtype == torch.int8:
        return (torch._int_mm(left, right.t()) * (a.scale * b.scale)).to(dtype)
    return torch._scaled_mm(left, right.t(), a.scale, b.scale, out_dtype=dtype, use_fast_accum=fast)


def _fits_tensor_cores(a: torch.Tensor, b: torch.Tensor) -> bool:
    sizes = (*a.shape, b.shape[0])
    return all(size % 16 == 0 and size > 16 for size in sizes) and torch.cuda.get_device_capability(a.device) >= (8, 9)
