"""The order of a sum decides its last bit (DESIGN D7)."""

import numpy as np
import pytest
import torch

from megatron_compress.ops.reduce import pairwise_sum
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
