"""The reference gives the same bytes on CUDA as on the CPU (DESIGN D7)."""

import pytest
import torch

from megatron_compress import registry
from megatron_compress.wire import TensorSpec

pytestmark = pytest.mark.gpu


def awkward(shape, dtype):
    """Zero-mean, heavy-tailed, with tiles of zeros, of outliers, of tiny and huge values and of NaN."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(shape, generator=generator) / torch.rand(shape, generator=generator).clamp(min=1e-3)
    flat = x.view(-1)
    flat[:200] = 0
    flat[300] = 3e4
    flat[400:500] *= 1e-6 if dtype == torch.float16 else 1e-30
    flat[500:600] *= 1.0 if dtype == torch.float16 else 1e30
    flat[700] = float("nan")
    return x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", registry.names())
def test_bytes_and_bits_are_those_of_the_cpu(name, dtype):
    for shape, sample_dim in (((64, 4, 192), 1), ((1009,), None), ((37, 100), None)):
        compressor = registry.create(name)
        x = awkward(shape, dtype)
        spec = TensorSpec.of(x, sample_dim)
        on_cpu, on_gpu = compressor.compress(x, spec), compressor.compress(x.cuda(), spec)
        different = [s.name for s in compressor.layout_of(spec) if not _same(s, on_gpu.cpu(), on_cpu)]
        assert not different, f"sections differ: {different}"
        decoded = [compressor.decompress(p, spec, torch.empty_like(x, device=p.device)) for p in (on_cpu, on_gpu)]
        # A NaN's bits are the device's own; everything else is equal to the bit, signs of zeros included.
        bits = [d.cpu().nan_to_num(nan=7.0, posinf=torch.inf, neginf=-torch.inf).view(torch.uint8) for d in decoded]
        assert torch.equal(decoded[0].isnan(), decoded[1].cpu().isnan())
        assert torch.equal(*bits)


def _same(section, *payloads):
    return torch.equal(*(p[section.offset : section.offset + section.nbytes] for p in payloads))
