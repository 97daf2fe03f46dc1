"""What the source's own model would say: a forward pass in plain torch that shares no code with megatron-core."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from megatron_compress.training.importing.source import Source


@torch.no_grad()
def logits(source: Source, tokens: torch.Tensor) -> torch.Tensor:
    """int64 [b, s] -> float32 [b, s, vocab_size], on the CPU."""
    model = source.model
    embedding = source.read("embed_tokens.weight")
    x = F.embedding(tokens, embedding)
    if model.position_embedding == "learned":
        x = x + source.read("embed_positions.weight")[: tokens.size(1)]
    for i in range(model.num_layers):
        x = x + _attention(source, f"layers.{i}.self_attn", _norm(source, f"layers.{i}.input_layernorm", x))
        x = x + _mlp(source, f"layers.{i}.mlp", _norm(source, f"layers.{i}.post_attention_layernorm", x))
    x = _norm(source, "norm", x)
    return x @ (embedding if model.tied_embeddings else source.read("lm_head.weight")).t()


def _linear(source: Source, name: str, x: torch.Tensor) -> torch.Tensor:
    bias = source.read(f"{name}.bias") if f"{name}.bias" in source.weights else None
    return F.linear(x, source.read(f"{name}.weight"), bias)


def _norm(source: Source, name: str, x: torch.Tensor) -> torch.Tensor:
    weight, epsilon = source.read(f"{name}.weight"), source.model.norm_epsilon
    if source.model.normalization == "LayerNorm":
        return F.layer_norm(x, x.shape[-1:], weight, source.read(f"{name}.bias"), epsilon)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def _mlp(source: Source, name: str, x: torch.Tensor) -> torch.Tensor:
    up = _linear(source, f"{name}.up_proj", x)
    if source.model.activation == "swiglu":
        up = F.silu(_linear(source, f"{name}.gate_proj", x)) * up
    else:
        up = F.gelu(up, approximate="tanh")
    return _linear(source, f"{name}.down_proj", up)


def _attention(source: Source, name: str, x: torch.Tensor) -> torch.Tensor:
    model = source.model
    groups = model.num_query_groups or model.num_attention_heads
    query, key, value = (
        _linear(source, f"{name}.{part}_proj", x).unflatten(-1, (-1, model.head_dim)).transpose(1, 2) for part in "qkv"
    )
    if model.qk_norm:
        query, key = _norm(source, f"{name}.q_norm", query), _norm(source, f"{name}.k_norm", key)
    if model.position_embedding == "rope":
        query, key = _rotate(source, query), _rotate(source, key)
    key, value = (t.repeat_interleave(model.num_attention_heads // groups, dim=1) for t in (key, value))
    scores = query @ key.transpose(-1, -2) / math.sqrt(model.head_dim)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    context = scores.masked_fill(later, -torch.inf).softmax(-1) @ value
    return _linear(source, f"{name}.o_proj", context.transpose(1, 2).flatten(2))


def _rotate(source: Source, x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding by halves of [b, heads, s, d]."""
    frequencies = _frequencies(source)
    angles = torch.arange(x.size(-2), dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _frequencies(source: Source) -> torch.Tensor:
    """Radians a token, [d / 2]; LLaMA 3 stretches those whose wave is long against the 8192 tokens it began with."""
    model = source.model
    frequencies = model.rotary_base ** (-torch.arange(0, model.head_dim, 2, dtype=torch.float32) / model.head_dim)
    if model.rotary_scaling_factor is None:
        return frequencies
    turns = 8192 * frequencies / (2 * math.pi)
    kept = ((turns - 1) / (4 - 1)).clamp(0, 1)  # 0 up to one turn, 1 from four turns on
    return frequencies * (kept + (1 - kept) / model.rotary_scaling_factor)
