"""The numerics contract (DESIGN D9) and determinism, for every registered compressor."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_compress.wire import FLOAT_DTYPES, TensorSpec
from tests.strategies import (
    LOSSY,
    all_compressors,
    equal_bits,
    extremes,
    finite_bits,
    integers,
    label,
    lossy_compressors,
    normal,
    round_trip,
    scopes,
    seeds,
    specs,
    sqnr,
)

SHAPES = [(), (0,), (3, 0), (0, 5), (2, 0, 8), (1,), (7,), (1000,), (1, 1, 1), (3, 1), (5, 2, 100), (2, 3, 1, 65)]
few = settings(max_examples=15)


@all_compressors
@few
@given(
    spec=specs(),
    values=st.sampled_from([finite_bits, extremes]),
    seed=seeds,
    out_dtype=st.sampled_from([*FLOAT_DTYPES, torch.float64]),
)
def test_finite_in_finite_out(compressor, spec, values, seed, out_dtype):
    x = values(spec, seed)
    own = round_trip(compressor, x, spec)
    assert own.dtype == spec.dtype
    assert own.isfinite().all()
    if not compressor.exact:
        other = round_trip(compressor, x, spec, out_dtype)
        assert other.dtype == out_dtype
        assert other.isfinite().all()


@all_compressors
@few
@given(spec=specs(min_size=1), seed=seeds)
def test_a_tile_of_zeros_decodes_to_zeros(compressor, spec, seed):
    ids = scopes(compressor, spec)
    if ids is None:
        ids = torch.zeros(spec.shape)
    tile = ids == ids.reshape(-1)[seed % spec.numel]
    zeros = torch.tensor([0.0, -0.0])[torch.arange(spec.numel).view(spec.shape) % 2].to(spec.dtype)
    for values in (normal(spec.shape, seed, spec.dtype), finite_bits(spec, seed)):
        decoded = round_trip(compressor, torch.where(tile, zeros, values), spec)
        assert (decoded[tile] == 0).all()


@all_compressors
@few
@given(
    spec=specs(min_size=1), seed=seeds, bad=st.sampled_from([math.nan, math.inf, -math.inf]), count=st.integers(1, 3)
)
def test_a_non_finite_element_spoils_its_own_tile_and_no_other(compressor, spec, seed, bad, count):
    """The others decode to the same bits as if that tile were zeros (TAH-Quant ranks tiles against each other)."""
    x = normal(spec.shape, seed, spec.dtype)
    where = torch.zeros(spec.numel, dtype=torch.bool)
    where[torch.randperm(spec.numel, generator=torch.Generator().manual_seed(seed))[:count]] = True
    where = where.view(spec.shape)
    decoded = round_trip(compressor, torch.where(where, bad, x).to(spec.dtype), spec)
    spoiled = ~decoded.isfinite()
    clean = round_trip(compressor, torch.where(spoiled, 0.0, x), spec)
    ids = scopes(compressor, spec)
    assert spoiled[where].all()
    assert equal_bits(decoded[~spoiled], clean[~spoiled])
    if ids is not None:
        assert torch.equal(spoiled, torch.isin(ids, ids[where]))
    if compressor.exact:
        assert equal_bits(decoded[where], torch.full_like(decoded[where], bad))


@all_compressors
@few
@given(spec=specs((torch.float32, torch.bfloat16), 1), seed=seeds)
def test_error_does_not_depend_on_amplitude(compressor, spec, seed):
    """Each tile scaled by a power of two of its own, all decoded values are scaled to the bit.

    Tiles reach 1e±30 then. Where tiles are ranked by groups of several, or unknown, all are scaled alike.
    """
    exponents = torch.randint(-99, 100, (spec.numel,), generator=torch.Generator().manual_seed(seed))
    ids = scopes(compressor, spec)
    if ids is None or getattr(compressor.settings, "allocation_size", None):
        ids = torch.zeros(spec.shape, dtype=torch.int64)
    scale = (exponents[ids] + 127 << 23).int().view(torch.float32)
    x = integers(spec.shape, 127).roll(seed % 1000) / 64
    decoded = round_trip(compressor, x.to(spec.dtype), spec, torch.float32)
    assert equal_bits(round_trip(compressor, (x * scale).to(spec.dtype), spec, torch.float32), decoded * scale)


@lossy_compressors
@pytest.mark.parametrize(
    "dtype,amplitudes",
    [
        (torch.float32, (1e-30, 3e-17, 1e-4, 7e10, 1e30)),
        (torch.bfloat16, (1e-30, 3e-17, 1e-4, 7e10, 1e30)),
        (torch.float16, (5e-4, 3e-2, 5e2, 1.2e4)),
    ],
    ids=str,
)
def test_sqnr_does_not_depend_on_amplitude(compressor, dtype, amplitudes):
    x = normal((64, 512), 0)
    # Groups of one element have no error but float32's own, which varies.
    base = min(60, sqnr(x, round_trip(compressor, x)))
    for amplitude in amplitudes:
        scaled = (x * amplitude).to(dtype)
        assert scaled.isfinite().all()
        decoded = round_trip(compressor, scaled, dtype=torch.float32)
        assert min(60, sqnr(scaled, decoded)) == pytest.approx(base, abs=0.2)


@all_compressors
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_travels(compressor, shape):
    for dtype, sample_dim in itertools.product(FLOAT_DTYPES, [None, *range(len(shape) - 1)]):
        x = normal(shape, 3, dtype)
        spec = TensorSpec(shape, dtype, sample_dim)
        payload = compressor.compress(x, spec)
        assert payload.shape == (compressor.payload_bytes(spec),)
        assert (payload.numel() == 0) == (x.numel() == 0)
        decoded = compressor.decompress(payload, spec, torch.empty(shape, dtype=dtype))
        if x.numel():
            assert (decoded.double() - x.double()).abs().max() <= x.double().abs().max()


@all_compressors
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_strides_do_not_matter(compressor, dtype):
    base = normal((4, 3, 130), 0, dtype)
    for x in (base.transpose(0, 2), base[::2, :, ::3], base[:, 1], base[:1].expand(5, 3, 130), base.permute(2, 0, 1)):
        spec = TensorSpec.of(x, sample_dim=1 if x.dim() == 3 else None)
        payload = compressor.compress(x, spec)
        assert torch.equal(payload, compressor.compress(x.contiguous(), spec))
        plain = compressor.decompress(payload, spec, torch.empty(spec.shape, dtype=dtype))
        wide = torch.full((*spec.shape[:-1], 2 * spec.shape[-1]), 7.0, dtype=dtype)
        for out in (torch.empty(spec.shape[::-1], dtype=dtype).permute(*range(x.dim())[::-1]), wide[..., ::2]):
            assert compressor.decompress(payload, spec, out) is out
            assert equal_bits(out, plain)
        assert (wide[..., 1::2] == 7).all()


@all_compressors
def test_decodes_into_a_leaf_that_requires_grad(compressor):
    x = normal((4, 2, 70), 0).requires_grad_()
    spec = TensorSpec.of(x, sample_dim=1)
    leaf = torch.zeros(spec.shape, requires_grad=True)
    payload = compressor.compress(x, spec)
    compressor.decompress(payload, spec, leaf)
    assert not payload.requires_grad
    assert leaf.is_leaf
    assert leaf.grad_fn is None
    assert equal_bits(leaf.detach(), round_trip(compressor, x.detach(), spec))


@all_compressors
@few
@given(spec=specs(min_size=1), seed=seeds)
def test_the_same_tensor_gives_the_same_bytes_and_all_are_written(compressor, spec, seed):
    x = normal(spec.shape, seed, spec.dtype)
    before = x.clone()
    payloads = []
    for poison in (0x00, 0xFF):
        # A slot of a larger buffer, as in a gather: what lies around it must stay.
        slots = torch.full((3, compressor.payload_bytes(spec)), poison, dtype=torch.uint8)
        payloads.append(compressor.compress(x, spec, slots[1]))
        assert (slots[::2] == poison).all()
    assert torch.equal(*payloads)
    assert torch.equal(payloads[0], compressor.compress(x, spec))
    assert equal_bits(x, before)
    sent = payloads[0].clone()
    first, second = (compressor.decompress(sent, spec, torch.empty_like(x)) for _ in range(2))
    assert equal_bits(first, second)
    assert torch.equal(sent, payloads[0])


@all_compressors
@few
@given(spec=specs(min_size=1), seed=seeds, ranks=st.integers(2, 4))
def test_sums_of_payloads_are_sums_of_what_they_decode_to(compressor, spec, seed, ranks):
    """Some compressors add before they rotate back: equal but for the rounding of sums, of halves in fp4_quant."""
    xs = [normal(spec.shape, seed + rank, spec.dtype) for rank in range(ranks)]
    payloads = torch.stack([compressor.compress(x, spec) for x in xs])
    decoded = [compressor.decompress(payload, spec, torch.empty(spec.shape)) for payload in payloads]
    total = compressor.decompress_sum(payloads, spec, torch.empty(spec.shape))
    precision = 2.0**-9 if compressor.name == "fp4_quant" else 2.0**-20
    assert (total - sum(decoded)).norm() <= precision * sum(d.norm() for d in decoded)
    # One more quantization, of the sum: no worse than quantizing the sum itself.
    again = compressor.decompress(compressor.requantize(payloads, spec), spec, torch.empty(spec.shape))
    direct = round_trip(compressor, total.to(spec.dtype), spec, torch.float32)
    assert (again - total).norm() <= 1.3 * (direct - total).norm() + 1e-2 * total.norm()


@pytest.mark.parametrize(
    "compressor",
    [c for c in LOSSY if 512 % c.granularity == 0 and getattr(c.settings, "high_fraction", 1.0) in (0.0, 1.0)],
    ids=label,
)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16, 37])
def test_a_tile_decodes_alike_wherever_it_lies(compressor, rows):
    """Vectorized loops and their tails must round alike."""
    row = normal((512,), 0) * torch.exp(3 * normal((512,), 1))
    decoded = round_trip(compressor, row.repeat(rows, 1))
    assert equal_bits(decoded, round_trip(compressor, row.view(1, 512)).expand_as(decoded))


@all_compressors
def test_wrong_tensors_and_payloads_are_refused(compressor):
    x = normal((4, 64), 0)
    spec = TensorSpec.of(x)
    payload = compressor.compress(x, spec)
    with pytest.raises(ValueError, match="spec"):
        compressor.compress(x.bfloat16(), spec)
    with pytest.raises(ValueError, match="spec"):
        compressor.compress(x.view(64, 4), spec)
    for wrong in (payload[:-1], payload.view(torch.int8), payload.view(-1, 8)):
        with pytest.raises(ValueError, match="payload"):
            compressor.decompress(wrong, spec, torch.empty_like(x))
        with pytest.raises(ValueError, match="payload"):
            compressor.compress(x, spec, wrong)
    with pytest.raises(ValueError, match="shape"):
        compressor.decompress(payload, spec, x.view(64, 4))
