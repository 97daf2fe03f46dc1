"""How TAH-Quant cuts the rows (tokens) of a message into tiles (METHODS §5.1, DESIGN D13)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_compress.wire import TensorSpec


@dataclass(frozen=True)
class Tiling:
    """How the rows (tokens) of a message are cut.

    A row of C channels is `windows` allocation tiles of `per_window` quantization tiles, then `rest_tiles` whole
    tiles that fill no window, then one short tile of `short` elements. Only windows are ranked; what follows them
    always has the high bits, so that the payload's size does not depend on the data.
    """

    samples: int
    rows: int
    group: int
    per_window: int
    windows: int
    rest_tiles: int
    short: int
    high_per_sample: int

    @property
    def whole_tiles(self) -> int:
        """Tiles of `group` elements in a row."""
        return self.windows * self.per_window + self.rest_tiles

    @property
    def tiles(self) -> int:
        return self.whole_tiles + (self.short > 0)

    @property
    def num_low(self) -> int:
        """Whole tiles at low bits, over the message."""
        return self.samples * (self.rows * self.windows - self.high_per_sample) * self.per_window

    @property
    def num_high(self) -> int:
        return self.samples * self.rows * self.whole_tiles - self.num_low

    def expand(self, high_map: torch.Tensor) -> torch.Tensor:
        """Flags of windows to flags of all whole tiles, in row order; tiles outside windows are high."""
        rows = self.samples * self.rows
        ranked = high_map.view(rows, self.windows, 1).expand(-1, -1, self.per_window).reshape(rows, -1)
        return torch.cat((ranked, ranked.new_ones(rows, self.rest_tiles)), dim=1).view(-1)

    def join(self, whole: torch.Tensor, short: list[torch.Tensor]) -> torch.Tensor:
        """One value per tile, those of a row side by side, from the values of whole tiles and of short ones if any."""
        return torch.cat([part.view(self.samples * self.rows, -1) for part in (whole, *short)], dim=1).view(-1)

    def split(self, values: torch.Tensor) -> list[torch.Tensor]:
        """The inverse of `join`: the whole tiles' values and, if any, the short ones'."""
        widths = [self.whole_tiles] + [1] * (self.short > 0)
        return [part.reshape(-1) for part in values.view(self.samples * self.rows, self.tiles).split(widths, dim=1)]


def to_rows(x: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """[all rows, C] with the rows of a sample together."""
    if spec.sample_dim is not None:
        x = x.movedim(spec.sample_dim, 0)
    return x.reshape(-1, spec.num_channels)


def from_rows(rows: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The inverse of `to_rows`."""
    if spec.sample_dim is None:
        return rows.view(spec.shape)
    others = [size for dim, size in enumerate(spec.shape) if dim != spec.sample_dim]
    return rows.view(spec.num_samples, *others).movedim(0, spec.sample_dim)
