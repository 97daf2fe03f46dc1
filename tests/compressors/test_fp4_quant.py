"""FP4Quant: the two scales, the codes, the paper's equations (METHODS §5.2, A10–A20)."""

import itertools
import math

import pytest
import torch
from pydantic import ValidationError

from megatron_compress import registry
from megatron_compress.ops.bits import unpack_bits
from megatron_compress.ops.minifloat import E2M1, E3M0
from tests.strategies import equal_bits, integers, normal, parts_of, round_trip, sqnr

FORMATS = {"e2m1": E2M1, "e3m0": E3M0}
GROUP_SIZES = [32, 64, 128, 256, 512]
HALF = 2.0**-11  # rounding to half precision, in which groups are rotated


def create(**settings):
    return registry.create("fp4_quant", **settings)


def student_t(count: int, freedom: int, seed: int) -> torch.Tensor:
    """Heavy tails: Student's t of `freedom` degrees."""
    squares = normal((freedom, count), seed + 1).square().mean(dim=0)
    return normal((count,), seed) / squares.sqrt()


def codes_of(compressor, x: torch.Tensor) -> torch.Tensor:
    return unpack_bits(parts_of(compressor, x)["codes"], 4, x.numel())


def sylvester(n: int) -> torch.Tensor:
    index = torch.arange(n)
    parity = sum((index[:, None] & index) >> bit & 1 for bit in range(10)) % 2
    return 1.0 - 2.0 * parity.double()


def test_alpha_changes_no_more_than_one_code_in_a_hundred_thousand():
    """METHODS A12: the second scale adapts to α, so the codes with and without it differ in rounding alone."""
    total = differing = 0
    count = 32_768 + 100
    inputs = {"normal": normal((count,), 0), "t2": student_t(count, 2, 1), "t4": student_t(count, 4, 3)}
    for values, dtype, amplitude, group, fmt in itertools.product(
        inputs.values(), (torch.float32, torch.bfloat16), (1e-6, 1.0, 3e5), GROUP_SIZES, FORMATS
    ):
        x = (values * amplitude).to(dtype)
        dual, single = (codes_of(create(group_size=group, format=fmt, scales=s), x) for s in ("dual", "single"))
        total += count
        differing += int((dual != single).sum())
    assert total > 2_000_000
    assert differing <= 1e-5 * total


@pytest.mark.parametrize("group", GROUP_SIZES)
def test_alpha_does_not_change_the_error_where_values_tie(group):
    """Rotated integers and sparse tensors have values exactly between two codes; α moves those either way."""
    for x in (integers((128, 512), 4), normal((128, 512), 0, torch.bfloat16) * (integers((128, 512), 100) > 90)):
        dual, single = (sqnr(x, round_trip(create(group_size=group, scales=s), x)) for s in ("dual", "single"))
        assert dual == pytest.approx(single, abs=0.05)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("group", GROUP_SIZES)
def test_dual_follows_the_papers_equations(fmt, group):
    """Eqs. (1)–(3) in double precision with a dense matrix: α and s to half precision, codes but for near-ties.

    On the wire α holds the power of two by which a group is scaled, so that ε = 1e-6 is below the mean square.
    """
    x = normal((64, group), 0) * torch.exp(normal((64, group), 1))
    top = FORMATS[fmt].max
    parts = parts_of(create(group_size=group, format=fmt), x)

    alpha = top / x.double().square().mean(dim=1).sqrt()
    h = (x.double() * alpha[:, None]) @ sylvester(group) / math.sqrt(group)
    scale = h.abs().amax(dim=1) / top
    assert torch.allclose(parts["alphas"].double(), alpha, rtol=HALF)
    assert torch.allclose(parts["scales"].double(), scale, rtol=math.log2(group) * HALF)

    table = torch.tensor([*FORMATS[fmt].magnitudes, *(-m for m in FORMATS[fmt].magnitudes)], dtype=torch.float64)
    codes = unpack_bits(parts["codes"], 4, x.numel()).view(x.shape)
    distance = (h / scale[:, None]).unsqueeze(-1) - table
    chosen = distance.gather(-1, codes.long().unsqueeze(-1)).squeeze(-1).abs()
    # A tie is decided in half precision, behind log2(group) rounded additions.
    assert (chosen <= distance.abs().amin(dim=-1) + top * math.log2(group) * HALF).all()

    decoded = (table[codes.long()] * scale[:, None]) @ sylvester(group) / math.sqrt(group) / alpha[:, None]
    actual = round_trip(create(group_size=group, format=fmt), x).double()
    assert (actual - decoded).abs().max() <= math.log2(group) * HALF * x.abs().max()


