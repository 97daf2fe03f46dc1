"""Times of GPU work: with the cache flushed, by events, as medians."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

# Read between repetitions, so that no lines are left that must be written back during what is timed: several times the
# L2 cache of any GPU there is, and long enough that the host, which launches what is timed behind it, runs ahead.
_FLUSH_BYTES = 512 * 2**20
REPETITIONS = 30


def median_seconds(call: Callable[[], object], repetitions: int = REPETITIONS) -> float:
    """Median time on the device of `call`, which only launches work on the current stream.

    It is captured in a graph and replayed, so that the host's time for launches does not count.
    """
    return _median_of(_captured(call), repetitions)


def _captured(call: Callable[[], object]) -> Callable[[], object]:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _median_of(call: Callable[[], object], repetitions: int) -> float:
    flush = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
    call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repetitions)]
    for start, end in events:
        flush.sum()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3


def copy_bandwidth(nbytes: int = 2**30) -> float:
    """Bytes read and written per second by a device copy of `nbytes`; as a kernel, for in a graph a copy is slower."""
    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * nbytes / _median_of(lambda: target.copy_(source), 10)
