"""Every schedule with every layout, sequence parallelism and recompute: identity changes nothing, compression delivers
what a computation in one process says, nothing else is touched, and the bytes are the predicted ones.

By default in cases that cover every pair of values; `--full` runs all of them.
"""

import pytest

from tests.distributed.pool import WorkerPool
from tests.hooks import reference, runs
from tests.hooks.matrix import STEPS, all_cases, covering_cases, predicted
from tests.hooks.test_training import IDENTITY, MIXED

COVERING = covering_cases(limit=4)


@pytest.fixture(scope="module")
def pools():
    """Processes by their number, started when they are first needed."""
    pools: dict[int, WorkerPool] = {}
    yield lambda size: pools.get(size) or pools.setdefault(size, WorkerPool(size))
    for pool in pools.values():
        pool.close()


def _cases():
    for case in all_cases():
        yield pytest.param(case, id=str(case), marks=[] if case in COVERING else [pytest.mark.slow])


@pytest.mark.parametrize("case", _cases())
def test_path(pools, case):
    pool = pools(case.world_size)

    def run(compress, settings, trace):
        arguments = (case.layout, compress, STEPS, case.settings | settings, case.lengths, trace)
        return pool.run(runs.run, *arguments, world_size=case.world_size)

    # Hooks hold what is sent until it has arrived, so outputs may be freed at once, as Megatron-LM's scripts have it.
    freeing = {"deallocate_pipeline_outputs": True}
    plain = run(None, {}, ("calls",))
    identity = run(IDENTITY, freeing, ("calls",))
    mixed = run(MIXED, freeing, ("calls", "seams"))

    _check_identity(plain, identity)
    _check_untouched(plain, identity, mixed)
    _check_bytes(case, mixed)
    _check_values(case, mixed)


def _check_identity(plain, identity):
    for before, after in zip(plain, identity, strict=True):
        assert after["losses"] == before["losses"]
        assert after["held_out"] == before["held_out"]
        assert after["parameters"] == before["parameters"]
        assert all(row["plain_messages"] == 0 for row in after["rows"])


def _check_untouched(plain, identity, mixed):
    """Calls from elsewhere in Megatron than the hooked functions: the same, in the same order, with the same values."""
    for before, same, other in zip(plain, identity, mixed, strict=True):
        never = [call for call in before["calls"] if not call.compressible]
        assert [call for call in same["calls"] if not call.compressible] == never
        assert [call.kind for call in other["calls"] if not call.compressible] == [call.kind for call in never]
        assert all(call.dtype == "torch.uint8" for call in same["calls"] if call.compressible)


def _check_bytes(case, mixed):
    for result in mixed:
        rows = {
            (row["axis"], row["direction"], row["site"]): (row["messages"], row["wire_bytes"]) for row in result["rows"]
        }
        assert rows == predicted(case, result["stage"], MIXED)
        counted = {axis: sum(row["wire_bytes"] for row in result["rows"] if row["axis"] == axis) for axis in _AXES}
        assert counted == {axis: _bytes_on_the_wire(result["calls"], axis) for axis in _AXES}


_AXES = ("pipeline", "tensor")


def _bytes_on_the_wire(calls, axis) -> int:
    """What this rank handed to torch.distributed for its one peer on the tensor axis, or for its neighbours."""
    total = 0
    for call in calls:
        if call.compressible and (call.function in ("isend", "irecv")) == (axis == "pipeline"):
            whole = call.function in ("isend", "all_gather_into_tensor", "all_reduce")
            total += 0 if call.function == "irecv" else call.nbytes if whole else call.nbytes // 2
    return total


def _check_values(case, mixed):
    layers = case.layers * case.pipeline
    reductions = reference.check_tensor_axis(mixed, MIXED)
    assert (reductions >= layers * STEPS * len(case.lengths)) == (case.tensor > 1)
    assert (reference.check_regathers(mixed) > 0) == case.sequence_parallel
    assert (reference.check_pipeline_axis(mixed, MIXED) > 0) == (case.pipeline > 1)
