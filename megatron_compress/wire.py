"""The one place that computes sizes and offsets of what travels (DESIGN D6; docs/wire.md is its page for people).

A message is described by a `TensorSpec` that both ends know before anything is sent. A compressor maps the spec to
a `Layout`: an ordered list of typed sections in one contiguous uint8 buffer, the payload.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

# Raised with every change of any payload's bytes; ranks compare it before the first message.
WIRE_VERSION = 2

# Every payload is a multiple of this many bytes, so that payloads laid side by side (gathers) stay aligned: to the
# widest load of a GPU.
PAYLOAD_ALIGNMENT = 16

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def compressible(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a dtype that activations and gradients have: others are never touched."""
    return tensor.dtype in FLOAT_DTYPES


@dataclass(frozen=True)
class TensorSpec:
    """What both ends know of one message.

    Args:
        shape: of the tensor; the last dimension is the channels (a 1-D tensor is one row of channels).
        dtype: float32, bfloat16 or float16.
        sample_dim: the dimension that counts samples (1 in a pipeline tensor [s, b, h], DESIGN D13), or None where
            the whole tensor is one sample.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sample_dim: int | None = None

    def __post_init__(self):
        if self.dtype not in FLOAT_DTYPES:
            raise TypeError(
                f"a message must be one of {', '.join(map(str, FLOAT_DTYPES))}, got {self.dtype}; "
                "send other dtypes uncompressed"
            )
        if self.sample_dim is not None and not 0 <= self.sample_dim < len(self.shape) - 1:
            raise ValueError(
                f"sample_dim must be a dimension before the last of {self.shape}, got {self.sample_dim}; "
                "None makes the whole tensor one sample"
            )

    @classmethod
    def of(cls, tensor: torch.Tensor, sample_dim: int | None = None) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype, sample_dim)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def num_samples(self) -> int:
        return 1 if self.sample_dim is None else self.shape[self.sample_dim]

    @property
    def num_channels(self) -> int:
        """Length of a row: the last dimension, 1 for a scalar."""
        return self.shape[-1] if self.shape else 1

    @property
    def num_rows(self) -> int:
        """Rows (tokens) over all samples."""
        return math.prod(self.shape[:-1])


@dataclass(frozen=True)
class Section:
    """A typed array inside the payload: `offset` and `nbytes` in bytes, `shape` in items of `dtype`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """Ordered sections of a payload; no gaps but the alignment of a section to its own item size.

    nbytes is what travels: the end of the last section rounded up to `PAYLOAD_ALIGNMENT`; 0 for an empty tensor.
    """

    sections: tuple[Section, ...]
    nbytes: int

    @classmethod
    def of(cls, *fields: tuple[str, torch.dtype, tuple[int, ...]]) -> Layout:
        """Lay out (name, dtype, shape) fields one behind the other; empty fields take no bytes."""
        sections = []
        end = 0
        for name, dtype, shape in fields:
            section = Section(name, dtype, shape, offset=_round_up(end, dtype.itemsize))
            sections.append(section)
            if section.nbytes:
                end = section.offset + section.nbytes
        return cls(tuple(sections), _round_up(end, PAYLOAD_ALIGNMENT))

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """[start, end) of the bytes in no section, before an aligned section or behind the last one; they are 0."""
        gaps = []
        end = 0
        for start, nbytes in [*((s.offset, s.nbytes) for s in self.sections if s.nbytes), (self.nbytes, 0)]:
            if start > end:
                gaps.append((end, start))
            end = start + nbytes
        return gaps

    def views(self, payload: torch.Tensor) -> dict[str, torch.Tensor]:
        """Typed views into `payload`, by section name; writes go to the payload.

        payload: uint8 [nbytes], or [ranks, nbytes] with dense rows; the views have the leading dimension too.
        """
        if payload.dtype != torch.uint8 or payload.dim() not in (1, 2) or payload.shape[-1] != self.nbytes:
            raise ValueError(
                f"payload must be uint8 of shape ({self.nbytes},), got {payload.dtype} of {tuple(payload.shape)}"
            )
        return {
            s.name: payload[..., s.offset : s.offset + s.nbytes].view(s.dtype).view((*payload.shape[:-1], *s.shape))
            for s in self.sections
        }

    def __iter__(self) -> Iterator[Section]:
        return iter(self.sections)


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of `count` codes of `bits` bits each in the bit stream of `ops.bits`."""
    return -(-count * bits // 8)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
