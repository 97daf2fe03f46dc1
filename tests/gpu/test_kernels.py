"""The CUDA kernels give the bytes and bits of the reference on the CPU (DESIGN D7), and behave as torch ops."""

import itertools

import pytest
import torch

from megatron_compress import registry
from megatron_compress.ops import extension, library
from megatron_compress.ops.hadamard import grouped_hadamard
from megatron_compress.wire import FLOAT_DTYPES, TensorSpec
from tests.gpu.test_devices import awkward
from tests.strategies import LOSSY, equal_bits, extremes, finite_bits, integers, label, normal

pytestmark = pytest.mark.gpu

# Beside those that every property test covers: each group size, bits on both sides of a byte.
FURTHER = [
    *(("fp4_quant", {"group_size": g, "format": f, "scales": s})
      for g, f, s in itertools.product((32, 64, 128, 256, 512), ("e2m1", "e3m0"), ("dual", "single"))),
    *(("fp4_quant", {"group_size": g, "paper_clips": True}) for g in (32, 64, 512)),
    *(("fp8", {"group_size": g}) for g in (8, 16, 32, 64, 128, 512, 40)),
    *(("fixed_point", {"bits": b, "group_size": g}) for b, g in ((2, 8), (3, 16), (4, 32), (5, 128), (6, 256), (7, 64),
                                                                (8, 64), (9, 64), (12, 64), (15, 512), (16, 40))),
    *(("fixed_point", {"bits": b}) for b in (3, 4, 6, 12, 16)),
    *(("tah_quant", {"group_size": g, "outlier_threshold": t})
      for g, t in itertools.product((8, 16, 32, 64, 128, 256), (0.0, 2.0))),
    *(("tah_quant", {"high_bits": h, "low_bits": low, "high_fraction": 0.29}) for h, low in ((8, 7), (6, 5), (4, 2))),
    ("tah_quant", {"group_size": 64, "allocation_size": 192}),
    ("tah_quant", {"group_size": 8, "allocation_size": "token"}),
]  # fmt: skip
COMPRESSORS = [*LOSSY, *(registry.create(name, **settings) for name, settings in FURTHER)]
SHAPES = [((48, 3, 512), 1), ((5, 2, 2, 200), 2), ((37, 100), None), ((4099,), None), ((33, 4, 1032), 1), ((77,), None)]


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """The tests say nothing if the reference runs in the kernels' place."""
    library.ready()
    assert not extension.status().startswith("reference"), extension.status()


def inputs(spec):
    yield "awkward", awkward(spec.shape, spec.dtype) if spec.numel > 800 else normal(spec.shape, 1, spec.dtype)
    yield "bits", finite_bits(spec, 3)
    yield "extremes", extremes(spec, 4)
    yield "integers", (integers(spec.shape, 127) / 64).to(spec.dtype)
    yield "zeros", torch.zeros(spec.shape, dtype=spec.dtype)
    heavy = normal(spec.shape, 5) / normal(spec.shape, 6).abs().clamp(min=1e-3)
    for amplitude in (1e-30, 1e-4, 1.0, 1e30):
        if spec.dtype != torch.float16 or amplitude in (1e-4, 1.0):
            yield f"heavy {amplitude}", (heavy * amplitude).to(spec.dtype)


def assert_same(section_owner, spec, on_cpu, on_gpu, what):
    on_gpu = on_gpu.cpu()
    for s in section_owner.layout_of(spec):
        cpu, gpu = (p[s.offset : s.offset + s.nbytes] for p in (on_cpu, on_gpu))
        wrong = (cpu != gpu).nonzero().view(-1)
        assert not len(wrong), f"{what}: {s.name} differs at {wrong[:5].tolist()}, {len(wrong)} of {s.nbytes} bytes"


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=label)
def test_bytes_and_bits_are_those_of_the_reference(compressor, dtype):
    for shape, sample_dim in SHAPES:
        spec = TensorSpec(shape, dtype, sample_dim)
        payloads = []
        for what, x in inputs(spec):
            poisoned = torch.full((compressor.payload_bytes(spec),), 0xAA, dtype=torch.uint8, device="cuda")
            on_cpu, on_gpu = compressor.compress(x, spec), compressor.compress(x.cuda(), spec, poisoned)
            assert_same(compressor, spec, on_cpu, on_gpu, f"{shape} {what}")
            payloads.append(on_cpu)
            for out_dtype in {dtype, torch.float32}:
                decoded = [
                    compressor.decompress(p, spec, torch.full(shape, 7.0, dtype=out_dtype, device=p.device)).cpu()
                    for p in (on_cpu, on_gpu)
                ]
                assert equal_bits(*decoded), f"{shape} {what} decoded to {out_dtype}"
        stacked = torch.stack(payloads[-3:] if dtype != torch.float16 else payloads[-2:])
        sums = [
            compressor.decompress_sum(p, spec, torch.full(shape, 7.0, dtype=dtype, device=p.device)).cpu()
            for p in (stacked, stacked.cuda())
        ]
        assert equal_bits(*sums), f"{shape} sum"
        on_cpu, on_gpu = (compressor.requantize(p, spec) for p in (stacked, stacked.cuda()))
        assert_same(compressor, spec, on_cpu, on_gpu, f"{shape} requantized")


