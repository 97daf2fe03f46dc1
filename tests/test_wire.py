"""Specs, layouts, sizes, and docs/wire.md."""

import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_compress import registry
from megatron_compress.wire import Layout, TensorSpec, packed_bytes
from tests.strategies import COMPRESSORS, all_compressors, specs

PAGE = (Path(__file__).parents[1] / "docs" / "wire.md").read_text()
EXAMPLE = re.compile(
    r"^`(?P<name>\w+)\((?P<settings>.*)\)`, (?P<dtype>\w+) \[(?P<shape>[\d, ]*)\]"
    r"(, samples in dimension (?P<dim>\d))?: (?P<nbytes>\d+) bytes, (?P<bits>[\d.]+) bits per element\n\n"
    r"(?P<table>(\|.*\n)+)",
    re.MULTILINE,
)


def test_spec():
    spec = TensorSpec.of(torch.empty(5, 2, 100, dtype=torch.bfloat16), sample_dim=1)
    assert spec == TensorSpec((5, 2, 100), torch.bfloat16, 1)
    assert (spec.numel, spec.nbytes, spec.num_samples, spec.num_channels, spec.num_rows) == (1000, 2000, 2, 100, 10)
    scalar = TensorSpec((), torch.float32)
    assert (scalar.numel, scalar.num_samples, scalar.num_channels, scalar.num_rows) == (1, 1, 1, 1)
    empty = TensorSpec((3, 0), torch.float32)
    assert (empty.numel, empty.num_channels, empty.num_rows) == (0, 0, 3)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.bool, torch.uint8], ids=str)
def test_spec_refuses_other_dtypes(dtype):
    with pytest.raises(TypeError, match="uncompressed"):
        TensorSpec((2,), dtype)


@pytest.mark.parametrize("shape,dim", [((), 0), ((4,), 0), ((4, 8), 1), ((4, 2, 8), 2), ((4, 2, 8), -2)], ids=str)
def test_spec_refuses_a_sample_dimension_that_is_none(shape, dim):
    with pytest.raises(ValueError, match="sample_dim"):
        TensorSpec(shape, torch.float32, dim)


@given(
    st.lists(st.tuples(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]), st.integers(0, 9)), max_size=6)
)
def test_sections_fill_the_payload(fields):
    layout = Layout.of(*((f"s{i}", dtype, (count,)) for i, (dtype, count) in enumerate(fields)))
    assert layout.nbytes % 8 == 0
    end = 0
    for section in layout:
        if section.nbytes:
            assert section.offset % section.dtype.itemsize == 0
            assert 0 <= section.offset - end < section.dtype.itemsize
            end = section.offset + section.nbytes
    assert 0 <= layout.nbytes - end < 16

    payload = torch.zeros(layout.nbytes, dtype=torch.uint8)
    views = layout.views(payload)
    assert [(view.dtype, len(view)) for view in views.values()] == fields
    for view in views.values():
        view.view(torch.uint8).add_(1)
    for start, end in layout.gaps:
        payload[start:end] += 1
    assert (payload == 1).all()


@settings(max_examples=20)
@all_compressors
@given(spec=specs())
def test_views_of_a_payload(compressor, spec):
    layout = compressor.layout_of(spec)
    assert layout == compressor.layout(spec)
    assert (layout.nbytes == 0) == (spec.numel == 0)
    assert compressor.payload_bytes(spec) == layout.nbytes
    assert compressor.bits_per_element(spec) == 8 * layout.nbytes / max(1, spec.numel)
    views = layout.views(torch.empty(layout.nbytes, dtype=torch.uint8))
    assert [(s.name, s.dtype, s.shape) for s in layout] == [(n, v.dtype, tuple(v.shape)) for n, v in views.items()]


def test_packed_bytes():
    assert [packed_bytes(count, 3) for count in (0, 1, 2, 3, 8, 9)] == [0, 1, 1, 2, 3, 4]


def align(*sections: tuple[int, int]) -> int:
    """Size of a payload of (bytes, item size) sections: a second way to count."""
    end = 0
    for nbytes, item in sections:
        if nbytes:
            end = math.ceil(end / item) * item + nbytes
    return math.ceil(end / 16) * 16


