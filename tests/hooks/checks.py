"""What must hold between a plain run, one with the identity compressor and one with lossy ones."""

from __future__ import annotations

from tests.hooks.tracing import Call

IDENTITY = {
    "pipeline": {"forward": {"compressor": "identity"}, "backward": {"compressor": "identity"}},
    "tensor": {
        "forward": {"compressor": "identity", "exempt_sites": []},
        "backward": {"compressor": "identity", "exempt_sites": []},
    },
}
MIXED = {
    "pipeline": {"forward": {"compressor": "tah_quant"}, "backward": {"compressor": "fixed_point", "bits": 6}},
    "tensor": {"forward": {"compressor": "fp4_quant"}, "backward": {"compressor": "fp8"}},
}


def equal_runs(plain: list[dict], identity: list[dict]) -> None:
    """Losses and parameters are equal to the bit, and every message went through a compressor."""
    for before, after in zip(plain, identity, strict=True):
        assert after["losses"] == before["losses"]
        assert after["held_out"] == before["held_out"]
        assert after["parameters"] == before["parameters"]
        assert all(row["plain_messages"] == 0 for row in after["rows"])


def replicas_are_identical(results: list[dict]) -> None:
    """Ranks of a stage hold the same bits in all parameters that they share, and all ranks know the same losses."""
    by_stage: dict[int, set[str]] = {}
    for result in results:
        by_stage.setdefault(result["stage"], set()).add(result["replicated"])
        assert result["losses"] == results[0]["losses"]
    assert all(len(digests) == 1 for digests in by_stage.values())


def nothing_else_touched(plain: list[dict], identity: list[dict], mixed: list[dict], routed: bool = False) -> None:
    """Calls from elsewhere in Megatron than the hooked functions: the same, in the same order, with the same values.

    Args:
        routed: tokens go to experts, so that lossy runs have other shapes.
    """
    for before, same, other in zip(plain, identity, mixed, strict=True):
        never = [call for call in before["calls"] if not call.compressible]
        assert [call for call in same["calls"] if not call.compressible] == never
        others = [call for call in other["calls"] if not call.compressible]
        assert [_kind(call, routed) for call in others] == [_kind(call, routed) for call in never]
        assert all(call.dtype == "torch.uint8" for call in same["calls"] if call.compressible)


def _kind(call: Call, routed: bool) -> tuple:
    return (call.function, call.caller, call.ranks, call.dtype, None if routed else call.shape)


def counted_bytes_travelled(result: dict) -> None:
    """The report has the bytes that were handed to torch.distributed, on one of two tensor-parallel ranks."""
    for axis in ("pipeline", "tensor"):
        counted = sum(row["wire_bytes"] for row in result["rows"] if row["axis"] == axis)
        assert counted == _bytes_on_the_wire(result["calls"], axis)


def _bytes_on_the_wire(calls: list[Call], axis: str) -> int:
    """To the one peer on the tensor axis, or to both neighbours."""
    total = 0
    for call in calls:
        if call.compressible and (call.function in ("isend", "irecv")) == (axis == "pipeline"):
            whole = call.function in ("isend", "all_gather_into_tensor", "all_reduce")
            total += 0 if call.function == "irecv" else call.nbytes if whole else call.nbytes // 2
    return total
