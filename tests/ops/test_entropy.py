"""The fixed polynomial, and the entropy that ranks tiles."""

import math

import pytest
import torch

from megatron_compress.ops.entropy import log2, magnitude_entropy
from tests.strategies import normal


def test_log2_error():
    for exponent in (-126, -40, -1, 0, 1, 60, 127):
        x = (torch.linspace(1, 2, 100_001)[:-1] * 2.0**exponent).float()
        error = (log2(x).double() - x.double().log2()).abs().max()
        assert error < 7.2e-6 + abs(exponent) * 2.0**-24


def test_log2_of_powers_of_two_is_exact():
    exponents = torch.arange(-126, 128).float()
    assert torch.equal(log2(torch.exp2(exponents.double()).float()), exponents)


def test_log2_never_falls():
    x = torch.arange(0x3F000000, 0x40800000, 97, dtype=torch.int32).view(torch.float32)  # 0.5 to 4
    assert (log2(x).diff() >= 0).all()


@pytest.mark.parametrize("n", [1, 2, 8, 64, 100, 4096])
def test_entropy(n):
    x = normal((50, n), 0) * torch.exp(normal((50, n), 1))
    p = x.double().abs() / x.double().abs().sum(dim=1, keepdim=True)
    expected = -(p * p.log2()).sum(dim=1)
    assert torch.allclose(magnitude_entropy(x).double(), expected, rtol=0, atol=2e-5)


def test_entropy_of_simple_tiles():
    assert magnitude_entropy(torch.zeros(1, 64)).item() == 0
    assert magnitude_entropy(-torch.ones(1, 64)).item() == 6
    assert magnitude_entropy(torch.eye(64)[3:4]).item() == 0
    assert magnitude_entropy(torch.tensor([[3.0, 1.0]])).item() == pytest.approx(2 - 0.75 * math.log2(3), abs=1e-5)


@pytest.mark.parametrize("exponent", [-99, -60, 60, 99])
def test_entropy_does_not_depend_on_amplitude(exponent):
    x = normal((100, 64), 0)
    assert torch.equal(magnitude_entropy(x * 2.0**exponent), magnitude_entropy(x))
