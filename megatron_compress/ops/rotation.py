"""Orthonormal Hadamard rotations of any length: H_K ⊗ H_{2^m}, or blocks of a power of two (METHODS §1.2)."""

from __future__ import annotations

from functools import cache

import torch

from megatron_compress.ops.hadamard import hadamard_block, hadamard_transform

# Orders above are left to blocks: the dense factor costs K multiplications an element.
_MAX_ORDER = 256


def rotate(x: torch.Tensor) -> torch.Tensor:
    """X·R over the last dimension in float32; R is orthonormal and depends on the length n only.

    n = 2^m gives H_n / √n. n = K·2^m gives (H_K ⊗ H_{2^m}) / √n where Paley's constructions know an H_K. Other
    lengths go in blocks of the largest power of two that divides them (11008 = 43 · 256 in blocks of 256).

    Args:
        x: [..., n], any floating dtype and strides.

    Returns:
        [..., n] float32.
    """
    return _apply(x, transposed=False)


def unrotate(x: torch.Tensor) -> torch.Tensor:
    """X·Rᵀ over the last dimension, which takes `rotate` back up to rounding; as `rotate` otherwise."""
    return _apply(x, transposed=True)


def rotation_order(length: int) -> tuple[int, int]:
    """(K, 2^m) of the rotation for `length`; K = 1 where it is a power of two or goes in blocks of 2^m."""
    power = hadamard_block(length)
    odd = length // power
    order = 4 * odd
    if odd > 1 and power >= 4 and order <= _MAX_ORDER and _construction(order):
        return order, power // 4
    return 1, power


def _apply(x: torch.Tensor, transposed: bool) -> torch.Tensor:
    length = x.shape[-1]
    order, power = rotation_order(length)
    blocks = hadamard_transform(x.float().reshape(-1, power)) * (order * power) ** -0.5
    if order > 1:
        matrix = paley_matrix(order).to(x.device)
        blocks = (matrix if transposed else matrix.t()) @ blocks.view(-1, order, power)
    return blocks.view(x.shape)


@cache
def paley_matrix(order: int) -> torch.Tensor:
    """A Hadamard matrix by Paley's first or second construction, [order, order] float32 of ±1.

    Raises:
        ValueError: neither order − 1 ≡ 3 (mod 4) nor order / 2 − 1 ≡ 1 (mod 4) is a prime.
    """
    kind = _construction(order)
    if not kind:
        raise ValueError(f"no Paley construction over a prime field has order {order}; use blocks of a power of two")
    q = order - 1 if kind == 1 else order // 2 - 1
    squares = {i * i % q for i in range(1, q)}
    signs = [0.0, *(1.0 if i in squares else -1.0 for i in range(1, q))]
    jacobsthal = torch.tensor([[signs[(i - j) % q] for j in range(q)] for i in range(q)])
    conference = torch.zeros(q + 1, q + 1)
    conference[0, 1:] = 1
    conference[1:, 0] = -1 if kind == 1 else 1
    conference[1:, 1:] = jacobsthal
    if kind == 1:
        return conference + torch.eye(order)
    one, other = torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.tensor([[1.0, -1.0], [-1.0, -1.0]])
    return torch.kron(conference, one) + torch.kron(torch.eye(q + 1), other)


def _construction(order: int) -> int:
    """1 or 2, Paley's construction that gives this order, or 0."""
    if order % 4 == 0 and _is_prime(order - 1):
        return 1
    half = order // 2 - 1
    return 2 if order % 4 == 0 and half % 4 == 1 and _is_prime(half) else 0


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))
