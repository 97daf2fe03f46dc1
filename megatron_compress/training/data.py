"""Byte-level text: which bytes are trained on, which are held out, and which of them a microbatch holds."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megatron_compress.strict_yaml import ConfigError

VOCABULARY_SIZE = 256
_DOCUMENT_END = b"\0"
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Two disjoint uint8 arrays of text; each document ends with a zero byte."""

    train: np.ndarray
    held_out: np.ndarray
    source: str
    sha256: str

    def describe(self) -> dict:
        """For a results file: where the text came from, and how to see that another run had the same."""
        sizes = {"train_bytes": len(self.train), "held_out_bytes": len(self.held_out)}
        return {"source": self.source, "sha256": self.sha256, **sizes}


def load_corpus(text: Path | None, held_out_fraction: float, sequence_length: int) -> Corpus:
    """The documents of `text` (a file, or a folder of files), or this Python's standard library if it is None.

    Every n-th document is held out, n = 1 / held_out_fraction; of a single document, its last part.

    Raises:
        ConfigError: there is no text, or too little for one window of `sequence_length` + 1 bytes on both sides.
    """
    if text is None:
        source, paths = "Python standard library", _standard_library()
    else:
        source, paths = str(text), _files(text)
    documents = [path.read_bytes() + _DOCUMENT_END for path in paths]
    train, held_out = _split(documents, held_out_fraction)
    shortest = min(len(train), len(held_out))
    if shortest <= sequence_length:
        raise ConfigError(f"{source}: {shortest} bytes are too few for one window of {sequence_length} + 1")
    digest = hashlib.sha256(train + held_out).hexdigest()
    return Corpus(_array(train), _array(held_out), source, digest)


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in root.rglob("*.py") if not _NOT_LIBRARY.intersection(path.relative_to(root).parts)]
    return sorted(paths)


def _files(text: Path) -> list[Path]:
    if text.is_file():
        return [text]
    paths = sorted(path for path in text.rglob("*") if path.is_file())
    if not paths:
        raise ConfigError(f"--text {text}: no such file, and no folder with files in it")
    return paths


def _split(documents: list[bytes], held_out_fraction: float) -> tuple[bytes, bytes]:
    if len(documents) == 1:
        cut = int(len(documents[0]) * (1 - held_out_fraction))
        return documents[0][:cut], documents[0][cut:]
    every = min(round(1 / held_out_fraction), len(documents))
    train = b"".join(document for i, document in enumerate(documents) if i % every != every - 1)
    return train, b"".join(documents[every - 1 :: every])


def _array(text: bytes) -> np.ndarray:
    return np.frombuffer(text, dtype=np.uint8)


def training_microbatch(corpus: Corpus, seed: int, step: int, index: int, size: int, length: int) -> torch.Tensor:
    """Microbatch `index` of the global batch of `step`: int64 [size, length + 1], windows at random places.

    A function of its arguments alone, so that a run can be repeated, resumed, and laid out over other ranks.
    """
    starts = np.random.default_rng((seed, step, index)).integers(0, len(corpus.train) - length, size=size)
    return _windows(corpus.train, starts, length)


def held_out_microbatches(corpus: Corpus, num_windows: int, size: int, length: int) -> list[torch.Tensor]:
    """`num_windows` evenly spaced windows of the held-out text, in microbatches of int64 [size, length + 1]."""
    starts = np.linspace(0, len(corpus.held_out) - length - 1, num_windows).astype(np.int64)
    return list(_windows(corpus.held_out, starts, length).split(size))


def _windows(tokens: np.ndarray, starts: np.ndarray, length: int) -> torch.Tensor:
    return torch.from_numpy(tokens[starts[:, None] + np.arange(length + 1)].astype(np.int64))
