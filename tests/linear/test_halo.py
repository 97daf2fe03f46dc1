"""The levels against plain products: equal without quantizers, within their noise with them; bytes that are saved."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_compress.linear.halo import halo_linear
from megatron_compress.linear.placement import LEVELS, Placement, Placements, placed_product, simulated_linear
from megatron_compress.ops.absmax import FORMATS, FP8, INT4, INT8
from tests.strategies import normal

# tokens, in, out: square, rectangular, and the awkward sizes of models, token counts that are no powers of two.
SIZES = [(64, 64, 64), (48, 32, 96), (96, 576, 192), (24, 11008, 32), (40, 64, 18944), (33, 18, 7)]
sizes = pytest.mark.parametrize("tokens,inputs,outputs", SIZES)
PLACEMENTS = [Placement(bool(i & 1), bool(i & 2), bool(i & 4)) for i in range(8)]


def run(layer, tokens, inputs, outputs, dtype=torch.float32):
    """Y, E_X and G."""
    x, weight = normal((tokens, inputs), 0).to(dtype), normal((outputs, inputs), 1).to(dtype) / inputs**0.5
    x[:, 0] *= 20  # an outlier channel
    x.requires_grad_()
    weight.requires_grad_()
    y = layer(x, weight)
    y.backward(normal((tokens, outputs), 2).to(dtype))
    return y.detach(), x.grad, weight.grad


def relative_error(ours, plain):
    return [((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(ours, plain, strict=True)]


def plain_linear(x, weight):
    return x @ weight.t()


@pytest.mark.parametrize("placement", PLACEMENTS, ids=repr)
def test_without_quantizers_every_placement_is_the_plain_product(placement):
    a, b = normal((12, 36), 0), normal((36, 20), 1)
    assert torch.allclose(placed_product(a, b, placement), a @ b, atol=1e-4)


@sizes
@pytest.mark.parametrize("level", [0, 1, 2])
def test_without_quantizers_every_level_is_the_plain_layer(level, tokens, inputs, outputs):
    ours = run(lambda x, w: simulated_linear(x, w, LEVELS[level], None), tokens, inputs, outputs)
    assert max(relative_error(ours, run(plain_linear, tokens, inputs, outputs))) < 1e-5


@sizes
@pytest.mark.parametrize("level", [0, 1, 2])
def test_within_the_noise_of_the_quantizers(level, tokens, inputs, outputs):
    plain = run(plain_linear, tokens, inputs, outputs)
    # E4M3 errs by 2⁻⁴ of a value at most, by about 0.027 in the mean square, and there are two operands.
    ours = run(lambda x, w: halo_linear(x, w, level, FP8), tokens, inputs, outputs)
    assert max(relative_error(ours, plain)) < 0.027 * 2**0.5 * 2
    if level:
        ours = run(lambda x, w: halo_linear(x, w, level, INT8), tokens, inputs, outputs)
        assert max(relative_error(ours, plain)) < 0.05


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("level", [0, 1, 2])
def test_is_what_the_simulator_computes(level, fmt):
    ours = run(lambda x, w: halo_linear(x, w, level, fmt), 96, 72, 40)
    simulated = run(lambda x, w: simulated_linear(x, w, LEVELS[level], fmt), 96, 72, 40)
    assert max(relative_error(ours, simulated)) < 1e-5


def test_hadamards_help_where_outliers_are():
    """INT4 with an outlier channel: rotated, Y errs less."""
    plain = run(plain_linear, 64, 256, 64)
    errors = [
        relative_error(run(lambda x, w, level=level: halo_linear(x, w, level, INT4), 64, 256, 64), plain)[0]
        for level in (0, 1)
    ]
    assert errors[1] < errors[0] / 1.5


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_saves_one_byte_an_element(level, fmt):
    saved = []
    x = normal((32, 64), 0).to(torch.bfloat16).requires_grad_()
    weight = normal((48, 64), 1).to(torch.bfloat16).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        halo_linear(x, weight, level, fmt)
    assert sum(t.nbytes for t in saved) == x.numel() + weight.numel() + 2 * 4


def test_recompute_gives_the_same_bits():
    layer = lambda x, w: halo_linear(x, w, 2, FP8)  # noqa: E731
    recomputed = run(lambda x, w: checkpoint(layer, x, w, use_reentrant=False), 48, 32, 96)
    assert all(torch.equal(a, b) for a, b in zip(run(layer, 48, 32, 96), recomputed, strict=True))


def test_frozen_weights_get_no_gradient():
    x, weight = normal((2, 8, 64), 0).requires_grad_(), normal((48, 64), 1)
    halo_linear(x, weight, 2, INT8).sum().backward()
    assert weight.grad is None and x.grad.shape == x.shape


def test_unknown_level():
    with pytest.raises(ValueError, match="level must be 0, 1 or 2"):
        halo_linear(torch.ones(2, 4), torch.ones(3, 4), 3, FP8)


def test_levels_are_those_of_the_paper():
    assert LEVELS[0] == Placements()
    assert LEVELS[2].error == Placement(left=True, right=True)
