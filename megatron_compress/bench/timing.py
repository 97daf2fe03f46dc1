"""Times of GPU work: with the cache flushed, by events, as medians."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

# Written between repetitions: several times the L2 cache of any GPU there is, and long enough that the host, which
# launches what is timed behind it, runs ahead.
_FLUSH_BYTES = 512 * 2**20
REPETITIONS = 30


def median_seconds(call: Callable[[], object], repetitions: int = REPETITIONS) -> float:
    """Median time on the device of `call`, which only launches work on the current stream."""
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repetitions)]
    for start, end in events:
        flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3


def copy_bandwidth(nbytes: int = 2**30) -> float:
    """Bytes read and written per second by a device copy of `nbytes`."""
    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * nbytes / median_seconds(lambda: target.copy_(source), 10)
