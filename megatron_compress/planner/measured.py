"""The measured speeds of machines, as in `measured.yaml`: the only numbers of the planner that are not computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from megatron_compress import registry, strict_yaml
from megatron_compress.compressors.base import Compressor
from megatron_compress.strict_model import StrictModel, nearest
from megatron_compress.strict_yaml import ConfigError

_FILE = Path(__file__).with_name("measured.yaml")
_SMALL, _LARGE = 2**20, 64 * 2**20


class Kernel(StrictModel):
    """Microseconds of a compressor's work on 1 MiB and on 64 MiB of tensor, between and beyond which it is linear."""

    compressor: str
    settings: dict[str, Any] = {}
    encode: tuple[float, float] = Field(strict=False)
    decode: tuple[float, float] = Field(strict=False)
    sum_of_4: tuple[float, float] | None = Field(default=None, strict=False, description="decode and add 4 payloads")

    def build(self) -> Compressor:
        return registry.create(self.compressor, **self.settings)

    def encode_seconds(self, nbytes: int) -> float:
        return _line(self.encode, nbytes)

    def decode_seconds(self, nbytes: int, payloads: int = 1) -> float:
        """Of so many payloads, added: linear between one and four."""
        one = _line(self.decode, nbytes)
        return one if payloads == 1 else one + (payloads - 1) / 3 * (_line(self.sum_of_4, nbytes) - one)


class Device(StrictModel):
    """A kind of machine.

    Args:
        training_tflops: floating-point operations of matrix products per second in a whole training step, 10¹².
        element_bytes: of an activation.
        overlap: whether pipeline transfers leave the critical path (`hooks.overlap`).
        collective_latency: microseconds of a collective of nothing, and `collective_gb_per_second` its bytes a rank.
    """

    provenance: str
    training_tflops: float = Field(gt=0)
    element_bytes: int = Field(ge=1)
    overlap: bool
    collective_latency: float = Field(ge=0)
    collective_gb_per_second: float = Field(gt=0)
    kernels: list[Kernel]

    def collective_seconds(self, nbytes: float) -> float:
        """latency + bytes that a rank sends / bandwidth."""
        return self.collective_latency * 1e-6 + nbytes / (self.collective_gb_per_second * 1e9)


class _Measured(StrictModel):
    devices: dict[str, Device]


def device(name: str) -> Device:
    """Raises:
    ConfigError: nothing has been measured on such a machine.
    """
    known = strict_yaml.load(_FILE, _Measured).devices
    if name not in known:
        raise ConfigError(f"--gpu {name!r}: nothing was measured{nearest(name, known)}; known: {', '.join(known)}")
    return known[name]


def _line(microseconds: tuple[float, float], nbytes: int) -> float:
    small, large = microseconds
    return 1e-6 * max(0.0, small + (large - small) * (nbytes - _SMALL) / (_LARGE - _SMALL))
