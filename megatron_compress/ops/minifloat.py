"""The two 4-bit floating-point formats: sign in bit 3, magnitude index in bits 0–2."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MiniFloat:
    """A sign–magnitude format given by its eight magnitudes, code 0 being zero.

    Values between two magnitudes go to the nearer one, ties to the even code (round-half-even), values beyond the
    largest saturate. They come in half precision times `unit`, so that the format's smallest normal is half's: the
    exponent and mantissa of a half are the code then, and a kernel rounds two values with one instruction.
    """

    name: str
    magnitudes: tuple[float, ...]
    mantissa_bits: int

    @property
    def max(self) -> float:
        return self.magnitudes[-1]

    @property
    def unit(self) -> float:
        return torch.finfo(torch.float16).smallest_normal / self.magnitudes[2**self.mantissa_bits]

    def quantize(self, values: torch.Tensor) -> torch.Tensor:
        """Codes (uint8, 0–15) of float16 values times `unit`; −0 and negatives that round to zero keep the sign bit."""
        return self.nearest(values.float() * (1 / self.unit))

    def nearest(self, values: torch.Tensor) -> torch.Tensor:
        """Codes (uint8, 0–15) of float32 values without NaN; −0 and negatives that round to zero keep the sign bit."""
        magnitude = values.abs()
        # A tie at the midpoint above code i goes up only if i is odd: compare with > where i is even, >= where odd.
        midpoints = [(low + high) / 2 for low, high in zip(self.magnitudes, self.magnitudes[1:], strict=False)]
        codes = torch.zeros_like(magnitude)
        above = torch.empty_like(magnitude)
        for code, midpoint in enumerate(midpoints):
            compare = torch.gt if code % 2 == 0 else torch.ge
            codes += compare(magnitude, midpoint, out=above)
        return (codes + 8 * torch.signbit(values)).to(torch.uint8)

    def dequantize(self, codes: torch.Tensor) -> torch.Tensor:
        """float32 values of uint8 `codes`; code 8 is −0."""
        table = torch.tensor([*self.magnitudes, *(-m for m in self.magnitudes)], device=codes.device)
        return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


# METHODS §3.2; the format of cuda_fp4.h.
E2M1 = MiniFloat("e2m1", (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), 1)
# Three exponent bits, bias 3, code 0 is zero.
E3M0 = MiniFloat("e3m0", (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0), 0)
