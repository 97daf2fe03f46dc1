"""Tiles of high or low bits by entropy, rotated under outliers: the numbers of compressors/tah_quant.py.

The reference states the order of operations that csrc/tah_*.cu follow to the bit.
"""

from __future__ import annotations

import math

import torch

from megatron_compress.ops.bits import pack_bits, unpack_bits
from megatron_compress.ops.entropy import ranking_key
from megatron_compress.ops.hadamard import hadamard_block, hadamard_transform
from megatron_compress.ops.library import register
from megatron_compress.ops.reduce import store_sum
from megatron_compress.ops.tiling import Tiling

# Keeps range and transform of a tile below float32's largest; exact above 2^-116.
HEADROOM = 2.0**-10
MIN_SPAN = torch.finfo(torch.float32).tiny
HUGE = 2.0**90


def _encode(x: torch.Tensor, parts: list[torch.Tensor], cut: list[int], threshold: float) -> None:
    t, high, low = Tiling(*cut[:-2]), *cut[-2:]
    high_codes, low_codes, short_codes, scales, zeros, high_map, pivots = parts
    rows = t.to_rows(x.float())
    whole = rows[:, : t.whole_tiles * t.group].reshape(-1, t.group)
    flags = _rank(whole, t)
    is_high = t.expand(flags)

    codes, *whole_parts = _quantize(whole, torch.where(is_high, 2.0**high - 1, 2.0**low - 1), threshold)
    high_codes.copy_(pack_bits(codes[is_high], high))
    low_codes.copy_(pack_bits(codes[~is_high], low))
    short_parts = [[], [], []]
    if t.short:
        short = rows[:, -t.short :]
        codes, *short_parts = _quantize(short, short.new_full((len(short),), 2.0**high - 1), threshold)
        short_codes.copy_(pack_bits(codes, high))
        short_parts = [[part] for part in short_parts]
    joined = [t.join(*pair) for pair in zip(whole_parts, short_parts, strict=True)]
    scales.copy_(joined[0])
    zeros.copy_(joined[1])
    high_map.copy_(pack_bits(flags, 1))
    pivots.copy_(pack_bits(joined[2], t.pivot_bits))


def _decode(parts: list[torch.Tensor], out: torch.Tensor, cut: list[int], threshold: float) -> None:
    store_sum((_dequantize(payload, cut) for payload in zip(*parts, strict=True)), out)


# x: contiguous; parts: the payload's sections in order; cut: the fields of Tiling, high_bits, low_bits.
encode = register("tah_quant_encode(Tensor x, Tensor(a!)[] parts, int[] cut, float threshold) -> ()", _encode)
# parts: of stacked payloads, [ranks, n] each; out: contiguous, gets the sum over ranks.
decode = register("tah_quant_decode(Tensor[] parts, Tensor(a!) out, int[] cut, float threshold) -> ()", _decode)


def _rank(whole: torch.Tensor, t: Tiling) -> torch.Tensor:
    """The windows of each sample with the largest entropy, ties by index; whole: [whole tiles, G].

    Returns flags [samples, windows of a sample].
    """
    tiles = torch.where(_is_finite(whole)[:, None], whole, 0.0)
    tiles = tiles.view(t.samples, t.rows, t.whole_tiles, t.group)[:, :, : t.windows * t.per_window]
    windows = tiles.reshape(t.samples, t.rows * t.windows, t.per_window, t.group)
    order = ranking_key(windows).argsort(dim=1, descending=True, stable=True)
    flags = torch.zeros(order.shape, dtype=torch.bool, device=whole.device)
    return flags.scatter_(1, order[:, : t.high_per_sample], True)


