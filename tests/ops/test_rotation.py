"""Rotations of any length: orthonormal, spreading, undone to rounding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_compress.ops.hadamard import hadamard_transform
from megatron_compress.ops.rotation import paley_matrix, rotate, rotation_order, unrotate
from tests.strategies import normal

# METHODS §1.2 names these; the prime fields have all but 52, 100, 156 and 172.
PALEY = [12, 20, 28, 36, 44, 60, 108, 140]


@pytest.mark.parametrize("order", PALEY)
def test_paley_matrices_are_hadamard_matrices(order):
    matrix = paley_matrix(order)
    assert matrix.abs().eq(1).all()
    assert torch.equal(matrix @ matrix.t(), order * torch.eye(order))


@pytest.mark.parametrize("order", [6, 52, 172])
def test_other_orders_are_refused(order):
    with pytest.raises(ValueError, match=f"order {order}"):
        paley_matrix(order)


@pytest.mark.parametrize(
    "length,order",
    [
        (4096, (1, 4096)),
        (14336, (28, 512)),
        (5632, (44, 128)),
        (576, (36, 16)),
        (1536, (12, 128)),
        (11008, (1, 256)),
        (18944, (148, 128)),
        (6, (1, 2)),
        (7, (1, 1)),
    ],
)
def test_lengths_of_models(length, order):
    assert rotation_order(length) == order
    x = normal((3, length), 0)
    assert torch.allclose(rotate(x).norm(dim=1), x.norm(dim=1), rtol=1e-5)
    assert torch.allclose(unrotate(rotate(x)), x, atol=2e-5)


@given(st.integers(1, 300))
def test_is_an_orthonormal_matrix(length):
    matrix = rotate(torch.eye(length))
    assert torch.allclose(matrix @ matrix.t(), torch.eye(length), atol=1e-5)
    assert torch.allclose(unrotate(torch.eye(length)), matrix.t(), atol=1e-6)


def test_powers_of_two_are_the_plain_transform():
    x = normal((5, 64), 1)
    assert torch.equal(rotate(x), hadamard_transform(x) / 8)
    assert torch.equal(rotate(x.t().contiguous().t()), rotate(x))


def test_an_outlier_is_spread_over_its_block():
    x = torch.zeros(1, 576)
    x[0, 100] = 24.0
    assert torch.allclose(rotate(x).abs(), torch.ones(1, 576), atol=1e-5)
