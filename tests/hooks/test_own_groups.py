"""Groups and communicators that Megatron's users make themselves are served, or refused; other axes are left alone."""

import numpy as np
import pytest
import torch

from megatron_compress.config import CompressionConfig
from tests.hooks import own_groups, reference
from tests.hooks.checks import IDENTITY, MIXED
from tests.hooks.gpt_reference import Reference


def test_a_model_on_groups_of_its_own_is_served(four):
    plain, identity, mixed = (four.run(own_groups.run, c, world_size=4) for c in (None, IDENTITY, MIXED))
    for before, after in zip(plain, identity, strict=True):
        assert after["losses"] == before["losses"]
        for name, gradient in before["gradients"].items():
            np.testing.assert_array_equal(after["gradients"][name], gradient, err_msg=name)
        assert after["rows"] and all(row["plain_messages"] == 0 for row in after["rows"])
    assert reference.check_tensor_axis(mixed, MIXED) > 0
    assert reference.check_pipeline_axis(mixed, MIXED) > 0


@pytest.mark.parametrize("compress", [None, MIXED], ids=["plain", "compressed"])
def test_training_equals_a_model_in_one_process(four, compress):
    """Losses and all gradients are those of a model that shares nothing with Megatron, and quantizes where it sends."""
    results = four.run(own_groups.run, compress, "P2PCommunicator", 2, world_size=4)
    stages = [tuple(_as_parameters(results[rank]["weights"]) for rank in ranks) for ranks in ((0, 1), (2, 3))]
    model = Reference(stages, compress and CompressionConfig(**compress))
    losses = [model.loss(tokens) for tokens in own_groups.microbatches()]
    plain = [Reference(stages, None).loss(tokens).item() for tokens in own_groups.microbatches()]
    assert (results[-1]["losses"] == pytest.approx(plain, rel=1e-6)) == (compress is None)
    (sum(losses) / len(losses)).backward()
    assert results[-1]["losses"] == pytest.approx([loss.item() for loss in losses], rel=1e-6)
    for rank, result in enumerate(results):
        for name, gradient in result["gradients"].items():
            expected = stages[rank // 2][0 if "norm" in name else rank % 2][name].grad.numpy()
            # Inputs equal to rounding may lie on two sides of a code's edge: a few elements move by a quantum, or a
            # group's scale by half precision's.
            limit = (2.0**-11 if compress else 1e-5) * np.linalg.norm(expected)
            error = np.linalg.norm(gradient - expected)
            assert error <= limit, f"{name} of rank {rank}: {error:.1e} > {limit:.1e}"


def _as_parameters(weights):
    return {name: torch.from_numpy(value).requires_grad_() for name, value in weights.items()}


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
