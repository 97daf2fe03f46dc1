"""Collectives and hooks over NCCL on two GPUs, against the same oracles as on gloo."""

import os

import pytest
import torch

from megatron_compress import collectives, registry
from megatron_compress.wire import TensorSpec
from tests.distributed.pool import WorkerPool
from tests.distributed.test_collectives import ORACLES, assert_same_bits, inputs, make, one_shot_oracle, roundtrip
from tests.hooks import runs
from tests.hooks.test_training import IDENTITY, MIXED

pytestmark = pytest.mark.two_gpus
SHAPE = (32, 2, 33)


@pytest.fixture(scope="module")
def two():
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for deterministic GEMMs
    pool = WorkerPool(2, backend="nccl")
    yield pool
    pool.close()


def _reduce(group, name, algorithm):
    tensor = inputs(2, SHAPE, torch.bfloat16)[group.rank()].cuda()
    collectives.all_reduce(tensor, make(name), group, algorithm).wait()
    return tensor.cpu()


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_all_reduce_equals_the_oracle(two, algorithm, name):
    expected = ORACLES[algorithm](inputs(2, SHAPE, torch.bfloat16), make(name))
    for result in two.run(_reduce, name, algorithm, world_size=2):
        assert_same_bits(result, expected)


def _scatter_gather_send(group, name):
    rank = group.rank()
    tensor = inputs(2, SHAPE)[rank].cuda()
    scattered = torch.empty(SHAPE[0] // 2, *SHAPE[1:], device="cuda")
    collectives.reduce_scatter(scattered, tensor, make(name), group).wait()
    gathered = torch.empty(2 * SHAPE[0], *SHAPE[1:], device="cuda")
    collectives.all_gather(gathered, tensor, make(name), group).wait()
    received = torch.zeros(SHAPE, device="cuda", requires_grad=True)
    if rank == 0:
        collectives.isend(tensor, 1, make(name), group).wait()
    else:
        collectives.irecv(received, 0, make(name), group).wait()
    return scattered.cpu(), gathered.cpu(), received.detach().cpu()


@pytest.mark.parametrize("name", registry.names())
def test_the_other_collectives_equal_the_oracle(two, name):
    tensors, half = inputs(2, SHAPE), SHAPE[0] // 2
    gathered = torch.cat([roundtrip(t.reshape(-1), make(name)).view(SHAPE) for t in tensors])
    results = two.run(_scatter_gather_send, name, world_size=2)
    for rank, result in enumerate(results):
        part = [t[rank * half : (rank + 1) * half] for t in tensors]
        assert_same_bits(result[0], one_shot_oracle(part, make(name)))
        assert_same_bits(result[1], gathered)
    spec = TensorSpec(SHAPE, torch.float32, sample_dim=1)
    sent = make(name).decompress(make(name).compress(tensors[0], spec), spec, torch.empty(SHAPE))
    assert_same_bits(results[1][2], sent)


def _train(group, layout, compress):
    torch.use_deterministic_algorithms(True)
    return runs.run(group, layout, compress)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_training_identity_equals_plain_and_compression_acts(two, tensor, pipeline):
    layout = {"tensor": tensor, "pipeline": pipeline}
    plain, again, identity, mixed = (two.run(_train, layout, c, world_size=2) for c in (None, None, IDENTITY, MIXED))
    assert [r["losses"] for r in again] == [r["losses"] for r in plain]
    assert [r["losses"] for r in identity] == [r["losses"] for r in plain]
    assert [r["replicated"] for r in identity] == [r["replicated"] for r in plain]
    assert mixed[0]["losses"] != plain[0]["losses"]
    for before, after in zip(plain[0]["losses"], mixed[0]["losses"], strict=True):
        assert float.fromhex(after) == pytest.approx(float.fromhex(before), abs=0.02)
