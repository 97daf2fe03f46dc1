"""The order of a sum decides its last bit (DESIGN D7)."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from megatron_compress.ops.reduce import half_fma, pairwise_sum
from tests.strategies import normal


def tree(values: list[np.float32]) -> np.float32:
    """Adjacent pairs, level by level; an odd one out is carried up."""
    while len(values) > 1:
        odd = [values[-1]] if len(values) % 2 else []
        values = [a + b for a, b in zip(values[0::2], values[1::2], strict=False)] + odd
    return values[0]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 7, 8, 12, 33, 64, 100, 512])
def test_is_a_tree_of_adjacent_pairs(n):
    x = normal((20, n), n) * torch.exp(5 * normal((20, n), n + 1))
    expected = [float(tree(list(row))) for row in x.numpy()]
    assert pairwise_sum(x).tolist() == expected


def test_the_order_shows():
    assert pairwise_sum(torch.tensor([1.0, 1e8, -1e8, 1.0])).item() == 0
    assert pairwise_sum(torch.tensor([1e8, -1e8, 1.0, 1.0])).item() == 2


def test_leading_dimensions_stay():
    x = normal((3, 0, 8), 0)
    assert pairwise_sum(x).shape == (3, 0)
    assert torch.equal(pairwise_sum(normal((2, 3, 8), 1))[1, 2], pairwise_sum(normal((2, 3, 8), 1)[1, 2]))


def test_half_fma_rounds_once():
    """Against exact arithmetic, where float32 between would round a second time: sums just beside a half's midpoint."""
    a, b, c = (normal((20_000,), seed).half() for seed in range(3))
    b[::3] *= 2.0**-10
    c[::5] = (1 + torch.arange(len(c[::5])) % 1024 / 1024).half()
    a[::5], b[::5] = 2.0**-11, torch.where(torch.arange(len(b[::5])) % 2 == 0, 1 + 2.0**-10, 1.0).half()
    exact = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)]
    near = half_fma(a, b, c)
    for value, got in zip(exact, near.tolist(), strict=True):
        others = (np.nextafter(np.float16(got), np.float16(limit)) for limit in (-np.inf, np.inf))
        assert all(abs(Fraction(got) - value) <= abs(Fraction(float(other)) - value) for other in others)
    twice = (a.float() * b.float() + c.float()).half()
    assert (twice != near).any(), "the data has no case that two roundings get wrong"
