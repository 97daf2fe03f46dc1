"""Data sets in Megatron's .bin/.idx format: written by `prepare`, read and blended by megatron-core's own classes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from megatron_compress.strict_yaml import ConfigError
from megatron_compress.training.config import Experiment, TrainConfig
from megatron_compress.training.data import sample_ids
from megatron_compress.training.documents import documents, name
from megatron_compress.training.tokenizer import Tokenizer

_CHUNK = 1 << 24  # token ids looked at in one go


def prepare(text: Path | None, tokenizer: Tokenizer, path: Path) -> dict:
    """Write PATH.bin and PATH.idx, and PATH.json, which says what they were made of and is returned.

    Nothing appears under these names before all of it is there.

    Raises:
        ConfigError: there is no text.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = {suffix: path.with_name(f"{path.name}.{suffix}.partial") for suffix in ("bin", "idx", "json")}
    try:
        facts = _write(documents(text), tokenizer, parts["bin"], parts["idx"])
        if not facts["tokens"]:
            raise ConfigError(f"{name(text)}: there is no text in it; nothing was written")
        parts["json"].write_text(json.dumps({"source": name(text), **facts}, indent=1) + "\n")
        for suffix in ("bin", "idx", "json"):
            os.replace(parts[suffix], f"{path}.{suffix}")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}; make room, or give another --out") from error
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)
    return facts


def _write(texts: Iterator[bytes], tokenizer: Tokenizer, bin_file: Path, idx_file: Path) -> dict:
    builder = IndexedDatasetBuilder(str(bin_file), dtype=tokenizer.dtype)
    count = tokens = 0
    with builder.data_file:
        for text in texts:
            if text:
                ids = tokenizer.document(text)
                builder.add_document(ids, [len(ids)])
                count, tokens = count + 1, tokens + len(ids)
        builder.finalize(str(idx_file))
    facts = {"tokenizer": tokenizer.name, "tokenizer_digest": tokenizer.digest, "vocab_size": tokenizer.vocab_size}
    return {**facts, "documents": count, "tokens": tokens}


@dataclass(frozen=True)
class Blend:
    """One blend of data sets, of which megatron-core has made up a training and a held-out sequence of windows."""

    train: torch.utils.data.Dataset
    held_out: torch.utils.data.Dataset
    sources: list[dict]
    tokenizer: Tokenizer

    def describe(self) -> dict:
        """For a results file."""
        return {"sources": self.sources, "train_windows": len(self.train), "held_out_windows": len(self.held_out)}

    def microbatch(self, config: TrainConfig, step: int, index: int) -> torch.Tensor:
        """Microbatch `index` of the global batch of `step`, int64 [micro_batch_size, sequence_length + 1]."""
        size = config.data.micro_batch_size
        if config.data.epoch_windows:
            return _windows(self.train, sample_ids(config.data, step, index).start, size)
        return _windows(self.train, (step - 1) * config.data.global_batch_size + index * size, size)

    def held_out_microbatches(self, config: TrainConfig) -> list[torch.Tensor]:
        """The held-out windows, in microbatches as those of training."""
        size = config.data.micro_batch_size
        return [_windows(self.held_out, first, size) for first in range(0, config.data.held_out_windows, size)]


def _windows(dataset: torch.utils.data.Dataset, first: int, size: int) -> torch.Tensor:
    samples = [dataset[i] for i in range(first, first + size)]
    return torch.stack([torch.cat([sample["tokens"], sample["labels"][-1:]]) for sample in samples])


