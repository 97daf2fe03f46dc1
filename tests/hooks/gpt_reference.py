"""The same GPT in one process, without Megatron: every rank's share of each layer in turn, and quantize-dequantize at
the places where messages travel (TP=2, any number of stages, no sequence parallelism).

It shares no code with the hooks, and with the package only the compressors.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from megatron_compress.config import CompressionConfig
from tests.hooks.reference import reduced, transmitted

HEADS = 4

Weights = dict[str, torch.Tensor]


class _Reduce(torch.autograd.Function):
    """Behind row-parallel layers: the sum of what the ranks' shares were quantized to."""

    @staticmethod
    def forward(ctx, compressor, *shares):
        return reduced(shares, compressor)

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient, gradient


class _Copy(torch.autograd.Function):
    """Before column-parallel layers: the same input for each rank; backward, the sum of their quantized gradients."""

    @staticmethod
    def forward(ctx, compressor, x):
        ctx.compressor = compressor
        return x.clone(), x.clone()

    @staticmethod
    def backward(ctx, *gradients):
        return None, reduced(gradients, ctx.compressor)


class _Boundary(torch.autograd.Function):
    """Between two stages."""

    @staticmethod
    def forward(ctx, forward, backward, x):
        ctx.compressor = backward
        return transmitted(x, forward, sample_dim=1)

    @staticmethod
    def backward(ctx, gradient):
        return None, None, transmitted(gradient, ctx.compressor, sample_dim=1)


class Reference:
    """A GPT with LayerNorm, rotary positions, SwiGLU and no biases.

    Args:
        stages: for each pipeline stage, the weights of its two tensor-parallel ranks, by Megatron's names.
        config: compression, of all sites but embedding and head; None: none.
    """

    def __init__(self, stages: list[tuple[Weights, Weights]], config: CompressionConfig | None):
        self._stages = stages
        rules = dict(((axis, direction), rule) for axis, direction, rule in (config.rules() if config else ()))
        self._compressors = {key: rule and rule.compressor for key, rule in rules.items()}

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean loss over a microbatch, int64 [b, s + 1]."""
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        x = self._embed(inputs).transpose(0, 1).contiguous()
        for stage, ranks in enumerate(self._stages):
            if stage:
                axis = [self._compressors.get(("pipeline", d)) for d in ("forward", "backward")]
                x = _Boundary.apply(*axis, x)
            for layer in range(sum(name.endswith("linear_qkv.weight") for name in ranks[0])):
                x = self._layer(x, [self._of_layer(weights, layer) for weights in ranks])
        weights = self._stages[-1]
        x = _norm(x, weights[0], "decoder.final_layernorm")
        shares = _Copy.apply(None, x)  # the head is exempt
        logits = torch.cat([F.linear(x, w["output_layer.weight"]) for x, w in zip(shares, weights, strict=True)], -1)
        return F.cross_entropy(logits.flatten(0, 1), labels.t().flatten())

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, torch.cat([w["embedding.word_embeddings.weight"] for w in self._stages[0]]))

    @staticmethod
    def _of_layer(weights: Weights, layer: int) -> Weights:
        prefix = f"decoder.layers.{layer}."
        return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}

    def _layer(self, x: torch.Tensor, ranks: list[Weights]) -> torch.Tensor:
        for norm, share in (("input_layernorm", _attention), ("pre_mlp_layernorm", _mlp)):
            inputs = _Copy.apply(self._compressors.get(("tensor", "backward")), _norm(x, ranks[0], norm))
            shares = [share(part, weights) for part, weights in zip(inputs, ranks, strict=True)]
            x = x + _Reduce.apply(self._compressors.get(("tensor", "forward")), *shares)
        return x


def _norm(x: torch.Tensor, weights: Weights, name: str) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)


def _attention(x: torch.Tensor, weights: Weights) -> torch.Tensor:
    """One rank's heads, [s, b, h] → [s, b, h]: causal attention and this rank's share of the projection."""
    s, b, hidden = x.shape
    size = hidden // HEADS
    mixed = F.linear(x, weights["self_attention.linear_qkv.weight"]).view(s, b, -1, 3 * size)
    query, key, value = (part.permute(1, 2, 0, 3) for part in mixed.split(size, dim=-1))  # [b, heads, s, size]
    scores = _rotate(query) @ _rotate(key).transpose(-1, -2) / math.sqrt(size)
    scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), -10000.0)
    context = scores.softmax(-1) @ value
    return F.linear(context.permute(2, 0, 1, 3).reshape(s, b, -1), weights["self_attention.linear_proj.weight"])


def _rotate(x: torch.Tensor) -> torch.Tensor:
    s, size = x.shape[-2:]
    frequencies = 10000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(s).float(), frequencies).repeat(1, 2)
    half = torch.cat([-x[..., size // 2 :], x[..., : size // 2]], dim=-1)
    return x * angles.cos() + half * angles.sin()


def _mlp(x: torch.Tensor, weights: Weights) -> torch.Tensor:
    gate, up = F.linear(x, weights["mlp.linear_fc1.weight"]).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, weights["mlp.linear_fc2.weight"])
