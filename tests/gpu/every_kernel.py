"""Launch every kernel on small, awkward tensors and compare with the CPU; to be run under compute-sanitizer:

compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.gpu.every_kernel
compute-sanitizer --tool racecheck --error-exitcode 1 python -m tests.gpu.every_kernel
"""

import torch

from megatron_compress.ops import extension, library
from megatron_compress.ops.hadamard import grouped_hadamard
from megatron_compress.wire import TensorSpec
from tests.gpu.test_kernels import COMPRESSORS
from tests.strategies import equal_bits, label, normal

SHAPES = [((9, 2, 264), 1), ((5, 130), None), ((1030,), None)]


def main() -> None:
    library.ready()
    assert not extension.status().startswith("reference"), extension.status()
    launched = 0
    for compressor in COMPRESSORS:
        for (shape, sample_dim), dtype in zip(SHAPES, (torch.bfloat16, torch.float32, torch.float16), strict=True):
            spec = TensorSpec(shape, dtype, sample_dim)
            xs = [normal(shape, seed, dtype) for seed in range(2)]
            on_cpu = torch.stack([compressor.compress(x, spec) for x in xs])
            on_gpu = torch.stack([compressor.compress(x.cuda(), spec) for x in xs])
            assert torch.equal(on_gpu.cpu(), on_cpu), f"{label(compressor)} {shape}: bytes differ"
            for call in (compressor.decompress_sum, lambda p, s, out, c=compressor: c.decompress(p[0], s, out)):
                outs = [call(p, spec, torch.empty(shape, dtype=dtype, device=p.device)).cpu() for p in (on_cpu, on_gpu)]
                assert equal_bits(*outs), f"{label(compressor)} {shape}: values differ"
            assert torch.equal(compressor.requantize(on_gpu, spec).cpu(), compressor.requantize(on_cpu, spec))
            launched += 1
    for group in (8, 64, 512):
        x = normal((3, 512), group).cuda()
        grouped_hadamard(x, torch.empty_like(x), group, 1.0)
    torch.cuda.synchronize()
    print(f"{launched} compressors and shapes, all equal to the CPU")


if __name__ == "__main__":
    main()
