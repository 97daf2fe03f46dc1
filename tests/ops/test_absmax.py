"""Codes of each format against the list of its values; scales; products."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_compress.ops.absmax import FORMATS, FP4, FP6, FP8, INT4, INT8, AbsmaxFormat, product
from tests.strategies import normal

all_formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)


def values_of(fmt: AbsmaxFormat) -> torch.Tensor:
    """Every value of a format, by its definition, ascending."""
    if fmt.mantissa_bits is None:
        return torch.arange(-fmt.max, fmt.max + 1)
    magnitudes, exponent = {0.0}, fmt.min_exponent
    step = 2.0 ** (exponent - fmt.mantissa_bits)
    while step * 2**fmt.mantissa_bits <= fmt.max:
        magnitudes |= {step * i for i in range(2 ** (fmt.mantissa_bits + 1)) if step * i <= fmt.max}
        step *= 2
    return torch.tensor(sorted(magnitudes | {-m for m in magnitudes}))


def test_formats_have_their_numbers_of_values():
    assert {name: len(values_of(fmt)) for name, fmt in FORMATS.items()} == {
        "int8": 255,
        "fp8": 253,
        "fp6": 63,
        "fp4": 15,
        "int4": 15,
    }


@all_formats
def test_rounds_to_the_nearest_value_and_clamps(fmt):
    values = values_of(fmt)
    x = torch.cat([values, (values[1:] + values[:-1]) / 2, normal((2000,), 0) * fmt.max, torch.tensor([1e6, -1e6])])
    quantized = fmt.quantize(x, torch.tensor(1.0))
    assert quantized.codes.dtype == fmt.dtype and quantized.codes.element_size() == 1
    codes = quantized.codes.float()
    assert torch.isin(codes, values).all()
    nearest = (x[:, None] - values).abs().amin(dim=1)
    assert torch.equal((x - codes).abs(), nearest)


def test_ties_go_to_the_even_value():
    ties = {FP4: ([0.25, 0.75, 2.5, 5.0], [0.0, 1.0, 2.0, 4.0]), INT8: ([0.5, 1.5, -2.5], [0.0, 2.0, -2.0])}
    for fmt, (x, expected) in ties.items():
        assert fmt.quantize(torch.tensor(x), torch.tensor(1.0)).codes.float().tolist() == expected


@all_formats
def test_largest_magnitude_sets_the_scale(fmt):
    x = normal((37, 11), 1).to(torch.bfloat16)
    clip = 0.75 if fmt in (FP6, FP4) else 1.0
    quantized = fmt.quantize(x)
    assert quantized.scale.shape == () and quantized.scale.dtype == torch.float32
    assert quantized.scale.item() == pytest.approx(x.abs().max().item() * clip / fmt.max)
    assert quantized.dequantize().abs().max().item() == pytest.approx(x.abs().max().item() * clip)


@given(st.sampled_from(sorted(FORMATS)), st.floats(1e-30, 1e30))
def test_error_is_within_half_a_step_of_the_largest(name, size):
    fmt = FORMATS[name]
    x = normal((64,), 2) * size
    limit = x.abs().max() * fmt.clip
    step = values_of(fmt).diff().max() * limit / fmt.max
    inside = x.abs() <= limit
    error = (fmt.quantize(x).dequantize() - x).abs()[inside]
    assert (error <= step * 0.501).all()


@all_formats
def test_zeros_stay_zeros_and_what_is_not_finite_is_seen(fmt):
    assert torch.equal(fmt.quantize(torch.zeros(4, 4)).dequantize(), torch.zeros(4, 4))
    for bad in (float("nan"), float("inf")):
        assert fmt.quantize(torch.tensor([1.0, bad])).dequantize().isnan().all()


@pytest.mark.parametrize("fmt", [INT8, FP8, INT4])
def test_product_is_that_of_the_values(fmt):
    a, b = fmt.quantize(normal((48, 4096), 3)), fmt.quantize(normal((20, 4096), 4))
    expected = a.codes.double() @ b.codes.double().t() * (a.scale * b.scale)
    assert torch.equal(product(a, b, torch.float32), expected.float())
    assert product(a, b, torch.bfloat16).dtype == torch.bfloat16
    assert torch.equal(a.t().dequantize(), a.dequantize().t())
