"""Folders as Hugging Face's libraries write them: config.json and .safetensors; pickled weights are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_compress.strict_yaml import ConfigError
from megatron_compress.training.importing.source import Source
from megatron_compress.training.model_config import ModelConfig

_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
_GPT2 = {
    "wte": "embed_tokens",
    "wpe": "embed_positions",
    "ln_f": "norm",
    "ln_1": "input_layernorm",
    "attn.c_proj": "self_attn.o_proj",
    "ln_2": "post_attention_layernorm",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}


def read(path: Path) -> Source:
    """See `source.read_source`."""
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path / 'config.json'}: {error}; give the folder of a model as Hugging Face has it"
        ) from None
    files = _weights(path)
    kind = config.get("model_type")
    if kind == "gpt2":
        model, weights = _gpt2_model(config), _gpt2_weights(files)
    elif kind in _LLAMA_LIKE:
        model = _llama_model(path, config)
        weights = {name.removeprefix("model."): get for name, get in files.items()}
    else:
        raise ConfigError(f"{path}: holds a {kind} model; known here: gpt2, {', '.join(_LLAMA_LIKE)}")
    tokenizer = path / "tokenizer.json"
    return Source(path, model, weights, tokenizer.read_text() if tokenizer.is_file() else None)


def _weights(path: Path) -> dict[str, Callable[[], torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{path}: no .safetensors file in it; pickled weights (.bin, .pt) are not read, convert them")
    weights = {}
    for file in files:
        try:
            opened = safe_open(str(file), framework="pt")
        except SafetensorError as error:
            raise ConfigError(f"{file}: not a safetensors file, or damaged: {error}") from None
        weights |= {name: _reader(opened, name) for name in opened.keys()}  # noqa: SIM118  (no mapping)
    return weights


def _reader(opened, name: str) -> Callable[[], torch.Tensor]:
    return lambda: opened.get_tensor(name).float()


def _llama_model(path: Path, config: dict) -> ModelConfig:
    kind, heads = config["model_type"], config["num_attention_heads"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "llama3") or config.get("use_sliding_window"):
        raise ConfigError(f"{path}: rotary embedding {rope_type!r} or sliding windows are not known here")
    return ModelConfig(
        vocab_size=config["vocab_size"],
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        normalization="RMSNorm",
        activation="swiglu",
        position_embedding="rope",
        linear_bias=False,
        qkv_bias=kind == "qwen2" or bool(config.get("attention_bias")),
        qk_norm=kind == "qwen3",
        tied_embeddings=bool(config.get("tie_word_embeddings")),
        rotary_base=int(rope.get("rope_theta") or config.get("rope_theta", 10_000)),
        rotary_scaling_factor=float(rope["factor"]) if rope_type == "llama3" else None,
        norm_epsilon=config["rms_norm_eps"],
    )


def _gpt2_model(config: dict) -> ModelConfig:
    return ModelConfig(
        vocab_size=config["vocab_size"],
        num_layers=config["n_layer"],
        hidden_size=config["n_embd"],
        ffn_hidden_size=config.get("n_inner") or 4 * config["n_embd"],
        num_attention_heads=config["n_head"],
        head_dim=config["n_embd"] // config["n_head"],
        normalization="LayerNorm",
        activation="gelu_tanh",
        position_embedding="learned",
        max_positions=config["n_positions"],
        linear_bias=True,
        tied_embeddings=True,
        norm_epsilon=config["layer_norm_epsilon"],
    )


def _gpt2_weights(files: dict[str, Callable[[], torch.Tensor]]) -> dict[str, Callable[[], torch.Tensor]]:
    """GPT-2 keeps [in, out], and queries, keys and values in one."""
    weights = {}
    for name, get in files.items():
        part, _, kind = name.removeprefix("transformer.").rpartition(".")
        layer, block = "", part
        if part.startswith("h."):
            number, _, block = part[2:].partition(".")
            layer = f"layers.{number}."
        if block == "attn.c_attn":
            for i, projection in enumerate("qkv"):
                weights[f"{layer}self_attn.{projection}_proj.{kind}"] = _third(get, i)
        elif block in _GPT2:
            weights[f"{layer}{_GPT2[block]}.{kind}"] = _transposed(get) if "c_" in block else get
    return weights


def _transposed(get: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    return lambda: get().t().contiguous() if get().dim() == 2 else get()


def _third(get: Callable[[], torch.Tensor], i: int) -> Callable[[], torch.Tensor]:
    return lambda: _transposed(get)().chunk(3)[i]
