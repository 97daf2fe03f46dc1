"""What both ends of a link remember of every training sample: the last activation that crossed it (AQ-SGD)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Samples:
    """Which samples a training step is of, on this data-parallel rank.

    Args:
        microbatches: the ids in each microbatch, in order; no id twice in a step.
        per_epoch: how many different samples this rank has; each comes back once an epoch.
    """

    microbatches: tuple[tuple[int, ...], ...]
    per_epoch: int

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(i for microbatch in self.microbatches for i in microbatch)


class SampleMemory:
    """Tensors [s, h] of one shape and dtype by sample id, in memory or in a mapped file.

    Args:
        capacity: samples that there are at most.
        file: to map; it is unlinked at once, so that its space is free when the process ends, however it ends.
    """

    def __init__(self, capacity: int, file: Path | None = None):
        self._capacity = capacity
        self._file = file
        self._slots: dict[int, int] = {}
        self._values: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Of the samples remembered."""
        return 0 if self._values is None else len(self._slots) * self._values[0].nbytes

    def has(self, samples: Sequence[int]) -> bool:
        """Whether all of them are remembered."""
        return all(sample in self._slots for sample in samples)

    def read(self, samples: Sequence[int], device: torch.device) -> torch.Tensor:
        """Float32 [s, b, h] of b samples; zero where a value was not finite: a bad step is not kept for ever."""
        values = self._values[[self._slots[sample] for sample in samples]]
        return values.movedim(0, 1).to(device, torch.float32).nan_to_num(0.0, 0.0, 0.0)

    def store(self, samples: Sequence[int], tensor: torch.Tensor) -> None:
        """Remember [s, b, h], exactly.

        Raises:
            ValueError: it is not of b samples, or of another shape or dtype than what is remembered.
        """
        if tensor.dim() != 3 or tensor.size(1) != len(samples):
            raise ValueError(f"a message {tuple(tensor.shape)} of {len(samples)} samples: expected [s, samples, h]")
        if self._values is None:
            self._values = self._allocate((tensor.size(0), tensor.size(2)), tensor.dtype)
        if self._values.shape[1:] != tensor[:, 0].shape or self._values.dtype != tensor.dtype:
            raise ValueError(
                f"a sample of {tensor.dtype} {tuple(tensor[:, 0].shape)} where {self._values.dtype} "
                f"{tuple(self._values.shape[1:])} is remembered; samples must keep their length"
            )
        slots = [self._slots.setdefault(sample, len(self._slots)) for sample in samples]
        self._values[slots] = tensor.detach().movedim(1, 0).to(self._values.device)

    def state_dict(self) -> dict:
        """Plain values and tensors."""
        values = None if self._values is None else self._values[: len(self._slots)].clone()
        return {"capacity": self._capacity, "samples": list(self._slots), "values": values}

    def load_state_dict(self, state: dict) -> None:
        self._capacity = state["capacity"]
        self._slots = {sample: slot for slot, sample in enumerate(state["samples"])}
        if state["values"] is not None:
            self._values = self._allocate(tuple(state["values"].shape[1:]), state["values"].dtype)
            self._values[: len(self._slots)] = state["values"]

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = (self._capacity, *shape)
        if self._file is None:
            return torch.empty(size, dtype=dtype)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        numel = torch.Size(size).numel()
        values = torch.from_file(str(self._file), shared=True, size=numel, dtype=dtype).view(size)
        self._file.unlink()
        return values
