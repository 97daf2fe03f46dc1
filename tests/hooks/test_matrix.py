"""Every schedule with every layout, sequence parallelism and recompute: identity changes nothing, compression delivers
what a computation in one process says, nothing else is touched, and the bytes are the predicted ones.

By default in cases that cover every pair of values; `--full` runs all of them.
"""

import pytest

from tests.hooks import checks, reference, runs
from tests.hooks.checks import IDENTITY, MIXED
from tests.hooks.matrix import STEPS, all_cases, covering_cases, predicted

COVERING = covering_cases(limit=4)


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

    checks.equal_runs(plain, identity)
    checks.nothing_else_touched(plain, identity, mixed)
    checks.replicas_are_identical(mixed)
    _check_bytes(case, mixed)
    _check_values(case, mixed)


def _check_bytes(case, mixed):
    for result in mixed:
        rows = {
            (row["axis"], row["direction"], row["site"]): (row["messages"], row["wire_bytes"]) for row in result["rows"]
        }
        assert rows == predicted(case, result["stage"], MIXED)
        for row in result["rows"]:
            exempt = row["site"] in ("embedding", "head")
            assert row["plain_reasons"] == ({"exempt site": row["messages"]} if exempt else {})
        checks.counted_bytes_travelled(result)


def _check_values(case, mixed):
    layers = case.layers * case.pipeline
    reductions = reference.check_tensor_axis(mixed, MIXED)
    assert (reductions >= layers * STEPS * len(case.lengths)) == (case.tensor > 1)
    assert (reference.check_regathers(mixed) > 0) == case.sequence_parallel
    assert (reference.check_pipeline_axis(mixed, MIXED) > 0) == (case.pipeline > 1)
