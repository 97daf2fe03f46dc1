"""The butterflies against the dense Sylvester matrix."""

import pytest
import torch

from megatron_compress.ops.hadamard import hadamard_block, hadamard_transform
from tests.strategies import integers, normal


def sylvester(n: int) -> torch.Tensor:
    """H[i, j] = (−1)^popcount(i & j)."""
    return torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(n)] for i in range(n)])


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
def test_is_the_sylvester_matrix(n):
    assert torch.equal(hadamard_transform(torch.eye(n)), sylvester(n))
    x = integers((5, n))
    assert torch.equal(hadamard_transform(x), x @ sylvester(n))
    assert torch.equal(hadamard_transform(hadamard_transform(x)), n * x)


@pytest.mark.parametrize("n,block", [(1, 1), (3, 1), (6, 2), (12, 4), (40, 8), (96, 32), (65, 1), (192, 64)])
def test_other_lengths_go_in_blocks_without_padding(n, block):
    assert hadamard_block(n) == block
    x = integers((2, 3, n))
    expected = x.view(2, 3, n // block, block) @ sylvester(block)
    assert torch.equal(hadamard_transform(x), expected.view(2, 3, n))


def test_butterflies_run_over_growing_distances():
    """The order of additions decides the last bit; kernels rely on it (DESIGN D7)."""
    n = 64
    x = normal((8, n), 0)
    expected = x.clone()
    for distance in (1, 2, 4, 8, 16, 32):
        for i in range(n):
            if not i & distance:
                a, b = expected[:, i].clone(), expected[:, i + distance].clone()
                expected[:, i], expected[:, i + distance] = a + b, a - b
    assert torch.equal(hadamard_transform(x), expected)


def test_input_is_left_alone_and_strides_do_not_matter():
    x = normal((16, 4), 0).t()
    before = x.clone()
    assert torch.equal(hadamard_transform(x), hadamard_transform(x.contiguous()))
    assert torch.equal(x, before)
    assert hadamard_transform(torch.empty(0, 8)).shape == (0, 8)
