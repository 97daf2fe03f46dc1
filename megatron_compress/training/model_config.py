"""Typed YAML of a model's shape, as in `configs/models/`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megatron_compress.strict_model import StrictModel


class ModelConfig(StrictModel):
    """A decoder-only transformer: GPT-2-like, or LLaMA-like and Qwen-like, by its choices."""

    vocab_size: int = Field(default=256, ge=2, description="token ids are below it; 256 for bytes")
    num_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    ffn_hidden_size: int = Field(ge=1, description="width of the MLP; SwiGLU has two projections of this width")
    num_attention_heads: int = Field(ge=1)
    num_query_groups: int | None = Field(default=None, ge=1, description="key/value heads; None: one per head")
    head_dim: int | None = Field(default=None, ge=2, description="None: hidden_size / num_attention_heads")
    normalization: Literal["LayerNorm", "RMSNorm"]
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = Field(description="gelu_tanh is GPT-2's approximation")
    position_embedding: Literal["learned", "rope"]
    max_positions: int | None = Field(default=None, ge=2, description="of learned ones; None: data.sequence_length")
    linear_bias: bool
    qkv_bias: bool = Field(default=False, description="a bias in query, key and value alone, where linear_bias is not")
    qk_norm: bool = Field(default=False, description="normalize each head's queries and keys")
    tied_embeddings: bool
    rotary_base: int = Field(default=10000, ge=1)
    rotary_scaling_factor: float | None = Field(default=None, gt=0, description="LLaMA-3's stretch of low frequencies")
    norm_epsilon: float = Field(default=1e-5, gt=0)
    init_std: float = Field(default=0.02, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelConfig:
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of {self.num_attention_heads} heads")
        if self.num_query_groups and self.num_attention_heads % self.num_query_groups:
            raise ValueError(f"num_query_groups {self.num_query_groups} does not divide {self.num_attention_heads}")
        return self