def load_blend(experiment: Experiment, tokenizer: Tokenizer, cache: Path) -> Blend:
    """The blend of `data.prepared`, for as many windows as the run needs. Called by every rank.

    Args:
        cache: folder for the indices that megatron-core makes; one for all ranks.

    Raises:
        ConfigError: a file is missing, damaged, too small, or of another tokenizer.
    """
    train = experiment.train
    prefixes = [str(experiment.file(source.path)) for source in train.data.prepared]
    sources = [check(prefix, tokenizer, experiment.model.vocab_size) for prefix in prefixes]
    for source in sources:
        _check_split(source, train.data.held_out_fraction)
    weights = [source.weight for source in train.data.prepared]
    held_out = 100 * train.data.held_out_fraction
    config = GPTDatasetConfig(
        random_seed=train.run.seed,
        sequence_length=train.data.sequence_length,
        blend=(prefixes, None if None in weights else weights),
        split=f"{100 - held_out},{held_out},0",
        path_to_cache=str(cache),
        tokenizer=_MegatronTokenizer(tokenizer),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    sizes = [train.data.epoch_windows or train.run.steps * train.data.global_batch_size, train.data.held_out_windows, 0]
    try:
        parts = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    except (AssertionError, IndexError, ValueError) as error:
        parts = [None, None]
        reason = f": {error}"
    else:
        reason = ""
    if any(part is None or len(part) < size for part, size in zip(parts[:2], sizes[:2], strict=True)):
        raise ConfigError(
            f"{', '.join(prefixes)}: too little for {sizes[0]} training and {sizes[1]} held-out windows of"
            f" {train.data.sequence_length} tokens{reason}"
        )
    return Blend(parts[0], parts[1], sources, tokenizer)


class _MegatronTokenizer:
    """What GPTDataset asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        # None: it must take each file's own dtype, not the one that it would have chosen for this size.
        self.vocab_size = None
        self.eod = tokenizer.end
        self.unique_identifiers = {"digest": tokenizer.digest}


def check(prefix: str, tokenizer: Tokenizer, vocab_size: int) -> dict:
    """See that a data set is whole and fits tokenizer and model; what is known of it.

    Raises:
        ConfigError: it is not.
    """
    for suffix in ("bin", "idx"):
        if not os.path.isfile(f"{prefix}.{suffix}"):
            raise ConfigError(f"{prefix}.{suffix}: no such file; make it with `python -m megatron_compress prepare`")
    tokens, num_documents = _read(prefix)
    facts = _facts(prefix)
    if facts and facts["tokenizer_digest"] != tokenizer.digest:
        raise ConfigError(
            f"{prefix}: was prepared with the tokenizer {facts['tokenizer']}, but data.tokenizer is {tokenizer.name},"
            " which is another file; give the one or prepare again"
        )
    if not facts and (largest := _largest(tokens)) >= vocab_size:
        raise ConfigError(f"{prefix}: holds token {largest}, but the model's vocab_size is {vocab_size}")
    return {**facts, "path": prefix, "tokens": len(tokens), "documents": num_documents}


def _check_split(source: dict, held_out_fraction: float) -> None:
    """megatron-core cuts by documents, and goes round and round without end in a part that has none."""
    count = source["documents"]
    train = round((1 - held_out_fraction) * count)
    if not 0 < train < count:
        part = "held out" if train else "trained on"
        raise ConfigError(
            f"{source['path']}: too little: of its {count} documents none would be {part}; prepare more of them,"
            f" or change data.held_out_fraction ({held_out_fraction})"
        )


def _read(prefix: str) -> tuple[np.ndarray, int]:
    """All token ids of a data set, memory-mapped, and how many documents they are."""
    try:
        dataset = IndexedDataset(prefix, multimodal=False)
    except Exception as error:  # an index that is no index fails anywhere
        raise ConfigError(f"{prefix}.idx: damaged, or not an index of Megatron's ({error}); prepare it again") from None
    count, dtype = int(dataset.sequence_lengths.sum()), np.dtype(dataset.index.dtype)
    size = os.path.getsize(f"{prefix}.bin")
    if size != count * dtype.itemsize:
        raise ConfigError(f"{prefix}.bin: has {size} bytes where its index has {count * dtype.itemsize}; prepare again")
    if not count:
        raise ConfigError(f"{prefix}: is empty; prepare it from text")
    return np.memmap(f"{prefix}.bin", dtype=dtype, mode="r"), len(dataset.sequence_lengths)


def _facts(prefix: str) -> dict:
    """What `prepare` wrote down; nothing for a data set of other origin."""
    try:
        return json.loads(Path(f"{prefix}.json").read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{prefix}.json: damaged ({error}); prepare the data set again") from None


def _largest(tokens: np.ndarray) -> int:
    return max(int(tokens[i : i + _CHUNK].max()) for i in range(0, len(tokens), _CHUNK))
