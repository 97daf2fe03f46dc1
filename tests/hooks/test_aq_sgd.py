"""AQ-SGD in training: a first epoch as plain training, then changes only; both ends of a link remember the same."""

import pytest
import torch

from tests.hooks import runs

AQ_SGD = {"pipeline": {"forward": {"compressor": "aq_sgd"}}}
STEPS_PER_EPOCH, EPOCHS = 2, 3
MESSAGES = runs.MICROBATCHES * STEPS_PER_EPOCH  # of an epoch


def _layout(tensor, pipeline, data=1, **more):
    windows = STEPS_PER_EPOCH * runs.MICROBATCHES * runs.MICRO_BATCH * data
    return {"tensor": tensor, "pipeline": pipeline, "data": data, "epoch_windows": windows, **more}


def _full(layout):
    return pytest.param(layout, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "layout", [_layout(1, 4), _full(_layout(2, 2, sequence_parallel=True)), _full(_layout(1, 2, data=2))]
)
def test_both_ends_of_every_link_remember_the_same(four, layout):
    steps = STEPS_PER_EPOCH * EPOCHS
    plain, mine = (four.run(runs.run, layout, compress, steps, world_size=4) for compress in (None, AQ_SGD))
    assert mine[0]["losses"][:STEPS_PER_EPOCH] == plain[0]["losses"][:STEPS_PER_EPOCH]
    assert mine[0]["losses"][-1] != plain[0]["losses"][-1]
    for ours, theirs in zip(mine[0]["losses"], plain[0]["losses"], strict=True):
        assert float.fromhex(ours) == pytest.approx(float.fromhex(theirs), abs=0.01)
    links = 0
    for result in mine:
        if result["stage"] < layout["pipeline"] - 1:
            links += 1
            _check_link(result, mine[result["pipeline"][result["stage"] + 1]])
    assert links == 4 - 4 // layout["pipeline"]


def _check_link(sender, receiver):
    ours, theirs = (result["memories"][sender["stage"]] for result in (sender, receiver))
    assert ours["samples"] == theirs["samples"]
    assert len(ours["samples"]) == MESSAGES * runs.MICRO_BATCH
    assert torch.equal(ours["values"], theirs["values"])
    (row,) = (row for row in sender["rows"] if (row["axis"], row["direction"]) == ("pipeline", "forward"))
    assert row["messages"] == EPOCHS * MESSAGES + 1
    assert row["plain_reasons"] == {"first epoch": MESSAGES, "evaluation": 1}
    assert sender["remembered"] >= ours["values"].nbytes


def test_training_without_epochs_is_refused(four):
    error = four.run(runs.refused, {"tensor": 1, "pipeline": 2, "data": 2}, AQ_SGD, {}, world_size=4)[0]
    assert "set data.epoch_windows" in error


def test_virtual_stages_are_refused(four):
    layout = _layout(1, 2, data=2, virtual_pipeline=2)
    error = four.run(runs.refused, layout, AQ_SGD, {}, world_size=4)[0]
    assert "train without virtual stages" in error