def _quantize(x: torch.Tensor, levels: torch.Tensor, threshold: float) -> tuple[torch.Tensor, ...]:
    """x: [n, g] tiles, levels: [n] = 2^b − 1; returns codes [n, g], scales and zeros [n] (bf16), pivots [n]."""
    finite = _is_finite(x)
    x = torch.where(finite[:, None], x * HEADROOM, 0.0)
    pivot, rotated = _find_outlier(x, threshold)
    y = x.clone()
    y[rotated] = hadamard_transform(_swap(x[rotated], pivot[rotated])) * (1 / x.shape[1])

    low, high = y.amin(dim=1) + 0.0, y.amax(dim=1) + 0.0  # −0 is 0: which of them is met depends on the device
    zero = _to_bfloat16(low / HEADROOM)
    reference = torch.where(rotated, low, zero.float() * HEADROOM)
    scale = _to_bfloat16((high - reference).clamp(min=0) / levels / HEADROOM)
    span = (scale.float() * HEADROOM) * levels
    inverse = torch.where(span < MIN_SPAN, 0.0, 1.0 / span)
    codes = (((y - reference[:, None]) * inverse[:, None]).clamp(0, 1) * levels[:, None]).round()
    codes = torch.where(finite[:, None], codes, 0.0)

    scale = torch.where(finite, torch.where(rotated, -scale, scale), torch.nan)
    return codes.to(torch.uint8), scale, torch.where(finite, zero, torch.nan), torch.where(rotated, pivot, 0)


def _find_outlier(x: torch.Tensor, threshold: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of the first largest magnitude of each tile, and whether the tile is to be rotated (eq. (3))."""
    largest, pivot = x.abs().max(dim=1)
    length = x.shape[1]
    if length == 1 or hadamard_block(length) != length or math.isinf(threshold):
        return pivot, torch.zeros_like(largest, dtype=torch.bool)
    second = x.abs().scatter(1, pivot[:, None], 0.0).amax(dim=1)
    return pivot, largest > threshold * second


def _dequantize(payload: tuple[torch.Tensor, ...], cut: list[int]) -> torch.Tensor:
    """One payload's sections; returns the message in float32."""
    t, high, low = Tiling(*cut[:-2]), *cut[-2:]
    high_codes, low_codes, short_codes, scales, zeros, high_map, pivots = payload
    num_rows = t.samples * t.rows
    is_high = t.expand(unpack_bits(high_map, 1, num_rows * t.windows).bool())
    whole = torch.empty(len(is_high), t.group, device=is_high.device)
    whole[is_high] = unpack_bits(high_codes, high, t.num_high * t.group).float().view(-1, t.group)
    whole[~is_high] = unpack_bits(low_codes, low, t.num_low * t.group).float().view(-1, t.group)
    codes = [whole]
    if t.short:
        short = unpack_bits(short_codes, high, num_rows * t.short)
        codes.append(short.float().view(num_rows, t.short))
    pivots = unpack_bits(pivots, t.pivot_bits, num_rows * t.tiles)
    per_tile = [t.split(values) for values in (scales, zeros, pivots)]
    rows = [_decode_tiles(*args).reshape(num_rows, -1) for args in zip(codes, *per_tile, strict=True)]
    return t.from_rows(torch.cat(rows, dim=1)).reshape(-1)


def _decode_tiles(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, pivots: torch.Tensor) -> torch.Tensor:
    """codes: [n, g] float32, the rest [n]; returns [n, g] float32."""
    rotated = torch.signbit(scales)
    scales, zeros = scales.float().abs(), zeros.float()
    # The power of two keeps huge values in range until they are rotated back.
    shrink = torch.where((scales > HUGE) | (zeros.abs() > HUGE), HEADROOM, 1.0)
    y = codes * (scales * shrink)[:, None] + (zeros * shrink)[:, None]
    y[rotated] = _swap(hadamard_transform(y[rotated]), pivots[rotated].long())
    return y * (1 / shrink)[:, None]


def _is_finite(tiles: torch.Tensor) -> torch.Tensor:
    return tiles.abs().amax(dim=1).isfinite()


def _swap(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Exchange elements 0 and index[i] of each row i."""
    at = index[:, None]
    swapped = x.scatter(1, at, x[:, :1])
    swapped[:, 0] = x.gather(1, at)[:, 0]
    return swapped


def _to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """Round to bfloat16, saturating."""
    limit = torch.finfo(torch.bfloat16).max
    return x.clamp(-limit, limit).to(torch.bfloat16)
