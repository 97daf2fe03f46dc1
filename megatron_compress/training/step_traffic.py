"""What one training step put on the wire, and how exactly: the difference of a rank's counts before and after it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_compress.traffic import Flow

Counts = dict[tuple[str, str], Flow]


@dataclass(frozen=True)
class DirectionTraffic:
    """One axis and direction in one step, as one rank sent it.

    Args:
        bits_per_element: plain messages included; None if there was no element.
        relative_error: mean square, relative to the mean square, of the payloads that were sampled in this step (one
            in `traffic.SAMPLING_INTERVAL`); None if none was.
    """

    logical_bytes: int
    wire_bytes: int
    bits_per_element: float | None
    relative_error: float | None


def step_traffic(before: Counts, after: Counts) -> dict[str, DirectionTraffic]:
    """By "AXIS DIRECTION", those that sent something. The counts are `Traffic.by_direction()`'s."""
    steps = {
        f"{axis} {direction}": _between(before.get((axis, direction), Flow()), flow)
        for (axis, direction), flow in after.items()
    }
    return {name: step for name, step in steps.items() if step.logical_bytes}


def _between(before: Flow, after: Flow) -> DirectionTraffic:
    wire, elements = after.wire_bytes - before.wire_bytes, after.elements - before.elements
    energy = float(after.energy - before.energy)
    return DirectionTraffic(
        logical_bytes=after.logical_bytes - before.logical_bytes,
        wire_bytes=wire,
        bits_per_element=8 * wire / elements if elements else None,
        relative_error=float(after.error - before.error) / energy if energy else None,
    )
