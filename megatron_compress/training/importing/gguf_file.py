"""GGUF files, of llama.cpp: quantized weights are read as the float32 values that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from megatron_compress.strict_yaml import ConfigError
from megatron_compress.training.importing.gguf_tokenizer import tokenizer_of
from megatron_compress.training.importing.source import Source
from megatron_compress.training.model_config import ModelConfig

_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gpt2")
_TOP = {"token_embd": "embed_tokens", "position_embd": "embed_positions", "output_norm": "norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read(path: Path) -> Source:
    """See `source.read_source`."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(path))
    except Exception as error:  # whatever a damaged header leads to
        raise ConfigError(f"{path}: not a GGUF file, or damaged: {error}") from None
    names = {tensor.name for tensor in reader.tensors}
    model, architecture = _model(path, reader, names)
    weights = {}
    for tensor in reader.tensors:
        weights |= _weights(tensor, architecture, model)
    return Source(path, model, weights, tokenizer_of(reader))


def _model(path: Path, reader, names: set[str]) -> tuple[ModelConfig, str]:
    def field(key: str, *default):
        if key in reader.fields:
            return reader.fields[key].contents()
        if default:
            return default[0]
        raise ConfigError(f"{path}: its header has no {key}")

    a = field("general.architecture")
    if a not in _ARCHITECTURES:
        raise ConfigError(f"{path}: holds a {a} model; known here: {', '.join(_ARCHITECTURES)}")
    if f"{a}.rope.scaling.type" in reader.fields or "rope_freqs.weight" in names:
        raise ConfigError(f"{path}: stretches its rotary embedding; import it from safetensors, which say how")
    hidden, heads = field(f"{a}.embedding_length"), field(f"{a}.attention.head_count")
    common = {
        "vocab_size": len(field("tokenizer.ggml.tokens")),
        "num_layers": field(f"{a}.block_count"),
        "hidden_size": hidden,
        "ffn_hidden_size": field(f"{a}.feed_forward_length"),
        "num_attention_heads": heads,
        "num_query_groups": field(f"{a}.attention.head_count_kv", heads),
        "head_dim": field(f"{a}.attention.key_length", hidden // heads),
        "tied_embeddings": "output.weight" not in names,
    }
    kind = _gpt2_kind(field) if a == "gpt2" else _llama_kind(field, a, names)
    return ModelConfig(**common, **kind), a


def _llama_kind(field: Callable, architecture: str, names: set[str]) -> dict:
    return {
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "position_embedding": "rope",
        "linear_bias": False,
        "qkv_bias": "blk.0.attn_q.bias" in names,
        "qk_norm": "blk.0.attn_q_norm.weight" in names,
        "rotary_base": int(field(f"{architecture}.rope.freq_base", 10_000)),
        "norm_epsilon": _decimal(field(f"{architecture}.attention.layer_norm_rms_epsilon")),
    }


def _gpt2_kind(field: Callable) -> dict:
    return {
        "normalization": "LayerNorm",
        "activation": "gelu_tanh",
        "position_embedding": "learned",
        "max_positions": field("gpt2.context_length"),
        "linear_bias": True,
        "norm_epsilon": _decimal(field("gpt2.attention.layer_norm_epsilon")),
    }


def _decimal(value: float) -> float:
    """What was meant by a number that was stored in float32."""
    return float(f"{value:.6g}")


def _weights(tensor, architecture: str, model: ModelConfig) -> dict[str, Callable[[], torch.Tensor]]:
    """What a tensor holds, under the names of `Source`."""
    block, _, part = tensor.name.removeprefix("blk.").partition(".")
    if part.startswith("attn_qkv."):
        kind = part.removeprefix("attn_qkv.")
        return {f"layers.{block}.self_attn.{p}_proj.{kind}": _third(tensor, i) for i, p in enumerate("qkv")}
    name = _name(tensor.name)
    return {name: _reader(tensor, _heads_to_undo(architecture, name, model))}


def _third(tensor, i: int) -> Callable[[], torch.Tensor]:
    return lambda: _reader(tensor, None)().chunk(3)[i]


def _name(name: str) -> str:
    """As `Source` has it; what is not known here stays as it is, and nobody will read it."""
    part, _, kind = name.rpartition(".")
    if part in _TOP:
        return f"{_TOP[part]}.{kind}"
    block, _, part = part.partition(".")[2].partition(".")
    return f"layers.{block}.{_LAYER[part]}.{kind}" if part in _LAYER else name


def _heads_to_undo(architecture: str, name: str, model: ModelConfig) -> int | None:
    """llama.cpp reorders the rows of LLaMA's queries and keys, for rotary embeddings by pairs, head by head."""
    if architecture != "llama":
        return None
    heads = {"q_proj": model.num_attention_heads, "k_proj": model.num_query_groups}
    return heads.get(name.split(".")[-2])


def _reader(tensor, num_heads: int | None) -> Callable[[], torch.Tensor]:
    from gguf.quants import dequantize

    def get() -> torch.Tensor:
        weight = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        if num_heads is None:
            return weight
        pairs = weight.view(num_heads, -1, 2, *weight.shape[1:])
        return pairs.transpose(1, 2).reshape(weight.shape)

    return get
