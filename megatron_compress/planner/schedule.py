"""Time of a 1F1B step, from the work of its stages and the time of its messages."""

from __future__ import annotations

# Of every 1514 bytes of an Ethernet frame 1448 are payload of TCP.
PAYLOAD_SHARE = 1448 / 1514


def message_seconds(nbytes: int, bits_per_second: float) -> float:
    """8 · bytes / (rate · 1448/1514)."""
    return 8 * nbytes / (bits_per_second * PAYLOAD_SHARE)


def step_seconds(
    stages: list[float], forward: float, backward: float, num_microbatches: int, overlap: bool = True
) -> float:
    """T = Σ cᵢ + (P − 1)(f + b) + (M − 1) · p: one microbatch there and back, then one more every period p.

    With overlap p is the largest of
    * cᵢ, the work of a stage for a microbatch, and f and b, for the links are full duplex;
    * for every stage s, (Σ_{i ≥ s} cᵢ + (P − 1 − s)(f + b)) / (P − s): 1F1B keeps P − s microbatches between a stage
      and the end of the pipeline, and each takes so long to come back.
    Without, a stage works and then exchanges, with one neighbour or with two: p = max cᵢ + min(2, P − 1) · max(f, b).

    Args:
        stages: cᵢ, seconds.
        forward, backward: f and b, seconds of a message on a link.
    """
    depth = len(stages)
    links = forward + backward
    once = sum(stages) + (depth - 1) * links
    if overlap:
        loops = [(sum(stages[s:]) + (depth - 1 - s) * links) / (depth - s) for s in range(depth)]
        period = max(*stages, *loops, *([forward, backward] if depth > 1 else []))
    else:
        period = max(stages) + min(2, depth - 1) * max(forward, backward)
    return once + (num_microbatches - 1) * period
