"""Attention by torch's scaled_dot_product_attention, in the place of megatron-core's unfused softmax."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer import MegatronModule, TransformerConfig


class SdpaAttention(MegatronModule):
    """Core attention of a local layer spec: causal, no mask argument, grouped queries without repeating keys.

    On GPUs torch takes its flash kernel for bf16; memory grows with the sequence's length, not with its square.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, attn_mask_type, attention_type: str, **_):
        super().__init__(config=config)
        self._scale = config.softmax_scale  # None: 1 / sqrt(head dim)

    def forward(self, query, key, value, attention_mask, packed_seq_params=None, **_) -> torch.Tensor:
        """[s, b, heads, d] and [s, b, groups, d] twice -> [s, b, heads x d]."""
        if attention_mask is not None or packed_seq_params is not None:
            raise ValueError("only plain causal attention is computed here: no mask, no packed sequences")
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        dropout = self.config.attention_dropout if self.training else 0.0
        context = F.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=dropout,
            is_causal=True,
            scale=self._scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        return context.permute(2, 0, 1, 3).flatten(2).contiguous()
