"""The compressed collectives over real gloo processes, against oracles that decode the same payloads in one process."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from megatron_compress import collectives, registry
from megatron_compress.collectives.message import Message
from megatron_compress.collectives.reduction import chunk_numel
from megatron_compress.wire import TensorSpec

WORLD_SIZES = (2, 3, 4, 8)
# Eight processes on two cores take their time: by default few tests start them.
MOST_WORLD_SIZES = (2, 3, 4, pytest.param(8, marks=pytest.mark.slow))
# Any count of elements: below a group, odd, a multiple of no rank count, many groups.
SHAPES = ((5,), (7, 3, 33), (16, 2, 64), (3, 1000))


def make(name, **settings):
    return registry.create(name, **{"fixed_point": {"group_size": 64}}.get(name, {}) | settings)


# Those that the tensor axis takes.
NAMES = [name for name in registry.names() if make(name).refuse_axis("tensor") is None]


def inputs(world_size, shape, dtype=torch.float32, scale=1.0):
    """One zero-mean tensor a rank; any process makes the same ones."""
    generator = torch.Generator().manual_seed(hash((world_size, shape)) % 2**31)
    return [(scale * torch.randn(shape, generator=generator)).to(dtype) for _ in range(world_size)]


def roundtrip(flat, compressor, dtype=torch.float32):
    spec = TensorSpec.of(flat)
    return compressor.decompress(compressor.compress(flat, spec), spec, torch.empty_like(flat, dtype=dtype))


def payloads(tensors, compressor):
    """Of flat tensors, stacked."""
    return torch.stack([compressor.compress(flat, TensorSpec.of(flat)) for flat in tensors])


def one_shot_oracle(tensors, compressor):
    flat = [tensor.reshape(-1) for tensor in tensors]
    total = compressor.decompress_sum(payloads(flat, compressor), TensorSpec.of(flat[0]), torch.empty_like(flat[0]))
    return total.view(tensors[0].shape)


def two_shot_oracle(tensors, compressor):
    world_size, numel, dtype = len(tensors), tensors[0].numel(), tensors[0].dtype
    chunk = chunk_numel(numel, world_size, compressor.granularity)
    padded = [torch.cat((t.reshape(-1), t.new_zeros(chunk * world_size - numel))) for t in tensors]
    spec = TensorSpec((chunk,), dtype)
    chunks = []
    for i in range(world_size):
        reduced = compressor.requantize(payloads([p[i * chunk : (i + 1) * chunk] for p in padded], compressor), spec)
        chunks.append(compressor.decompress(reduced, spec, torch.empty(chunk, dtype=dtype)))
    return torch.cat(chunks)[:numel].view(tensors[0].shape)


ORACLES = {"one_shot": one_shot_oracle, "two_shot": two_shot_oracle}


def _all_reduce(group, name, shape, dtype, scale, algorithm, strided=False):
    tensor = inputs(group.size(), shape, dtype, scale)[group.rank()]
    if strided:
        tensor = tensor.t().contiguous().t()
    work = collectives.all_reduce(tensor, make(name), group, algorithm)
    work.wait()
    work.wait()
    assert work.is_completed()
    return tensor.contiguous()


def assert_same_bits(actual, expected):
    assert torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
@pytest.mark.parametrize("world_size", MOST_WORLD_SIZES)
def test_all_reduce_equals_the_oracle_on_every_rank(workers, world_size, algorithm, name):
    for shape in SHAPES:
        for dtype, scale in ((torch.float32, 1.0), (torch.bfloat16, 1e-6)):
            results = workers.run(_all_reduce, name, shape, dtype, scale, algorithm, world_size=world_size)
            expected = ORACLES[algorithm](inputs(world_size, shape, dtype, scale), make(name))
            for result in results:
                assert_same_bits(result, expected)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_auto_is_one_shot_at_two_ranks_and_two_shot_beyond(workers, world_size):
    shape = (4, 3, 64)
    result = workers.run(_all_reduce, "fp4_quant", shape, torch.float32, 1.0, "auto", world_size=world_size)[0]
    oracle = one_shot_oracle if world_size == 2 else two_shot_oracle
    assert_same_bits(result, oracle(inputs(world_size, shape), make("fp4_quant")))


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_all_reduce_writes_into_a_strided_tensor(workers, algorithm):
    results = workers.run(_all_reduce, "fp8", (6, 50), torch.float32, 1.0, algorithm, True, world_size=3)
    # The strided tensor is flattened row by row, as its contiguous twin.
    assert_same_bits(results[1], ORACLES[algorithm](inputs(3, (6, 50)), make("fp8")))


def _plain_all_reduce(group, shape, dtype):
    tensor = inputs(group.size(), shape, dtype)[group.rank()]
    dist.all_reduce(tensor, group=group)
    return tensor


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_identity_is_the_plain_all_reduce_to_the_bit_at_two_ranks(workers, dtype, algorithm):
    plain = workers.run(_plain_all_reduce, (7, 3, 33), dtype, world_size=2)
    ours = workers.run(_all_reduce, "identity", (7, 3, 33), dtype, 1.0, algorithm, world_size=2)
    assert_same_bits(ours[0], plain[0])


@pytest.mark.parametrize("world_size", (3, 4, 8))
def test_identity_is_the_plain_all_reduce_to_rounding_beyond(workers, world_size):
    plain = workers.run(_plain_all_reduce, (7, 3, 33), torch.float32, world_size=world_size)
    ours = workers.run(_all_reduce, "identity", (7, 3, 33), torch.float32, 1.0, "auto", world_size=world_size)
    # Another order of world_size − 1 additions.
    assert_close(ours[0], plain[0], rtol=0, atol=(world_size - 1) * 2**-24 * 3 * world_size**0.5 * 4)


def _poisoned_all_reduce(group, name, algorithm):
    tensor = torch.ones(4096)
    if group.rank() == 1:
        tensor[70] = float("nan")
    collectives.all_reduce(tensor, make(name), group, algorithm).wait()
    return tensor


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_nan_reaches_every_rank_and_no_far_element(workers, name, algorithm):
    for result in workers.run(_poisoned_all_reduce, name, algorithm, world_size=3):
        assert result[70].isnan()
        assert result[1024:].isfinite().all()


def _reduce_scatter(group, name, rows, dtype):
    tensor = inputs(group.size(), (rows * group.size(), 2, 33), dtype)[group.rank()]
    before = tensor.clone()
    output = torch.full((rows, 2, 33), torch.nan, dtype=dtype)
    work = collectives.reduce_scatter(output, tensor, make(name), group)
    work.wait()
    work.wait()
    assert torch.equal(tensor, before)
    return output


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world_size", MOST_WORLD_SIZES)
def test_reduce_scatter_equals_the_oracle(workers, world_size, name):
    for rows, dtype in ((1, torch.float32), (5, torch.bfloat16)):
        results = workers.run(_reduce_scatter, name, rows, dtype, world_size=world_size)
        tensors = inputs(world_size, (rows * world_size, 2, 33), dtype)
        for rank, result in enumerate(results):
            part = [t[rank * rows : (rank + 1) * rows] for t in tensors]
            assert_same_bits(result, one_shot_oracle(part, make(name)))


def _all_gather(group, name, rows, dtype):
    tensor = inputs(group.size(), (rows, 2, 33), dtype)[group.rank()]
    output = torch.full((rows * group.size(), 2, 33), torch.nan, dtype=dtype)
    collectives.all_gather(output, tensor, make(name), group).wait()
    return output


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world_size", MOST_WORLD_SIZES)
def test_all_gather_equals_the_oracle_on_every_rank(workers, world_size, name):
    for rows, dtype in ((1, torch.float32), (5, torch.bfloat16)):
        results = workers.run(_all_gather, name, rows, dtype, world_size=world_size)
        parts = inputs(world_size, (rows, 2, 33), dtype)
        expected = torch.cat([roundtrip(p.reshape(-1), make(name), dtype).view(p.shape) for p in parts])
        for result in results:
            assert_same_bits(result, expected)


def _ring(group, name):
    """Every rank sends to the next one and frees its tensor at once."""
    rank, size = group.rank(), group.size()
    outgoing = inputs(size, (6, 3, 50))[rank]
    incoming = torch.zeros(6, 3, 50, requires_grad=True)
    compressor = registry.create(name)
    sending = collectives.isend(outgoing, (rank + 1) % size, compressor, group)
    outgoing.zero_()
    receiving = collectives.irecv(incoming, (rank - 1) % size, compressor, group)
    assert not incoming.any()
    receiving.wait()
    receiving.wait()
    sending.wait()
    assert incoming.is_leaf
    return incoming.detach()


@pytest.mark.parametrize("name", registry.names())
def test_p2p_decodes_into_the_waiting_leaf(workers, name):
    compressor = registry.create(name)
    tensors = inputs(3, (6, 3, 50))
    for rank, result in enumerate(workers.run(_ring, name, world_size=3)):
        sent = tensors[(rank - 1) % 3]
        spec = TensorSpec.of(sent, sample_dim=1)
        assert_same_bits(result, compressor.decompress(compressor.compress(sent, spec), spec, torch.empty_like(sent)))


def _traced_bytes(group, operation, name, algorithm):
    """Bytes that this rank hands to torch.distributed for its peers."""
    peers, sent = group.size() - 1, []

    def gather(output, tensor, original=dist.all_gather_into_tensor, **kwargs):
        sent.append(tensor.nbytes * peers)
        return original(output, tensor, **kwargs)

    def exchange(output, tensor, original=dist.all_to_all_single, **kwargs):
        sent.append(tensor.nbytes // group.size() * peers)
        return original(output, tensor, **kwargs)

    names = {"all_gather_into_tensor": gather, "all_to_all_single": exchange}
    originals = {key: getattr(dist, key) for key in names}
    try:
        for key, replacement in names.items():
            setattr(dist, key, replacement)
        tensor = torch.ones(24, 2, 33)
        if operation == "all_reduce":
            collectives.all_reduce(tensor, make(name), group, algorithm).wait()
        elif operation == "all_gather":
            collectives.all_gather(torch.empty(24 * group.size(), 2, 33), tensor, make(name), group).wait()
        else:
            collectives.reduce_scatter(torch.empty(24 // group.size(), 2, 33), tensor, make(name), group).wait()
    finally:
        for key, original in originals.items():
            setattr(dist, key, original)
    return sum(sent)


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_predicted_bytes_are_those_that_travel(workers, world_size, operation):
    spec = TensorSpec((24, 2, 33), torch.float32)
    for name in NAMES:
        for algorithm in ("one_shot", "two_shot") if operation == "all_reduce" else ("auto",):
            sent = workers.run(_traced_bytes, operation, name, algorithm, world_size=world_size)
            predicted = Message(operation, spec, world_size).wire_bytes(make(name), algorithm)
            assert sent == [predicted] * world_size


def test_sizes_that_do_not_match_are_refused(workers):
    with pytest.raises(AssertionError, match=r"reduce_scatter over 2 ranks: \(5,\) into \(2,\)"):
        workers.run(_mismatched, world_size=2)


def _mismatched(group):
    collectives.reduce_scatter(torch.empty(2), torch.ones(5), make("fp8"), group)
