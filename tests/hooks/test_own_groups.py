"""Groups and communicators that Megatron's users make themselves are served, or refused; other axes are left alone."""

import pytest

from tests.distributed.pool import WorkerPool
from tests.hooks import own_groups, reference
from tests.hooks.checks import IDENTITY, MIXED


@pytest.fixture(scope="module")
def four():
    pool = WorkerPool(4)
    yield pool
    pool.close()


def test_a_model_on_groups_of_its_own_is_served(four):
    plain, identity, mixed = (four.run(own_groups.run, c, world_size=4) for c in (None, IDENTITY, MIXED))
    for before, after in zip(plain, identity, strict=True):
        assert (after["losses"], after["gradients"]) == (before["losses"], before["gradients"])
        assert after["rows"] and all(row["plain_messages"] == 0 for row in after["rows"])
    assert reference.check_tensor_axis(mixed, MIXED) > 0
    assert reference.check_pipeline_axis(mixed, MIXED) > 0


def test_stages_are_those_of_its_pipeline(four):
    exempt = {"tensor": {"forward": {"compressor": "fp8", "exempt_sites": [], "exempt_stages": [0]}}}
    for result in four.run(own_groups.run, exempt, world_size=4):
        rows = [row for row in result["rows"] if (row["axis"], row["direction"]) == ("tensor", "forward")]
        assert rows and all((row["plain_messages"] > 0) == (result["stage"] == 0) for row in rows)


def test_a_communicator_that_leaves_the_transfer_to_megatron_is_served(four):
    results = four.run(own_groups.run, MIXED, "Logging", world_size=4)
    assert results[0]["sent"] > 0
    assert reference.check_pipeline_axis(results, MIXED) > 0


@pytest.mark.parametrize(
    ("communicator", "reason"),
    [
        ("Own", "pipeline messages passed the hooks by: no tensor_"),
        ("Foreign", "p2p_communicator is a Foreign, whose messages the hooks do not reach"),
    ],
)
def test_a_communicator_that_passes_the_hooks_by_is_refused(four, communicator, reason):
    for error in four.run(own_groups.refused, MIXED, communicator, world_size=4):
        assert error.startswith("UnsupportedSettingError") and reason in error


def test_context_parallel_traffic_is_neither_changed_nor_counted(four):
    lossy = {"tensor": {d: {"compressor": "fp4_quant"} for d in ("forward", "backward")}}
    for rank, (values, rows) in enumerate(four.run(own_groups.context_group, lossy, world_size=4)):
        first = rank % 2
        assert values == pytest.approx([0.1 + first] * 2 + [2.1 + first] * 2 + [0.2] * 2)
        assert rows == []
