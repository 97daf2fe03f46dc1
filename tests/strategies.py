"""What property tests share: one list of compressors to cover, messages of every kind, and how to send one.

Every registered compressor is covered with its default settings; add further settings worth covering to `SAMPLES`.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import strategies as st

from megatron_compress import registry
from megatron_compress.compressors.base import Compressor
from megatron_compress.wire import FLOAT_DTYPES, TensorSpec

SAMPLES: dict[str, list[dict]] = {
    "fixed_point": [
        {"bits": 2},
        {"bits": 10},
        {"bits": 6, "group_size": 64},
        {"bits": 16, "group_size": 33},
    ],
    "fp4_quant": [
        {"group_size": 32, "scales": "single"},
        {"group_size": 128, "format": "e3m0"},
        {"group_size": 256, "format": "e3m0", "scales": "single"},
        {"group_size": 512},
    ],
    "fp8": [{"group_size": 1}, {"group_size": 100}],
    "nvfp4": [{"truncation_free": True}],
    "tah_quant": [
        {"group_size": 8, "low_bits": 2, "high_fraction": 0.5, "outlier_threshold": 0.0},
        {"group_size": 16, "allocation_size": 48, "high_bits": 7, "low_bits": 5, "high_fraction": 0.29},
        {"group_size": 32, "allocation_size": "token", "high_bits": 8, "low_bits": 6, "outlier_threshold": math.inf},
        {"group_size": 128, "high_fraction": 1.0},
        {"group_size": 256, "high_bits": 3, "low_bits": 3, "high_fraction": 0.0},
    ],
}


def _covered() -> list[Compressor]:
    """Of each registered compressor of the package (tests may register others): the defaults, then its samples."""
    names = [name for name in registry.names() if registry.get(name).__module__.startswith("megatron_compress.")]
    return [registry.create(name, **settings) for name in names for settings in [{}, *SAMPLES.get(name, [])]]


def label(compressor: Compressor) -> str:
    """The name and the settings that differ from the defaults."""
    defaults = type(compressor).Settings()
    changed = [f"{key}={value}" for key, value in compressor.settings if value != getattr(defaults, key)]
    return "-".join([compressor.name, *changed])


COMPRESSORS = _covered()
LOSSY = [compressor for compressor in COMPRESSORS if not compressor.exact]
all_compressors = pytest.mark.parametrize("compressor", COMPRESSORS, ids=label)
lossy_compressors = pytest.mark.parametrize("compressor", LOSSY, ids=label)


@st.composite
def specs(draw, dtypes=FLOAT_DTYPES, min_size: int = 0) -> TensorSpec:
    """Empty, 0-d, 1-D and up to 4-D messages whose rows are shorter and longer than groups, whole or not."""
    channels = st.one_of(st.integers(min_size, 9), st.sampled_from([31, 32, 64, 65, 96, 128, 192, 257, 520]))
    lead = draw(st.lists(st.integers(min_size, 4), max_size=3))
    shape = draw(st.sampled_from([(), (*lead, draw(channels)), (*lead, draw(channels))]))
    sample_dim = draw(st.sampled_from([None, *range(len(shape) - 1)]))
    return TensorSpec(shape, draw(st.sampled_from(dtypes)), sample_dim)


seeds = st.integers(0, 2**32 - 1)


def normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def finite_bits(spec: TensorSpec, seed: int) -> torch.Tensor:
    """Random bit patterns that are finite: every exponent alike, both zeros and subnormals among them."""
    integer = torch.int32 if spec.dtype == torch.float32 else torch.int16
    info = torch.iinfo(integer)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(info.min, info.max + 1, spec.shape, generator=generator, dtype=integer).view(spec.dtype)
    return torch.where(x.isfinite(), x, 0.0)


def extremes(spec: TensorSpec, seed: int) -> torch.Tensor:
    """The ends of the range side by side: ±largest, ±least normal, ±least subnormal, ±0, ±1."""
    info = torch.finfo(spec.dtype)
    ends = torch.tensor([info.max, info.tiny, info.smallest_normal * info.eps, 0.0, 1.0]).to(spec.dtype)
    choice = torch.randint(2 * len(ends), spec.shape, generator=torch.Generator().manual_seed(seed))
    return torch.cat((ends, -ends))[choice]


def integers(shape: tuple[int, ...], bound: int = 100) -> torch.Tensor:
    """Integers in [-bound, bound] as float32, by arithmetic that is the same on every platform and version."""
    state = torch.arange(1, math.prod(shape) + 1, dtype=torch.int64)
    for _ in range(3):
        state = (state * 1103515245 + 12345) % 2**31
        state = state ^ (state >> 15)
    return (state % (2 * bound + 1) - bound).float().view(shape)


def round_trip(
    compressor: Compressor, x: torch.Tensor, spec: TensorSpec | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Compress and decompress `x`; the result is of `dtype`, x's own if None."""
    spec = spec or TensorSpec.of(x)
    return compressor.decompress(compressor.compress(x, spec), spec, torch.empty(spec.shape, dtype=dtype or spec.dtype))


def parts_of(compressor: Compressor, x: torch.Tensor, spec: TensorSpec | None = None) -> dict[str, torch.Tensor]:
    """The sections of x's payload by name."""
    spec = spec or TensorSpec.of(x)
    return compressor.layout_of(spec).views(compressor.compress(x, spec))


def scopes(compressor: Compressor, spec: TensorSpec) -> torch.Tensor | None:
    """The scope of one scale (DESIGN D9): a number per element, equal where elements share it; None if not known."""
    index = torch.arange(spec.numel)
    rows, channels = index // max(1, spec.num_channels), index % max(1, spec.num_channels)
    group = getattr(compressor.settings, "group_size", None)
    if compressor.name == "identity":
        ids = index
    elif compressor.name == "fixed_point" and group is None:
        ids = channels if len(spec.shape) > 1 else torch.zeros_like(index)
    elif compressor.name == "tah_quant":
        ids = rows * spec.num_channels + channels // group
    elif compressor.name in ("fixed_point", "fp4_quant", "fp8"):
        ids = index // group
    elif compressor.name == "nvfp4":
        ids = index // 128
    else:
        return None
    return ids.view(spec.shape)


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same dtype, shape and bits, signs of zeros included; one NaN is as good as another."""
    same = (a == b) & (torch.signbit(a) == torch.signbit(b)) | (a.isnan() & b.isnan())
    return a.dtype == b.dtype and a.shape == b.shape and bool(same.all())


def sqnr(x: torch.Tensor, decoded: torch.Tensor) -> float:
    """Signal to quantization noise in dB."""
    x, decoded = x.double(), decoded.double()
    return float(10 * torch.log10((x**2).sum() / ((x - decoded) ** 2).sum()))
