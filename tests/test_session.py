"""Routing: which message is compressed, why another is not, and that nothing grows or goes uncounted."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_compress import registry
from megatron_compress.collectives.message import Message
from megatron_compress.config import CompressionConfig
from megatron_compress.session import Place, Session
from megatron_compress.wire import FLOAT_DTYPES, TensorSpec

SPEC = TensorSpec((16, 2, 128), torch.bfloat16)
MLP = Place("tensor", "forward", "mlp", 1)


def session(**rule):
    return Session(CompressionConfig(tensor={"forward": {"compressor": "fp8", **rule}}))


def reasons(s):
    return [reason for row in s.traffic.rows() for reason in row["plain_reasons"]]


def test_a_message_within_a_rule_is_compressed_and_counted():
    s = session()
    compressor = s.route(MLP, Message("all_reduce", SPEC, 2))
    assert compressor.name == "fp8"
    (row,) = s.traffic.rows()
    assert row["messages"] == 1 and row["plain_messages"] == 0
    assert row["logical_bytes"] == SPEC.nbytes
    assert row["wire_bytes"] == registry.create("fp8").payload_bytes(TensorSpec((SPEC.numel,), SPEC.dtype))
    assert row["bits_per_element"] == pytest.approx(8.125)


@pytest.mark.parametrize(
    ("rule", "place", "reason"),
    [
        ({}, Place("tensor", "backward", "mlp", 1), "no rule"),
        ({}, Place("pipeline", "forward", "boundary", 1), "no rule"),
        ({}, Place("tensor", "forward", None, 1), "other site"),
        ({}, Place("tensor", "forward", "embedding", 1), "exempt site"),
        ({"exempt_sites": ["mlp"]}, MLP, "exempt site"),
        ({"exempt_stages": [1]}, MLP, "exempt stage"),
        ({"first_step": 1}, MLP, "before first step"),
        ({"min_bytes": SPEC.nbytes + 1}, MLP, "below min_bytes"),
    ],
)
def test_plain_messages_are_counted_with_their_reason(rule, place, reason):
    s = session(**rule)
    assert s.route(place, Message("all_reduce", SPEC, 2)) is None
    (row,) = s.traffic.rows()
    assert row["plain_reasons"] == {reason: 1}
    assert row["wire_bytes"] == row["logical_bytes"] == SPEC.nbytes
    assert row["bits_per_element"] == 16


def test_gates_open_where_they_say():
    s = session(first_step=1, min_bytes=SPEC.nbytes, exempt_stages=[0], exempt_sites=["embedding"])
    s.step = 1
    assert s.route(MLP, Message("all_reduce", SPEC, 2)) is not None


def test_totals_cover_all_sites_and_bits_count_plain_messages():
    s = session()
    s.route(MLP, Message("all_reduce", SPEC, 2))
    s.route(Place("tensor", "forward", "embedding", 0), Message("all_reduce", SPEC, 2))
    (total,) = s.traffic.totals()
    assert total["messages"] == 2 and total["plain_messages"] == 1
    assert total["bits_per_element"] == pytest.approx((8.125 + 16) / 2)


shapes = st.lists(st.integers(1, 70), min_size=1, max_size=3).map(tuple)


@given(
    name=st.sampled_from([name for name in registry.names() if not registry.get(name).remembers]),
    operation=st.sampled_from(["p2p", "all_reduce", "all_gather", "reduce_scatter"]),
    shape=shapes,
    dtype=st.sampled_from(FLOAT_DTYPES),
    world_size=st.integers(2, 9),
    algorithm=st.sampled_from(["one_shot", "two_shot", "auto"]),
)
def test_no_message_grows_beyond_plain(name, operation, shape, dtype, world_size, algorithm):
    settings = {"group_size": 64} if name == "fixed_point" else {}
    rule = {"compressor": name, "algorithm": algorithm, "exempt_sites": [], **settings}
    s = Session(CompressionConfig(tensor={"forward": rule}))
    shape = (shape[0] * world_size, *shape[1:])
    message = Message(operation, TensorSpec(shape, dtype), 2 if operation == "p2p" else world_size)
    compressor = s.route(MLP, message)
    (row,) = s.traffic.rows()
    assert row["wire_bytes"] <= row["logical_bytes"]
    assert (compressor is None) == (row["plain_reasons"] == {"would grow": 1})


def test_encode_error_is_sampled_on_the_first_payload():
    s = session()
    compressor = s.route(MLP, Message("all_reduce", SPEC, 2))
    tensor = torch.randn(SPEC.numel).to(SPEC.dtype)
    spec = TensorSpec.of(tensor)
    decoded = compressor.decompress(compressor.compress(tensor, spec), spec, torch.empty(SPEC.numel))
    expected = (decoded - tensor).double().square().sum() / tensor.double().square().sum()
    (row,) = s.traffic.rows()
    assert row["relative_error"] == pytest.approx(float(expected), rel=1e-6)
