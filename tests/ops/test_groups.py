"""Groups and tiles: every element is in exactly one, and nothing is padded."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_compress.ops.groups import num_groups, split_groups
from megatron_compress.ops.tiling import Tiling


@given(st.integers(0, 300), st.integers(1, 70))
def test_groups_are_contiguous_and_complete(numel, size):
    flat = torch.arange(numel)
    matrices = split_groups(flat, size)
    rows = [row for matrix in matrices for row in matrix]
    assert len(rows) == num_groups(numel, size)
    assert torch.equal(torch.cat([*rows, flat[:0]]), flat)
    assert all(len(row) == size for row in rows[: numel // size])
    assert all(matrix.numel() and matrix.data_ptr() >= flat.data_ptr() for matrix in matrices)


@settings(max_examples=50)
@given(*[st.integers(1, 4) for _ in range(4)])
def test_rows_of_a_sample_lie_together(outer, samples, inner, channels):
    x = torch.arange(outer * samples * inner * channels).view(outer, samples, inner, channels)
    t = tiling(samples=samples, rows=outer * inner, inner=inner, channels=channels)
    rows = t.to_rows(x)
    assert torch.equal(t.from_rows(rows).reshape(x.shape), x)
    for sample, part in enumerate(rows.chunk(samples)):
        assert torch.equal(part, x[:, sample].reshape(-1, channels))


def tiling(**changed) -> Tiling:
    sizes = dict(
        samples=2,
        rows=3,
        inner=1,
        channels=45,
        group=8,
        per_window=2,
        windows=2,
        rest_tiles=1,
        short=5,
        high_per_sample=4,
    )
    return Tiling(**{**sizes, **changed})


def test_counts():
    t = tiling()
    assert (t.whole_tiles, t.tiles) == (5, 6)
    assert t.num_low == 2 * (3 * 2 - 4) * 2
    assert t.num_high + t.num_low == 2 * 3 * 5


def test_flags_of_windows_become_flags_of_tiles():
    high_map = torch.tensor([[1, 0, 0, 0, 1, 1], [0, 1, 1, 1, 1, 0]]).bool()
    rows = tiling().expand(high_map).view(6, 5).int().tolist()
    assert rows[0] == [1, 1, 0, 0, 1]
    assert rows[2] == [1, 1, 1, 1, 1]
    assert rows[3] == [0, 0, 1, 1, 1]
    assert rows[5] == [1, 1, 0, 0, 1]


@pytest.mark.parametrize(
    "t", [tiling(), tiling(short=0), tiling(windows=0, rest_tiles=0)], ids=["all", "whole", "short"]
)
def test_join_and_split_are_inverse(t):
    values = torch.arange(6 * t.tiles)
    parts = t.split(values)
    assert [len(part) for part in parts] == [6 * t.whole_tiles] + [6] * (t.short > 0)
    assert torch.equal(t.join(parts[0], parts[1:]), values)
    if t.short:
        assert torch.equal(parts[1], values.view(6, -1)[:, -1])
