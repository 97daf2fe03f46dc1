"""FP8 E4M3 under one scale per group."""

import pytest
import torch
from pydantic import ValidationError

from megatron_compress import registry
from tests.strategies import equal_bits, normal, parts_of, round_trip, sqnr


def create(group: int = 256):
    return registry.create("fp8", group_size=group)


@pytest.mark.parametrize("group", [1, 32, 100, 256, 65536])
def test_codes_are_those_of_a_scaled_cast(group):
    x = normal((4, 300), 0) * torch.exp(4 * normal((4, 300), 1))
    parts = parts_of(create(group), x)
    for i, part in enumerate(x.view(-1).split(group)):
        largest = part.abs().max().double()
        assert float(parts["scales"][i]) == pytest.approx(float(largest / 448), rel=1e-6)
        codes = parts["codes"][i * group : i * group + len(part)].view(torch.float8_e4m3fn)
        expected = (part.double() * 448 / largest).float().to(torch.float8_e4m3fn)
        assert (codes.float() != expected.float()).sum() <= 1  # a near-tie of the last bit
        assert codes.float().abs().max() == 448


@pytest.mark.parametrize("group", [16, 256])
def test_error_of_every_element(group):
    """Half a step of a 3-bit mantissa relative to the element, or of the subnormals' step relative to the group."""
    x = normal((64, 256), 0) * torch.exp(4 * normal((64, 256), 1))
    error = (round_trip(create(group), x) - x).abs().view(-1, group)
    largest = x.abs().view(-1, group).amax(dim=1, keepdim=True)
    assert (error <= torch.maximum(x.abs().view(-1, group) * 2.0**-4, largest / 448 * 2.0**-10) * 1.00001).all()


@pytest.mark.parametrize("amplitude", [1e-4, 1.0, 1e4])
def test_sqnr(amplitude):
    x = normal((256, 512), 0) * amplitude
    for group in (32, 256, 4096):
        assert sqnr(x, round_trip(create(group), x)) > 31


def test_groups_run_across_rows():
    x = normal((3, 50), 0)
    expected = torch.cat([round_trip(create(64), part) for part in x.view(-1).split(64)])
    assert equal_bits(round_trip(create(64), x), expected.view(3, 50))


@pytest.mark.parametrize("group", [0, -1, 65537, 2.0])
def test_settings_that_cannot_be_honoured_are_refused(group):
    with pytest.raises(ValidationError, match="group_size"):
        create(group)