def expected_bytes(compressor, spec: TensorSpec) -> int:
    """The papers' and the page's formulas, written out."""
    n, s, name = spec.numel, compressor.settings, compressor.name
    if name == "identity":
        return align((n * spec.dtype.itemsize, spec.dtype.itemsize))
    if name == "fp8":
        return align((n, 1), (4 * math.ceil(n / s.group_size), 4))
    if name == "nvfp4":
        return align((math.ceil(n / 2), 1), (math.ceil(n / 16), 1), (4 * math.ceil(n / 128), 4))
    if name == "fp4_quant":
        floats = 2 if s.scales == "dual" else 1
        return align((math.ceil(n / 2), 1), (4 * floats * math.ceil(n / s.group_size), 4))
    if name in ("fixed_point", "aq_sgd"):
        codes = math.ceil(n * s.bits / 8) if s.bits <= 8 else n + math.ceil(n * (s.bits - 8) / 8)
        channels = spec.shape[-1] if len(spec.shape) > 1 else 1
        scales = (channels if s.group_size is None else math.ceil(n / s.group_size)) if n else 0
        return align((codes, 1), (2 * scales, 2))
    assert name == "tah_quant", f"write down how many bytes {name} needs"
    g, rows, channels = s.group_size, math.prod(spec.shape[:-1]), spec.shape[-1] if spec.shape else 1
    whole, short = channels // g, channels % g
    a = {None: g, "token": max(1, whole) * g}.get(s.allocation_size, s.allocation_size)
    samples = 1 if spec.sample_dim is None else spec.shape[spec.sample_dim]
    windows = channels // a
    percent = round(s.high_fraction * 100)
    low = (rows * windows - samples * (percent * (rows // max(1, samples)) * windows // 100)) * (a // g)
    tiles = rows * (whole + (short > 0))
    return align(
        (math.ceil((rows * whole - low) * g * s.high_bits / 8), 1),
        (math.ceil(low * g * s.low_bits / 8), 1),
        (math.ceil(rows * short * s.high_bits / 8), 1),
        (4 * tiles, 2),
        (math.ceil(rows * windows / 8), 1),
        (math.ceil(tiles * round(math.log2(g)) / 8), 1),
    )


@settings(max_examples=40)
@all_compressors
@given(spec=specs())
def test_byte_counts(compressor, spec):
    assert compressor.payload_bytes(spec) == expected_bytes(compressor, spec)


@pytest.mark.parametrize(
    "name,options,bits",
    [
        ("identity", {}, 16),
        ("fp8", {"group_size": 256}, 8 + 32 / 256),
        ("nvfp4", {}, 4.75),
        *(("fp4_quant", {"group_size": g}, 4 + 64 / g) for g in (32, 64, 128, 256, 512)),
        *(("fp4_quant", {"group_size": g, "scales": "single"}, 4 + 32 / g) for g in (32, 64, 128, 256, 512)),
        *(("fixed_point", {"bits": b, "group_size": 64}, b + 16 / 64) for b in range(2, 17)),
        *(("fixed_point", {"bits": b}, b + 16 / 4096) for b in (6, 8, 10)),
        *(("tah_quant", {"group_size": g, "high_fraction": 1.0}, 4 + (33 + math.log2(g)) / g) for g in (8, 64, 256)),
        ("tah_quant", {"high_fraction": 0.8}, 3.8 + 39 / 64),
    ],
)
def test_bits_per_element_of_whole_groups(name, options, bits):
    spec = TensorSpec((1024, 4, 2560), torch.bfloat16, 1)
    assert registry.create(name, **options).bits_per_element(spec) == pytest.approx(bits, abs=1e-4)


@pytest.mark.parametrize("h", [896, 1024, 1600, 2048, 2560, 3584, 4096, 8192])
@pytest.mark.parametrize("s,b", [(128, 1), (512, 4), (1024, 1), (2048, 2), (4096, 1), (8192, 1)])
def test_tah_quant_needs_the_papers_bits(s, b, h):
    """The paper's 4.41 bits per element, metadata and padding included."""
    spec = TensorSpec((s, b, h), torch.bfloat16, 1)
    assert 4.40 <= registry.create("tah_quant").bits_per_element(spec) <= 4.41


def example_rows(match: re.Match) -> list[tuple[str, ...]]:
    lines = match["table"].splitlines()[2:]
    return [tuple(cell.strip(" `") for cell in line.strip("|").split("|")) for line in lines]


@pytest.mark.parametrize("match", list(EXAMPLE.finditer(PAGE)), ids=lambda match: f"{match['name']}-{match['shape']}")
def test_examples_of_the_page(match):
    options = dict(item.split("=") for item in match["settings"].split(", ") if item)
    options = {key: int(value) if value.isdigit() else value for key, value in options.items()}
    compressor = registry.create(match["name"], **options)
    shape = tuple(int(size) for size in match["shape"].split(","))
    spec = TensorSpec(shape, getattr(torch, match["dtype"]), int(match["dim"]) if match["dim"] else None)
    layout = compressor.layout_of(spec)

    dtypes = {s.name: str(s.dtype).removeprefix("torch.") for s in layout}
    rows = [(s.offset, s.nbytes, s.name, dtypes[s.name], str(math.prod(s.shape))) for s in layout if s.nbytes]
    rows += [(start, end - start, "padding", "", "") for start, end in layout.gaps]
    assert example_rows(match) == [(str(offset), str(nbytes), *rest) for offset, nbytes, *rest in sorted(rows)]
    assert int(match["nbytes"]) == layout.nbytes
    assert float(match["bits"]) == float(f"{compressor.bits_per_element(spec):.4g}")


@pytest.mark.parametrize("name", sorted({compressor.name for compressor in COMPRESSORS}))
def test_the_page_describes_every_compressor(name):
    section = re.search(rf"^## `{name}`\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert section, f"docs/wire.md has no section on {name}"
    tables = re.findall(r"^\| section \| dtype .*\n\| ---.*\n((?:\|.*\n)+)", section[1], re.MULTILINE)
    assert len(tables) == 1
    named = [row.split("|")[1].strip(" `") for row in tables[0].splitlines()]
    assert named == [s.name for s in registry.create(name).layout(TensorSpec((4, 2, 100), torch.float32, 1))]
    assert EXAMPLE.search(section[1]), f"docs/wire.md has no example of {name}"
