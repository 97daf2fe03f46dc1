"""Fixed point: no gradient scale, no clipping, no floor (METHODS §4, A8, A9)."""

import pytest
import torch
from pydantic import ValidationError

from megatron_compress import registry
from megatron_compress.wire import TensorSpec
from tests.strategies import equal_bits, integers, normal, parts_of, round_trip, sqnr

ALL_BITS = range(2, 17)
GROUPS = pytest.mark.parametrize("group", [None, 64], ids=["channel", "group"])


def create(bits: int, group: int | None = None):
    return registry.create("fixed_point", bits=bits, group_size=group)


def aq_sgd(x: torch.Tensor, bits: int, c: float = 1.0) -> torch.Tensor:
    """AQ-SGD's formula (METHODS §4) on c·x, divided by c: float16 scale per channel, 1e-6 added, top code clipped."""
    top = 2 ** (bits - 1)
    scale = (x * c).abs().amax(dim=(0, 1), keepdim=True).half().float()
    codes = (x * c / (scale + 1e-6) * top).round().clamp(-top, top - 1)
    return codes / top * scale / c


def relative_error(x: torch.Tensor, decoded: torch.Tensor) -> float:
    return float((decoded.double() - x.double()).norm() / x.double().norm())


@GROUPS
@pytest.mark.parametrize("bits", ALL_BITS)
def test_the_gradient_scale_has_no_effect(bits, group):
    """compress(c·x) / c is compress(x) to the bit: the papers' constant c is not needed."""
    compressor = create(bits, group)
    x = normal((16, 2, 128), 0) * 1e-6
    base, base_codes = round_trip(compressor, x), parts_of(compressor, x)["codes"]
    for exponent in (-60, -1, 1, 16, 100):
        scaled = x * 2.0**exponent
        assert torch.equal(parts_of(compressor, scaled)["codes"], base_codes)
        assert equal_bits(round_trip(compressor, scaled), base * 2.0**exponent)


@pytest.mark.parametrize("bits", [6, 8, 10])
def test_small_gradients_keep_their_precision(bits):
    x = normal((64, 4, 256), 0)
    compressor = create(bits)
    base = relative_error(x, round_trip(compressor, x))
    assert base < {6: 0.035, 8: 0.009, 10: 0.0022}[bits]
    for rms in (1e-5, 1e-6, 1e-7, 1e-12, 1e-25):
        assert relative_error(x * rms, round_trip(compressor, x * rms)) == pytest.approx(base, rel=0.05)


def test_the_faults_of_aq_sgd_that_this_avoids():
    """Its floor under small gradients, whatever the bits, and its overflow above float16's range."""
    x = normal((64, 4, 256), 0)
    for bits in (8, 10):
        assert relative_error(x * 1e-5, aq_sgd(x * 1e-5, bits)) > 0.02
        assert relative_error(x * 1e-6, aq_sgd(x * 1e-6, bits)) > 0.15
        assert relative_error(x * 1e-7, aq_sgd(x * 1e-7, bits)) > 0.6
        assert relative_error(x * 1e-6, aq_sgd(x * 1e-6, bits, c=2.0**16)) < 0.01
        assert not aq_sgd(x * 1e5, bits).isfinite().all()
        assert round_trip(create(bits), x * 1e5).isfinite().all()
        assert relative_error(x, round_trip(create(bits), x)) < 1.02 * relative_error(x, aq_sgd(x, bits))


@GROUPS
@pytest.mark.parametrize("bits", ALL_BITS)
def test_error_is_at_most_half_a_step(bits, group):
    for x in (normal((40, 192), 0), integers((40, 192)), torch.linspace(-1, 1, 7680).view(40, 192) ** 5):
        tiles = x if group is None else x.view(-1, group).t()
        error = (round_trip(create(bits, group), x) - x).abs()
        error = error if group is None else error.view(-1, group).t()
        step = tiles.abs().amax(dim=0) * (1 + 2.0**-7) / (2 ** (bits - 1) - 1)
        assert (error <= step * 0.501).all()


@GROUPS
@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("largest", [3.0, 3.003])
def test_neither_end_is_clipped(bits, group, largest):
    """±max|x| come back to the last bits where bfloat16 holds max|x|, and within half a step elsewhere."""
    x = normal((64, 64), 0).clamp(-2, 2)
    x[::2, ::2], x[1::2, 1::2] = largest, -largest
    compressor = create(bits, group)
    decoded = round_trip(compressor, x)
    tolerance = 1e-6 if largest == 3 else 0.51 * 3.02 / (2 ** (bits - 1) - 1)
    assert ((decoded - x)[x.abs() == largest].abs() <= tolerance).all()
    assert torch.equal(round_trip(compressor, -x), -decoded)


def test_the_scale_is_the_least_bfloat16_above():
    x = normal((1, 500), 0)
    scales = parts_of(create(8), x)["scales"]
    assert (scales >= x[0].abs()).all()
    below = (scales.view(torch.int16) - 1).view(torch.bfloat16)
    assert (below < x[0].abs()).all()
    exact = x.bfloat16()
    assert torch.equal(parts_of(create(8), exact)["scales"], exact[0].abs())


def test_a_channel_spans_all_rows():
    x = torch.ones(3, 2, 4) * torch.tensor([1.0, 10.0, 100.0, 0.0])
    x[2, 1] *= 2
    assert parts_of(create(8), x)["scales"].tolist() == [2.0, 20.0, 200.0, 2.0**-110]
    assert len(parts_of(create(8), x.reshape(-1))["scales"]) == 1
    assert equal_bits(round_trip(create(8), x), round_trip(create(8), x.view(6, 4)).view(3, 2, 4))


def test_groups_run_across_rows():
    x = normal((3, 50), 0)
    expected = torch.cat([round_trip(create(6), part) for part in x.view(-1).split(64)])
    assert equal_bits(round_trip(create(6, 64), x), expected.view(3, 50))


def test_a_large_channel_does_not_disturb_the_others():
    x = normal((100, 32), 0)
    loud = x.clone()
    loud[:, 5] *= 1e20
    kept = torch.arange(32) != 5
    assert equal_bits(round_trip(create(8), loud)[:, kept], round_trip(create(8), x)[:, kept])


@pytest.mark.parametrize("amplitude", [1e-4, 1.0, 1e4])
def test_sqnr(amplitude):
    """STYLE 22: 43 dB for 8 bits in groups of 128, 20 for 4 in 32, 18 for 4 in 128; bits 2 are ternary here."""
    x = normal((256, 512), 0) * amplitude
    for bits, group, floor in ((8, 128, 42.5), (4, 32, 19), (4, 128, 17), (10, 128, 54.5), (6, None, 29), (2, 32, 1.5)):
        assert sqnr(x, round_trip(create(bits, group), x)) > floor


def test_reductions_need_groups():
    assert "group_size" in create(8).refuse_axis("tensor")
    assert create(8).refuse_axis("pipeline") is None
    assert create(8, 64).refuse_axis("tensor") is None
    assert create(8, 64).granularity == 64


def test_zero_dimensional_messages_are_one_channel():
    spec = TensorSpec((), torch.float32)
    assert round_trip(create(2), torch.tensor(-5.0), spec).item() == -5.0


@pytest.mark.parametrize(
    "settings", [{"bits": 1}, {"bits": 17}, {"bits": 8.0}, {"group_size": 0}, {"scale": 2}], ids=str
)
def test_settings_that_cannot_be_honoured_are_refused(settings):
    with pytest.raises(ValidationError, match=next(iter(settings))):
        registry.create("fixed_point", **settings)
