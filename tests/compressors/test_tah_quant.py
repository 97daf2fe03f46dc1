"""TAH-Quant: outliers, allocation of bits, settings (METHODS §5.1)."""

import itertools
import math

import pytest
import torch
from pydantic import ValidationError

from megatron_compress import registry
from megatron_compress.ops import tah_quant
from megatron_compress.ops.bits import unpack_bits
from megatron_compress.wire import TensorSpec
from tests.strategies import equal_bits, integers, normal, parts_of, round_trip, sqnr

MAGNITUDES = [10, 12, 15, 20, 30, 50, 70, 100, 128, 150, 200, 300, 500, 700, 1000, 1500, 2000, 3000, 5000, 7000, 10000]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def create(**settings):
    return registry.create("tah_quant", **settings)


def error_beside_outliers(compressor, magnitude: float, dtype: torch.dtype, repeats: int = 16) -> float:
    """Error over energy of N(0, 1) tiles, outliers at every index and of both signs left out."""
    group = compressor.settings.group_size
    x = normal((group * repeats, group), int(magnitude), dtype)
    at = torch.eye(group).bool().repeat(repeats, 1)
    signs = torch.tensor([1.0, -1.0]).repeat_interleave(group).repeat(repeats // 2)
    x[at] = (magnitude * signs).to(dtype)
    error = torch.where(at, 0.0, round_trip(compressor, x).double() - x.double())
    return float((error**2).sum() / (torch.where(at, 0.0, x.double()) ** 2).sum())


@DTYPES
@pytest.mark.parametrize("threshold", [0.0, 2.0])
@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_background_survives_beside_an_outlier(magnitude, threshold, dtype):
    compressor = create(high_fraction=1.0, outlier_threshold=threshold)
    assert error_beside_outliers(compressor, magnitude, dtype) <= (0.009 if magnitude <= 1000 else 0.013)


@DTYPES
@pytest.mark.parametrize("magnitude", [3, 4, 5, 6, 7, 8])
def test_background_survives_beside_a_small_outlier_where_rotated(magnitude, dtype):
    """Between 3 and 8 standard deviations τ = 2 leaves some tiles alone (eq. (3)); τ = 0 rotates them all."""
    rotating = create(high_fraction=1.0, outlier_threshold=0.0)
    assert error_beside_outliers(rotating, magnitude, dtype) <= 0.009
    assert error_beside_outliers(create(high_fraction=1.0), magnitude, dtype) <= 0.016


@DTYPES
@pytest.mark.parametrize("magnitude,least", [(20, 0.025), (100, 0.25), (1000, 0.5), (10000, 0.5)])
def test_without_the_swap_it_does_not(magnitude, least, dtype, monkeypatch):
    compressor = create(high_fraction=1.0)
    monkeypatch.setattr(tah_quant, "_swap", lambda x, index: x)
    assert error_beside_outliers(compressor, magnitude, dtype) > least


@pytest.mark.parametrize("magnitude", [5, 20, 1000])
def test_without_rotation_it_does_not(magnitude):
    compressor = create(high_fraction=1.0, outlier_threshold=math.inf)
    assert error_beside_outliers(compressor, magnitude, torch.float32) > 0.015


@pytest.mark.parametrize("group", [8, 16, 32, 64, 128, 256])
def test_error_beside_an_outlier_does_not_grow_with_it(group):
    compressor = create(group_size=group, high_fraction=1.0)
    errors = [
        error_beside_outliers(compressor, magnitude, torch.float32, repeats=max(4, 2048 // group))
        for magnitude in (30, 1000, 10000)
    ]
    assert errors == pytest.approx([errors[0]] * 3, rel=0.1)
    assert errors[0] < 0.014


@pytest.mark.parametrize("group", [8, 16, 32, 64, 128, 256])
def test_a_lone_spike_costs_nothing_elsewhere(group):
    x = torch.eye(group) * torch.linspace(-1e6, 1e6, group)[:, None]
    decoded = round_trip(create(group_size=group), x)
    assert torch.equal(decoded, torch.diag(decoded.diagonal()))
    assert ((decoded.diagonal() - x.diagonal()).abs() <= x.diagonal().abs() * 2.0**-8).all()


def test_which_tiles_are_rotated():
    x = torch.ones(5, 64)
    x[0, 7] = 2.0  # exactly τ times the second is not more than τ times
    x[1, 7] = -2.5
    x[2] = 0
    x[3, 9] = x[3, 5] = 100  # two outliers: the second is as large
    parts = parts_of(create(), x)
    assert torch.signbit(parts["scales"]).tolist() == [False, True, False, False, False]
    assert unpack_bits(parts["pivots"], 6, 5).tolist() == [0, 7, 0, 0, 0]

    always = parts_of(create(outlier_threshold=0.0), x)
    assert torch.signbit(always["scales"]).tolist() == [True, True, False, True, True]
    assert unpack_bits(always["pivots"], 6, 5).tolist() == [7, 7, 0, 5, 0]

    never = parts_of(create(outlier_threshold=math.inf), x)
    assert not torch.signbit(never["scales"]).any()
    assert not never["pivots"].any()


def test_short_tiles_are_rotated_only_at_powers_of_two():
    for length, rotated in ((1, False), (2, True), (3, False), (32, True), (44, False)):
        x = torch.ones(1, 64 + length)
        x[0, -1] = 1e4
        assert torch.signbit(parts_of(create(), x)["scales"]).tolist() == [False, rotated]


def entropy(values: list[float]) -> float:
    total = sum(abs(v) for v in values)
    return -sum(abs(v) / total * math.log2(abs(v) / total) for v in values if v)


def assert_ranked(flags: list[bool], tokens: torch.Tensor, fraction: float) -> None:
    """The official code's allocation: of a sample's tokens [S, C], k = floor(p·S) of highest entropy are high.

    Entropies nearer than the resolution of the 12-bit keys and the logarithm's error are alike.
    """
    entropies = [entropy(token) for token in tokens.tolist()]
    high = [e for e, flag in zip(entropies, flags, strict=True) if flag]
    low = [e for e, flag in zip(entropies, flags, strict=True) if not flag]
    assert len(high) == math.floor(round(fraction * 1000) * len(tokens) / 1000)
    if high and low:
        assert min(high) >= max(low) - math.log2(tokens.shape[1]) / 4095 - 0.0861 - 2 * 8.8e-4


@pytest.mark.parametrize("size", [128, "token"])
@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 0.8, 1.0])
def test_allocation_by_rows_is_the_token_level_allocation(size, fraction):
    """A = C: a token's tiles all have the bits that token-level allocation gives it."""
    x = normal((30, 3, 128), 0, torch.bfloat16) * torch.exp(normal((30, 3, 1), 1) * normal((30, 3, 128), 2))
    x = x.bfloat16()
    spec = TensorSpec.of(x, sample_dim=1)
    bits = {"allocation_size": size, "low_bits": 3, "high_bits": 5}
    decoded = round_trip(create(high_fraction=fraction, **bits), x, spec)
    flags = unpack_bits(parts_of(create(high_fraction=fraction, **bits), x, spec)["high_map"], 1, 90).view(3, 30).bool()
    all_high, all_low = (round_trip(create(high_fraction=share, **bits), x, spec) for share in (1.0, 0.0))
    for sample in range(3):
        assert_ranked(flags[sample].tolist(), x[:, sample].float(), fraction)
        for token, is_high in enumerate(flags[sample]):
            expected = all_high if is_high else all_low
            assert equal_bits(decoded[token, sample], expected[token, sample])


def test_allocation_by_tiles_ranks_all_tiles_of_a_sample():
    x = normal((20, 2, 320), 0) * torch.exp(normal((20, 2, 320), 1))
    spec = TensorSpec.of(x, sample_dim=1)
    flags = unpack_bits(parts_of(create(), x, spec)["high_map"], 1, 200).view(2, 100).bool()
    for sample in range(2):
        assert_ranked(flags[sample].tolist(), x[:, sample].reshape(100, 64), 0.8)  # one "token" per tile


@pytest.mark.parametrize("percent", range(0, 101, 1))
def test_the_share_is_exact_and_ties_go_to_lower_indices(percent):
    """k = floor(p·S·M) for the decimal p: 0.29 of 100 tiles are 29 although 0.29 · 100 < 29 in binary."""
    x = torch.ones(25, 2, 256)
    spec = TensorSpec.of(x, sample_dim=1)
    compressor = create(high_fraction=percent / 100)
    high_map = unpack_bits(parts_of(compressor, x, spec)["high_map"], 1, 200).view(2, 100)
    assert high_map.tolist() == [[1] * percent + [0] * (100 - percent)] * 2


def test_the_share_is_rounded_down():
    for fraction, high in ((0.99, 6), (0.999999, 6), (1.0, 7), (1 / 7, 0), (0.15, 1), (1e-9, 0)):
        parts = parts_of(create(high_fraction=fraction), torch.ones(7, 64))
        assert unpack_bits(parts["high_map"], 1, 7).tolist() == [1] * high + [0] * (7 - high)


@pytest.mark.parametrize("size", [None, 128, "token"])
def test_samples_do_not_know_of_each_other(size):
    compressor = create(allocation_size=size)
    x = normal((10, 4, 200), 0) * torch.tensor([1e-6, 1.0, 30.0, 1e9])[:, None]
    decoded = round_trip(compressor, x, TensorSpec.of(x, sample_dim=1))
    for sample in range(4):
        alone = x[:, sample : sample + 1]
        assert equal_bits(decoded[:, sample : sample + 1], round_trip(compressor, alone, TensorSpec.of(alone, 1)))


def test_without_a_sample_dimension_all_rows_compete():
    x = torch.cat([torch.ones(5, 2, 64), torch.eye(64)[:5, None].expand(5, 2, 64)])
    together = unpack_bits(parts_of(create(high_fraction=0.5), x)["high_map"], 1, 20)
    assert together.tolist() == [1] * 10 + [0] * 10


def test_ranking_knows_no_amplitude_and_takes_a_spoiled_tile_for_zeros():
    x = normal((40, 256), 0, torch.bfloat16)
    x[::3, ::70] *= 8
    base = parts_of(create(), x)["high_map"]
    for exponent in (-99, 60, 122):  # 2^122 · 32 is half of the largest bfloat16
        assert torch.equal(parts_of(create(), x * 2.0**exponent)["high_map"], base)
    for bad in (math.nan, math.inf):
        spoiled, zeroed = x.clone(), x.clone()
        spoiled[::3, ::70] = bad
        zeroed.view(-1, 64)[spoiled.view(-1, 64).isfinite().logical_not().any(1)] = 0
        assert torch.equal(parts_of(create(), spoiled)["high_map"], parts_of(create(), zeroed)["high_map"])


@pytest.mark.parametrize("group,size,channels", [(64, None, 200), (64, 128, 356), (8, 24, 100), (64, "token", 200)])
def test_what_fills_no_window_has_high_bits(group, size, channels):
    compressor = create(group_size=group, allocation_size=size, high_bits=8, low_bits=2, high_fraction=0.0)
    x = normal((16, channels), 0)
    window = {None: group, "token": channels // group * group}.get(size, size)
    ranked = channels // window * window
    decoded = round_trip(compressor, x)
    assert sqnr(x[:, :ranked], decoded[:, :ranked]) < 15
    assert sqnr(x[:, ranked:], decoded[:, ranked:]) > 40


@pytest.mark.parametrize("high", range(2, 9))
def test_error_is_half_a_step_and_the_rounding_of_scale_and_zero(high):
    for low in range(2, high + 1):
        compressor = create(high_bits=high, low_bits=low, high_fraction=0.5, outlier_threshold=math.inf)
        x = integers((8, 64), 1000) + torch.arange(8)[:, None] * 300
        error = (round_trip(compressor, x) - x).abs().amax(dim=1)
        is_high = unpack_bits(parts_of(compressor, x)["high_map"], 1, 8).bool()
        assert is_high.sum() == 4
        levels = torch.where(is_high, 2.0**high - 1, 2.0**low - 1)
        extent = x.amax(dim=1) - x.amin(dim=1)
        assert (error <= extent / levels * 0.5 * (1 + 2.0**-7) + extent * 2.0**-8 + x.amin(dim=1).abs() * 2.0**-8).all()


def test_sqnr_grows_six_decibels_a_bit():
    x = normal((64, 4, 256), 0)
    values = [sqnr(x, round_trip(create(high_bits=b, low_bits=b), x)) for b in range(2, 9)]
    assert values[2] > 20.5  # INT4
    steps = [b - a for a, b in itertools.pairwise(values)]
    assert all(5.5 < step < 8.0 for step in steps)


def test_minus_zero_is_zero():
    """Which of the two a minimum returns depends on the device; the bytes must not."""
    zeros = torch.tensor([0.0, -0.0])
    for x in (zeros.repeat(4, 32), torch.where(integers((4, 64)) > 50, 1.0, zeros.repeat(4, 32)), -zeros.repeat(4, 32)):
        compressor = create()
        spec = TensorSpec.of(x)
        assert torch.equal(compressor.compress(x, spec), compressor.compress(x + 0.0, spec))


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"group_size": 48}, "group_size"),
        ({"allocation_size": 32}, "multiple of group_size"),
        ({"allocation_size": 96}, "multiple of group_size"),
        ({"allocation_size": 0}, "multiple of group_size"),
        ({"allocation_size": "row"}, "token"),
        ({"high_bits": 3, "low_bits": 4}, "must not exceed"),
        ({"high_bits": 9}, "high_bits"),
        ({"low_bits": 1}, "low_bits"),
        ({"high_fraction": 1.01}, "high_fraction"),
        ({"high_fraction": math.nan}, "high_fraction"),
        ({"outlier_threshold": -1.0}, "outlier_threshold"),
        ({"outlier_threshold": math.nan}, "outlier_threshold"),
        ({"groups": 64}, "groups"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_honoured_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        create(**settings)


@pytest.mark.parametrize("shape,sample_dim", [((1, 70_000, 64), 1), ((2**27, 2048), None)], ids=str)
def test_messages_beyond_the_kernels_counts_are_refused(shape, sample_dim):
    with pytest.raises(ValueError, match="in parts"):
        registry.create("tah_quant").layout(TensorSpec(shape, torch.bfloat16, sample_dim))