@pytest.mark.parametrize("compressor", LOSSY, ids=label)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_any_address_will_do(compressor, dtype):
    """Tensors that begin anywhere in memory, as views do."""
    shape = (16, 2, 256)
    spec = TensorSpec(shape, dtype, 1)
    x = normal(shape, 0, dtype)
    storage = torch.empty(spec.numel + 1, dtype=dtype, device="cuda")
    odd = storage[1:].view(shape)
    odd.copy_(x)
    payload = compressor.compress(odd, spec)
    assert torch.equal(payload.cpu(), compressor.compress(x, spec))
    odd.zero_()
    compressor.decompress(payload, spec, odd)
    assert equal_bits(odd.cpu(), compressor.decompress(payload.cpu(), spec, torch.empty_like(x)))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("group", [8, 16, 32, 64, 128, 256, 512])
def test_hadamard(group, dtype):
    for what, x in inputs(TensorSpec((24, 1024), dtype)):
        outs = [torch.full_like(x, 7, device=device) for device in ("cpu", "cuda")]
        for out in outs:
            grouped_hadamard(x.to(out.device), out, group, 0.125)
        assert equal_bits(outs[0], outs[1].cpu()), what
    with pytest.raises(ValueError, match="group_size"):
        grouped_hadamard(x.cuda(), x.cuda(), 24, 1.0)


@pytest.mark.parametrize("compressor", LOSSY, ids=label)
def test_graphs_streams_and_memory(compressor):
    """Captured once and replayed with new data, on a side stream, without a sync or memory that stays."""
    spec = TensorSpec((64, 2, 512), torch.bfloat16, 1)
    x = torch.empty(spec.shape, dtype=spec.dtype, device="cuda")
    out, payload = torch.empty_like(x), compressor.compress(x.normal_(), spec)

    def step():
        compressor.compress(x, spec, payload)
        compressor.decompress(payload, spec, out)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(3):
        data = normal(spec.shape, seed, spec.dtype)
        x.copy_(data)
        graph.replay()
        expected = compressor.compress(data, spec)
        assert torch.equal(payload.cpu(), expected)
        assert equal_bits(out.cpu(), compressor.decompress(expected, spec, torch.empty_like(data)))

    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        before = torch.cuda.memory_allocated()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(5):
                step()
        assert torch.cuda.memory_allocated() == before
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_ops_pass_torchs_own_checks():
    spec = TensorSpec((256,), torch.bfloat16)
    for compressor in (
        registry.create("fp4_quant"),
        registry.create("fp8"),
        registry.create("fixed_point", group_size=64),
    ):
        payload = compressor.compress(normal((256,), 0, torch.bfloat16).cuda(), spec)
        parts = compressor.layout_of(spec).views(payload)
        op = getattr(torch.ops.megatron_compress, f"{compressor.name}_encode").default
        settings = {"fp4_quant": (64, False, False), "fp8": (256,), "fixed_point": (64, 8)}[compressor.name]
        x = normal((256,), 1, torch.bfloat16).cuda()
        torch.library.opcheck(op, (x, *(part.clone() for part in parts.values()), *settings))


def test_compiles():
    compressor = registry.create("fp4_quant", scales="single")
    spec = TensorSpec((4, 256), torch.bfloat16)

    encode = torch.ops.megatron_compress.fp4_quant_encode

    @torch.compile(fullgraph=True)
    def step(x, payload):
        codes, scales = payload[:512], payload[512:].view(torch.float32)
        encode(x * 2, codes, scales, scales[:0], 64, False, False)
        return payload + 0

    x = normal(spec.shape, 0, spec.dtype).cuda()
    payload = torch.zeros(compressor.payload_bytes(spec), dtype=torch.uint8, device="cuda")
    assert torch.equal(step(x, payload), compressor.compress(x * 2, spec))
