"""What every compressed message must deliver, computed in one process from what all ranks put in.

The compressors are applied by themselves here: quantize and dequantize at the place of the message, nothing else. No
collective, handle or hook of the package takes part.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megatron_compress.compressors.base import Compressor
from megatron_compress.config import CompressionConfig
from megatron_compress.wire import TensorSpec
from tests.hooks.tracing import Exchange


def check_tensor_axis(results: list[dict], compress: dict) -> int:
    """Check every reduction and gather of all ranks, to the bit; how many were compressed."""
    config = CompressionConfig(**compress)
    by_group: dict[tuple[int, ...], list[list[Exchange]]] = {}
    for rank, result in enumerate(results):
        for group in {exchange.ranks for exchange in result["seen"].exchanges if len(exchange.ranks) > 1}:
            assert rank in group
            mine = [exchange for exchange in result["seen"].exchanges if exchange.ranks == group]
            by_group.setdefault(group, []).append(mine)
    compressed = 0
    for group, sequences in by_group.items():
        assert len(sequences) == len(group)
        for exchanges in zip(*sequences, strict=True):
            compressed += _check_exchange(exchanges, config)
    return compressed


def _check_exchange(exchanges: tuple[Exchange, ...], config: CompressionConfig) -> bool:
    first = exchanges[0]
    assert len({(e.operation, e.direction, e.site, e.again) for e in exchanges}) == 1
    rule = config.tensor.forward if first.direction == "forward" else config.tensor.backward
    compressor = None if first.site in (None, *rule.exempt_sites) else rule.compressor
    given = [torch.from_numpy(exchange.given) for exchange in exchanges]
    for exchange, expected in zip(exchanges, _delivered(first.operation, given, compressor), strict=True):
        np.testing.assert_array_equal(exchange.got, expected.numpy(), err_msg=f"{first.operation} of {first.site}")
    return compressor is not None


def _delivered(operation: str, given: list[torch.Tensor], compressor: Compressor | None) -> list[torch.Tensor]:
    """The result of every rank (algorithm one_shot)."""
    if operation == "all_reduce":
        return [reduced(given, compressor)] * len(given)
    if operation == "all_gather":
        return [torch.cat([transmitted(part, compressor) for part in given])] * len(given)
    shares = zip(*(part.chunk(len(given)) for part in given), strict=True)
    return [reduced(share, compressor) for share in shares]


def reduced(parts: Sequence[torch.Tensor], compressor: Compressor | None) -> torch.Tensor:
    """The sum in rank order, of what is decoded where there is a compressor."""
    if compressor is not None:
        flat = [part.reshape(-1) for part in parts]
        spec = TensorSpec.of(flat[0])
        payloads = torch.stack([compressor.compress(part, spec) for part in flat])
        return compressor.decompress_sum(payloads, spec, torch.empty_like(flat[0])).view(parts[0].shape)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def transmitted(tensor: torch.Tensor, compressor: Compressor | None, sample_dim: int | None = None) -> torch.Tensor:
    """`tensor` after quantizing and dequantizing; reductions and gathers take it as one row."""
    if compressor is None:
        return tensor
    flat = tensor if sample_dim is not None else tensor.reshape(-1)
    spec = TensorSpec.of(flat, sample_dim)
    return compressor.decompress(compressor.compress(flat, spec), spec, torch.empty_like(flat)).view(tensor.shape)


def check_regathers(results: list[dict]) -> int:
    """Check that what backward gathers again is to the bit what the forward saw; how many gathers were repeated."""
    repeated = 0
    for result in results:
        forward: dict[bytes, np.ndarray] = {}
        for exchange in result["seen"].exchanges:
            if exchange.operation == "all_gather":
                key = exchange.given.tobytes()
                if exchange.again:
                    np.testing.assert_array_equal(exchange.got, forward[key])
                    repeated += 1
                elif exchange.direction == "forward":
                    forward[key] = exchange.got
    return repeated


def check_pipeline_axis(results: list[dict], compress: dict) -> int:
    """Check that every stage computes with what its neighbours sent, quantized; how many messages there were."""
    config = CompressionConfig(**compress)
    messages = 0
    for result in results:
        stages, stage = result["pipeline"], result["stage"]
        for direction, distance in (("forward", 1), ("backward", -1)):
            receiver = results[stages[(stage + distance) % len(stages)]]
            compressor = config.rule("pipeline", direction).compressor
            sent, consumed = result["seen"].sent[direction], receiver["seen"].consumed[direction]
            for mine, theirs in zip(sent, consumed, strict=True):
                expected = transmitted(torch.from_numpy(mine), compressor, sample_dim=1)
                np.testing.assert_array_equal(theirs, expected.numpy(), err_msg=f"{direction} from stage {stage}")
                messages += 1
    return messages