@pytest.mark.parametrize("fmt", FORMATS)
def test_single_decodes_like_dual(fmt):
    x = normal((100, 512), 0)
    for group in GROUP_SIZES:
        dual, single = (round_trip(create(group_size=group, format=fmt, scales=s), x) for s in ("dual", "single"))
        assert torch.allclose(dual, single, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scales", ["dual", "single"])
@pytest.mark.parametrize("fmt,floor", [("e2m1", 18.0), ("e3m0", 13.0)])
def test_sqnr(fmt, floor, scales):
    x = normal((100, 512), 0)
    for group in GROUP_SIZES:
        assert sqnr(x, round_trip(create(group_size=group, format=fmt, scales=scales), x)) > floor


def test_largest_value_never_saturates():
    """The scale is the group's own: a constant group is one code, decoded to half precision."""
    for group, scales in itertools.product(GROUP_SIZES, ("dual", "single")):
        x = torch.full((2, group), -3.7)
        assert torch.allclose(round_trip(create(group_size=group, scales=scales), x), x, rtol=HALF)


def test_groups_run_across_rows_and_the_last_is_short():
    compressor = create(group_size=64, scales="single")
    x = normal((3, 50), 0)
    flat = x.view(-1)
    expected = torch.cat([round_trip(compressor, part) for part in flat.split(64)])
    assert equal_bits(round_trip(compressor, x), expected.view(3, 50))


@pytest.mark.parametrize("length", [1, 2, 3, 6, 12, 44, 63])
def test_short_groups_are_rotated_in_blocks(length):
    """Blocks of the largest power of two that divides the length: values that E2M1 holds come back after H."""
    block = length & -length
    coefficients = torch.tensor([6.0, -3, 2, 0.5, 0, 1, -1.5, 4]).repeat(8)[:length].double()
    x = (coefficients.view(-1, block) @ sylvester(block) / block).reshape(-1).float()
    for scales in ("dual", "single"):
        assert torch.allclose(round_trip(create(scales=scales), x), x, atol=6 * HALF)


def test_the_papers_clips_are_kept_as_a_flag():
    x = normal((8, 64), 0)
    literal = create(paper_clips=True)
    assert sqnr(x, round_trip(literal, x)) > 18
    assert (parts_of(literal, x * 1e-20)["scales"] == 1e-12).all()
    assert sqnr(x * 1e-20, round_trip(literal, x * 1e-20)) < 3
    assert (parts_of(literal, x * 1e-5)["alphas"] == 1e3).all()
    assert (parts_of(literal, x * 1e9)["alphas"] == 1e-3).all()
    assert sqnr(x * 1e16, round_trip(literal, x * 1e16)) < 3
    plain = create()
    assert sqnr(x * 1e16, round_trip(plain, x * 1e16)) > 18


@pytest.mark.parametrize("amplitude", [1e-20, 1e-3, 1.0, 1e12])
def test_scaling_by_a_power_of_two_only_moves_alpha(amplitude):
    power = 2.0 ** round(math.log2(amplitude))
    x = integers((10, 64))
    parts, scaled = parts_of(create(), x), parts_of(create(), x * power)
    assert torch.equal(parts["codes"], scaled["codes"])
    assert torch.equal(parts["scales"], scaled["scales"])
    assert torch.equal(parts["alphas"], scaled["alphas"] * power)


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"group_size": 16}, "group_size"),
        ({"format": "e4m3"}, "format"),
        ({"scales": "none"}, "scales"),
        ({"scales": "single", "paper_clips": True}, "paper_clips"),
        ({"group": 64}, "group"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_honoured_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        create(**settings)
