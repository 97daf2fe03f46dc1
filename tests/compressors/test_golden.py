"""Bytes that must not change: peers of other versions and machines read them. `golden.json` holds their SHA-256.

After a change of the format that is meant: `python -m tests.compressors.test_golden`, and say it in docs/wire.md.
"""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from megatron_compress.wire import TensorSpec
from tests.strategies import COMPRESSORS, all_compressors, integers, label

TABLE = Path(__file__).with_name("golden.json")
SHAPES = [(16, 2, 256), (5, 2, 300), (9, 130), (77,), (3, 7)]


def message(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Integers with outliers, zeros and, in one shape, NaN and Inf, by exact arithmetic; bfloat16 holds them all."""
    x = integers(shape) / 64
    flat = x.view(-1)
    flat[5::97] *= 64
    flat[11::193] *= 4096
    flat[64:128] = 0
    if shape == (9, 130):
        flat[300], flat[700], flat[1100] = torch.nan, torch.inf, -torch.inf
    return x.to(dtype)


def digest(compressor, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> str:
    x = message(shape, dtype).to(device)
    payload = compressor.compress(x, TensorSpec.of(x, sample_dim=1 if len(shape) == 3 else None))
    return hashlib.sha256(payload.cpu().numpy().tobytes()).hexdigest()[:16]


def digests(compressor, device: str = "cpu") -> dict[str, str]:
    return {
        f"{str(dtype).removeprefix('torch.')} {list(shape)}": digest(compressor, shape, dtype, device)
        for shape in SHAPES
        for dtype in (torch.float32, torch.bfloat16)
    }


@all_compressors
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bytes_are_the_golden_ones(compressor, device):
    golden = json.loads(TABLE.read_text())
    assert label(compressor) in golden, "new or changed settings: run python -m tests.compressors.test_golden"
    assert digests(compressor, device) == golden[label(compressor)]


def test_the_generator_is_as_committed():
    assert json.loads(TABLE.read_text())["message"] == generator_digest()


def generator_digest() -> str:
    return hashlib.sha256(message((16, 2, 256), torch.float32).numpy().tobytes()).hexdigest()[:16]


if __name__ == "__main__":
    table = {"message": generator_digest(), **{label(compressor): digests(compressor) for compressor in COMPRESSORS}}
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
