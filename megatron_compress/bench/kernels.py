"""Every kernel's time beside its floor: the fewest bytes it must move, at the bandwidth of a device copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from rich import box
from rich.table import Table

from megatron_compress import registry
from megatron_compress.bench.timing import copy_bandwidth, median_seconds
from megatron_compress.compressors.base import Compressor
from megatron_compress.ops.hadamard import grouped_hadamard
from megatron_compress.wire import TensorSpec

CASES: dict[str, tuple[str, dict]] = {
    "fp4_quant one scale": ("fp4_quant", {"group_size": 64, "scales": "single"}),
    "fp4_quant two scales": ("fp4_quant", {"group_size": 64}),
    "fp4_quant G=128": ("fp4_quant", {"group_size": 128, "scales": "single"}),
    "fp8": ("fp8", {}),
    "fixed_point 8 bits": ("fixed_point", {"bits": 8, "group_size": 64}),
    "fixed_point 6 bits": ("fixed_point", {"bits": 6, "group_size": 64}),
    "fixed_point 6 bits, channels": ("fixed_point", {"bits": 6}),
    "tah_quant": ("tah_quant", {}),
}
CHANNELS = 4096


@dataclass(frozen=True)
class Timing:
    """Of one kernel on one size. Megabytes are 2^20 bytes of bfloat16 tensor; bytes are those that must move."""

    kernel: str
    operation: str
    megabytes: int
    microseconds: float
    floor_microseconds: float

    @property
    def ratio(self) -> float:
        return self.microseconds / self.floor_microseconds


def measure(megabytes: list[int], only: str = "") -> Iterator[Timing]:
    """Time every case whose name contains `only`, on random bfloat16 [tokens, 4096] of each size."""
    bandwidth = copy_bandwidth()
    for size in megabytes:
        x = torch.randn(size * 2**19 // CHANNELS, CHANNELS, device="cuda", dtype=torch.bfloat16)
        for kernel, operation, nbytes, call in _calls(x, only):
            yield Timing(kernel, operation, size, median_seconds(call) * 1e6, nbytes / bandwidth * 1e6)


def _calls(x: torch.Tensor, only: str) -> Iterator[tuple[str, str, int, Callable[[], object]]]:
    for label, (name, settings) in CASES.items():
        if only in label:
            for operation, nbytes, call in _compressor_calls(registry.create(name, **settings), x):
                yield label, operation, nbytes, call
    out = torch.empty_like(x)
    for group in (64, 128, 256):
        if only in "hadamard":
            yield f"hadamard G={group}", "transform", 2 * x.nbytes, lambda g=group: grouped_hadamard(x, out, g, 0.125)
    if only in "copy":
        yield "copy", "", 2 * x.nbytes, lambda: out.copy_(x)


def _compressor_calls(compressor: Compressor, x: torch.Tensor) -> Iterator[tuple[str, int, Callable[[], object]]]:
    spec = TensorSpec.of(x)
    payload = compressor.compress(x, spec)
    out = torch.empty_like(x)
    moved = x.nbytes + payload.nbytes
    yield "encode", moved, lambda: compressor.compress(x, spec, payload)
    yield "decode", moved, lambda: compressor.decompress(payload, spec, out)
    for ranks in (2, 4):
        stacked = torch.stack([compressor.compress(torch.randn_like(x), spec) for _ in range(ranks)])
        moved = ranks * payload.nbytes
        yield f"sum of {ranks}", moved + x.nbytes, lambda s=stacked: compressor.decompress_sum(s, spec, out)
        if compressor.name != "tah_quant":
            yield (
                f"requantize {ranks}",
                moved + payload.nbytes,
                lambda s=stacked: compressor.requantize(s, spec, payload),
            )


def table(timings: list[Timing]) -> Table:
    """One row a kernel and operation, for each size the time in µs and its multiple of the floor."""
    sizes = sorted({t.megabytes for t in timings})
    result = Table(title="kernels: µs (multiple of the floor)", box=box.SIMPLE_HEAD, pad_edge=False)
    result.add_column("kernel")
    result.add_column("operation")
    for size in sizes:
        result.add_column(f"{size} MB", justify="right")
    rows: dict[tuple[str, str], dict[int, Timing]] = {}
    for timing in timings:
        rows.setdefault((timing.kernel, timing.operation), {})[timing.megabytes] = timing
    for (kernel, operation), cells in rows.items():
        values = [f"{cells[s].microseconds:.1f} ({cells[s].ratio:.2f})" if s in cells else "" for s in sizes]
        result.add_row(kernel, operation, *values)
    return result


def to_json(timings: list[Timing]) -> list[dict]:
    return [asdict(t) | {"ratio": t.ratio} for t in timings]
