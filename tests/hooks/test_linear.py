"""HALO in a real megatron-core GPT in real processes: acts in every layout, and stays close to plain."""

import pytest

from tests.hooks import checks, runs

HALO = {"linear": {"method": "halo", "level": 2, "format": "fp8"}}
LAYOUTS = {
    "tensor": {"tensor": 2, "pipeline": 1},
    "sequence": {"tensor": 2, "pipeline": 1, "sequence_parallel": True},
    "pipeline": {"tensor": 1, "pipeline": 2},
    "recompute": {"tensor": 2, "pipeline": 1, "recompute": True},
}


def losses(result: dict) -> list[float]:
    return [float.fromhex(loss) for loss in result["losses"]]


@pytest.fixture(scope="module")
def alone(pools):
    """Plain, and HALO-2, on one rank."""
    layout = {"tensor": 1, "pipeline": 1}
    return [pools(1).run(runs.run, layout, c, world_size=1)[0] for c in (None, HALO)]


@pytest.fixture(scope="module")
def results(pools):
    return {name: pools(2).run(runs.run, layout, HALO, world_size=2) for name, layout in LAYOUTS.items()}


def test_acts_and_stays_close_to_plain(alone):
    plain, halo = map(losses, alone)
    assert plain != halo
    assert halo == pytest.approx(plain, abs=0.02)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_stay_close_to_plain(pools, results, name):
    plain = pools(2).run(runs.run, LAYOUTS[name], None, world_size=2)
    assert losses(results[name][0]) == pytest.approx(losses(plain[0]), abs=0.02)
    assert results[name][0]["losses"] != plain[0]["losses"]
    checks.replicas_are_identical(results[name])


def test_two_tensor_parallel_ranks_agree_with_one(alone, results):
    """Cutting a tensor changes its scales and Hadamards, so by no more than the codes' noise."""
    assert losses(results["tensor"][0]) == pytest.approx(losses(alone[1]), abs=0.02)


def test_recompute_changes_nothing(results):
    assert results["recompute"][0]["losses"] == results["tensor"][0]["losses"]


@pytest.mark.parametrize("name", ["int8", "fp6", "fp4", "int4"])
def test_every_format_trains(pools, name):
    linear = {"method": "halo", "level": 1, "format": name}
    (result,) = pools(1).run(runs.run, {"tensor": 1, "pipeline": 1}, {"linear": linear}, world_size=1)
    assert losses(result)[-1] < losses(result)[0]


def test_with_compressed_reductions(pools, results):
    """The layers' communication stays within the tensor axis' rules."""
    tensor = {direction: {"compressor": "fp8"} for direction in ("forward", "backward")}
    both = pools(2).run(runs.run, LAYOUTS["sequence"], {**HALO, "tensor": tensor}, world_size=2)
    rows = [row for row in both[0]["rows"] if row["site"] in ("attention", "mlp")]
    assert {row["direction"] for row in rows} == {"forward", "backward"}
    assert all(row["plain_messages"] == 0 for row in rows)
    assert both[0]["losses"] != results["sequence"][0]["losses"]
