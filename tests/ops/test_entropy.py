"""The entropy that ranks windows of tiles."""

import pytest
import torch

from megatron_compress.ops.entropy import MAX_KEY, ranking_key, window_entropy
from tests.strategies import normal

# In bits: of the logarithm of a sum; and how far those of elements, linear between powers of two, may lie below log2.
SUM_ERROR = 8.8e-4
ELEMENT_ERROR = 0.0861


def bits(x):
    return 256 * window_entropy(x).double()


@pytest.mark.parametrize("tiles", [1, 3, 8])
@pytest.mark.parametrize("n", [2, 8, 64, 100, 4096])
def test_entropy(tiles, n):
    x = normal((50, tiles, n), 0) * torch.exp(normal((50, tiles, n), 1))
    p = x.double().abs() / x.double().abs().sum(dim=(1, 2), keepdim=True)
    expected = -(p * p.log2()).sum(dim=(1, 2))
    error = bits(x) - expected
    assert error.min() >= -SUM_ERROR
    assert error.max() <= ELEMENT_ERROR + SUM_ERROR
    if n >= 64:  # much alike in all windows of one kind
        assert error.std() <= 0.012


def test_entropy_of_simple_tiles():
    assert bits(torch.zeros(1, 1, 64)).item() == 0
    assert bits(-torch.ones(1, 1, 64)).item() == 6
    assert bits(torch.eye(64)[3:4, None]).item() == 0
    # log2 3 is taken for 1.5.
    assert bits(torch.tensor([[[3.0, 1.0]]])).item() == pytest.approx(2 - 0.75 * 1.5, abs=SUM_ERROR)


@pytest.mark.parametrize("exponent", [-80, -60, 60, 99])
def test_a_power_of_two_changes_no_bit(exponent):
    x = normal((100, 3, 64), 0)
    assert torch.equal(window_entropy(x * 2.0**exponent), window_entropy(x))


def test_keys_span_their_range():
    x = torch.stack((torch.ones(4, 16), torch.zeros(4, 16), torch.eye(64)[5].view(4, 16)))
    assert ranking_key(x).tolist() == [MAX_KEY, 0, 0]
    keys = ranking_key(torch.exp(3 * normal((100, 4, 16), 0)))
    assert keys.min() > 0
    assert keys.max() < MAX_KEY


def test_the_largest_values_have_a_finite_entropy():
    x = torch.full((1, 1024, 64), torch.finfo(torch.float32).max)
    assert bits(x).item() == pytest.approx(16, abs=1e-3)
