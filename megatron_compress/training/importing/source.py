"""A published model under one set of names, whatever file it comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import ValidationError

from megatron_compress.strict_yaml import ConfigError
from megatron_compress.training.model_config import ModelConfig


@dataclass(frozen=True)
class Source:
    """A model's shape, its weights and its tokenizer.

    Args:
        weights: reads each in float32, [out, in], under Hugging Face's names for LLaMA ("layers.0.self_attn.q_proj
            .weight"), without "model."; queries and keys are those of rotary embeddings by halves. GPT-2's have these
            names too, with "embed_positions.weight", and no gate_proj.
        tokenizer: content of its `tokenizers` file; None where the source has none that can be used.
    """

    path: Path
    model: ModelConfig
    weights: dict[str, Callable[[], torch.Tensor]]
    tokenizer: str | None
    _read: set[str] = field(default_factory=set)

    def unread(self) -> list[str]:
        """Weights that nobody has asked for."""
        return sorted(self.weights.keys() - self._read)

    def read(self, name: str) -> torch.Tensor:
        """One weight.

        Raises:
            ConfigError: the source has none of that name.
        """
        if name not in self.weights:
            raise ConfigError(f"{self.path}: has no weight {name}, which a model of its kind needs")
        self._read.add(name)
        return self.weights[name]()


def read_source(path: Path) -> Source:
    """Read a .gguf file, or a folder with config.json and .safetensors files. Weights are read when they are asked for.

    Raises:
        ConfigError: it is neither, or a kind of model that is not known here.
    """
    from megatron_compress.training.importing import gguf_file, hf_folder

    try:
        if path.is_dir():
            return hf_folder.read(path)
        if path.is_file() and path.suffix == ".gguf":
            return gguf_file.read(path)
    except ValidationError as error:
        raise ConfigError(f"{path}: describes a model that is not known here: {error}") from None
    raise ConfigError(f"{path}: neither a .gguf file nor a folder with config.json and .safetensors files")
