"""From a source's weights to those of megatron-core's GPTModel, with heads added where ranks must share them evenly."""

from __future__ import annotations

import torch

from megatron_compress.training.importing.source import Source
from megatron_compress.training.model_config import ModelConfig


def padded(model: ModelConfig, tensor_parallel_size: int) -> ModelConfig:
    """The model with its key/value heads, and queries with them, filled up to a multiple of the ranks.

    What is added has zero weights: the output stays what it was, and no gradient reaches them (values are zero, and so
    are the rows of the output projection that would carry a gradient back).
    """
    groups = model.num_query_groups or model.num_attention_heads
    per_group = model.num_attention_heads // groups
    groups = -(-groups // tensor_parallel_size) * tensor_parallel_size
    if groups * per_group == model.num_attention_heads:
        return model
    head_dim = model.head_dim or model.hidden_size // model.num_attention_heads
    update = {"num_query_groups": groups, "num_attention_heads": groups * per_group, "head_dim": head_dim}
    return model.model_copy(update=update)


def megatron_weights(source: Source, model: ModelConfig) -> dict[str, torch.Tensor]:
    """Names and tensors of a whole GPTModel (one rank) of shape `model`: the source's, or `padded`.

    Raises:
        ConfigError: the source lacks a weight.
    """
    weights = {"embedding.word_embeddings.weight": source.read("embed_tokens.weight")}
    if model.position_embedding == "learned":
        weights["embedding.position_embeddings.weight"] = source.read("embed_positions.weight")
    for i in range(model.num_layers):
        weights |= _layer(source, model, f"layers.{i}.", f"decoder.layers.{i}.")
    weights |= _norm(source, model, "norm", "decoder.final_layernorm")
    if not model.tied_embeddings:
        weights["output_layer.weight"] = source.read("lm_head.weight")
    return weights


def _layer(source: Source, model: ModelConfig, name: str, to: str) -> dict[str, torch.Tensor]:
    weights = _norm(source, model, f"{name}input_layernorm", f"{to}input_layernorm")
    weights |= _norm(source, model, f"{name}post_attention_layernorm", f"{to}pre_mlp_layernorm")
    attention, mlp = f"{to}self_attention", f"{to}mlp"
    for kind in _kinds(model.linear_bias or model.qkv_bias):
        weights[f"{attention}.linear_qkv.{kind}"] = _qkv(source, model, f"{name}self_attn", kind)
    for part in ("q", "k") if model.qk_norm else ():
        weights[f"{attention}.{part}_layernorm.weight"] = source.read(f"{name}self_attn.{part}_norm.weight")
    projection = source.read(f"{name}self_attn.o_proj.weight")
    missing = model.num_attention_heads * model.head_dim - projection.size(1)
    weights[f"{attention}.linear_proj.weight"] = torch.nn.functional.pad(projection, (0, missing))
    first = ("gate_proj", "up_proj") if model.activation == "swiglu" else ("up_proj",)
    for kind in _kinds(model.linear_bias):
        weights[f"{mlp}.linear_fc1.{kind}"] = torch.cat([source.read(f"{name}mlp.{part}.{kind}") for part in first])
        weights[f"{mlp}.linear_fc2.{kind}"] = source.read(f"{name}mlp.down_proj.{kind}")
    if model.linear_bias:
        weights[f"{attention}.linear_proj.bias"] = source.read(f"{name}self_attn.o_proj.bias")
    return weights


def _qkv(source: Source, model: ModelConfig, name: str, kind: str) -> torch.Tensor:
    """Megatron keeps, group after group, the group's queries, then its key, then its value."""
    groups = model.num_query_groups or model.num_attention_heads
    parts = []
    for part, heads in (("q", model.num_attention_heads // groups), ("k", 1), ("v", 1)):
        weight = source.read(f"{name}.{part}_proj.{kind}")
        weight = weight.view(-1, heads * model.head_dim, *weight.shape[1:])
        zeros = weight.new_zeros(groups - weight.size(0), *weight.shape[1:])
        parts.append(torch.cat([weight, zeros]))
    return torch.cat(parts, dim=1).flatten(0, 1)


def _norm(source: Source, model: ModelConfig, name: str, to: str) -> dict[str, torch.Tensor]:
    return {f"{to}.{kind}": source.read(f"{name}.{kind}") for kind in _kinds(model.normalization == "LayerNorm")}


def _kinds(bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if bias else ("weight",)
