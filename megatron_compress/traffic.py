"""Counts of what travelled, and how exactly: the summary that every run ends with (DESIGN D10)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields

import torch
import torch.distributed as dist
from rich import box
from rich.table import Table

from megatron_compress.collectives.message import Message
from megatron_compress.compressors.base import Compressor
from megatron_compress.sample_memory import SampleMemory
from megatron_compress.wire import TensorSpec

# One payload in so many is decoded again by its sender to measure the error.
SAMPLING_INTERVAL = 64


@dataclass
class Flow:
    """Counts of one kind of message. Bytes are those that a rank puts on the wire (`Message.logical_bytes`)."""

    messages: int = 0
    plain: Counter[str] = field(default_factory=Counter)
    logical_bytes: int = 0
    wire_bytes: int = 0
    elements: float = 0.0
    payloads: int = 0
    error: torch.Tensor | float = 0.0
    energy: torch.Tensor | float = 0.0
    memory_bytes: int = 0
    memories: list[SampleMemory] = field(default_factory=list)

    def count(self, message: Message, wire_bytes: int, plain_reason: str | None) -> None:
        self.messages += 1
        if plain_reason:
            self.plain[plain_reason] += 1
        self.logical_bytes += message.logical_bytes
        self.wire_bytes += wire_bytes
        self.elements += message.logical_bytes / message.spec.dtype.itemsize

    def metered(self, compressor: Compressor) -> Compressor:
        """`compressor`, with a sample of its errors accumulated here, on the device, without a host sync."""
        return _Metered(compressor, self)

    @property
    def bits_per_element(self) -> float | None:
        """Over all messages, plain ones included."""
        return 8 * self.wire_bytes / self.elements if self.elements else None

    @property
    def relative_error(self) -> float | None:
        """Mean square error over mean square of the sampled payloads; None if none was compressed."""
        return float(self.error) / float(self.energy) if self.payloads and float(self.energy) else None

    def __add__(self, other: Flow) -> Flow:
        return Flow(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Flow)})

    def on_host(self) -> Flow:
        """A copy whose error sums are Python floats, and whose memories are their size."""
        values = {f.name: getattr(self, f.name) for f in fields(Flow)}
        remembered = self.memory_bytes + sum(memory.nbytes for memory in self.memories)
        numbers = {"error": float(self.error), "energy": float(self.energy), "memory_bytes": remembered}
        return Flow(**values | numbers | {"memories": []})


class _Metered:
    """A compressor as the collectives see it, which decodes every `SAMPLING_INTERVAL`-th payload it makes."""

    def __init__(self, compressor: Compressor, flow: Flow):
        self._compressor = compressor
        self._flow = flow

    def __getattr__(self, name: str):
        return getattr(self._compressor, name)

    def compress(self, tensor: torch.Tensor, spec: TensorSpec, payload: torch.Tensor | None = None) -> torch.Tensor:
        payload = self._compressor.compress(tensor, spec, payload)
        self._sample(payload, spec, tensor.detach().double)
        return payload

    def requantize(self, payloads: torch.Tensor, spec: TensorSpec, payload: torch.Tensor | None = None) -> torch.Tensor:
        payload = self._compressor.requantize(payloads, spec, payload)
        self._sample(payload, spec, lambda: self._decoded(payloads, spec).to(spec.dtype).double())
        return payload

    def _sample(self, payload: torch.Tensor, spec: TensorSpec, original: Callable[[], torch.Tensor]) -> None:
        if self._flow.payloads % SAMPLING_INTERVAL == 0:
            exact = original()
            self._flow.error = self._flow.error + (self._decoded(payload[None], spec) - exact).square().sum()
            self._flow.energy = self._flow.energy + exact.square().sum()
        self._flow.payloads += 1

    def _decoded(self, payloads: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        out = torch.empty(spec.shape, dtype=torch.float64, device=payloads.device)
        return self._compressor.decompress_sum(payloads, spec, out)


class Traffic:
    """Flows by (axis, direction, site)."""

    def __init__(self, flows: dict[tuple[str, str, str], Flow] | None = None):
        self._flows = flows or {}

    def flow(self, axis: str, direction: str, site: str) -> Flow:
        return self._flows.setdefault((axis, direction, site), Flow())

    def on_host(self) -> Traffic:
        """A copy of plain numbers, which does not count on."""
        return Traffic({key: flow.on_host() for key, flow in self._flows.items()})

    def gather(self) -> Traffic:
        """The sum over all ranks. A collective: every rank must call it, and every rank gets the result."""
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, self.on_host())
        return Traffic.total(parts)

    @staticmethod
    def total(parts: Iterable[Traffic]) -> Traffic:
        """The sum of what several ranks counted, each `on_host`."""
        total: dict[tuple[str, str, str], Flow] = {}
        for part in parts:
            for key, flow in part._flows.items():
                total[key] = total[key] + flow if key in total else flow
        return Traffic(dict(sorted(total.items())))

    @property
    def memory_bytes(self) -> int:
        """Of the activations that compressors remember, on both ends of every link."""
        return sum(flow.on_host().memory_bytes for flow in self._flows.values())

    def rows(self) -> list[dict]:
        """One dict per axis, direction and site; byte and message counts, bits per element, relative error."""
        return [
            _row({"axis": axis, "direction": direction, "site": site}, flow)
            for (axis, direction, site), flow in sorted(self._flows.items())
        ]

    def totals(self) -> list[dict]:
        """One dict per axis and direction, over all its sites, exempt ones included."""
        sums = self.by_direction().items()
        return [_row({"axis": axis, "direction": direction}, flow) for (axis, direction), flow in sums]

    def by_direction(self) -> dict[tuple[str, str], Flow]:
        """The sums by (axis, direction), as they are now: they do not count on."""
        sums: dict[tuple[str, str], Flow] = {}
        for (axis, direction, _), flow in sorted(self._flows.items()):
            sums[axis, direction] = sums.get((axis, direction), Flow()) + flow
        return sums

    def to_json(self) -> dict:
        """Rows, totals and the size of what is remembered, as JSON values."""
        return {"rows": self.rows(), "totals": self.totals(), "memory_bytes": self.memory_bytes}

    def table(self, name: str) -> Table:
        """The rows for people; `name` is whose traffic it is. Error is mean square, relative to the mean square."""
        table = Table(title=f"traffic of {name}", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("message", no_wrap=True)
        for heading in ("count", "logical\nMB", "wire\nMB", "bits per\nelement", "error"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("sent plainly")
        for row in self.rows():
            table.add_row(
                f"{row['axis']} {row['direction']} {row['site']}",
                f"{row['messages']:,}",
                f"{row['logical_bytes'] / 1e6:,.1f}",
                f"{row['wire_bytes'] / 1e6:,.1f}",
                "-" if row["bits_per_element"] is None else f"{row['bits_per_element']:.3f}",
                "-" if row["relative_error"] is None else f"{row['relative_error']:.1e}",
                ", ".join(f"{count:,} {reason}" for reason, count in row["plain_reasons"].items()) or "none",
            )
        return table


def _row(key: dict, flow: Flow) -> dict:
    return {
        **key,
        "messages": flow.messages,
        "plain_messages": sum(flow.plain.values()),
        "plain_reasons": dict(flow.plain),
        "logical_bytes": flow.logical_bytes,
        "wire_bytes": flow.wire_bytes,
        "bits_per_element": flow.bits_per_element,
        "relative_error": flow.relative_error,
    }
