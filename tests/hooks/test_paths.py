"""Beside the matrix: other recompute, frozen weights, shared heads, experts, and what Megatron itself gets wrong."""

import pytest

from tests.hooks import checks, reference, runs
from tests.hooks.checks import IDENTITY, MIXED
from tests.hooks.matrix import LENGTHS

STEPS = 2
CALLS = ("calls",)


def _full(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def _three_runs(pool, layout, settings=None, lengths=(), frozen=False):
    """Plain, with identity, and lossy; after the checks that hold for all paths at two tensor-parallel ranks."""
    plain, identity, mixed = (
        pool.run(runs.run, layout, compress, STEPS, settings, lengths, trace, frozen, world_size=4)
        for compress, trace in ((None, CALLS), (IDENTITY, CALLS), (MIXED, ("calls", "seams")))
    )
    checks.equal_runs(plain, identity)
    routed = "num_moe_experts" in (settings or {})
    checks.nothing_else_touched(plain, identity, mixed, routed)
    for result in mixed:
        checks.counted_bytes_travelled(result)
    assert (reference.check_tensor_axis(mixed, MIXED) > 0) == (layout["tensor"] > 1)
    assert (reference.check_pipeline_axis(mixed, MIXED) > 0) == (layout["pipeline"] > 1)
    return plain, identity, mixed


def _count(results, direction, site):
    """Messages of one rank on the tensor axis."""
    rows = [row for row in results[0]["rows"] if row["axis"] == "tensor"]
    return sum(row["messages"] for row in rows if (row["direction"], row["site"]) == (direction, site))


@pytest.mark.parametrize(
    ("module", "sequence_parallel"),
    [("core_attn", False), ("mlp", True), _full("core_attn", True), _full("mlp", False)],
)
def test_selective_recompute(four, module, sequence_parallel):
    settings = {"recompute_granularity": "selective", "recompute_modules": [module]}
    layout = {"tensor": 2, "pipeline": 2, "sequence_parallel": sequence_parallel}
    _, _, mixed = _three_runs(four, layout, settings)
    trained, evaluated = STEPS * runs.MICROBATCHES * 2, 2  # passes through two layers
    once, again = (2, 1) if sequence_parallel else (1, 0)  # gather and scatter, and the input once more; or all-reduce
    forward = trained * (once + again) + evaluated * once
    assert _count(mixed, "forward", "attention") == forward
    assert _count(mixed, "forward", "mlp") == forward + (trained * once if module == "mlp" else 0)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_frozen_weights(four, sequence_parallel):
    layout = {"tensor": 2, "pipeline": 2, "sequence_parallel": sequence_parallel}
    plain, _, mixed = _three_runs(four, layout, frozen=True)
    # The frozen layers' own Function reduces the gradient of the input at once, the usual one in the background.
    blocking = [call for call in plain[0]["calls"] if call.caller == "layers.py:backward" and call.after]
    assert bool(blocking) != sequence_parallel
    scatter_and_gather = 2 if sequence_parallel else 1
    assert _count(mixed, "backward", "mlp") == STEPS * runs.MICROBATCHES * 2 * scatter_and_gather


@pytest.mark.parametrize(
    ("virtual_pipeline", "sequence_parallel"), [(None, True), (2, False), _full(None, False), _full(2, True)]
)
def test_tied_embeddings(four, virtual_pipeline, sequence_parallel):
    layout = {"tensor": 2, "pipeline": 2, "tied": True, "virtual_pipeline": virtual_pipeline, "held_out": 2}
    plain, _, _ = _three_runs(four, layout | {"sequence_parallel": sequence_parallel})
    tied = [call for call in plain[0]["calls"] if "embedding_grad" in call.caller]
    assert len(tied) == STEPS and not any(call.compressible for call in tied)


def test_fewer_key_value_heads_than_ranks(four):
    layout = {"tensor": 2, "pipeline": 2, "query_groups": 1}
    _, _, mixed = _three_runs(four, layout)
    gathers = [exchange for exchange in mixed[0]["seen"].exchanges if exchange.operation == "all_gather"]
    assert len(gathers) == 2 * (STEPS * runs.MICROBATCHES + 1)
    assert {(gather.direction, gather.site) for gather in gathers} == {("forward", "attention")}


def test_fewer_key_value_heads_than_four_ranks(four):
    layout = {"tensor": 4, "pipeline": 1, "query_groups": 2, "sequence_parallel": True}
    plain, identity = (four.run(runs.run, layout, compress, world_size=4) for compress in (None, IDENTITY))
    for before, after in zip(plain[0]["losses"], identity[0]["losses"], strict=True):
        assert float.fromhex(after) == pytest.approx(float.fromhex(before), rel=1e-5)


def test_bfloat16(four):
    layout = {"tensor": 2, "pipeline": 2, "sequence_parallel": True, "precision": "bf16"}
    plain, identity = (four.run(runs.run, layout, c, STEPS, None, (), CALLS, world_size=4) for c in (None, IDENTITY))
    checks.equal_runs(plain, identity)
    checks.nothing_else_touched(plain, identity, identity)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "dispatcher", "expert_parallel"),
    [
        (2, 2, "allgather", 1),
        (2, 2, "alltoall", 2),
        (1, 2, "alltoall", 2),
        _full(2, 2, "alltoall", 1),
        _full(1, 2, "alltoall", 1),
        _full(1, 2, "allgather", 1),
    ],
)
def test_experts_keep_their_traffic(four, tensor, pipeline, dispatcher, expert_parallel):
    layout = {"tensor": tensor, "pipeline": pipeline, "data": 4 // (tensor * pipeline), "sequence_parallel": tensor > 1}
    settings = {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": dispatcher,
        "expert_model_parallel_size": expert_parallel,
        "expert_tensor_parallel_size": tensor // min(tensor, expert_parallel),
        "add_bias_linear": False,
    }
    plain, _, _ = _three_runs(four, layout, settings)
    experts = [call for call in plain[0]["calls"] if call.caller.startswith("mappings.py") and not call.compressible]
    assert experts or (tensor == 1 and expert_parallel == 1)


def test_plain_messages_survive_the_early_release_of_outputs(four):
    """megatron-core 0.16 frees an output while its overlapped send is under way."""
    layout = {"tensor": 1, "pipeline": 4, "layers": 8, "virtual_pipeline": 2, "held_out": 4}
    rule = {"compressor": "identity", "first_step": 1000}
    later = {"pipeline": {"forward": rule, "backward": rule}}
    kept, freed = {"deallocate_pipeline_outputs": False}, {"deallocate_pipeline_outputs": True}
    plain = four.run(runs.run, layout, None, STEPS, kept, world_size=4)
    hooked = four.run(runs.run, layout, later, STEPS, freed, world_size=4)
    assert [result["parameters"] for result in hooked] == [result["parameters"] for result in plain]
    assert [result["held_out"] for result in hooked] == [result["held_out"] for result in plain]
    for result in hooked:
        assert all(row["plain_reasons"] == {"before first step": row["messages"]} for row in result["rows"])


def test_variable_lengths_with_overlapped_messages(four):
    layout = {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2, "held_out": 2}
    settings = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
    plain, _, _ = _three_runs(four, layout, settings, LENGTHS)
    assert any(call.caller.endswith("_communicate_shapes") for call in plain[0]["calls"])


INTERLEAVED = {"tensor": 1, "pipeline": 2, "data": 2, "virtual_pipeline": 2, "held_out": 2}
SWAPPED = {"overlap_p2p_comm": False, "batch_p2p_comm": True}


def test_two_interleaved_stages_with_batched_messages_are_refused(four):
    """As megatron-core itself trains to something else then."""
    right, wrong = (four.run(runs.run, INTERLEAVED, None, STEPS, s, world_size=4) for s in ({}, SWAPPED))
    assert right[0]["losses"] != wrong[0]["losses"]
    for error in four.run(runs.refused, INTERLEAVED, IDENTITY, SWAPPED, world_size=4):
        assert error.startswith("UnsupportedSettingError") and "set batch_p2p_comm=False" in error
