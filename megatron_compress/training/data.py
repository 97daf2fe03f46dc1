"""Text in memory: which tokens are trained on, which are held out, and which of them a microbatch holds."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megatron_compress.strict_yaml import ConfigError
from megatron_compress.training.config import DataConfig, TrainConfig
from megatron_compress.training.documents import documents, name
from megatron_compress.training.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Corpus:
    """Two disjoint arrays of token ids; each document ends with its tokenizer's `end`."""

    train: np.ndarray
    held_out: np.ndarray
    source: str
    sha256: str
    tokenizer: Tokenizer

    def describe(self) -> dict:
        """For a results file: where the text came from, and how to see that another run had the same."""
        sizes = {f"{part}_{self.tokenizer.unit}s": len(getattr(self, part)) for part in ("train", "held_out")}
        return {"source": self.source, "sha256": self.sha256, **sizes}

    def microbatch(self, config: TrainConfig, step: int, index: int) -> torch.Tensor:
        """Microbatch `index` of the global batch of `step`, int64 [micro_batch_size, sequence_length + 1]."""
        data = config.data
        if data.epoch_windows:
            return _windows(
                self.train, self._epoch_starts(config)[list(sample_ids(data, step, index))], data.sequence_length
            )
        return training_microbatch(self, config.run.seed, step, index, data.micro_batch_size, data.sequence_length)

    def _epoch_starts(self, config: TrainConfig) -> np.ndarray:
        """Where each window of an epoch starts: spread evenly, in one random order."""
        last, count = len(self.train) - config.data.sequence_length - 1, config.data.epoch_windows
        return np.random.default_rng(config.run.seed).permutation(np.linspace(0, last, count).astype(np.int64))

    def held_out_microbatches(self, config: TrainConfig) -> list[torch.Tensor]:
        """The held-out windows, in microbatches as those of training."""
        data = config.data
        return held_out_microbatches(self, data.held_out_windows, data.micro_batch_size, data.sequence_length)


def load_corpus(
    text: Path | None, held_out_fraction: float, sequence_length: int, tokenizer: Tokenizer | None = None
) -> Corpus:
    """The documents of `text` (a file, or a folder of files), or this Python's standard library if it is None.

    Every n-th document is held out, n = 1 / held_out_fraction; of a single document, its last part.

    Args:
        tokenizer: None: bytes.

    Raises:
        ConfigError: there is no text, or too little for one window of `sequence_length` + 1 tokens on both sides.
    """
    tokenizer = tokenizer or load_tokenizer(None)
    train, held_out = _split([tokenizer.document(text) for text in documents(text)], held_out_fraction)
    shortest = min(len(train), len(held_out))
    if shortest <= sequence_length:
        unit = f"{tokenizer.unit}s"
        raise ConfigError(f"{name(text)}: {shortest} {unit} are too few for one window of {sequence_length} + 1")
    digest = hashlib.sha256(train.tobytes() + held_out.tobytes()).hexdigest()
    return Corpus(train, held_out, name(text), digest, tokenizer)


def _split(documents: list[np.ndarray], held_out_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    if not documents:
        return np.empty(0), np.empty(0)
    if len(documents) == 1:
        cut = int(len(documents[0]) * (1 - held_out_fraction))
        return documents[0][:cut], documents[0][cut:]
    every = min(round(1 / held_out_fraction), len(documents))
    train = [document for i, document in enumerate(documents) if i % every != every - 1]
    return np.concatenate(train), np.concatenate(documents[every - 1 :: every])


def sample_ids(data: DataConfig, step: int, index: int) -> range:
    """The windows, of `data.epoch_windows`, in microbatch `index` of the global batch of `step`."""
    first = (step - 1) * data.global_batch_size + index * data.micro_batch_size
    return range(first % data.epoch_windows, first % data.epoch_windows + data.micro_batch_size)


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
