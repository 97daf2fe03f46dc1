"""A real megatron-core GPT in real processes: identity changes nothing, compression keeps every promise it makes."""

import pytest

from tests.hooks import checks, runs
from tests.hooks.checks import IDENTITY, MIXED


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 2), (1, 4)])
def test_identity_equals_plain_where_messages_go_one_by_one(four, tensor, pipeline):
    layout, unbatched = {"tensor": tensor, "pipeline": pipeline}, {"batch_p2p_comm": False}
    checks.equal_runs(*(four.run(runs.run, layout, c, 3, unbatched, world_size=4) for c in (None, IDENTITY)))


def test_identity_is_plain_to_rounding_on_four_tensor_parallel_ranks(four):
    plain, identity = (four.run(runs.run, {"tensor": 4, "pipeline": 1}, c, world_size=4) for c in (None, IDENTITY))
    for before, after in zip(plain[0]["losses"], identity[0]["losses"], strict=True):
        assert float.fromhex(after) == pytest.approx(float.fromhex(before), rel=1e-5)


def test_compression_acts_on_four_tensor_parallel_ranks(four):
    plain, mixed = (four.run(runs.run, {"tensor": 4, "pipeline": 1}, c, world_size=4) for c in (None, MIXED))
    assert mixed[0]["losses"] != plain[0]["losses"]
    for before, after in zip(plain[0]["losses"], mixed[0]["losses"], strict=True):
        assert float.fromhex(after) == pytest.approx(float.fromhex(before), abs=0.02)
    checks.replicas_are_identical(mixed)


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
