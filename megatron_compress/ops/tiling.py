"""How TAH-Quant cuts the rows (tokens) of a message into tiles (METHODS §5.1, DESIGN D13)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tiling:
    """How the rows (tokens) of a message are cut.

    A row of C channels is `windows` allocation tiles of `per_window` quantization tiles, then `rest_tiles` whole
    tiles that fill no window, then one short tile of `short` elements. Only windows are ranked; what follows them
    always has the high bits, so that the payload's size does not depend on the data.

    Args:
        rows: of a sample; `inner` of them lie together behind the sample dimension.
        channels: C, elements of a row.
        high_per_sample: windows of a sample that have high bits.
    """

    samples: int
    rows: int
    inner: int
    channels: int
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

    @property
    def pivot_bits(self) -> int:
        """Bits of an index within a tile."""
        return self.group.bit_length() - 1

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

    def to_rows(self, x: torch.Tensor) -> torch.Tensor:
        """[all rows, C] with the rows of a sample together, from the contiguous message."""
        return x.reshape(-1, self.samples, self.inner, self.channels).movedim(1, 0).reshape(-1, self.channels)

    def from_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The inverse of `to_rows`, of any shape of the message's size."""
        return rows.view(self.samples, -1, self.inner, self.channels).movedim(0, 1)
