"""Arithmetic of a model: floating-point operations, by the shapes of its matrices."""

from __future__ import annotations

from megatron_compress.training.model_config import ModelConfig


def layer_flops(model: ModelConfig, sequences: int, length: int) -> float:
    """Forward, of one layer: 2·b·s·W + 4·b·s²·n·d.

    W = h·d·(n + 2k) + n·d·h + m·h·f counts the weights of query, key and value (n heads and k key/value heads of width
    d), of the projection, and of m = 3 (SwiGLU) or 2 matrices of the MLP; the second term is scores and their sum.
    """
    h, n = model.hidden_size, model.num_attention_heads
    d, k = model.head_dim or h // n, model.num_query_groups or n
    weights = h * d * (n + 2 * k) + n * d * h + (3 if model.activation == "swiglu" else 2) * h * model.ffn_hidden_size
    return 2.0 * sequences * length * weights + 4.0 * sequences * length**2 * n * d


def head_flops(model: ModelConfig, sequences: int, length: int) -> float:
    """Forward, of the vocabulary head: 2·b·s·h·V."""
    return 2.0 * sequences * length * model.hidden_size * model.vocab_size


def stage_flops(model: ModelConfig, sequences: int, length: int, tensor: int, pipeline: int) -> list[float]:
    """Of each stage's ranks, forward and backward of a microbatch: 3 · (layers + head on the last stage) / T."""
    stages = [3 * model.num_layers / pipeline * layer_flops(model, sequences, length) / tensor] * pipeline
    stages[-1] += 3 * head_flops(model, sequences, length) / tensor
    return stages
