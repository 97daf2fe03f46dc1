"""A real megatron-core GPT in real processes: identity changes nothing, compression keeps every promise it makes."""

import pytest
import torch

from megatron_compress import registry
from megatron_compress.collectives.message import Message
from megatron_compress.wire import TensorSpec
from tests.hooks import runs
from tests.hooks.checks import IDENTITY, MIXED


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize(("tensor", "pipeline", "data"), [(2, 2, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2)])
def test_identity_equals_plain_to_the_bit(four, tensor, pipeline, data, batched):
    layout = {"tensor": tensor, "pipeline": pipeline, "data": data}
    plain, identity = (
        four.run(runs.run, layout, c, 3, {"batch_p2p_comm": batched}, world_size=4) for c in (None, IDENTITY)
    )
    for before, after in zip(plain, identity, strict=True):
        assert after["losses"] == before["losses"]
        assert after["held_out"] == before["held_out"]
        assert after["parameters"] == before["parameters"]
        assert all(row["plain_messages"] == 0 for row in after["rows"])
    axes = {row["axis"] for result in identity for row in result["rows"]}
    assert axes == {name for name, size in (("tensor", tensor), ("pipeline", pipeline)) if size > 1}


@pytest.mark.parametrize("extra", [{"sequence_parallel": True}, {"tied": True}])
def test_identity_equals_plain_with_sequence_parallelism_and_tied_embeddings(four, extra):
    layout = {"tensor": 2, "pipeline": 2, **extra}
    plain, identity = (four.run(runs.run, layout, c, world_size=4) for c in (None, IDENTITY))
    assert [r["losses"] for r in identity] == [r["losses"] for r in plain]
    assert [r["replicated"] for r in identity] == [r["replicated"] for r in plain]


def test_identity_is_plain_to_rounding_on_four_tensor_parallel_ranks(four):
    plain, identity = (four.run(runs.run, {"tensor": 4, "pipeline": 1}, c, world_size=4) for c in (None, IDENTITY))
    for before, after in zip(plain[0]["losses"], identity[0]["losses"], strict=True):
        assert float.fromhex(after) == pytest.approx(float.fromhex(before), rel=1e-5)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 2), (4, 1)])
def test_compression_acts_and_replicas_stay_identical(four, tensor, pipeline):
    layout = {"tensor": tensor, "pipeline": pipeline}
    plain, mixed = (four.run(runs.run, layout, c, world_size=4) for c in (None, MIXED))
    assert mixed[0]["losses"] != plain[0]["losses"]
    for before, after in zip(plain[0]["losses"], mixed[0]["losses"], strict=True):
        assert float.fromhex(after) == pytest.approx(float.fromhex(before), abs=0.02)
    by_stage = {}
    for result in mixed:
        by_stage.setdefault(result["stage"], set()).add(result["replicated"])
        assert result["losses"] == mixed[0]["losses"]
    assert all(len(digests) == 1 for digests in by_stage.values())


def expected_rows(stage, steps):
    """Messages and bytes of one rank at TP=2 x PP=2 under MIXED, counted by hand (HOOKS §2a)."""
    shape = (runs.SEQUENCE, runs.MICRO_BATCH, runs.HIDDEN)
    spec = TensorSpec(shape, torch.float32)
    training = steps * runs.MICROBATCHES
    passes = training + 1  # one microbatch is evaluated
    layers = runs.LAYERS // 2
    reduction = Message("all_reduce", spec, 2)
    rows = {}
    for direction, name, count in (("forward", "fp4_quant", passes), ("backward", "fp8", training)):
        wire = reduction.wire_bytes(registry.create(name))
        for site in ("attention", "mlp"):
            rows["tensor", direction, site] = (count * layers, count * layers * wire)
    if stage == 0:
        rows["tensor", "forward", "embedding"] = (passes, passes * spec.nbytes)
        boundary = registry.create("tah_quant").payload_bytes(TensorSpec(shape, torch.float32, 1))
        rows["pipeline", "forward", "boundary"] = (passes, passes * boundary)
    else:
        rows["tensor", "backward", "head"] = (training, training * spec.nbytes)
        boundary = registry.create("fixed_point", bits=6).payload_bytes(TensorSpec(shape, torch.float32, 1))
        rows["pipeline", "backward", "boundary"] = (training, training * boundary)
    return rows


def test_messages_and_bytes_are_the_predicted_ones(four):
    for result in four.run(runs.run, {"tensor": 2, "pipeline": 2}, MIXED, 2, world_size=4):
        found = {
            (row["axis"], row["direction"], row["site"]): (row["messages"], row["wire_bytes"]) for row in result["rows"]
        }
        assert found == expected_rows(result["stage"], steps=2)
        for row in result["rows"]:
            exempt = row["site"] in ("embedding", "head")
            assert row["plain_reasons"] == ({"exempt site": row["messages"]} if exempt else {})


def test_first_step_counts_training_steps_only(four):
    late = {"pipeline": {"forward": {"compressor": "fp8", "first_step": 2}}}
    results = four.run(runs.run, {"tensor": 2, "pipeline": 2}, late, 3, world_size=4)
    (row,) = (row for row in results[0]["rows"] if row["axis"] == "pipeline")
    assert row["messages"] == 3 * runs.MICROBATCHES + 1
    assert row["plain_reasons"] == {"before first step": 2 * runs.MICROBATCHES}


def test_exempt_stages_send_plainly(four):
    exempt = {"pipeline": {d: {"compressor": "fp8", "exempt_stages": [0]} for d in ("forward", "backward")}}
    results = four.run(runs.run, {"tensor": 1, "pipeline": 4}, exempt, 1, world_size=4)
    for result in results:
        rows = [row for row in result["rows"] if row["axis"] == "pipeline"]
        assert rows and all((row["plain_messages"] == row["messages"]) == (result["stage"] == 0) for row in rows)
        assert all(row["plain_messages"] in (0, row["messages"]) for row in rows)
