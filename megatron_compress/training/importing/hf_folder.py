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
_FREQUENCIES = "rotary_emb.inv_freq"
_LLAMA3 = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
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
    if kind != "gpt2" and kind not in _LLAMA_LIKE:
        raise ConfigError(f"{path}: holds a {kind} model; known here: gpt2, {', '.join(_LLAMA_LIKE)}")
    _refuse_variants(path, config)
    try:
        model = _gpt2_model(config) if kind == "gpt2" else _llama_model(config)
    except KeyError as error:
        raise ConfigError(f"{path / 'config.json'}: has no {error}, which a {kind} model needs") from None
    weights = _gpt2_weights(files) if kind == "gpt2" else _llama_weights(files, model)
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


def _refuse_variants(path: Path, config: dict) -> None:
    """What changes a model's results and is not known here."""
    rope, windows = _rope(config), config["model_type"] == "mistral" and config.get("sliding_window") is not None
    known = {
        "rotary embedding": (rope["rope_type"], ("default", "llama3")),
        "activation": (config.get("hidden_act", "silu"), ("silu", "swish")),
        "activation_function": (config.get("activation_function", "gelu_new"), ("gelu_new", "gelu_pytorch_tanh")),
        "use_sliding_window": (config.get("use_sliding_window", windows), (False,)),
        "scale_attn_by_inverse_layer_idx": (config.get("scale_attn_by_inverse_layer_idx", False), (False,)),
    }
    if rope["rope_type"] == "llama3":  # megatron-core has these numbers built in
        known |= {key: (rope.get(key), (value,)) for key, value in _LLAMA3.items()}
    for name, (value, values) in known.items():
        if value not in values:
            raise ConfigError(f"{path}: its {name} is {value!r}; known here: {', '.join(map(repr, values))}")


def _rope(config: dict) -> dict:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {**rope, "rope_type": rope.get("rope_type", rope.get("type", "default"))}


def _llama_model(config: dict) -> ModelConfig:
    kind, heads, rope = config["model_type"], config["num_attention_heads"], _rope(config)
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
        rotary_scaling_factor=float(rope["factor"]) if rope["rope_type"] == "llama3" else None,
        norm_epsilon=config["rms_norm_eps"],
    )


def _llama_weights(
    files: dict[str, Callable[[], torch.Tensor]], model: ModelConfig
) -> dict[str, Callable[[], torch.Tensor]]:
    """Without what older files repeat: the rotary embedding's frequencies, and a head that is the embedding."""
    weights = {name.removeprefix("model."): get for name, get in files.items() if not name.endswith(_FREQUENCIES)}
    if model.tied_embeddings:
        weights.pop("lm_head.weight", None)
    return weights


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
