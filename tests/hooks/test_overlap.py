"""Transfers leave the critical path of the non-interleaved schedule: here, the order in which gloo is called for them.

That results stay the same to the bit is the business of `test_matrix`.
"""

import pytest

from tests.hooks import runs
from tests.hooks.checks import IDENTITY

LAYOUT = {"tensor": 1, "pipeline": 2, "data": 2}


def _order(result: dict) -> str:
    """The p2p calls of one rank in a step of four microbatches and an evaluation of one: a receive that is named is r,
    a send that is started s."""
    letters = {"irecv": "r", "isend": "s"}
    return "".join(letters[call.function] for call in result["calls"] if call.function in letters)


@pytest.mark.parametrize("batched", [True, False])
def test_receives_are_named_one_message_early(four, batched):
    settings = {"batch_p2p_comm": batched}
    results = four.run(runs.run, LAYOUT, IDENTITY, 1, settings, (), ("calls",), world_size=4)
    # Stage 0 names its first gradient before it sends; stage 1 its second activation before it waits for the first.
    assert [_order(result) for result in results] == 2 * ["rssrsrsr" + "s"] + 2 * ["rrsrsrss" + "r"]


def test_plain_megatron_names_them_when_it_needs_them(four):
    results = four.run(runs.run, LAYOUT, None, 1, None, (), ("calls",), world_size=4)
    assert [_order(result) for result in results] == 2 * ["ssrsrsrr" + "s"] + 2 * ["rsrsrsrs" + "r"]
