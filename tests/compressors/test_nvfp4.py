"""NVFP4 with double-block scales: METHODS §2.1 written out, and what its scales promise."""

from fractions import Fraction

import pytest
import torch
from pydantic import ValidationError

from megatron_compress import registry
from megatron_compress.ops.bits import unpack_bits
from tests.strategies import normal, parts_of, round_trip, sqnr

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3 = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()[1:]  # all above zero


def create(truncation_free: bool = False):
    return registry.create("nvfp4", truncation_free=truncation_free)


def heavy(shape, seed=0):
    return normal(shape, seed) * torch.exp(2 * normal(shape, seed + 1))


def nearest(value: float, candidates) -> tuple[int, bool]:
    """Index of the nearest candidate in exact arithmetic, and whether it is nearer than any other by a millionth."""
    value = Fraction(value)
    distances = sorted((abs(value - Fraction(c)), i) for i, c in enumerate(candidates))
    return distances[0][1], distances[1][0] - distances[0][0] > value * Fraction(1, 10**6)


@pytest.mark.parametrize("truncation_free", [False, True])
@pytest.mark.parametrize("numel", [1, 15, 16, 128, 200, 1030])
def test_scales_and_codes_are_the_formulas(numel, truncation_free):
    x = heavy((numel,))
    parts = parts_of(create(truncation_free), x)
    codes = unpack_bits(parts["codes"], 4, numel)
    headroom = Fraction(17, 16) if truncation_free else Fraction(1)
    for g, group in enumerate(x.split(128)):
        outer = float(parts["scales"][g])
        assert outer == pytest.approx(float(group.abs().max()) * float(headroom) / 2688, rel=1e-6)
        for b, block in enumerate(group.split(16)):
            inner = float(parts["block_scales"][8 * g + b].view(torch.float8_e4m3fn))
            wanted = Fraction(float(block.abs().max())) / Fraction(outer) / 6 * headroom
            expected, clear = nearest(min(float(wanted), 448.0), E4M3)
            assert inner == E4M3[expected] or not clear
            for i, value in enumerate(block.tolist()):
                code = int(codes[128 * g + 16 * b + i])
                expected, clear = nearest(abs(Fraction(value) / (Fraction(inner) * Fraction(outer))), MAGNITUDES)
                assert code & 7 == expected or not clear
                assert code >> 3 == (value < 0)


def test_the_largest_element_of_a_block_saturates_only_without_the_larger_scale():
    x = normal((4096, 128), 3)
    for truncation_free in (False, True):
        parts = parts_of(create(truncation_free), x)
        steps = parts["scales"].repeat_interleave(8) * parts["block_scales"].view(torch.float8_e4m3fn).float()
        beyond = (x.view(-1, 16).abs().amax(dim=1) / steps > 6.00001).float().mean()
        # METHODS §2.2: 43 % of the blocks of Gaussian data.
        assert float(beyond) == pytest.approx(0.0 if truncation_free else 0.43, abs=0.03)


def test_ties_go_to_even_codes():
    """A group whose scales are exactly 1, so that elements are the midpoints themselves."""
    x = torch.zeros(128)
    x[:16] = 2688.0  # the outer scale is 1, this block's own 448
    x[16:32] = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -5, 0, 0.5, 1, 1.5, 2, 3])
    codes = unpack_bits(parts_of(create(), x)["codes"], 4, 128)[16:32]
    assert codes.tolist() == [7, 0, 2, 2, 4, 4, 6, 6, 8, 14, 0, 1, 2, 3, 4, 5]


def test_small_blocks_beside_a_large_one_are_kept_to_the_least_scale():
    """A block 2^-16 of its group's largest element still has an E4M3 scale; below, its elements round towards zero."""
    x = normal((2, 128), 0).clamp(-2, 2)
    x[:, 0] = 2.0**17
    x[1, 16:] *= 2.0**-12
    decoded = round_trip(create(), x)
    assert sqnr(x[0, 16:], decoded[0, 16:]) > 15
    assert (decoded[1, 16:].abs() <= x[1, 16:].abs() + 2.0**17 / 2688 * 2.0**-9 / 4).all()


@pytest.mark.parametrize("amplitude", [1e-4, 1.0, 1e4])
def test_better_than_one_scale_for_all_on_heavy_tails(amplitude):
    x = heavy((256, 512)) * amplitude
    assert sqnr(normal((256, 512), 0), round_trip(create(), normal((256, 512), 0))) > 20
    assert sqnr(x, round_trip(create(), x)) > sqnr(
        x, round_trip(registry.create("fixed_point", group_size=128, bits=4), x)
    )


@pytest.mark.parametrize("settings", [{"truncation_free": 1}, {"group_size": 128}])
def test_settings_that_cannot_be_honoured_are_refused(settings):
    with pytest.raises(ValidationError):
        registry.create("nvfp4", **settings)
