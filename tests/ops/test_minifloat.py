"""E2M1 and E3M0 rounding against brute force, ties included."""

import math
from fractions import Fraction

import pytest
import torch

from megatron_compress.ops.minifloat import E2M1, E3M0
from tests.strategies import normal

FORMATS = pytest.mark.parametrize("fmt", [E2M1, E3M0], ids=lambda fmt: fmt.name)


def nearest(value: float, magnitudes: tuple[float, ...]) -> int:
    """The code whose magnitude is nearest in exact arithmetic; of two as near, the even code."""
    distances = [abs(Fraction(abs(value)) - Fraction(m)) for m in magnitudes]
    return min(range(8), key=lambda code: (distances[code], code % 2))


def in_half(value: float, fmt) -> float:
    """Rounded to ten bits behind the leading one, or behind the format's smallest normal where the value is below."""
    smallest = fmt.magnitudes[2**fmt.mantissa_bits]
    quantum = Fraction(smallest) / 1024 * 2 ** max(0, math.floor(math.log2(max(value, 1e-30) / smallest)))
    return float(round(Fraction(value) / quantum) * quantum)


def quantize(fmt, values: torch.Tensor) -> torch.Tensor:
    return fmt.quantize((values * fmt.unit).half())


def test_tables():
    """E2M1: METHODS §3.2. E3M0: powers of two from 2^-2 with bias 3."""
    assert E2M1.magnitudes == (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    assert E3M0.magnitudes == (0, *(2.0 ** (exponent - 3) for exponent in range(1, 8)))
    assert (E2M1.max, E3M0.max) == (6, 16)


@pytest.mark.parametrize(
    "value,code",
    [(0, 0), (0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5, 6), (5.01, 7), (6, 7), (1e30, 7)],
)
def test_ties_of_e2m1_go_to_even_codes(value, code):
    value = float(value)
    assert quantize(E2M1, torch.tensor([value, -value])).tolist() == [code, code + 8]


@FORMATS
def test_rounds_to_nearest(fmt):
    midpoints = [(a + b) / 2 for a, b in zip(fmt.magnitudes, fmt.magnitudes[1:], strict=False)]
    special = torch.tensor([*fmt.magnitudes, *midpoints, 1e-45, 1e-20, 100.0, 3e38])
    around = torch.cat([special, special.nextafter(torch.tensor(0.0)), special.nextafter(torch.tensor(torch.inf))])
    values = torch.cat([around.clamp(max=3.4e38), normal((1000,), 0) * 3, torch.linspace(0, 20, 801)])
    for sign in (1, -1):
        codes = quantize(fmt, sign * values)
        assert codes.dtype == torch.uint8
        expected = [nearest(in_half(value, fmt), fmt.magnitudes) for value in values.tolist()]
        assert (codes & 7).tolist() == expected
        assert torch.equal(codes >> 3, torch.signbit(sign * values).to(torch.uint8))


@FORMATS
def test_codes_stand_for_their_values(fmt):
    codes = torch.arange(16, dtype=torch.uint8)
    values = fmt.dequantize(codes)
    assert values.tolist() == [*fmt.magnitudes, *(-m for m in fmt.magnitudes)]
    assert torch.equal(quantize(fmt, values), codes)
    assert torch.signbit(values).tolist() == [False] * 8 + [True] * 8
