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

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_TOP = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
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
        name = _name(tensor.name)
        if name is not None:
            weights[name] = _reader(tensor, _heads_to_undo(architecture, name, model))
    return Source(path, model, weights, tokenizer_of(reader))


def _model(path: Path, reader, names: set[str]) -> tuple[ModelConfig, str]:
    def field(key: str, default=None):
        return reader.fields[key].contents() if key in reader.fields else default

    architecture = field("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ConfigError(f"{path}: holds a {architecture} model; known here: {', '.join(_ARCHITECTURES)}")
    if f"{architecture}.rope.scaling.type" in reader.fields or "rope_freqs.weight" in names:
        raise ConfigError(f"{path}: stretches its rotary embedding; import it from safetensors, which say how")
    a = architecture
    hidden, heads = field(f"{a}.embedding_length"), field(f"{a}.attention.head_count")
    head_dim = field(f"{a}.attention.key_length", hidden // heads)
    model = ModelConfig(
        vocab_size=len(field("tokenizer.ggml.tokens")),
        num_layers=field(f"{a}.block_count"),
        hidden_size=hidden,
        ffn_hidden_size=field(f"{a}.feed_forward_length"),
        num_attention_heads=heads,
        num_query_groups=field(f"{a}.attention.head_count_kv", heads),
        head_dim=head_dim,
        normalization="RMSNorm",
        activation="swiglu",
        position_embedding="rope",
        linear_bias=False,
        qkv_bias="blk.0.attn_q.bias" in names,
        qk_norm="blk.0.attn_q_norm.weight" in names,
        tied_embeddings="output.weight" not in names,
        rotary_base=int(field(f"{a}.rope.freq_base", 10_000)),
        norm_epsilon=float(f"{field(f'{a}.attention.layer_norm_rms_epsilon'):.6g}"),  # it was stored in float32
    )
    return model, architecture


def _name(name: str) -> str | None:
    """As `Source` has it; None for what is no weight."""
    part, _, kind = name.rpartition(".")
    if part in _TOP:
        return f"{_TOP[part]}.{kind}"
    block, _, part = part.partition(".")[2].partition(".")
    return f"layers.{block}.{_LAYER[part]}.{kind}" if part in _LAYER else None


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
